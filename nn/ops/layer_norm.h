// Layer normalisation: each row by its own statistics.
#pragma once

#include "nn/tensor/tensor.h"

namespace lockstep::nn {

/// x, y, dx and dy are (…, C), of one type, f32 or bf16, with M = count / C rows, which may be none. gamma and beta
/// (C), their gradients and the statistics are f32; beta may be undefined (no bias).
class LayerNormKernels {
 public:
  virtual ~LayerNormKernels() = default;
  /// y = (x − mean) · inverse · gamma + beta, with a row's mean and inverse = 1 / sqrt(variance + eps) of its biased
  /// variance; both (M) are returned for backward.
  virtual void forward(const Tensor& x, const Tensor& gamma, const Tensor& beta, double eps, const Tensor& y,
                       const Tensor& mean, const Tensor& inverse) = 0;
  /// dx (M, C); may be dy.
  virtual void backward_input(const Tensor& x, const Tensor& dy, const Tensor& gamma, const Tensor& mean,
                              const Tensor& inverse, const Tensor& dx) = 0;
  /// Whether backward_input_added() may be called.
  virtual bool adds_to_gradients() const { return false; }
  /// dx (M, C) += backward_input()'s, rounded once. dx is not dy.
  virtual void backward_input_added(const Tensor& x, const Tensor& dy, const Tensor& gamma, const Tensor& mean,
                                    const Tensor& inverse, const Tensor& dx) {
    static_cast<void>(x), static_cast<void>(dy), static_cast<void>(gamma), static_cast<void>(mean);
    static_cast<void>(inverse), static_cast<void>(dx);
    LOCKSTEP_ASSERT(false, "this device adds gradients by themselves");
  }
  /// The sums over all rows: dgamma of dy · (x − mean) · inverse, dbeta of dy; each is left out where it is undefined,
  /// and added to what is there where it says so.
  virtual void backward_parameters(const Tensor& x, const Tensor& dy, const Tensor& mean, const Tensor& inverse,
                                   bool accumulate_gamma, const Tensor& dgamma, bool accumulate_beta,
                                   const Tensor& dbeta) = 0;
};

}  // namespace lockstep::nn
