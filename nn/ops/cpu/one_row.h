// The product of one row with a matrix: what a model computes for one token.
#pragma once

#include <cstdint>

namespace lockstep::nn::cpu {

/// y (out) = w (out, in) · x (in) + b (out); b may be nullptr. Each element is summed in an order that `in` alone
/// decides. All of w is read once, in its order: it is as fast as memory is.
void multiply_row(const float* x, const float* w, const float* b, std::int64_t in, std::int64_t out, float* y);

}  // namespace lockstep::nn::cpu
