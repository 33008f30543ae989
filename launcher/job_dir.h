// The directories in which a job keeps its sockets, session files and shared memory, and their removal.
#pragma once

#include <string>

#include "base/scope.h"

namespace lockstep::launcher {

/// Environment variable that marks every process of a job; its value is JobDir::path().
inline constexpr const char* kJobVariable = "LOCKSTEP_JOB";

/// Where JobDir's directories are on this host: TMPDIR, if it is a directory with a path short enough for sockets in
/// it, or /tmp; /dev/shm, if it can be written and has space for the files of `ranks` ranks, or else empty.
std::string job_tmp_base();
std::string job_shm_base(int ranks);

/// Note [Cleaning up]
/// A small detached process, the reaper, makes the directories, so that they never exist without a process that will
/// remove them. It holds one end of a socket pair whose other end only the launcher has; end-of-file there means that
/// the launcher has ended, in whatever way, kill -9 included. The reaper then kills what the parent-death signals have
/// not (background processes of a rank whose wrapper was killed: any process whose environment carries the job's mark),
/// removes the directories and ends, within kReaperSeconds.
///
/// Where both are killed at once (a control group's end), the directories remain until the user's next job: its reaper
/// removes those that nobody holds. Launcher and reaper each share a lock (flock) on the file `lock` in them. The file
/// names the kernel's boot in which the lock was taken. If that is the present boot, the kernel knows whether a holder
/// lives, in whatever container. A directory gets its name when it is locked.
///
/// Owner of a job's private directories (mode 0700). Make it before any thread starts. Not thread-safe.
class JobDir {
 public:
  /// `tmp_base`: where the job directory goes (a disk will do). `shm_base`: where memory files go, empty if the host
  /// has no such place; they then share the job directory. Throws DeviceError if tmp_base cannot be written.
  JobDir(const std::string& tmp_base, const std::string& shm_base);
  /// Waits until the reaper has ended, and thus removed all of the job.
  ~JobDir();
  JobDir(const JobDir&) = delete;
  JobDir& operator=(const JobDir&) = delete;

  const std::string& path() const { return path_; }
  const std::string& shm_path() const { return shm_path_; }

 private:
  UniqueFd reaper_;
  std::string path_;
  std::string shm_path_;
  UniqueFd lock_, shm_lock_;
};

/// Marks `directory` as one of the job with this token. Throws DeviceError.
void write_token(const std::string& directory, const std::string& token);

/// Removes `directory`, as another host has called it, if it is here too and is marked with the token.
void remove_stale_dirs(const std::string& directory, const std::string& token);

}  // namespace lockstep::launcher
