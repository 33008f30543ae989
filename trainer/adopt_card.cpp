#include "trainer/adopt_card.h"

#include "base/error.h"
#include "nn/io/weights.h"
#include "trainer/build.h"

namespace lockstep::trainer {
namespace {

template <class Given>
void adopt_size(std::optional<Given>& given, std::int64_t size, const char* flag, const std::string& source) {
  if (given && *given != size)
    throw UsageError(fmt::format("--{} {}, but {} holds a model with {}", flag, *given, source, size),
                     fmt::format("leave --{} out: the file says it", flag));
  given = static_cast<Given>(size);
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
  }
  if (card.spec.name == "lstm") {
    adopt_size(model.layers, card.spec.lstm.layers, "layers", source);
    adopt_size(model.width, card.spec.lstm.width, "width", source);
  }
}

}  // namespace lockstep::trainer
