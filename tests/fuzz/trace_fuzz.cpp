// Traces, which other programs may have rewritten: what is read is summed up.
#include "report/trace.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace lockstep::report;
  return lockstep::fuzz::parse([&] {
    const Trace trace = parse_trace(lockstep::fuzz::text_of(data, size), "t.json");
    static_cast<void>(mean_phases(trace));
    for (const TracedStep* step : typical_step(trace))
      if (!(overlap_of(*step).hidden_ms >= 0)) std::abort();
  });
}
