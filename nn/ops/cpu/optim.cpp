#include "lockstep/nn/ops/optim.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/cpu.h"
#include "nn/ops/cpu/elements.h"
#include "nn/ops/cpu/kernels.h"
#include "nn/ops/cpu/parallel.h"
#include "nn/ops/update_rules.h"

namespace lockstep::nn::cpu {
namespace {

constexpr std::int64_t kGrain = 8;  // blocks of kNormBlock elements

// Whole blocks, so that an element lies at the same place of a vector however the work is split.
template <class Body>
void for_blocks(std::int64_t count, const Body& body) {
  parallel_for(norm_blocks(count), kGrain, [&](std::int64_t begin, std::int64_t end) {
    body(begin * kNormBlock, std::min(end * kNormBlock, count));
  });
}

// See Note [Update rules].
template <class Rule>
LOCKSTEP_SIMD_CLONES void update_elements(const Rule& by, const float* control, const float* g, float* p, float* first,
                                          float* second, std::int64_t n) {
  // Copies, which no store into the arrays can change.
  const Rule rule = by;
  float held[StepControl::kSize];
  for (std::size_t i = 0; i < StepControl::kSize; ++i) held[i] = control[i];
  for (std::int64_t i = 0; i < n; ++i) {
    float none = 0;
    rule(held, g[i], p[i], Rule::kMoments > 0 ? first[i] : none, Rule::kMoments > 1 ? second[i] : none);
  }
}

template <RuleWithNorms Rule>
LOCKSTEP_SIMD_CLONES void update_elements(const Rule& by, const float* control, float factor, const float* g, float* p,
                                          float* first, float* second, std::int64_t n) {
  const Rule rule = by;
  float held[StepControl::kSize];
  for (std::size_t i = 0; i < StepControl::kSize; ++i) held[i] = control[i];
  for (std::int64_t i = 0; i < n; ++i) {
    float none = 0;
    rule(held, factor, g[i], p[i], Rule::kMoments > 0 ? first[i] : none, Rule::kMoments > 1 ? second[i] : none);
  }
}

template <RuleWithNorms Rule>
LOCKSTEP_SIMD_CLONES void prepare_elements(const Rule& by, const float* control, const float* g, const float* p,
                                           float* first, float* second, float* x, float* y, std::int64_t n) {
  const Rule rule = by;
  float held[StepControl::kSize];
  for (std::size_t i = 0; i < StepControl::kSize; ++i) held[i] = control[i];
  for (std::int64_t i = 0; i < n; ++i) {
    float none = 0;
    const NormedPair pair =
        rule.prepare(held, g[i], p[i], Rule::kMoments > 0 ? first[i] : none, Rule::kMoments > 1 ? second[i] : none);
    x[i] = pair.x;
    y[i] = pair.y;
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

LOCKSTEP_SIMD_CLONES
void round_to(BFloat16* copy, const float* p, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) copy[i] = narrow<BFloat16>(p[i]);
}

// A parameter with copies is updated a piece at a time, which is still in the first cache when it is rounded or copied.
constexpr std::int64_t kPiece = 1024;

class CpuOptim final : public OptimKernels {
 public:
  // Copies are bf16: activations are nothing else of 16 bits here.
  void update(const UpdateRule& rule, const Tensor& control, std::span<const UpdateArrays> all, const Tensor& factors,
              std::span<const std::ptrdiff_t> replicas) override {
    const float* const c = control.f32();
    if (c[StepControl::kApply] == 0.0f) return;
    std::visit(
        [&]<class Rule>(const Rule& by) {
          for (std::size_t i = 0; i < all.size(); ++i)
            for_blocks(all[i].count, [&, &a = all[i]](std::int64_t begin, std::int64_t last) {
              for (std::int64_t end = last; begin < last; begin = end) {
                if (a.copy || !replicas.empty()) end = std::min(begin + kPiece, last);
                float* const first = Rule::kMoments > 0 ? a.first + begin : nullptr;
                float* const second = Rule::kMoments > 1 ? a.second + begin : nullptr;
                if constexpr (RuleWithNorms<Rule>)
                  update_elements(by, c, factors.f32()[i], a.gradient + begin, a.parameter + begin, first, second,
                                  end - begin);
                else
                  update_elements(by, c, a.gradient + begin, a.parameter + begin, first, second, end - begin);
                if (a.copy) round_to(static_cast<BFloat16*>(a.copy.data) + begin, a.parameter + begin, end - begin);
                for (const std::ptrdiff_t replica : replicas)
                  std::memcpy(a.parameter + begin + replica, a.parameter + begin,
                              static_cast<std::size_t>(end - begin) * sizeof(float));
              }
            });
        },
        rule);
  }

  void prepare(const UpdateRule& rule, const Tensor& control, std::span<const UpdateArrays> all) override {
    const float* const c = control.f32();
    if (c[StepControl::kApply] == 0.0f) return;
    std::visit(
        [&]<class Rule>(const Rule& by) {
          if constexpr (RuleWithNorms<Rule>)
            for (const UpdateArrays& a : all)
              for_blocks(a.count, [&](auto begin, auto end) { prepare(by, c, a, begin, end); });
        },
        rule);
  }

  void compute_factors(const UpdateRule& rule, std::span<const UpdateArrays> all, const Tensor& factors) override {
    std::visit(
        [&]<class Rule>(const Rule& by) {
          if constexpr (RuleWithNorms<Rule>)
            for (std::size_t i = 0; i < all.size(); ++i) {
              double x = 0, y = 0;
              for (std::int64_t b = 0; b < norm_blocks(all[i].count); ++b) {
                x += all[i].sums[2 * b];
                y += all[i].sums[2 * b + 1];
              }
              factors.f32()[i] = by.factor(x, y);
            }
        },
        rule);
  }

  void squares(std::span<const UpdateArrays> all) override {
    for (const UpdateArrays& a : all)
      for_blocks(a.count, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t at = begin; at < end; at += kNormBlock)
          a.sums[at / kNormBlock] = squares_of(a.gradient + at, std::min(kNormBlock, end - at));
      });
  }

