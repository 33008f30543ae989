// What a library's ReLU makes of numbers that are none.
#pragma once

#include "base/function_ref.h"
#include "nn/ops/cuda/context.h"
#include "nn/tensor/tensor.h"

namespace lockstep::nn::cuda {

// Note [Probing ReLU]
// A model that has diverged must not continue with a finite loss: our ReLU leaves NaN as it is, and infinity too.
// NVIDIA's libraries do not document what their ReLU, fused after a product, does with them, and their kernels differ.
// So each kernel with a ReLU is tried once, when it has been chosen: on the real operands, but with a bias of NaN, and
// with one of infinity. If the result has lost them, the ReLU is a kernel of its own, of ours. That waits for the GPU,
// so it belongs to the first step of a shape, which is never captured.

/// Whether `run`, which is given a bias of `channels` elements to add before its ReLU and overwrites y (…, channels),
/// lets NaN and infinity through. Leaves anything in y.
bool relu_keeps_non_finite(Context& context, std::int64_t channels, const Tensor& y,
                           FunctionRef<void(const Tensor& bias)> run);

}  // namespace lockstep::nn::cuda
