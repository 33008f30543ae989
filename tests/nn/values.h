// Tensors with known content for tests.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>
#include <span>
#include <vector>

#include "base/error.h"
#include "base/splitmix.h"
#include "lockstep/nn/ops/transfer.h"

namespace lockstep::nn::testing {

/// On the backend's device.
inline Tensor tensor_of(Backend& backend, const Shape& shape, const std::vector<float>& values) {
  Tensor made = backend.empty(shape);
  LOCKSTEP_ASSERT(static_cast<std::size_t>(made.count()) == values.size());
  backend.upload(std::as_bytes(std::span(values)), made);
  return made;
}

/// Uniform in [-1, 1).
inline Tensor random_tensor(Backend& backend, const Shape& shape, std::uint64_t seed) {
  std::vector<float> values(static_cast<std::size_t>(shape.count()));
  SplitMix64 random(seed);
  for (float& v : values) v = static_cast<float>(static_cast<double>(random.next() >> 11) * 0x1p-52 - 1.0);
  return tensor_of(backend, shape, values);
}

/// Halves from -1 to 1: sums of products of two are multiples of a quarter, so an odd eighth on top stays away from 0.
inline Tensor random_halves(Backend& backend, const Shape& shape, std::uint64_t seed, float offset = 0.0f) {
  std::vector<float> values(static_cast<std::size_t>(shape.count()));
  SplitMix64 random(seed);
  for (float& v : values) v = 0.5f * (static_cast<float>(random.below(5)) - 2.0f) + offset;
  return tensor_of(backend, shape, values);
}

/// Kernels of the CPU, with as many threads as the parameter says.
class CpuKernelTest : public ::testing::TestWithParam<int> {
 protected:
  Tensor random(const Shape& shape, std::uint64_t seed) { return random_tensor(*backend, shape, seed); }
  Tensor unset(const Shape& shape) {  // so that what a kernel leaves out shows
    Tensor made = backend->empty(shape);
    backend->pointwise().fill(made, std::numeric_limits<float>::quiet_NaN());
    return made;
  }

  std::unique_ptr<Backend> backend = make_cpu_backend(GetParam());
};

inline std::int64_t columns_of(const Shape& shape) { return shape[shape.size() - 1]; }
inline double at(const Tensor& t, std::int64_t i) { return static_cast<double>(t.f32()[i]); }

/// A shuffle of values that lie 0.1 apart, none of them within 0.05 of 0.
inline Tensor shuffled_grid(Backend& backend, const Shape& shape, std::uint64_t seed) {
  std::vector<float> values(static_cast<std::size_t>(shape.count()));
  const std::size_t middle = values.size() / 2;
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = 0.1f * (static_cast<float>(i) - static_cast<float>(middle)) + 0.05f;
  SplitMix64 random(seed);
  for (std::size_t i = values.size(); i > 1; --i)
    std::swap(values[i - 1], values[random.below(static_cast<std::uint32_t>(i))]);
  return tensor_of(backend, shape, values);
}

/// Of a tensor in the host's memory.
inline std::vector<float> values_of(const Tensor& tensor) {
  const auto values = tensor.span<float>();
  return {values.begin(), values.end()};
}
using nn::values_of;  // of one on any device

}  // namespace lockstep::nn::testing