  void add_up(const Tensor& parts, const Tensor& to) override {
    double sum = 0;
    for (const double part : parts.span<double>()) sum += part;
    *to.data<double>() = sum;
  }

  void compute_update_scale(const Tensor& loss, const Tensor& squares, double clip_norm,
                            const Tensor& control) override {
    float* const c = control.f32();
    const double norm = clip_norm > 0 ? std::sqrt(*squares.data<double>()) : 0.0;
    const bool apply = std::isfinite(loss.f32()[0]) && std::isfinite(norm);
    c[StepControl::kApply] = apply ? 1.0f : 0.0f;
    c[StepControl::kGradientScale] =
        apply && clip_norm > 0 ? static_cast<float>(std::min(1.0, clip_norm / (norm + 1e-6))) : 1.0f;
  }

  void compute_scaled_update(const ScaledStep& step, const Tensor& scaler, const Tensor& control) override {
    const auto t = static_cast<double>(*step.steps.data<std::int64_t>() - step.missed + 1);
    compute_scaled_control(step.loss.f32()[0], *step.squares.data<double>(), step.clip_norm, t,
                           step.rates.data<double>(), step.corrections, scaler.f32(), control.f32());
  }

  void count_step(const Tensor& control, const Tensor& steps) override {
    if (control.f32()[StepControl::kApply] != 0.0f) ++*steps.data<std::int64_t>();
  }

  void update_loss_scale(const LossScaleRule& rule, const Tensor& scaler) override { rule(scaler.f32()); }

 private:
  template <RuleWithNorms Rule>
  static void prepare(const Rule& by, const float* control, const UpdateArrays& a, std::int64_t begin,
                      std::int64_t end) {
    float x[kNormBlock], y[kNormBlock];
    for (std::int64_t at = begin; at < end; at += kNormBlock) {
      const std::int64_t n = std::min(kNormBlock, end - at);
      prepare_elements(by, control, a.gradient + at, a.parameter + at, Rule::kMoments > 0 ? a.first + at : nullptr,
                       Rule::kMoments > 1 ? a.second + at : nullptr, x, y, n);
      a.sums[2 * (at / kNormBlock)] = squares_of(x, n);
      a.sums[2 * (at / kNormBlock) + 1] = squares_of(y, n);
    }
  }
};

}  // namespace

std::unique_ptr<OptimKernels> make_optim_kernels() { return std::make_unique<CpuOptim>(); }

}  // namespace lockstep::nn::cpu
