// A batch through a model.
#pragma once

#include <cstdint>
#include <vector>

#include "data/loader.h"
#include "nn/layers/module.h"

namespace lockstep::trainer {

/// A batch on the device.
struct Inputs {
  nn::Tensor x;       // (N, sample dims…)
  nn::Tensor labels;  // (N) i32
};

/// `batch`, which is not empty, as it comes: x is f32. `sample_dims`: of one sample, without N. Valid as long as
/// Backend::from_host() says.
Inputs inputs_of(nn::Backend& backend, const data::Batch& batch, const std::vector<std::int64_t>& sample_dims);
/// With x as `activations`: f32, or bf16 where the backend computes in it.
Inputs with_activations(nn::Backend& backend, Inputs inputs, DType activations);

/// Runs `module` on them and returns its cross entropy, summed over the samples and scaled as nn::cross_entropy says.
nn::Loss forward(nn::Tape& tape, nn::Module& module, const Inputs& inputs, float scale);

}  // namespace lockstep::trainer
