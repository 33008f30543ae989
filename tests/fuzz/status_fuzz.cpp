// What a rank's program sends its wrapper, which may be anything: what is read is written so that it is the same.
#include "base/status_report.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto bytes = lockstep::fuzz::text_of(data, size);
  const auto report = lockstep::decode_status(bytes);
  if (report && lockstep::encode_status(*report) != bytes) std::abort();
  if (const auto line = lockstep::parse_status_line(bytes); line && line->step < 0) std::abort();
  return 0;
}
