// The CPU's kernels, one factory per group. Internal to nn/ops/cpu.
#pragma once

#include <memory>

#include "lockstep/nn/ops/backend.h"
#include "lockstep/nn/ops/pool.h"
#include "nn/ops/cpu/onednn.h"

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

// The loops of maximum pooling.

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
