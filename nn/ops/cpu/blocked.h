// Activations with sixteen channels side by side, as some of oneDNN's kernels want them.
#pragma once

#include <cstdint>

#include "lockstep/nn/tensor/tensor.h"

namespace lockstep::nn::cpu {

inline constexpr std::int64_t kChannelBlock = 16;

/// blocked (N, C / 16, H, W, 16) = plain (N, H, W, C), f32 or bf16; C is a multiple of 16.
void to_blocked(const Tensor& plain, float* blocked);
/// plain (N, H, W, C) = blocked (N, C / 16, H, W, 16), or the ReLU of that; NaN stays NaN.
void from_blocked(const float* blocked, const Tensor& plain, bool relu = false);

}  // namespace lockstep::nn::cpu
