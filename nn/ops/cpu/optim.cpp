#include "nn/ops/optim.h"

#include <algorithm>
#include <cmath>

#include "base/cpu.h"
#include "nn/ops/cpu/kernels.h"
#include "nn/ops/cpu/parallel.h"

namespace lockstep::nn::cpu {
namespace {

constexpr std::int64_t kGrain = 16384;  // elements

struct SgdStep {
  float lr, momentum, weight_decay, gradient_scale;
};

struct AdamWStep {
  float rate, keep, root2, b1, rest1, b2, rest2, eps, gradient_scale;
};

LOCKSTEP_SIMD_CLONES
void sgd_plain(const SgdStep& s, const float* g, float* p, std::int64_t n) {
  const float lr = s.lr, decay = s.weight_decay, scale = s.gradient_scale;
  for (std::int64_t i = 0; i < n; ++i) p[i] -= lr * (scale * g[i] + decay * p[i]);
}

LOCKSTEP_SIMD_CLONES
void sgd_momentum(const SgdStep& s, const float* g, float* m, float* p, std::int64_t n) {
  const float lr = s.lr, decay = s.weight_decay, scale = s.gradient_scale, momentum = s.momentum;
  for (std::int64_t i = 0; i < n; ++i) {
    m[i] = momentum * m[i] + (scale * g[i] + decay * p[i]);
    p[i] -= lr * m[i];
  }
}

LOCKSTEP_SIMD_CLONES
void sgd_nesterov(const SgdStep& s, const float* g, float* m, float* p, std::int64_t n) {
  const float lr = s.lr, decay = s.weight_decay, scale = s.gradient_scale, momentum = s.momentum;
  for (std::int64_t i = 0; i < n; ++i) {
    const float d = scale * g[i] + decay * p[i];
    m[i] = momentum * m[i] + d;
    p[i] -= lr * (d + momentum * m[i]);
  }
}

LOCKSTEP_SIMD_CLONES
void adamw_update(const AdamWStep& s, const float* g, float* m, float* v, float* p, std::int64_t n) {
  const float rate = s.rate, keep = s.keep, root2 = s.root2, eps = s.eps, scale = s.gradient_scale;
  const float b1 = s.b1, rest1 = s.rest1, b2 = s.b2, rest2 = s.rest2;
  for (std::int64_t i = 0; i < n; ++i) {
    const float gi = scale * g[i];
    m[i] = b1 * m[i] + rest1 * gi;
    v[i] = b2 * v[i] + rest2 * gi * gi;
    p[i] = keep * p[i] - rate * m[i] / (__builtin_sqrtf(v[i]) * root2 + eps);
  }
}

// Eight partial sums, so that the additions do not wait for each other; combined in a fixed order.
LOCKSTEP_SIMD_CLONES
double squares_of(const float* g, std::int64_t n) {
  double part[8] = {};
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    for (int j = 0; j < 8; ++j) part[j] += static_cast<double>(g[i + j]) * static_cast<double>(g[i + j]);
  for (; i < n; ++i) part[0] += static_cast<double>(g[i]) * static_cast<double>(g[i]);
  return ((part[0] + part[4]) + (part[1] + part[5])) + ((part[2] + part[6]) + (part[3] + part[7]));
}

void copy_rounded(const UpdateArrays& arrays, std::int64_t begin, std::int64_t end) {
  if (arrays.copy == nullptr) return;
  std::transform(arrays.parameter + begin, arrays.parameter + end, arrays.copy + begin, BFloat16::from_float);
}

class CpuOptim final : public OptimKernels {
 public:
  void sgd(const SgdConstants& constants, const Tensor& control, std::span<const UpdateArrays> all) override {
    const float* const c = control.f32();
    if (c[StepControl::kApply] == 0.0f) return;
    const SgdStep step = {.lr = c[StepControl::kRate],
                          .momentum = constants.momentum,
                          .weight_decay = constants.weight_decay,
                          .gradient_scale = c[StepControl::kGradientScale]};
    for (const UpdateArrays& a : all)
      parallel_for(a.count, kGrain, [&](std::int64_t begin, std::int64_t end) {
        const std::int64_t n = end - begin;
        if (a.first == nullptr) {
          sgd_plain(step, a.gradient + begin, a.parameter + begin, n);
        } else if (constants.nesterov) {
          sgd_nesterov(step, a.gradient + begin, a.first + begin, a.parameter + begin, n);
        } else {
          sgd_momentum(step, a.gradient + begin, a.first + begin, a.parameter + begin, n);
        }
        copy_rounded(a, begin, end);
      });
  }

  void adamw(const AdamWConstants& constants, const Tensor& control, std::span<const UpdateArrays> all) override {
    const float* const c = control.f32();
    if (c[StepControl::kApply] == 0.0f) return;
    const AdamWStep step = {.rate = c[StepControl::kRate],
                            .keep = c[StepControl::kDecay],
                            .root2 = c[StepControl::kSecondScale],
                            .b1 = static_cast<float>(constants.beta1),
                            .rest1 = static_cast<float>(1.0 - constants.beta1),
                            .b2 = static_cast<float>(constants.beta2),
                            .rest2 = static_cast<float>(1.0 - constants.beta2),
                            .eps = static_cast<float>(constants.eps),
                            .gradient_scale = c[StepControl::kGradientScale]};
    for (const UpdateArrays& a : all)
      parallel_for(a.count, kGrain, [&](std::int64_t begin, std::int64_t end) {
        adamw_update(step, a.gradient + begin, a.first + begin, a.second + begin, a.parameter + begin, end - begin);
        copy_rounded(a, begin, end);
      });
  }

  void add_squares(std::span<const UpdateArrays> all, const Tensor& squares) override {
    for (const UpdateArrays& a : all) *squares.data<double>() += squares_of(a.gradient, a.count);
  }

  void compute_update_scale(const Tensor& loss, const Tensor& squares, double clip_norm,
                            const Tensor& control) override {
    float* const c = control.f32();
    c[StepControl::kApply] = std::isfinite(loss.f32()[0]) ? 1.0f : 0.0f;
    c[StepControl::kGradientScale] =
        clip_norm > 0 ? static_cast<float>(std::min(1.0, clip_norm / (std::sqrt(*squares.data<double>()) + 1e-6)))
                      : 1.0f;
  }
};

}  // namespace

std::unique_ptr<OptimKernels> make_optim_kernels() { return std::make_unique<CpuOptim>(); }

}  // namespace lockstep::nn::cpu
