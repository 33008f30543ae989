"""The entry point "torch.backends" of lockstep-c10d, which `import torch` calls: makes "lockstep" a backend. A module of its own,
because `import lockstep_c10d` sets variables for ranks of mpirun and srun, which no program shall find in its environment
because the package is installed."""
import os

import torch
import torch.distributed as dist


def _create(group, options):
    import lockstep_c10d

    return lockstep_c10d.create(group, options)


def register():
    """Once."""
    if not dist.is_available() or "lockstep" in dist.Backend.backend_list:
        return
    devices = ["cpu", "cuda"] if torch.version.cuda else ["cpu"]  # where its build is without CUDA, it says so
    dist.Backend.register_backend("lockstep", _create, extended_api=True, devices=devices)
    if "LOCKSTEP_JOB" in os.environ:  # a rank of `lockstep launch`
        import lockstep_c10d  # noqa: F401
