"""torch.distributed over lockstep, on the CPU:

    import lockstep_c10d
    torch.distributed.init_process_group("lockstep")

`pg_options` of init_process_group() and new_group() is a dict, or None:
  encrypt                 what ranks of different hosts say to each other; all of them have LOCKSTEP_JOB_SECRET
  stall_warning_seconds   how long an operation waits before a line on stderr says for whom; default: 10, 0: never
"""
import torch
import torch.distributed as dist

from . import _C

__all__ = []

_DEFAULTS = {"encrypt": False, "stall_warning_seconds": 10.0}


def _create(group, options):
    given = dict(options or {})
    if unknown := sorted(set(given) - set(_DEFAULTS)):
        raise ValueError(f"lockstep has no option '{unknown[0]}': there are {', '.join(_DEFAULTS)}")
    return _C.create(group.store, group.group_rank, group.group_size, list(group.global_ranks_in_group),
                     group.timeout.total_seconds(), **{**_DEFAULTS, **given})


dist.Backend.register_backend("lockstep", _create, extended_api=True, devices=["cpu"])
