// What is done with biases apart from the products that they belong to.
#pragma once

#include "lockstep/nn/tensor/tensor.h"
#include "nn/ops/cuda/context.h"

namespace lockstep::nn::cuda {

/// sums (C) f32 = column sums of x (M, C), f32 or bf16, whose rows may lie apart, added to what sums holds when
/// `accumulate`. Summed in f32, in an order that depends on M, C and how x is aligned alone. M may be 0.
void sum_columns(Context& context, const Tensor& x, bool accumulate, const Tensor& sums);

/// y (M, C) += b (C) in each row; both f32 or both bf16. y may have a pitch.
void add_to_rows(Context& context, const Tensor& b, const Tensor& y);

}  // namespace lockstep::nn::cuda
