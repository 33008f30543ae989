#!/usr/bin/env python3
"""Whole jobs under the simulation of tests/simulation/world.h, each by a seed of its own, with faults at random moments.

  schedules.py [--seconds S | --count N] [--first SEED] [--until-failed] [--build DIR]
  schedules.py --seed N [--build DIR]          # one again, whose files stay in the directory that is printed
  schedules.py --again                         # those of found.txt, which once failed, and one twice: the same each time

A seed says how many ranks there are, with which flags, the faults and their turns, how fast time goes and who runs next. A
training must then end as docs/what-happens-when.md says, with the bits and the metrics of an undisturbed one; after the
same command again, if it was not restarted. No checkpoint is lost of which the metrics file or an earlier attempt knows. The line that names a culprit names one; no process and no file
remains; nobody waits without end. Prints what fails, with the fewest faults that it fails with; exit code 1. Takes root or user
namespaces; 77 where there are none.
"""
import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
STEPS = 24
TRAIN = ["train", "mlp", "--hidden", "16", "--data", "digits", "--epochs", "2", "--global-batch", "128", "--shards", "4",
         "--threads", "1", "--device", "cpu", "--metrics", "/tmp/m.jsonl", "--checkpoint-dir", "/tmp/checkpoints",
         "--checkpoint-every", "5", "--resume", "auto"]
# More of them, with the same number of steps; each has bits of its own, those of one rank.
VARIANTS = {"plain": [], "zero": ["--zero", "1"], "mirror": ["--checkpoint-mirror", "/tmp/mirror"], "audit": ["--audit", "0.2"],
            "balance": ["--balance", "auto"], "skip": ["--on-bad-batch", "skip"], "adam": ["--optimizer", "adam", "--ema", "0.9"],
            "best": ["--keep-best", "1", "--eval-steps", "4"]}
FOR_SEVERAL_RANKS = ("audit", "balance", "zero", "mirror")
EXPECTED_FILES = {"/tmp/checkpoints", "/tmp/mirror", "/tmp/m.jsonl"}
# What a launcher may say that does not restart.
GIVES_UP = ("no further step and no newer checkpoint was reported", "the ranks had reported that their work was done")
METRICS_CUT = "metrics file /tmp/m.jsonl lacks the steps"
PATIENCE_S = 600  # of simulated time
SKIPPED = 77


@dataclasses.dataclass(frozen=True)
class Fault:
    flag: str   # of simulated_job
    who: str    # launcher, wrapper, rank, reaper, helper, host
    rank: int   # or host
    turn: int
    ms: int = 0  # that it lasts; of --clock seconds

    def flags(self) -> list:
        words = {"--terminate": [self.turn], "--power": [self.turn], "--clock": [self.turn, self.ms],
                 "--full": [self.turn, self.ms], "--cut": [self.rank, self.turn, self.ms], "--lose": [self.rank, self.turn],
                 "--kill": [self.who, self.rank, self.turn], "--stop": [self.who, self.rank, self.turn, self.ms]}
        return [self.flag, ":".join(map(str, words[self.flag]))]


@dataclasses.dataclass(frozen=True)
class Schedule:
    seed: int
    ranks: int
    hosts: int        # with a rank on each; 0: all ranks on one
    restarts: str     # none, restarts, in-place
    variant: str      # of VARIANTS
    switches: float   # the probability that another thread runs after a call that does not wait
    pace_ns: int      # that pass between two turns, at most
    faults: tuple

    def launch(self) -> list:
        flags = {"none": [], "restarts": ["--max-restarts", "8"], "in-place": ["--max-restarts", "8", "--in-place"]}
        places = ["--hosts", ",".join(f"host{host + 1}:1" for host in range(self.hosts)), "--min-ranks", "1"]
        if self.restarts == "none":
            places = places[:2]
        return ["launch", *(places if self.hosts else ["-n", str(self.ranks)]), *flags[self.restarts]]

    def __str__(self) -> str:
        faults = " ".join(" ".join(fault.flags()) for fault in self.faults)
        return f"{self.seed} {self.ranks} {self.hosts} {self.restarts} {self.variant} {self.switches} {self.pace_ns} {faults}".strip()


def parse(line: str) -> Schedule:
    words = line.split()
    faults = []
    for flag, value in zip(words[7::2], words[8::2]):
        parts = value.split(":")
        if flag in ("--terminate", "--power", "--clock", "--full"):
            parts = ["launcher", -1, *parts]
        elif flag in ("--cut", "--lose"):
            parts = ["host", *parts]
        faults.append(Fault(flag, parts[0], *map(int, parts[1:])))
    return Schedule(int(words[0]), int(words[1]), int(words[2]), words[3], words[4], float(words[5]), int(words[6]),
                    tuple(faults))


