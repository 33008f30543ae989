"""torch.distributed over lockstep, on the CPU:

    torch.distributed.init_process_group("lockstep")

`import torch` registers the backend where this package is installed. Importing the package, too, gives ranks of mpirun and
srun the variables that init_process_group() reads.

`pg_options` of init_process_group() and new_group() may be a dict:
  encrypt                 what ranks of different hosts say to each other; all of them have LOCKSTEP_JOB_SECRET. Default:
                          whether the environment has LOCKSTEP_ENCRYPT=1
  stall_warning_seconds   how long an operation waits before a line on stderr says for whom; 0: never. Of the process: what
                          was given last holds for all groups. Default: 10
Anything else is for another backend of the same group ("cpu:lockstep,cuda:nccl").
"""
import importlib
import os
import pathlib
import socket
import time

import torch  # has what _C is linked with
import lockstep_c10d_autoload

from . import _build

__all__ = ["info"]
__version__ = _build.VERSION

_defaults = {"encrypt": os.environ.get("LOCKSTEP_ENCRYPT", "0").lower() in ("1", "true", "yes", "on"),
             "stall_warning_seconds": 10.0}

# What launchers call the variables that init_method="env://" reads: those of Open MPI and Slurm.
_ALIASES = {
    "RANK": ("OMPI_COMM_WORLD_RANK", "SLURM_PROCID"),
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"),
    "LOCAL_WORLD_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"),
}
_PORT_WITHIN_S = 60


def _complete_environment(env):
    """Under `lockstep launch`, mpirun and srun, where init_process_group() would find no rank."""
    if "RANK" in env or not any(name in env for name in _ALIASES["RANK"]):
        return
    for name, aliases in _ALIASES.items():
        value = next((env[alias] for alias in aliases if alias in env), None)
        if value is not None:
            env.setdefault(name, value)
    # On one host `lockstep launch` names no rendezvous: its ranks have a directory in common.
    if "MASTER_PORT" not in env and "LOCKSTEP_JOB" in env and env.get("LOCAL_WORLD_SIZE") == env["WORLD_SIZE"]:
        env.setdefault("MASTER_ADDR", "127.0.0.1")
        env["MASTER_PORT"] = _agree_on_port(pathlib.Path(env["LOCKSTEP_JOB"]) / "c10d-port", env["RANK"] == "0")


def _agree_on_port(file, chooses):
    if chooses:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        unfinished = file.with_suffix(".new")
        unfinished.write_text(port)
        unfinished.rename(file)
        return port
    deadline = time.monotonic() + _PORT_WITHIN_S
    while not file.exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"rank 0 has not imported lockstep_c10d within {_PORT_WITHIN_S} s → import it on all ranks")
        time.sleep(0.01)
    return file.read_text()


def _minor(version):
    return ".".join(version.split(".")[:2])


def _extension():
    """_C, or RuntimeError: in another PyTorch than the one that it was compiled for it would crash."""
    if _minor(torch.__version__) != _minor(_build.TORCH):
        raise RuntimeError(f"lockstep_c10d {__version__} is compiled for PyTorch {_minor(_build.TORCH)}, and this is "
                           f"{torch.__version__} → install its wheel for {_minor(torch.__version__)}, or build it: pip install "
                           "--force-reinstall ./bindings/c10d in a clone of lockstep")
    return importlib.import_module("._C", __name__)


def info():
    """What there is: versions of this package, of PyTorch, and of the PyTorch that it was compiled for, and whether it can be
    used (str: why not, or "")."""
    try:
        _extension()
        problem = ""
    except (RuntimeError, ImportError) as error:
        problem = str(error)
    return {"version": __version__, "torch": torch.__version__, "compiled_for_torch": _build.TORCH,
            "compiler": _build.COMPILER, "problem": problem}


def _share_buckets(env):
    """With this variable DistributedDataParallel asks the backend for its buckets' memory: ours is shared, and ranks reduce there
    without copies. Where there are GPUs, NCCL would be asked as well: the user decides there."""
    if "DDP_DISABLE_COMM_MEM" not in env and not torch.cuda.device_count():  # is_available() may start the driver, before a fork
        env["DDP_DISABLE_COMM_MEM"] = "0"


def create(group, options):
    """What torch.distributed calls for each group."""
    _share_buckets(os.environ)
    given = options if isinstance(options, dict) else {}
    if unknown := sorted(set(given) - set(_defaults)):
        raise ValueError(f"lockstep has no option '{unknown[0]}': there are {', '.join(_defaults)}")
    if "stall_warning_seconds" in given:
        _defaults["stall_warning_seconds"] = given["stall_warning_seconds"]
    return _extension().create(group.store, group.group_rank, group.group_size, list(group.global_ranks_in_group),
                     group.timeout.total_seconds(), **{**_defaults, **given})


_complete_environment(os.environ)
lockstep_c10d_autoload.register()
