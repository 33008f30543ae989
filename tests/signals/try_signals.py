#!/usr/bin/env python3
"""Signals while it computes, at each instruction set of oneDNN's that this CPU has.

  try_signals.py [--quick] [--models NAME,…] [--storms N] [--stops N] [--build DIR]

Storms: N trainings of each model (20) while a handler that knows nothing of alternate stacks runs a thousand times a second,
on a timer of its own or of the time that is computed (storm.c): each ends with 0 and the parameters of an undisturbed one.
An own loop over the library, which leaves signals to the program, stands them too.
Stops: N trainings of each model (100) get SIGTERM, SIGINT or SIGUSR1 at a random moment: each ends with 75, and resumes
from the checkpoint. --quick is what every change runs: two of each, of fewer models. Exit code 1: something failed.
"""
import argparse
import collections
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
SETS = ("AVX2", "AVX512_CORE", "AVX512_CORE_BF16", "AVX512_CORE_AMX")
MODELS = {  # with the steps of a storm
    "mlp": ("mlp --data random:1x28x28,600 --batch 16", 60),
    "cnn": ("cnn --data random:1x28x28,600 --batch 16", 60),
    "gpt": ("gpt --data text:text --layers 2 --width 64 --context 32", 30),
    "lstm": ("lstm --data text:text --width 48 --context 32", 30),
    "bert": ("bert --data texts:labelled --layers 1 --width 64 --heads 2 --max-length 32 --batch 8", 20),
    "vgg11": ("vgg11 --data random:3x32x32,40 --batch 8 --lr 1e-6", 2),
    "resnet18-cifar": ("resnet18-cifar --data random:3x32x32,32 --batch 16", 3),
}
QUICK = ("mlp", "cnn", "gpt")
SECONDS = 120  # of a run that hangs


def isas(build):
    """Those that make a difference here."""
    found = []
    for isa in SETS:
        said = subprocess.run([build / "lockstep", "version"], env={**os.environ, "ONEDNN_MAX_CPU_ISA": isa}, text=True,
                              capture_output=True, check=True).stdout
        used = re.search(r"computes with (\w+)", said)
        if used and used.group(1) not in [name for name, _ in found]:
            found.append((used.group(1), isa))
    return [isa for _, isa in found]


class Trial:
    def __init__(self, build, directory):
        self.build, self.directory = build, directory
        (directory / "text").write_text("".join(f"now {i * i % 89} then {i % 7} " for i in range(800)))
        for part, count in (("train", 24), ("test", 8)):
            for kind, word in (("neg", "bad"), ("pos", "good")):
                folder = directory / "labelled" / part / kind
                folder.mkdir(parents=True)
                for i in range(count):
                    (folder / f"{i}.txt").write_text(f"it was {word} at {i} and then {i * 7 % 11} times {word}\n")

    def run(self, words, isa, storm=""):
        environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": isa, "CUDA_VISIBLE_DEVICES": ""}
        if storm:
            environment |= {"STORM": storm, "LD_PRELOAD": str(self.build / "tests" / "libsignal_storm.so")}
        return subprocess.Popen(words, env=environment, cwd=self.directory, stdin=subprocess.DEVNULL, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def train(self, model, isa, *more, **how):
        flags, steps = MODELS[model]
        words = ["train", *flags.split(), "--threads", str(how.pop("threads", 2)), "--steps", str(how.pop("steps", steps))]
        return self.run([self.build / "lockstep", *words, *more], isa, **how)

    def parameters(self, model, isa, **how):
        process = self.train(model, isa, **how)
        said, _ = process.communicate(timeout=SECONDS)
        found = re.search(r"params_sha256 (\w+)", said)
        return found.group(1) if process.returncode == 0 and found else f"exit code {process.returncode}: {said[-300:]}"

    def storms(self, model, isa, times):
        wanted = {threads: self.parameters(model, isa, threads=threads) for threads in (1, 2)}
        problems = [f"undisturbed: {sha}" for sha in wanted.values() if len(sha) != 64]
        for i in range(times):
            storm, threads = ("time", "work")[i % 2], 1 + i // 2 % 2
            got = self.parameters(model, isa, threads=threads, storm=storm)
            if got != wanted[threads]:
                problems.append(f"{storm}, {threads} threads: {got}")
        return problems

    def own_loop(self, isa, times):
        problems = []
        for _ in range(times):
            process = self.run([self.build / "examples" / "own_loop"], isa, storm="time")
            said, _ = process.communicate(timeout=SECONDS)
            if process.returncode != 0:
                problems.append(f"exit code {process.returncode}: {said[-300:]}")
        return problems

    def stop(self, model, isa):
        kept = self.directory / "kept"
        subprocess.run(["rm", "-rf", kept], check=True)
        checkpoints = ("--checkpoint-dir", "kept", "--checkpoint-every", "0", "--resume", "auto")
        (self.directory / "m.jsonl").unlink(missing_ok=True)
        process = self.train(model, isa, "--metrics", "m.jsonl", *checkpoints, steps=10**8, threads=random.choice((1, 2)))
        metrics, end = self.directory / "m.jsonl", time.monotonic() + SECONDS
        while time.monotonic() < end and not (metrics.exists() and '"step"' in metrics.read_text()):
            time.sleep(0.005)
        time.sleep(random.uniform(0, 0.1))
        number = random.choice((signal.SIGTERM, signal.SIGINT, signal.SIGUSR1))
        process.send_signal(number)
        said, _ = process.communicate(timeout=SECONDS)
        if process.returncode != 75:
            return f"{number.name}: exit code {process.returncode}: {said[-300:]}"
        found = re.search(r"stopped after step (\d+)", said)
        if found is None:
            return f"{number.name}: no step is named: {said[-300:]}"
        resumed = self.train(model, isa, *checkpoints, steps=int(found.group(1)) + 2)
        said, _ = resumed.communicate(timeout=SECONDS)
        return "" if resumed.returncode == 0 else f"resumed after {number.name}: exit code {resumed.returncode}: {said[-300:]}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--models", type=lambda names: names.split(","))
    parser.add_argument("--storms", type=int)
    parser.add_argument("--stops", type=int)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build")
    given = parser.parse_args()
    storms = given.storms if given.storms is not None else 2 if given.quick else 20
    stops = given.stops if given.stops is not None else 2 if given.quick else 100
    models = given.models or (QUICK if given.quick else MODELS)
    if unknown := set(models) - set(MODELS):
        parser.error(f"no model {', '.join(sorted(unknown))} → {', '.join(MODELS)}")
    failed = 0
    counts = collections.Counter()

    def report(what, times, problems):
        nonlocal failed
        failed += len(problems)
        counts[what.split(",")[0]] += times
        print(f"{what}: {times - len(problems)} of {times} well", *problems[:3], sep="\n  ", flush=True)

    with tempfile.TemporaryDirectory() as directory:
        trial = Trial(given.build, pathlib.Path(directory))
        for isa in isas(given.build):
            for model in models:
                report(f"storms, {model}, {isa}", storms, trial.storms(model, isa, storms))
            report(f"storms, own loop, {isa}", storms, trial.own_loop(isa, storms))
            for model in models:
                report(f"stops, {model}, {isa}", stops, [said for _ in range(stops) if (said := trial.stop(model, isa))])
    print(f"{counts['storms']} storms, {counts['stops']} stops, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
