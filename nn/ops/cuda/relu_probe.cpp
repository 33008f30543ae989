#include "nn/ops/cuda/relu_probe.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "nn/ops/cuda/host_copies.h"

namespace lockstep::nn::cuda {
namespace {

// Kernels work in tiles of at most a few hundred rows and columns; the last ones are the ones that are cut off.
constexpr std::int64_t kLookedAt = 1 << 16;
// A bias lies at a multiple of so many elements: at no odder a place than one in memory of its own.
constexpr std::int64_t kPitch = 256;

float read(const float& value) { return value; }
float read(const BFloat16& value) { return value.to_float(); }

template <class T>
bool all(Context& context, const Tensor& y, std::int64_t begin, bool (*wanted)(float)) {
  std::vector<T> values(static_cast<std::size_t>(std::min(kLookedAt, y.count() - begin)));
  copy_to_host(context, y.reshaped({y.count()}).slice(begin, y.count()), std::as_writable_bytes(std::span(values)));
  return std::all_of(values.begin(), values.end(), [&](const T& value) { return wanted(read(value)); });
}

bool all(Context& context, const Tensor& y, bool (*wanted)(float)) {
  const std::int64_t last = std::max<std::int64_t>(0, y.count() - kLookedAt);
  for (const std::int64_t begin : {std::int64_t{0}, last}) {
    if (!(y.dtype() == DType::kBF16 ? all<BFloat16>(context, y, begin, wanted) : all<float>(context, y, begin, wanted)))
      return false;
    if (last == 0) break;  // that was all of it
  }
  return true;
}

bool is_nan(float value) { return std::isnan(value); }
bool is_not_finite(float value) { return !std::isfinite(value); }  // infinity and what is minus infinity: NaN

}  // namespace

bool relu_keeps_non_finite(Context& context, std::int64_t channels, const Tensor& y,
                           FunctionRef<void(const Tensor& bias)> run) {
  const std::int64_t pitch = (channels + kPitch - 1) / kPitch * kPitch;
  std::vector<float> values(static_cast<std::size_t>(2 * pitch), std::numeric_limits<float>::quiet_NaN());
  std::fill(values.begin() + pitch, values.end(), std::numeric_limits<float>::infinity());
  const Tensor biases = upload_as(context, values, y.dtype());
  run(biases.slice(0, channels));
  if (!all(context, y, is_nan)) return false;
  run(biases.slice(pitch, pitch + channels));
  return all(context, y, is_not_finite);
}

}  // namespace lockstep::nn::cuda
