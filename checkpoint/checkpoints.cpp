#include "checkpoint/checkpoints.h"

#include <algorithm>
#include <filesystem>

#include "base/error.h"
#include "base/log.h"
#include "base/status_report.h"
#include "lockstep/base/deadline.h"

namespace lockstep::checkpoint {

Checkpoints::Checkpoints(Options options) : options_(std::move(options)) {}

void Checkpoints::open(const nn::Module& module, const nn::Optimizer& optimizer, CheckpointManifest plan,
                       std::map<std::string, std::string> metadata, const std::optional<Resumed>& resumed) {
  plan_ = std::move(plan);
  if (resumed) taken_ = older_ = resumed->manifest.step;
  if (!wanted() || !options_.writes) return;
  refuse_others(resumed);
  // Where the job resumes after another failure, and what a launcher counts lost steps from.
  if (resumed) report_status({.kind = StatusReport::Kind::kCheckpointed, .step = resumed->manifest.step});
  try {
    prepare_checkpoints(options_.directory);
  } catch (const IoError& error) {
    opening_failure_ = error.line();
    tell_first_failure();
  }
  copy_ = std::make_unique<StateCopy>(module, optimizer);
  writer_ = std::make_unique<CheckpointWriter>(
      *copy_, CheckpointWriter::Options{.directory = options_.directory,
                                        .keep = options_.keep,
                                        .corrupt = resumed ? resumed->corrupt : std::vector<CorruptCheckpoint>(),
                                        .metadata = std::move(metadata)});
}

// The oldest ones are removed now and then, and --resume auto takes the newest: both must be this run's.
void Checkpoints::refuse_others(const std::optional<Resumed>& resumed) const {
  std::vector<StoredCheckpoint> there;
  try {
    there = list_checkpoints(options_.directory);
  } catch (const IoError& error) {
    throw CheckpointError(error.what(), error.remedy());
  }
  namespace fs = std::filesystem;
  std::error_code ignored;
  const bool same =
      resumed && fs::equivalent(fs::path(resumed->path + "/..").lexically_normal(), options_.directory, ignored);
  std::erase_if(there, [&](const StoredCheckpoint& stored) {
    return same && (stored.step <= older_ || std::ranges::find(resumed->corrupt, stored.path,
                                                               &CorruptCheckpoint::path) != resumed->corrupt.end());
  });
  if (there.empty()) return;
  throw CheckpointError(
      fmt::format("{} has a checkpoint of step {}, and this run {}", options_.directory, there.front().step,
                  resumed ? fmt::format("resumes from step {} in {}", older_, resumed->path) : "starts anew"),
      "add --resume auto to resume from there, or choose another --checkpoint-dir");
}

bool Checkpoints::due(std::int64_t step, bool last_of_epoch, bool last) const {
  if (!wanted()) return false;
  return last || (options_.every ? *options_.every > 0 && step % *options_.every == 0 : last_of_epoch);
}

void Checkpoints::take(std::int64_t step, const sampler::SamplerState& position, std::int64_t optimizer_steps,
                       const std::vector<std::string>& bucket_order, std::vector<nn::HostTensor> carried) {
  if (!is_new(step)) return;
  taken_ = step;
  if (writer_ == nullptr) return;
  const auto begin = Clock::now();
  writer_->wait();
  const auto waited = Clock::now();
  waited_seconds_ += seconds_between(begin, waited);
  tell_first_failure();
  copy_->take(std::move(carried));
  CheckpointManifest manifest = plan_;
  manifest.step = step;
  manifest.position = position;
  manifest.optimizer_steps = optimizer_steps;
  manifest.bucket_order = bucket_order;
  writer_->start(std::move(manifest));
  log_debug("step {}: checkpoint: waited {:.2f} ms for the one before, copied in {:.2f} ms", step,
            1e3 * seconds_between(begin, waited), 1e3 * seconds_between(waited, Clock::now()));
}

bool Checkpoints::finish() {
  if (writer_ == nullptr) return true;
  writer_->wait();
  tell_first_failure();
  return taken_ == older_ || writer_->report().newest_step == taken_;
}

void Checkpoints::tell_first_failure() {
  if (told_) return;
  std::string why = opening_failure_;
  if (why.empty() && writer_ != nullptr) {
    const auto report = writer_->report();
    why = report.first_failure;
    if (why.empty()) why = report.removal_failure;
  }
  if (why.empty()) return;
  told_ = true;
  log_warn("{}; training continues, {}", why, newest());
}

void Checkpoints::tell_failures() {
  if (writer_ == nullptr) return;
  tell_first_failure();
  const auto report = writer_->report();
  log_debug("checkpoints took {:.3f} s to write, and training waited {:.3f} s for them", report.seconds,
            waited_seconds_);
  if (report.failed > 0)
    log_warn("{} checkpoint{} could not be written, the first because: {}; {}", report.failed,
             report.failed == 1 ? "" : "s", report.first_failure, newest());
  if (!report.removal_failure.empty()) log_warn("older checkpoints are left: {}", report.removal_failure);
}

std::string Checkpoints::newest() const {
  std::int64_t step = older_;
  if (writer_ != nullptr) step = std::max(step, writer_->report().newest_step);
  return step == 0 ? fmt::format("and {} has no checkpoint", options_.directory)
                   : fmt::format("and the newest checkpoint is of step {}", step);
}

}  // namespace lockstep::checkpoint
