// The models that have a name on the command line.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "nn/layers/layers.h"

namespace lockstep::nn {

/// What a model is built for. Vectors are {F}, images {H, W, C}.
struct ModelSpec {
  std::string name;
  std::vector<std::int64_t> sample_shape;
  std::int64_t classes = 10;
  std::vector<std::int64_t> hidden = {1024, 1024};  // mlp
};

/// "linear", "mlp", "cnn".
const std::vector<std::string>& model_names();

/// Throws UsageError for an unknown name (with the nearest right one) or a sample shape that the model cannot take.
std::unique_ptr<Module> make_model(Context& context, const ModelSpec& spec);

}  // namespace lockstep::nn
