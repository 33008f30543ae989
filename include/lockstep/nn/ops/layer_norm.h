// Layer normalisation: each row by its own statistics.
#pragma once

#include "lockstep/nn/tensor/tensor.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"  // Note [Shapes alone]

namespace lockstep::nn {

/// Ba, Kiros and Hinton, "Layer Normalization", 2016, as PyTorch's LayerNorm computes it. x, y, dx and dy are (…, C),
/// of one type, f32 or bf16, with M = count / C rows, which may be none. gamma and beta (C), their gradients and the
/// statistics are f32; beta may be undefined (no bias).
class LayerNormKernels {
 public:
  virtual ~LayerNormKernels() = default;
  /// y = (x − mean) · inverse · gamma + beta, with a row's mean and inverse = 1 / sqrt(variance + eps) of its biased
  /// variance; both (M) are returned for backward.
  virtual void forward(const Tensor& x, const Tensor& gamma, const Tensor& beta, double eps, const Tensor& y,
                       const Tensor& mean, const Tensor& inverse) {}
  /// sum = x + residual, rounded to their type, and forward() of that.
  virtual void forward_added(const Tensor& x, const Tensor& residual, const Tensor& gamma, const Tensor& beta,
                             double eps, const Tensor& sum, const Tensor& y, const Tensor& mean,
                             const Tensor& inverse) {}
  /// dx (M, C); may be dy.
  virtual void backward_input(const Tensor& x, const Tensor& dy, const Tensor& gamma, const Tensor& mean,
                              const Tensor& inverse, const Tensor& dx) {}
  /// Whether backward_input_added() may be called.
  virtual bool adds_to_gradients() const { return false; }
  /// dx (M, C) += backward_input()'s, rounded once. dx is not dy.
  virtual void backward_input_added(const Tensor& x, const Tensor& dy, const Tensor& gamma, const Tensor& mean,
                                    const Tensor& inverse, const Tensor& dx) {
    throw InternalError("this device adds gradients by themselves");
  }
  /// The sums over all rows: dgamma of dy · (x − mean) · inverse, dbeta of dy; each is left out where it is undefined,
  /// and added to what is there where it says so.
  virtual void backward_parameters(const Tensor& x, const Tensor& dy, const Tensor& mean, const Tensor& inverse,
                                   bool accumulate_gamma, const Tensor& dgamma, bool accumulate_beta,
                                   const Tensor& dbeta) {}
  /// Whether backward() of rows of this many elements reads x and dy once, and is to be called rather than the two one
  /// by one.
  virtual bool backward_reads_once(std::int64_t columns) const { return false; }
  /// backward_parameters(), then backward_input(), or backward_input_added() where `add`.
  virtual void backward(const Tensor& x, const Tensor& dy, const Tensor& gamma, const Tensor& mean,
                        const Tensor& inverse, bool add, const Tensor& dx, bool accumulate_gamma, const Tensor& dgamma,
                        bool accumulate_beta, const Tensor& dbeta) {
    if (dgamma.defined() || dbeta.defined())
      backward_parameters(x, dy, mean, inverse, accumulate_gamma, dgamma, accumulate_beta, dbeta);
    if (add)
      backward_input_added(x, dy, gamma, mean, inverse, dx);
    else
      backward_input(x, dy, gamma, mean, inverse, dx);
  }
};

}  // namespace lockstep::nn

#pragma GCC diagnostic pop
