// A job and its attempts: runs it, and again after failures.
#pragma once

#include <initializer_list>
#include <string>
#include <utility>

#include "base/json.h"
#include "base/scope.h"
#include "launcher/attempt.h"
#include "launcher/hosts/gather.h"
#include "launcher/mpirun_command.h"
#include "launcher/options.h"

namespace lockstep::launcher {

/// What became of a job's attempts, in a file of the launcher's own: metrics are cut back to the checkpoint on resume.
/// One JSON object per line, appended: a job that is submitted again continues its file. Not thread-safe.
class RestartHistory {
 public:
  /// Keeps nothing.
  RestartHistory() = default;
  /// DIRECTORY/restarts.jsonl, in a directory that exists. Throws IoError where it cannot be written.
  explicit RestartHistory(const std::string& directory);

  /// Adds `{"event":EVENT,"time":…}` with the members of `more`; the time is UTC, as 2026-01-31T12:00:00.123Z. Returns
  /// an error for the user, once, if that fails.
  std::string add(const char* event, std::initializer_list<std::pair<const char*, JsonText>> more);

 private:
  std::string path_;
  UniqueFd file_;
};

/// What outlives all attempts.
struct JobParts {
  RemoteHosts& hosts;
  Console& console;
  RankLogs& logs;
  SignalQueue& signals;
  RestartHistory& history;
};

/// Runs attempts until one ends well, or in a way after which none follows (Note [Restarts] in restart_policy.h), and
/// returns the launcher's exit code. `options` has the number of ranks, and that of each attempt in its turn. `first`:
/// the hosts of the first attempt.
int run_attempts(LaunchOptions& options, const HostFacts& facts, GatheredHosts first, const JobParts& parts);

}  // namespace lockstep::launcher
