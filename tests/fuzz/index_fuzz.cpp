// An index of safetensors files, beside one of them.
#include <filesystem>
#include <fstream>

#include "nn/io/weights.h"
#include "tests/fuzz/fuzz.h"

namespace {

namespace fs = std::filesystem;

struct Directory {
  Directory() {
    std::string pattern = fs::temp_directory_path() / "lockstep-fuzz-XXXXXX";
    if (::mkdtemp(pattern.data()) == nullptr) std::abort();
    path = pattern;
    lockstep::nn::write_safetensors(path / "a.safetensors",
                                    {{"w", lockstep::DType::kU8, {2}, {std::byte{1}, std::byte{2}}}});
  }
  ~Directory() {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
  fs::path path;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const Directory kDirectory;
  const std::string path = kDirectory.path / "model.safetensors.index.json";
  std::ofstream(path, std::ios::binary) << lockstep::fuzz::text_of(data, size);
  return lockstep::fuzz::parse([&] { lockstep::nn::read_weights(path); });
}
