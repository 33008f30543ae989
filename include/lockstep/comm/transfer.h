// A send or a receive between two ranks.
#pragma once

#include <memory>
#include <utility>

#include "lockstep/base/deadline.h"
#include "lockstep/base/device.h"

namespace lockstep::comm {

class ProcessGroup;
struct PairTransfer;

/// What ProcessGroup::isend() and irecv() return. Copies are of the same transfer; the group must outlive them, and the
/// thread that uses the group uses them. A default one is done. To drop it cancels nothing.
class Transfer {
 public:
  Transfer() = default;
  Transfer(ProcessGroup* group, std::shared_ptr<PairTransfer> transfer)
      : group_(group), transfer_(std::move(transfer)) {}

  /// Whether a receive's values are there, or a send's memory may be used again; whoever receives it may not have come
  /// to it yet. Gives a group without its own thread a chance to make progress. Throws what the group has failed with.
  bool done() const;
  /// Blocks until it is. Throws TimeoutError naming the transfer and the other rank when `deadline` passes, and what
  /// the transfer failed with (OutOfStepError, DeviceError …); the group is broken then.
  void wait(Deadline deadline) const;
  /// With the group's timeout.
  void wait() const;
  /// Orders `stream` after it, where it is of regions on a GPU; blocks until the transfer has been given to the GPU,
  /// which takes the other rank. On the CPU a stream is the calling thread: this blocks like wait().
  void wait(StreamView stream) const;

 private:
  ProcessGroup* group_ = nullptr;  // nullptr: nothing to wait for
  std::shared_ptr<PairTransfer> transfer_;
};

}  // namespace lockstep::comm
