"""What moves on while a rank does something else, and what ends: `progress.py CASE…`, on two ranks. Where LOCKSTEP_HOST_NAME
differs, they are on two hosts. Rank 0 prints "CASE is right" for each."""
import datetime
import os
import sys
import threading

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import lockstep_c10d  # noqa: F401: registers the backend

LARGE = 300_000  # more than is sent to a rank that does not receive


def same(got, value):
    assert torch.equal(got, torch.full_like(got, value)), f"rank {dist.get_rank()}: {got} where {value} is right"


def refused(part, call):
    try:
        call()
    except RuntimeError as error:
        assert part in str(error), error
    else:
        raise AssertionError(f"nothing was refused where '{part}' was expected")


def default_backend():
    return dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))


def summed(tensor):
    """What a communication hook does in the callback of another operation."""
    return dist.all_reduce(tensor.clone(), async_op=True).get_future().wait()[0]


def callbacks():
    """That issue operations and wait for them: before those that are queued, and in a communication hook of PyTorch's."""
    store, hosts = dist.distributed_c10d._get_default_store(), between_hosts()
    for i in range(10):
        first, second = torch.ones(1000), torch.ones(LARGE)
        if hosts and dist.get_rank() == 1:
            store.wait([f"queued{i}"])
        chain = dist.all_reduce(first, async_op=True).get_future().then(lambda done: summed(done.value()[0])).then(
            lambda done: summed(done.value()))
        beside = dist.all_reduce(second, async_op=True)
        store.set(f"queued{i}", "") if dist.get_rank() == 0 else None
        same(chain.wait(), 8)
        beside.wait()
        same(second, 2)
    torch.manual_seed(0)
    net = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(40, 70), torch.nn.ReLU(), torch.nn.Linear(70, 30)),
                                  bucket_cap_mb=0.005)
    net.register_comm_hook(powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2),
                           powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(6):
        optimizer.zero_grad()
        net(torch.rand(16, 40, generator=generator)).square().mean().backward()
        optimizer.step()
    mine = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine)
    assert torch.equal(*both), f"the ranks' parameters differ by up to {(both[0] - both[1]).abs().max()}"


def a_callback_waits_for_a_queued_one():
    store, tensors = dist.distributed_c10d._get_default_store(), [torch.ones(LARGE), torch.ones(LARGE)]
    if dist.get_rank() == 1:
        if between_hosts():
            store.wait(["queued"])
        for tensor in tensors:
            dist.all_reduce(tensor)
        return
    between_hosts()
    queued = []
    first = dist.all_reduce(tensors[0], async_op=True)
    over = first.get_future().then(lambda _: [work.wait() for work in queued])
    queued.append(dist.all_reduce(tensors[1], async_op=True))
    store.set("queued", "")
    over.wait()
    same(tensors[0], 2)
    queued[0].wait()
    same(tensors[1], 2)


def between_hosts():
    names = [None, None]
    dist.all_gather_object(names, os.environ["LOCKSTEP_HOST_NAME"])
    return names[0] != names[1]


def a_message_while_another_group_waits():
    other = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        work = dist.isend(torch.full((LARGE,), 3.0), dst=1)
        dist.barrier(group=other)
        work.wait()
    else:
        got = torch.zeros(LARGE)
        dist.recv(got, src=0)
        same(got, 3)
        dist.barrier(group=other)


def a_message_beside_a_collective():
    """A receive that is issued while the other rank has not come to the operation before it."""
    elements = LARGE if between_hosts() else 100
    ones = torch.ones(1000)
    if dist.get_rank() == 0:
        work = dist.all_reduce(ones, async_op=True)
        got = torch.zeros(elements)
        dist.recv(got, src=1)
        same(got, 4)
        work.wait()
    else:
        dist.send(torch.full((elements,), 4.0), dst=0)
        dist.all_reduce(ones)
    same(ones, 2)


