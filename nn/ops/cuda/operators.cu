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

__device__ float block_max(float value) {
  constexpr int kWarps = kBlock / kWarp;
  __shared__ float largest[kWarps];
  const auto larger = [](float a, float b) { return b > a || b != b ? b : a; };  // NaN is
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  for (int step = kWarp / 2; step > 0; step /= 2) value = larger(value, __shfl_xor_sync(kAllLanes, value, step));
  __syncthreads();  // what a call before this one left has been read
  if (lane == 0) largest[warp] = value;
  __syncthreads();
  value = largest[0];
  for (int i = 1; i < kWarps; ++i) value = larger(value, largest[i]);
  return value;
}

// A block's row: `columns` numbers, of which a thread has each kBlock-th. All threads take part in each function.
struct Row {
  std::int64_t begin, columns;
  __device__ explicit Row(std::int64_t of) : begin(std::int64_t{blockIdx.x} * of), columns(of) {}

  template <class Body>
  __device__ void each(const Body& body) const {
    for (std::int64_t i = threadIdx.x; i < columns; i += kBlock) body(begin + i);
  }
  template <class Term>
  __device__ float sum(const Term& term) const {
    float own = 0;
    each([&](std::int64_t i) { own += term(i); });
    return block_sum<kBlock>(own);
  }
  __device__ float max(const float* x) const {
    float own = -kInfinity;
    each([&](std::int64_t i) { own = x[i] > own || x[i] != x[i] ? x[i] : own; });
    return block_max(own);
  }
};

__global__ void __launch_bounds__(kBlock) max_of_rows(std::int64_t columns, const float* x, float* y) {
  const float largest = Row(columns).max(x);
  if (threadIdx.x == 0) y[blockIdx.x] = largest;
}
__global__ void __launch_bounds__(kBlock)
    max_of_rows_back(std::int64_t columns, const float* x, const float* y, const float* dy, float* dx) {
  const Row row(columns);
  const float largest = y[blockIdx.x];
  const auto is_largest = [=](float value) { return value == largest || (value != value && largest != largest); };
  const float each = dy[blockIdx.x] / row.sum([&](std::int64_t i) { return is_largest(x[i]) ? 1.0f : 0.0f; });
  row.each([&](std::int64_t i) { dx[i] = is_largest(x[i]) ? each : 0.0f; });
}
template <bool kLogarithm>
__global__ void __launch_bounds__(kBlock) softmax_of_rows(std::int64_t columns, const float* x, float* y) {
  const Row row(columns);
  const float largest = row.max(x);
  const float sum = row.sum([&](std::int64_t i) { return expf(x[i] - largest); });
  const float logarithm = logf(sum), scale = 1.0f / sum;
  row.each([&](std::int64_t i) { y[i] = kLogarithm ? (x[i] - largest) - logarithm : expf(x[i] - largest) * scale; });
}
template <bool kLogarithm>
__global__ void __launch_bounds__(kBlock)
    softmax_of_rows_back(std::int64_t columns, const float* y, const float* dy, float* dx) {
  const Row row(columns);
  const float sum = row.sum([&](std::int64_t i) { return kLogarithm ? dy[i] : y[i] * dy[i]; });
  row.each([&](std::int64_t i) { dx[i] = kLogarithm ? dy[i] - expf(y[i]) * sum : y[i] * (dy[i] - sum); });
}

struct RowMoments {
  float mean, inverse;
};
__device__ RowMoments moments_of(const Row& row, const NormalizeLast& op, const float* x) {
  const auto count = static_cast<float>(row.columns);
  const float mean = op.centered ? row.sum([&](std::int64_t i) { return x[i]; }) / count : 0.0f;
  const float squares = row.sum([&](std::int64_t i) { return (x[i] - mean) * (x[i] - mean); });
  return {mean, 1.0f / sqrtf(squares / count + op.eps)};
}
__global__ void __launch_bounds__(kBlock)
    normalize_rows(std::int64_t columns, NormalizeLast op, const float* x, float* y) {
  const Row row(columns);
  const RowMoments moments = moments_of(row, op, x);
  row.each([&](std::int64_t i) { y[i] = (x[i] - moments.mean) * moments.inverse; });
}
__global__ void __launch_bounds__(kBlock)
    normalize_rows_back(std::int64_t columns, NormalizeLast op, const float* x, const float* dy, float* dx) {
  const Row row(columns);
  const RowMoments moments = moments_of(row, op, x);
  const auto y = [&](std::int64_t i) { return (x[i] - moments.mean) * moments.inverse; };
  const auto count = static_cast<float>(columns);
  const float along = row.sum([&](std::int64_t i) { return dy[i] * y(i); }) / count;
  const float mean = op.centered ? row.sum([&](std::int64_t i) { return dy[i]; }) / count : 0.0f;
  row.each([&](std::int64_t i) { dx[i] = moments.inverse * (dy[i] - mean - y(i) * along); });
}

