// Modules as ONNX files, for onnxruntime and other programs that run them: https://onnx.ai, opset 17.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "lockstep/nn/layers/module.h"

namespace lockstep::nn {

/// An input of a module's forward pass, and of the graph.
struct OnnxInput {
  std::string name = "input";
  /// As the module takes it: the first axis is that of the samples, whose number is free in the graph, so its extent
  /// here counts for nothing. Images (N, H, W, C), of four axes, are (N, C, H, W) in the graph.
  Shape shape = {};
  DType dtype = DType::kF32;  // or kI32: int64 in the graph
  /// The second axis is that of sequences, whose length is free too, up to its extent here. All such inputs have one
  /// length.
  bool any_length = false;
};

struct OnnxOptions {
  std::vector<std::string> outputs = {"logits"};     // names, in the order of the module's outputs
  std::map<std::string, std::string> metadata = {};  // metadata_props
  /// Of the file at most. Where weights make it larger, they are in PATH.data, which belongs beside it: readers take no
  /// more than 2 GiB at once.
  std::uint64_t most_bytes = 2'000'000'000;
};

/// What has been written.
struct OnnxReport {
  std::size_t nodes = 0;
  std::uint64_t bytes = 0;       // of the file
  std::uint64_t data_bytes = 0;  // of PATH.data; 0: there is none
};

/// Writes the forward pass of `module`, which is in evaluation mode and computes in f32, as a graph. Parameters and
/// buffers keep their names, and their layouts in weight files; inputs that nothing reads are left out. The module
/// computes a few passes for it, of tensors with shapes and without values (Note [Recorded kernels]), on a stand-in of
/// `backend`, where its tensors lie. So a branch by the number of samples or by a length is only seen where those
/// passes take different ways. `path` is either the old file or the whole new one.
///
/// Throws UsageError, naming the operator: ONNX does not have it, it looks at numbers, or its results depend on the
/// number of samples or on a free length. Throws IoError naming the file.
OnnxReport export_onnx(Backend& backend, Module& module, const std::vector<OnnxInput>& inputs, const std::string& path,
                       const OnnxOptions& options = {});

}  // namespace lockstep::nn
