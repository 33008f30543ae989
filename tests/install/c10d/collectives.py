"""collectives.py [cuda]: every operation of the backend against what it should give, on each rank, of tensors on the CPU or on
GPUs, which ranks may share. It is started on each rank, with RANK and WORLD_SIZE; where LOCKSTEP_HOST_NAME differs, between
hosts."""
import functools
import itertools
import os
import sys
import threading

import torch
import torch.distributed as dist

import lockstep_c10d  # noqa: F401: registers the backend

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
MOVED = FLOATS + INTEGERS + (torch.bool, torch.complex64, torch.float8_e4m3fn)
SIZES = (0, 1, 7, 100_003)
ON_GPU = sys.argv[1:] == ["cuda"]


def made(rank, size, dtype):
    """What `rank` contributes: small numbers, so that no order of sums matters."""
    values = (torch.arange(size) * (rank + 3)) % 7 + 1
    return (values % 2).to(dtype) if dtype == torch.bool else values.to(dtype)


def layouts(tensor):
    """The tensor in memory of several layouts."""
    yield tensor.clone()
    if tensor.numel() > 1:
        spaced = torch.zeros(2 * tensor.numel(), dtype=tensor.dtype)[::2]
        spaced.copy_(tensor)
        yield spaced


def same(got, wanted, what):
    if got.shape != wanted.shape or not torch.equal(got.view(torch.uint8) if got.dtype == torch.float8_e4m3fn else got,
                                                    wanted.view(torch.uint8) if got.dtype == torch.float8_e4m3fn
                                                    else wanted):
        raise AssertionError(f"rank {dist.get_rank()}: {what}: {got} where {wanted} is right")


def refused(part, call):
    try:
        call()
    except (RuntimeError, ValueError) as error:
        assert part in str(error), error
    else:
        raise AssertionError(f"nothing was refused where '{part}' was expected")


def reductions():
    n = dist.get_world_size()
    ops = {dist.ReduceOp.SUM: lambda all: sum(all[1:], all[0]), dist.ReduceOp.MIN: lambda all: torch.stack(all).amin(0),
           dist.ReduceOp.MAX: lambda all: torch.stack(all).amax(0), dist.ReduceOp.PRODUCT: lambda all: torch.stack(all).prod(0)}
    for dtype, size, op in itertools.product(FLOATS + INTEGERS, SIZES, ops):
        parts = [made(r, size, dtype) for r in range(n)]
        wanted = ops[op](parts).to(dtype)
        for tensor in layouts(parts[dist.get_rank()]):
            dist.all_reduce(tensor, op=op)
            same(tensor, wanted, f"all_reduce of {size} {dtype} by {op}")
    for dtype in FLOATS:
        mean = made(dist.get_rank(), 1000, dtype)
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        same(mean, (sum(made(r, 1000, dtype).double() for r in range(n)).to(dtype) / n), f"average of {dtype}")
    for dtype in INTEGERS:
        high = torch.full((1000,), 120, dtype=dtype)
        dist.all_reduce(high, op=dist.ReduceOp.AVG)
        same(high, torch.full((1000,), 120, dtype=dtype), f"average of {dtype}")
    of_first = torch.tensor([dist.get_rank() == 0, True])
    any_of, all_of = of_first.clone(), of_first.clone()
    dist.all_reduce(any_of)
    dist.all_reduce(all_of, op=dist.ReduceOp.PRODUCT)
    same(any_of, torch.tensor([True, True]), "sum of bool")
    same(all_of, torch.tensor([n == 1, True]), "product of bool")
    z = torch.full((5,), complex(1, dist.get_rank()))
    dist.all_reduce(z)
    same(z, torch.full((5,), complex(n, n * (n - 1) / 2)), "sum of complex numbers")
    on_one = torch.full((3,), dist.get_rank() + 1.0)
    dist.reduce(on_one, dst=n - 1)
    same(on_one, torch.full((3,), n * (n + 1) / 2 if dist.get_rank() == n - 1 else dist.get_rank() + 1.0), "reduce")
    scaled = torch.ones(4)
    dist.all_reduce(scaled, op=dist._make_nccl_premul_sum(0.5))
    same(scaled, torch.full((4,), n / 2), "all_reduce by PREMUL_SUM")
    several = [torch.full((k,), 1.0 + k) for k in (3, 0, 5)]
    dist.all_reduce_coalesced(several)
    for k, tensor in zip((3, 0, 5), several):
        same(tensor, torch.full((k,), n * (1.0 + k)), "all_reduce_coalesced")


