#include "comm/nccl/op_timer.h"

namespace lockstep::comm {

void OpTimer::turn(bool on) {
  on_ = on;
  if (on) used_ = 0;
}

void OpTimer::begin(const Op& op, cudaStream_t stream) {
  if (!on_) return;
  if (used_ == timed_.size()) timed_.emplace_back();
  timed_[used_].op = op;
  timed_[used_].begin.record(stream);
}

void OpTimer::end(cudaStream_t stream) {
  if (on_) timed_[used_++].end.record(stream);
}

std::vector<OpTime> OpTimer::times(const CudaEvent& origin) const {
  std::vector<OpTime> times;
  if (used_ > 0) timed_[used_ - 1].end.synchronize();
  for (std::size_t i = 0; i < used_; ++i) {
    const Timed& timed = timed_[i];
    times.push_back({timed.op.sequence, timed.op.kind, timed.op.bytes(),
                     CudaEvent::ms_between(origin, timed.begin), CudaEvent::ms_between(origin, timed.end)});
  }
  return times;
}

}  // namespace lockstep::comm
