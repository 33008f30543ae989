// What the operations of a GPU take, for Backend::profile().
#pragma once

#include <deque>
#include <exception>
#include <initializer_list>
#include <string>
#include <vector>

#include "base/cuda/runtime.h"
#include "lockstep/nn/ops/backend.h"
#include "nn/ops/cuda/context.h"

namespace lockstep::nn::cuda {

/// Operations with an event of CUDA's before and after each. While they are profiled they cannot be captured.
class OpProfile {
 public:
  void begin(const char* what, double bytes, double flops, cudaStream_t stream);
  /// Also while an exception leaves the operation. What goes wrong here, read() throws.
  void end(cudaStream_t stream) noexcept;
  /// By operation, those that took longest first. Waits until all of it is done.
  std::vector<OperationCost> read() const;

 private:
  struct Entry {
    const char* what;
    double bytes, flops;
    CudaEvent from{CudaEvent::Timing::kOn}, to{CudaEvent::Timing::kOn};
  };
  std::deque<Entry> entries_;
  int depth_ = 0;  // an operation that calls others is one
  std::exception_ptr error_;
};

/// Profiles an operation for as long as this lives; costs a comparison where nobody profiles. `tensors` are those that
/// it has to read or write, undefined ones left out; `what` must live on.
class OpProfileScope {
 public:
  OpProfileScope(Context& context, const char* what, std::initializer_list<const Tensor*> tensors, double flops = 0)
      : context_(context) {
    if (context_.profile != nullptr) [[unlikely]]
      begin(what, tensors, flops);
  }
  /// The same, where not tensors say how many bytes.
  OpProfileScope(Context& context, const char* what, double bytes) : context_(context) {
    if (context_.profile != nullptr) [[unlikely]]
      context_.profile->begin(what, bytes, 0, native(context_.stream));
  }
  ~OpProfileScope() {
    if (context_.profile != nullptr) [[unlikely]]
      context_.profile->end(native(context_.stream));
  }
  OpProfileScope(const OpProfileScope&) = delete;
  OpProfileScope& operator=(const OpProfileScope&) = delete;

 private:
  void begin(const char* what, std::initializer_list<const Tensor*> tensors, double flops);
  Context& context_;
};

}  // namespace lockstep::nn::cuda
