#include "trainer/build.h"

#include "base/error.h"
#include "checkpoint/model_metadata.h"
#include "lockstep/data/families.h"
#include "lockstep/nn/io/weights.h"

namespace lockstep::trainer {

using checkpoint::ModelMetadata;

namespace {

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

checkpoint::ModelMetadata model_metadata_of(const TrainConfig& config, const data::Dataset& dataset) {
  return {.spec = model_spec(config.model, dataset),
          .tokens = dataset.has_tokens(),
          .class_names = dataset.class_names(),
          .characters = dataset.characters(),
          .word_pieces = dataset.word_pieces(),
          .image = dataset.image(),
          .table = dataset.info().table,
          .data = dataset.name(),
          .seed = config.seed};
}

RunWeights apply_weights(TrainConfig& config) {
  if (config.weights.empty()) return {};
  RunWeights weights{.tensors = {}, .metadata = checkpoint::read_model_metadata(config.weights)};
  if (weights.metadata) checkpoint::apply_metadata(config.model, *weights.metadata, config.weights);
  weights.tensors = nn::read_weights(config.weights, {.key = config.weights_key});
  checkpoint::check_not_empty(weights.tensors, config.weights);
  const nn::ModelSpec spec = weights.metadata ? weights.metadata->spec
                                              : checkpoint::spec_of_file(config.model, weights.tensors, config.weights);
  if (!weights.metadata) checkpoint::apply_sizes(config.model, spec, std::nullopt);
  apply_samples(config, spec);
  return weights;
}

}  // namespace lockstep::trainer
