// Files of bench scaling: what is read is reported.
#include "bench/scaling.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace lockstep::bench;
  return lockstep::fuzz::parse([&] {
    const ScalingFile file = parse_scaling(lockstep::fuzz::text_of(data, size), "input");
    if (file.whole_bytes > size || (file.whole_bytes == 0 && !file.results.empty())) std::abort();
    for (const auto& [one, rounds] : file.results)
      if (one.ranks < 1 || rounds.empty() || rounds.begin()->first < 1) std::abort();
  });
}
