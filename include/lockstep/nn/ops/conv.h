// Two-dimensional convolution.
#pragma once

#include <array>
#include <cstdint>

#include "lockstep/nn/ops/linear.h"
#include "lockstep/nn/tensor/tensor.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"  // Note [Shapes alone]

namespace lockstep::nn {

/// Height first, then width.
struct Window {
  std::array<std::int64_t, 2> kernel = {1, 1};
  std::array<std::int64_t, 2> stride = {1, 1};
  std::array<std::int64_t, 2> padding = {0, 0};

  /// floor((in + 2·padding − kernel) / stride) + 1. Throws UsageError when the kernel does not fit, or for a kernel or
  /// stride below 1 or a negative padding.
  std::int64_t output_extent(int axis, std::int64_t in) const;
};

/// Of a convolution of images of shape x with weights of shape w.
inline std::int64_t groups_of(const Shape& x, const Shape& w) { return w[3] == 0 ? 1 : x[3] / w[3]; }

/// Cross-correlation as in PyTorch's Conv2d. x is (N, H, W, C), w is (O, Kh, Kw, C / groups), b is (O) or undefined,
/// y is (N, H', W', O). N may be 0. Each group of O / groups neighbouring output channels sees a group of C / groups
/// input channels; how many there are follows from the shapes (groups_of), and divides C and O. Types are those of
/// LinearKernels. There are no activations but ReLU.
class ConvKernels {
 public:
  virtual ~ConvKernels() = default;
  /// `w_version` changes whenever the content at w's address does, also when another tensor comes to lie there: packed
  /// copies of w are kept until then.
  virtual void forward(const Tensor& x, const Tensor& w, std::uint64_t w_version, const Tensor& b, const Window& window,
                       Epilogue epilogue, const Tensor& y) {}
  virtual void backward_input(const Tensor& dy, const Tensor& w, std::uint64_t w_version, const Window& window,
                              const Tensor& dx) {}
  /// dw and, when defined, db are overwritten, or added to when their flag says so.
  virtual void backward_weight(const Tensor& x, const Tensor& dy, const Window& window, bool accumulate_w,
                               const Tensor& dw, bool accumulate_b, const Tensor& db) {}
};

}  // namespace lockstep::nn

#pragma GCC diagnostic pop
