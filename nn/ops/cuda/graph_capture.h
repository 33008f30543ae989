// CUDA graphs.
#pragma once

#include <memory>
#include <string>

#include "lockstep/base/device.h"
#include "lockstep/base/function_ref.h"
#include "lockstep/nn/ops/backend.h"

namespace lockstep::nn::cuda {

/// Backend::capture(): captures what `work` gives to `stream`, and to streams that wait for it and come back to it, as
/// a graph. The capture is this thread's alone: what others do meanwhile neither joins nor breaks it.
std::unique_ptr<CapturedGraph> capture_graph(StreamView stream, FunctionRef<void()> work, std::string& why_not);

}  // namespace lockstep::nn::cuda
