#include "nn/ops/cuda/gelu_probe.h"

#include <cmath>
#include <limits>

namespace lockstep::nn::cuda {
namespace {

// What a result may be off by: so much, and so much of itself.
struct Slack {
  double absolute, relative;
};
Slack slack_of(DType dtype) { return dtype == DType::kBF16 ? Slack{2e-3, 0x1p-7} : Slack{1e-5, 1e-4}; }

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

std::vector<float> gelu_probes() {
  std::vector<float> probes(kGeluProbes);
  for (int i = 0; i < kGeluProbes; ++i) probes[static_cast<std::size_t>(i)] = static_cast<float>(i - 64) / 8.0f;
  probes[5] = std::numeric_limits<float>::quiet_NaN();
  probes[77] = std::numeric_limits<float>::infinity();
  return probes;
}

bool gelu_results_agree(const std::vector<float>& probes, const std::vector<float>& saved_preactivation,
                        const std::vector<float>& y, DType dtype) {
  for (std::size_t i = 0; i < y.size(); ++i) {
    const float probe = probes[i % probes.size()];
    if (std::isnan(probe) || std::isinf(probe)) {
      if (std::isfinite(y[i]) || std::isfinite(saved_preactivation[i])) return false;
    } else if (saved_preactivation[i] != probe ||
               !close(gelu(static_cast<double>(probe)), static_cast<double>(y[i]), slack_of(dtype))) {
      return false;
    }
  }
  return saved_preactivation.size() == y.size();
}

bool gelu_gradients_agree(const std::vector<float>& probes, const std::vector<float>& dx, DType dtype) {
  for (std::size_t i = 0; i < dx.size(); ++i) {
    const float probe = probes[i % probes.size()];
    if (std::isnan(probe)) {
      if (std::isfinite(dx[i])) return false;
    } else if (std::isfinite(probe)) {
      Slack slack = slack_of(dtype);
      slack.absolute *= 1.0 + std::abs(static_cast<double>(probe));  // tanh's error is multiplied with it
      if (!close(slope(static_cast<double>(probe)), static_cast<double>(dx[i]), slack)) return false;
    }
  }
  return true;
}

}  // namespace lockstep::nn::cuda
