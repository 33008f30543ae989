#include "comm/mpi/mpi_group.h"

#include "base/error.h"
#include "comm/mpi/inline_group.h"
#include "comm/mpi/mpi_store.h"
#include "comm/mpi/session.h"
#include "comm/mpi/thread_group.h"

namespace lockstep::comm {

std::unique_ptr<Store> make_mpi_store(const World& world, Deadline deadline) {
  return std::make_unique<MpiStore>(world, deadline);
}

std::unique_ptr<ProcessGroup> make_mpi_group(std::unique_ptr<Store> store, Clock::duration timeout) {
  auto* const mpi = dynamic_cast<MpiStore*>(store.get());
  LOCKSTEP_ASSERT(mpi != nullptr, "a group over MPI on another store");
  static_cast<void>(store.release());
  return std::make_unique<InlineGroup>(std::unique_ptr<MpiStore>(mpi), timeout, Tuning{});
}

std::unique_ptr<ProcessGroup> make_mpi_group(const World& world, const GroupOptions& options) {
  const auto timeout = duration_of(options.timeout_seconds);
  using Progress = GroupOptions::Progress;
  const bool threaded = options.progress == Progress::kThread ||
                        (options.progress == Progress::kAuto && options.spare_core && Session::allows_threads());
  if (threaded) return std::make_unique<ThreadGroup>(world, timeout, Tuning{});
  return make_mpi_group(make_mpi_store(world, Deadline::after(timeout)), timeout);
}

}  // namespace lockstep::comm
