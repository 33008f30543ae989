// Writes checkpoints on a thread of its own.
#pragma once

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
/// the one under way, which is of a step that was done whatever came after it.
class CheckpointWriter {
 public:
  struct Options {
    std::string directory;
    std::int64_t keep = 0;                        // 0: all
    std::vector<CorruptCheckpoint> corrupt;       // removed once there is a newer one
    std::map<std::string, std::string> metadata;  // of the weights
  };
  CheckpointWriter(const StateCopy& copy, Options options);
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  /// Writes what the copy holds; wait() has been called. manifest.files is filled in.
  void start(CheckpointManifest manifest);
  /// Until nothing is under way.
  void wait();

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

  const StateCopy& copy_;
  Options options_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::optional<CheckpointManifest> job_;
  bool stopping_ = false;
  Report report_;
  std::thread thread_;
};

}  // namespace lockstep::checkpoint
