#include "lockstep/nn/ops/loss.h"

#include <algorithm>
#include <cmath>
#include <limits>
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

LOCKSTEP_SIMD_CLONES
void difference(const float* x, const float* target, float factor, float* dx, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) dx[i] = (x[i] - target[i]) * factor;
}

class CpuLoss final : public LossKernels {
 public:
  void cross_entropy(const Tensor& logits, const Tensor& labels, const LossScale& by, float smoothing,
                     const Tensor& totals, const Tensor& dlogits) override {
    const std::int64_t n = logits.size(0), k = logits.size(1);
    const float scale = of(by);
    const auto* const label = labels.data<std::int32_t>();
    for (std::int64_t i = 0; i < n; ++i)
      if (label[i] < 0 || label[i] >= k)
        throw UsageError(fmt::format("label {} of sample {} in a batch with {} classes", label[i], i, k),
                         "give the model as many classes as the data has");
    rows_.resize(static_cast<std::size_t>(n));
    with_type(logits.dtype(), [&](auto type) {
      using T = decltype(type);
      const T* const from = logits.data<T>();
      T* const to = dlogits.defined() ? dlogits.data<T>() : nullptr;
      if (logits.dtype() != DType::kF32 && to != nullptr)
        powers_.resize(std::max(powers_.size(), static_cast<std::size_t>(omp_get_max_threads() * k)));
      parallel_for(n, std::max<std::int64_t>(1, kGrain / k), [&](std::int64_t begin, std::int64_t end) {
        float* const powers = powers_.data() + omp_get_thread_num() * k;
        for (std::int64_t i = begin; i < end; ++i) {
          T* const gradient = to != nullptr ? to + i * k : nullptr;
          rows_[static_cast<std::size_t>(i)] =
              softmax_row(from + i * k, k, label[i], scale, smoothing, in_place_of(powers, gradient), gradient);
        }
      });
    });
    double loss = 0.0;
    std::int64_t correct = 0;
    for (const RowLoss& row : rows_) {
      loss += static_cast<double>(row.loss);
      correct += row.correct ? 1 : 0;
    }
    totals.f32()[0] = static_cast<float>(loss);
    totals.f32()[1] = static_cast<float>(correct);
  }

  void count_in_top(const Tensor& logits, const Tensor& labels, std::int64_t k, const Tensor& total) override {
    const std::int64_t classes = logits.size(1);
    std::int64_t inside = 0;
    with_type(logits.dtype(), [&](auto type) {
      for (std::int64_t i = 0; i < logits.size(0); ++i) {
        const auto* const row = logits.data<decltype(type)>() + i * classes;
        const std::int64_t label = labels.data<std::int32_t>()[i];
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
  static float of(const LossScale& scale) {
    return scale.times() != nullptr ? scale.constant * *scale.times() : scale.constant;
  }
  static float* in_place_of(float*, float* gradient) { return gradient; }
  static float* in_place_of(float* powers, const BFloat16*) { return powers; }

  std::vector<RowLoss> rows_;  // kept, so that it is allocated once
  std::vector<float> powers_;  // of bf16 logits: a row for each thread; kept too
};

}  // namespace

std::unique_ptr<LossKernels> make_loss_kernels() { return std::make_unique<CpuLoss>(); }

}  // namespace lockstep::nn::cpu
