// The loops of maximum pooling. Internal to nn/ops/cpu.
#pragma once

#include <cstdint>

#include "lockstep/nn/ops/pool.h"

namespace lockstep::nn::cpu {

// Note [Max pooling]
// oneDNN's maximum passes over NaN, so that a diverged model could continue with a finite loss; it knows no ReLU; and
// its notes for backward belong to a whole batch. These loops keep NaN, take ReLU along (in the notes too, so that
// backward does not look at y), and do a batch piece by piece.

/// Tensors as in PoolKernels. N is at least 1.
void max_pool_forward(const Tensor& x, const Window& window, bool relu, const Tensor& y, const Tensor& choices);
/// Takes memory of `allocator` where gradients of bf16 are added up.
void max_pool_backward(const Tensor& dy, const Tensor& choices, const Window& window, const Tensor& dx,
                       CachingAllocator& allocator);

}  // namespace lockstep::nn::cpu
