// The weights that a run starts from, and the metadata of those that it saves.
#pragma once

#include <optional>
#include <string>

#include "checkpoint/model_metadata.h"
#include "lockstep/nn/io/safetensors.h"
#include "lockstep/trainer/config.h"

namespace lockstep::trainer {

/// Of a model that is trained on `dataset`.
checkpoint::ModelMetadata model_metadata_of(const TrainConfig& config, const data::Dataset& dataset);

/// The file that a run starts from.
struct RunWeights {
  std::vector<nn::HostTensor> tensors;
  std::optional<checkpoint::ModelMetadata> metadata;
};

/// Reads config.weights, if any. Sizes that `config` leaves open become those of the metadata, or, in files of other
/// programs, those that the tensors' shapes give (spec_of()): the model's, the size of images, and of data whose number
/// of tokens or classes only flags say, that number. Throws UsageError where the two contradict each other, IoError for
/// the file.
RunWeights apply_weights(TrainConfig& config);

}  // namespace lockstep::trainer
