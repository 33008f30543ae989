#include "lockstep/nn/ops/layer_norm.h"

#include <algorithm>
#include <cmath>

#include "base/cpu.h"
#include "nn/ops/cpu/elements.h"
#include "nn/ops/cpu/fast_math.h"
#include "nn/ops/cpu/kernels.h"
#include "nn/ops/cpu/parallel.h"

namespace lockstep::nn::cpu {
namespace {

constexpr std::int64_t kGrain = 8192;  // elements

template <class T>
LOCKSTEP_SIMD_CLONES void normalise_row(const T* x, const float* gamma, const float* beta, float eps,
                                        std::int64_t width, T* y, float* mean_out, float* inverse_out) {
  const float count = static_cast<float>(width);
  const float mean = lane_sum(width, [&](std::int64_t c) { return wide(x[c]); }) / count;
  const float variance =
      lane_sum(width, [&](std::int64_t c) { return (wide(x[c]) - mean) * (wide(x[c]) - mean); }) / count;
  const float inverse = 1.0f / __builtin_sqrtf(variance + eps);
  if (beta != nullptr)
    for (std::int64_t c = 0; c < width; ++c) y[c] = narrow<T>((wide(x[c]) - mean) * inverse * gamma[c] + beta[c]);
  else
    for (std::int64_t c = 0; c < width; ++c) y[c] = narrow<T>((wide(x[c]) - mean) * inverse * gamma[c]);
  *mean_out = mean;
  *inverse_out = inverse;
}

template <class T>
LOCKSTEP_SIMD_CLONES void add_residual(const T* x, const T* residual, std::int64_t width, T* sum) {
  for (std::int64_t c = 0; c < width; ++c) sum[c] = narrow<T>(wide(x[c]) + wide(residual[c]));
}

// dx = inverse · (g − mean(g) − x̂ · mean(g · x̂)) with g = dy · gamma, x̂ = (x − mean) · inverse
template <class T>
LOCKSTEP_SIMD_CLONES void input_row(const T* x, const T* dy, const float* gamma, float mean, float inverse,
                                    std::int64_t width, T* dx) {
  const float count = static_cast<float>(width);
  const float mean_g = lane_sum(width, [&](std::int64_t c) { return wide(dy[c]) * gamma[c]; }) / count;
  const float mean_gx =
      lane_sum(width, [&](std::int64_t c) { return wide(dy[c]) * gamma[c] * ((wide(x[c]) - mean) * inverse); }) / count;
  for (std::int64_t c = 0; c < width; ++c)
    dx[c] = narrow<T>(inverse * (wide(dy[c]) * gamma[c] - mean_g - (wide(x[c]) - mean) * inverse * mean_gx));
}

// Adds rows to columns [begin, end) of the sums, either of which may be null.
template <class T>
LOCKSTEP_SIMD_CLONES void sum_columns(const T* x, const T* dy, const float* mean, const float* inverse,
                                      std::int64_t rows, std::int64_t width, std::int64_t begin, std::int64_t end,
                                      float* dgamma, float* dbeta) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const T* const xr = x + r * width;
    const T* const dyr = dy + r * width;
    const float m = mean[r], i = inverse[r];
    if (dgamma != nullptr)
      for (std::int64_t c = begin; c < end; ++c) dgamma[c] += wide(dyr[c]) * ((wide(xr[c]) - m) * i);
    if (dbeta != nullptr)
      for (std::int64_t c = begin; c < end; ++c) dbeta[c] += wide(dyr[c]);
  }
}

std::int64_t rows_of(const Tensor& x, std::int64_t width) { return width == 0 ? 0 : x.count() / width; }

class CpuLayerNorm final : public LayerNormKernels {
 public:
  void forward(const Tensor& x, const Tensor& gamma, const Tensor& beta, double eps, const Tensor& y,
               const Tensor& mean, const Tensor& inverse) override {
    normalise(x, gamma, beta, eps, y, mean, inverse, [](std::int64_t) {});
  }

