// JPEG and PNG files against what Pillow makes of them, and files that lie.
#include "data/image_decoder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zlib.h>

#include <cstdlib>
#include <map>

#include "base/error.h"
#include "tests/data/golden.h"

namespace lockstep::data {
namespace {

using ::testing::HasSubstr;

std::span<const std::byte> bytes_of(const std::string& content) { return std::as_bytes(std::span(content)); }

// "27x18", or what was thrown.
std::string outcome(ImageDecoder& decoder, const std::string& content, int eighths = 8) {
  try {
    const ImageSize size = decoder.open(bytes_of(content));
    const ImageView image = decoder.decode(eighths);
    if (eighths == 8) {
      EXPECT_EQ(image.size, size);
    }
    return fmt::format("{}x{}", image.size.width, image.size.height);
  } catch (const IoError& error) {
    return error.what();
  }
}

TEST(ImageDecoder, MatchesPillow) {
  // Libraries of JPEG differ in the last bit; in two where chroma is interpolated.
  const std::map<std::string, int> tolerances = {{".png", 0}, {".jpg", 2}};
  ImageDecoder decoder;
  int files = 0;
  for (const auto& [name, expected] : golden::facts()["decoded"].items()) {
    SCOPED_TRACE(name);
    const std::string content = golden::read(golden::kDirectory / name);
    ASSERT_EQ(decoder.open(bytes_of(content)), (ImageSize{expected["size"][0], expected["size"][1]}));
    const ImageView image = decoder.decode();
    const auto pixels = expected["pixels"].get<std::vector<int>>();
    int worst = 0;
    for (std::size_t i = 0; i < pixels.size(); ++i)
      worst = std::max(worst, std::abs(pixels[i] - image.pixels[i / 3 * 4 + i % 3]));
    EXPECT_LE(worst, tolerances.at(name.substr(name.size() - 4)));
    ++files;
  }
  EXPECT_EQ(files, 19);
}

TEST(ImageDecoder, JpegsComeSmallerToo) {
  ImageDecoder decoder;
  const std::string content = golden::read(golden::kDirectory / "rgb420.jpg");
  EXPECT_EQ(outcome(decoder, content, 4), "14x9");
  EXPECT_EQ(outcome(decoder, content, 2), "7x5");
  EXPECT_EQ(outcome(decoder, content, 1), "4x3");
  EXPECT_EQ(outcome(decoder, golden::read(golden::kDirectory / "cmyk.jpg"), 4), "14x9");
  EXPECT_EQ(outcome(decoder, golden::read(golden::kDirectory / "rgb.png"), 4), "13x11");
}

// A decoder still works after each of them. The last four bytes of a PNG are a checksum over no data: without them it
// is whole.
TEST(ImageDecoder, FilesCutAtAnyByteAreCorrupt) {
  ImageDecoder decoder;
  for (const char* name : {"rgb420.jpg", "progressive.jpg", "cmyk.jpg", "rgb.png", "interlaced.png", "palette4.png"}) {
    SCOPED_TRACE(name);
    const std::string whole = golden::read(golden::kDirectory / name);
    const std::size_t needed = whole.size() - (std::string_view(name).ends_with(".png") ? 4 : 0);
    for (std::size_t size = 0; size < needed; ++size) {
      const std::string said = outcome(decoder, whole.substr(0, size));
      ASSERT_FALSE(said.empty());
      ASSERT_NE(said[0] >= '0' && said[0] <= '9', true) << said << " from " << size << " of " << whole.size();
    }
    EXPECT_THAT(outcome(decoder, whole), HasSubstr("x"));
  }
}

TEST(ImageDecoder, OtherFilesAreNamedSo) {
  ImageDecoder decoder;
  EXPECT_EQ(outcome(decoder, ""), "it is empty");
  for (const std::string& content : {std::string("GIF89a"), std::string("\xff\xd8"), std::string("<html>"),
                                     std::string("\x89PNG\r\n\n"), std::string(100, '\0')})
    EXPECT_EQ(outcome(decoder, content), "it starts as neither a JPEG nor a PNG file does");
}

// A PNG whose header claims this size, with its own checksum right.
std::string png_of(std::uint32_t width, std::uint32_t height) {
  std::string content = golden::read(golden::kDirectory / "rgb.png");
  const auto put = [&](std::size_t at, std::uint32_t value) {
    for (std::size_t i = 0; i < 4; ++i) content[at + i] = static_cast<char>(value >> (24 - 8 * i));
  };
  put(16, width);
  put(20, height);
  const auto* const header = reinterpret_cast<const Bytef*>(content.data());
  put(29, static_cast<std::uint32_t>(crc32(0, header + 12, 17)));
  return content;
}

std::string jpeg_of(unsigned width, unsigned height) {
  std::string content = golden::read(golden::kDirectory / "rgb420.jpg");
  const std::size_t frame = content.find("\xff\xc0");  // then length (2), precision, height, width
  const unsigned values[] = {height >> 8, height & 255, width >> 8, width & 255};
  for (std::size_t i = 0; i < 4; ++i) content[frame + 5 + i] = static_cast<char>(values[i]);
  return content;
}

TEST(ImageDecoder, BombsAreRefusedByTheirHeaders) {
  ImageDecoder decoder;
  EXPECT_EQ(outcome(decoder, png_of(13, 11)), "13x11");  // the checksums are right
  EXPECT_THAT(outcome(decoder, png_of(100000, 100000)), HasSubstr("178956970 are the most"));
  EXPECT_THAT(outcome(decoder, png_of(2000000000, 1)), HasSubstr("a side of 262144"));
  EXPECT_THAT(outcome(decoder, png_of(13000, 13000)), HasSubstr("bytes cannot hold"));
  EXPECT_EQ(outcome(decoder, png_of(0, 5)), "it has no pixels");
  EXPECT_THAT(outcome(decoder, jpeg_of(65000, 65000)), HasSubstr("178956970 are the most"));
  EXPECT_THAT(outcome(decoder, jpeg_of(13000, 13000)), HasSubstr("bytes cannot hold"));
  EXPECT_EQ(outcome(decoder, jpeg_of(27, 18)), "27x18");
  ImageDecoder strict(100);
  EXPECT_THAT(outcome(strict, jpeg_of(27, 18)), HasSubstr("100 are the most"));
}

TEST(ImageDecoder, FlippedBytesAreErrorsAtWorst) {
  ImageDecoder decoder(1 << 20);
  std::uint32_t random = 1;
  for (const auto& entry : std::filesystem::directory_iterator(golden::kDirectory)) {
    const std::string suffix = entry.path().extension();
    if (suffix != ".jpg" && suffix != ".png") continue;
    const std::string whole = golden::read(entry.path());
    for (int i = 0; i < 200; ++i) {
      std::string content = whole;
      for (int k = 0; k < 1 + i % 4; ++k) {
        random = random * 1664525u + 1013904223u;
        content[(random >> 8) % content.size()] = static_cast<char>(random >> 5);
      }
      EXPECT_FALSE(outcome(decoder, content).empty());
    }
    EXPECT_THAT(outcome(decoder, whole), HasSubstr("x"));
  }
}

}  // namespace
}  // namespace lockstep::data
