// Whether a library's GELU is ours.
#pragma once

#include <vector>

#include "base/dtype.h"

namespace lockstep::nn::cuda {

// Note [Probing GELU]
// NVIDIA says that cuBLASLt computes GELU, not by which formula, nor how exactly: its kernels may use the hardware's
// tanh, which is off by 2⁻¹¹. So it is tried once for each type on numbers that are known. In bf16 an error of 2e-3
// goes under in the rounding of all around it, and is let pass; in f32 it is not.
constexpr int kGeluProbes = 128;

/// From -8 to 8, and NaN and infinity.
std::vector<float> gelu_probes();
/// `saved_preactivation` and `y`: rows of what GELU was taken of, which must be `probes`, and of its results.
bool gelu_results_agree(const std::vector<float>& probes, const std::vector<float>& saved_preactivation,
                        const std::vector<float>& y, DType dtype);
/// `dx`: rows of gradients where those of the results are 1.
bool gelu_gradients_agree(const std::vector<float>& probes, const std::vector<float>& dx, DType dtype);

}  // namespace lockstep::nn::cuda
