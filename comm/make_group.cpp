#include "comm/make_group.h"

#include "base/error.h"
#include "base/log.h"
#include "comm/mpi/mpi_group.h"
#include "comm/self_group.h"
#include "comm/shm/shm_group.h"

namespace lockstep::comm {
namespace {

using Backend = GroupOptions::Backend;

std::unique_ptr<ProcessGroup> make_shared_group(const World& world, GroupOptions options) {
  options.progress = GroupOptions::Progress::kInline;
  auto bootstrap = make_mpi_group(world, options);
  if (options.backend == Backend::kShm) return make_shm_group(std::move(bootstrap));
  const auto decline = [&](const Error& error) {
    if (world.rank == 0) log_warn("{}: data goes through MPI, which is slower", error.what());
  };
  try {
    return make_shm_group(std::move(bootstrap));
  } catch (const DeviceError& error) {
    decline(error);
  } catch (const PeerError& error) {
    decline(error);
  }
  return bootstrap;
}

}  // namespace

std::unique_ptr<ProcessGroup> make_group(const World& world, const GroupOptions& options) {
  check_usage(options.timeout_seconds > 0, "the timeout must be above 0 seconds", "--timeout-seconds 300");
  if (world.size == 1)
    return std::make_unique<SelfGroup>(
        std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(options.timeout_seconds)));
  const bool may_share = world.local_size == world.size && options.progress != GroupOptions::Progress::kThread;
  if (options.backend == Backend::kShm || (options.backend == Backend::kAuto && may_share))
    return make_shared_group(world, options);
  return make_mpi_group(world, options);
}

}  // namespace lockstep::comm
