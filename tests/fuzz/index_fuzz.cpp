// An index of safetensors files, beside one of them.
#include <filesystem>
#include <fstream>

#include "lockstep/nn/io/weights.h"
#include "tests/fuzz/fuzz.h"
#include "tests/support/temporary_directory.h"

namespace {

namespace fs = std::filesystem;

struct Directory {
  Directory() {
    lockstep::nn::write_safetensors(path / "a.safetensors",
                                    {{"w", lockstep::DType::kU8, {2}, {std::byte{1}, std::byte{2}}}});
  }
  lockstep::testing::TemporaryDirectory temporary;
  const fs::path path = temporary.path();
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const Directory kDirectory;
  const std::string path = kDirectory.path / "model.safetensors.index.json";
  std::ofstream(path, std::ios::binary) << lockstep::fuzz::text_of(data, size);
  return lockstep::fuzz::parse([&] { lockstep::nn::read_weights(path); });
}
