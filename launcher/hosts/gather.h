// From the hosts that the user names to hosts that are ready to run ranks.
#pragma once

#include <string>
#include <vector>

#include "launcher/hosts/greeting.h"
#include "launcher/hosts/remote_hosts.h"
#include "launcher/mpirun_command.h"
#include "launcher/options.h"
#include "lockstep/base/function_ref.h"
#include "lockstep/base/job_secret.h"

namespace lockstep::launcher {

/// The hosts of an attempt, when they are ready.
struct GatheredHosts {
  int exit_code = 0;  // not 0: the job cannot start, and why has been said
  int ranks = 0;
  std::vector<std::size_t> hosts;  // those with ranks, in the order of the ranks
  std::vector<int> ranks_on;       // of each of these
  int own_ranks = 0;               // on this host
  SeveralHosts several;            // without `hostfile` and `agent`; without shares where all ranks are on this host
  JobSecret secret;                // of an attempt on other hosts
  std::string token;               // that marks its directories there
  std::vector<std::string> warnings;
};

/// Finds out which of options.hosts are this host, calls all others at the same time, and gives each 10 s to answer,
/// and to show that it is the same build of lockstep. All that cannot take part are named, one line each, and why;
/// `exit_code` is not 0 then, or where a signal has ended the wait. Throws MpiError when there is no ssh. `own_cores`:
/// that this process may use. Call it from the main thread, without other threads.
RemoteHosts call_hosts(const LaunchOptions& options, const std::string& self, int own_cores, SignalQueue& signals,
                       int& exit_code);

/// Slots on all connected hosts; slots on one host.
int slots_of(const RemoteHosts& hosts, const LaunchOptions& options);
int slots_of(const RemoteHosts& hosts, const LaunchOptions& options, std::size_t host);

/// Has the hosts that options.ranks are placed on, 0 for one in each slot, make ready for the first attempt; the others
/// are dismissed where the job is not restarted. Throws UsageError for more ranks than slots.
GatheredHosts gather_hosts(RemoteHosts& hosts, const LaunchOptions& options, SignalQueue& signals);

/// The same for a later attempt: as many ranks as there are slots, up to `most`. Hosts that do not get ready have
/// failed, and it is tried without them. No ranks where there are slots for fewer than `least`; with an exit code where
/// a signal has ended the wait.
GatheredHosts gather_again(RemoteHosts& hosts, const LaunchOptions& options, int most, int least, SignalQueue& signals);

/// Serves the hosts until `settled` says so, or the deadline. Returns the signal with which the user stops the job
/// meanwhile, or 0.
int serve_hosts(
    RemoteHosts& hosts, Clock::time_point until, SignalQueue& signals, FunctionRef<bool()> settled,
    const RemoteHosts::Handler& handle = [](std::size_t, const HostMessage&) {});

/// Chooses the address of the rendezvous, and the networks for MPI: fills `several`. `greetings`: of the hosts with
/// ranks, in their order. `own`: the launcher's, whether or not it has ranks. `choice`: LOCKSTEP_SOCKET_IFNAME. Pure.
void choose_networks(const std::vector<Greeting>& greetings, const Greeting& own, const std::string& choice,
                     SeveralHosts& several);

}  // namespace lockstep::launcher
