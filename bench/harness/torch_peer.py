"""PyTorch DistributedDataParallel on Gloo: its ranks are processes that live as long as this object, and sleep while
others are measured. What a rank does is bench/peers/torch/worker.py, in an environment that bench/peers/setup makes.
"""
import dataclasses
import re
import socket
import tempfile
import time

from harness.contestants import ROOT, Settings, StepTask, usable_cores
from harness.processes import Failure, Process, environment, readable
from harness.stats import allreduce_result, quantile, slowest

# What users of PyTorch on a CPU can choose; the best one counts.
CONFIGURATIONS = {
    "eager": {"compiled": False, "channels_last": False},
    "compile": {"compiled": True, "channels_last": False},
    "channels_last": {"compiled": False, "channels_last": True},
    "compile+channels_last": {"compiled": True, "channels_last": True},
}
# Of torch.distributed; the first is what scripts/build-c10d has built.
BACKENDS = ("lockstep", "gloo")
# For the others channels_last means nothing.
IMAGE_MODELS = ("cnn", "resnet18-cifar", "resnet18", "resnet50", "vgg11", "mobilenet-v2")


def configurations_of(model: str) -> list:
    return [name for name, c in CONFIGURATIONS.items() if model in IMAGE_MODELS or not c["channels_last"]]


def missing(settings: Settings, backend: str = "gloo"):
    """Why PyTorch cannot take part, in one line; None if it can."""
    if not _python(settings).exists():
        return "not installed → bench/peers/setup installs it"
    if backend == "lockstep" and not (_extension(settings) / "lockstep_c10d").exists():
        return "its backend is not built → scripts/build-c10d"
    return None


def _extension(settings: Settings):
    return settings.build / "c10d/site"


def _python(settings: Settings):
    return settings.peers / "torch" / "bin" / "python"


def version(settings: Settings) -> str:
    """As PyTorch gives it: "2.15.0+cpu"."""
    for path in (settings.peers / "torch").glob("lib/python*/site-packages/torch/version.py"):
        if found := re.search(r"^__version__ = '([^']*)'", path.read_text(), re.MULTILINE):
            return found[1]
    return "not installed"


def step_command(task: StepTask, configuration: str, backend: str = "gloo") -> list:
    return ["bench/peers/run", "step", *task.flags(), "--ranks", task.ranks, "--configuration", configuration,
            *([] if backend == "gloo" else ["--backend", backend])]


def _memory(answers: list) -> dict:
    return {name: [answer[name] for answer in answers] for name in ("peak_memory_bytes", "gpu_library_bytes")}


class Ranks:
    """The processes of one job, in step with each other."""

    def __init__(self, name: str, settings: Settings, ranks: int, threads: int, backend: str = "gloo"):
        self.name, self._settings = name, settings
        self._processes = []
        self._scratch = tempfile.TemporaryDirectory(prefix="bench-torch-")  # the compiler leaves files in it
        cores = usable_cores()
        try:
            # Rank 0 inherits the socket on which it will send the others all addresses.
            with socket.create_server(("127.0.0.1", 0), backlog=max(128, ranks)) as listening:
                for rank in range(ranks):
                    env = environment({
                        "RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": str(listening.getsockname()[1]), "PEER_LISTEN_FD": str(listening.fileno()),
                        "PEER_BACKEND": backend, "PYTHONPATH": str(_extension(settings)),
                        "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": str(threads),
                        "TMPDIR": self._scratch.name,
                        # Compilation in the ranks themselves, kept where the peer's other files are.
                        "TORCHINDUCTOR_COMPILE_THREADS": "1",
                        "TORCHINDUCTOR_CACHE_DIR": str(settings.peers / "torch" / "compiled")})
                    # As lockstep's ranks bind themselves.
                    share = cores[rank * threads:(rank + 1) * threads] if ranks * threads <= len(cores) else None
                    self._processes.append(Process(
                        f"{name}, rank {rank}", [_python(settings), "-B", ROOT / "bench/peers/torch/worker.py"], env,
                        pass_fds=[listening.fileno()] if rank == 0 else [], cores=share))
            self._answers()  # they are connected
        except BaseException:
            self.close()
            raise

    def ask(self, **command) -> list:
        """The ranks' answers to one command."""
        for process in self._processes:
            process.send(command)
        return self._answers()

    def close(self) -> None:
        for process in self._processes:
            process.stop()
        self._processes = []
        self._scratch.cleanup()

    def _answers(self) -> list:
        """One answer of each. The first rank that fails is reported, not one that waits for it."""
        if not self._processes:
            raise Failure(f"{self.name} has been stopped")
        answers = {}
        deadline = time.monotonic() + self._settings.timeout_s
        while len(answers) < len(self._processes):
            left = [process for process in self._processes if process not in answers]
            ready = readable(left, deadline) or left[:1]  # which then says that it is late
            for process in ready:
                answers[process] = process.receive(self._settings.timeout_s, deadline)
        return [answers[process] for process in self._processes]


