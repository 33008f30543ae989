#include "lockstep/nn/ops/elementwise.h"

#include <limits>

#include "base/error.h"
#include "nn/ops/cuda/kernels.h"
#include "nn/ops/cuda/op_profile.h"
#include "nn/ops/cuda/reduce.cuh"
#include "nn/ops/cuda/vector.cuh"

namespace lockstep::nn::cuda {
namespace {

constexpr int kMostTotalParts = 1024;

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

__global__ void __launch_bounds__(kBlock)
    total_of_chunks(SumPlan plan, std::int64_t count, const float* x, double* parts) {
  const std::int64_t begin = std::int64_t{blockIdx.x} * plan.chunk, end = at_most(begin + plan.chunk, count);
  double sum = 0;
  for (std::int64_t i = begin + threadIdx.x; i < end; i += kBlock) sum += static_cast<double>(x[i]);
  sum = block_sum<kBlock>(sum);
  if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}
__global__ void __launch_bounds__(kSumBlock) total_of_parts(std::int64_t chunks, const double* parts, float* totals) {
  double sum = 0;
  for (std::int64_t i = threadIdx.x; i < chunks; i += kSumBlock) sum += parts[i];
  sum = block_sum<kSumBlock>(sum);
  if (threadIdx.x > 0) return;
  totals[0] = static_cast<float>(sum);
  totals[1] = std::numeric_limits<float>::quiet_NaN();
}

class CudaElementwise final : public ElementwiseKernels {
 public:
  explicit CudaElementwise(Context& context) : context_(context) {}

  void affine(const Tensor& x, float scale, float shift, const Tensor& y) override {
    const OpProfileScope scope(context_, "scaling", {&x, &y});
    LOCKSTEP_ASSERT(x.count() == y.count());
    launch_each("scaling", scale_and_shift, context_.stream, y.count(), x.f32(), scale, shift, y.f32());
  }

  void sum_rows(const Tensor& x, const Tensor& y) override {
    const OpProfileScope scope(context_, "sums of rows", {&x, &y});
    LOCKSTEP_ASSERT(x.size(0) == y.count() && y.count() <= kMostBlocks);
    if (y.count() == 0) return;
    launch("sums of rows", sum_each_row, dim3(static_cast<unsigned>(y.count())), dim3(kBlock), context_.stream,
           x.size(1), x.f32(), y.f32());
  }

  void broadcast_rows(const Tensor& x, const Tensor& y) override {
    const OpProfileScope scope(context_, "filling rows", {&x, &y});
    LOCKSTEP_ASSERT(y.size(0) == x.count());
    launch_each("filling rows", broadcast_each_row, context_.stream, y.count(), y.size(1), x.f32(), y.f32());
  }

  void total(const Tensor& x, const Tensor& totals) override {
    const OpProfileScope scope(context_, "a sum", {&x, &totals});
    const SumPlan plan = plan_sum(x.count(), kBlock * kElementsPerThread, kMostTotalParts);
    const Tensor parts = Tensor::empty(context_.allocator, {plan.chunks}, DType::kF64);
    if (plan.chunks > 0)
      launch("a sum", total_of_chunks, dim3(static_cast<unsigned>(plan.chunks)), dim3(kBlock), context_.stream, plan,
             x.count(), x.f32(), parts.data<double>());
    launch("a sum", total_of_parts, dim3(1), dim3(kSumBlock), context_.stream, plan.chunks, parts.data<double>(),
           totals.f32());
  }

 private:
  Context& context_;
};

}  // namespace

std::unique_ptr<ElementwiseKernels> make_elementwise_kernels(Context& context) {
  return std::make_unique<CudaElementwise>(context);
}

}  // namespace lockstep::nn::cuda
