#include "checkpoint/writer.h"

#include "base/error.h"
#include "base/status_report.h"
#include "base/stop.h"
#include "lockstep/base/deadline.h"

namespace lockstep::checkpoint {

CheckpointWriter::CheckpointWriter(const StateCopy& copy, Options options) : copy_(copy), options_(std::move(options)) {
  const AllSignalsBlocked blocked;
  thread_ = std::thread([this] { work(); });
}

CheckpointWriter::~CheckpointWriter() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void CheckpointWriter::start(CheckpointManifest manifest) {
  const std::lock_guard lock(mutex_);
  LOCKSTEP_ASSERT(!job_, "two checkpoints at a time");
  job_ = std::move(manifest);
  changed_.notify_all();
}

void CheckpointWriter::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !job_; });
}

CheckpointWriter::Report CheckpointWriter::report() {
  const std::lock_guard lock(mutex_);
  return report_;
}

void CheckpointWriter::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return job_ || stopping_; });
    if (!job_) return;
    const CheckpointManifest manifest = *job_;
    lock.unlock();
    std::string failure, removal_failure;
    std::uint64_t bytes = 0;
    const auto begin = Clock::now();
    report_status(
        {.kind = StatusReport::Kind::kSaving, .text = fmt::format("the checkpoint of step {}", manifest.step)});
    // Whatever it is, training continues without this one.
    try {
      bytes = write(manifest);
    } catch (const Error& error) {
      failure = error.line();
    } catch (const std::exception& error) {
      failure = fmt::format("a checkpoint of step {}: {}", manifest.step, error.what());
    }
    const double seconds = seconds_between(begin, Clock::now());
    report_status({.kind = StatusReport::Kind::kSaved});
    if (failure.empty()) report_status({.kind = StatusReport::Kind::kCheckpointed, .step = manifest.step});
    // What was corrupt under this name has been replaced.
    if (failure.empty()) std::erase_if(options_.corrupt, [&](const auto& one) { return one.step == manifest.step; });
    try {
      if (failure.empty()) prune_checkpoints(options_.directory, manifest.step, options_.keep, options_.corrupt);
    } catch (const std::exception& error) {
      removal_failure = error.what();
    }
    lock.lock();
    report_.seconds += seconds_between(begin, Clock::now());
    if (failure.empty()) {
      report_.newest_step = manifest.step;
      report_.newest_bytes = bytes;
      report_.newest_seconds = seconds;
      ++report_.written;
    } else if (report_.failed++ == 0) {
      report_.first_failure = failure;
    }
    if (report_.removal_failure.empty()) report_.removal_failure = removal_failure;
    job_.reset();
    changed_.notify_all();
  }
}

std::uint64_t CheckpointWriter::write(const CheckpointManifest& manifest) {
  if (const auto name = copy_.not_finite())
    throw DivergedError(fmt::format("no checkpoint of step {}: {} is not finite after it", manifest.step, *name));
  std::uint64_t bytes = 0;
  write_checkpoint(options_.directory, manifest.step, [&](const std::string& path) {
    CheckpointManifest whole = manifest;
    whole.files = copy_.write(path, options_.metadata);
    for (const auto& [name, file] : whole.files) bytes += file.bytes;
    return whole;
  });
  return bytes;
}

}  // namespace lockstep::checkpoint
