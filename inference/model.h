// The model that inference runs, from its weights file, on one device, or several that each have a copy of the
// weights.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/model_metadata.h"
#include "inference/infer.h"
#include "lockstep/nn/layers/module.h"
#include "lockstep/nn/models/language_model.h"
#include "lockstep/nn/models/models.h"
#include "lockstep/nn/ops/backend.h"
#include "lockstep/session/session.h"
#include "session/memory.h"

namespace lockstep::inference {

/// The devices that config.device names for `session`, in that order: session.backend, and a backend for each further
/// one. The session must outlive it. Throws what keeps a device from being opened.
class InferDevices {
 public:
  InferDevices(const InferConfig& config, session::Session& session);

  std::size_t size() const { return backends_.size(); }
  std::span<nn::Backend* const> backends() const { return backends_; }
  nn::Backend& operator[](std::size_t device) const { return *backends_[device]; }
  /// As results have it: "cuda:1", "cpu:3"; "cpu" where no number was given.
  const std::string& name(std::size_t device) const { return names_[device]; }
  /// All of them, as --device has them: "cuda:0,1".
  std::string describe() const;

 private:
  std::vector<std::unique_ptr<nn::Backend>> own_;
  std::vector<nn::Backend*> backends_;
  std::vector<std::string> names_;
};

/// How a session for `config` is opened: a world of one, on all devices that are named.
session::SessionOptions session_options(const InferConfig& config);
/// Opens it. Throws UsageError for one of several ranks, which would each do all of `subcommand`, with this remedy.
session::Session open_alone(const InferConfig& config, const char* subcommand, const char* remedy);

struct InferModel {
  /// On each device, by its place among them: in evaluation mode; parameters do not change any more.
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
/// taken for it. `fused`: for computing (Module::fuse()); otherwise parameters are those of the file. Throws UsageError
/// where model, weights and flags do not go together, naming each parameter that is missing or too many, and IoError
/// for the file.
InferModel open_model(const InferConfig& config, std::span<nn::Backend* const> devices,
                      const std::optional<std::vector<std::int64_t>>& sample_shape,
                      const std::function<void(const nn::ModelSpec&)>& check, bool fused = true);

/// What a model of `spec` takes that runs forward alone, on `batch` samples at a time on each of `streams` streams of
/// `devices` devices like `backend`: built and run once on a backend of shapes in its place (nn::make_meta_backend). Of
/// GPUs it is what the one with most streams takes.
session::MemoryNeeds estimate_memory(const nn::ModelSpec& spec, nn::Backend& backend, std::int64_t batch,
                                     DType activations, int streams, std::size_t devices = 1);

}  // namespace lockstep::inference
