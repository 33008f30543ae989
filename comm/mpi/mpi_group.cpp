#include "comm/mpi/mpi_group.h"

#include "comm/mpi/inline_group.h"
#include "comm/mpi/thread_group.h"

namespace lockstep::comm {

std::unique_ptr<ProcessGroup> make_mpi_group(const World& world, const GroupOptions& options) {
  const auto timeout =
      std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(options.timeout_seconds));
  using Progress = GroupOptions::Progress;
  const bool threaded =
      options.progress == Progress::kThread || (options.progress == Progress::kAuto && options.spare_core);
  if (threaded) return std::make_unique<ThreadGroup>(world, timeout, Tuning{});
  return std::make_unique<InlineGroup>(world, timeout, Tuning{});
}

}  // namespace lockstep::comm
