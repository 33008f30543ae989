"""What all sections use: commands under deadlines, and what they said."""
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import socket
import subprocess
import tempfile
import time

from harness.contestants import ROOT, shown
from harness.processes import Failure, environment


@dataclasses.dataclass
class Done:
    code: int  # exit code; negative: ended by that signal
    out: str
    err: str
    seconds: float
    timed_out: bool = False

    def last_words(self) -> str:
        """The line that says what went wrong, as far as is known."""
        lines = [line.strip() for line in (self.err + "\n" + self.out).splitlines() if line.strip()]
        blamed = [line for line in lines if "error: " in line and "→" in line] or \
                 [line for line in lines if "FAILED" in line or "error" in line.lower()]
        return (blamed[:1] or lines[-1:] or [""])[0][:300]


@dataclasses.dataclass
class Section:
    """What became of one. `problems`: one line each."""
    name: str
    title: str
    status: str = "passed"  # or "failed", "skipped"
    problems: list = dataclasses.field(default_factory=list)
    seconds: float = 0
    commands: list = dataclasses.field(default_factory=list)
    data: dict = dataclasses.field(default_factory=dict)


# Tokens of a sample, and how many kinds there are. GPT-2 has 50,257; PyTorch's has 50,304 rows (bench/peers/torch).
TOKEN_SIZES = {"gpt": (128, 256), "lstm": (128, 256), "gpt2": (256, 50257), "gpt2-1024": (1024, 50257)}


def model_of(workload: str) -> str:
    """As lockstep names it."""
    return "gpt2" if workload == "gpt2-1024" else workload


class Skip(Exception):
    """A section cannot run here: why."""


class Late(Failure):
    """There was not enough time."""


