// A module's parameters and buffers as a state dict: names, shapes and bytes as PyTorch has them.
#pragma once

#include <string>
#include <vector>

#include "nn/io/safetensors.h"
#include "nn/layers/module.h"

namespace lockstep::nn {

/// Parameters, then buffers, in registration order and file layout.
std::vector<HostTensor> state_of(const Module& module);

/// Sets all parameters and buffers. Everything is checked before anything is changed: names that are missing or
/// unexpected and shapes that differ are listed together in one UsageError.
void load_state(Module& module, const std::vector<HostTensor>& tensors, const std::string& source);

/// SHA-256 over name bytes and little-endian f32 bytes of all parameters, in name order and file layout.
std::string parameters_sha256(const Module& module);

}  // namespace lockstep::nn
