// In place of probe.cpp where the build has no CUDA.
#include "base/cuda/library.h"

namespace lockstep {

const CudaProbe& probe_cuda() {
  static const CudaProbe probe = [] {
    CudaProbe made;
    made.problem = "this build computes on the CPU only";
    made.remedy = "use --device cpu, or build with the CUDA Toolkit, cuDNN and NCCL installed";
    return made;
  }();
  return probe;
}

std::string current_cuda_bus_id() { return {}; }

}  // namespace lockstep
