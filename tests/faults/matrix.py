#!/usr/bin/env python3
"""The fault matrix: a job is disturbed in each of the ways of cases.py, and must end as they say.

  matrix.py [--list] [--only 3,17,40-52,WORDS] [--times N] [--quick] [--csv FILE] [--build DIR]
  matrix.py --soak HOURS [--seed N]

A case starts a training of three ranks, or of ranks on several hosts, under `lockstep launch`; at a place that the
program itself reaches, always the same one, something is broken. The case checks the line that names the culprit, the exit
code, and the time until the end. 2 s later no process and no file of the job may be left. The final parameters must
have the SHA-256 of an undisturbed run: after the launcher's restart, or after the same command has been given again. Words
after --only choose the cases whose line in the list has them. --times N runs those at random steps N times, and measures N
restarts. --quick runs those of every change, --soak cases at random until the time is over, with a seed that it prints.
Exit code 1: a case failed. Cases that need what this machine lacks (root, network namespaces) are skipped, and counted.
"""
import argparse
import contextlib
import csv
import dataclasses
import os
import pathlib
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time

sys.dont_write_bytecode = True

import hosts as host_network  # noqa: E402
import strangers  # noqa: E402
from cases import CASES, HOST_SECONDS, TIMEOUT_SECONDS, Then  # noqa: E402
from faulty_job import Job  # noqa: E402

STEPS_PER_EPOCH = 24
TRAIN = ("lockstep", "train", "faulty", "--data", "faulty", "--global-batch", "60", "--epochs", "2", "--threads", "1",
         "--quiet", "--checkpoint-dir", "ck", "--checkpoint-every", "5", "--resume", "auto", "--save", "saved.safetensors")


@dataclasses.dataclass
class Result:
    seconds: float = 0  # from the fault to the end of the job
    problems: list = dataclasses.field(default_factory=list)
    output: str = ""
    figures: str = ""


PATIENT = ("--timeout-seconds", "60")  # where nobody is to wait in vain, a busy machine may take its time


def with_flags(case, flags):
    """The case's training with `flags` in the places of its own."""
    words = [*(case.command or TRAIN), "--metrics", "m.jsonl"]
    for name, value in zip(flags[::2], flags[1::2]):
        if name in words:
            words[words.index(name) + 1] = value
        else:
            words += [name, value]
    return words


