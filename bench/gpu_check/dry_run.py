"""All sections on GPUs in software: whether each would start. Those are slow, so everything is small."""
import pathlib

from gpu_check.check import TOKEN_SIZES, Check

GPUS = ["GPU in software"] * 2
_MOST_SECONDS = 1800

# The same operations on small tensors.
_SMALL = {"mlp": ["--hidden", "64,64"], "resnet18-cifar": ["--data", "random:3x8x8,16"],
          "resnet50": ["--data", "random:3x32x32,16", "--classes", 10], "lstm": ["--width", 16, "--layers", 1],
          "gpt": ["--width", 16, "--layers", 1, "--heads", 2], "gpt2": ["--width", 16, "--layers", 1, "--heads", 2]}


class DryRun(Check):
    dry = True
    program = "tests/soft/lockstep"

    def __init__(self, build: pathlib.Path, gpus: list, quick: bool, begin: float):
        super().__init__(build, gpus, quick, {"LOCKSTEP_TEST_GPUS": str(len(gpus))}, begin + _MOST_SECONDS)

    def steps(self, wanted: int, least: int = 2) -> int:
        return least

    def seconds(self, limit_s: float) -> float:
        return 8 * limit_s

    def patience(self, ranks: int) -> tuple:
        return 240, 480

    def token_sizes(self, workload: str):
        return (8, 61) if workload in TOKEN_SIZES else None

    def smaller(self, model: str, captured: bool) -> list:
        # Captured are the steps after three that repeat, with and without communication: trainer/step_graphs.h.
        return [*_SMALL.get(model, []), "--warmup-steps", 14 if captured else 1]