def schedule_of(seed: int) -> Schedule:
    draw = random.Random(seed)
    ranks = draw.choice([1, 2, 2, 3, 4])
    hosts = draw.choice([0, 0, 2, 3])
    ranks = hosts or ranks
    restarts = draw.choice(["none", "restarts", "restarts", "in-place"] if hosts
                           else ["none", "restarts", "in-place", "in-place"])
    variant = draw.choice([name for name in VARIANTS if (ranks > 1 or name not in FOR_SEVERAL_RANKS)
                           and (hosts or name != "mirror")])
    switches = draw.choice([0.01, 0.05, 0.1, 0.3])
    pace = draw.choice([2_000, 2_000, 20_000, 200_000, 2_000_000])
    # Of an undisturbed job, about.
    turns = int((10_000 * ranks if hosts else 900 + 450 * ranks) * (1 if switches < 0.1 else 1.3))
    faults = []
    for _ in range(draw.choice([0, 1, 1, 1, 2, 2, 3])):
        turn, rank = draw.randrange(50, turns * (2 if faults else 1)), draw.randrange(ranks)
        what = draw.choices(["rank", "wrapper", "launcher", "reaper", "spare", "stop", "terminate"], [8, 3, 1, 0.5, 1, 2, 1])[0]
        on_hosts = draw.choice(["cut", "cut", "lose", "helper", what, what])
        if hosts and on_hosts == "cut":
            faults.append(Fault("--cut", "host", draw.randint(1, hosts), turn, draw.choice([200, 2000, 2000, 30_000])))
        elif hosts and on_hosts == "lose":
            faults.append(Fault("--lose", "host", draw.randint(2, hosts), turn))
        elif hosts and on_hosts == "helper":
            faults.append(Fault("--kill", "helper", draw.randint(2, hosts), turn))
        elif what == "stop":
            who = draw.choice(["rank", "wrapper", "launcher"])
            faults.append(Fault("--stop", who, -1 if who == "launcher" else rank, turn, draw.choice([10, 300, 3000])))
        elif what == "terminate":
            faults.append(Fault("--terminate", "launcher", -1, turn))
        elif what == "spare":
            faults.append(Fault("--kill", "rank", -2, turn))
        else:
            faults.append(Fault("--kill", what, rank if what in ("rank", "wrapper") else -1, turn))
    if draw.random() < 0.1:
        faults.append(Fault("--clock", "launcher", -1, draw.randrange(50, turns), draw.choice([-86_400, -1, 1, 86_400])))
    if draw.random() < 0.1:
        faults.append(Fault("--full", "launcher", -1, draw.randrange(50, turns), draw.choice([1, 100, 10_000])))
    if draw.random() < 0.2:
        faults.append(Fault("--power", "launcher", -1, draw.randrange(50, turns)))
    return Schedule(seed, ranks, hosts, restarts, variant, switches, pace, tuple(faults))