def bits():
    n, rank = dist.get_world_size(), dist.get_rank()
    ops = {dist.ReduceOp.BAND: torch.bitwise_and, dist.ReduceOp.BOR: torch.bitwise_or, dist.ReduceOp.BXOR: torch.bitwise_xor}
    for dtype, size, op in itertools.product(INTEGERS + (torch.bool,), SIZES, ops):
        parts = [made(r, n * size, dtype) for r in range(n)]
        wanted = functools.reduce(ops[op], parts)
        for tensor in layouts(parts[rank]):
            mine = torch.empty(size, dtype=dtype)
            dist.reduce_scatter_tensor(mine, tensor, op=op)
            same(mine, wanted[rank * size:(rank + 1) * size], f"reduce_scatter of {size} {dtype} by {op}")
            at_last = tensor.clone()
            dist.reduce(at_last, dst=n - 1, op=op)
            same(at_last, wanted if rank == n - 1 else tensor, f"reduce of {size} {dtype} by {op}")
            dist.all_reduce(tensor, op=op)
            same(tensor, wanted, f"all_reduce of {size} {dtype} by {op}")
    refused("BAND is of integers", lambda: dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BAND))


def sparse():
    if ON_GPU:
        place = torch.zeros(1, 1, dtype=torch.int64)
        return refused("COO ones on the CPU", lambda: dist.all_reduce(torch.sparse_coo_tensor(place, torch.ones(1), (4,))))
    n, rank = dist.get_world_size(), dist.get_rank()

    def of(r, dtype):
        """Rank 0's has nothing, others r + 2 entries, two in one place; rows of 3."""
        places = torch.arange(r + 2 if r else 0) % max(r + 1, 1)
        return torch.sparse_coo_tensor(places[None], torch.ones(len(places), 3, dtype=dtype) * r, (50, 3))

    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        for op, divisor in ((dist.ReduceOp.SUM, 1), (dist.ReduceOp.AVG, n))[:2 if dtype.is_floating_point else 1]:
            tensor = of(rank, dtype)
            dist.all_reduce(tensor, op=op)
            same(tensor.to_dense(), sum(of(r, dtype).to_dense() for r in range(n)) / divisor if divisor > 1
                 else sum(of(r, dtype).to_dense() for r in range(n)).to(dtype), f"all_reduce of sparse {dtype} by {op}")
    refused("reduces sparse tensors by SUM and AVG", lambda: dist.all_reduce(of(rank, torch.float32), op=dist.ReduceOp.MAX))
    torch.manual_seed(0)
    table = torch.nn.Embedding(20, 4, sparse=True)
    model = torch.nn.parallel.DistributedDataParallel(table)
    model(torch.tensor([rank, 5])).sum().backward()
    wanted = torch.zeros(20, 4)
    wanted[5] = 1
    wanted[:n] += 1 / n
    assert torch.allclose(table.weight.grad.to_dense(), wanted, atol=1e-6), table.weight.grad


