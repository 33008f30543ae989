// The kernels of a CUDA device; backend.cpp puts them together. They keep references to what they are given, which must
// outlive them.
#pragma once

#include <memory>

#include "nn/ops/attention.h"
#include "nn/ops/conv.h"
#include "nn/ops/cuda/context.h"
#include "nn/ops/embedding.h"
#include "nn/ops/layer_norm.h"
#include "nn/ops/linear.h"
#include "nn/ops/loss.h"
#include "nn/ops/lstm.h"
#include "nn/ops/norm.h"
#include "nn/ops/optim.h"
#include "nn/ops/pointwise.h"
#include "nn/ops/pool.h"

namespace lockstep::nn::cuda {

std::unique_ptr<PointwiseKernels> make_pointwise_kernels(Context& context);
std::unique_ptr<PoolKernels> make_pool_kernels(Context& context);
std::unique_ptr<NormKernels> make_norm_kernels(Context& context);
std::unique_ptr<LayerNormKernels> make_layer_norm_kernels(Context& context);
std::unique_ptr<EmbeddingKernels> make_embedding_kernels(Context& context);
/// Opens cuDNN at the first attention in bf16, and does without where there is none.
std::unique_ptr<AttentionKernels> make_attention_kernels(Context& context);
/// Opens cuDNN at the first layer.
std::unique_ptr<LstmKernels> make_lstm_kernels(Context& context, PointwiseKernels& pointwise);
std::unique_ptr<LossKernels> make_loss_kernels(Context& context);
std::unique_ptr<OptimKernels> make_optim_kernels(Context& context);
/// Opens cuBLASLt. Throws CudaError where there is none.
std::unique_ptr<LinearKernels> make_linear_kernels(Context& context, PointwiseKernels& pointwise);
/// Opens cuDNN at the first convolution.
std::unique_ptr<ConvKernels> make_conv_kernels(Context& context, PointwiseKernels& pointwise, LinearKernels& linear);

}  // namespace lockstep::nn::cuda
