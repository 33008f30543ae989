"""One rank of PyTorch DistributedDataParallel on Gloo, or on the backend PEER_BACKEND, which measures on command.

Started for each rank by bench/harness/torch_peer.py, in the peer's own environment. Reads commands from stdin, one
JSON object per line, and answers each with one on what was stdout; whatever libraries print goes to stderr. Between
commands it sleeps in a read, and it ends when stdin does. A rank reports its own times, step by step: which rank was
the slowest is for the caller to find.
"""
import contextlib
import json
import os
import re
import socket
import sys
import time


def process_age_s() -> float:
    """Seconds since this process was started, by the kernel's account: as in bench/step.cpp."""
    with open("/proc/self/stat") as file:
        started_ticks = int(file.read().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")


def memory_bytes() -> dict:
    """The most that was resident, and how much of what is resident now are GPU libraries' files: a build of PyTorch for
    CUDA maps them without a GPU too, and a build for the CPU alone would not."""
    with open("/proc/self/status") as file:
        peak = int(re.search(r"VmHWM:\s+(\d+) kB", file.read())[1]) * 1024
    gpu, counted = 0, False
    with open("/proc/self/smaps") as file:
        for line in file:
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                counted = re.search(r"/nvidia/|cuda|/triton/|libnccl|libcudnn", line) is not None
            elif counted and line.startswith("Rss:"):
                gpu += int(line.split()[1]) * 1024
    return {"peak_memory_bytes": peak, "gpu_library_bytes": gpu}


class Worker:
    def __init__(self, torch, dist, rank: int, world_size: int):
        self.torch, self.dist = torch, dist
        self.rank, self.world_size = rank, world_size
        self.step = None

    # Training steps.

    def build(self, model: str, batch: int, compiled: bool, channels_last: bool,
              optimizer: str = "adamw", precision: str = "f32") -> dict:
        """Makes everything and takes the first step. bf16: by autocast."""
        from models import MODELS, loss_of
        from torch.nn.parallel import DistributedDataParallel

        torch = self.torch
        torch.manual_seed(1 + self.rank)
        if model not in MODELS:
            raise RuntimeError(f"no model '{model}' → add it to bench/peers/torch/models.py")
        spec = MODELS[model]
        module = spec.make()
        inputs, labels = spec.batch(batch)
        if channels_last:
            module = module.to(memory_format=torch.channels_last)
            inputs = inputs.to(memory_format=torch.channels_last)
        self.ddp = DistributedDataParallel(module, gradient_as_bucket_view=True)
        if optimizer == "sgd":
            optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
        else:
            # As `lockstep bench step` by default; fused is the fastest of PyTorch's three implementations on the CPU.
            optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
        forward = torch.compile(self.ddp) if compiled else self.ddp
        halves = torch.autocast("cpu", dtype=torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()

        def step():
            optimizer.zero_grad(set_to_none=True)
            with halves:
                loss = loss_of(forward(inputs), labels)
            loss.backward()
            optimizer.step()
            return loss

        self.step = step
        step()
        return {"startup_ms": 1e3 * process_age_s(), **memory_bytes()}

    def run_steps(self, steps: int, warmup_steps: int) -> dict:
        """Steps with communication, and then as many without it (no_sync), each after a barrier. Not alternating as in
        `lockstep bench step`: here that would make steps with communication slower."""
        loss = None

        def timed() -> float:
            nonlocal loss
            self.dist.barrier()
            begin = time.perf_counter()
            loss = self.step()
            return 1e3 * (time.perf_counter() - begin)

        for _ in range(warmup_steps):
            timed()
        step_ms = [timed() for _ in range(steps)]
        with self.ddp.no_sync():
            timed()
            compute_ms = [timed() for _ in range(steps)]
        if not bool(self.torch.isfinite(loss)):
            raise RuntimeError("the loss became NaN or infinite while it was measured")
        return {"step_ms": step_ms, "compute_ms": compute_ms, **memory_bytes()}

    # Collectives.

    def all_reduce(self, bytes: int):
        """In place, of f32; like the two below, what it is to be timed, checked once."""
        buffer = self.torch.arange(bytes // 4, dtype=self.torch.float32) % 31
        expected = buffer * self.world_size
        self.dist.all_reduce(buffer)
        self.check(buffer, expected)
        buffer.zero_()
        return lambda: self.dist.all_reduce(buffer)

    def all_gather(self, bytes: int):
        """To so many bytes, of all ranks together, as FSDP2 gathers parameters."""
        part = self.torch.full((max(bytes // 4 // self.world_size, 1),), float(self.rank))
        whole = self.torch.empty(len(part) * self.world_size)
        self.dist.all_gather_into_tensor(whole, part)
        self.check(whole, self.torch.arange(self.world_size).repeat_interleave(len(part)).float())
        return lambda: self.dist.all_gather_into_tensor(whole, part)

    def reduce_scatter(self, bytes: int):
        """Of so many bytes on each rank, as FSDP2 sums gradients."""
        part = self.torch.empty(max(bytes // 4 // self.world_size, 1))
        whole = self.torch.arange(len(part) * self.world_size, dtype=self.torch.float32) % 31
        self.dist.reduce_scatter_tensor(part, whole)
        self.check(part, whole.view(self.world_size, -1)[self.rank] * self.world_size)
        whole.zero_()
        return lambda: self.dist.reduce_scatter_tensor(part, whole)

    def check(self, got, expected) -> None:
        if not self.torch.equal(got, expected):
            raise RuntimeError(f"a result of {got.nbytes} bytes is wrong")

    def collective(self, kind: str, bytes: int) -> dict:
        """The method of lockstep bench: rounds of a barrier and some operations, a quarter of a second of them."""
        torch, dist = self.torch, self.dist
        operation = {"all_reduce": self.all_reduce, "all_gather": self.all_gather,
                     "reduce_scatter": self.reduce_scatter}[kind](bytes)

        def round_us(repeats: int) -> float:
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(repeats):
                operation()
            return 1e6 * (time.perf_counter() - begin) / repeats

        tries = torch.tensor([round_us(1) for _ in range(3)], dtype=torch.float64)
        dist.all_reduce(tries, op=dist.ReduceOp.MAX)
        about_us = max(1e-3, float(tries.median()))
        repeats = int(min(max(50 / about_us, 1), 1000))
        rounds = int(min(max(250_000 / (about_us * repeats), 5), 1000))
        return {"bytes": bytes, "time_us": [round_us(repeats) for _ in range(rounds)]}


def main() -> None:
    # Libraries print where they like: the answers' channel is ours alone.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    rank, world_size, threads = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS"))

    def answer(values: dict) -> None:
        answers.write(json.dumps(values) + "\n")

    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(threads)
        torch.set_num_interop_threads(1)
        # Rank 0 serves the store on a socket that the caller has bound: no port can be taken meanwhile.
        listening = int(os.environ["PEER_LISTEN_FD"]) if rank == 0 else None
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world_size, rank == 0,
                              master_listen_fd=listening)
        backend = os.environ.get("PEER_BACKEND", "gloo")
        if backend == "lockstep":
            import lockstep_c10d  # noqa: F401: registers it
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
        worker = Worker(torch, dist, rank, world_size)
        actions = {"build": worker.build, "step": worker.run_steps, "collective": worker.collective}
        answer({"ready": rank})
        for line in sys.stdin:
            command = json.loads(line)
            answer(actions[command.pop("do")](**command))
    except (Exception, KeyboardInterrupt) as error:  # one line for the caller, whatever it was
        answer({"error": f"{type(error).__name__}: {error}".splitlines()[0]})
        answers.flush()
        os._exit(1)
    answers.flush()
    os._exit(0)  # the others may be gone: nobody waits for anybody


if __name__ == "__main__":
    main()