__global__ void __launch_bounds__(kBlock) power(std::int64_t count, Pow op, const float* x, float* y) {
  for_own_elements(count, [&](std::int64_t i) { y[i] = std::pow(x[i], op.exponent); });
}
__global__ void __launch_bounds__(kBlock)
    power_back(std::int64_t count, Pow op, const float* x, const float* dy, float* dx) {
  for_own_elements(count, [&](std::int64_t i) { dx[i] = dy[i] * pow_slope(op, x[i]); });
}
__global__ void __launch_bounds__(kBlock) clamp_each(std::int64_t count, Clamp op, const float* x, float* y) {
  for_own_elements(count, [&](std::int64_t i) { y[i] = clamped(op, x[i]); });
}
__global__ void __launch_bounds__(kBlock)
    clamp_each_back(std::int64_t count, Clamp op, const float* x, const float* dy, float* dx) {
  for_own_elements(count, [&](std::int64_t i) { dx[i] = is_within(op, x[i]) ? dy[i] : 0.0f; });
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
    launch_rows("sums of rows", sum_each_row, x, x.f32(), y.f32());
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

  void compute(const MaxLast&, T x, T y) const {
    const OpProfileScope scope(context_, "maxima of rows", {&x, &y});
    launch_rows("maxima of rows", max_of_rows, x, x.f32(), y.f32());
  }
  void differentiate(const MaxLast&, T x, T y, T dy, T dx) const {
    const OpProfileScope scope(context_, "maxima's backward", {&x, &y, &dy, &dx});
    launch_rows("maxima's backward", max_of_rows_back, x, x.f32(), y.f32(), dy.f32(), dx.f32());
  }

  void compute(const SoftmaxLast&, T x, T y) const {
    const OpProfileScope scope(context_, "softmax", {&x, &y});
    launch_rows("softmax", softmax_of_rows<false>, x, x.f32(), y.f32());
  }
  void differentiate(const SoftmaxLast&, T, T y, T dy, T dx) const {
    const OpProfileScope scope(context_, "softmax's backward", {&y, &dy, &dx});
    launch_rows("softmax's backward", softmax_of_rows_back<false>, y, y.f32(), dy.f32(), dx.f32());
  }

  void compute(const LogSoftmaxLast&, T x, T y) const {
    const OpProfileScope scope(context_, "log_softmax", {&x, &y});
    launch_rows("log_softmax", softmax_of_rows<true>, x, x.f32(), y.f32());
  }
  void differentiate(const LogSoftmaxLast&, T, T y, T dy, T dx) const {
    const OpProfileScope scope(context_, "log_softmax's backward", {&y, &dy, &dx});
    launch_rows("log_softmax's backward", softmax_of_rows_back<true>, y, y.f32(), dy.f32(), dx.f32());
  }

  void compute(const NormalizeLast& op, T x, T y) const {
    const OpProfileScope scope(context_, "normalising rows", {&x, &y});
    launch_rows("normalising rows", normalize_rows, x, op, x.f32(), y.f32());
  }
  void differentiate(const NormalizeLast& op, T x, T, T dy, T dx) const {
    const OpProfileScope scope(context_, "normalisation's backward", {&x, &dy, &dx});
    launch_rows("normalisation's backward", normalize_rows_back, x, op, x.f32(), dy.f32(), dx.f32());
  }

  void compute(const Pow& op, T x, T y) const {
    const OpProfileScope scope(context_, "powers", {&x, &y});
    launch_each("powers", power, context_.stream, y.count(), op, x.f32(), y.f32());
  }
  void differentiate(const Pow& op, T x, T, T dy, T dx) const {
    const OpProfileScope scope(context_, "powers' backward", {&x, &dy, &dx});
    launch_each("powers' backward", power_back, context_.stream, dx.count(), op, x.f32(), dy.f32(), dx.f32());
  }

  void compute(const Clamp& op, T x, T y) const {
    const OpProfileScope scope(context_, "clamping", {&x, &y});
    launch_each("clamping", clamp_each, context_.stream, y.count(), op, x.f32(), y.f32());
  }
  void differentiate(const Clamp& op, T x, T, T dy, T dx) const {
    const OpProfileScope scope(context_, "clamping's backward", {&x, &dy, &dx});
    launch_each("clamping's backward", clamp_each_back, context_.stream, dx.count(), op, x.f32(), dy.f32(), dx.f32());
  }

  /// A block for each row of the last axis of x: kernel(columns, args…).
  template <class Kernel, class... Args>
  void launch_rows(const char* what, Kernel kernel, T x, Args... args) const {
    const std::int64_t columns = x.size(x.shape().size() - 1), rows = x.count() / columns;
    LOCKSTEP_ASSERT(rows <= kMostBlocks, "{} rows", rows);
    if (rows == 0) return;
    launch(what, kernel, dim3(static_cast<unsigned>(rows)), dim3(kBlock), context_.stream, columns, args...);
  }

  Context& context_;
};

}  // namespace

std::unique_ptr<OperatorKernels> make_operator_kernels(Context& context) {
  return std::make_unique<CudaOperators>(context);
}

}  // namespace lockstep::nn::cuda
