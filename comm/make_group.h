// Which backend joins the processes of a job.
#pragma once

#include <memory>

#include "comm/process_group.h"
#include "comm/world.h"

namespace lockstep::comm {

struct GroupOptions {
  /// What ProcessGroup::timeout() returns: how long a rank waits for the others.
  double timeout_seconds = 300;

  /// What moves the data.
  enum class Backend {
    kAuto,  // kShm where all ranks are on one host and can share memory, else kMpi
    kMpi,   // messages
    kShm,   // memory that all ranks have mapped; MPI only introduces them to each other
  };
  Backend backend = Backend::kAuto;

  /// Who moves operations on while the caller computes. kShm is always inline; asking for kThread rules it out of
  /// kAuto. On busy cores a second thread only takes time from the first.
  enum class Progress {
    kAuto,    // kThread where a core is spare, else kInline
    kThread,  // a thread of the group
    kInline,  // the caller, whenever it issues, polls or waits
  };
  Progress progress = Progress::kAuto;
  /// Whether this process has a core that its computation leaves idle (Binding::spare_core).
  bool spare_core = false;
};

/// Joins the ranks that `world` speaks of; collective, blocking. A world of one is a SelfGroup and never starts MPI.
/// Throws UsageError when MPI and the environment disagree on rank or size, DeviceError when the world has several
/// ranks and this build no MPI; for kShm also when the ranks cannot share memory (PeerError on those that could). Call
/// it once in a process, and set_log_identity() before.
std::unique_ptr<ProcessGroup> make_group(const World& world, const GroupOptions& options = {});

}  // namespace lockstep::comm
