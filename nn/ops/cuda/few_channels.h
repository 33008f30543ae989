// Gradients of the weights of convolutions whose input has few channels, such as the first one of a network.
#pragma once

#include "lockstep/nn/tensor/tensor.h"
#include "nn/ops/cuda/context.h"
#include "nn/ops/cuda/cudnn.h"

namespace lockstep::nn::cuda {

/// How often few_channel_gradients() reads dy for `problem` (Note [Few channels]). 0: it does not take that.
int few_channel_passes(const ConvProblem& problem);

/// dw (O, Kh, Kw, C) and, when defined, db (O), both f32, of x (N, H, W, C) and dy (N, H', W', O), as `problem` says:
/// overwritten, or added to when their flag says so. dy lies at a multiple of 16 bytes and is not empty. Summed in f32,
/// in an order that depends on the shapes and the type alone.
void few_channel_gradients(Context& context, const ConvProblem& problem, const Tensor& x, const Tensor& dy,
                           bool accumulate_w, const Tensor& dw, bool accumulate_b, const Tensor& db);

}  // namespace lockstep::nn::cuda