class Check:
    """What sections run commands by, and how much of them: less in a dry run (dry_run.py)."""

    dry = False  # on GPUs in software
    program = "lockstep"  # below the build directory

    def __init__(self, build: pathlib.Path, gpus: list, quick: bool, extra_env: dict, end: float):
        self.build, self.gpus, self.quick = build, gpus, quick
        self.lockstep = build / self.program
        self.end = end  # by time.monotonic()
        self.section = Section("none", "none")
        self.section_end = end
        self._running = set()
        self.scratch = pathlib.Path(tempfile.mkdtemp(prefix="gpu-check-"))
        packed = ROOT / ".gpu" / "bin"
        if (packed / "mpirun").exists():
            extra_env = extra_env | {"PATH": f"{packed}:{os.environ.get('PATH', '')}"}
        self.env = environment(extra_env)

    def left(self) -> float:
        return min(self.section_end, self.end) - time.monotonic()

    def steps(self, wanted: int, least: int = 2) -> int:
        """Steps, or samples, of the `wanted` ones; a dry run takes the `least`."""
        return wanted

    def seconds(self, limit_s: float) -> float:
        """What a command may take that takes up to `limit_s` on a GPU."""
        return limit_s

    def patience(self, ranks: int) -> tuple:
        """Seconds that ranks wait for each other, and that they may take in all. Those that share a GPU alternate."""
        return (60, 90) if self.ranks_share(ranks) else (25, 40)

    def token_sizes(self, workload: str):
        """Tokens of a sample, and how many kinds there are; None for models of other data."""
        return TOKEN_SIZES.get(workload)

    def smaller(self, model: str, captured: bool) -> list:
        """Flags of `bench step` that make the model and the run smaller. `captured`: steps have to run from graphs."""
        return []

    def note(self, argv: list, env: dict = {}) -> None:
        """The command stands in the section, once."""
        words = " ".join([*(f"{k}={v}" for k, v in env.items() if k != "MASTER_PORT"), shown(argv)])
        words = words.replace(str(self.scratch), "/tmp")
        if words not in self.section.commands:
            self.section.commands.append(words)

    def problem(self, text: str) -> None:
        self.section.problems.append(text)

    def start(self, argv: list, env: dict = {}, cwd=None):
        """A process in a session of its own, and where its words go."""
        files = [tempfile.TemporaryFile(mode="w+", errors="replace", dir=self.scratch) for _ in range(2)]
        try:
            process = subprocess.Popen([str(word) for word in argv], env={**self.env, **env}, stdin=subprocess.DEVNULL,
                                       stdout=files[0], stderr=files[1], start_new_session=True, cwd=cwd)
        except OSError as error:
            raise Failure(f"{argv[0]} cannot be started: {error.strerror}") from None
        self._running.add(process)
        return process, files, time.monotonic()

    def finish(self, started, limit_s: float) -> Done:
        """Waits for it, and ends it and all of its process group when its time is up."""
        process, files, begin = started
        limit_s = self.seconds(limit_s)
        timed_out = False
        try:
            process.wait(max(0.1, min(limit_s, self.left())))
        except subprocess.TimeoutExpired:
            timed_out = True
            self.kill([process])
        self._running.discard(process)
        texts = []
        for file in files:
            file.seek(0)
            texts.append(file.read())
            file.close()
        return Done(process.returncode, texts[0], texts[1], time.monotonic() - begin, timed_out)

    @staticmethod
    def kill(processes: list) -> None:
        """All of them at once, first politely: 3 s in all, and another 3 for one that the kernel does not let go."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in processes:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, number)
            end = time.monotonic() + 3
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.01, end - time.monotonic()))

    def in_parallel(self, action, jobs: list, results: list, at_once: int = 4) -> None:
        """Adds what `action` makes of each job to `results`, in order. An exception ends what runs."""
        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            futures = [pool.submit(action, job) for job in jobs]
            try:
                for future in futures:
                    results.append(future.result())
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                while any(future.running() for future in futures):
                    self.kill(list(self._running))
                    time.sleep(0.05)
                raise

    def run(self, argv: list, limit_s: float = 60, env: dict = {}, codes=(0,), noted: bool = True) -> Done:
        """Raises Failure unless it ends with one of `codes` in time; any where there are none."""
        if noted:
            self.note(argv, env)
        if self.left() <= 0:
            raise Late("its time was up")
        done = self.finish(self.start(argv, env), limit_s)
        if done.timed_out:
            raise Late(f"`{shown(argv)}` was ended after {done.seconds:.0f} s: {done.last_words()}")
        if codes and done.code not in codes:
            raise Failure(f"`{shown(argv)}` ended with {done.code}: {done.last_words()}")
        return done

    def run_json(self, argv: list, limit_s: float = 60, env: dict = {}) -> dict:
        done = self.run(argv, limit_s, env)
        try:
            return json.loads(done.out)
        except ValueError:
            raise Failure(f"`{shown(argv)}` printed what is not JSON: {done.out[:80]}") from None

    def start_ranks(self, ranks: int, argv: list, shared: bool) -> list:
        """`argv` once for each rank, joined by RANK and WORLD_SIZE alone. Where they share a GPU, NCCL takes each for a
        host of its own: it refuses two ranks of one host on one GPU."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        started = []
        for rank in range(ranks):
            env = {} if ranks == 1 else {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_PORT": str(port)}
            if shared:
                env |= {"NCCL_HOSTID": f"rank{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
            if rank == 0:
                self.note(argv, env)
            started.append(self.start(argv, env))
        return started

    def finish_ranks(self, started: list, limit_s: float) -> list:
        """Raises Failure for the first that did not end well; its `output` is the end of what that one has said."""
        end = time.monotonic() + min(limit_s, self.left())
        for process, _, _ in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        late = {process for process, _, _ in started if process.returncode is None}
        self.kill(list(late))
        done = [self.finish(rank, 1) for rank in started]
        for one, (process, _, _) in zip(done, started):
            one.timed_out = process in late
        bad = [number for number, one in enumerate(done) if one.code != 0 and not one.timed_out] + \
              [number for number, one in enumerate(done) if one.timed_out]
        if bad:
            first = done[bad[0]]
            how = f"was ended after {first.seconds:.0f} s" if first.timed_out else f"ended with {first.code}"
            failure = Failure(f"rank {bad[0]} of {len(started)} {how}: {first.last_words()}")
            failure.output = (first.out + first.err)[-3000:]
            raise failure
        return done

    def ranks_share(self, ranks: int) -> bool:
        return ranks > len(self.gpus)


def run_section(check: Check, name: str, title: str, limit_s: float, action) -> Section:
    """Whatever happens in it stays in it."""
    section = check.section = Section(name, title)
    begin = time.monotonic()
    check.section_end = begin + limit_s
    try:
        if check.left() <= 0:
            raise Skip("no time was left for it")
        action(check, section.data)
        if section.problems:
            section.status = "failed"
    except Skip as skip:
        section.status = "skipped"
        section.problems.append(str(skip))
    except Failure as failure:
        section.status = "failed"
        section.problems.append(str(failure))
    except Exception as error:  # an answer that is not what it should be
        section.status = "failed"
        section.problems.append(f"{type(error).__name__}: {error}")
    section.seconds = round(time.monotonic() - begin, 1)
    return section
