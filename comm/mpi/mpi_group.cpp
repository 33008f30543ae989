#include "comm/mpi/mpi_group.h"

#include <mpi.h>

#include <array>

#include "base/error.h"
#include "comm/engine.h"
#include "comm/mpi/engine.h"
#include "comm/mpi/mpi_store.h"
#include "comm/mpi/session.h"

namespace lockstep::comm {

std::unique_ptr<Store> make_mpi_store(const World& world, Deadline deadline, const MpiRanks* over) {
  return std::make_unique<MpiStore>(world, deadline, over != nullptr ? *over : MpiRanks());
}

std::unique_ptr<ProcessGroup> make_mpi_group(std::unique_ptr<Store> store, Clock::duration timeout) {
  const auto* const mpi = dynamic_cast<MpiStore*>(store.get());
  LOCKSTEP_ASSERT(mpi != nullptr, "a group over MPI on another store");
  const int rank = store->rank(), size = store->size();
  auto engine = std::make_unique<MpiEngine>(mpi->session(), Tuning{}, patience_for(timeout));
  return make_inline_group(rank, size, std::move(engine), std::move(store), timeout);
}

std::unique_ptr<ProcessGroup> make_mpi_group(const World& world, const GroupOptions& options, const MpiRanks* over) {
  const auto timeout = duration_of(options.timeout_seconds);
  const bool threaded =
      options.wants_thread() && (options.progress == GroupOptions::Progress::kThread || Session::allows_threads());
  const auto make = [world, timeout, ranks = over != nullptr ? *over : MpiRanks()]() -> std::unique_ptr<Engine> {
    auto session = std::make_unique<Session>(world, Deadline::after(timeout), ranks);
    return std::make_unique<MpiEngine>(std::move(session), Tuning{}, patience_for(timeout));
  };
  if (threaded) return make_thread_group(world.rank, world.size, make, nullptr, timeout);
  return make_mpi_group(make_mpi_store(world, Deadline::after(timeout), over), timeout);
}

bool has_mpi(const Store* store) { return dynamic_cast<const MpiStore*>(store) != nullptr; }

std::unique_ptr<Store> make_mpi_store(const World& world, const Store& store, const std::vector<int>& members,
                                      JobRanks job_ranks, bool oversubscribed, Deadline deadline) {
  const auto* const mpi = dynamic_cast<const MpiStore*>(&store);
  LOCKSTEP_ASSERT(mpi != nullptr, "ranks of another store");
  return std::make_unique<MpiStore>(
      world, deadline, MpiRanks{mpi->session().make_comm_of(members), true, std::move(job_ranks), oversubscribed});
}

bool mpi_available() { return true; }

std::string mpi_library_version() {
  std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> text{};
  int length = 0;
  if (MPI_Get_library_version(text.data(), &length) != MPI_SUCCESS) return "unknown";
  const std::string version(text.data());
  return version.substr(0, version.find_first_of("\n\r"));
}

}  // namespace lockstep::comm
