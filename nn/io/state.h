// A module's parameters and buffers as a state dict: names, shapes and bytes as PyTorch has them.
#pragma once

#include <string>
#include <vector>

#include "nn/io/safetensors.h"
#include "nn/layers/module.h"

namespace lockstep::nn {

/// Parameters, then buffers, in registration order and file layout. Where all names begin with "module.", as those of a
/// module within a wrapper do, they are without it.
std::vector<HostTensor> state_of(const Module& module);

struct LoadOptions {
  /// Names that are missing or unexpected are errors; otherwise they are returned. Shapes that differ always are
  /// errors.
  bool strict = true;
  /// Names are taken as they are. Otherwise a leading "module.", which PyTorch's DataParallel and
  /// DistributedDataParallel put in front of all names, is taken off where all of the file's have it, and where all of
  /// the model's have it; and so is the "transformer." of a file of GPT-2 with its head.
  bool keep_prefix = false;
  /// Names that start so are neither loaded nor missed; empty: none.
  std::string without = {};
};

/// What was not loaded.
struct LoadReport {
  std::vector<std::string> missing, unexpected;
};

/// Sets parameters and buffers. Everything is checked before anything is changed: what does not fit is listed in one
/// UsageError. Floating-point numbers of any width are loaded into f32. As PyTorch does, it takes files that lack
/// num_batches_tracked, which then stays. Into a GPT-2 it takes files that hold its attention's masks (unused), and its
/// head (the table of tokens again: unexpected if it differs, or the table itself where that is missing).
LoadReport load_state(Module& module, const std::vector<HostTensor>& tensors, const std::string& source,
                      const LoadOptions& options = {});

/// SHA-256 over name bytes and little-endian f32 bytes of all parameters, in name order and file layout.
std::string parameters_sha256(const Module& module);

}  // namespace lockstep::nn