class Matrix:
    def __init__(self, build, times=None):
        self.times = times
        self.program = build / "tests/faults/lockstep"
        if not self.program.exists():
            sys.exit(f"{self.program} is not there: cmake --build {build} --target faulty_lockstep")
        self.undisturbed = {}
        self.lacking = {}

    def lacks(self, case):
        """What the case needs that this machine has not; empty: nothing."""
        found = {"root": lambda: None if os.geteuid() == 0 else "not root",
                 "mpirun": lambda: None if shutil.which("mpirun") else "no mpirun",
                 "network namespaces": host_network.why_not, "memory control groups": why_no_memory_groups}
        for need in case.needs:
            if need not in self.lacking:
                self.lacking[need] = found[need]()
            if self.lacking[need]:
                return self.lacking[need]
        return ""

    def launch(self, case, job, restarts):
        if case.alone:
            return []
        words = ["lockstep", "launch"]
        if case.hosts:
            slots = [f"{name}:{ranks}" for name, ranks in zip(job.hosts.names, case.hosts)]
            words += ["--hosts", ",".join(slots), "--host-timeout-seconds", str(HOST_SECONDS)]
        else:
            words += ["-n", str(case.ranks)]
        if restarts:
            words += ["--max-restarts", str(max(3, self.repeats(case)))]
        own = [word for word in case.launch if restarts or word != "--in-place"]
        return [*words, "--log-dir", "logs", *own, "--"]

    def expected(self, case):
        """The hash of the run that nobody disturbs, and its steps."""
        flags = (*case.undisturbed, *PATIENT)
        key = (case.hosts, case.ranks, case.command, flags)
        if key not in self.undisturbed:
            with self.job(case) as job:
                plain = dataclasses.replace(case, launch=())
                job.start([*self.launch(plain, job, False), *with_flags(case, flags)])
                code = job.wait(60)
                if code != 0 or job.final() is None:
                    sys.exit(f"the run that nobody disturbs ended with code {code}:\n{job.err()}")
                self.undisturbed[key] = job.final(), len(job.events("step"))
        return self.undisturbed[key]

    @contextlib.contextmanager
    def job(self, case):
        network = host_network.Hosts(len(case.hosts)) if case.hosts else None
        try:
            job = Job(self.program, network)
            try:
                yield job
            finally:
                strangers.leave()
                job.close()
        finally:
            if network:
                network.close()

    def run(self, case):
        result = Result()
        expected = None if case.until_step or case.then is Then.SAVED else self.expected(case)
        try:
            with self.job(case) as job:
                try:
                    if case.until_step:
                        self.measure(case, job, result)
                    for number in range(0 if case.until_step else self.repeats(case) if case.at_step else 1):
                        self.disturb(case, job, result, number)
                    if not result.problems and not case.until_step:
                        self.conclude(case, job, expected, result)
                finally:
                    result.output = job.err()
        except (AssertionError, OSError) as error:
            result.problems.append(str(error))
        return result

    def repeats(self, case):
        return case.times if case.at_step else self.times or case.times

    def disturb(self, case, job, result, number):
        """The job with the fault, to its end."""
        flags = case.train
        if "--timeout-seconds" not in flags:
            flags += ("--timeout-seconds", str(TIMEOUT_SECONDS)) if "held up" in case.says else PATIENT
        if case.network:
            job.hosts.loss, job.hosts.delay = case.network
        restarts = not case.at_step and (case.then is Then.RESTARTED or not case.hosts)
        job.start([*self.launch(case, job, restarts), *with_flags(case, flags)], case.fault, case.before)
        if case.at_step:
            first, last = case.at_step
            step = random.randint(first, last) + number * last
            job.wait_while_it_runs(lambda: len(job.events("step")) >= step)
            disturbed_at = time.time()
        else:
            job.wait_until_reached(60 if case.network else 30)
        if case.act:
            case.act(job)
        code = job.wait(case.within + 5)
        result.seconds = time.time() - (disturbed_at if case.at_step else job.reached())
        if code is None:
            result.problems.append(f"the job still runs {result.seconds:.1f} s after the fault")
            return
        if code != case.code:
            result.problems.append(f"exit code {code} instead of {case.code}")
        if result.seconds > case.within:
            result.problems.append(f"it ended after {result.seconds:.1f} s, and {case.within} s were allowed")
        if not re.search(case.says, job.err()):
            result.problems.append(f"nothing says: {case.says}")
        if job.restarts() != (case.then is Then.RESTARTED or case.once):
            result.problems.append(f"{job.restarts()} restarts")
        if left := job.leftovers():
            result.problems.append("left: " + ", ".join(left))

    def measure(self, case, job, result):
        """Again and again, each time after another checkpoint, in one job."""
        def resumed():
            return job.events("resumed", "logs/restarts.jsonl")

        def newest():
            return max((path.name for path in (job.work / "ck").glob("step*")), default="")
        job.set_away(None)
        job.start([*self.launch(case, job, True), *with_flags(case, ())])
        seconds, grown = [], []
        for _ in range(self.repeats(case)):
            for _ in range(2):  # the second one has been reported by the first's time
                before = newest()
                job.wait_while_it_runs(lambda: newest() != before)
            time.sleep(random.random() * 0.2)
            count, killed_at = len(resumed()), time.time()
            case.act(job)
            job.wait_while_it_runs(lambda: len(resumed()) > count)
            seconds.append(time.time() - killed_at)
            if (job.directory / "away").read_text():
                job.set_away(None)
                job.wait_while_it_runs(lambda: len(resumed()) > count + 1)
                grown.append(resumed()[-1]["down_seconds"])
        lost = [event["lost_steps"] for event in job.events("restart", "logs/restarts.jsonl")]
        job.signal(signal.SIGTERM, "launcher")
        if (code := job.wait(case.within)) != case.code:
            result.problems.append(f"exit code {code} instead of {case.code}")
        if left := job.leftovers():
            result.problems.append("left: " + ", ".join(left))
        result.seconds = max(seconds)
        result.figures = "; ".join(f"{what}: median {statistics.median(values):.2f}, worst {max(values):.2f}" for what, values
                                   in (("seconds", seconds), ("lost steps", lost), ("seconds to grow back", grown)) if values)

    def conclude(self, case, job, expected, result):
        """The final parameters, after the same command again where the job has ended too early."""
        if case.then is Then.SAVED:
            kept = subprocess.run([self.program, "checkpoint", "show", job.work / "ck"], capture_output=True, text=True).stdout
            saved, steps = re.search(r"step *(\d+)", kept), len(job.events("step"))
            if not saved or int(saved[1]) != steps:
                result.problems.append(f"stopped after step {steps}; saved: {kept}")
            return
        if case.then is Then.AGAIN:
            if job.hosts:
                job.hosts.heal()
            job.start([*self.launch(case, job, False), *with_flags(case, (*case.undisturbed, *PATIENT))])
            if (code := job.wait(60)) != 0:
                result.problems.append(f"the same command ended with code {code} when it was run again")
        if (final := (job.final(), len(job.events("step")))) != expected and (case.at_step or final[0] != expected[0]):
            result.problems.append(f"the final parameters and steps are {final}, and not {expected}")
        if case.resumes and not job.events("resume"):
            result.problems.append("the run after the fault has not resumed, but started anew")
        if left := job.leftovers():
            result.problems.append("left: " + ", ".join(left))


