#include "lockstep/nn/layers/generator.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/splitmix.h"

namespace lockstep::nn {

double Generator::unit(std::uint64_t key) {
  return static_cast<double>(SplitMix64::word(key, next_++) >> 11) * 0x1.0p-53;
}

void Generator::uniform(std::span<float> values, double low, double high) {
  if (!draws_) {
    std::ranges::fill(values, 0.0f);
    return;
  }
  const std::uint64_t key = mix64(seed_);
  for (float& value : values) value = static_cast<float>(low + (high - low) * unit(key));
}

void Generator::normal(std::span<float> values, double mean, double deviation) {
  if (!draws_) {
    std::ranges::fill(values, 0.0f);
    return;
  }
  const std::uint64_t key = mix64(seed_);
  for (float& value : values) {
    const double radius = std::sqrt(-2.0 * std::log1p(-unit(key)));
    value = static_cast<float>(mean + deviation * radius * std::cos(2.0 * std::numbers::pi * unit(key)));
  }
}

}  // namespace lockstep::nn
