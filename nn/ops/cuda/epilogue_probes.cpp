#include "nn/ops/cuda/epilogue_probes.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "nn/ops/cuda/memory.h"

namespace lockstep::nn::cuda {
namespace {

// Kernels work in tiles of at most a few hundred rows and columns; the last ones are the ones that are cut off.
constexpr std::int64_t kLookedAt = 1 << 16;
// A bias lies at a multiple of so many elements: at no odder a place than one in memory of its own.
constexpr std::int64_t kPitch = 256;

float read(const float& value) { return value; }
template <class Half>
float read(const Half& value) {
  return value.to_float();
}

template <class T>
bool all(Context& context, const Tensor& y, std::int64_t begin, bool (*wanted)(float)) {
  std::vector<T> values(static_cast<std::size_t>(std::min(kLookedAt, y.count() - begin)));
  copy_to_host(context, y.reshaped({y.count()}).slice(begin, y.count()), std::as_writable_bytes(std::span(values)));
  return std::all_of(values.begin(), values.end(), [&](const T& value) { return wanted(read(value)); });
}

bool all_of_type(Context& context, const Tensor& y, std::int64_t begin, bool (*wanted)(float)) {
  switch (y.dtype()) {
    case DType::kBF16: return all<BFloat16>(context, y, begin, wanted);
    case DType::kF16: return all<Float16>(context, y, begin, wanted);
    default: return all<float>(context, y, begin, wanted);
  }
}

bool all(Context& context, const Tensor& y, bool (*wanted)(float)) {
  const std::int64_t last = std::max<std::int64_t>(0, y.count() - kLookedAt);
  for (const std::int64_t begin : {std::int64_t{0}, last}) {
    if (!all_of_type(context, y, begin, wanted)) return false;
    if (last == 0) break;  // that was all of it
  }
  return true;
}

bool is_nan(float value) { return std::isnan(value); }
bool is_not_finite(float value) { return !std::isfinite(value); }  // infinity and what is minus infinity: NaN

// What a result may be off by: so much, and so much of itself.
struct Slack {
  double absolute, relative;
};
Slack slack_of(DType dtype, bool tf32) {
  switch (dtype) {
    case DType::kBF16: return {2e-3, 0x1p-7};
    case DType::kF16: return {2e-3, 0x1p-10};
    default: return tf32 ? Slack{1e-5, 1e-4} : Slack{1e-6, 1e-6};
  }
}

constexpr double kScale = 1.5957691216057308;  // 2 √(2 / π)
constexpr double kCubic = 0.044715;

double logistic(double x) { return 1.0 / (1.0 + std::exp(-x)); }
double gelu(double x) { return x * logistic(kScale * x * (1.0 + kCubic * x * x)); }
double slope(double x) {
  const double s = logistic(kScale * x * (1.0 + kCubic * x * x));
  return s + x * s * (1.0 - s) * kScale * (1.0 + 3.0 * kCubic * x * x);
}

bool close(double expected, double got, const Slack& slack) {
  return std::abs(expected - got) <= slack.absolute + slack.relative * std::abs(expected);
}

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

std::vector<float> gelu_probes() {
  std::vector<float> probes(kGeluProbes);
  for (int i = 0; i < kGeluProbes; ++i) probes[static_cast<std::size_t>(i)] = static_cast<float>(i - 64) / 8.0f;
  probes[5] = std::numeric_limits<float>::quiet_NaN();
  probes[77] = std::numeric_limits<float>::infinity();
  return probes;
}

bool gelu_results_agree(const std::vector<float>& probes, const std::vector<float>& saved_preactivation,
                        const std::vector<float>& y, DType dtype, bool tf32) {
  for (std::size_t i = 0; i < y.size(); ++i) {
    const float probe = probes[i % probes.size()];
    if (std::isnan(probe) || std::isinf(probe)) {
      if (std::isfinite(y[i]) || std::isfinite(saved_preactivation[i])) return false;
    } else if (saved_preactivation[i] != probe ||
               !close(gelu(static_cast<double>(probe)), static_cast<double>(y[i]), slack_of(dtype, tf32))) {
      return false;
    }
  }
  return saved_preactivation.size() == y.size();
}

bool gelu_gradients_agree(const std::vector<float>& probes, const std::vector<float>& dx, DType dtype, bool tf32) {
  for (std::size_t i = 0; i < dx.size(); ++i) {
    const float probe = probes[i % probes.size()];
    if (std::isnan(probe)) {
      if (std::isfinite(dx[i])) return false;
    } else if (std::isfinite(probe)) {
      Slack slack = slack_of(dtype, tf32);
      slack.absolute *= 1.0 + std::abs(static_cast<double>(probe));  // tanh's error is multiplied with it
      if (!close(slope(static_cast<double>(probe)), static_cast<double>(dx[i]), slack)) return false;
    }
  }
  return true;
}

}  // namespace lockstep::nn::cuda
