// Whether this process can compute on GPUs.
#pragma once

#include <string>

namespace lockstep {

struct CudaProbe {
  bool built = false;   // this build can use GPUs at all
  int devices = 0;      // that this process may see
  std::string problem;  // why there are none: "no NVIDIA driver is loaded"; empty where there are
  std::string remedy;
  int runtime_version = 0;  // 13000 is CUDA 13.0; 0 where none was built in
  int driver_version = 0;   // the newest CUDA that the driver can run; 0: no driver
};

/// Asks the driver, once in a process. Makes no context, and never throws.
const CudaProbe& probe_cuda();

/// "13.0" for 13000.
std::string cuda_version_text(int version);

}  // namespace lockstep
