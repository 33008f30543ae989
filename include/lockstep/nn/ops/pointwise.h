// Functions of each element, and moves between layouts.
#pragma once

#include <array>
#include <cstdint>

#include "lockstep/nn/ops/dropout.h"
#include "lockstep/nn/tensor/tensor.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"  // Note [Shapes alone]

namespace lockstep::nn {

enum class GeluKind : std::uint8_t {
  kErf,   // x Φ(x), PyTorch's default
  kTanh,  // x / 2 · (1 + tanh(√(2 / π) (x + 0.044715 x³))), GPT-2's
};

/// Functions of one and of two elements: nn/ops/elementwise_rules.h has their list.
enum class UnaryOp : std::uint8_t;
enum class BinaryOp : std::uint8_t;

/// Where the elements of a part lie in a tensor: that at (i, j, …) is number offset + i · of[0] + j · of[1] + … With a
/// stride of 0 the same elements are there at each index of that axis.
struct Strides {
  std::int64_t offset = 0;
  std::array<std::int64_t, Shape::kMaxDims> of = {};
};

/// f32 or bf16, all operands of one type, unless said otherwise. Inputs and outputs have the same number of elements.
class PointwiseKernels {
 public:
  virtual ~PointwiseKernels() = default;
  virtual void fill(const Tensor& y, float value) {}
  /// Any dtype.
  virtual void copy(const Tensor& x, const Tensor& y) {}
  /// The same of tensors whose rows may lie apart (Note [Pitch]), of one shape.
  virtual void copy_rows(const Tensor& x, const Tensor& y) {}
  /// Between f32 and bf16, either way; to bf16 rounding to nearest, ties to even. Of one type it is a copy.
  virtual void cast(const Tensor& x, const Tensor& y) {}
  /// One more than before: counter () i64.
  virtual void increment(const Tensor& counter) {}
  /// y += alpha · x; x may be bf16 where y is f32.
  virtual void add_to(const Tensor& x, float alpha, const Tensor& y) {}
  /// y = op(x); y may be x. NaN stays NaN. Rules of losses (LossRule) compute in f32 alone, here and below.
  virtual void unary(UnaryOp op, const Tensor& x, const Tensor& y) {}
  /// dx = dy · op'(x), where y is op(x); dx may be dy. Of x and y the one that the rule does not read may be undefined.
  /// At 0 the slope of kAbs, kRelu and kRelu6 is 0, at 6 that of kRelu6.
  virtual void unary_backward(UnaryOp op, const Tensor& x, const Tensor& y, const Tensor& dy, const Tensor& dx) {}
  /// z = op(x, y); z may be x or y.
  virtual void binary(BinaryOp op, const Tensor& x, const Tensor& y, const Tensor& z) {}
  /// dx and dy, each left out where it is undefined, from z's gradient. Where x and y are equal, each gets half of
  /// that of kMin and kMax.
  virtual void binary_backward(BinaryOp op, const Tensor& x, const Tensor& y, const Tensor& dz, const Tensor& dx,
                               const Tensor& dy) {}
  /// y (N, …) = x / (1 − p) where an element is kept, else 0 (Srivastava et al., "Dropout", 2014), with 0 ≤ p < 1;
  /// y may be x. Whether element e of sample n is kept is a pure function (dropout_bits) of state's seed and step, of
  /// `layer`, of first_sample + n and of e, so it does not depend on how samples are shared out among ranks. state:
  /// DropoutState as (3) i64, on the device. Backward is the same call on dy.
  virtual void dropout(const Tensor& x, double p, const Tensor& state, std::int64_t layer, const Tensor& y) {}
  /// y (N, …): independent numbers of the standard normal distribution (Box and Muller, 1958; Note [Random numbers]),
  /// each a pure function of what dropout()'s are. f32.
  virtual void normal(const Tensor& state, std::int64_t layer, const Tensor& y) {}
  /// z = x where mask is not 0, else y; mask is i32. An undefined x or y is zeros. All have z's number of elements.
  virtual void select(const Tensor& mask, const Tensor& x, const Tensor& y, const Tensor& z) {}
  /// y[to] = x[from] at each index of `shape`. Any dtype of 2 or 4 bytes; no element of y is named twice.
  virtual void copy_strided(const Tensor& x, const Strides& from, const Tensor& y, const Strides& to,
                            const Shape& shape) {}
  /// y (N, C, R) = x (N, R, C) with its last two axes exchanged.
  virtual void swap_last_axes(const Tensor& x, const Tensor& y) {}
};

}  // namespace lockstep::nn

#pragma GCC diagnostic pop
