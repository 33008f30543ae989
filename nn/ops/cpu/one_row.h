// The product of one row with a matrix: what a model computes for one token.
#pragma once

#include <cstdint>

#include "lockstep/base/dtype.h"

namespace lockstep::nn::cpu {

/// y (out) = w (out, in) · x (in) + b (out); b may be nullptr. X and Y are float or BFloat16, Y no
/// narrower than X; sums are f32. Each element
/// is summed in an order that `in` alone decides. All of w is read once, in its order: it is as fast as memory is.
template <class X, class Y>
void multiply_row(const X* x, const X* w, const Y* b, std::int64_t in, std::int64_t out, Y* y);

/// y (out) = (w (out, in) · x (in)) · scales (out) + b (out), sums in f32: Int8Rows. b may be nullptr.
void multiply_int8_row(const float* x, const std::int8_t* w, const float* scales, const float* b, std::int64_t in,
                       std::int64_t out, float* y);

}  // namespace lockstep::nn::cpu
