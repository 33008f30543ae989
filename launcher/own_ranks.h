// Ranks that are this very binary, on this host: the launcher starts them itself, without mpirun.
#pragma once

#include <string>
#include <vector>

#include "base/unique_fd.h"
#include "launcher/job_processes.h"
#include "launcher/mpirun_command.h"
#include "launcher/options.h"
#include "lockstep/base/env.h"

namespace lockstep::launcher {

/// Whether `program` is the binary at `self`: "lockstep", which always means it, or a path or a name in PATH that leads
/// there.
bool is_own_binary(const std::string& program, const std::string& self);

/// Whether the launcher starts the ranks itself: they are its own binary, on this host, `options.mpi` does not ask for
/// mpirun, and no scheduler has given this process an allocation, whose hosts mpirun would ask it for.
bool starts_own_ranks(const LaunchOptions& options, const std::string& self, const EnvLookup& lookup);

/// A port of 127.0.0.1 for the rendezvous. While it is held nobody else is given it, neither a listener that asks for
/// any port nor an outgoing connection; rank 0 listens there all the same, because both sockets have SO_REUSEADDR and
/// this one does not listen.
class HeldPort {
 public:
  /// Throws DeviceError where none is free.
  HeldPort();
  int number() const { return number_; }

 private:
  UniqueFd socket_;
  int number_ = 0;
};

/// The wrapper of `rank`: its command line, and an environment in which the program finds rank, size and rendezvous as
/// RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and no other launcher's variables that
/// would say something else. Pure.
SpawnRequest own_rank(const LaunchOptions& options, const HostFacts& facts, int rank, int ranks, int port);

/// Starts all of them; what the wrappers themselves have to say goes to `output`. Throws DeviceError.
JobProcesses start_own_ranks(const LaunchOptions& options, const HostFacts& facts, int ranks, const HeldPort& port,
                             int output);

}  // namespace lockstep::launcher