def messages_of_callbacks():
    """A message that a callback sends; works that nobody keeps; is_completed() while another thread waits."""
    rank = dist.get_rank()
    for i in range(20):
        if rank == 0:
            dist.isend(torch.full((LARGE,), float(i)), dst=1)
            back = torch.zeros(LARGE)
            pending = dist.irecv(back, src=1)
            thread = threading.Thread(target=pending.wait)
            thread.start()
            while not pending.is_completed():
                pass
            thread.join()
            same(back, i + 1.0)
        else:
            got = torch.zeros(LARGE)
            sent = dist.irecv(got, src=0).get_future().then(lambda _: dist.isend(got + 1, dst=0))
            sent.wait()
    dist.barrier()


def from_any_rank_first():
    """Receives from any rank have what comes first, and those that name the rank what comes then."""
    if dist.get_rank() == 0:
        tensors = [torch.zeros(3) for _ in range(4)]
        works = [dist.irecv(tensors[0]), dist.irecv(tensors[1], src=1), dist.irecv(tensors[2]), dist.irecv(tensors[3])]
        dist.barrier()
        for value, (tensor, work) in enumerate(zip(tensors, works)):
            work.wait()
            same(tensor, value)
    else:
        dist.barrier()
        for value in range(4):
            dist.send(torch.full((3,), float(value)), dst=0)


def two_threads():
    """Each with a group of its own, and messages in a third one."""
    groups, errors = [dist.new_group([0, 1]) for _ in range(3)], []

    def use(group):
        try:
            for _ in range(50):
                tensor = torch.ones(20_000)
                dist.all_reduce(tensor, group=group)
                same(tensor, 2)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=use, args=(group,)) for group in groups[:2]]
    for thread in threads:
        thread.start()
    for i in range(50):
        other = 1 - dist.get_rank()
        got = torch.zeros(20_000)
        works = [dist.isend(torch.full((20_000,), float(i)), dst=other, group=groups[2]),
                 dist.irecv(got, src=other, group=groups[2])]
        for work in works:
            work.wait()
        same(got, i)
    for thread in threads:
        thread.join()
    assert not errors, errors


def after_the_end():
    """Calls on a group that is destroyed or aborted are refused, and what was under way fails."""
    backend, aborted = default_backend(), dist.new_group([0, 1])
    inner = aborted._get_backend(torch.device("cpu"))
    pending = dist.irecv(torch.zeros(3), src=1 - dist.get_rank(), group=aborted)
    inner.abort()
    refused("has been aborted", pending.wait)
    refused("has been destroyed", lambda: inner.allreduce([torch.ones(3)]))
    dist.destroy_process_group()
    for call in (lambda: backend.allreduce([torch.ones(3)]), lambda: backend.recv([torch.ones(3)], 1 - backend.rank(), 0)):
        refused("has been destroyed", call)
    backend.shutdown()


def left_under_way():
    """destroy_process_group() says that a message is under way, on the rank that has one."""
    if dist.get_rank() == 0:
        pending = dist.irecv(torch.zeros(3), src=1)
        dist.destroy_process_group()
        refused("under way", pending.wait)


def options():
    """Those of another backend; a group whose hosts encrypt."""
    dist.new_group([0, 1], pg_options=object())
    encrypted = dist.new_group([0, 1], pg_options={"encrypt": True, "stall_warning_seconds": 5})
    tensor = torch.ones(LARGE)
    dist.all_reduce(tensor, group=encrypted)
    same(tensor, 2)
    other = 1 - dist.get_rank()
    got = torch.zeros(LARGE)
    for work in (dist.isend(tensor, dst=other, group=encrypted), dist.irecv(got, src=other, group=encrypted)):
        work.wait()
    same(got, 2)
    assert lockstep_c10d._defaults["stall_warning_seconds"] == 5


def main():
    torch.set_num_threads(1)
    dist.init_process_group("lockstep", timeout=datetime.timedelta(seconds=60))
    rank = dist.get_rank()
    for case in sys.argv[1:]:
        globals()[case]()
        if rank == 0:
            print(f"{case} is right", flush=True)


main()
