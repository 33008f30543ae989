// Batch normalisation over the last axis.
#pragma once

#include "nn/tensor/tensor.h"

namespace lockstep::nn {

/// x, y, dx and dy are (…, C), of one type, f32 or bf16; all statistics, parameters and their gradients are (C) f32. M
/// is the number of rows, count(x) / C, at least 1 in training.
class NormKernels {
 public:
  virtual ~NormKernels() = default;
  /// y = (x − mean) / sqrt(var + eps) · gamma + beta with the batch's own mean and biased variance, which are returned
  /// in `mean` and `variance`.
  virtual void forward_train(const Tensor& x, const Tensor& gamma, const Tensor& beta, double eps, const Tensor& y,
                             const Tensor& mean, const Tensor& variance) = 0;
  /// y = max(forward_train's + residual, 0) in the same pass, NaN staying; residual (…, C), of x's type, may be
  /// undefined.
  virtual void forward_train_relu(const Tensor& x, const Tensor& gamma, const Tensor& beta, double eps,
                                  const Tensor& residual, const Tensor& y, const Tensor& mean,
                                  const Tensor& variance) = 0;
  /// forward_train's with given statistics.
  virtual void forward_infer(const Tensor& x, const Tensor& gamma, const Tensor& beta, const Tensor& mean,
                             const Tensor& variance, double eps, const Tensor& y) = 0;
  /// Gradients of forward_train, or of forward_infer if the statistics were given; overwrites dx, dgamma and dbeta.
  virtual void backward(const Tensor& x, const Tensor& dy, const Tensor& gamma, const Tensor& mean,
                        const Tensor& variance, bool given_statistics, double eps, const Tensor& dx,
                        const Tensor& dgamma, const Tensor& dbeta) = 0;
  /// Gradients of forward_train_relu, which made y. dy is set to 0 wherever y is not above 0, and then is the
  /// residual's gradient. dx may be dy.
  virtual void backward_relu(const Tensor& x, const Tensor& y, const Tensor& dy, const Tensor& gamma,
                             const Tensor& mean, const Tensor& variance, double eps, const Tensor& dx,
                             const Tensor& dgamma, const Tensor& dbeta) = 0;
  /// running = (1 − momentum) · running + momentum · batch; the variance is made unbiased (· M / (M − 1)) first, as
  /// PyTorch does.
  virtual void update_running(const Tensor& mean, const Tensor& variance, std::int64_t rows, double momentum,
                              const Tensor& running_mean, const Tensor& running_variance) = 0;
};

}  // namespace lockstep::nn
