// Which backend joins the processes of a job.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lockstep/comm/process_group.h"
#include "lockstep/comm/world.h"

namespace lockstep::comm {

inline constexpr const char* kAutoBackend = "auto";
inline constexpr double kMostTimeoutSeconds = 1e6;

struct GroupOptions {
  /// What ProcessGroup::timeout() returns: how long a rank waits for the others. Above 0, up to kMostTimeoutSeconds.
  double timeout_seconds = 300;
  /// How long a wait lasts before a line says who is waited for (comm/wait.h). From 0, which is never, up. Of the
  /// process: what the last group was made with holds for all of them.
  double stall_warning_seconds = 10;

  /// Name of the backend that moves the data (comm/backends.h). By default memory inside a host, sockets between hosts,
  /// and MPI only if one of them is not available. A backend for GPUs (make_device_group()) chooses nothing here.
  std::string backend = kAutoBackend;

  /// Which thread advances operations while the caller computes. Ranks that only share memory are always inline, so
  /// kThread without a named backend excludes shared memory. On busy cores a second thread only takes time from the
  /// first.
  enum class Progress {
    kAuto,    // kThread where a core is spare, else kInline
    kThread,  // a thread of the group
    kInline,  // the caller, whenever it issues, polls or waits
  };
  Progress progress = Progress::kAuto;
  /// Whether this process has a core that its computation leaves idle (Binding::spare_core).
  bool spare_core = false;
  bool wants_thread() const { return progress == Progress::kThread || (progress == Progress::kAuto && spare_core); }

  /// Encrypts everything that ranks send to other hosts, the store of rank 0 included (Note [Encryption]). All ranks
  /// ask for it, or none. Ranks that join over TCP have a secret (World::rendezvous). A backend that does not encrypt
  /// (BackendFamily::encrypts) is refused, and is no way out where hosts cannot connect. Traffic inside a host never
  /// leaves it.
  bool encrypt = false;
};

/// Joins the ranks that `world` speaks of; collective, blocking. A world of one is a SelfGroup and never starts MPI.
/// Where MPI does not join the ranks (World::mpi_joins), or need not (World::joins_over_tcp), they join over TCP at
/// world.rendezvous, and start MPI only if it is asked for. They find out themselves which of them share a host
/// (Peers).
///
/// Throws UsageError for an unknown backend; when MPI and the environment disagree on rank or size; when
/// GroupOptions::encrypt is impossible or differs between ranks; for a LOCKSTEP_SOCKET_IFNAME that names no interface;
/// and on rank 0 when ranks without MPI ask for an option of MPI (PeerError on the others). Throws DeviceError when MPI
/// is to join the ranks and this build has none; and when ranks can neither share memory nor connect, and MPI cannot
/// replace that (PeerError on ranks that could). Also throws as make_tcp_store(). Call set_log_identity() before.
///
/// The program may use MPI itself: where it has called MPI_Init, that one is used, and stays when the group has ended;
/// MPI_Finalize comes after shutdown(). Otherwise MPI runs as long as a group needs it, and cannot start again: a group
/// that needs it later is a UsageError. Ranks may make several groups, one after the other or at a time (Note [Several
/// groups]), in the same order on all of them.
std::unique_ptr<ProcessGroup> make_group(const World& world, const GroupOptions& options = {});

/// The ranks that the environment speaks of (discover_world()): those of `lockstep launch`, mpirun, srun or torchrun.
std::unique_ptr<ProcessGroup> make_group(const GroupOptions& options = {});

/// Every operation is complete when it has been issued, and changes nothing: the reduction of one contribution is
/// that contribution.
class SelfGroup final : public ProcessGroup {
 public:
  explicit SelfGroup(Clock::duration timeout) : ProcessGroup(0, 1, timeout) {}

  std::string name() const override { return "self"; }
  void poll() override {}
  void shutdown() override {}

 protected:
  std::unique_ptr<Arena> map_arena(std::size_t bytes) override;
  std::vector<std::string> exchange(const std::string& mine) override { return {mine}; }
  bool has_let_go(std::uint64_t) const noexcept override { return true; }
  void start(const Op&) override {}
  bool is_done(std::uint64_t) override { return true; }
  void wait_done(std::uint64_t, Deadline) override {}
};

}  // namespace lockstep::comm
