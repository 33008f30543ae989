// From the hosts that the user names to hosts that are ready to run ranks.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "launcher/hosts/greeting.h"
#include "launcher/hosts/host_link.h"
#include "launcher/mpirun_command.h"
#include "launcher/options.h"
#include "lockstep/base/job_secret.h"

namespace lockstep::launcher {

struct GatheredHosts {
  int exit_code = 0;  // not 0: the job cannot start, and why has been said
  int ranks = 0;
  std::vector<HostSpec> hosts;                   // those with ranks, in the order of the ranks
  std::vector<int> ranks_on;                     // of each of these
  std::vector<std::unique_ptr<HostLink>> links;  // to each of these; none for this host
  int own_ranks = 0;                             // on this host
  std::string own_name;                          // what the user calls this host, or the system's name for it
  SeveralHosts several;                          // without `hostfile` and `agent`
  JobSecret secret;                              // of a job that has links
  std::string token;                             // that marks the job's directories on other hosts
  std::vector<std::string> warnings;
};

/// Finds out which of options.hosts are this host, calls all others at the same time, and gives each 10 s to answer,
/// and to show that it is the same build of lockstep; then has them make ready. All that cannot take part are named,
/// one line each, and why. A stop by signal ends the wait. Throws UsageError for more ranks than slots, MpiError when
/// there is no ssh. `own_cores`: that this process may use. Call it from the main thread, without other threads.
GatheredHosts gather_hosts(const LaunchOptions& options, const std::string& self, int own_cores, SignalQueue& signals);

/// Chooses the address of the rendezvous, and the networks for MPI: fills `several`. `greetings`: of the hosts with
/// ranks, in their order. `own`: the launcher's, whether or not it has ranks. `choice`: LOCKSTEP_SOCKET_IFNAME. Pure.
void choose_networks(const std::vector<Greeting>& greetings, const Greeting& own, const std::string& choice,
                     SeveralHosts& several);

}  // namespace lockstep::launcher