def why_no_memory_groups():
    """None: they can be made."""
    old, new = pathlib.Path("/sys/fs/cgroup/memory"), pathlib.Path("/sys/fs/cgroup")
    parent, most = (old, "memory.limit_in_bytes") if (old / "memory.limit_in_bytes").exists() else (new, "memory.max")
    group = parent / f"lockstep-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        return f"no control groups ({error.strerror})"
    try:
        return None if (group / most).exists() else "control groups without memory"
    finally:
        group.rmdir()


def numbers_of(text):
    """Of "3,17,40-52,random step"."""
    numbers = set()
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        named = {n for n, case in enumerate(CASES, 1) if part in title_of(n, case)}
        if not found and named:
            numbers |= named
            continue
        if not found or int(found[2] or found[1]) < int(found[1]):
            sys.exit(f"--only {text}: '{part}' is no number, no range such as 40-52, and in no case's line")
        numbers |= set(range(int(found[1]), int(found[2] or found[1]) + 1))
    if wrong := sorted(n for n in numbers if not 1 <= n <= len(CASES)):
        sys.exit(f"there is no case {wrong[0]}: they are 1 to {len(CASES)}")
    return numbers


def ending(case):
    return {Then.RESTARTED: "restarted", Then.CONTINUES: "no restart", Then.SAVED: f"code {case.code}, saved",
            Then.AGAIN: f"{'restarted, ' * case.once}code {case.code}, run again"}[case.then]


def title_of(number, case):
    return f"{number:3}  {case.what}; {case.when}; {place(case)}"


def place(case):
    return "this host" if not case.hosts else "hosts of " + "+".join(map(str, case.hosts))


