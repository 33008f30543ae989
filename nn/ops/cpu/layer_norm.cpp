#include "lockstep/nn/ops/layer_norm.h"

#include <algorithm>
#include <cmath>

#include "base/cpu.h"
#include "nn/ops/cpu/fast_math.h"
#include "nn/ops/cpu/kernels.h"
#include "nn/ops/cpu/parallel.h"

namespace lockstep::nn::cpu {
namespace {

constexpr std::int64_t kGrain = 8192;  // elements

LOCKSTEP_SIMD_CLONES
void normalise_row(const float* x, const float* gamma, const float* beta, float eps, std::int64_t width, float* y,
                   float* mean_out, float* inverse_out) {
  const float count = static_cast<float>(width);
  const float mean = lane_sum(width, [&](std::int64_t c) { return x[c]; }) / count;
  const float variance = lane_sum(width, [&](std::int64_t c) { return (x[c] - mean) * (x[c] - mean); }) / count;
  const float inverse = 1.0f / __builtin_sqrtf(variance + eps);
  if (beta != nullptr)
    for (std::int64_t c = 0; c < width; ++c) y[c] = (x[c] - mean) * inverse * gamma[c] + beta[c];
  else
    for (std::int64_t c = 0; c < width; ++c) y[c] = (x[c] - mean) * inverse * gamma[c];
  *mean_out = mean;
  *inverse_out = inverse;
}

LOCKSTEP_SIMD_CLONES
void add_row(const float* x, const float* residual, std::int64_t width, float* sum) {
  for (std::int64_t c = 0; c < width; ++c) sum[c] = x[c] + residual[c];
}

// dx = inverse · (g − mean(g) − x̂ · mean(g · x̂)) with g = dy · gamma, x̂ = (x − mean) · inverse
LOCKSTEP_SIMD_CLONES
void input_row(const float* x, const float* dy, const float* gamma, float mean, float inverse, std::int64_t width,
               float* dx) {
  const float count = static_cast<float>(width);
  const float mean_g = lane_sum(width, [&](std::int64_t c) { return dy[c] * gamma[c]; }) / count;
  const float mean_gx =
      lane_sum(width, [&](std::int64_t c) { return dy[c] * gamma[c] * ((x[c] - mean) * inverse); }) / count;
  for (std::int64_t c = 0; c < width; ++c)
    dx[c] = inverse * (dy[c] * gamma[c] - mean_g - (x[c] - mean) * inverse * mean_gx);
}

// Adds rows to columns [begin, end) of the sums, either of which may be null.
LOCKSTEP_SIMD_CLONES
void sum_columns(const float* x, const float* dy, const float* mean, const float* inverse, std::int64_t rows,
                 std::int64_t width, std::int64_t begin, std::int64_t end, float* dgamma, float* dbeta) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const float* const xr = x + r * width;
    const float* const dyr = dy + r * width;
    const float m = mean[r], i = inverse[r];
    if (dgamma != nullptr)
      for (std::int64_t c = begin; c < end; ++c) dgamma[c] += dyr[c] * ((xr[c] - m) * i);
    if (dbeta != nullptr)
      for (std::int64_t c = begin; c < end; ++c) dbeta[c] += dyr[c];
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
    normalise(sum, gamma, beta, eps, y, mean, inverse, [&](std::int64_t r) {
      add_row(x.f32() + r * width, residual.f32() + r * width, width, sum.f32() + r * width);
    });
  }

  void backward_input(const Tensor& x, const Tensor& dy, const Tensor& gamma, const Tensor& mean, const Tensor& inverse,
                      const Tensor& dx) override {
    const std::int64_t width = gamma.count();
    parallel_for(rows_of(x, width), std::max<std::int64_t>(1, kGrain / width),
                 [&](std::int64_t begin, std::int64_t end) {
                   for (std::int64_t r = begin; r < end; ++r)
                     input_row(x.f32() + r * width, dy.f32() + r * width, gamma.f32(), mean.f32()[r], inverse.f32()[r],
                               width, dx.f32() + r * width);
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
    parallel_for((width + kLine - 1) / kLine, kLines, [&](std::int64_t begin, std::int64_t end) {
      sum_columns(x.f32(), dy.f32(), mean.f32(), inverse.f32(), rows, width, begin * kLine,
                  std::min(end * kLine, width), gamma, beta);
    });
  }

 private:
  // Calls prepare(r) before it reads row r of x.
  template <class F>
  static void normalise(const Tensor& x, const Tensor& gamma, const Tensor& beta, double eps, const Tensor& y,
                        const Tensor& mean, const Tensor& inverse, F&& prepare) {
    const std::int64_t width = gamma.count();
    parallel_for(
        rows_of(x, width), std::max<std::int64_t>(1, kGrain / width), [&](std::int64_t begin, std::int64_t end) {
          for (std::int64_t r = begin; r < end; ++r) {
            prepare(r);
            normalise_row(x.f32() + r * width, gamma.f32(), beta.defined() ? beta.f32() : nullptr,
                          static_cast<float>(eps), width, y.f32() + r * width, mean.f32() + r, inverse.f32() + r);
          }
        });
  }
};

}  // namespace

std::unique_ptr<LayerNormKernels> make_layer_norm_kernels() { return std::make_unique<CpuLayerNorm>(); }

}  // namespace lockstep::nn::cpu
