// The file of --save: the weights of a run's end, or of its best evaluation.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/manifest.h"
#include "checkpoint/model_metadata.h"
#include "lockstep/comm/process_group.h"
#include "lockstep/data/dataset.h"
#include "lockstep/nn/layers/module.h"
#include "lockstep/nn/optim/moving_average.h"
#include "session/saved_file.h"
#include "trainer/best.h"

namespace lockstep::trainer {

/// Of a --save that names a directory, the file in it.
TrainConfig with_saved_file(TrainConfig config);
/// Whether the file has the best evaluation's weights.
bool keeps_best_weights(const TrainConfig& config);
/// On rank 0, before training: throws UsageError or IoError where the weights, and what goes beside them, cannot be
/// written. Makes the directory.
void check_saved_place(const TrainConfig& config);

/// Rank 0's.
class SavedWeights {
 public:
  /// All outlive it. `average`: of the model's parameters, which is what is saved then; nullptr: there is none.
  SavedWeights(const TrainConfig& config, const nn::Module& model, nn::MovingAverage* average,
               const data::Dataset& dataset);

  /// Of a run that resumes: whether the file has what the checkpoint's run saved last, or later.
  bool has(const BestEvaluation& best) const;
  /// Replaces the file with those of an evaluation. Training continues where that fails, with a warning.
  std::optional<session::SavedFile> save_best(const BestEvaluation& best);
  /// At the end: those of now, unless the best ones are there: nothing then. Throws IoError where what should be there
  /// is not.
  std::optional<session::SavedFile> finish(const std::optional<BestEvaluation>& best);

 private:
  session::SavedFile write(const std::optional<BestEvaluation>& best) const;
  void write_beside(const checkpoint::ModelMetadata& metadata) const;

  const TrainConfig& config_;
  const nn::Module& model_;
  nn::MovingAverage* const average_;
  const data::Dataset& dataset_;
  const std::vector<std::pair<std::string, std::string>> byte_pairs_;  // names and texts of their files
  std::string failure_, remedy_;
};

/// Collective: what the checkpoint knows of the best evaluation. Where its weights are to be in a file and are not, it
/// is worth nothing: `best` then knows of none, though the next may be worse, and rank 0 says so.
void resume_best(const TrainConfig& config, const checkpoint::CheckpointManifest& manifest, const SavedWeights& saved,
                 comm::ProcessGroup& group, BestWatch& best);

}  // namespace lockstep::trainer
