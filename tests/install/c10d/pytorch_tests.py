"""PyTorch's own tests of torch.distributed (torch/testing/_internal/distributed/distributed_test.py, in its wheel) over the
backend "lockstep": one rank, started by scripts/try-c10d, with the name that they know it by in BACKEND. Each test gets a group of its own, in the same processes. Rank 0
prints a JSON object for each: its name, and "passes", "skipped: why" or "fails: why" of the rank that is worst."""
import datetime
import json
import os
import sys
import tempfile
import traceback
import unittest

# Which backend the tests take this one for: what they leave out, and what they expect, depends on its name.
TAKEN_FOR = os.environ["BACKEND"]

import torch
import torch.distributed as dist
from torch.testing._internal import common_distributed, common_utils

import lockstep_c10d  # noqa: F401: registers the backend

for feature in ("ddp", "subgroup", "plugin"):
    common_distributed.DistTestCases.backend_feature[feature].add(TAKEN_FOR)

from torch.testing._internal.distributed import distributed_test  # noqa: E402: reads all of the above

TIMEOUT = datetime.timedelta(seconds=30)
SYNC = datetime.timedelta(seconds=200)
SKIP_CODES = {skip.exit_code: skip.message for skip in common_distributed.TEST_SKIPS.values()}


class Case(distributed_test.DistributedTest._DistTestBase, common_utils.TestCase):
    rank, world_size, init_method = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://"
    file_name = None

    def setUp(self):  # PyTorch's starts processes
        pass

    def tearDown(self):
        pass

    def runTest(self):
        pass


def outcome(name, case, store, number):
    method = getattr(case, name)
    if getattr(method, "__unittest_skip__", False):
        return f"skipped: {method.__unittest_skip_why__}"
    dist.init_process_group("lockstep", store=dist.PrefixStore(f"test{number}", store), rank=case.rank,
                            world_size=case.world_size, timeout=TIMEOUT)
    common_utils.set_rng_seed()
    try:
        method()
    except unittest.SkipTest as skip:
        return f"skipped: {skip}"
    except SystemExit as ended:
        return f"skipped: {SKIP_CODES[ended.code]}" if ended.code in SKIP_CODES else f"fails: exit code {ended.code}"
    except BaseException as error:
        print(f"rank {case.rank} in {name}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        return f"fails: {(str(error).strip().splitlines() or [type(error).__name__])[0][:160]}"
    return "passes"


def main():
    torch.set_num_threads(1)
    store, rank, world_size = next(dist.rendezvous("env://"))
    store.set_timeout(SYNC)
    names = sys.argv[1:] or sorted(name for name in dir(Case) if name.startswith("test_"))
    with tempfile.TemporaryDirectory() as directory:
        if rank == 0:
            store.set("directory", directory)
        os.environ["TEMP_DIR"] = store.get("directory").decode()
        for number, name in enumerate(names):
            if rank == 0:  # what tests leave in files
                for inner in ("barrier", "test_dir", "init_dir"):
                    os.makedirs(os.path.join(directory, inner), exist_ok=True)
                    for path in os.scandir(os.path.join(directory, inner)):
                        if path.is_file():
                            os.unlink(path)
                distributed_test.Barrier.barrier_id = 0
                store.set(f"ready{number}", "")
            store.get(f"ready{number}")
            distributed_test.Barrier.barrier_id = 0
            result = outcome(name, Case(), store, number)
            store.set(f"result{number}/{rank}", result)
            all_of = [store.get(f"result{number}/{r}").decode() for r in range(world_size)]
            if dist.is_initialized():  # not before all are through
                dist.destroy_process_group()
            if rank == 0:
                worst = next((one for kind in ("fails", "skipped", "passes") for one in all_of if one.startswith(kind)))
                print(json.dumps({"name": name, "outcome": worst}), flush=True)
    store.set(f"done{rank}", "")
    if rank == 0:  # keeps the store
        for r in range(world_size):
            store.get(f"done{r}")


main()
