// A job and its attempts: runs it, and again after failures.
#pragma once

#include "launcher/attempt.h"
#include "launcher/hosts/gather.h"
#include "launcher/mpirun_command.h"
#include "launcher/options.h"
#include "launcher/restart_history.h"

namespace lockstep::launcher {

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