def write_csv(path, results):
    """A line that says how, when and where, and a row per case."""
    cpu = re.search(r"cpu family\s*: (\d+)\nmodel\s*: (\d+)\nmodel name\s*: (.*)",
                    pathlib.Path("/proc/cpuinfo").read_text())
    machine = f"{cpu[3]} (family {cpu[1]}, model {cpu[2]}), " if cpu else ""
    failed = sum(bool(result and result.problems) for _, _, result, _ in results)
    skipped = sum(result is None for _, _, result, _ in results)
    with path.open("w", encoding="utf-8") as file:
        print(f"# scripts/fault-matrix, {time.strftime('%Y-%m-%d')}: {len(results) - failed - skipped} of {len(results)} cases "
              f"ended as they should, {failed} did not, {skipped} were skipped. Machine: {machine}{os.cpu_count()} cores; load "
              f"average at the end {os.getloadavg()[0]:.1f}.", file=file)
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["case", "what", "when", "ranks", "job", "seconds"])
        for number, case, result, skip in results:
            note = "" if result is None or not result.problems else " (failed)"
            rows.writerow([number, case.what, case.when, "+".join(map(str, case.hosts)) if case.hosts else case.ranks,
                           ending(case) + note, f"{result.seconds:.1f}" if result else skip])


def run_case(matrix, number, results):
    """Whether it passed, or was skipped."""
    case = CASES[number - 1]
    title = title_of(number, case)
    if lacking := matrix.lacks(case):
        print(f"{title}: skipped ({lacking})", flush=True)
        results.append((number, case, None, f"skipped: {lacking}"))
        return True
    result = matrix.run(case)
    results.append((number, case, result, ""))
    print(f"{title}: {ending(case)}, {result.figures or f'{result.seconds:.1f} s'}" if not result.problems
          else f"{title}: FAILED", flush=True)
    for problem in result.problems:
        print(f"       {problem}")
    if result.problems:
        print("".join(f"       | {line}\n" for line in result.output.splitlines()[-30:]), end="", flush=True)
    return not result.problems


def soak(matrix, hours, seed):
    seed = random.randrange(1 << 31) if seed is None else seed
    print(f"seed {seed}, {hours:g} hours", flush=True)
    draw, end, results, failed = random.Random(seed), time.monotonic() + 3600 * hours, [], {}
    asked = []
    signal.signal(signal.SIGINT, lambda *_: asked.append(True))
    while time.monotonic() < end and not asked:
        number = draw.randrange(len(CASES)) + 1
        if not run_case(matrix, number, results):
            failed[number] = failed.get(number, 0) + 1
    ran = [number for number, _, result, _ in results if result is not None]
    slowest = max((result.seconds for _, _, result, _ in results if result is not None), default=0)
    print(f"seed {seed}: {len(ran)} jobs of {len(set(ran))} cases were disturbed, {len(results) - len(ran)} skipped; "
          f"{sum(failed.values())} failed; the slowest ended {slowest:.1f} s after the fault")
    for number, times in sorted(failed.items()):
        print(f"  case {number} failed {times} of {ran.count(number)} times")
    return not failed


def main():
    parser = argparse.ArgumentParser(usage=__doc__.split("\n\n")[1])
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--times", type=int)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--csv", type=pathlib.Path)
    parser.add_argument("--build", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parents[2] / "build")
    parser.add_argument("--soak", type=float)
    parser.add_argument("--seed", type=int)
    given = parser.parse_args()
    numbers = sorted(numbers_of(given.only) if given.only else
                     [n for n, case in enumerate(CASES, 1) if case.quick or not given.quick])
    if given.list:
        for number in numbers:
            case = CASES[number - 1]
            print(f"{title_of(number, case)}: {ending(case)}{' (quick)' * case.quick}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what runs is ended, and removed
    matrix = Matrix(given.build, given.times)
    if given.soak is not None:
        return 0 if soak(matrix, given.soak, given.seed) else 1
    results = []
    numbers = [number for number in numbers for _ in range(given.times or 1 if CASES[number - 1].at_step else 1)]
    passed = sum([run_case(matrix, number, results) for number in numbers])
    skipped = sum(result is None for _, _, result, _ in results)
    print(f"{passed - skipped} of {len(numbers)} cases ended as they should, {len(numbers) - passed} did not, {skipped} were "
          "skipped")
    if given.csv:
        write_csv(given.csv, results)
    return 0 if passed == len(numbers) else 1


if __name__ == "__main__":
    sys.exit(main())
