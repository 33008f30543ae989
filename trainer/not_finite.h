// Where the numbers of a pass stop being finite.
#pragma once

#include <string>

#include "lockstep/nn/layers/module.h"
#include "lockstep/nn/ops/backend.h"
#include "lockstep/trainer/forward.h"

namespace lockstep::trainer {

/// For messages: "the samples' numbers", "fc1.weight", "the output of conv2 (linear)", "the output of relu after
/// conv2"; empty: none was found, as where the loss alone overflows. Computes a forward pass and waits for the device;
/// statistics of batch normalisation move.
std::string first_not_finite(nn::Backend& backend, nn::Module& module, nn::Tape& tape, const Inputs& inputs);

/// Of gradients that a backward pass of `module` has left: the parameter nearest to the loss whose gradient is not
/// finite, "the gradient of fc1.weight"; empty: there is none.
std::string first_gradient_not_finite(nn::Backend& backend, nn::Module& module);

}  // namespace lockstep::trainer
