// Events behind operations, for other streams to wait for.
#pragma once

#include <array>
#include <cstdint>

#include "base/cuda/runtime.h"

namespace lockstep::comm {

/// Operations complete in order: whoever waits for one may as well wait for a later one. So the last few events do for
/// all operations, and one event may stand for many.
class EventRing {
 public:
  /// All operations up to `sequence`, which is above that of the last call, are done where `stream` is now.
  void record(std::uint64_t sequence, cudaStream_t stream);
  /// Orders `stream` after the operation, which has been recorded.
  void make_wait(std::uint64_t sequence, cudaStream_t stream) const;
  /// Forgets all.
  void clear() { recorded_ = 0; }

 private:
  static constexpr std::size_t kEvents = 64;
  struct Entry {
    CudaEvent event;
    std::uint64_t sequence = 0;
  };
  std::array<Entry, kEvents> events_;
  std::uint64_t recorded_ = 0;  // the last kEvents of them are there
};

}  // namespace lockstep::comm
