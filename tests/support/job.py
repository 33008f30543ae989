"""A job of a program's: one process for each rank, which RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT name, as under
torchrun."""
import contextlib
import os
import random
import signal
import socket
import subprocess

# What launchers and users say to another job.
OF_OTHER_JOBS = ("SLURM_", "OMPI_", "PMIX_", "PMI_", "TORCHELASTIC_", "LOCKSTEP_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_")
CLAIMS = []


def environment(**more):
    """This process's, without what says of which job it is; `more` in it."""
    return {name: value for name, value in os.environ.items() if not name.startswith(OF_OTHER_JOBS)} | more


def free_port():
    """A port on 127.0.0.1 at which nobody listened just now, and which no other test gets while this process lives, as with
    free_port.h."""
    for port in random.sample(range(10000, 20000), 1000):
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            claim.bind(f"\0lockstep tests' port {port}")
            with socket.socket() as free:
                free.bind(("127.0.0.1", port))
        except OSError:
            claim.close()
            continue
        CLAIMS.append(claim)
        return port
    raise AssertionError("no port from 10000 to 19999 is free")


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
