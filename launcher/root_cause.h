// From what became of each rank to who failed first, why, and the launcher's exit code. Pure.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "launcher/process.h"
#include "launcher/restart_policy.h"
#include "lockstep/base/deadline.h"

namespace lockstep::launcher {

/// What is known about one rank.
struct RankReport {
  int rank = 0;
  bool seen = false;  // its wrapper has reported
  int pid = 0;
  std::string host;
  std::optional<ExitStatus> exit_status;  // of the program, as its wrapper saw it
  bool lost = false;                      // the wrapper ended without saying how its program did
  bool given_up = false;                  // lost, for the launcher has ended it: others had waited for it in vain
  bool stop_requested = false;            // a signal had asked it to end before it did
  Clock::time_point ended_at;             // valid with `exit_status` or `lost`; of `lost`, when it was noticed
  Clock::time_point there_at = {};        // of `lost`: when the launcher looked last and it had not ended
  std::vector<int> missing = {};          // ranks for which it has waited in vain, as it said itself
  int stopped_by = 0;                     // the signal that had stopped its program; 0: it was not stopped
  bool had_usage_error = false;           // which has been shown
  std::int64_t memory_kills = -1;         // by its host's kernel while it ran; -1: unknown
  bool computes_wrongly = false;          // as others have found

  bool ended() const { return exit_status.has_value() || lost; }
  bool failed() const { return lost || (exit_status && !exit_status->ok()); }
};

/// Another host of the job that was there and is no more.
struct LostHost {
  std::size_t host = 0;  // among the hosts that are not the launcher's
  std::string name;
  Clock::time_point last_heard;
  bool silent = false;     // it has not answered for longer than it may; else the connection has ended
  std::string why;         // then what is known of that
  std::vector<int> ranks;  // that ran there
  std::vector<std::string> directories = {};  // of the job there
};

/// Open MPI's daemon on another host was ended by a signal while ranks ran.
struct DaemonEnd {
  std::string host;
  int signal_number = 0;
};

struct JobReport {
  std::span<const RankReport> ranks;
  std::vector<LostHost> lost_hosts = {};  // in the order in which they were found lost
  std::optional<DaemonEnd> daemon = {};   // the first one that failed
  Clock::time_point started_at;
  bool over_mpirun = true;  // or the launcher has started the wrappers itself
  ExitStatus mpirun;        // or of the first wrapper that failed
  bool mpirun_killed_by_us = false;
  std::string host = {};    // where mpirun runs
  std::string program;      // for the text
  int interrupted_by = 0;   // the signal with which the user ended the job; SIGPIPE: nobody reads its output
  bool stop_asked = false;  // by a signal, be it only after a failure
  bool growing = false;     // all ranks were asked to end, to be started again with more
  JobProgress progress = {};
  Clock::time_point failed_at = {};  // when it began to end
};

/// What a job that was stopped for want of a reader says.
inline constexpr const char* kNoReader =
    "nobody reads standard output any more, which ends the job → > FILE or > /dev/null keeps it running";

/// Whether a program ended as one that was asked to: by a stop signal, its code, or the one for a saved checkpoint.
bool ended_on_request(ExitStatus exit_status);

struct RootCause {
  int exit_code = 0;
  std::string line;               // for people, one line; empty when all went well
  std::optional<int> rank;        // whose last lines and log explain it
  bool show_mpirun = false;       // what mpirun wrote explains it
  bool computes_wrongly = false;  // the memory or a processor of the rank's host is at fault
};

/// The first failure is the earliest among the ranks without a stop request; the others ended because of the request.
/// Deaths that are closer together than the system's scheduling delay are ordered by kind: a signal is a cause; codes 4
/// and 5 (the network, another rank) are its effects on peers, and code 1 may be. If peers name a rank that they waited
/// for, that rank is the cause. One that computes wrongly is the cause in any case. All failures after a host was last
/// heard from are caused by its loss.
RootCause find_root_cause(const JobReport& job);

}  // namespace lockstep::launcher
