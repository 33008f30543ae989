// The CPU's kernels, one factory per group. Internal to nn/ops/cpu.
#pragma once

#include <memory>

#include "lockstep/nn/ops/backend.h"
#include "nn/ops/cpu/onednn.h"
#include "nn/ops/cpu/packed_weights.h"

namespace lockstep::nn::cpu {

// Note [ReLU apart]
// oneDNN could apply ReLU inside its products, but its ReLU makes zeros of NaN: a model that has diverged would
// continue with a finite loss. Ours lets NaN through, at the price of one more pass over the result.

/// The kernels keep references to what they are given, which must outlive them.
std::unique_ptr<LinearKernels> make_linear_kernels(OneDnn& onednn, CachingAllocator& allocator,
                                                   PointwiseKernels& pointwise);
/// `shared`: where forward()'s packed weights are, which other kernels read too; nullptr: in memory of their own.
std::unique_ptr<ConvKernels> make_conv_kernels(OneDnn& onednn, CachingAllocator& allocator, PointwiseKernels& pointwise,
                                               PackedWeights* shared);
std::unique_ptr<PoolKernels> make_pool_kernels(OneDnn& onednn, CachingAllocator& allocator);
std::unique_ptr<NormKernels> make_norm_kernels();
std::unique_ptr<LayerNormKernels> make_layer_norm_kernels();
std::unique_ptr<EmbeddingKernels> make_embedding_kernels();
std::unique_ptr<AttentionKernels> make_attention_kernels(CachingAllocator& allocator);
/// `shared`: as for convolutions.
std::unique_ptr<RnnKernels> make_rnn_kernels(CachingAllocator& allocator, LinearKernels& linear,
                                             PointwiseKernels& pointwise, PackedWeights* shared);
std::unique_ptr<PointwiseKernels> make_pointwise_kernels();
std::unique_ptr<OperatorKernels> make_operator_kernels();
std::unique_ptr<LossKernels> make_loss_kernels();
std::unique_ptr<OptimKernels> make_optim_kernels();

}  // namespace lockstep::nn::cpu