def moves():
    n, rank = dist.get_world_size(), dist.get_rank()
    for dtype, size in itertools.product(MOVED, SIZES):
        parts = [made(r, size, dtype) for r in range(n)]
        for tensor in layouts(parts[rank]):
            root = size % n
            dist.broadcast(tensor, src=root)
            same(tensor, parts[root], f"broadcast of {size} {dtype}")
        for tensor in layouts(parts[rank]):
            gathered = [torch.empty(size, dtype=dtype) for _ in range(n)]
            dist.all_gather(gathered, tensor)
            whole = torch.empty(n * size, dtype=dtype)
            dist.all_gather_into_tensor(whole, tensor)
            for got in (torch.cat(gathered), whole):
                same(got, torch.cat(parts), f"all_gather of {size} {dtype}")
    ragged = [torch.empty(r + 1) for r in range(n)]
    dist.all_gather(ragged, torch.full((rank + 1,), float(rank)))
    for r in range(n):
        same(ragged[r], torch.full((r + 1,), float(r)), "all_gather of different sizes")
    inside = torch.empty(n, 3)
    inside[rank] = rank
    dist.all_gather_into_tensor(inside, inside[rank])
    same(inside, torch.arange(n, dtype=torch.float32)[:, None].expand(n, 3).contiguous(), "all_gather in place")
    grown = torch.nn.Parameter(torch.full((4,), float(rank)))
    dist.broadcast(grown, src=0)
    same(grown.detach(), torch.zeros(4), "broadcast of a parameter")


def scattered_reductions():
    n, rank = dist.get_world_size(), dist.get_rank()
    for dtype, size in itertools.product(FLOATS + (torch.int32, torch.int8), SIZES):
        all_of = [made(r, n * size, dtype) for r in range(n)]
        wanted = sum(all_of[1:], all_of[0]).to(dtype)[rank * size:(rank + 1) * size]
        for tensor in layouts(all_of[rank]):
            for mine in layouts(torch.empty(size, dtype=dtype)):
                dist.reduce_scatter_tensor(mine, tensor)
                same(mine, wanted, f"reduce_scatter_tensor of {size} {dtype}")
            mine = torch.empty(size, dtype=dtype)
            dist.reduce_scatter(mine, list(tensor.chunk(n)) if size else [tensor] * n)
            same(mine, wanted, f"reduce_scatter of {size} {dtype}")
    mean = torch.empty(2)
    dist.reduce_scatter_tensor(mean, torch.arange(2.0 * n) + rank, op=dist.ReduceOp.AVG)
    same(mean, torch.arange(2.0 * n)[2 * rank:2 * rank + 2] + (n - 1) / 2, "average by reduce_scatter")
    ragged = torch.empty(rank + 1)
    dist.reduce_scatter(ragged, [torch.full((r + 1,), 1.0) for r in range(n)])
    same(ragged, torch.full((rank + 1,), float(n)), "reduce_scatter of different sizes")


