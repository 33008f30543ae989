#include "lockstep/nn/ops/operators.h"

#include "base/error.h"
#include "nn/ops/cuda/kernels.h"
#include "nn/ops/cuda/op_profile.h"
#include "nn/ops/cuda/reduce.cuh"
#include "nn/ops/cuda/vector.cuh"

namespace lockstep::nn::cuda {
namespace {

__global__ void __launch_bounds__(kBlock)
    scale_and_shift(std::int64_t count, const float* x, float scale, float shift, float* y) {
  for_own_elements(count, [&](std::int64_t i) { y[i] = scale * x[i] + shift; });
}
__global__ void __launch_bounds__(kBlock)
    broadcast_each_row(std::int64_t count, std::int64_t columns, const float* x, float* y) {
  for_own_elements(count, [&](std::int64_t i) { y[i] = x[i / columns]; });
}

// A block a row.
__global__ void __launch_bounds__(kBlock) sum_each_row(std::int64_t columns, const float* x, float* y) {
  const float* const row = x + std::int64_t{blockIdx.x} * columns;
  double sum = 0;
  for (std::int64_t i = threadIdx.x; i < columns; i += kBlock) sum += static_cast<double>(row[i]);
  sum = block_sum<kBlock>(sum);
  if (threadIdx.x == 0) y[blockIdx.x] = static_cast<float>(sum);
}

using T = const Tensor&;

class CudaOperators final : public OperatorKernels {
 public:
  explicit CudaOperators(Context& context) : context_(context) {}

  void forward(const Operator& op, T x, T y) override {
    std::visit([&](const auto& one) { compute(one, x, y); }, op);
  }
  void backward(const Operator& op, T x, T y, T dy, T dx) override {
    std::visit([&](const auto& one) { differentiate(one, x, y, dy, dx); }, op);
  }

 private:
  void compute(const Affine& op, T x, T y) const {
    const OpProfileScope scope(context_, "scaling", {&x, &y});
    LOCKSTEP_ASSERT(x.count() == y.count());
    launch_each("scaling", scale_and_shift, context_.stream, y.count(), x.f32(), op.scale, op.shift, y.f32());
  }
  void differentiate(const Affine& op, T, T, T dy, T dx) const { compute(Affine{op.scale, 0.0f}, dy, dx); }

  void compute(const SumLast&, T x, T y) const {
    const OpProfileScope scope(context_, "sums of rows", {&x, &y});
    LOCKSTEP_ASSERT(y.count() <= kMostBlocks);
    if (y.count() == 0) return;
    launch("sums of rows", sum_each_row, dim3(static_cast<unsigned>(y.count())), dim3(kBlock), context_.stream,
           x.size(x.shape().size() - 1), x.f32(), y.f32());
  }
  void differentiate(const SumLast&, T, T, T dy, T dx) const {
    compute(SpreadLast{dx.size(dx.shape().size() - 1)}, dy, dx);
  }

  void compute(const SpreadLast& op, T x, T y) const {
    const OpProfileScope scope(context_, "filling rows", {&x, &y});
    LOCKSTEP_ASSERT(y.count() == x.count() * op.count);
    launch_each("filling rows", broadcast_each_row, context_.stream, y.count(), op.count, x.f32(), y.f32());
  }
  void differentiate(const SpreadLast&, T, T, T dy, T dx) const { compute(SumLast(), dy, dx); }

  Context& context_;
};

}  // namespace

std::unique_ptr<OperatorKernels> make_operator_kernels(Context& context) {
  return std::make_unique<CudaOperators>(context);
}

}  // namespace lockstep::nn::cuda
