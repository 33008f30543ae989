// Processes that a benchmark starts for itself.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace lockstep::bench {

/// Forks `count` processes, of a process that has no threads yet; each calls work(rank), whose text (rank 0's is meant;
/// those of others should be empty) comes back when all have ended. With more than one they find themselves ranks of a
/// job on this host, by RANK and WORLD_SIZE, with a rendezvous at a port of their own. What one throws it prints, and
/// ends with its code; the others are then ended after a moment, and PeerError with the first one's code is thrown
/// here. None outlives this call, or this process. Throws InterruptedError when this process is asked to stop.
std::string run_processes(int count, const std::function<std::string(int rank)>& work);

struct ProgramResult {
  int code = 0;          // 128 + n for signal n
  std::string out, err;  // of what it wrote to stderr, the end
};

/// Runs a program, which reads nothing, to its end. A stop of this process is passed on; InterruptedError is thrown
/// once the program has ended. It is asked to end where this process is killed. Throws DeviceError.
ProgramResult run_program(const std::vector<std::string>& command);

}  // namespace lockstep::bench
