// How long kernels take, by the GPU's clock.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "lockstep/base/function_ref.h"
#include "nn/ops/cuda/context.h"

namespace lockstep::nn::cuda {

/// Seconds of what `run` gives to the context's stream: the least of a few times, after one that does not count. Waits
/// for the GPU; not in a capture.
double seconds_of(Context& context, FunctionRef<void()> run);

/// Which of `names`, a library's kernels for `problem`, is taken (Note [Autotuning]); the context has choices.
/// `seconds_of_kernel` times one, with seconds_of(). If memory for the results of the trials is missing, the first one
/// is taken and not recorded.
std::size_t choose_kernel(Context& context, const std::string& problem, const std::vector<std::string>& names,
                          FunctionRef<double(std::size_t)> seconds_of_kernel);

}  // namespace lockstep::nn::cuda