  void forward_added(const Tensor& x, const Tensor& residual, const Tensor& gamma, const Tensor& beta, double eps,
                     const Tensor& sum, const Tensor& y, const Tensor& mean, const Tensor& inverse) override {
    const std::int64_t width = gamma.count();
    with_type(sum.dtype(), [&](auto type) {
      using T = decltype(type);
      const T *const from = x.data<T>(), *const added = residual.data<T>();
      T* const to = sum.data<T>();
      normalise(sum, gamma, beta, eps, y, mean, inverse,
                [&](std::int64_t r) { add_residual(from + r * width, added + r * width, width, to + r * width); });
    });
  }

  void backward_input(const Tensor& x, const Tensor& dy, const Tensor& gamma, const Tensor& mean, const Tensor& inverse,
                      const Tensor& dx) override {
    const std::int64_t width = gamma.count();
    with_type(dx.dtype(), [&](auto type) {
      using T = decltype(type);
      const T *const at = x.data<T>(), *const from = dy.data<T>();
      T* const to = dx.data<T>();
      parallel_for(rows_of(x, width), std::max<std::int64_t>(1, kGrain / width),
                   [&](std::int64_t begin, std::int64_t end) {
                     for (std::int64_t r = begin; r < end; ++r)
                       input_row(at + r * width, from + r * width, gamma.f32(), mean.f32()[r], inverse.f32()[r], width,
                                 to + r * width);
                   });
    });
  }

  void backward_parameters(const Tensor& x, const Tensor& dy, const Tensor& mean, const Tensor& inverse,
                           bool accumulate_gamma, const Tensor& dgamma, bool accumulate_beta,
                           const Tensor& dbeta) override {
    float* const gamma = dgamma.defined() ? dgamma.f32() : nullptr;
    float* const beta = dbeta.defined() ? dbeta.f32() : nullptr;
    const std::int64_t width = dgamma.defined() ? dgamma.count() : dbeta.count();
    if (gamma != nullptr && !accumulate_gamma) std::fill_n(gamma, width, 0.0f);
    if (beta != nullptr && !accumulate_beta) std::fill_n(beta, width, 0.0f);
    const std::int64_t rows = rows_of(x, width);
    // Whole cache lines a thread; every sum is taken over the rows in order, whatever the number of threads.
    constexpr std::int64_t kLine = 16, kLines = 8;
    with_type(dy.dtype(), [&](auto type) {
      using T = decltype(type);
      parallel_for((width + kLine - 1) / kLine, kLines, [&](std::int64_t begin, std::int64_t end) {
        sum_columns(x.data<T>(), dy.data<T>(), mean.f32(), inverse.f32(), rows, width, begin * kLine,
                    std::min(end * kLine, width), gamma, beta);
      });
    });
  }

 private:
  // Calls prepare(r) before it reads row r of x.
  template <class F>
  static void normalise(const Tensor& x, const Tensor& gamma, const Tensor& beta, double eps, const Tensor& y,
                        const Tensor& mean, const Tensor& inverse, F&& prepare) {
    const std::int64_t width = gamma.count();
    with_type(y.dtype(), [&](auto type) {
      using T = decltype(type);
      parallel_for(
          rows_of(x, width), std::max<std::int64_t>(1, kGrain / width), [&](std::int64_t begin, std::int64_t end) {
            for (std::int64_t r = begin; r < end; ++r) {
              prepare(r);
              normalise_row(x.data<T>() + r * width, gamma.f32(), beta.defined() ? beta.f32() : nullptr,
                            static_cast<float>(eps), width, y.data<T>() + r * width, mean.f32() + r, inverse.f32() + r);
            }
          });
    });
  }
};

}  // namespace

std::unique_ptr<LayerNormKernels> make_layer_norm_kernels() { return std::make_unique<CpuLayerNorm>(); }

}  // namespace lockstep::nn::cpu
