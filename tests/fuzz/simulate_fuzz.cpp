// Profiles of steps, and measured times of collectives: what is read as a profile is written and read as the same.
#include "simulate/collective_cost.h"
#include "simulate/step_profile.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto bytes = lockstep::fuzz::text_of(data, size);
  lockstep::fuzz::parse([&] {
    const std::string text = lockstep::simulate::text_of(lockstep::simulate::parse_profile(bytes, "input"));
    if (lockstep::simulate::text_of(lockstep::simulate::parse_profile(text, "again")) != text) std::abort();
  });
  return lockstep::fuzz::parse([&] { lockstep::simulate::parse_measured(bytes, "input", 1); });
}
