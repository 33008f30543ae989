// Two-dimensional pooling.
#pragma once

#include "lockstep/nn/ops/conv.h"
#include "lockstep/nn/tensor/tensor.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"  // Note [Shapes alone]

namespace lockstep::nn {

/// Which elements of an axis of `there` element `at` of an axis of `here` goes with, if both have one length: [begin,
/// end), from floor(at · there / here) to ceil((at + 1) · there / here). Of y with x in adaptive pooling; of x with y
/// it is the windows that an element is in.
struct AdaptiveStretch {
  std::int64_t begin, end;
};
constexpr AdaptiveStretch adaptive_stretch(std::int64_t at, std::int64_t here, std::int64_t there) {
  return {at * there / here, ((at + 1) * there + here - 1) / here};
}

enum class PoolKind : std::uint8_t { kMax, kAverage };

/// PyTorch's MaxPool2d, AvgPool2d and AdaptiveAvgPool2d. x is (N, H, W, C), y is (N, H', W', C), of one type, f32 or
/// bf16; N may be 0. Sums are f32.
class PoolKernels {
 public:
  virtual ~PoolKernels() = default;

  /// y = epilogue(largest element of each window); padding takes no part, and one NaN makes the result NaN. ReLU and
  /// the maximum can change places, so this is also the pooling of a ReLU's result. `choices`, of y's shape and
  /// choice_type(window), receives what the gradient needs to know, sample by sample; undefined: nothing.
  virtual void max_forward(const Tensor& x, const Window& window, Epilogue epilogue, const Tensor& y,
                           const Tensor& choices) {}
  /// Overwrites dx: each dy goes to the element that its window chose (the first of equal ones), or nowhere where a
  /// ReLU's result was not positive. Where windows overlap they add up.
  virtual void max_backward(const Tensor& dy, const Tensor& choices, const Window& window, const Tensor& dx) {}

  /// Divides by the whole window, padding included, as PyTorch's AvgPool2d does by default.
  virtual void average_forward(const Tensor& x, const Window& window, const Tensor& y) {}
  /// Overwrites dx.
  virtual void average_backward(const Tensor& dy, const Window& window, const Tensor& dx) {}

  /// PyTorch's AdaptiveAvgPool2d: along each axis, y's element i of O is the average of x's elements of I in
  /// adaptive_stretch(i, O, I). Each is divided by the number of its own elements.
  virtual void adaptive_average_forward(const Tensor& x, const Tensor& y) {}
  /// Overwrites dx.
  virtual void adaptive_average_backward(const Tensor& dy, const Tensor& dx) {}

  /// The narrowest type that can number the elements of a window and one more.
  static DType choice_type(const Window& window) {
    return window.kernel[0] * window.kernel[1] <= 255 ? DType::kU8 : DType::kI32;
  }
};

}  // namespace lockstep::nn

#pragma GCC diagnostic pop
