// What weights files say of their model: what is read is written so that it is read the same.
#include "tests/fuzz/fuzz.h"
#include "trainer/model_card.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace lockstep::trainer;
  return lockstep::fuzz::parse([&] {
    const auto card = card_among({{"lockstep", std::string(lockstep::fuzz::text_of(data, size))}}, "input");
    const auto written = metadata_of(*card);
    if (metadata_of(*card_among(written, "input")) != written) std::abort();
  });
}
