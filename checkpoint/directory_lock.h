// A directory of checkpoints is one run's at a time.
#pragma once

#include <chrono>
#include <string>

#include "base/scope.h"

namespace lockstep::checkpoint {

/// Holds DIR/.lock, which says who does. The lock is the kernel's, of an open file: it ends with the process, in
/// whatever way, and on network file systems, as long as they have locks, with the host's lease. Where they have none,
/// or the directory cannot be written, nothing is held; the first is said once.
class DirectoryLock {
 public:
  DirectoryLock() = default;
  /// Waits for a run that may be ending: `here` for one of this host, `elsewhere` for one of another, which may be a
  /// rank of this job that the network has cut off, and whose end takes as long as it needs to notice. Throws
  /// UsageError naming the run that holds it, and InterruptedError for a stop that is asked for meanwhile.
  explicit DirectoryLock(const std::string& directory, std::chrono::milliseconds here = std::chrono::seconds(3),
                         std::chrono::milliseconds elsewhere = std::chrono::seconds(120));
  ~DirectoryLock() { release(); }
  DirectoryLock(DirectoryLock&& other) noexcept = default;
  DirectoryLock& operator=(DirectoryLock&& other) noexcept;

  bool held() const { return static_cast<bool>(fd_); }

 private:
  void release() noexcept;

  std::string path_;
  UniqueFd fd_;
};

}  // namespace lockstep::checkpoint
