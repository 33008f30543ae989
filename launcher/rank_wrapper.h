// `lockstep _rank -- PROGRAM ARGS`: what mpirun starts for each rank in place of the program.
#pragma once

#include <string>
#include <vector>

namespace lockstep::launcher {

/// Runs the program as a child, hands its output, pid and end to the launcher, and passes signals on to it. Whoever of
/// mpirun and the launcher dies first takes the wrapper along, and the wrapper its program. Returns the program's exit
/// code (128 + n for signal n, 127 or 126 if it could not be started). When the program ends, background processes that
/// it left in its process group are killed.
///
/// Call it from the main thread before any other thread starts. Throws UsageError outside of a `lockstep launch` job,
/// DeviceError when the launcher cannot be reached.
int rank_wrapper(const std::vector<std::string>& program);

}  // namespace lockstep::launcher
