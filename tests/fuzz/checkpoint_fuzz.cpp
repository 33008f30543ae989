// Manifests of checkpoints, and receipts of the ranks' parts: input that is read is written so that it is read the
// same.
#include "checkpoint/folder.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace lockstep::checkpoint;
  return lockstep::fuzz::parse([&] {
    const std::string text(lockstep::fuzz::text_of(data, size));
    if (const auto file = decode_receipt(text); file && decode_receipt(encode_receipt(*file)) != file) std::abort();
    const auto manifest = decode_checkpoint_manifest(text, "input");
    if (decode_checkpoint_manifest(encode(manifest), "input") != manifest) std::abort();
  });
}
