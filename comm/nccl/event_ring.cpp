#include "comm/nccl/event_ring.h"

#include "base/error.h"

namespace lockstep::comm {

void EventRing::record(std::uint64_t sequence, cudaStream_t stream) {
  Entry& entry = events_[recorded_ % kEvents];
  entry.event.record(stream);
  entry.sequence = sequence;
  ++recorded_;
}

void EventRing::make_wait(std::uint64_t sequence, cudaStream_t stream) const {
  const Entry* earliest = nullptr;
  for (std::uint64_t back = 1; back <= recorded_ && back <= kEvents; ++back) {
    const Entry& entry = events_[(recorded_ - back) % kEvents];
    if (entry.sequence < sequence) break;
    earliest = &entry;
  }
  LOCKSTEP_ASSERT(earliest != nullptr, "a stream waits for operation #{}, which was not issued", sequence);
  earliest->event.make_wait(stream);
}

}  // namespace lockstep::comm