class Simulation:
    def __init__(self, build: pathlib.Path, directory: pathlib.Path):
        self._build = build
        self._shas = {}
        for variant in VARIANTS:
            ranks = 2 if variant in FOR_SEVERAL_RANKS else 1
            place = directory / f"undisturbed-{variant}"
            result = self.run_job(Schedule(1, ranks, ranks if variant == "mirror" else 0, "none", variant, 0.1, 2000, ()), place, 0)
            self._shas[variant] = sha_of(place)
            if result["problem"] or result["code"] != 0:
                raise RuntimeError(f"{variant}, undisturbed: {result} {(place / 'stderr').read_text()}")

    def run_job(self, schedule: Schedule, directory: pathlib.Path, processor: int) -> dict:
        directory.mkdir(parents=True, exist_ok=True)
        simulation = self._build / "tests/simulation"
        program = self._build / "lockstep"
        faults = [flag for fault in schedule.faults for flag in fault.flags()]
        argv = [simulation / "simulated_job", "--seed", schedule.seed, "--system", simulation / "libsimulated_system.so",
                "--dir", directory, "--processor", processor, "--switches", schedule.switches, "--pace-ns", schedule.pace_ns,
                *faults, "--", program, *schedule.launch(), "--", program, *TRAIN,
                *VARIANTS[schedule.variant]]
        # What the program would set and start itself again for.
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("LOCKSTEP_", "OMP_", "GOMP_"))}
        done = subprocess.run([str(word) for word in argv], capture_output=True, text=True, timeout=300,
                              env={**environment, "GOMP_SPINCOUNT": "1000", "OMPI_MCA_plm_rsh_args": "ssh",
                                   "OMPI_MCA_plm_rsh_agent": str(simulation / "simulated_job")})
        if done.returncode != 0:
            raise RuntimeError(done.stderr.strip() or f"simulated_job: exit code {done.returncode}")
        return json.loads(done.stdout)

    def problem(self, schedule: Schedule, directory: pathlib.Path, processor: int) -> tuple:
        """What is wrong with how it ends, or None; and what simulated_job says."""
        shutil.rmtree(directory, ignore_errors=True)
        result = self.run_job(schedule, directory, processor)
        # Lines that waited for space are lost with their process: it has warned, and who comes later does not know.
        is_cut = METRICS_CUT in (directory / "stderr").read_text(errors="replace")
        found = self._judge(schedule, directory, result, is_cut)
        if found is None and result["code"] != 0:
            if any(fault.flag == "--power" for fault in schedule.faults):
                for left in (directory / "tmp").glob("lockstep-*"):  # a machine that starts empties it
                    shutil.rmtree(left)
            # The same command again completes it.
            saved = newest_checkpoint(directory)
            undisturbed = dataclasses.replace(schedule, seed=schedule.seed + 1, faults=())
            again = self.run_job(undisturbed, directory, processor)
            resumed = resumed_steps(directory)
            found = self._judge(undisturbed, directory, again, is_cut)
            if found is None and saved > (resumed[0] if resumed else 0):
                found = f"the checkpoint of step {saved} is lost, and those from which it resumes are {resumed}"
            found = found and f"after the same command again: {found}"
        return found, result

    def _judge(self, schedule: Schedule, directory: pathlib.Path, result: dict, metrics_cut: bool):
        if result["problem"]:
            return result["problem"]
        errors = (directory / "stderr").read_text(errors="replace")
        hit = [Hit(*re.match(r"(\w+) of (\w+) (-?\d+)", text).groups()) for text in result["applied"]]
        killed = [one for one in hit if one.signal == "9"]
        ranks_killed = any(one.who in ("rank", "wrapper") for one in killed)
        hosts_hit = any(one.who in ("host", "helper") for one in hit)
        allowed = {0}
        if hosts_hit and (schedule.restarts == "none" or any(text in errors for text in GIVES_UP)):
            allowed |= {4, 5, 137}
        if hosts_hit and "error: host host" in errors:
            allowed.add(4)  # it was not there when the job began
        if any(one.who == "launcher" for one in killed):
            allowed.add(137)
        if any(one.signal == "power" for one in hit):
            return None if result["code"] == 137 else f"exit code {result['code']} without power"
        if any(one.signal == "full" for one in hit):
            allowed |= {3, 6}
        if any(one.signal == "15" for one in hit):
            allowed |= {75, 143}
        if ranks_killed and (schedule.restarts == "none" or any(text in errors for text in GIVES_UP)
                             or any(one.signal == "15" for one in hit)):
            allowed.add(137)
        if any(one.signal == "19" for one in hit) and "held up the others" in errors:
            allowed |= {4, 5}  # nobody knows how a rank ended whose wrapper was stopped
        if result["code"] not in allowed:
            return f"exit code {result['code']}, which may be {sorted(allowed)}"
        if "bug in lockstep" in errors or "terminate called" in errors:
            return "an error of its own"
        left = {path for path in result["files"] if path not in EXPECTED_FILES and not path.startswith("/tmp/host")}
        if left and not any(one.who == "reaper" for one in killed) and not any(one.signal == "loss" for one in hit):
            return f"files remain: {sorted(left)}"
        if result["seconds"] > PATIENCE_S:
            return f"takes {result['seconds']:.0f} s"
        named = {int(rank) for rank in re.findall(r"rank (\d+) of \d+ \(host \S+ pid \d+\) (?:failed first|held up)", errors)}
        victims = {int(one.rank) - (one.who in ("host", "helper")) for one in hit}
        if any(one.signal == "full" for one in hit):
            victims.add(0)  # which writes
        if not named <= victims and -2 not in victims:
            return f"blames {sorted(named - victims)}, and {sorted(victims)} were disturbed"
        resumed = resumed_steps(directory)
        if resumed != sorted(resumed):
            return f"it resumes after the steps {resumed}"
        if result["code"] != 0 or any(one.who == "launcher" for one in killed):
            return None
        if sha_of(directory) != self._shas[schedule.variant]:
            return f"other bits: {sha_of(directory)}"
        with open(directory / "tmp/m.jsonl") as file:
            steps = [json.loads(line)["step"] for line in file if '"event":"step"' in line]
        return None if metrics_cut or steps == list(range(1, STEPS + 1)) else f"metrics of the steps {steps}"


@dataclasses.dataclass(frozen=True)
class Hit:
    signal: str
    who: str
    rank: str


