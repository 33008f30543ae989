#include "lockstep/nn/ops/operators.h"

#include <algorithm>

#include "nn/ops/cpu/kernels.h"
#include "nn/ops/cpu/parallel.h"

namespace lockstep::nn::cpu {
namespace {

constexpr std::int64_t kGrain = 4096;  // elements; a thread that gets fewer costs more than it brings

/// Calls body(i) for all elements, a thread for each stretch of them.
template <class Body>
void for_each(std::int64_t count, const Body& body) {
  parallel_for(count, kGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) body(i);
  });
}

using T = const Tensor&;

class CpuOperators final : public OperatorKernels {
 public:
  void forward(const Operator& op, T x, T y) override {
    std::visit([&](const auto& one) { compute(one, x, y); }, op);
  }
  void backward(const Operator& op, T x, T y, T dy, T dx) override {
    std::visit([&](const auto& one) { differentiate(one, x, y, dy, dx); }, op);
  }

 private:
  static void compute(const Affine& op, T x, T y) {
    const float* const from = x.f32();
    float* const to = y.f32();
    for_each(y.count(), [=](std::int64_t i) { to[i] = op.scale * from[i] + op.shift; });
  }
  static void differentiate(const Affine& op, T, T, T dy, T dx) { compute(Affine{op.scale, 0.0f}, dy, dx); }

  static void compute(const SumLast&, T x, T y) {
    const std::int64_t columns = x.size(x.shape().size() - 1);
    const float* const from = x.f32();
    float* const to = y.f32();
    for_each(y.count(), [=](std::int64_t row) {
      double sum = 0;
      for (std::int64_t i = 0; i < columns; ++i) sum += static_cast<double>(from[row * columns + i]);
      to[row] = static_cast<float>(sum);
    });
  }
  static void differentiate(const SumLast&, T, T, T dy, T dx) {
    compute(SpreadLast{dx.size(dx.shape().size() - 1)}, dy, dx);
  }

  static void compute(const SpreadLast& op, T x, T y) {
    const std::int64_t columns = op.count;
    const float* const from = x.f32();
    float* const to = y.f32();
    for_each(x.count(), [=](std::int64_t row) { std::fill_n(to + row * columns, columns, from[row]); });
  }
  static void differentiate(const SpreadLast&, T, T, T dy, T dx) { compute(SumLast(), dy, dx); }
};

}  // namespace

std::unique_ptr<OperatorKernels> make_operator_kernels() { return std::make_unique<CpuOperators>(); }

}  // namespace lockstep::nn::cpu
