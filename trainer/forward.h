// A batch through a model.
#pragma once

#include <cstdint>
#include <vector>

#include "data/loader.h"
#include "nn/layers/module.h"

namespace lockstep::trainer {

/// Runs `module` on `batch`, which is not empty, and returns its cross entropy, summed over the samples and scaled as
/// nn::cross_entropy says. `sample_dims`: of one sample, without N. `activations`: f32, or bf16 where the backend
/// computes in it. On the CPU the tape reads the batch's own memory
/// until its next reset.
nn::Loss forward(nn::Backend& backend, nn::Tape& tape, nn::Module& module, const data::Batch& batch,
                 const std::vector<std::int64_t>& sample_dims, float scale, DType activations);

}  // namespace lockstep::trainer
