// The model that inference runs, from its weights file.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "checkpoint/model_metadata.h"
#include "inference/config.h"
#include "inference/infer_devices.h"
#include "lockstep/nn/layers/module.h"
#include "lockstep/nn/models/language_model.h"
#include "lockstep/nn/models/models.h"
#include "session/memory.h"

namespace lockstep::inference {

struct InferModel {
  /// On each device, by its place among them: fused for evaluation; parameters do not change any more.
  std::vector<std::unique_ptr<nn::Module>> modules;
  nn::ModelSpec spec;
  std::optional<checkpoint::ModelMetadata> metadata;  // what the weights file says, if it does

  /// Whether it reads texts as word pieces, as a whole.
  bool reads_texts() const { return nn::model_family(spec.name).word_pieces; }
  /// The module of a device, where it is a language model; else nullptr.
  const nn::LanguageModel* language(std::size_t device = 0) const {
    return dynamic_cast<const nn::LanguageModel*>(modules[device].get());
  }
};

/// The model with the weights of config.weights, or, without any, new ones from the seed: the same on all devices.
/// `sample_shape`: of the inputs to come, where it is known. `check` sees what is about to be built, before memory is
/// taken for it. Throws UsageError where model, weights and flags do not go together, naming each parameter that is
/// missing or too many, and IoError for the file.
InferModel open_model(const InferConfig& config, const InferDevices& devices,
                      const std::optional<std::vector<std::int64_t>>& sample_shape,
                      const std::function<void(const nn::ModelSpec&)>& check);

/// What a model of `spec` takes that runs forward alone, on `batch` samples at a time on each of `streams` streams of
/// `devices` devices like `backend`: built and run once on a backend of shapes in its place (nn::make_meta_backend). Of
/// GPUs it is what the one with most streams takes.
session::MemoryNeeds estimate_memory(const nn::ModelSpec& spec, nn::Backend& backend, std::int64_t batch,
                                     DType activations, int streams, std::size_t devices = 1);

}  // namespace lockstep::inference
