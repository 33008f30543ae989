#include "nn/ops/optim.h"

#include <cmath>

#include "base/cpu.h"
#include "nn/ops/cpu/kernels.h"
#include "nn/ops/cpu/parallel.h"

namespace lockstep::nn::cpu {
namespace {

constexpr std::int64_t kGrain = 16384;  // elements

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
  const auto keep = static_cast<float>(1.0 - s.lr * s.weight_decay),
             step = static_cast<float>(s.lr / s.bias_correction1);
  const auto root2 = static_cast<float>(1.0 / std::sqrt(s.bias_correction2));
  const auto b1 = static_cast<float>(s.beta1), rest1 = static_cast<float>(1.0 - s.beta1);
  const auto b2 = static_cast<float>(s.beta2), rest2 = static_cast<float>(1.0 - s.beta2);
  const auto eps = static_cast<float>(s.eps), scale = static_cast<float>(s.gradient_scale);
  for (std::int64_t i = 0; i < n; ++i) {
    const float gi = scale * g[i];
    m[i] = b1 * m[i] + rest1 * gi;
    v[i] = b2 * v[i] + rest2 * gi * gi;
    p[i] = keep * p[i] - step * m[i] / (__builtin_sqrtf(v[i]) * root2 + eps);
  }
}

// Eight partial sums, so that the additions do not wait for each other; combined in a fixed order.
LOCKSTEP_SIMD_CLONES
double squares(const float* g, std::int64_t n) {
  double part[8] = {};
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    for (int j = 0; j < 8; ++j) part[j] += static_cast<double>(g[i + j]) * static_cast<double>(g[i + j]);
  for (; i < n; ++i) part[0] += static_cast<double>(g[i]) * static_cast<double>(g[i]);
  return ((part[0] + part[4]) + (part[1] + part[5])) + ((part[2] + part[6]) + (part[3] + part[7]));
}

class CpuOptim final : public OptimKernels {
 public:
  void sgd(const SgdStep& step, const Tensor& g, const Tensor& m, const Tensor& p) override {
    parallel_for(p.count(), kGrain, [&](std::int64_t begin, std::int64_t end) {
      const std::int64_t n = end - begin;
      const float* const gradient = g.f32() + begin;
      float* const parameter = p.f32() + begin;
      if (!m.defined()) {
        sgd_plain(step, gradient, parameter, n);
      } else if (step.nesterov) {
        sgd_nesterov(step, gradient, m.f32() + begin, parameter, n);
      } else {
        sgd_momentum(step, gradient, m.f32() + begin, parameter, n);
      }
    });
  }

  void adamw(const AdamWStep& step, const Tensor& g, const Tensor& m, const Tensor& v, const Tensor& p) override {
    parallel_for(p.count(), kGrain, [&](std::int64_t begin, std::int64_t end) {
      adamw_update(step, g.f32() + begin, m.f32() + begin, v.f32() + begin, p.f32() + begin, end - begin);
    });
  }

  double sum_of_squares(const Tensor& g) override { return squares(g.f32(), g.count()); }
};

}  // namespace

std::unique_ptr<OptimKernels> make_optim_kernels() { return std::make_unique<CpuOptim>(); }

}  // namespace lockstep::nn::cpu
