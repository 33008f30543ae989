// One run of a job's ranks, from their start to the end of all that belongs to them.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "launcher/console.h"
#include "launcher/hosts/gather.h"
#include "launcher/mpirun_command.h"
#include "launcher/options.h"
#include "launcher/process.h"
#include "launcher/rank_log.h"
#include "launcher/root_cause.h"
#include "launcher/survivors.h"
#include "lockstep/base/function_ref.h"

namespace lockstep::launcher {

/// What outlives an attempt. All of it must outlive those that are run with it.
struct JobContext {
  const LaunchOptions& options;  // with the number of ranks
  Console& console;
  RankLogs& logs;
  SignalQueue& signals;
  RemoteHosts& hosts;
  std::function<void(std::int64_t step)> on_first_step = {};  // of an attempt, that a rank has reported
  std::function<bool(std::int64_t step)> on_checkpoint = {};  // Supervisor::on_checkpoint()
  /// Supervisor::on_survivors(), but for starting ranks: whether they are to be, with what it makes of `facts`.
  std::function<bool(const Loss& loss, HostFacts& facts)> on_survivors = {};
};

struct AttemptResult {
  RootCause root_cause;
  std::vector<std::string> flight_lines;   // what the ranks' flight records add to it
  std::vector<std::string> starter_lines;  // what mpirun, or wrappers, wrote, where that explains the end
  bool requested = false;                  // somebody wants the job to end
  bool growing = false;                    // the ranks have ended for the sake of more
  bool host_lost = false;
  JobProgress progress;
  Clock::time_point started_at, failed_at;
};

/// Runs the ranks to their end, as `facts` of this host and `gathered` say. Job directory, socket and secret are this
/// attempt's own: new ones. Has `conclude` say what there is to say once everything has ended, and writes
/// that. When it returns, no process, file or shared memory of it is left. Call it from the main thread without other
/// threads. Throws DeviceError, MpiError.
void run_attempt(const JobContext& job, HostFacts facts, const GatheredHosts& gathered,
                 FunctionRef<void(const AttemptResult&)> conclude);

}  // namespace lockstep::launcher