def exchanges():
    n, rank = dist.get_world_size(), dist.get_rank()
    for dtype, size in itertools.product((torch.float32, torch.bfloat16, torch.int64, torch.bool), SIZES):
        parts = [made(r, size, dtype) for r in range(n)]
        root = n - 1
        gathered = [torch.empty(size, dtype=dtype) for _ in range(n)] if rank == root else None
        dist.gather(parts[rank], gathered, dst=root)
        if rank == root:
            same(torch.cat(gathered), torch.cat(parts), f"gather of {size} {dtype}")
        mine = torch.empty(size, dtype=dtype)
        dist.scatter(mine, parts if rank == 0 else None, src=0)
        same(mine, parts[rank], f"scatter of {size} {dtype}")
        all_of = [made(r, n * size, dtype) for r in range(n)]
        received = torch.empty(n * size, dtype=dtype)
        dist.all_to_all_single(received, all_of[rank])
        same(received, torch.cat([one[rank * size:(rank + 1) * size] for one in all_of]), f"all_to_all of {size} {dtype}")
    # Rank r sends r + s rows to rank s.
    sent = torch.cat([torch.full((rank + s, 2), 10.0 * rank + s) for s in range(n)])
    received = torch.empty(sum(r + rank for r in range(n)), 2)
    dist.all_to_all_single(received, sent, [r + rank for r in range(n)], [rank + s for s in range(n)])
    same(received, torch.cat([torch.full((r + rank, 2), 10.0 * r + rank) for r in range(n)]), "all_to_all of rows")
    lists = [torch.empty(r + 1) for r in range(n)]
    dist.all_to_all(lists, [torch.full((rank + 1,), float(s)) for s in range(n)])
    same(torch.cat(lists), torch.full((n * (n + 1) // 2,), float(rank)), "all_to_all of lists")


def messages():
    n, rank = dist.get_world_size(), dist.get_rank()
    if n == 1:
        return
    after, before = (rank + 1) % n, (rank - 1) % n
    for size in (0, 1, 100_003):
        for tensor in layouts(made(rank, size, torch.float32)):
            got = torch.zeros_like(tensor)
            for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, after), dist.P2POp(dist.irecv, got, before)]):
                work.wait()
            same(got, made(before, size, torch.float32), f"a message of {size}")
    # A receive that is waited for after a collective, which the sender comes to after its blocking send.
    if rank == 1:
        late = torch.zeros(300_000)
        work = dist.irecv(late, src=0, tag=7)
    if rank == 0:
        dist.send(torch.full((300_000,), 5.0), dst=1, tag=7)
    dist.barrier()
    if rank == 1:
        work.wait()
        same(late, torch.full((300_000,), 5.0), "a message beside a collective")
    # From whoever sends first; then from a rank whose message is expected already.
    if rank == 0:
        senders = []
        for _ in range(1, n):
            got = torch.zeros(3)
            senders.append(dist.recv(got))
            same(got, torch.full((3,), float(senders[-1])), "a message from any rank")
        assert sorted(senders) == list(range(1, n)), senders
        dist.barrier()
        got = torch.zeros(5)
        dist.recv(got, src=n - 1)
        same(got, torch.full((5,), 9.0), "a message after those from any rank")
    else:
        dist.send(torch.full((3,), float(rank)), dst=0)
        dist.barrier()
        if rank == n - 1:
            dist.send(torch.full((5,), 9.0), dst=0)


def objects():
    """PyTorch's own, over broadcasts and all_gathers of bytes."""
    n, rank = dist.get_world_size(), dist.get_rank()
    everyone = [None] * n
    dist.all_gather_object(everyone, {"rank": rank, "text": "x" * 1000 * rank})
    assert [one["rank"] for one in everyone] == list(range(n)) and len(everyone[-1]["text"]) == 1000 * (n - 1)
    gathered = [None] * n if rank == 0 else None
    dist.gather_object(rank, gathered)
    assert rank > 0 or gathered == list(range(n))
    told = [{"answer": 42}] if rank == 0 else [None]
    dist.broadcast_object_list(told, src=0)
    assert told == [{"answer": 42}]


def groups_of_some():
    n, rank = dist.get_world_size(), dist.get_rank()
    dist.barrier()
    groups = [dist.new_group(members) for members in ([0], list(range(n))[::-1], list(range(1, n))) if members]
    for group, members in zip(groups, ([0], list(range(n)), list(range(1, n)))):
        if rank in members:
            ones = torch.ones(70_000)
            dist.all_reduce(ones, group=group)
            same(ones, torch.full((70_000,), float(len(members))), f"all_reduce in the group {members}")
    if n > 2 and rank > 0:
        dist.destroy_process_group(groups[-1])


def works():
    """Futures, and calls from other threads, one after the other."""
    n = dist.get_world_size()
    tensor = torch.ones(1000)
    work = dist.all_reduce(tensor, async_op=True)
    doubled = work.get_future().then(lambda done: 2 * done.value()[0])
    work.wait()
    if ON_GPU:
        torch.cuda.synchronize()
    assert work.is_completed()
    same(doubled.wait(), torch.full((1000,), 2.0 * n), "a future's result")
    queued = [torch.full((50_000,), float(i)) for i in range(20)]
    for pending in [dist.all_reduce(one, async_op=True) for one in queued]:
        pending.wait()
    for i, one in enumerate(queued):
        same(one, torch.full((50_000,), float(i * n)), "operations in a row")
    for i in range(5):
        results = []
        thread = threading.Thread(target=lambda: results.append(dist.all_reduce(tensor.fill_(1), async_op=True).wait()))
        thread.start()
        thread.join()
        assert results == [True]
        same(tensor, torch.full((1000,), float(n)), "a call from another thread")


