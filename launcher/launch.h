// `lockstep launch`: N ranks of a program on this host, or on several, over mpirun or without it; and the processes of
// the same binary that it starts: a wrapper for each rank, a helper on each other host, and what mpirun takes for ssh.
#pragma once

#include <string>
#include <vector>

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

/// `lockstep _rank -- PROGRAM ARGS`, which mpirun starts for each rank in place of the program.
/// Runs the program as a child, hands its output, pid and end to the launcher, and passes signals on to it. Whoever of
/// mpirun and the launcher dies first takes the wrapper along, and the wrapper its program. Returns the program's exit
/// code (128 + n for signal n, 127 or 126 if it could not be started). When the program ends, background processes that
/// it left in its process group are killed.
///
/// Call it from the main thread before any other thread starts. Throws UsageError outside of a `lockstep launch` job,
/// DeviceError when the launcher cannot be reached.
int rank_wrapper(const std::vector<std::string>& program);

/// `lockstep _rsh HOST COMMAND…`, which mpirun starts in the place of ssh.
/// Has the launcher run the shell command that `arguments` make, after a host and possibly flags before it, on that
/// host, and returns its exit code when it has ended; what it writes comes to stderr. See Note [Helpers on other
/// hosts]. Throws UsageError outside of a `lockstep launch` job, DeviceError when the launcher cannot be reached.
int remote_start(const std::vector<std::string>& arguments);

/// `lockstep _host`, the helper on another host.
/// Greets on stdout, obeys what the launcher says on stdin, and returns when the job has ended or the launcher has
/// gone; nothing of the job is left on this host then. `gpus` is for Greeting. See Note [Helpers on other hosts] in
/// host_link.h. Call it from the main thread before any other thread starts. Throws MpiError for what no launcher says,
/// DeviceError.
int host_helper(int gpus);

}  // namespace lockstep::launcher
