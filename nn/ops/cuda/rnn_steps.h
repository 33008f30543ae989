// Sequences of different lengths, and those that are read from their last step on, for a library that knows neither.
#pragma once

#include "lockstep/nn/tensor/tensor.h"
#include "nn/ops/cuda/context.h"

namespace lockstep::nn::cuda {

/// y (B, T, C) = the steps of x (B, T, C), one after the other, or in reverse from each sequence's last one on; 0 where
/// it has no more. Taking them twice in reverse gives x without its padding. lengths (B) i32 from 0 to T; undefined: T.
/// Of one type, f32 or bf16; not in place.
///
/// Note [Lengths on a GPU]
/// A sequence's lengths are on the device, and the host does not wait for them: so all steps are computed, those of
/// padding from zeros. What they make is replaced by 0 and gets a gradient of 0, and they come after all others, also
/// in reverse: no step that counts reads what they leave.
void take_steps(Context& context, const Tensor& x, const Tensor& lengths, bool reverse, const Tensor& y);

/// h (B, C) = each sequence's last of steps (B, T, C), in the order in which they are computed; of one without steps,
/// what it begins with: first (B, C), undefined: 0.
void take_last_steps(Context& context, const Tensor& steps, const Tensor& lengths, const Tensor& first,
                     const Tensor& h);

}  // namespace lockstep::nn::cuda
