#include "nn/ops/cuda/relu_probe.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/cuda/runtime.h"

namespace lockstep::nn::cuda {
namespace {

// Kernels work in tiles of at most a few hundred rows and columns; the last ones are the ones that are cut off.
constexpr std::int64_t kLookedAt = 1 << 16;

float read(const float& value) { return value; }
float read(const BFloat16& value) { return value.to_float(); }

template <class T>
bool all(Context& context, const Tensor& y, std::int64_t begin, bool (*wanted)(float)) {
  std::vector<T> values(static_cast<std::size_t>(std::min(kLookedAt, y.count() - begin)));
  check_cuda(cudaMemcpyAsync(values.data(), y.data<T>() + begin, values.size() * sizeof(T), cudaMemcpyDeviceToHost,
                             native(context.stream)),
             "trying a fused ReLU");
  check_cuda(cudaStreamSynchronize(native(context.stream)), "trying a fused ReLU");
  return std::all_of(values.begin(), values.end(), [&](const T& value) { return wanted(read(value)); });
}

bool all(Context& context, const Tensor& y, bool (*wanted)(float)) {
  for (const std::int64_t begin : {std::int64_t{0}, std::max<std::int64_t>(0, y.count() - kLookedAt)})
    if (!(y.dtype() == DType::kBF16 ? all<BFloat16>(context, y, begin, wanted) : all<float>(context, y, begin, wanted)))
      return false;
  return true;
}

bool is_nan(float value) { return std::isnan(value); }
bool is_not_finite(float value) { return !std::isfinite(value); }  // infinity and what is minus infinity: NaN

}  // namespace

bool relu_keeps_non_finite(Context& context, PointwiseKernels& pointwise, std::int64_t channels, const Tensor& y,
                           FunctionRef<void(const Tensor& bias)> run) {
  const Tensor bias = Tensor::empty(context.allocator, {channels}, y.dtype());
  pointwise.fill(bias, std::numeric_limits<float>::quiet_NaN());
  run(bias);
  if (!all(context, y, is_nan)) return false;
  pointwise.fill(bias, std::numeric_limits<float>::infinity());
  run(bias);
  return all(context, y, is_not_finite);
}

}  // namespace lockstep::nn::cuda
