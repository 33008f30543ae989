#include "comm/nccl/marks.h"

#include "base/error.h"

namespace lockstep::comm {

void Marks::record(std::uint64_t sequence, cudaStream_t stream) {
  Mark& mark = marks_[recorded_ % kMarks];
  mark.event.record(stream);
  mark.sequence = sequence;
  ++recorded_;
}

void Marks::make_wait(std::uint64_t sequence, cudaStream_t stream) const {
  const Mark* earliest = nullptr;
  for (std::uint64_t back = 1; back <= recorded_ && back <= kMarks; ++back) {
    const Mark& mark = marks_[(recorded_ - back) % kMarks];
    if (mark.sequence < sequence) break;
    earliest = &mark;
  }
  LOCKSTEP_ASSERT(earliest != nullptr, "a stream waits for operation #{}, which was not issued", sequence);
  earliest->event.make_wait(stream);
}

}  // namespace lockstep::comm