def sha_of(directory: pathlib.Path) -> str:
    found = re.findall(r"params_sha256 (\w+)", (directory / "stdout").read_text(errors="replace"))
    return found[-1] if found else ""


def resumed_steps(directory: pathlib.Path) -> list:
    """Of the checkpoints from which attempts have resumed, in their order."""
    found = re.findall(r"resuming at step (\d+), from \S*/(?:checkpoints|mirror)/", (directory / "stdout").read_text(errors="replace"))
    return [int(step) - 1 for step in found]


def newest_checkpoint(directory: pathlib.Path) -> int:
    """That the metrics file has, 0: none."""
    path = directory / "tmp/m.jsonl"
    text = path.read_text(errors="replace") if path.exists() else ""
    return max((int(step) for step in re.findall(r'"event":"checkpoint","step":(\d+)', text)), default=0)


def shrunk(simulation: Simulation, schedule: Schedule, directory: pathlib.Path, processor: int) -> Schedule:
    """With as few faults as it fails with."""
    for fault in schedule.faults:
        smaller = dataclasses.replace(schedule, faults=tuple(one for one in schedule.faults if one != fault))
        if simulation.problem(smaller, directory, processor)[0]:
            schedule = smaller
    return schedule


def soak(simulation: Simulation, options, directory: pathlib.Path) -> int:
    processors = sorted(os.sched_getaffinity(0))
    until = time.monotonic() + options.seconds if options.count is None else float("inf")
    count = options.count if options.count is not None else 1 << 40
    totals = {"schedules": 0, "turns": 0, "faults": 0, "failed": 0}
    began = time.monotonic()

    def work(place: int) -> None:
        for seed in range(options.first + place, options.first + count, len(processors)):
            if time.monotonic() > until or (options.until_failed and totals["failed"]):
                return
            schedule, place_of = schedule_of(seed), directory / str(seed)
            found, result = simulation.problem(schedule, place_of, processors[place])
            totals["schedules"] += 1
            totals["turns"] += result["turns"]
            totals["faults"] += len(result["applied"])
            if found:
                totals["failed"] += 1
                least = schedule if options.until_failed else shrunk(simulation, schedule, place_of, processors[place])
                print(f"seed {seed}: {found}\n  {least}", flush=True)
            shutil.rmtree(place_of, ignore_errors=True)

    with concurrent.futures.ThreadPoolExecutor(len(processors)) as pool:
        for done in [pool.submit(work, place) for place in range(len(processors))]:
            done.result()
    seconds = time.monotonic() - began
    print(f"{totals['schedules']} schedules from seed {options.first} on, {totals['turns']} turns, {totals['faults']} faults, "
          f"{totals['failed']} failed; {3600 * totals['schedules'] / seconds:.0f} an hour")
    return 1 if totals["failed"] or totals["schedules"] == 0 else 0


def again(simulation: Simulation, directory: pathlib.Path) -> int:
    processor = min(os.sched_getaffinity(0))
    lines = [line.split("#")[0].strip() for line in (HERE / "found.txt").read_text().splitlines()]
    failed = 0
    for line in filter(None, lines):
        found, _ = simulation.problem(parse(line), directory / "again", processor)
        if found:
            failed += 1
            print(f"{line}: {found}")
    schedule = parse("7 3 0 in-place plain 0.1 20000 --kill rank:1:1500")
    first, second = (simulation.run_job(schedule, directory / name, processor) for name in ("first", "second"))
    if first["hash"] != second["hash"] or not first["applied"]:
        failed += 1
        print(f"one seed, two schedules: {first} and {second}")
    print(f"{len(list(filter(None, lines)))} schedules that had failed, and one twice: {failed} failed")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=HERE.parent.parent / "build")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--count", type=int)
    parser.add_argument("--first", type=int, default=time.time_ns() // 1_000_000, help="default: another one each time")
    parser.add_argument("--until-failed", action="store_true", help="end with the first one that fails, which is not shrunk")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args()
    options.build = options.build.resolve()
    directory = pathlib.Path(tempfile.mkdtemp(prefix="simulation-", dir="/var/tmp"))
    try:
        try:
            simulation = Simulation(options.build, directory)
        except RuntimeError as error:
            if "Operation not permitted" not in str(error):
                raise
            print(f"skipped: {error}")
            return SKIPPED
        if options.seed is not None:
            place = pathlib.Path(tempfile.mkdtemp(prefix="simulation-", dir="/var/tmp"))
            schedule = schedule_of(options.seed)
            found, result = simulation.problem(schedule, place, min(os.sched_getaffinity(0)))
            print(f"{schedule}\n{json.dumps(result)}\n{place}: {found or 'as it should be'}")
            return 1 if found else 0
        return again(simulation, directory) if options.again else soak(simulation, options, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
