"""What ranks say when one of them does not do its part. `failures.py CASE`; a rank that is well prints "rank R: TEXT"."""
import datetime
import os
import signal
import sys

import torch
import torch.distributed as dist

import lockstep_c10d  # noqa: F401: registers the backend


def fails(call):
    try:
        call()
    except dist.DistBackendError as error:
        print(f"rank {dist.get_rank()}: {error}", flush=True)
        return
    raise AssertionError("nothing failed")


def until_rank_0_has(done):
    """The last rank does nothing before that."""
    store, within = dist.distributed_c10d._get_default_store(), datetime.timedelta(seconds=100)
    if dist.get_rank() == 0:
        done()
        store.set("done", "")
        store.wait(["seen"], within)  # it is this process that keeps the store
    else:
        store.wait(["done"], within)
        store.set("seen", "")


def late():
    """The last rank is late; the others' future and wait() have the same error."""
    def on_rank_0():
        work = dist.all_reduce(torch.ones(100_000), async_op=True)
        fails(work.wait)
        try:
            work.get_future().wait()
        except RuntimeError as error:
            assert "timed out" in str(error), error
        else:
            raise AssertionError("the future has no error")
        fails(lambda: dist.barrier())  # and all that comes later

    until_rank_0_has(on_rank_0)


def one_operation_late():
    """It has a timeout of its own."""
    def on_rank_0():
        options = dist.AllreduceOptions()
        options.timeout = datetime.timedelta(seconds=1)
        backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
        fails(lambda: backend.allreduce([torch.ones(3)], options).wait())

    until_rank_0_has(on_rank_0)


def other_sparse_shape():
    """All ranks find out."""
    place = torch.zeros(1, 1, dtype=torch.int64)
    fails(lambda: dist.all_reduce(torch.sparse_coo_tensor(place, torch.ones(1), (4 + dist.get_rank(),))))


def silent():
    """Nobody sends; a wait may end before."""
    def on_rank_0():
        works = [dist.irecv(torch.ones(3)) for _ in range(2)]
        assert not works[0].is_completed()
        try:
            works[0].wait(datetime.timedelta(milliseconds=100))
        except RuntimeError as error:
            assert "timed out" in str(error), error
        else:
            raise AssertionError("a wait of 0.1 s has found a message")
        for work in works:
            fails(work.wait)

    until_rank_0_has(on_rank_0)


def another_tag():
    if dist.get_rank() == 0:
        fails(lambda: dist.recv(torch.ones(3), src=1, tag=3))
    else:
        dist.send(torch.ones(3), dst=0, tag=4)


def dead():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    fails(lambda: [dist.all_reduce(torch.ones(100_000)) for _ in range(2)])


def dead_on_gpu():
    """The process ends: nobody need look at the work that fails."""
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    dist.all_reduce(torch.ones(10, device="cuda"))
    torch.cuda.synchronize()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(10, device="cuda"))
    torch.cuda.synchronize()
    raise AssertionError("nothing failed")


def different():
    fails(lambda: dist.all_reduce(torch.ones(1000 + dist.get_rank())))


def left():
    """Ends without destroy_process_group(), as many programs do."""
    dist.all_reduce(torch.ones(10))
    print(f"rank {dist.get_rank()}: left", flush=True)


def alone():
    """One that ends it, and one that does not."""
    dist.all_reduce(torch.ones(10))
    if dist.get_rank() == 0:
        dist.destroy_process_group()
    print(f"rank {os.environ['RANK']}: left", flush=True)


def absent():
    """The group is never made: a rank does not come."""


def main():
    case = sys.argv[1]
    timeout = datetime.timedelta(seconds=2 if case in ("late", "silent", "absent") else 60)
    if case == "absent":
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=os.environ["RANK"] == "0",
                              wait_for_workers=False)
        if os.environ["RANK"] == "1":
            return
        try:
            dist.init_process_group("lockstep", store=store, rank=0, world_size=2, timeout=timeout)
        except dist.DistBackendError as error:
            print(f"rank 0: {error}")
        return
    dist.init_process_group("lockstep", timeout=timeout)
    globals()[case]()
    if case in ("late", "different"):
        dist.destroy_process_group()


main()
