// Flight records, which any process may have written, or cut, or be writing now: what is read is shown.
#include <cmath>
#include <limits>

#include "base/error.h"
#include "base/flight_layout.h"
#include "base/flight_snapshot.h"
#include "launcher/inspect.h"
#include "tests/fuzz/fuzz.h"

namespace {

void show(const std::string& bytes) {
  try {
    const auto snapshot = lockstep::flight::decode(bytes, "F");
    if (snapshot.operations.size() > lockstep::flight::kOperations || snapshot.rank >= snapshot.world_size)
      std::abort();
    for (const int rank : snapshot.missing)
      if (rank < 0 || rank >= snapshot.world_size) std::abort();
    for (const std::int64_t at : {std::int64_t{0}, std::numeric_limits<std::int64_t>::min()})
      static_cast<void>(lockstep::flight::describe_state(snapshot, at));
    static_cast<void>(lockstep::launcher::text_of(snapshot, 20));
    static_cast<void>(lockstep::launcher::json_of(snapshot, lockstep::flight::kOperations));
  } catch (const lockstep::IoError&) {
    return;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::string bytes(lockstep::fuzz::text_of(data, size));
  show(bytes);
  // Short inputs are the beginning of a whole one.
  if (bytes.size() >= lockstep::flight::kFileBytes) return 0;
  bytes.resize(lockstep::flight::kFileBytes);
  show(bytes);
  return 0;
}
