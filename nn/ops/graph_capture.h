// Work that a device does again with one call.
#pragma once

namespace lockstep::nn {

/// What Backend::record() has taken down: the kernels, their order and their addresses. What they read may change from
/// run to run, what was decided on the host while recording does not. The backend, and all memory that the work
/// touches, must outlive it.
class CapturedGraph {
 public:
  virtual ~CapturedGraph() = default;
  /// Gives the work to the device, after what has been given before.
  virtual void run() = 0;
};

}  // namespace lockstep::nn
