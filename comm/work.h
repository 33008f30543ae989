// A collective that has been issued and may not be done.
#pragma once

#include <cstdint>

#include "base/deadline.h"
#include "base/device.h"

namespace lockstep::comm {

class ProcessGroup;

/// A ticket: the group and the sequence number of the operation. Copying is free; the group must outlive it.
/// Operations of a group finish in the order in which they were issued, so a ticket needs no state of its own.
class Work {
 public:
  Work() = default;
  Work(ProcessGroup* group, std::uint64_t sequence) : group_(group), sequence_(sequence) {}

  /// Whether the operation is complete; gives a backend without its own thread a chance to go on.
  bool done() const;
  /// Blocks the calling thread until the operation is complete. Throws TimeoutError naming the operation and the
  /// ranks that are missing when `deadline` passes, and what the operation failed with (MpiError, OutOfStepError…).
  void wait_host(Deadline deadline) const;
  /// wait_host with the group's default timeout.
  void wait_host() const;
  /// Orders `stream` after the operation, and returns at once. On the CPU a stream is the calling thread: this blocks
  /// like wait_host().
  void wait(StreamView stream) const;

  std::uint64_t sequence() const { return sequence_; }

 private:
  ProcessGroup* group_ = nullptr;  // nullptr: nothing to wait for
  std::uint64_t sequence_ = 0;
};

}  // namespace lockstep::comm
