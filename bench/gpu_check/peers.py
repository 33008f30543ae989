"""PyTorch on the same GPU: a process for each workload, which compiles while other sections run and then sleeps until it
is asked. What they do is bench/peers/torch/gpu_step.py."""
import dataclasses
import os
import subprocess
import time

from harness.contestants import ROOT
from harness.processes import Failure, Process

# What users of PyTorch can choose; the fastest counts. "graph": the whole step is captured in a CUDA graph, which leaves
# nothing to gain for reduce-overhead (graphs of parts of a step). max-autotune has not compiled these models in two
# minutes, and is left out: `gpu_step.py --configuration max-autotune` measures it alone. In the order in which they are
# made: what is not compiled in time takes no part, and what was made before does.
CONFIGURATIONS = ("eager", "eager+graph", "compile+graph", "compile")
QUICK = ("eager+graph", "compile+graph")
COMPILE_SECONDS = 75  # from the start of the run
MODELS = ("mlp", "cnn")  # small ones, in which a step is short
BATCHES = (64, 4096)


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is measured of a model. bench/peers/torch/models.py has each by the same name."""
    batches: tuple
    steps: int
    tf32: bool = False  # in TF32 too
    f32: bool = False  # in plain f32 too, which takes the large ones long


WORKLOADS = {"mlp": Workload(BATCHES, 600, True, True), "cnn": Workload(BATCHES, 600, True, True),
             "resnet18-cifar": Workload((512,), 200, True), "resnet50": Workload((64,), 60),
             "lstm": Workload((64,), 100), "gpt": Workload((64,), 200, True, True), "gpt2": Workload((16,), 40),
             "gpt2-1024": Workload((16,), 20)}
GROUPS = [(name, batch) for name, workload in WORKLOADS.items() for batch in workload.batches]


def why_missing() -> str:
    """Why PyTorch cannot take part, in one line; empty if it is there. To import it would take longer, from a cold disk
    a minute: its processes do that while other sections run."""
    program = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    try:
        done = subprocess.run(["python3", "-c", program], capture_output=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "there is no python3 that answers"
    return "python3 has no PyTorch" if done.returncode != 0 else ""


class Peers:
    """All of them; those that cannot be made say why when they are asked."""

    def __init__(self, env: dict, scratch, quick: bool, compile_s: float = COMPILE_SECONDS):
        self.configurations = QUICK if quick else CONFIGURATIONS
        self._late = time.monotonic() + compile_s + 10  # they refuse by themselves what is not compiled in time
        self.version, self.waited = "", False
        self._processes, self._failed, self._built = {}, {}, {}
        # It finds its own libraries.
        clean = {key: value for key, value in env.items() if key != "LD_LIBRARY_PATH"}
        clean |= {key: os.environ[key] for key in ("LD_LIBRARY_PATH",) if key in os.environ}
        clean |= {"TORCHINDUCTOR_CACHE_DIR": f"{scratch}/compiled", "TRITON_CACHE_DIR": f"{scratch}/triton",
                  "TORCHINDUCTOR_COMPILE_THREADS": "6"}
        for model in WORKLOADS:
            try:
                process = Process(f"PyTorch {model}",
                                  ["python3", "-B", ROOT / "bench/peers/torch/gpu_step.py", "--model", model,
                                   "--build-seconds", f"{compile_s:g}"], clean)
                for batch, configuration in self._orders(model):
                    process.send({"do": "build", "batch": batch, "configuration": configuration})
                self._processes[model] = process
            except Failure as failure:
                self._failed[model] = str(failure)

    def _orders(self, model: str) -> list:
        return [(batch, configuration) for configuration in self.configurations for batch in WORKLOADS[model].batches]

    def wait_until_built(self) -> None:
        """Their answers to all that was asked of them first. A process that hangs is out with all its configurations.
        Once."""
        if self.waited:
            return
        self.waited = True
        for model, process in list(self._processes.items()):
            try:
                for batch, configuration in self._orders(model):
                    answer = process.receive(max(1.0, self._late - time.monotonic()), self._late)
                    self.version = answer.get("version", self.version)
                    self._built[model, batch, configuration] = answer
            except Failure as failure:
                self._failed[model] = str(failure)
                process.stop()
                del self._processes[model]

    def seconds_to_build(self) -> float:
        return sum(answer.get("build_s", 0) for answer in self._built.values())

    def refusal(self, model: str, batch: int, configuration: str) -> str:
        """Why this one does not take part; empty if it does."""
        if why := self._failed.get(model):
            return why
        return self._built.get((model, batch, configuration), {}).get("refused", "")

    def measure(self, model: str, batch: int, configuration: str, blocks: int, seconds: float, limit_s: float) -> dict:
        """A process that fails, or is late, is out with all its configurations: what it says next would be the answer
        to something else."""
        process = self._processes[model]
        process.send({"do": "step", "batch": batch, "configuration": configuration, "blocks": blocks,
                      "block_s": seconds / blocks})
        try:
            return process.receive(limit_s, time.monotonic() + limit_s)
        except Failure as failure:
            self._failed[model] = str(failure)
            del self._processes[model]
            process.stop()
            raise

    def stop(self) -> None:
        for process in self._processes.values():
            process.stop()
        self._processes = {}
