// What checkpoints say of themselves: what is read is written so that it is read the same.
#include "tests/fuzz/fuzz.h"
#include "trainer/checkpoint/card.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace lockstep::trainer;
  return lockstep::fuzz::parse([&] {
    const auto card = decode_checkpoint_card(std::string(lockstep::fuzz::text_of(data, size)), "input");
    if (decode_checkpoint_card(encode(card), "input") != card) std::abort();
  });
}
