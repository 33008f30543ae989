#include "lockstep/nn/ops/optim.h"

#include <algorithm>
#include <cmath>

#include "base/cpu.h"
#include "nn/ops/cpu/elements.h"
#include "nn/ops/cpu/kernels.h"
#include "nn/ops/cpu/parallel.h"
#include "nn/ops/update_rules.h"

namespace lockstep::nn::cpu {
namespace {

constexpr std::int64_t kGrain = 16384;  // elements

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

// A parameter with a copy is updated a piece at a time, which is still in the first cache when it is rounded.
constexpr std::int64_t kPiece = 1024;

class CpuOptim final : public OptimKernels {
 public:
  void update(const UpdateRule& rule, const Tensor& control, std::span<const UpdateArrays> all) override {
    const float* const c = control.f32();
    if (c[StepControl::kApply] == 0.0f) return;
    std::visit(
        [&](const auto& by) {
          for (const UpdateArrays& a : all)
            parallel_for(a.count, kGrain, [&](std::int64_t begin, std::int64_t last) {
              for (std::int64_t end = last; begin < last; begin = end) {
                if (a.copy != nullptr) end = std::min(begin + kPiece, last);
                update_elements(by, c, a.gradient + begin, a.parameter + begin,
                                by.kMoments > 0 ? a.first + begin : nullptr,
                                by.kMoments > 1 ? a.second + begin : nullptr, end - begin);
                if (a.copy != nullptr) round_to(a.copy + begin, a.parameter + begin, end - begin);
              }
            });
        },
        rule);
  }

  void add_squares(std::span<const UpdateArrays> all, const Tensor& squares) override {
    for (const UpdateArrays& a : all) *squares.data<double>() += squares_of(a.gradient, a.count);
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
};

}  // namespace

std::unique_ptr<OptimKernels> make_optim_kernels() { return std::make_unique<CpuOptim>(); }

}  // namespace lockstep::nn::cpu
