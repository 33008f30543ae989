#include "lockstep/nn/ops/elementwise.h"

#include <limits>

#include "base/error.h"
#include "nn/ops/cuda/kernels.h"
#include "nn/ops/cuda/op_profile.h"
#include "nn/ops/cuda/reduce.cuh"
#include "nn/ops/cuda/vector.cuh"
#include "nn/ops/elementwise_rules.h"

namespace lockstep::nn::cuda {
namespace {

constexpr int kElementsPerThread = 4;
constexpr int kMostTotalParts = 1024;

// Calls body(i) for this thread's elements, a block's width apart.
template <class Body>
__device__ void for_own_elements(std::int64_t count, const Body& body) {
  const std::int64_t first = std::int64_t{blockIdx.x} * (kBlock * kElementsPerThread) + threadIdx.x;
  for (int k = 0; k < kElementsPerThread; ++k)
    if (const std::int64_t i = first + k * kBlock; i < count) body(i);
}

template <class Rule>
__global__ void __launch_bounds__(kBlock) map_one(std::int64_t count, const float* x, float* y) {
  for_own_elements(count, [&](std::int64_t i) { y[i] = Rule::value(x[i]); });
}
template <class Rule>
__global__ void __launch_bounds__(kBlock)
    map_one_back(std::int64_t count, const float* x, const float* y, const float* dy, float* dx) {
  for_own_elements(count, [&](std::int64_t i) { dx[i] = dy[i] * Rule::slope(x[i], y[i]); });
}
template <class Rule>
__global__ void __launch_bounds__(kBlock) map_two(std::int64_t count, const float* x, const float* y, float* z) {
  for_own_elements(count, [&](std::int64_t i) { z[i] = Rule::value(x[i], y[i]); });
}
template <class Rule>
__global__ void __launch_bounds__(kBlock)
    map_two_back(std::int64_t count, const float* x, const float* y, const float* dz, float* dx, float* dy) {
  for_own_elements(count, [&](std::int64_t i) {
    const float gradient = dz[i], a = x[i], b = y[i];
    if (dx != nullptr) dx[i] = gradient * Rule::slope_x(a, b);
    if (dy != nullptr) dy[i] = gradient * Rule::slope_y(a, b);
  });
}
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

  void unary(UnaryOp op, const Tensor& x, const Tensor& y) override {
    const OpProfileScope scope(context_, "an elementwise function", {&x, &y});
    LOCKSTEP_ASSERT(x.count() == y.count());
    with_rule(
        op, [&](auto rule) { start("an elementwise function", map_one<decltype(rule)>, y.count(), x.f32(), y.f32()); });
  }

  void unary_backward(UnaryOp op, const Tensor& x, const Tensor& y, const Tensor& dy, const Tensor& dx) override {
    const OpProfileScope scope(context_, "an elementwise function's gradient", {&x, &y, &dy, &dx});
    LOCKSTEP_ASSERT(x.count() == dx.count() && y.count() == dx.count() && dy.count() == dx.count());
    with_rule(op, [&](auto rule) {
      start("an elementwise function's gradient", map_one_back<decltype(rule)>, dx.count(), x.f32(), y.f32(), dy.f32(),
            dx.f32());
    });
  }

  void binary(BinaryOp op, const Tensor& x, const Tensor& y, const Tensor& z) override {
    const OpProfileScope scope(context_, "an elementwise operation", {&x, &y, &z});
    LOCKSTEP_ASSERT(x.count() == z.count() && y.count() == z.count());
    with_rule(op, [&](auto rule) {
      start("an elementwise operation", map_two<decltype(rule)>, z.count(), x.f32(), y.f32(), z.f32());
    });
  }

  void binary_backward(BinaryOp op, const Tensor& x, const Tensor& y, const Tensor& dz, const Tensor& dx,
                       const Tensor& dy) override {
    const OpProfileScope scope(context_, "an elementwise operation's gradient", {&x, &y, &dz, &dx, &dy});
    LOCKSTEP_ASSERT(x.count() == dz.count() && y.count() == dz.count());
    with_rule(op, [&](auto rule) {
      start("an elementwise operation's gradient", map_two_back<decltype(rule)>, dz.count(), x.f32(), y.f32(), dz.f32(),
            dx.defined() ? dx.f32() : nullptr, dy.defined() ? dy.f32() : nullptr);
    });
  }

  void affine(const Tensor& x, float scale, float shift, const Tensor& y) override {
    const OpProfileScope scope(context_, "scaling", {&x, &y});
    LOCKSTEP_ASSERT(x.count() == y.count());
    start("scaling", scale_and_shift, y.count(), x.f32(), scale, shift, y.f32());
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
    start("filling rows", broadcast_each_row, y.count(), y.size(1), x.f32(), y.f32());
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
  template <class Kernel, class... Args>
  void start(const char* what, Kernel kernel, std::int64_t count, Args... args) {
    if (count == 0) return;
    const std::int64_t blocks = ceil_div(count, kBlock * kElementsPerThread);
    LOCKSTEP_ASSERT(blocks <= kMostBlocks, "{} of {} elements", what, count);
    launch(what, kernel, dim3(static_cast<unsigned>(blocks)), dim3(kBlock), context_.stream, count, args...);
  }

  Context& context_;
};

}  // namespace

std::unique_ptr<ElementwiseKernels> make_elementwise_kernels(Context& context) {
  return std::make_unique<CudaElementwise>(context);
}

}  // namespace lockstep::nn::cuda
