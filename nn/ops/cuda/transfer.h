// Tensors from one GPU to another.
#pragma once

#include "lockstep/nn/ops/backend.h"

namespace lockstep::nn::cuda {

/// Copies `from`, of `source`, to `to`, of `target`, both CUDA backends: after the work that was given to either until
/// now, before what is given from now on. Does not wait.
void copy_between(Backend& source, const Tensor& from, Backend& target, const Tensor& to);

}  // namespace lockstep::nn::cuda
