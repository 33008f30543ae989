// From a run to its model's metadata, and from metadata to a run.
#pragma once

#include <optional>
#include <string>

#include "nn/io/safetensors.h"
#include "trainer/config.h"
#include "trainer/model_metadata.h"

namespace lockstep::trainer {

/// Of a model that is trained on `dataset`.
ModelMetadata model_metadata_of(const TrainConfig& config, const data::Dataset& dataset);

/// Of a file: nothing where it is another program's, or of another kind. Throws IoError as nn::read_weights() does.
std::optional<ModelMetadata> read_model_metadata(const std::string& path);

/// Sizes that `model` leaves open become those of the metadata. Throws UsageError naming the flag for others, and for
/// another model. An lstm takes texts of any context: one that is given stays.
void apply_metadata(ModelConfig& model, const ModelMetadata& metadata, const std::string& source);

/// The file that a run starts from.
struct RunWeights {
  std::vector<nn::HostTensor> tensors;
  std::optional<ModelMetadata> metadata;
};

/// Reads config.weights, if any. Sizes that `config` leaves open become those of the metadata, or, in files of other
/// programs, those that the tensors' shapes tell (spec_of()): the model's, the size of images, and of data whose number
/// of tokens or classes only flags say, that number. Throws UsageError where the two contradict each other, IoError for
/// the file.
RunWeights apply_weights(TrainConfig& config);

}  // namespace lockstep::trainer
