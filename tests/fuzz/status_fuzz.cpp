// Any bytes that a rank's program may send to its wrapper: a status that is read is written to the same bytes.
#include "base/status_report.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto bytes = lockstep::fuzz::text_of(data, size);
  const auto report = lockstep::decode_status(bytes);
  if (report && lockstep::encode_status(*report) != bytes) std::abort();
  if (const auto line = lockstep::parse_status_line(bytes); line && line->step < 0) std::abort();
  return 0;
}
