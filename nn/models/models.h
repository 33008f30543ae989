// The models that have a name on the command line.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "nn/layers/layers.h"
#include "nn/models/gpt.h"
#include "nn/models/lstm.h"

namespace lockstep::nn {

/// What a model is built for. Vectors are {F}, images {H, W, C}, tokens {T}.
struct ModelSpec {
  std::string name;
  std::vector<std::int64_t> sample_shape;
  std::int64_t classes = 10;
  std::vector<std::int64_t> hidden = {1024, 1024};  // mlp
  GptSpec gpt = {};                                 // gpt, gpt2; its vocabulary is `classes`
  LstmSpec lstm = {};                               // lstm; over tokens, or over the rows of images
  bool zero_init_residual = false;                  // ResNets
};

/// What a GPT of this name is where nothing else is said: GPT-2's smallest for "gpt2".
GptSpec default_gpt(const std::string& name);

/// "linear", "mlp", "cnn", "resnet18", "resnet50", "resnet18-cifar", "lstm", "gpt", "gpt2".
const std::vector<std::string>& model_names();
/// Of the family of that name, whatever its size.
inline bool is_gpt(const std::string& model) { return model.starts_with("gpt"); }
inline bool is_resnet(const std::string& model) { return model.starts_with("resnet"); }
/// Throws UsageError for another name, with the nearest right one.
void check_model_name(const std::string& name);

/// With a recipe. Throws UsageError for an unknown name (with the nearest right one) or a sample shape that the model
/// cannot take.
std::unique_ptr<Module> make_model(Context& context, const ModelSpec& spec);

}  // namespace lockstep::nn
