// Numbers that Python and C++ make alike: counter.py says which, and how.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/splitmix.h"

namespace lockstep::parity {

inline std::uint64_t key_of(std::string_view name) {
  std::uint64_t key = 0xcbf29ce484222325u;
  for (const char c : name) key = (key ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return key;
}

inline std::int64_t count_of(const std::vector<std::int64_t>& shape) {
  std::int64_t count = 1;
  for (const std::int64_t d : shape) count *= d;
  return count;
}

inline std::vector<float> uniform(std::string_view name, std::int64_t count, int exponent = 0, double centre = 0.0,
                                  double apart = 0.0) {
  const std::uint64_t key = key_of(name);
  std::vector<float> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto whole = static_cast<std::int64_t>(SplitMix64::word(key, i) >> 40) - (std::int64_t{1} << 23);
    const double value = std::ldexp(static_cast<double>(whole), exponent - 23);
    values[i] = static_cast<float>(value + std::copysign(apart, value) + centre);
  }
  return values;
}

inline double sign(std::uint64_t key, std::uint64_t i) { return (SplitMix64::word(key, i) & 1) != 0 ? -1.0 : 1.0; }

template <class T>
std::vector<T> below(std::string_view name, std::int64_t count, std::int64_t bound) {
  const std::uint64_t key = key_of(name);
  std::vector<T> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<T>(SplitMix64::word(key, i) % static_cast<std::uint64_t>(bound));
  return values;
}

/// Of a parameter or buffer of `case`, in PyTorch's layout.
inline std::vector<float> initial(const std::string& case_name, const std::string& name,
                                  const std::vector<std::int64_t>& shape, double norm_bias = 0.0) {
  const std::string key = case_name + "/" + name;
  if (shape.size() > 1) {
    const auto inputs = static_cast<double>(count_of(shape)) / static_cast<double>(shape[0]);
    int exponent = 1;
    while (exponent > -32 && std::pow(4.0, exponent) * inputs > 4.0) --exponent;
    return uniform(key, count_of(shape), exponent);
  }
  if (name.ends_with("weight") || name.ends_with("running_var")) return uniform(key, count_of(shape), -1, 1.0);
  if (name.starts_with("features.") && name.ends_with("bias")) return uniform(key, count_of(shape), -2, norm_bias);
  const bool of_norm = name.find("bn") != std::string::npos || name.find(".downsample.1.") != std::string::npos;
  return uniform(key, count_of(shape), -2, 0.0, of_norm && name.ends_with("bias") ? norm_bias : 0.0);
}

}  // namespace lockstep::parity
