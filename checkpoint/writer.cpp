#include "checkpoint/writer.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <exception>

#include "base/error.h"
#include "base/scope.h"
#include "base/signals.h"
#include "base/status_report.h"
#include "base/text.h"
#include "lockstep/base/deadline.h"

namespace lockstep::checkpoint {

namespace {

void flush_record(const std::string& path) {
  struct stat there = {};
  if (path.empty() || ::stat(path.c_str(), &there) != 0 || !S_ISREG(there.st_mode)) return;
  if (const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC)); fd) ::fsync(fd.get());
}

}  // namespace

CheckpointWriter::CheckpointWriter(const StateCopy& copy, Options options) : copy_(copy), options_(std::move(options)) {
  thread_ = start_thread([this] { work(); });
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
  own_written_ = false;
  own_receipt_.reset();
  settled_.reset();
  changed_.notify_all();
}

void CheckpointWriter::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !job_; });
}

std::optional<CheckpointManifest::File> CheckpointWriter::wait_for_own() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !job_ || own_written_; });
  return own_receipt_;
}

void CheckpointWriter::settle(std::vector<std::optional<CheckpointManifest::File>> receipts) {
  const std::lock_guard lock(mutex_);
  settled_ = std::move(receipts);
  changed_.notify_all();
}

void CheckpointWriter::own_is_written(std::optional<CheckpointManifest::File> receipt) {
  const std::lock_guard lock(mutex_);
  own_written_ = true;
  own_receipt_ = std::move(receipt);
  changed_.notify_all();
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
      flush_record(options_.record);
      bytes = write(manifest);
    } catch (const Error& error) {
      failure = error.line();
    } catch (const std::exception& error) {
      failure = fmt::format("a checkpoint of step {}: {}", manifest.step, error.what());
    }
    const double seconds = seconds_between(begin, Clock::now());
    report_status({.kind = StatusReport::Kind::kSaved});
    if (failure.empty() && writes_whole())
      report_status({.kind = StatusReport::Kind::kCheckpointed, .step = manifest.step});
    // What was corrupt under this name has been replaced.
    if (failure.empty()) std::erase_if(options_.corrupt, [&](const auto& one) { return one.step == manifest.step; });
    try {
      if (failure.empty() && writes_whole())
        prune_checkpoints(options_.directory, manifest.step, options_.keep, options_.corrupt,
                          manifest.evaluations.kept);
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

void CheckpointWriter::check_finite(std::int64_t step) const {
  if (const auto name = copy_.not_finite())
    throw DivergedError(fmt::format("no checkpoint of step {}: {} is not finite after it", step, *name));
}

std::uint64_t CheckpointWriter::write(const CheckpointManifest& manifest) {
  std::uint64_t bytes = 0;
  if (!options_.part || !writes_whole()) check_finite(manifest.step);
  if (!writes_whole()) {
    own_is_written(write_part(options_.directory, manifest.step, *options_.part, [&](const std::string& path) {
      const auto files = copy_.write(path, {});
      LOCKSTEP_ASSERT(files.size() == 1, "{} files of one part", files.size());
      bytes = files.begin()->second.bytes;
      return files.begin()->second;
    }));
    return bytes;
  }
  write_checkpoint(
      options_.directory, manifest.step,
      [&](const std::string& path) {
        CheckpointManifest whole = manifest;
        if (options_.part)
          add_parts(path, whole);
        else
          whole.files = copy_.write(path, options_.metadata);
        for (const auto& [name, file] : whole.files) bytes += file.bytes;
        return whole;
      },
      options_.part ? options_.part->attempt : std::string());
  return bytes;
}

// Whatever becomes of this rank's files: others write into the same directory until they have given their receipts.
void CheckpointWriter::add_parts(const std::string& path, CheckpointManifest& manifest) {
  const std::size_t count = options_.part->count;
  std::exception_ptr failure;
  try {
    check_finite(manifest.step);
    manifest.files = copy_.write(path, options_.metadata);
    own_is_written(manifest.files.at(part_file(0, count)));
  } catch (...) {
    failure = std::current_exception();
    own_is_written(std::nullopt);
  }
  const auto receipts = wait_for_receipts(path);
  if (failure) std::rethrow_exception(failure);
  std::vector<std::string> missing;
  for (std::size_t part = 1; part < count; ++part) {
    if (part < receipts.size() && receipts[part])
      manifest.files[part_file(part, count)] = *receipts[part];
    else
      missing.push_back(fmt::to_string(part));
  }
  if (!missing.empty())
    throw IoError(fmt::format("no checkpoint of step {}: the part{} of rank{} {} {} not on the disk", manifest.step,
                              missing.size() == 1 ? "" : "s", missing.size() == 1 ? "" : "s", join(missing, ", "),
                              missing.size() == 1 ? "is" : "are"),
                  "the warnings of those ranks say why");
  remove_receipts(path, count);
}

std::vector<std::optional<CheckpointManifest::File>> CheckpointWriter::wait_for_receipts(const std::string& path) {
  constexpr std::chrono::milliseconds kFirstPause{1}, kLongestPause{100};
  const std::size_t count = options_.part->count;
  std::vector<std::optional<CheckpointManifest::File>> receipts(count);
  std::optional<Deadline> deadline;  // once this process ends
  for (auto pause = kFirstPause;; pause = std::min(2 * pause, kLongestPause)) {
    bool all = true;
    for (std::size_t part = 1; part < count; ++part) {
      if (!receipts[part]) receipts[part] = find_receipt(path, part, count);
      all = all && receipts[part];
    }
    if (all) return receipts;
    std::unique_lock lock(mutex_);
    if (!settled_ && !stopping_) changed_.wait_for(lock, pause, [this] { return settled_ || stopping_; });
    if (settled_) return *settled_;
    if (!stopping_) continue;
    if (!deadline) deadline = Deadline::after(kPartsGrace);
    if (deadline->expired()) return receipts;
    lock.unlock();
    std::this_thread::sleep_for(pause);
  }
}

}  // namespace lockstep::checkpoint
