#include "comm/make_group.h"

#include "base/error.h"
#include "comm/mpi/mpi_group.h"
#include "comm/self_group.h"

namespace lockstep::comm {

std::unique_ptr<ProcessGroup> make_group(const World& world, const GroupOptions& options) {
  check_usage(options.timeout_seconds > 0, "the timeout must be above 0 seconds", "--timeout-seconds 300");
  if (world.size == 1)
    return std::make_unique<SelfGroup>(
        std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(options.timeout_seconds)));
  return make_mpi_group(world, options);
}

}  // namespace lockstep::comm
