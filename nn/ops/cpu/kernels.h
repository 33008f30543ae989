// The CPU's kernels, one factory a group. Internal to nn/ops/cpu.
#pragma once

#include <memory>

#include "nn/ops/backend.h"
#include "nn/ops/cpu/onednn.h"

namespace lockstep::nn::cpu {

/// The kernels keep references to `onednn` and `allocator`, which must outlive them.
std::unique_ptr<LinearKernels> make_linear_kernels(OneDnn& onednn);
std::unique_ptr<ConvKernels> make_conv_kernels(OneDnn& onednn, CachingAllocator& allocator);
std::unique_ptr<PoolKernels> make_pool_kernels(OneDnn& onednn, CachingAllocator& allocator);
std::unique_ptr<NormKernels> make_norm_kernels(OneDnn& onednn);
std::unique_ptr<PointwiseKernels> make_pointwise_kernels();
std::unique_ptr<LossKernels> make_loss_kernels();
std::unique_ptr<OptimKernels> make_optim_kernels();

}  // namespace lockstep::nn::cpu
