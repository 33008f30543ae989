// A model whose sizes a weights file tells.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "nn/io/safetensors.h"
#include "nn/models/models.h"

namespace lockstep::trainer {

/// The module of `spec`, which stands in file `source`: what may be a lie takes no more memory than `tensors`, the
/// file's, account for, and 1 GiB more where the file need not have all parameters (`all_are_loaded` false). Throws
/// IoError naming the file where it would be larger, or there is no such model.
std::unique_ptr<nn::Module> make_model_of_file(nn::Context& context, const nn::ModelSpec& spec,
                                               const std::vector<nn::HostTensor>& tensors, const std::string& source,
                                               bool all_are_loaded);

}  // namespace lockstep::trainer
