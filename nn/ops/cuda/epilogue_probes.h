// What the libraries' fused ReLU and GELU make of numbers: probed, since it is not documented.
#pragma once

#include <vector>

#include "lockstep/base/dtype.h"
#include "lockstep/base/function_ref.h"
#include "lockstep/nn/tensor/tensor.h"
#include "nn/ops/cuda/context.h"

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

// Note [Probing GELU]
// NVIDIA says that cuBLASLt computes GELU, not by which formula, nor how exactly: its kernels may use the hardware's
// tanh, which is off by 2⁻¹¹. So it is tried once for each type on numbers that are known. In 16 bits an error of
// 2e-3 goes under in the rounding of all around it, and is let pass, as one of 1e-5 is beside products in TF32. In f32
// GELU is as exact as ours: cuBLASLt's (13.0 on an H200) is off by 5e-6, and is not taken.
constexpr int kGeluProbes = 128;

/// From -8 to 8, and NaN and infinity.
std::vector<float> gelu_probes();
/// `saved_preactivation` and `y`: rows of what GELU was taken of, which must be `probes`, and of its results. `tf32`:
/// products in f32 are rounded to TF32.
bool gelu_results_agree(const std::vector<float>& probes, const std::vector<float>& saved_preactivation,
                        const std::vector<float>& y, DType dtype, bool tf32);
/// `dx`: rows of gradients where those of the results are 1.
bool gelu_gradients_agree(const std::vector<float>& probes, const std::vector<float>& dx, DType dtype, bool tf32);

}  // namespace lockstep::nn::cuda
