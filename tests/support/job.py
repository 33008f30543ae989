"""A job of a program's: one process for each rank, which RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT name, as under
torchrun."""
import contextlib
import os
import signal
import socket
import subprocess

# What launchers and users say to another job.
OF_OTHER_JOBS = ("SLURM_", "OMPI_", "TORCHELASTIC_", "LOCKSTEP_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_")


def environment(**more):
    """This process's, without what says of which job it is; `more` in it."""
    return {name: value for name, value in os.environ.items() if not name.startswith(OF_OTHER_JOBS)} | more


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@contextlib.contextmanager
def started(count, argv, env, each=lambda rank: {}, **popen):
    """The processes of `count` ranks, text both ways. each(rank): more arguments of Popen for that one, and "env", what its
    environment has besides. What is left of them at the end is killed, with all that they have started."""
    meeting = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = []
    try:
        for rank in range(count):
            own = dict(each(rank))
            variables = env | meeting | {"RANK": str(rank)} | own.pop("env", {})
            processes.append(subprocess.Popen([str(word) for word in argv], env=variables, text=True, start_new_session=True,
                                              **popen, **own))
        yield processes
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in processes:
            process.wait()
