// Compute threads that share their cores with other programs.
//
// Note [Waiting beside busy neighbours]
// OpenMP's threads wait for each other some forty times in a training step. libgomp's wait spins for milliseconds
// before it sleeps, which is fastest where every thread has a core of its own. Where another program has taken a
// thread's core, the others spin through their share of the processor while the one they wait for is out, and when it
// returns they have used theirs up: the training runs twenty times slower, not half as fast. Two things repair it, and
// neither changes what is computed or how many threads compute it:
// - Waits sleep after kSpinMicroseconds. libgomp reads its setting before main(), so the program starts itself again
//   with it, which costs some 2 ms.
// - A thread that wakes up runs soon: it asks Linux (6.12 or newer) for shorter time slices than other programs have,
//   which gives it the processor earlier, not more of it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/env.h"

namespace lockstep {

/// How long a thread may spin before it sleeps: several times what waking one up costs.
inline constexpr int kSpinMicroseconds = 100;

/// The value of GOMP_SPINCOUNT (rounds of libgomp's wait) for `processors` in the affinity mask. Nothing if libgomp is
/// to be left alone: GOMP_SPINCOUNT or OMP_WAIT_POLICY is set, the process runs under Valgrind (which would lose it),
/// or it has only one processor, where libgomp does not spin.
std::optional<std::string> openmp_spin_count(const EnvLookup& lookup, int processors);

/// To be called first in main(), before there are threads: see the note. `argv` is the program's, ended by a null
/// pointer. Where the program cannot be started again it keeps libgomp's own setting.
void share_processors_well(char** argv);

}  // namespace lockstep
