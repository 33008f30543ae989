// Matrix products of fully connected layers.
#pragma once

#include <cstdint>

#include "nn/tensor/tensor.h"

namespace lockstep::nn {

/// What a kernel does with its result before it hands it over. ReLU leaves NaN as it is.
enum class Epilogue : std::uint8_t { kNone, kRelu };

/// N samples (0 is allowed), I inputs, O outputs; w is (O, I), b is (O) or undefined (no bias). Activations, w and b
/// are of one type, f32 or, where the backend computes in it, bf16; dw and db are f32 always. Sums are f32.
class LinearKernels {
 public:
  virtual ~LinearKernels() = default;
  /// y (N, O) = epilogue(x (N, I) · wᵀ + b)
  virtual void forward(const Tensor& x, const Tensor& w, const Tensor& b, Epilogue epilogue, const Tensor& y) = 0;
  /// dx (N, I) = dy (N, O) · w
  virtual void backward_input(const Tensor& dy, const Tensor& w, const Tensor& dx) = 0;
  /// dw (O, I) = dyᵀ · x, added to what dw holds when `accumulate`
  virtual void backward_weight(const Tensor& x, const Tensor& dy, bool accumulate, const Tensor& dw) = 0;
  /// db (O) = column sums of dy (N, O), added to what db holds when `accumulate`
  virtual void backward_bias(const Tensor& dy, bool accumulate, const Tensor& db) = 0;

  /// A mask says where the result of a ReLU is positive, so that whoever reads the result next can differentiate the
  /// ReLU while it computes its own input's gradient. This is the shape of a U8 tensor for the mask of y (N, O), which
  /// the device packs as it likes; one without elements where it gains nothing by that, and the functions below are not
  /// to be called.
  virtual Shape mask_shape(std::int64_t samples, std::int64_t out) const {
    static_cast<void>(samples), static_cast<void>(out);
    return {0};
  }
  /// forward() with ReLU, and its result's mask.
  virtual void forward_masked(const Tensor& x, const Tensor& w, const Tensor& b, const Tensor& y, const Tensor& mask) {
    static_cast<void>(x), static_cast<void>(w), static_cast<void>(b), static_cast<void>(y), static_cast<void>(mask);
    LOCKSTEP_ASSERT(false, "this device keeps no masks");
  }
  /// dx (N, I) = dy (N, O) · w where the mask, of x (N, I), says that x is positive, else 0.
  virtual void backward_input_masked(const Tensor& dy, const Tensor& w, const Tensor& mask, const Tensor& dx) {
    static_cast<void>(dy), static_cast<void>(w), static_cast<void>(mask), static_cast<void>(dx);
    LOCKSTEP_ASSERT(false, "this device keeps no masks");
  }
};

}  // namespace lockstep::nn
