#include "nn/layers/generator.h"

#include "base/splitmix.h"

namespace lockstep::nn {

void Generator::uniform(std::span<float> values, double low, double high) {
  const std::uint64_t key = mix64(seed_);
  for (float& value : values) {
    const double unit = static_cast<double>(SplitMix64::word(key, next_++) >> 11) * 0x1.0p-53;
    value = static_cast<float>(low + (high - low) * unit);
  }
}

}  // namespace lockstep::nn
