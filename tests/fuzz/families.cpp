// Families for programs that read what files say of models and build none: the product's would bring all kernels along.
#include <algorithm>

#include "base/error.h"
#include "lockstep/nn/models/models.h"

namespace lockstep::nn {

const std::vector<const ModelFamily*>& model_families() {
  static const ModelFamily sizes = {
      .variants = {{.name = "gpt"}, {.name = "lstm", .defaults = {{"layers", 2}}}},
      .settings = {size_setting("layers", 4, "blocks"),
                   size_setting("heads", 4, "attention heads"),
                   size_setting("width", 256, "features"),
                   size_setting("context", 256, "tokens of a sample"),
                   {.name = "tied", .fallback = true, .help = "a head of its own", .is_flag = false},
                   dropout_setting()},
      .takes_tokens = true,
      .tokens_setting = "context"};
  static const ModelFamily list = {
      .variants = {{.name = "mlp"}},
      .settings = {{.name = "hidden", .fallback = {1024, 1024}, .help = "widths", .low = 1, .high = 1 << 24}},
      .takes_vectors = true};
  static const ModelFamily none = {.variants = {{.name = "cnn"}}, .takes_images = true};
  static const ModelFamily words = {
      .variants = {{.name = "rnn"}},
      .settings = {{.name = "nonlinearity", .fallback = "tanh", .help = "of each layer", .choices = {"tanh", "relu"}}},
      .takes_images = true};
  static const std::vector<const ModelFamily*> families = {&sizes, &list, &none, &words};
  return families;
}

const ModelFamily* find_model_family(const std::string& name) {
  for (const ModelFamily* family : model_families())
    if (std::ranges::find(family->variants, name, &ModelVariant::name) != family->variants.end()) return family;
  return nullptr;
}

const ModelFamily& model_family(const std::string& name) {
  if (const ModelFamily* const family = find_model_family(name)) return *family;
  throw UsageError("unknown model", "name another one");
}

}  // namespace lockstep::nn
