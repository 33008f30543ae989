"""Who is measured: lockstep, and MPI_Allreduce. PyTorch is in torch_peer.py.

A contestant has a name and either `step(task)`, which answers what `lockstep bench step --json` prints, or
`allreduce(bytes)`, which answers a line of `lockstep bench allreduce --json`. Both raise Failure. Between two calls it
computes nothing.
"""
import dataclasses
import json
import os
import pathlib

from harness.processes import Failure, environment, run

# tokens of a sample, as bench/peers/torch/models.py has them
CONTEXTS = {"gpt": 128, "gpt2": 256, "rnn": 128, "lstm": 128, "gru": 128, "bert": 128}
ROOT = pathlib.Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class StepTask:
    model: str
    ranks: int
    batch: int  # samples per rank
    threads: int  # of a rank
    steps: int
    warmup_steps: int

    def flags(self) -> list:
        setting = "--max-length" if self.model == "bert" else "--context"  # what it has positions for is another number
        context = [setting, CONTEXTS[self.model]] if self.model in CONTEXTS else []
        optimizer = ["--optimizer", "adamw"] if self.model.startswith("resnet") else []  # theirs is SGD, the peers' AdamW
        return [self.model, *context, *optimizer, "--batch", self.batch, "--threads", self.threads, "--steps", self.steps,
                "--warmup-steps", self.warmup_steps]


@dataclasses.dataclass(frozen=True)
class Settings:
    """Where things are, and how long a contestant may take for one turn."""
    build: pathlib.Path
    peers: pathlib.Path
    timeout_s: float

    @property
    def lockstep(self) -> pathlib.Path:
        return self.build / "lockstep"


def usable_cores() -> list:
    return sorted(os.sched_getaffinity(0))


def words_shown(argv: list) -> list:
    """A command's words as a reader types them at the root of the repository."""
    return [str(word).replace(f"{ROOT}/", "") for word in argv]


def shown(argv: list) -> str:
    return " ".join(words_shown(argv))


def _json_lines(name: str, text: str) -> list:
    try:
        return [json.loads(line) for line in text.splitlines()]
    except ValueError:
        raise Failure(f"{name} printed what is not JSON: {text.splitlines()[0][:80]}") from None


def _one_result(name: str, argv: list, settings: Settings) -> dict:
    """What a contestant prints when it is asked for one measurement."""
    results = _json_lines(name, run(name, argv, settings.timeout_s, environment()))
    if len(results) != 1:
        raise Failure(f"{name} printed {len(results)} results instead of one")
    return results[0]


class Lockstep:
    name = "lockstep"

    def __init__(self, settings: Settings):
        self._settings = settings

    def launch(self, ranks: int, what: list) -> list:
        program = self._settings.lockstep
        return [program, "launch", "-n", ranks, "--no-prefix", "--", program, "bench", *what]

    def step_command(self, task: StepTask) -> list:
        return self.launch(task.ranks, ["step", *task.flags(), "--json"])

    def allreduce_command(self, ranks: int, bytes: int) -> list:
        return self.launch(ranks, ["allreduce", "--min", bytes, "--max", bytes, "--json"])

    def step(self, task: StepTask) -> dict:
        return self.measure(self.step_command(task))

    def peak_tflops(self, task: StepTask) -> float:
        """The rate at which each rank multiplies large matrices while the others do: takes seconds."""
        task = dataclasses.replace(task, steps=1, warmup_steps=1)
        argv = self.launch(task.ranks, ["step", *task.flags(), "--peak-tflops", "measured", "--json"])
        return self.measure(argv)["measured"]["product_tflops"]

    def allreduce(self, ranks: int, bytes: int) -> dict:
        return self.measure(self.allreduce_command(ranks, bytes))

    def measure(self, argv: list) -> dict:
        return _one_result(self.name, argv, self._settings)


class Mpi:
    """MPI_Allreduce. Started by lockstep's launcher, which starts any program through mpirun, and cleans up."""
    name = "MPI_Allreduce"

    def __init__(self, settings: Settings):
        self._settings = settings
        self._program = settings.build / "allreduce_mpi"

    def missing(self):
        """Why it cannot take part, in one line; None if it can."""
        if self._program.exists():
            return None
        return f"{shown([self._program])} is not built → cmake --build build --target allreduce_mpi"

    def allreduce_command(self, ranks: int, bytes: int) -> list:
        # Bound as mpirun binds two ranks, and as lockstep's ranks bind themselves; ranks that outnumber the cores roam.
        bind_to = "core" if ranks <= len(usable_cores()) else "none"
        return [self._settings.lockstep, "launch", "-n", ranks, "--no-prefix", "--bind-to", bind_to, "--",
                self._program, bytes]

    def allreduce(self, ranks: int, bytes: int) -> dict:
        return _one_result(self.name, self.allreduce_command(ranks, bytes), self._settings)
