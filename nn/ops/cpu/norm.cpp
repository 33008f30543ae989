#include "nn/ops/norm.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "nn/ops/cpu/column_moments.h"
#include "nn/ops/cpu/kernels.h"

namespace lockstep::nn::cpu {
namespace {

// What memory costs is nearly all there is to it: with loops of our own each matrix is read once for the sums and once
// for the result, ReLU and residual included, where oneDNN's take three passes and the two others two more.
class CpuNorm final : public NormKernels {
 public:
  void forward_train(const Tensor& x, const Tensor& gamma, const Tensor& beta, double eps, const Tensor& y,
                     const Tensor& mean, const Tensor& variance) override {
    take_moments(x, mean, variance);
    normalise(x, nullptr, gamma, beta, mean, variance, eps, false, y);
  }

  void forward_train_relu(const Tensor& x, const Tensor& gamma, const Tensor& beta, double eps, const Tensor& residual,
                          const Tensor& y, const Tensor& mean, const Tensor& variance) override {
    take_moments(x, mean, variance);
    normalise(x, residual.defined() ? residual.f32() : nullptr, gamma, beta, mean, variance, eps, true, y);
  }

  void forward_infer(const Tensor& x, const Tensor& gamma, const Tensor& beta, const Tensor& mean,
                     const Tensor& variance, double eps, const Tensor& y) override {
    normalise(x, nullptr, gamma, beta, mean, variance, eps, false, y);
  }

  void backward(const Tensor& x, const Tensor& dy, const Tensor& gamma, const Tensor& mean, const Tensor& variance,
                bool given_statistics, double eps, const Tensor& dx, const Tensor& dgamma,
                const Tensor& dbeta) override {
    differentiate(x, nullptr, dy, gamma, mean, variance, given_statistics, eps, dx, dgamma, dbeta);
  }

  void backward_relu(const Tensor& x, const Tensor& y, const Tensor& dy, const Tensor& gamma, const Tensor& mean,
                     const Tensor& variance, double eps, const Tensor& dx, const Tensor& dgamma,
                     const Tensor& dbeta) override {
    differentiate(x, y.f32(), dy, gamma, mean, variance, false, eps, dx, dgamma, dbeta);
  }

  void update_running(const Tensor& mean, const Tensor& variance, std::int64_t rows, double momentum,
                      const Tensor& running_mean, const Tensor& running_variance) override {
    const auto m = static_cast<float>(momentum), keep = static_cast<float>(1.0 - momentum);
    const float unbias =
        rows > 1 ? static_cast<float>(static_cast<double>(rows) / static_cast<double>(rows - 1)) : 1.0f;
    for (std::int64_t c = 0; c < mean.count(); ++c) {
      running_mean.f32()[c] = keep * running_mean.f32()[c] + m * mean.f32()[c];
      running_variance.f32()[c] = keep * running_variance.f32()[c] + m * unbias * variance.f32()[c];
    }
  }

 private:
  void take_moments(const Tensor& x, const Tensor& mean, const Tensor& variance) {
    const std::int64_t columns = mean.count();
    if (columns == 0) return;
    const std::int64_t rows = x.count() / columns;
    LOCKSTEP_ASSERT(rows > 0, "batch normalisation of no rows");
    sums_.moments(x.f32(), rows, columns, mean.f32(), variance.f32());
    for (float& v : variance.span<float>()) v /= static_cast<float>(rows);
  }

  void normalise(const Tensor& x, const float* residual, const Tensor& gamma, const Tensor& beta, const Tensor& mean,
                 const Tensor& variance, double eps, bool relu, const Tensor& y) {
    if (x.count() == 0) return;
    const std::int64_t columns = mean.count();
    float* const scale = room_for(columns);
    for (std::int64_t c = 0; c < columns; ++c) scale[c] = gamma.f32()[c] * one_of_deviation(variance, c, eps);
    normalise_columns(x.f32(), residual, mean.f32(), scale, beta.f32(), relu, x.count() / columns, columns, y.f32());
  }

  // With s = sqrt(variance + eps): dx = gamma / s · (dy − dbeta / M − (x − mean) / s · dgamma / M), or gamma / s · dy
  // where the statistics were given and so do not depend on x. Where y is there, dy is masked first.
  void differentiate(const Tensor& x, const float* y, const Tensor& dy, const Tensor& gamma, const Tensor& mean,
                     const Tensor& variance, bool given_statistics, double eps, const Tensor& dx, const Tensor& dgamma,
                     const Tensor& dbeta) {
    const std::int64_t columns = mean.count(), rows = columns == 0 ? 0 : x.count() / columns;
    sums_.products(x.f32(), y, dy.f32(), mean.f32(), rows, columns, dgamma.f32(), dbeta.f32());
    float *const scale = room_for(3 * columns), *const offset = scale + columns, *const slope = offset + columns;
    for (std::int64_t c = 0; c < columns; ++c) {
      const float inverse = one_of_deviation(variance, c, eps);
      dgamma.f32()[c] *= inverse;
      scale[c] = gamma.f32()[c] * inverse;
      offset[c] = given_statistics ? 0.0f : dbeta.f32()[c] / static_cast<float>(rows);
      slope[c] = given_statistics ? 0.0f : dgamma.f32()[c] / static_cast<float>(rows) * inverse;
    }
    if (rows == 0) return;
    if (given_statistics)  // offset and slope are zeros, as this wants them
      normalise_columns(dy.f32(), nullptr, offset, scale, slope, false, rows, columns, dx.f32());
    else
      spread_columns(x.f32(), dy.f32(), mean.f32(), scale, offset, slope, rows, columns, dx.f32());
  }

  static float one_of_deviation(const Tensor& variance, std::int64_t c, double eps) {
    return 1.0f / std::sqrt(variance.f32()[c] + static_cast<float>(eps));
  }

  float* room_for(std::int64_t count) {
    per_column_.resize(std::max(per_column_.size(), static_cast<std::size_t>(count)));
    return per_column_.data();
  }

  ColumnSums sums_;
  std::vector<float> per_column_;  // kept, so that it is allocated once
};

}  // namespace

std::unique_ptr<NormKernels> make_norm_kernels() { return std::make_unique<CpuNorm>(); }

}  // namespace lockstep::nn::cpu
