#include "nn/ops/loss.h"

#include <cmath>

#include "base/cpu.h"
#include "nn/ops/cpu/kernels.h"

namespace lockstep::nn::cpu {
namespace {

struct RowLoss {
  float loss;
  bool correct;
};

// One row of K logits; dlogits may be null.
RowLoss softmax_row(const float* logits, std::int64_t k, std::int64_t label, float scale, float* dlogits) {
  std::int64_t best = 0;
  for (std::int64_t j = 1; j < k; ++j)
    if (logits[j] > logits[best]) best = j;
  const float largest = logits[best];
  float sum = 0.0f;
  for (std::int64_t j = 0; j < k; ++j) {
    const float e = std::exp(logits[j] - largest);
    sum += e;
    if (dlogits != nullptr) dlogits[j] = e;
  }
  if (dlogits != nullptr) {
    const float factor = scale / sum;
    for (std::int64_t j = 0; j < k; ++j) dlogits[j] *= factor;
    dlogits[label] -= scale;
  }
  return {std::log(sum) - (logits[label] - largest), best == label};
}

LOCKSTEP_SIMD_CLONES
void difference(const float* x, const float* target, float factor, float* dx, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) dx[i] = (x[i] - target[i]) * factor;
}

class CpuLoss final : public LossKernels {
 public:
  void cross_entropy(const Tensor& logits, const Tensor& labels, float scale, const Tensor& totals,
                     const Tensor& dlogits) override {
    const std::int64_t n = logits.size(0), k = logits.size(1);
    double loss = 0.0;
    std::int64_t correct = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      const std::int64_t label = labels.data<std::int32_t>()[i];
      if (label < 0 || label >= k)
        throw UsageError(fmt::format("label {} of sample {} in a batch with {} classes", label, i, k),
                         "give the model as many classes as the data has");
      const RowLoss row =
          softmax_row(logits.f32() + i * k, k, label, scale, dlogits.defined() ? dlogits.f32() + i * k : nullptr);
      loss += static_cast<double>(row.loss);
      correct += row.correct ? 1 : 0;
    }
    totals.f32()[0] = static_cast<float>(loss);
    totals.f32()[1] = static_cast<float>(correct);
  }

  void squared_error(const Tensor& x, const Tensor& target, float scale, const Tensor& totals,
                     const Tensor& dx) override {
    double loss = 0.0;
    for (std::int64_t i = 0; i < x.count(); ++i) {
      const double d = static_cast<double>(x.f32()[i]) - static_cast<double>(target.f32()[i]);
      loss += d * d;
    }
    totals.f32()[0] = static_cast<float>(loss);
    totals.f32()[1] = 0.0f;
    if (dx.defined()) difference(x.f32(), target.f32(), 2.0f * scale, dx.f32(), x.count());
  }
};

}  // namespace

std::unique_ptr<LossKernels> make_loss_kernels() { return std::make_unique<CpuLoss>(); }

}  // namespace lockstep::nn::cpu
