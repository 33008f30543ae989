// When operations ran, by the GPU's own clock.
#pragma once

#include <cstdint>
#include <vector>

#include "base/cuda/runtime.h"
#include "comm/nccl/nccl_group.h"
#include "comm/op.h"

namespace lockstep::comm {

/// Two events round every operation while it is on; they are kept and used again.
class OpTimer {
 public:
  /// Turning it on forgets what was timed before.
  void turn(bool on);
  void begin(const Op& op, cudaStream_t stream);
  void end(cudaStream_t stream);
  /// Blocks until the last of them is done.
  std::vector<OpTime> times(const CudaEvent& origin) const;

 private:
  struct Timed {
    Op op;
    CudaEvent begin{CudaEvent::Timing::kOn};
    CudaEvent end{CudaEvent::Timing::kOn};
  };
  bool on_ = false;
  std::size_t used_ = 0;
  std::vector<Timed> timed_;
};

}  // namespace lockstep::comm
