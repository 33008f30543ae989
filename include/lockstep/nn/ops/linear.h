// Matrix products: of fully connected layers, and of two variables.
#pragma once

#include <cstdint>

#include "lockstep/nn/tensor/tensor.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"  // Note [Shapes alone]

namespace lockstep::nn {

/// The function that a kernel applies to its result. ReLU and ReLU6 leave NaN as it is. GELU is GeluKind::kTanh, and
/// after fully connected layers alone; ReLU6 is after batch normalisations and convolutions alone.
enum class Epilogue : std::uint8_t { kNone, kRelu, kGelu, kRelu6 };

/// Data that a device keeps of an activation's input, so that the next operator can differentiate the activation while
/// it computes its own input's gradient. Without elements if the device gains nothing by it.
struct SavedPreactivation {
  Shape shape = {0};
  DType dtype = DType::kU8;
};

/// Weights (O, I) for inference, a byte each: w[o][i] is about values[o][i] · scales[o], where a row's largest
/// magnitude is 127 · its scale. The error of a weight is at most half of its row's scale.
struct Int8Rows {
  Tensor values = {};  // (O, I), u8 that hold signed numbers from -127 to 127
  Tensor scales = {};  // (O) f32
};

/// N samples (0 is allowed), I inputs, O outputs; w is (O, I), b is (O) or undefined (no bias). Activations, w and b
/// are of one type, f32 or, where the backend computes in it, bf16; dw and db are f32 always. Sums are f32. y of
/// forward() without epilogue and dy of backward_…() may have a pitch, of a device whose Backend::pitch_of() asks for
/// one.
class LinearKernels {
 public:
  virtual ~LinearKernels() = default;
  /// y (N, O) = epilogue(x (N, I) · wᵀ + b)
  virtual void forward(const Tensor& x, const Tensor& w, const Tensor& b, Epilogue epilogue, const Tensor& y) {}
  /// dx (N, I) = dy (N, O) · w
  virtual void backward_input(const Tensor& dy, const Tensor& w, const Tensor& dx) {}
  /// dw (O, I) = dyᵀ · x, added to what dw holds when `accumulate`
  virtual void backward_weight(const Tensor& x, const Tensor& dy, bool accumulate, const Tensor& dw) {}
  /// db (O) = column sums of dy (N, O), added to what db holds when `accumulate`
  virtual void backward_bias(const Tensor& dy, bool accumulate, const Tensor& db) {}

  /// c (B, M, N) = op(a) (B, M, K) · op(b) (B, K, N): B products, where op exchanges the last two axes of what is
  /// `turned`, which lies as (B, K, M), or (B, N, K). All are of one type and contiguous; any extent may be 0.
  virtual void multiply(const Tensor& a, bool a_turned, const Tensor& b, bool b_turned, const Tensor& c) {}

  /// Whether the next two may be called.
  virtual bool multiplies_int8_rows() const { return false; }
  /// Fills `rows`, whose tensors are there, with w (O, I) f32.
  virtual void to_int8_rows(const Tensor& w, const Int8Rows& rows) {
    throw InternalError("this device has no weights of int8");
  }
  /// forward() with these weights; x, b and y are f32, and so are products and sums.
  virtual void forward_int8_rows(const Tensor& x, const Int8Rows& w, const Tensor& b, Epilogue epilogue,
                                 const Tensor& y) {
    throw InternalError("this device has no weights of int8");
  }

  /// Both of the same dy, which a device may read once.
  virtual void backward_weight_and_bias(const Tensor& x, const Tensor& dy, bool accumulate_w, const Tensor& dw,
                                        bool accumulate_b, const Tensor& db) {
    backward_bias(dy, accumulate_b, db);
    backward_weight(x, dy, accumulate_w, dw);
  }

  /// Of the activation `epilogue` of y (N, O), y being of `dtype`. ReLU's says where y is positive, packed as the
  /// device likes; GELU's is what GELU is taken of, as a tensor of y's shape and type. Where it has no elements the
  /// functions below are not to be called.
  virtual SavedPreactivation saved_preactivation_of(Epilogue epilogue, std::int64_t samples, std::int64_t out,
                                                    DType dtype) const {
    return {};
  }
  /// forward(), which also fills `saved_preactivation`.
  virtual void forward_saved_preactivation(const Tensor& x, const Tensor& w, const Tensor& b, Epilogue epilogue,
                                           const Tensor& y, const Tensor& saved_preactivation) {
    throw InternalError("this device saves no preactivation");
  }
  /// dx (N, I) = (dy (N, O) · w) · activation'(what x is the activation of), where `saved_preactivation` is that of x.
  virtual void backward_input_through(const Tensor& dy, const Tensor& w, Epilogue epilogue,
                                      const Tensor& saved_preactivation, const Tensor& dx) {
    throw InternalError("this device saves no preactivation");
  }
};

}  // namespace lockstep::nn

#pragma GCC diagnostic pop
