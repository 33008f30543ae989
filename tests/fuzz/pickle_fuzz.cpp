// What is within a zip archive, whose checksums would keep a fuzzer out.
#include "nn/io/unpickler.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  return lockstep::fuzz::parse([&] {
    std::size_t at = 0;
    lockstep::nn::unpickle(std::as_bytes(std::span(data, size)), at, "input");
    if (at > size) std::abort();
  });
}
