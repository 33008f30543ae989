"""PyTorch on the same GPU: processes for each model, which compile while other sections run and then sleep until they
are asked. What they do is bench/peers/torch/gpu_step.py."""
import os
import subprocess
import time

from harness.contestants import ROOT
from harness.processes import Failure, Process

# What users of PyTorch can choose; the fastest counts. "graph": the whole step is captured in a CUDA graph.
CONFIGURATIONS = ("eager", "eager+graph", "compile", "compile+graph", "reduce-overhead", "max-autotune")
QUICK = ("eager", "eager+graph", "compile+graph", "reduce-overhead")
SLOW = ("max-autotune",)
MODELS = ("mlp", "cnn")  # small ones, in which a step is short
BATCHES = (64, 4096)
# What is measured of each model: batches, how many steps, and whether in plain f32 too, which takes the large ones long.
WORKLOADS = {"mlp": (BATCHES, 600, True), "cnn": (BATCHES, 600, True), "resnet18-cifar": ((512,), 200, False),
             "resnet50": ((64,), 60, False), "lstm": ((64,), 100, False), "gpt": ((64,), 200, True),
             "gpt2": ((16,), 60, False)}
GROUPS = [(model, batch) for model, (batches, _, _) in WORKLOADS.items() for batch in batches]


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

    def __init__(self, env: dict, scratch, quick: bool):
        self.configurations = QUICK if quick else CONFIGURATIONS
        self.version, self.waited = "", False
        self._processes, self._failed, self._built = {}, {}, {}
        # It finds its own libraries.
        clean = {key: value for key, value in env.items() if key != "LD_LIBRARY_PATH"}
        clean |= {key: os.environ[key] for key in ("LD_LIBRARY_PATH",) if key in os.environ}
        clean |= {"TORCHINDUCTOR_CACHE_DIR": f"{scratch}/compiled", "TRITON_CACHE_DIR": f"{scratch}/triton",
                  "TORCHINDUCTOR_COMPILE_THREADS": "6"}
        for key in self._keys():
            model, configurations = key
            try:
                process = Process(f"PyTorch {model}",
                                  ["python3", "-B", ROOT / "bench/peers/torch/gpu_step.py", "--model", model], clean)
                for batch, configuration in self._orders(model, configurations):
                    process.send({"do": "build", "batch": batch, "configuration": configuration})
                self._processes[key] = process
            except Failure as failure:
                self._failed[key] = str(failure)

    def _keys(self) -> list:
        """By process: a model, and its configurations. One that takes long to compile does not hold up the others."""
        fast = tuple(c for c in self.configurations if c not in SLOW)
        return [(model, group) for model in WORKLOADS
                for group in (fast, *((c,) for c in self.configurations if c in SLOW))]

    def _key(self, model: str, configuration: str) -> tuple:
        return next(key for key in self._keys() if key[0] == model and configuration in key[1])

    @staticmethod
    def _orders(model: str, configurations) -> list:
        return [(batch, configuration) for configuration in configurations for batch in WORKLOADS[model][0]]

    def wait_until_built(self, end: float) -> None:
        """Their answers to all that was asked of them first. A process that is late is out with all its
        configurations. Once."""
        if self.waited:
            return
        self.waited = True
        for key, process in list(self._processes.items()):
            try:
                for batch, configuration in self._orders(*key):
                    answer = process.receive(max(1.0, end - time.monotonic()), end)
                    self.version = answer.get("version", self.version)
                    self._built[key[0], batch, configuration] = answer
            except Failure as failure:
                self._failed[key] = str(failure)
                process.stop()
                del self._processes[key]

    def seconds_to_build(self) -> float:
        return sum(answer.get("build_s", 0) for answer in self._built.values())

    def refusal(self, model: str, batch: int, configuration: str) -> str:
        """Why this one does not take part; empty if it does."""
        if why := self._failed.get(self._key(model, configuration)):
            return why
        return self._built.get((model, batch, configuration), {}).get("refused", "")

    def measure(self, model: str, batch: int, configuration: str, blocks: int, seconds: float, limit_s: float) -> dict:
        """A process that fails, or is late, is out with all its configurations: what it says next would be the answer
        to something else."""
        key = self._key(model, configuration)
        process = self._processes[key]
        process.send({"do": "step", "batch": batch, "configuration": configuration, "blocks": blocks,
                      "block_s": seconds / blocks})
        try:
            return process.receive(limit_s, time.monotonic() + limit_s)
        except Failure as failure:
            self._failed[key] = str(failure)
            del self._processes[key]
            process.stop()
            raise

    def stop(self) -> None:
        for process in self._processes.values():
            process.stop()
        self._processes = {}