def shared_memory():
    """Tensors in memory that all ranks of a host see, whole and in part."""
    n, rank = dist.get_world_size(), dist.get_rank()
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    if not hasattr(backend, "supports_tensor_alloc") or not backend.supports_tensor_alloc(torch.device("cpu")):
        return  # a PyTorch that does not ask, or ranks of several hosts
    for dtype, size in itertools.product(FLOATS + INTEGERS, SIZES):
        tensor = backend.allocate_tensor(size, dtype=dtype, device=torch.device("cpu"))
        wanted = sum(made(r, size, dtype) for r in range(1, n)) + made(0, size, dtype)
        tensor.copy_(made(rank, size, dtype))
        dist.all_reduce(tensor)
        same(tensor, wanted.to(dtype), f"all_reduce of {size} {dtype} in shared memory")
        tensor.copy_(made(rank, size, dtype))
        dist.all_reduce(tensor[1:size - 1])
        same(tensor[1:size - 1], wanted.to(dtype)[1:size - 1], f"all_reduce of part of {size} {dtype} in shared memory")
        same(tensor[:1], made(rank, size, dtype)[:1], "what is beside it")
        dist.broadcast(tensor, src=n - 1)
        same(tensor[:1], made(n - 1, size, dtype)[:1], f"broadcast of {size} {dtype} in shared memory")
    kept = [backend.allocate_tensor(1000, dtype=torch.float32, device=torch.device("cpu")) for _ in range(20)]
    thread = threading.Thread(target=kept.clear)
    thread.start()
    thread.join()
    again = backend.allocate_tensor(1000, dtype=torch.float32, device=torch.device("cpu")).fill_(1)
    dist.all_reduce(again, op=dist.ReduceOp.AVG)
    same(again, torch.ones(1000), "average in shared memory")


def refusals():
    ones, n = torch.ones(3), dist.get_world_size()
    child = os.fork()
    if child == 0:
        refused("in a forked process", lambda: dist.all_reduce(ones))
        if n > 1:
            refused("in a forked process", lambda: dist.send(ones, dst=(dist.get_rank() + 1) % n))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    refused("does not reduce Float8_e4m3fn", lambda: dist.all_reduce(ones.to(torch.float8_e4m3fn)))
    refused("no average of bool", lambda: dist.all_reduce(ones.bool(), op=dist.ReduceOp.AVG))
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    if ON_GPU and n > 1:
        refused("on cpu and on cuda" if torch.cuda.device_count() == 1 else "on cpu and", lambda: dist.all_gather(
            [torch.ones(3), *[torch.ones(3, device="cpu")] * (n - 1)][::-1], ones.cpu()))
    refused("of layout Sparse", lambda: backend.broadcast(ones.to_sparse(), 0))
    for call in (backend.send, backend.recv):
        for peer in (-1, n, dist.get_rank()):
            refused(f"names rank {peer}" if n > 1 else "of one rank", lambda: call([ones], peer, 0))
    refused("on meta", lambda: backend.allreduce([ones.to("meta")]))
    dist.barrier()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("lockstep")
    if ON_GPU:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
        torch.set_default_device("cuda")
    assert dist.get_backend() == "lockstep"
    for check in (reductions, bits, sparse, moves, scattered_reductions, exchanges, messages, objects, groups_of_some, works, shared_memory, refusals):
        check()
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks: all operations are right")
    dist.destroy_process_group()


main()
