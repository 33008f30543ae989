// A model whose sizes come from a weights file.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "lockstep/nn/io/safetensors.h"
#include "lockstep/nn/io/state.h"
#include "lockstep/nn/models/models.h"

namespace lockstep::checkpoint {

/// Throws IoError naming file `source` and the first of `tensors` that has no elements: no model has such.
void check_not_empty(const std::vector<nn::HostTensor>& tensors, const std::string& source);

/// Where the sizes of a model come from.
struct SizesOf {
  bool metadata = true;        // the file says them; otherwise its tensors' shapes and flags do
  bool all_are_loaded = true;  // the file must have all parameters
};

/// The module of `spec`, which comes from file `source`: what may be a lie takes no more memory than `tensors`, the
/// file's, account for, and 1 GiB more where the file may lack parameters or be another model's. Throws IoError naming
/// the file where it would be larger, or where metadata names no model; without metadata, UsageError for what is no
/// model.
std::unique_ptr<nn::Module> make_model_of_file(nn::Context& context, const nn::ModelSpec& spec,
                                               const std::vector<nn::HostTensor>& tensors, const std::string& source,
                                               const SizesOf& sizes);

/// Logs which tensors of file `source` have other names than the model's, which ones it lacks (`instead`: their new
/// state) and which ones are not used.
void log_report(const nn::LoadReport& report, const std::string& source, const char* instead);

}  // namespace lockstep::checkpoint
