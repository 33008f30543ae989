#include "lockstep/nn/ops/norm.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/error.h"
#include "nn/ops/cpu/column_moments.h"
#include "nn/ops/cpu/elements.h"
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
    normalise(x, {}, gamma, beta, mean, variance, eps, Epilogue::kNone, y);
  }

  void forward_train_relu(const Tensor& x, const Tensor& gamma, const Tensor& beta, double eps, Epilogue activation,
                          const Tensor& residual, const Tensor& y, const Tensor& mean,
                          const Tensor& variance) override {
    take_moments(x, mean, variance);
    normalise(x, residual, gamma, beta, mean, variance, eps, activation, y);
  }

  void forward_infer(const Tensor& x, const Tensor& gamma, const Tensor& beta, const Tensor& mean,
                     const Tensor& variance, double eps, const Tensor& y) override {
    normalise(x, {}, gamma, beta, mean, variance, eps, Epilogue::kNone, y);
  }

  void backward(const Tensor& x, const Tensor& dy, const Tensor& gamma, const Tensor& mean, const Tensor& variance,
                bool given_statistics, double eps, const Tensor& dx, const Tensor& dgamma,
                const Tensor& dbeta) override {
    differentiate(x, {}, Epilogue::kNone, dy, gamma, mean, variance, given_statistics, eps, dx, dgamma, dbeta);
  }

  void backward_relu(const Tensor& x, const Tensor& y, Epilogue activation, bool /*residual*/, const Tensor& dy,
                     const Tensor& gamma, const Tensor& /*beta*/, const Tensor& mean, const Tensor& variance,
                     double eps, const Tensor& dx, const Tensor& dgamma, const Tensor& dbeta) override {
    differentiate(x, y, activation, dy, gamma, mean, variance, false, eps, dx, dgamma, dbeta);
  }

  void update_running(const Tensor& mean, const Tensor& variance, std::int64_t rows, double momentum,
                      const Tensor& running_mean, const Tensor& running_variance) override {
    move_running(mean, variance, static_cast<double>(rows), momentum, running_mean, running_variance);
  }

  void moments(const Tensor& x, const Tensor& part) override {
    const std::int64_t columns = part.count() / 2, rows = columns == 0 ? 0 : x.count() / columns;
    sum_moments(x, rows, columns, part.f32(), part.f32() + columns);
    part.f32()[2 * columns] = static_cast<float>(rows);
  }

  void join_moments(const Tensor& parts, double momentum, const Tensor& mean, const Tensor& variance,
                    const Tensor& rows, const Tensor& running_mean, const Tensor& running_variance) override {
    const std::int64_t columns = mean.count(), stride = parts.size(1);
    double all = 0;
    for (std::int64_t r = 0; r < parts.size(0); ++r) all += double{parts.f32()[r * stride + 2 * columns]};
    for (std::int64_t c = 0; c < columns; ++c) {
      double count = 0, middle = 0, squares = 0;
      for (std::int64_t r = 0; r < parts.size(0); ++r) {
        const float* const part = parts.f32() + r * stride;
        const double more = double{part[2 * columns]};
        if (more == 0) continue;
        join_columns(count, more, double{part[c]}, double{part[columns + c]}, middle, squares);
        count += more;
      }
      mean.f32()[c] = static_cast<float>(middle);
      variance.f32()[c] = all > 0 ? static_cast<float>(squares / all) : 0.0f;
    }
    rows.f32()[0] = static_cast<float>(all);
    if (all > 0) move_running(mean, variance, all, momentum, running_mean, running_variance);
  }

  void backward_sums(const Tensor& x, const Tensor& dy, const Tensor& mean, const Tensor& variance, double eps,
                     const Tensor& sums) override {
    const std::int64_t columns = mean.count(), rows = columns == 0 ? 0 : x.count() / columns;
    sum_products(x, {}, Epilogue::kNone, dy, mean, rows, columns, sums.f32(), sums.f32() + columns);
    for (std::int64_t c = 0; c < columns; ++c) sums.f32()[c] *= one_of_deviation(variance, c, eps);
  }

  void backward_input(const Tensor& x, const Tensor& dy, const Tensor& gamma, const Tensor& mean,
                      const Tensor& variance, const Tensor& rows, const Tensor& sums, double eps,
                      const Tensor& dx) override {
    if (x.count() == 0) return;
    grad_input(x, dy, gamma, mean, variance, sums.f32(), sums.f32() + mean.count(), 1.0f / rows.f32()[0], eps, dx);
  }

 private:
  template <class T>
  static T* data_of(const Tensor& tensor) {
    return tensor.defined() ? tensor.data<T>() : nullptr;
  }

  void sum_moments(const Tensor& x, std::int64_t rows, std::int64_t columns, float* mean, float* squares) {
    with_type(x.dtype(), [&](auto type) {
      sums_.moments<decltype(type)>(x.data<decltype(type)>(), rows, columns, mean, squares);
    });
  }
  void sum_products(const Tensor& x, const Tensor& y, Epilogue activation, const Tensor& dy, const Tensor& mean,
                    std::int64_t rows, std::int64_t columns, float* products, float* sums) {
    with_type(x.dtype(), [&](auto type) {
      using T = decltype(type);
      sums_.products<T>(x.data<T>(), data_of<T>(y), activation, dy.data<T>(), mean.f32(), rows, columns, products,
                        sums);
    });
  }

  void take_moments(const Tensor& x, const Tensor& mean, const Tensor& variance) {
    const std::int64_t columns = mean.count();
    if (columns == 0) return;
    const std::int64_t rows = x.count() / columns;
    LOCKSTEP_ASSERT(rows > 0, "batch normalisation of no rows");
    sum_moments(x, rows, columns, mean.f32(), variance.f32());
    for (float& v : variance.span<float>()) v /= static_cast<float>(rows);
  }

  void normalise(const Tensor& x, const Tensor& residual, const Tensor& gamma, const Tensor& beta, const Tensor& mean,
                 const Tensor& variance, double eps, Epilogue activation, const Tensor& y) {
    if (x.count() == 0) return;
    const std::int64_t columns = mean.count();
    float* const scale = room_for(columns);
    for (std::int64_t c = 0; c < columns; ++c) scale[c] = gamma.f32()[c] * one_of_deviation(variance, c, eps);
    with_type(y.dtype(), [&](auto type) {
      using T = decltype(type);
      normalise_columns<T>(x.data<T>(), data_of<T>(residual), mean.f32(), scale, beta.f32(), activation,
                           x.count() / columns, columns, y.data<T>());
    });
  }

  // With s = sqrt(variance + eps): dx = gamma / s · (dy − dbeta / M − (x − mean) / s · dgamma / M), or gamma / s · dy
  // where the statistics were given and so do not depend on x. Where y is there, dy is masked first.
  void differentiate(const Tensor& x, const Tensor& y, Epilogue activation, const Tensor& dy, const Tensor& gamma,
                     const Tensor& mean, const Tensor& variance, bool given_statistics, double eps, const Tensor& dx,
                     const Tensor& dgamma, const Tensor& dbeta) {
    const std::int64_t columns = mean.count(), rows = columns == 0 ? 0 : x.count() / columns;
    sum_products(x, y, activation, dy, mean, rows, columns, dgamma.f32(), dbeta.f32());
    for (std::int64_t c = 0; c < columns; ++c) dgamma.f32()[c] *= one_of_deviation(variance, c, eps);
    if (rows == 0) return;
    if (!given_statistics)
      return grad_input(x, dy, gamma, mean, variance, dgamma.f32(), dbeta.f32(), 1.0f / static_cast<float>(rows), eps,
                        dx);
    float *const scale = room_for(2 * columns), *const zeros = scale + columns;
    for (std::int64_t c = 0; c < columns; ++c) scale[c] = gamma.f32()[c] * one_of_deviation(variance, c, eps);
    std::fill_n(zeros, columns, 0.0f);
    with_type(dx.dtype(), [&](auto type) {
      using T = decltype(type);
      normalise_columns<T>(dy.data<T>(), nullptr, zeros, scale, zeros, Epilogue::kNone, rows, columns, dx.data<T>());
    });
  }

  // The first line of the above, of sums over all rows, of which these may be some.
  void grad_input(const Tensor& x, const Tensor& dy, const Tensor& gamma, const Tensor& mean, const Tensor& variance,
                  const float* dgamma, const float* dbeta, float one_of_rows, double eps, const Tensor& dx) {
    const std::int64_t columns = mean.count();
    float *const scale = room_for(3 * columns), *const offset = scale + columns, *const slope = offset + columns;
    for (std::int64_t c = 0; c < columns; ++c) {
      const float inverse = one_of_deviation(variance, c, eps);
      scale[c] = gamma.f32()[c] * inverse;
      offset[c] = dbeta[c] * one_of_rows;
      slope[c] = dgamma[c] * one_of_rows * inverse;
    }
    with_type(dx.dtype(), [&](auto type) {
      using T = decltype(type);
      grad_input_columns<T>(x.data<T>(), dy.data<T>(), mean.f32(), scale, offset, slope, x.count() / columns, columns,
                            dx.data<T>());
    });
  }

  static void move_running(const Tensor& mean, const Tensor& variance, double rows, double momentum,
                           const Tensor& running_mean, const Tensor& running_variance) {
    const auto m = static_cast<float>(momentum), keep = static_cast<float>(1.0 - momentum);
    const float unbias = rows > 1 ? static_cast<float>(rows / (rows - 1.0)) : 1.0f;
    const float *const of_mean = mean.f32(), *const of_variance = variance.f32();
    float *const to_mean = running_mean.f32(), *const to_variance = running_variance.f32();
    for (std::int64_t c = 0; c < mean.count(); ++c) {
      to_mean[c] = keep * to_mean[c] + m * of_mean[c];
      to_variance[c] = keep * to_variance[c] + m * unbias * of_variance[c];
    }
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
