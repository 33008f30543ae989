// Where a ReLU's result is positive: a bit for each element.
#pragma once

#include "lockstep/nn/tensor/tensor.h"
#include "nn/ops/cuda/context.h"

namespace lockstep::nn::cuda {

// Note [Masks]
// Element c of a row of y has bit c % 8, counted from the lowest, of byte c / 8 of that row's mask; rows of masks are
// mask_pitch_of(columns) bits long, and the bits after the last column are unspecified. cuBLASLt writes and reads masks
// by itself, but says nowhere in which order: it is asked once, and left alone with them where its order is another.
// Its bit for 0 is not checked: either one is a derivative of ReLU there.

/// y (N, C) = ReLU(y), f32 or bf16, NaN as it is; the result's mask, U8.
void relu_with_mask(Context& context, const Tensor& y, const Tensor& mask);
/// dx (N, C) = 0 where the mask's bits are 0.
void apply_mask(Context& context, const Tensor& mask, const Tensor& dx);

}  // namespace lockstep::nn::cuda
