#include "lockstep/nn/io/safetensors.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string path = lockstep::fuzz::file_of(data, size);
  return lockstep::fuzz::parse([&] { lockstep::nn::read_safetensors(path); });
}
