// The detached process that cleans up after a job. See Note [Cleaning up] in job_dir.h.
#pragma once

#include <string>

namespace lockstep::launcher {

/// From the launcher's end to that of the reaper.
inline constexpr double kReaperSeconds = 1.5;

/// Forks the reaper (its own session, no open files but `socket`, working directory /) and returns in the caller.
/// The reaper first makes the directories and sends "path\nshm_path\n", or "!errno" if that failed.
void start_reaper(int socket, const std::string& tmp_base, const std::string& shm_base);

}  // namespace lockstep::launcher
