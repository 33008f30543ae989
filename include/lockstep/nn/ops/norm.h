// Batch normalisation over the last axis.
#pragma once

#include "lockstep/nn/ops/linear.h"
#include "lockstep/nn/tensor/tensor.h"

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"  // Note [Shapes alone]

namespace lockstep::nn {

/// Ioffe and Szegedy, "Batch Normalization", 2015, as PyTorch's BatchNorm2d computes it. x, y, dx and dy are (…, C), of
/// one type, f32 or bf16; all statistics, parameters and their gradients are (C) f32. M is the number of rows,
/// count(x) / C, at least 1 in training.
class NormKernels {
 public:
  virtual ~NormKernels() = default;
  /// y = (x − mean) / sqrt(var + eps) · gamma + beta with the batch's own mean and biased variance, which are returned
  /// in `mean` and `variance`.
  virtual void forward_train(const Tensor& x, const Tensor& gamma, const Tensor& beta, double eps, const Tensor& y,
                             const Tensor& mean, const Tensor& variance) {}
  /// y = activation(forward_train's + residual) in the same pass, NaN staying; residual (…, C), of x's type, may be
  /// undefined. The activation is ReLU, or ReLU6 without a residual; here and below.
  virtual void forward_train_relu(const Tensor& x, const Tensor& gamma, const Tensor& beta, double eps,
                                  Epilogue activation, const Tensor& residual, const Tensor& y, const Tensor& mean,
                                  const Tensor& variance) {}
  /// forward_train's with given statistics.
  virtual void forward_infer(const Tensor& x, const Tensor& gamma, const Tensor& beta, const Tensor& mean,
                             const Tensor& variance, double eps, const Tensor& y) {}
  /// Gradients of forward_train, or of forward_infer if the statistics were given; overwrites dx, dgamma and dbeta.
  virtual void backward(const Tensor& x, const Tensor& dy, const Tensor& gamma, const Tensor& mean,
                        const Tensor& variance, bool given_statistics, double eps, const Tensor& dx,
                        const Tensor& dgamma, const Tensor& dbeta) {}
  /// Gradients of forward_train_relu, which made y. With a residual, dy is set to 0 wherever y is not above 0, and then
  /// is the residual's gradient; without, what it holds afterwards is unspecified. dx may be dy. A device may find out
  /// from x where y is above 0, and of ReLU6 below 6.
  virtual void backward_relu(const Tensor& x, const Tensor& y, Epilogue activation, bool residual, const Tensor& dy,
                             const Tensor& gamma, const Tensor& beta, const Tensor& mean, const Tensor& variance,
                             double eps, const Tensor& dx, const Tensor& dgamma, const Tensor& dbeta) {}
  /// Whether backward_relu_added() is there: a gradient that has come in two parts needs no pass of its own then.
  virtual bool adds_gradients() const { return false; }
  /// backward_relu() of ReLU with a residual, of dy + more, which dy becomes first, rounded.
  virtual void backward_relu_added(const Tensor& x, const Tensor& y, const Tensor& dy, const Tensor& more,
                                   const Tensor& gamma, const Tensor& mean, const Tensor& variance, double eps,
                                   const Tensor& dx, const Tensor& dgamma, const Tensor& dbeta) {
    throw InternalError("this device adds gradients by themselves");
  }
  /// running = (1 − momentum) · running + momentum · batch; the variance is made unbiased (· M / (M − 1)) first, as
  /// PyTorch does.
  virtual void update_running(const Tensor& mean, const Tensor& variance, std::int64_t rows, double momentum,
                              const Tensor& running_mean, const Tensor& running_variance) {}
  /// What running statistics move by in training, and their number of batches () i64; nullptr: it is not counted.
  struct Running {
    const Tensor& mean;
    const Tensor& variance;
    double momentum;
    const Tensor* batches = nullptr;
  };
  /// Whether forward_train_moving() counts batches; otherwise it leaves `batches` alone.
  virtual bool counts_batches() const { return false; }
  /// forward_train(), or with an activation forward_train_relu(), and update_running() with its statistics.
  virtual void forward_train_moving(const Tensor& x, const Tensor& gamma, const Tensor& beta, double eps,
                                    Epilogue activation, const Tensor& residual, const Running& running,
                                    const Tensor& y, const Tensor& mean, const Tensor& variance) {
    if (activation == Epilogue::kNone)
      forward_train(x, gamma, beta, eps, y, mean, variance);
    else
      forward_train_relu(x, gamma, beta, eps, activation, residual, y, mean, variance);
    update_running(mean, variance, x.count() / mean.count(), running.momentum, running.mean, running.variance);
  }

  // forward_train and its backward over rows that several ranks have; x may be without rows. Each rank sends its own
  // statistics (StatisticsExchange), and the number of all rows stays on the device: nobody waits for it.

  /// part (2 · C + 1) f32: the means of x's M rows, the sums of their squared distances from them, and M.
  virtual void moments(const Tensor& x, const Tensor& part) {}
  /// Joins parts (R, P), each of which begins with what moments() makes, in their order (Chan, Golub and LeVeque,
  /// "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979): mean, biased variance, and the
  /// number of all rows (1) f32. The running statistics move as in update_running().
  virtual void join_moments(const Tensor& parts, double momentum, const Tensor& mean, const Tensor& variance,
                            const Tensor& rows, const Tensor& running_mean, const Tensor& running_variance) {}
  /// sums (2 · C) f32: these rows' part of dgamma, then of dbeta.
  virtual void backward_sums(const Tensor& x, const Tensor& dy, const Tensor& mean, const Tensor& variance, double eps,
                             const Tensor& sums) {}
  /// These rows' dx; `sums` are added up over all ranks.
  virtual void backward_input(const Tensor& x, const Tensor& dy, const Tensor& gamma, const Tensor& mean,
                              const Tensor& variance, const Tensor& rows, const Tensor& sums, double eps,
                              const Tensor& dx) {}
};

/// Exchanges each rank's statistics of a batch. Its calls are collectives, which every rank makes in the same order, in
/// the order of the backend's work, on the thread of the pass. Results are views of memory of its own, until the next
/// call. What it throws comes out of batch_norm(), or of Tape::backward().
class StatisticsExchange {
 public:
  virtual ~StatisticsExchange() = default;
  /// Every rank's `mine` (P) f32, in rank order: (ranks, at least P), whose rows begin with them.
  virtual Tensor gather(const Tensor& mine) = 0;
  /// The sum of all ranks' `mine` (P) f32.
  virtual Tensor sum(const Tensor& mine) = 0;
};

}  // namespace lockstep::nn

#pragma GCC diagnostic pop
