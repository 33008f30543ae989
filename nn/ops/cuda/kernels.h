// The kernels of a CUDA device; backend.cpp puts them together. They keep references to what they are given, which must
// outlive them.
#pragma once

#include <memory>

#include "lockstep/nn/ops/attention.h"
#include "lockstep/nn/ops/conv.h"
#include "lockstep/nn/ops/embedding.h"
#include "lockstep/nn/ops/layer_norm.h"
#include "lockstep/nn/ops/linear.h"
#include "lockstep/nn/ops/loss.h"
#include "lockstep/nn/ops/norm.h"
#include "lockstep/nn/ops/operators.h"
#include "lockstep/nn/ops/optim.h"
#include "lockstep/nn/ops/pointwise.h"
#include "lockstep/nn/ops/pool.h"
#include "lockstep/nn/ops/rnn.h"
#include "nn/ops/cuda/context.h"

namespace lockstep::nn::cuda {

std::unique_ptr<PointwiseKernels> make_pointwise_kernels(Context& context);
std::unique_ptr<PoolKernels> make_pool_kernels(Context& context);
std::unique_ptr<NormKernels> make_norm_kernels(Context& context);
std::unique_ptr<LayerNormKernels> make_layer_norm_kernels(Context& context);
std::unique_ptr<EmbeddingKernels> make_embedding_kernels(Context& context);
/// Opens cuDNN at the first attention in bf16, and does without where there is none.
std::unique_ptr<AttentionKernels> make_attention_kernels(Context& context);
/// Opens cuDNN at the first layer.
std::unique_ptr<RnnKernels> make_rnn_kernels(Context& context, PointwiseKernels& pointwise);
std::unique_ptr<OperatorKernels> make_operator_kernels(Context& context);
std::unique_ptr<LossKernels> make_loss_kernels(Context& context);
std::unique_ptr<OptimKernels> make_optim_kernels(Context& context);
/// Opens cuBLASLt. Throws CudaError where there is none.
std::unique_ptr<LinearKernels> make_linear_kernels(Context& context, PointwiseKernels& pointwise);
/// Opens cuDNN at the first convolution.
std::unique_ptr<ConvKernels> make_conv_kernels(Context& context, PointwiseKernels& pointwise, LinearKernels& linear);

}  // namespace lockstep::nn::cuda
