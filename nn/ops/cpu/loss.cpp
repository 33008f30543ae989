#include "lockstep/nn/ops/loss.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "base/cpu.h"
#include "base/error.h"
#include "nn/ops/cpu/elements.h"
#include "nn/ops/cpu/fast_math.h"
#include "nn/ops/cpu/kernels.h"
#include "nn/ops/cpu/parallel.h"

namespace lockstep::nn::cpu {
namespace {

constexpr std::int64_t kGrain = 4096;  // logits

struct RowLoss {
  float loss;
  bool correct;
};

// One row of K logits; dlogits may be null, or the logits. `powers` is memory for K numbers: dlogits itself where that
// is f32.
template <class T>
LOCKSTEP_SIMD_CLONES RowLoss softmax_row(const T* logits, std::int64_t k, std::int64_t label, float scale,
                                         float smoothing, float* powers, T* dlogits) {
  const float kept = 1.0f - smoothing, classes = static_cast<float>(k);
  const float largest = lane_max(k, [&](std::int64_t j) { return wide(logits[j]); });
  bool correct = wide(logits[label]) == largest;
  for (std::int64_t j = 0; correct && j < label; ++j) correct = wide(logits[j]) != largest;
  float apart = wide(logits[label]) - largest;
  if (smoothing > 0)
    apart =
        kept * apart + smoothing * (lane_sum(k, [&](std::int64_t j) { return wide(logits[j]) - largest; }) / classes);
  float sum;
  if (dlogits == nullptr) {
    sum = lane_sum(k, [&](std::int64_t j) { return exp_of(wide(logits[j]) - largest); });
  } else {
    for (std::int64_t j = 0; j < k; ++j) powers[j] = exp_of(wide(logits[j]) - largest);
    sum = lane_sum(k, [&](std::int64_t j) { return powers[j]; });
    const float factor = scale / sum;
    for (std::int64_t j = 0; j < k; ++j) powers[j] *= factor;
    powers[label] -= scale * kept;
    if (smoothing > 0) {
      const float even = scale * smoothing / classes;
      for (std::int64_t j = 0; j < k; ++j) powers[j] -= even;
    }
    if constexpr (sizeof(T) < sizeof(float))
      for (std::int64_t j = 0; j < k; ++j) dlogits[j] = narrow<T>(powers[j]);
  }
  return {std::log(sum) - apart, correct};
}

// The same where the classes are to have shares q = wⱼ (kept · pⱼ + ε/K): of probabilities p, or, where that is
// nullptr, of the label alone. `weights`: nullptr is 1 each.
template <class T>
LOCKSTEP_SIMD_CLONES RowLoss shared_row(const T* logits, const float* p, std::int64_t label, const float* weights,
                                        std::int64_t k, float scale, float smoothing, float* shares, float* powers,
                                        T* dlogits) {
  const float kept = 1.0f - smoothing, even = smoothing / static_cast<float>(k);
  for (std::int64_t j = 0; j < k; ++j) shares[j] = p != nullptr ? kept * p[j] + even : even;
  if (p == nullptr) shares[label] += kept;
  if (weights != nullptr)
    for (std::int64_t j = 0; j < k; ++j) shares[j] *= weights[j];
  const float largest = lane_max(k, [&](std::int64_t j) { return wide(logits[j]); });
  bool correct = wide(logits[label]) == largest;
  for (std::int64_t j = 0; correct && j < label; ++j) correct = wide(logits[j]) != largest;
  // A class that nobody asks for adds nothing, also where its logit is −∞.
  const float apart =
      lane_sum(k, [&](std::int64_t j) { return keep_if(shares[j] != 0.0f, shares[j] * (wide(logits[j]) - largest)); });
  const float all = lane_sum(k, [&](std::int64_t j) { return shares[j]; });
  float sum;
  if (dlogits == nullptr) {
    sum = lane_sum(k, [&](std::int64_t j) { return exp_of(wide(logits[j]) - largest); });
  } else {
    for (std::int64_t j = 0; j < k; ++j) powers[j] = exp_of(wide(logits[j]) - largest);
    sum = lane_sum(k, [&](std::int64_t j) { return powers[j]; });
    const float factor = scale * all / sum;
    for (std::int64_t j = 0; j < k; ++j) powers[j] = powers[j] * factor - scale * shares[j];
    if constexpr (sizeof(T) < sizeof(float))
      for (std::int64_t j = 0; j < k; ++j) dlogits[j] = narrow<T>(powers[j]);
  }
  return {all * std::log(sum) - apart, correct};
}

LOCKSTEP_SIMD_CLONES
void difference(const float* x, const float* target, float factor, float* dx, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) dx[i] = (x[i] - target[i]) * factor;
}

class CpuLoss final : public LossKernels {
 public:
  void cross_entropy(const Tensor& logits, const Tensor& labels, const LossScale& by, const TargetRule& rule,
                     const Tensor& totals, const Tensor& dlogits) override {
    const std::int64_t k = logits.size(1);
    const float scale = of(by);
    const auto* const label = labels.data<std::int32_t>();
    for (std::int64_t i = 0; i < logits.size(0); ++i)
      if ((label[i] < 0 || label[i] >= k) && label[i] != rule.ignored)
        throw UsageError(fmt::format("label {} of sample {} in a batch with {} classes", label[i], i, k),
                         "give the model as many classes as the data has");
    const float* const weights = rule.weights.defined() ? rule.weights.f32() : nullptr;
    each_row(logits, totals, dlogits, [&](std::int64_t i, auto* from, const Memory& memory, auto* to) -> RowLoss {
      if (label[i] == rule.ignored) {
        if (to != nullptr) std::fill_n(to, k, std::remove_reference_t<decltype(*to)>{});
        return {0.0f, false};
      }
      if (weights == nullptr) return softmax_row(from, k, label[i], scale, rule.smoothing, memory.powers, to);
      return shared_row(from, nullptr, label[i], weights, k, scale, rule.smoothing, memory.shares, memory.powers, to);
    });
  }

