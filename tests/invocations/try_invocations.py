#!/usr/bin/env python3
"""try-invocations [--seed N] [--count N] [--only N] [--jobs N] [--build DIR]: alters invocations that do what they should,
and looks how they end.

An invocation of train, eval, infer, launch, checkpoint or bench on a few kilobytes of data (valid.py) is altered in one to
three ways (MUTATIONS): its flags, values and words, the files that it names, its environment, launchers' variables, its
descriptors and limits. It must do what the documents say, or end with a documented exit code and one line, which names the
cause and what helps; no process and no file of it stays (findings.py). Number i of a seed is always the same one: --only i
repeats it and prints what it said. A thousand take some minutes on two cores. Exit code 1: there are findings.
"""
import argparse
import collections
import concurrent.futures
import contextlib
import ctypes
import fcntl
import os
import pathlib
import random
import re
import resource
import shlex
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time

sys.dont_write_bytecode = True

import case as case_of  # noqa: E402
import findings  # noqa: E402
import valid  # noqa: E402
from files import replace_path, spoil_directory, spoil_file, spoil_output, strange_name  # noqa: E402
from surroundings import (end_early, other_launcher, set_limit, set_variable, spoil_descriptor,  # noqa: E402
                          strange_input, surroundings)
from words import (add_flag, add_flag_of_another, add_word, bad_value, double_flag, drop_flag,  # noqa: E402
                   drop_value, drop_word, misspell, other_data, other_file, other_model, other_program,
                   other_spelling, other_subcommand, shuffle, spoil_word)

ROOT = pathlib.Path(__file__).resolve().parents[2]
SECONDS = 15  # after which an invocation that still runs is asked to stop: it may have been asked to train for hours
MORE_SECONDS = 20
MOST_MEMORY = 6 << 30  # of an invocation that asks for endless sizes
SUBCOMMANDS = ("train", "eval", "infer", "launch", "checkpoint", "inspect", "devices", "doctor", "version", "export onnx", "bench step",
               "bench allreduce",
               "bench dp-vs-ddp")
MOST_OUTPUT = 1 << 22
PR_SET_CHILD_SUBREAPER = 36
MUTATIONS = {  # the ways in which invocations are altered, with their weights
    drop_flag: 3, drop_value: 2, double_flag: 2, misspell: 3, other_spelling: 1, bad_value: 6, add_flag: 10,
    add_flag_of_another: 3, shuffle: 2, add_word: 2, drop_word: 2, spoil_word: 3, other_model: 4, other_data: 4,
    other_file: 5, other_subcommand: 1, spoil_file: 8, replace_path: 6, spoil_directory: 4, strange_name: 4,
    strange_input: 3, other_program: 3, end_early: 4, spoil_output: 3, set_variable: 8, other_launcher: 4,
    spoil_descriptor: 3, set_limit: 4, surroundings: 2,
}


def mutate(case, drawn):
    """One mutation, or several."""
    wanted = drawn.choices([1, 2, 3], [6, 3, 1])[0]
    for _ in range(50):
        if len(case.done) >= wanted or not case.words:
            return
        way, = drawn.choices(list(MUTATIONS), list(MUTATIONS.values()))
        with contextlib.suppress(OSError):  # of a file that another mutation has made unusable
            way(case, drawn)


def flags_of(program):
    """Of each subcommand, as its --help has them: name → placeholder."""
    found = {}
    for subcommand in SUBCOMMANDS:
        said = subprocess.run([program, *subcommand.split(), "--help"], stdout=subprocess.PIPE, text=True,
                              check=True).stdout
        found[subcommand] = {name: (value or "").strip() for name, value in
                             re.findall(r"^  (?:-\w, )?(--[a-z][a-z0-9-]*)( [^\s]+(?: FILE)?)?(?=$|  )", said,
                                        re.MULTILINE)}
    return found


def children(pid):
    found = []
    for task in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(word) for word in task.read_text().split()]
        except OSError:
            pass
    return found


def descendants(pid):
    return [one for child in children(pid) for one in [child, *descendants(child)]]


def cpu_seconds(pids):
    ticks = 0
    for pid in pids:
        try:
            fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
        except (OSError, IndexError, ValueError):
            pass
    return ticks / os.sysconf("SC_CLK_TCK")


