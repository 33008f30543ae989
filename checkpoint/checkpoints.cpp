#include "checkpoint/checkpoints.h"

#include <algorithm>

#include "base/error.h"
#include "base/log.h"
#include "base/status_report.h"
#include "lockstep/base/deadline.h"

namespace lockstep::checkpoint {
namespace {

/// Not held where it cannot be made: preparing it says why.
DirectoryLock lock_directory(const std::string& directory) {
  try {
    make_checkpoint_directory(directory);
  } catch (const IoError&) {
    return {};
  }
  return DirectoryLock(directory);
}

}  // namespace

void Checkpoints::open(const nn::Module& module, const nn::Optimizer& optimizer, const nn::MovingAverage* average,
                       CheckpointManifest plan, const std::map<std::string, std::string>& metadata,
                       const std::optional<Resumed>& resumed, const std::optional<OwnPart>& part) {
  plan_ = std::move(plan);
  part_ = part;
  if (resumed) older_ = resumed->manifest.step;
  if (resumed && !resumed->in_memory) taken_ = collected_ = older_;
  if (wanted() && writes_part_alone()) {
    copy_ = std::make_unique<StateCopy>(optimizer, *part_);
    places_.push_back({.directory = options_.checkpoint_dir});
    places_.front().writer =
        std::make_unique<CheckpointWriter>(*copy_, CheckpointWriter::Options{.directory = options_.checkpoint_dir,
                                                                             .keep = 0,
                                                                             .corrupt = {},
                                                                             .metadata = {},
                                                                             .part = part_,
                                                                             .record = {}});
    return;
  }
  if (!wanted() || writes_.empty()) return;
  LOCKSTEP_ASSERT(!part_ || writes_.size() == 1, "parts in {} directories", writes_.size());
  std::vector<DirectoryLock> locks;
  std::vector<std::int64_t> older;
  for (const std::string& directory : writes_) {
    locks.push_back(lock_directory(directory));
    older.push_back(refuse_others(directory, resumed));
  }
  // Where the job resumes after another failure, and what a launcher counts lost steps from.
  if (resumed && !resumed->in_memory)
    report_status({.kind = StatusReport::Kind::kCheckpointed, .step = resumed->manifest.step});
  copy_ = std::make_unique<StateCopy>(module, optimizer, average, part_ ? &*part_ : nullptr);
  for (const std::string& directory : writes_) {
    const std::size_t at = places_.size();
    Place& place =
        places_.emplace_back(Place{.directory = directory, .lock = std::move(locks[at]), .older = older[at]});
    try {
      prepare_checkpoints(directory);
    } catch (const IoError& error) {
      place.opening_failure = error.line();
      tell_first_failure(place);
    }
    place.writer = std::make_unique<CheckpointWriter>(
        *copy_, CheckpointWriter::Options{.directory = directory,
                                          .keep = options_.keep.value_or(kDefaultKeep),
                                          .corrupt = resumed ? resumed->corrupt : std::vector<CorruptCheckpoint>(),
                                          .metadata = metadata,
                                          .part = part_,
                                          .record = record_});
  }
}

// The oldest ones are removed now and then, and --resume auto takes the newest: both must be this run's.
std::int64_t Checkpoints::refuse_others(const std::string& directory, const std::optional<Resumed>& resumed) const {
  std::vector<StoredCheckpoint> there;
  try {
    there = list_checkpoints(directory);
  } catch (const IoError& error) {
    if (!options_.checkpoint_mirror.empty())
      return 0;  // the other copy is there; preparing it says why this one is not
    throw CheckpointError(error.what(), error.remedy());
  }
  const bool same = resumed && resumed->from_own_directories;
  std::int64_t newest = 0;
  std::erase_if(there, [&](const StoredCheckpoint& stored) {
    if (!same) return false;
    if (std::ranges::find(resumed->corrupt, stored.path, &CorruptCheckpoint::path) != resumed->corrupt.end())
      return true;
    if (stored.step > older_) return false;
    newest = std::max(newest, stored.step);
    return true;
  });
  if (there.empty()) return newest;
  throw CheckpointError(
      fmt::format("{} has a checkpoint of step {}, and this run {}", directory, there.front().step,
                  resumed ? fmt::format("resumes from step {} in {}", older_, resumed->path) : "does not resume"),
      "add --resume auto to resume from there, or choose another --checkpoint-dir");
}

bool Checkpoints::due(std::int64_t step, bool last_of_epoch, bool last) const {
  if (!wanted()) return false;
  const auto& every = options_.checkpoint_every;
  return last || (every ? *every > 0 && step % *every == 0 : last_of_epoch);
}

bool Checkpoints::lacks_copy() const {
  return std::ranges::any_of(places_, [this](const Place& place) { return place.older != older_; });
}

void Checkpoints::write_missing_copies(const CheckpointManifest& resumed, ExtraState extra) {
  if (!lacks_copy()) return;
  copy_->take(std::move(extra));
  CheckpointManifest manifest = plan_;
  manifest.evaluations = resumed.evaluations;
  manifest.step = resumed.step;
  manifest.position = resumed.position;
  manifest.optimizer_steps = resumed.optimizer_steps;
  manifest.buckets = resumed.buckets;
  for (Place& place : places_)
    if (place.older != older_) place.writer->start(manifest);
}

std::optional<CheckpointManifest::File> Checkpoints::wait_for_own() {
  return places_.empty() ? std::nullopt : places_.front().writer->wait_for_own();
}

void Checkpoints::settle(const std::vector<std::optional<CheckpointManifest::File>>& receipts) {
  if (writes_the_runs()) places_.front().writer->settle(receipts);
}

void Checkpoints::take(std::int64_t step, Clock::time_point since, const sampler::SamplerState& position,
                       std::int64_t optimizer_steps, const BucketLayout& buckets, ExtraState extra) {
  if (!is_new(step)) return;
  if (places_.empty()) {
    taken_ = step;
    return;
  }
  const auto begin = Clock::now();
  for (Place& place : places_) place.writer->wait();
  collect_written();
  taken_ = step;
  const auto waited = Clock::now();
  for (Place& place : places_) tell_first_failure(place);
  CheckpointManifest manifest = plan_;
  manifest.evaluations = extra.evaluations;
  copy_->take(std::move(extra));
  manifest.step = step;
  manifest.position = position;
  manifest.optimizer_steps = optimizer_steps;
  manifest.buckets = buckets;
  for (Place& place : places_) place.writer->start(manifest);
  const auto end = Clock::now();
  held_seconds_ = seconds_between(since, end);
  all_held_seconds_ += held_seconds_;
  log_debug("step {}: checkpoint: waited {:.2f} ms for the one before, copied in {:.2f} ms", step,
            1e3 * seconds_between(begin, waited), 1e3 * seconds_between(waited, end));
}

void Checkpoints::free_moments() {
  if (copy_ == nullptr) return;
  for (Place& place : places_) place.writer->wait();
  copy_->free_moments();
}

bool Checkpoints::finish() {
  for (Place& place : places_) {
    place.writer->wait();
    tell_first_failure(place);
  }
  return !writes_the_runs() || taken_ == older_ || places_.front().writer->report().newest_step == taken_;
}

void Checkpoints::collect_written() {
  if (!writes_the_runs() || collected_ == taken_) return;
  const auto report = places_.front().writer->report();
  if (report.newest_step != taken_) return;
  collected_ = taken_;
  written_.push_back({.step = report.newest_step,
                      .bytes = report.newest_bytes,
                      .write_seconds = report.newest_seconds,
                      .held_seconds = held_seconds_});
}

std::optional<Checkpoints::Written> Checkpoints::written() {
  collect_written();
  if (written_.empty()) return std::nullopt;
  const Written next = written_.front();
  written_.pop_front();
  return next;
}

Checkpoints::Summary Checkpoints::summary() {
  if (!writes_the_runs()) return {};
  const auto report = places_.front().writer->report();
  return {
      .count = report.written,
      .bytes = report.newest_bytes,
      .write_seconds = report.seconds / static_cast<double>(std::max<std::int64_t>(1, report.written + report.failed)),
      .held_seconds = all_held_seconds_};
}

void Checkpoints::tell_first_failure(Place& place) const {
  if (place.told) return;
  std::string why = place.opening_failure;
  if (why.empty() && place.writer != nullptr) {
    const auto report = place.writer->report();
    why = report.first_failure;
    if (why.empty()) why = report.removal_failure;
  }
  if (why.empty()) return;
  place.told = true;
  if (writes_part_alone())
    log_warn("{}; training continues", why);
  else
    log_warn("{}; training continues, {}", why, newest_in(place));
}

void Checkpoints::tell_failures() {
  for (Place& place : places_) {
    tell_first_failure(place);
    const auto report = place.writer->report();
    // A directory that could not be made is not there, which is all that writers see.
    const std::string& first_failure = place.opening_failure.empty() ? report.first_failure : place.opening_failure;
    if (writes_part_alone()) {
      if (report.failed > 0)
        log_warn("{} part{} of checkpoints could not be written, the first because: {}", report.failed,
                 report.failed == 1 ? "" : "s", first_failure);
      continue;
    }
    if (report.failed > 0)
      log_warn("{} checkpoint{} could not be written, the first because: {}; {}", report.failed,
               report.failed == 1 ? "" : "s", first_failure, newest_in(place));
    if (!report.removal_failure.empty()) log_warn("older checkpoints are left: {}", report.removal_failure);
  }
}

std::string Checkpoints::newest_in(const Place& place) const {
  std::int64_t step = place.older;
  if (place.writer != nullptr) step = std::max(step, place.writer->report().newest_step);
  return step == 0 ? fmt::format("and {} has no checkpoint", place.directory)
                   : fmt::format("and the newest checkpoint is of step {}", step);
}

}  // namespace lockstep::checkpoint
