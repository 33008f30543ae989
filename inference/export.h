// One export of this process: a model with its weights as a file of another program.
#pragma once

#include <string>
#include <vector>

#include "inference/infer.h"
#include "lockstep/nn/io/onnx.h"
#include "lockstep/nn/models/models.h"
#include "options/table.h"

namespace lockstep::inference {

/// Of inference's settings those of the model, its weights, names of classes, the size of images and the log.
struct ExportConfig : InferConfig {
  std::string output;
};

/// The settings of lockstep export onnx; `config` must outlive the table.
options::OptionTable export_onnx_options(ExportConfig& config);

/// What the graph of a model takes: "input"; of tables with categories "categories" too, of models that read texts
/// "token_types" and "lengths".
std::vector<nn::OnnxInput> onnx_inputs_of(const nn::ModelSpec& spec);

/// Writes it; what the weights say of the model is in the file's metadata_props, under "lockstep". Returns the exit
/// code 0; throws lockstep::Error otherwise.
int export_onnx(const ExportConfig& config);

}  // namespace lockstep::inference
