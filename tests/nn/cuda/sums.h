// How closely sums of products must agree.
#pragma once

#include "tests/nn/cuda/device_values.h"

namespace lockstep::nn::testing {

/// For a sum in f32 of `terms` products of numbers up to 1, in any order, that then becomes `dtype`. Partial sums of so
/// many random products reach about √terms, and each is rounded by up to 2⁻²⁴ of that; these errors add up like a
/// random walk, to about terms · 0.3 · 2⁻²³. Of that five times; a product in TF32 would be off by 2⁻¹² alone.
inline Tolerance tolerance_of_sum(std::int64_t terms, DType dtype) {
  return {.dtype = dtype, .ulps = 8.0 + 1.5 * static_cast<double>(terms)};
}

}  // namespace lockstep::nn::testing
