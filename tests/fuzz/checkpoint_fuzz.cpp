// What checkpoints say of themselves: what is read is written so that it is read the same.
#include "checkpoint/manifest.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace lockstep::checkpoint;
  return lockstep::fuzz::parse([&] {
    const auto manifest = decode_checkpoint_manifest(std::string(lockstep::fuzz::text_of(data, size)), "input");
    if (decode_checkpoint_manifest(encode(manifest), "input") != manifest) std::abort();
  });
}