  void soft_cross_entropy(const Tensor& logits, const Tensor& probabilities, const LossScale& by,
                          const TargetRule& rule, const Tensor& totals, const Tensor& dlogits) override {
    const std::int64_t k = logits.size(1);
    const float scale = of(by);
    const float* const weights = rule.weights.defined() ? rule.weights.f32() : nullptr;
    each_row(logits, totals, dlogits, [&](std::int64_t i, auto* from, const Memory& memory, auto* to) {
      const float* const p = probabilities.f32() + i * k;
      return shared_row(from, p, std::max_element(p, p + k) - p, weights, k, scale, rule.smoothing, memory.shares,
                        memory.powers, to);
    });
  }

  void count_in_top(const Tensor& logits, const Tensor& labels, std::int64_t k, const Tensor& total,
                    std::optional<std::int32_t> ignored) override {
    const std::int64_t classes = logits.size(1);
    std::int64_t inside = 0;
    with_type(logits.dtype(), [&](auto type) {
      for (std::int64_t i = 0; i < logits.size(0); ++i) {
        const auto* const row = logits.data<decltype(type)>() + i * classes;
        const std::int64_t label = labels.data<std::int32_t>()[i];
        if (label < 0 || label >= classes || label == ignored) continue;
        const float of_label = wide(row[label]);
        std::int64_t before = 0;
        for (std::int64_t j = 0; j < classes; ++j)
          before += wide(row[j]) > of_label || (wide(row[j]) == of_label && j < label) ? 1 : 0;
        inside += before < k && !std::isnan(of_label) ? 1 : 0;
      }
    });
    *total.f32() = static_cast<float>(inside);
  }

  void total(const Tensor& x, const Tensor& totals) override {
    double sum = 0;
    const float* const from = x.f32();
    for (std::int64_t i = 0; i < x.count(); ++i) sum += static_cast<double>(from[i]);
    totals.f32()[0] = static_cast<float>(sum);
    totals.f32()[1] = std::numeric_limits<float>::quiet_NaN();
  }

  void squared_error(const Tensor& x, const Tensor& target, const LossScale& scale, const Tensor& totals,
                     const Tensor& dx) override {
    double loss = 0.0;
    const float *const value = x.f32(), *const wanted = target.f32();
    for (std::int64_t i = 0; i < x.count(); ++i) {
      const double d = static_cast<double>(value[i]) - static_cast<double>(wanted[i]);
      loss += d * d;
    }
    totals.f32()[0] = static_cast<float>(loss);
    totals.f32()[1] = 0.0f;
    if (dx.defined()) difference(x.f32(), target.f32(), 2.0f * of(scale), dx.f32(), x.count());
  }

 private:
  /// Of a thread, for K numbers each; powers are the gradient itself where that is f32.
  struct Memory {
    float *shares, *powers;
  };

  /// totals = the sums of what row(i, logits, memory, gradient or nullptr) returns.
  template <class Row>
  void each_row(const Tensor& logits, const Tensor& totals, const Tensor& dlogits, const Row& row) {
    const std::int64_t n = logits.size(0), k = logits.size(1);
    rows_.resize(static_cast<std::size_t>(n));
    numbers_.resize(std::max(numbers_.size(), static_cast<std::size_t>(omp_get_max_threads() * 2 * k)));
    with_type(logits.dtype(), [&](auto type) {
      using T = decltype(type);
      const T* const from = logits.data<T>();
      T* const to = dlogits.defined() ? dlogits.data<T>() : nullptr;
      parallel_for(n, std::max<std::int64_t>(1, kGrain / k), [&](std::int64_t begin, std::int64_t end) {
        float* const own = numbers_.data() + omp_get_thread_num() * 2 * k;
        for (std::int64_t i = begin; i < end; ++i) {
          T* const gradient = to != nullptr ? to + i * k : nullptr;
          rows_[static_cast<std::size_t>(i)] =
              row(i, from + i * k, Memory{.shares = own, .powers = in_place_of(own + k, gradient)}, gradient);
        }
      });
    });
    double loss = 0.0;
    std::int64_t correct = 0;
    for (const RowLoss& one : rows_) {
      loss += static_cast<double>(one.loss);
      correct += one.correct ? 1 : 0;
    }
    totals.f32()[0] = static_cast<float>(loss);
    totals.f32()[1] = static_cast<float>(correct);
  }

  static float of(const LossScale& scale) {
    return scale.times() != nullptr ? scale.constant * *scale.times() : scale.constant;
  }
  static float* in_place_of(float*, float* gradient) { return gradient; }
  static float* in_place_of(float* powers, const BFloat16*) { return powers; }

  std::vector<RowLoss> rows_;   // kept, so that it is allocated once
  std::vector<float> numbers_;  // two rows for each thread; kept too
};

}  // namespace

std::unique_ptr<LossKernels> make_loss_kernels() { return std::make_unique<CpuLoss>(); }

}  // namespace lockstep::nn::cpu
