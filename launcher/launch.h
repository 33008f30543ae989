// `lockstep launch`: N ranks of a program on this host, or on several, over mpirun.
#pragma once

#include "launcher/options.h"

namespace lockstep::launcher {

/// Runs the job to its end and returns its exit code: 0, the code of the rank that failed first (128 + n for signal n),
/// 4 if mpirun failed, a host of options.hosts cannot take part or was lost, 128 + n after a stop by signal n (75 if
/// the ranks saved a checkpoint), 128 + SIGPIPE where the reader of stdout has gone, which ends the job, 3 if all went
/// well but output was lost (a full disk). On a failure it has said on stderr who failed first, how, and that rank's
/// last lines. When it returns, or is killed, no process, file or shared memory of the job is left: the job's end is
/// also the end of background processes that its ranks started.
///
/// On other hosts the same holds for what is there, within options.host_seconds where the connection is lost: see Note
/// [Helpers on other hosts] in hosts/host_link.h.
///
/// The programs read nothing from stdin. SIGUSR1 and SIGUSR2 are passed on to all programs. The running binary is
/// started again as `_rank -- PROGRAM`, which must lead to rank_wrapper(); on other hosts as `_host`, which must lead
/// to host_helper(), and as `_rsh HOST COMMAND…`, to remote_start(). Call it from the main thread before any
/// other thread starts. Throws UsageError (no program, wrong numbers), IoError (unwritable log directory), MpiError (no
/// mpirun), DeviceError.
int launch(LaunchOptions options);

}  // namespace lockstep::launcher
