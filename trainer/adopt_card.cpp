#include "trainer/adopt_card.h"

#include "base/error.h"
#include "nn/io/weights.h"
#include "trainer/build.h"
#include "trainer/model_of_file.h"
#include "trainer/spec_of_file.h"

namespace lockstep::trainer {
namespace {

template <class Given>
void adopt_size(std::optional<Given>& given, std::int64_t size, const char* flag, const std::string& source) {
  if (given && *given != size)
    throw UsageError(fmt::format("--{} {}, but {} holds a model with {}", flag, *given, source, size),
                     fmt::format("leave --{} out: the file says it", flag));
  given = static_cast<Given>(size);
}

// Of a file without a card: what is given holds, and load_state() tells of what does not fit.
void adopt_shapes(ModelConfig& model, const nn::ModelSpec& spec) {
  const auto open = [](std::optional<int>& given, std::int64_t size) {
    if (!given) given = static_cast<int>(size);
  };
  if (spec.name == "mlp" && model.hidden.empty()) model.hidden.assign(spec.hidden.begin(), spec.hidden.end());
  if (spec.name.starts_with("gpt")) {
    open(model.layers, spec.gpt.layers);
    open(model.heads, spec.gpt.heads);
    open(model.width, spec.gpt.width);
    open(model.context, spec.gpt.context);
    model.tied_head = spec.gpt.tied;
  }
  if (spec.name == "lstm") {
    open(model.layers, spec.lstm.layers);
    open(model.width, spec.lstm.width);
  }
}

// Of data that has no number of pixels, tokens or classes of its own.
void adopt_samples(TrainConfig& config, const nn::ModelSpec& spec) {
  if (config.data.starts_with("images:") && !config.image_size && spec.sample_shape.size() == 3) {
    if (spec.sample_shape[0] != spec.sample_shape[1])
      throw UsageError(fmt::format("{} holds a model of {}x{} pixels, and the samples of {} are squares",
                                   config.weights, spec.sample_shape[0], spec.sample_shape[1], config.data),
                       "say with --image-size which");
    config.image_size = static_cast<int>(spec.sample_shape[0]);
  }
  if ((config.data.starts_with("tokens:") || config.data.starts_with("random:")) && !config.classes &&
      !config.model.out && !config.reset_head && !config.non_strict)
    config.classes = static_cast<int>(spec.classes);
}

}  // namespace

ModelCard card_of(const TrainConfig& config, const data::Dataset& dataset) {
  return {.spec = model_spec(config.model, dataset),
          .tokens = dataset.has_tokens(),
          .class_names = dataset.class_names(),
          .characters = dataset.characters(),
          .image = dataset.image(),
          .data = dataset.name(),
          .seed = config.seed};
}

std::optional<ModelCard> read_card(const std::string& path) {
  return card_among(nn::read_weights_metadata(path), path);
}

void adopt(ModelConfig& model, const ModelCard& card, const std::string& source) {
  if (!model.name.empty() && model.name != card.spec.name)
    throw UsageError(fmt::format("{} holds a {}, not a {}", source, card.spec.name, model.name),
                     fmt::format("name the model {}", card.spec.name));
  if (card.spec.name == "mlp") {
    const std::vector<int> hidden(card.spec.hidden.begin(), card.spec.hidden.end());
    if (!model.hidden.empty() && model.hidden != hidden)
      throw UsageError(fmt::format("--hidden differs from the layers of {}", source),
                       "leave --hidden out: the file says it");
    model.hidden = hidden;
  }
  if (card.spec.name.starts_with("gpt")) {
    adopt_size(model.layers, card.spec.gpt.layers, "layers", source);
    adopt_size(model.heads, card.spec.gpt.heads, "heads", source);
    adopt_size(model.width, card.spec.gpt.width, "width", source);
    adopt_size(model.context, card.spec.gpt.context, "context", source);
    model.tied_head = card.spec.gpt.tied;
  }
  if (card.spec.name == "lstm") {
    adopt_size(model.layers, card.spec.lstm.layers, "layers", source);
    adopt_size(model.width, card.spec.lstm.width, "width", source);
    if (card.tokens && !model.context) model.context = static_cast<int>(card.spec.sample_shape[0]);
  }
}

RunWeights adopt_weights(TrainConfig& config) {
  if (config.weights.empty()) return {};
  RunWeights weights{.tensors = {}, .card = read_card(config.weights)};
  if (weights.card) adopt(config.model, *weights.card, config.weights);
  weights.tensors = nn::read_weights(config.weights);
  check_not_empty(weights.tensors, config.weights);
  const nn::ModelSpec spec = weights.card ? weights.card->spec : spec_of(config.model, weights.tensors);
  if (!weights.card) adopt_shapes(config.model, spec);
  adopt_samples(config, spec);
  return weights;
}

}  // namespace lockstep::trainer
