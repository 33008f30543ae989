// Metrics files, lines of JSON and tables, which a run may be writing: what is read is shown.
#include "base/text.h"
#include "report/report.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace lockstep::report;
  for (const char* path : {"m.jsonl", "m.csv"}) {
    lockstep::fuzz::parse([&] {
      RunReader whole(path), pieces(path);
      const auto text = lockstep::fuzz::text_of(data, size);
      whole.add(text);
      for (std::size_t at = 0; at < text.size(); at += 3) pieces.add(text.substr(at, 3));
      if (whole.run().size() != pieces.run().size()) std::abort();
      const Run& run = whole.run();
      for (const auto& values : run.steps)
        if (values.size() != run.size()) std::abort();
      for (const auto& line : drawing_of(run, 40, 20))
        if (lockstep::columns_of(line) > 40) std::abort();
      static_cast<void>(page_of(std::vector<RecordedRun>{{.run = run, .name = "m"}}));
    });
  }
  return 0;
}
