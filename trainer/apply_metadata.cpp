#include "trainer/apply_metadata.h"

#include "base/error.h"
#include "data/open.h"
#include "nn/io/weights.h"
#include "trainer/build.h"
#include "trainer/model_of_file.h"

namespace lockstep::trainer {
namespace {

/// What `spec`, of a file, says of sizes; `source` is that file, where it says them by itself and nobody may say
/// others. Of a file whose shapes tell them what is given holds, and load_state() tells of what does not fit.
void apply_sizes(ModelConfig& model, const nn::ModelSpec& spec, const std::optional<std::string>& source) {
  for (const auto& setting : nn::model_family(spec.name).settings) {
    if (setting.role != SettingSpec::Role::kStructure) continue;
    const SettingValue* const said = spec.settings.find(setting.name);
    const SettingValue* const given = model.settings.find(setting.name);
    if (said == nullptr) continue;
    if (given != nullptr && source && *given != *said)
      throw UsageError(fmt::format("--{} {}, but {} holds a model with {}", setting.name, to_string(*given), *source,
                                   to_string(*said)),
                       fmt::format("leave --{} out: the file says it", setting.name));
    if (given == nullptr) model.settings.set(setting.name, *said);
  }
}

/// As given, or as the model's data had them.
void apply_tokens(ModelConfig& model, const ModelMetadata& metadata) {
  const std::string& name = nn::model_family(metadata.spec.name).tokens_setting;
  if (metadata.tokens && !name.empty() && !model.settings.has(name))
    model.settings.set(name, metadata.spec.sample_shape[0]);
}

// Of data that has no number of pixels, tokens or classes of its own.
void apply_samples(TrainConfig& config, const nn::ModelSpec& spec) {
  const data::DatasetFamily* const family = data::find_dataset_family(config.data);
  if (family == nullptr) return;
  if (family->any_image_size && !config.data_settings.has(data::kImageSize) && spec.sample_shape.size() == 3) {
    if (spec.sample_shape[0] != spec.sample_shape[1])
      throw UsageError(fmt::format("{} holds a model of {}x{} pixels, and the samples of {} are squares",
                                   config.weights, spec.sample_shape[0], spec.sample_shape[1], config.data),
                       "say with --image-size which");
    config.data_settings.set(data::kImageSize, spec.sample_shape[0]);
  }
  if (family->any_classes && !config.classes && !config.reset_head && !config.non_strict &&
      !classes_setting(config.model))
    config.classes = static_cast<int>(spec.classes);
}

}  // namespace

ModelMetadata model_metadata_of(const TrainConfig& config, const data::Dataset& dataset) {
  return {.spec = model_spec(config.model, dataset),
          .tokens = dataset.has_tokens(),
          .class_names = dataset.class_names(),
          .characters = dataset.characters(),
          .image = dataset.image(),
          .data = dataset.name(),
          .seed = config.seed};
}

std::optional<ModelMetadata> read_model_metadata(const std::string& path) {
  return find_model_metadata(nn::read_weights_metadata(path), path);
}

void apply_metadata(ModelConfig& model, const ModelMetadata& metadata, const std::string& source) {
  if (!model.name.empty() && model.name != metadata.spec.name)
    throw UsageError(fmt::format("{} holds a {}, not a {}", source, metadata.spec.name, model.name),
                     fmt::format("name the model {}", metadata.spec.name));
  apply_sizes(model, metadata.spec, source);
  apply_tokens(model, metadata);
}

RunWeights apply_weights(TrainConfig& config) {
  if (config.weights.empty()) return {};
  RunWeights weights{.tensors = {}, .metadata = read_model_metadata(config.weights)};
  if (weights.metadata) apply_metadata(config.model, *weights.metadata, config.weights);
  weights.tensors = nn::read_weights(config.weights);
  check_not_empty(weights.tensors, config.weights);
  const nn::ModelSpec spec = weights.metadata
                                 ? weights.metadata->spec
                                 : nn::spec_of_tensors(config.model.name, config.model.settings, weights.tensors);
  if (!weights.metadata) apply_sizes(config.model, spec, std::nullopt);
  apply_samples(config, spec);
  return weights;
}

}  // namespace lockstep::trainer
