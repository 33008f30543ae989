// `lockstep launch`: N ranks of a program on this host, over mpirun.
#pragma once

#include "launcher/options.h"

namespace lockstep::launcher {

/// Runs the job to its end and returns its exit code: 0, the code of the rank that failed first (128 + n for signal n),
/// 4 if mpirun failed, 128 + n after a stop by signal n (75 if the ranks saved a checkpoint), 3 if all went well but
/// output was lost (a full disk; a reader that has gone is no loss). On a failure it has said
/// on stderr who failed first, how, and that rank's last lines. When it returns, or is killed, no process, file or
/// shared memory of the job is left: the job's end is also the end of background processes that its ranks started.
///
/// The programs read nothing from stdin. SIGUSR1 and SIGUSR2 are passed on to all programs. The running binary is
/// started again as `_rank -- PROGRAM`, which must lead to rank_wrapper(). Call it from the main thread before any
/// other thread starts. Throws UsageError (no program, wrong numbers, unwritable log directory), MpiError (no mpirun),
/// DeviceError.
int launch(const LaunchOptions& options);

}  // namespace lockstep::launcher
