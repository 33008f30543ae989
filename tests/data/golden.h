// What tests/data/golden/make_images.py has written, and the pixels that it started from.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "data/image_decoder.h"
#include "tests/support/json.h"

namespace lockstep::data::golden {

inline const std::filesystem::path kDirectory = std::filesystem::path(LOCKSTEP_SOURCE_DIR) / "tests/data/golden";

inline std::string read(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline const nlohmann::json& facts() {
  static const nlohmann::json kFacts = testing::json_in(read(kDirectory / "golden.json"));
  return kFacts;
}

/// The script's noise().
inline std::uint8_t noise(std::uint32_t x, std::uint32_t y, std::uint32_t c) {
  std::uint32_t v = x * 73856093u ^ y * 19349663u ^ (c + 1) * 83492791u;
  v = (v ^ v >> 13) * 0x5BD1E995u;
  return static_cast<std::uint8_t>(v ^ v >> 15);
}

/// Noise. After each pixel is a byte that nobody may read.
struct Picture {
  explicit Picture(ImageSize of) : size(of) {
    for (std::uint32_t y = 0; y < static_cast<std::uint32_t>(size.height); ++y)
      for (std::uint32_t x = 0; x < static_cast<std::uint32_t>(size.width); ++x) {
        for (std::uint32_t c = 0; c < 3; ++c) bytes.push_back(noise(x, y, c));
        bytes.push_back(255);
      }
  }
  ImageView view() const { return {bytes.data(), size}; }

  ImageSize size;
  std::vector<std::uint8_t> bytes;
};

}  // namespace lockstep::data::golden
