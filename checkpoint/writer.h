// Writes checkpoints on a thread of its own.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "checkpoint/folder.h"
#include "checkpoint/state_copy.h"

namespace lockstep::checkpoint {

/// One thread, one checkpoint at a time. Between start() and wait() the copy is the thread's. The destructor waits for
/// the one under way, which is of a step that was done whatever came after it; of a checkpoint in parts, rank 0's waits
/// for the others' for kPartsGrace.
class CheckpointWriter {
 public:
  struct Options {
    std::string directory;
    std::int64_t keep = 0;                        // 0: all
    std::vector<CorruptCheckpoint> corrupt;       // removed once there is a newer one
    std::map<std::string, std::string> metadata;  // of the weights
    std::optional<OwnPart> part;                  // of a checkpoint in parts, whose first one writes all else
    /// A file with a record of the steps before, which is flushed first: after a loss of power a run that resumes has
    /// both.
    std::string record = {};
  };
  static constexpr std::chrono::seconds kPartsGrace{2};
  CheckpointWriter(const StateCopy& copy, Options options);
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  /// Writes what the copy holds; wait() has been called. manifest.files is filled in.
  void start(CheckpointManifest manifest);
  /// Until nothing is under way. Of a checkpoint in parts, rank 0 calls settle() before.
  void wait();

  // Of a checkpoint in parts.
  /// Waits until this rank's files are written; the receipt, or nothing where they could not be.
  std::optional<CheckpointManifest::File> wait_for_own();
  /// On rank 0: the receipts of all ranks, whose wait_for_own() has returned.
  void settle(std::vector<std::optional<CheckpointManifest::File>> receipts);

  struct Report {
    std::int64_t newest_step = 0;    // of those that it has written; 0: none
    std::uint64_t newest_bytes = 0;  // its files', without the manifest
    double newest_seconds = 0;       // that it took, up to the last flush
    std::int64_t written = 0;        // how many
    std::int64_t failed = 0;         // how many could not be written
    std::string first_failure;       // why, and what to do; of the first one
    std::string removal_failure;     // why an older one could not be removed; empty: none failed
    double seconds = 0;              // spent writing, of all
  };
  Report report();

 private:
  void work();
  /// The files' bytes.
  std::uint64_t write(const CheckpointManifest& manifest);
  void check_finite(std::int64_t step) const;
  bool writes_whole() const { return !options_.part || options_.part->index == 0; }
  /// Adds the other ranks' parts. Throws IoError where some are not there.
  void add_parts(const std::string& path, CheckpointManifest& manifest);
  std::vector<std::optional<CheckpointManifest::File>> wait_for_receipts(const std::string& path);
  void own_is_written(std::optional<CheckpointManifest::File> receipt);

  const StateCopy& copy_;
  Options options_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::optional<CheckpointManifest> job_;
  bool stopping_ = false;
  bool own_written_ = false;                             // this rank's files of job_, or they could not be
  std::optional<CheckpointManifest::File> own_receipt_;  // then
  std::optional<std::vector<std::optional<CheckpointManifest::File>>> settled_;
  Report report_;
  std::thread thread_;
};

}  // namespace lockstep::checkpoint