def changed_files(directory, since):
    """Names in it of what was written since, with their sizes."""
    return {entry.name: entry.lstat().st_size for entry in directory.iterdir() if entry.lstat().st_mtime_ns > since}


class Reader(threading.Thread):
    """Reads a pipe to its end."""

    def __init__(self, descriptor):
        super().__init__(daemon=True)
        self.descriptor, self.text = descriptor, b""
        self.start()

    def run(self):
        with os.fdopen(self.descriptor, "rb", buffering=0) as pipe:
            with contextlib.suppress(OSError):  # the end of a terminal
                while data := pipe.read(1 << 16):
                    self.text += data[:MOST_OUTPUT - len(self.text)]

    def all(self):
        self.join(5)
        return self.text


class Trial:
    """Runs invocations in copies of one directory. Each of its processes has one at a time."""

    def __init__(self, program, directory, seed):
        self.program, self.directory, self.seed = program, directory, seed
        self.files = directory / "files"
        self.files.mkdir()
        self.environment = {"PATH": f"{program.parent}:/usr/local/bin:/usr/bin:/bin", "HOME": str(directory),
                            "LANG": "C.UTF-8",
                            "CUDA_VISIBLE_DEVICES": "", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        self.flags = flags_of(program)
        valid.prepare(self.files, ROOT, program, self.environment)
        self.prepared = time.time_ns()
        self.bases = {}

    def case(self, invocation, directory):
        shutil.copytree(self.files, directory / "work", symlinks=True)
        (directory / "tmp").mkdir(mode=0o1777)
        environment = {**self.environment, "TMPDIR": str(directory / "tmp"), **invocation.environment}
        return case_of.Case(words=invocation.words, inputs=invocation.inputs, output=invocation.output,
                              environment=environment,
                              directory=directory / "work", stdin=invocation.stdin.encode(), flags=self.flags)

    def run(self, case):
        work = case.directory
        environment = {name: value for name, value in case.environment.items()}
        if case.user:
            for path in [work, *work.rglob("*"), work.parent / "tmp"]:
                os.chown(path, case.user, case.user, follow_symlinks=False)
        stdin_read, stdin_write = os.pipe()
        if isinstance(case.stdin, bytes):
            os.write(stdin_write, case.stdin)
        os.close(stdin_write)

        def before():
            os.setsid()
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
            if case.work == "gone":
                os.rmdir(work / "gone")
            for descriptor, what in ((0, case.stdin), (1, case.stdout), (2, case.stderr)):
                if what == "closed":
                    os.close(descriptor)
            os.umask(case.umask)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
            if case.user:
                os.setgroups([])
                os.setgid(case.user)
                os.setuid(case.user)
            for which, value in case.limits:
                resource.setrlimit(which, (value, value))

        def target(what):
            """What it writes to, and what reads that."""
            if what == "terminal":
                read, write = os.openpty()
                fcntl.ioctl(write, termios.TIOCSWINSZ, struct.pack("4H", *case.terminal, 0, 0))
                return write, Reader(read)
            if what == "full":
                return os.open("/dev/full", os.O_WRONLY), None
            read, write = os.pipe()
            if what == "gone":
                os.close(read)
                return write, None
            return write, Reader(read)

        (to_out, out), (to_err, err) = target(case.stdout), target(case.stderr)
        stdin = os.open(work, os.O_RDONLY) if case.stdin == "directory" else stdin_read
        try:
            process = subprocess.Popen([self.program, *case.words], executable=self.program, cwd=work / case.work,
                                       env=environment, stdin=stdin, stdout=to_out, stderr=to_err, preexec_fn=before)
        finally:
            for descriptor in {stdin, stdin_read, to_out, to_err}:
                os.close(descriptor)
        stopped = ""
        try:
            if case.signal:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(case.signal[1])
                process.send_signal(case.signal[0])
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            spent = cpu_seconds([process.pid, *descendants(process.pid)])
            waits = spent < 1 and not (err and b"waited" in err.text)
            stopped = f"{'!' if waits else ''}after {SECONDS} s, {spent:.1f} of them computing"
            process.terminate()
            try:
                code = process.wait(MORE_SECONDS)
            except subprocess.TimeoutExpired:
                stopped = f"!{MORE_SECONDS} s after SIGTERM"
                process.kill()
                code = process.wait()
        left = self.leftovers(process.pid, work.parent / "tmp")
        return findings.Outcome(code, out.all() if out else b"", err.all() if err else b"", stopped, tuple(left))

    def leftovers(self, pid, tmp):
        """What is still there after the time that it may take."""
        end = time.monotonic() + 5
        while True:
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                pass
            processes = descendants(os.getpid())
            left = [f"process {one} {pathlib.Path(f'/proc/{one}/comm').read_text().strip()}" for one in processes
                    if pathlib.Path(f"/proc/{one}/comm").exists()]
            left += [f"$TMPDIR/{path.name}" for path in tmp.iterdir()]
            left += [f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if re.search(rf"\b{pid}\b", name)]
            if not left or time.monotonic() > end:
                break
            time.sleep(0.01)
        for one in processes:
            try:
                os.kill(one, signal.SIGKILL)
            except ProcessLookupError:
                pass
        return left

    def base(self, which):
        """The outcome of the invocation as it is, and the files that it wrote."""
        if which not in self.bases:
            with tempfile.TemporaryDirectory(dir=self.directory) as directory:
                os.chmod(directory, 0o755)
                case = self.case(valid.VALID[which], pathlib.Path(directory))
                self.bases[which] = self.run(case), changed_files(case.directory, self.prepared)
        return self.bases[which]

    def altered(self, number, show=False):
        """(number, what was done, the command, findings) of the seed's invocation of that number."""
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        drawn = random.Random(f"{self.seed}/{number}")
        which = drawn.randrange(len(valid.VALID))
        base, usual = self.base(which)
        directory = pathlib.Path(tempfile.mkdtemp(dir=self.directory))
        os.chmod(directory, 0o755)
        try:
            case = self.case(valid.VALID[which], directory)
            mutate(case, drawn)
            outcome = self.run(case)
            os.chmod(case.directory, 0o755)
            new_files = changed_files(case.directory, self.prepared) != usual
            found = findings.problems(case, outcome, base, new_files)
            changed = {name: value for name, value in case.environment.items() if self.environment.get(name) != value
                       and name != "TMPDIR"}
            command = shlex.join([*(f"{name}={value}" for name, value in changed.items()), "lockstep",
                                  *(word if isinstance(word, str) else word.decode(errors="backslashreplace")
                                    for word in case.words)])
            if show:
                print("altered:", "; ".join(case.done), "\n" + command, f"\nexit code {outcome.code} {outcome.stopped}")
                print(outcome.said)
            return number, "; ".join(case.done), command, outcome, found
        finally:
            subprocess.run(["chmod", "-R", "u+rwX", directory], check=False, stderr=subprocess.DEVNULL)
            shutil.rmtree(directory, ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--only", type=int)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build")
    given = parser.parse_args()
    program = given.build.resolve() / "lockstep"
    codes, failed = collections.Counter(), 0
    with tempfile.TemporaryDirectory(prefix="lockstep-invocations-") as directory:
        os.chmod(directory, 0o755)
        if any(not parent.stat().st_mode & stat.S_IXOTH for parent in program.parents):
            # Some invocations are another user's, who does not get to it.
            program = pathlib.Path(shutil.copy(program, directory))
        trial = Trial(program, pathlib.Path(directory), given.seed)
        if given.only is not None:
            *_, found = trial.altered(given.only, show=True)
            print(*(f"finding: {what}" for what in found), sep="\n")
            return 1 if found else 0
        begin = time.monotonic()
        with concurrent.futures.ProcessPoolExecutor(given.jobs) as pool:
            for number, done, command, outcome, found in pool.map(trial.altered, range(given.count), chunksize=8):
                codes["stopped" if outcome.stopped else outcome.code] += 1
                if found:
                    failed += 1
                    last = outcome.err.decode(errors="replace").strip().splitlines()[-2:]
                    print(f"seed {given.seed}, number {number}: {'; '.join(found)}\n  altered: {done}\n  {command[:400]}",
                          *last, f"repeat: scripts/try-invocations --seed {given.seed} --only {number}", sep="\n  ", flush=True)
        counts = ", ".join(f"{count} with {code}" for code, count in sorted(codes.items(), key=str))
        print(f"seed {given.seed}: {given.count} invocations in {time.monotonic() - begin:.0f} s ({counts}), {failed} with findings")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
