// What a library's ReLU makes of numbers that are none.
#pragma once

#include "base/function_ref.h"
#include "nn/ops/cuda/context.h"
#include "nn/tensor/tensor.h"

namespace lockstep::nn::cuda {

// Note [Probing ReLU]
// A model that has diverged must not go on with a finite loss: our ReLU leaves NaN as it is, and infinity too. What
// NVIDIA's libraries do with them, fused behind a product, is written nowhere and differs between their kernels. So
// each kernel with a ReLU is tried once, when it has been chosen: on the real operands, but with a bias of NaN, and
// with one of infinity, the result of which is looked at. Where they are lost the ReLU is a kernel of its own, of ours.
// That waits for the GPU, and so belongs to the first step of a shape, which is never recorded.

/// Whether `run`, which is given a bias of `channels` elements to add before its ReLU and overwrites y (…, channels),
/// lets NaN and infinity through. Leaves anything in y.
bool relu_keeps_non_finite(Context& context, std::int64_t channels, const Tensor& y,
                           FunctionRef<void(const Tensor& bias)> run);

}  // namespace lockstep::nn::cuda
