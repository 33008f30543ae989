// The passes of a module that an export compares.
#pragma once

#include <vector>

#include "lockstep/nn/io/onnx.h"
#include "nn/onnx/model_file.h"

namespace lockstep::nn::onnx {

/// Two, with different batches, and a third with another length if one is free (Note [Free extents]). `entries`: the
/// module's state, which must outlive them. Throws UsageError as export_onnx() does.
std::vector<Pass> record_passes(Backend& backend, Module& module, const std::vector<StateEntry>& entries,
                                const std::vector<OnnxInput>& inputs);

}  // namespace lockstep::nn::onnx
