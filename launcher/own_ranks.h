// Ranks that are this very binary: the launcher and its helpers on other hosts start them, without mpirun.
#pragma once

#include <string>
#include <vector>

#include "base/scope.h"
#include "launcher/hosts/gather.h"
#include "launcher/hosts/protocol.h"
#include "launcher/hosts/remote_hosts.h"
#include "launcher/job_processes.h"
#include "launcher/mpirun_command.h"
#include "launcher/options.h"
#include "launcher/survivors.h"
#include "lockstep/base/env.h"

namespace lockstep::launcher {

/// Whether `program` is the binary at `self`: "lockstep", which always means it, or a path or a name in PATH that leads
/// there.
bool is_own_binary(const std::string& program, const std::string& self);

/// Whether the launcher starts the ranks itself: they are its own binary, or of another program on one host where there
/// is no mpirun; `options.mpi` does not ask for mpirun; and the hosts are named, or there is one, and no scheduler has
/// given this process an allocation whose hosts mpirun would ask it for.
bool starts_own_ranks(const LaunchOptions& options, const std::string& self, const EnvLookup& lookup);

/// A port of loopback_address() for the rendezvous. While it is held nobody else is given it, neither a listener that
/// asks for any port nor an outgoing connection; rank 0 listens there all the same, because both sockets have
/// SO_REUSEADDR and this one does not listen.
class HeldPort {
 public:
  /// Throws DeviceError where none is free, or there is no such address.
  HeldPort();
  const std::string& address() const { return address_; }
  int number() const { return number_; }

 private:
  std::string address_;
  UniqueFd socket_;
  int number_ = 0;
};

/// Which rank of how many, in all and on its host, and where they find each other.
struct RankPlace {
  int rank = 0, ranks = 1;
  int local_rank = 0, local_ranks = 1;
  std::string address = "127.0.0.1";
  int port = 0;
};

/// The wrapper of a rank on this host: its command line, and an environment in which the program finds rank, size and
/// rendezvous as RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and no other launcher's
/// variables that would say something else. Pure.
SpawnRequest own_rank(const LaunchOptions& options, const HostFacts& facts, const RankPlace& place);

/// The same on another host of the job, whose helper adds what is the host's own; with the variables of
/// facts.several.exported, as `lookup` has them. Pure.
StartRank remote_rank(const LaunchOptions& options, const HostFacts& facts, const RankPlace& place,
                      const EnvLookup& lookup);

/// Starts all ranks on this host; what the wrappers themselves have to say goes to `output`. `port`: nullptr for one
/// rank, which has nobody to find. Throws DeviceError.
JobProcesses start_own_ranks(const LaunchOptions& options, const HostFacts& facts, const HeldPort* port, int output);

/// Starts a wrapper for a program that waits for a place (Note [Survivors]). Throws DeviceError.
pid_t start_spare(const LaunchOptions& options, const HostFacts& facts, int output);

/// Starts ranks in the place of `lost`, which connect to the others at `port`. Throws DeviceError.
Replacements replace_own_ranks(const LaunchOptions& options, const HostFacts& facts, const HeldPort& port,
                               const std::vector<int>& lost, int output);

/// Starts the ranks on several hosts, which are `gathered`: those of this one here and the others through `hosts`.
/// Throws DeviceError.
JobProcesses start_ranks_on(const GatheredHosts& gathered, const LaunchOptions& options, const HostFacts& facts,
                            RemoteHosts& hosts, int output);

/// Starts ranks in the place of `lost` there; where rank 0 is on this host, all connect at another port, which `facts`
/// then has. Throws DeviceError.
Replacements replace_ranks_on(const GatheredHosts& gathered, const LaunchOptions& options, HostFacts& facts,
                              RemoteHosts& hosts, const std::vector<int>& lost, int output);

}  // namespace lockstep::launcher
