#include "base/memory.h"

#include <sys/resource.h>

namespace lockstep {

std::int64_t peak_resident_bytes() {
  struct rusage usage = {};
  if (::getrusage(RUSAGE_SELF, &usage) != 0) return 0;
  return static_cast<std::int64_t>(usage.ru_maxrss) * 1024;  // Linux counts in KiB
}

}  // namespace lockstep
