#include "trainer/saved_weights.h"

#include "base/error.h"
#include "base/log.h"
#include "base/status_report.h"
#include "lockstep/nn/io/state.h"
#include "lockstep/nn/io/weights.h"
#include "trainer/build.h"

namespace lockstep::trainer {

void SavedWeights::write(const std::optional<BestEvaluation>& best) const {
  // With a moving average, it: what was evaluated last.
  std::optional<nn::MovingAverage::InPlace> in_place;
  if (average_ != nullptr) in_place.emplace(*average_);
  auto metadata = model_metadata_of(config_, dataset_);
  metadata.best = best;
  report_status({.kind = StatusReport::Kind::kSaving, .text = config_.save});
  nn::write_weights(config_.save, nn::state_of(model_), checkpoint::metadata_of(metadata));
  report_status({.kind = StatusReport::Kind::kSaved});
}

bool SavedWeights::has(const BestEvaluation& best) const {
  try {
    const auto there = checkpoint::read_model_metadata(config_.save);
    return there && there->best && there->best->metric == best.metric && there->best->step >= best.step;
  } catch (const IoError&) {
    return false;  // there is none, or it is another one
  }
}

void SavedWeights::save_best(const BestEvaluation& best) {
  try {
    write(best);
    failure_.clear();
  } catch (const IoError& error) {
    failure_ = error.what();
    remedy_ = error.remedy();
    log_warn("the best weights so far, of step {}, are not saved: {} → {}; training continues", best.step, failure_,
             remedy_);
  }
}

void SavedWeights::finish(const std::optional<BestEvaluation>& best) {
  if (config_.save.empty()) return;
  const bool keeps_best = !config_.save_best.empty() && best;
  if (keeps_best && !failure_.empty())
    throw IoError(
        fmt::format("training is complete, but its best weights, of step {}, are lost: {}", best->step, failure_),
        remedy_);
  if (keeps_best) return;
  try {
    write({});
  } catch (const IoError& error) {
    throw IoError(fmt::format("training is complete, but its weights are lost: {}", error.what()), error.remedy());
  }
}

void resume_best(const TrainConfig& config, const checkpoint::CheckpointManifest& manifest, const SavedWeights& saved,
                 comm::ProcessGroup& group, BestWatch& best) {
  best.restore(manifest.best, manifest.evaluations_since_best);
  if (config.save_best.empty() || !best.best()) return;
  const bool lost = group.rank() == 0 && !saved.has(*best.best());
  if (group.all_gather_numbers(lost ? 1 : 0).front() == 0) return;
  if (group.rank() == 0)
    log_warn("--save-best: {} does not have the best weights, of step {}: the next evaluation is taken for the best",
             config.save, best.best()->step);
  best = BestWatch(config.save_best, config.patience);
}

}  // namespace lockstep::trainer