class TorchStep:
    """Training steps in one configuration. The processes start, build the model and take the first step at once."""

    def __init__(self, settings: Settings, task: StepTask, configuration: str, optimizer: str = "adamw",
                 backend: str = "gloo", precision: str = "f32"):
        self.name = f"PyTorch {configuration}" + ("" if backend == "gloo" else f" over {backend}")
        self.configuration, self.backend, self.precision = configuration, backend, precision
        self._ranks = Ranks(self.name, settings, task.ranks, task.threads, backend)
        try:
            built = self._ranks.ask(do="build", model=task.model, batch=task.batch, optimizer=optimizer,
                                    precision=precision, **CONFIGURATIONS[configuration])
        except BaseException:
            self.close()
            raise
        self.startup_ms = max(answer["startup_ms"] for answer in built)
        self.memory = _memory(built)  # till the end of the first step

    def step(self, task: StepTask) -> dict:
        answers = self._ranks.ask(do="step", steps=task.steps, warmup_steps=task.warmup_steps)
        with_ms = slowest([answer["step_ms"] for answer in answers])
        step_ms = quantile(with_ms, 0.5)
        compute_ms = quantile(slowest([answer["compute_ms"] for answer in answers]), 0.5)
        return {
            "model": task.model, "world_size": task.ranks, "batch": task.batch, "precision": self.precision,
            "step_ms": step_ms, "samples_per_s": 1e3 * task.batch * task.ranks / step_ms, "compute_ms": compute_ms,
            "exposed_comm_ms": step_ms - compute_ms,
            **_memory(answers), "startup_ms": self.startup_ms,
            "step_ms_p10": quantile(with_ms, 0.1), "step_ms_p90": quantile(with_ms, 0.9), "backend": self.backend,
            "threads": task.threads, "steps": task.steps, "configuration": self.configuration}

    def close(self) -> None:
        self._ranks.close()


class Collectives:
    """Those of torch.distributed, over one of its backends."""
    KINDS = ("all_reduce", "all_gather", "reduce_scatter")

    def __init__(self, settings: Settings, ranks: int, backend: str = "gloo"):
        self.name = "Gloo" if backend == "gloo" else f"PyTorch over {backend}"
        self._ranks = Ranks(self.name, settings, ranks, 1, backend)

    def command(self, ranks: int, bytes: int) -> list:
        return ["bench/peers/run", "allreduce", bytes, "--transport", "gloo", "--ranks", ranks]

    def allreduce(self, ranks: int, bytes: int) -> dict:
        return allreduce_result(bytes, self.time_us("all_reduce", bytes), ranks, backend="gloo")

    def time_us(self, kind: str, bytes: int) -> float:
        times = slowest([answer["time_us"] for answer in self._ranks.ask(do="collective", kind=kind, bytes=bytes)])
        return quantile(times, 0.5)

    def close(self) -> None:
        self._ranks.close()
