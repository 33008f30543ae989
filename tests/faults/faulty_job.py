"""One job of the faulty program (injection.h): started, watched, disturbed from outside, and looked after for what it leaves.
"""
import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time

from hosts import die_with_parent

MARK = "LOCKSTEP_TEST_MARK"
# What other jobs and launchers have said to this process.
OF_OTHERS = ("LOCKSTEP_", "OMPI_", "PMIX_", "SLURM_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_")
GONE_WITHIN_SECONDS = 2.0  # the promise: from a job's end until nothing of it is left

AGENT = """#!/bin/bash
# As ssh is called: HOST COMMAND. An environment of its own, as a login has.
[[ $(cat {away} 2>/dev/null) != "$1" ]] || {{ echo 'No route to host' >&2; exit 255; }}
exec {python} {here}/hosts.py connect "$1" "exec env -i PATH='$PATH' HOME='$HOME' TMPDIR='$TMPDIR' {mark}='${mark}' \
  CUDA_VISIBLE_DEVICES= LOCKSTEP_HOST_NAME='$1' OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
  /bin/sh -c $(printf %q "${{*:2}}")"
"""


def wait_until(condition, seconds):
    """What `condition` returns as soon as that is true, or at the end."""
    end = time.monotonic() + seconds
    while True:
        found = condition()
        if found or time.monotonic() > end:
            return found
        time.sleep(0.005)


class Process:
    def __init__(self, pid, name, words, variables):
        self.pid, self.words, self.variables = pid, words, variables
        program = os.path.basename(words[0]) if words else ""
        kinds = {"launch": "launcher", "_rank": "wrapper", "train": "program", "_host": "helper"}
        self.role = program if program in ("mpirun", "orted") else kinds.get(words[1] if len(words) > 1 else "", "other")
        if program not in ("mpirun", "orted", "lockstep"):
            self.role = "other"
        if name == "lockstep-reaper":
            self.role = "reaper"
        self.rank = int(variables.get("OMPI_COMM_WORLD_RANK") or variables.get("RANK") or -1)
        self.host = variables.get("LOCKSTEP_HOST_NAME", "")


class Job:
    """A directory with all that belongs to a job: its files, its directory for temporary ones, the fault's marks."""

    def __init__(self, program, hosts=None):
        self.program, self.hosts = pathlib.Path(program), hosts
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="lockstep-fault-"))
        self.marks, self.tmp, self.work = (self.directory / name for name in ("marks", "tmp", "work"))
        for made in (self.marks, self.tmp, self.work):
            made.mkdir()
        self.agent = self.directory / "agent"
        self.agent.write_text(AGENT.format(mark=MARK, python=sys.executable, here=pathlib.Path(__file__).resolve().parent,
                                           away=self.directory / "away"))
        self.agent.chmod(self.agent.stat().st_mode | stat.S_IXUSR)
        (self.work / "text.txt").write_text("".join(f"now {i * i % 89} then {i % 7} " for i in range(800)))
        self.launcher = None
        self.pids = set()  # of its launchers and helpers, whose directories in /dev/shm have them in their names

    def environment(self, fault):
        env = {name: value for name, value in os.environ.items() if not name.startswith(OF_OTHERS)}
        env |= {"PATH": f"{self.program.parent}:{env['PATH']}", "TMPDIR": str(self.tmp), MARK: str(self.directory),
                "CUDA_VISIBLE_DEVICES": "", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                "LOCKSTEP_TEST_FAULT_DIR": str(self.marks)}
        if fault:
            env["LOCKSTEP_TEST_FAULT"] = fault
        if self.hosts:
            env |= {"OMPI_MCA_plm_rsh_agent": str(self.agent), "LOCKSTEP_HOST_NAME": self.hosts.names[0]}
        return env

    def start(self, argv, fault="", before=()):
        """`before`: words of a command that becomes the launcher."""
        for mark in self.marks.iterdir():
            mark.unlink()
        def enter():
            self.hosts.enter(0) if self.hosts else die_with_parent()
            # A process group of its own, and no session: Linux 6.18 gives sessions that wake and sleep as often as ranks do
            # nearly all processors (sched_autogroup), and what else runs on the machine would stand still.
            os.setpgid(0, 0)
        with open(self.directory / "out", "wb") as out, open(self.directory / "err", "wb") as err:
            self.launcher = subprocess.Popen([*before, *argv], cwd=self.work, env=self.environment(fault),
                                             stdin=subprocess.DEVNULL, stdout=out, stderr=err, preexec_fn=enter)
        self.pids.add(self.launcher.pid)

    def err(self):
        return (self.directory / "err").read_text(errors="replace")

    def reached(self):
        """When the rank was where it is disturbed, as time.time() has it; None: it is not there yet."""
        with contextlib.suppress(FileNotFoundError):
            return int((self.marks / "reached").read_text()) / 1000
        return None

    def wait_until_reached(self, seconds=30):
        found = wait_until(lambda: self.reached() or self.launcher.poll() is not None, seconds)
        if self.reached() is None:
            raise AssertionError("the job ended before it was disturbed" if found else "the place was not reached in time")

    def set_away(self, host):
        """Which host does not answer; None: all do."""
        (self.directory / "away").write_text(host or "")

    def events(self, name, file="m.jsonl"):
        with contextlib.suppress(FileNotFoundError):
            lines = (self.work / file).read_text().split("\n")[:-1]
            return [event for event in map(json.loads, lines) if event["event"] == name]
        return []

    def wait_while_it_runs(self, condition, seconds=60):
        found = wait_until(lambda: condition() or self.launcher.poll() is not None, seconds)
        if not condition():
            raise AssertionError("the job ended before that" if found else "the job did not come so far in time")

    def release(self):
        (self.marks / "go").touch()

    def wait(self, seconds):
        """The exit code, 128 + n for signal n; None: it still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.launcher.wait(seconds)
            return code if code >= 0 else 128 - code
        return None

    def processes(self):
        found = []
        for entry in os.scandir("/proc"):
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                environ = pathlib.Path(entry.path, "environ").read_bytes().decode(errors="replace").split("\0")
                variables = dict(line.split("=", 1) for line in environ if "=" in line)
                if variables.get(MARK) == str(self.directory):
                    words = pathlib.Path(entry.path, "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
                    name = pathlib.Path(entry.path, "comm").read_text().strip()
                    found.append(Process(int(entry.name), name, words, variables))
        self.pids |= {process.pid for process in found}
        return found

    def find(self, role, rank=None, host=None):
        def matching():
            return [process for process in self.processes() if process.role == role and
                    rank in (None, process.rank) and (host is None or process.host == self.hosts.names[host])]
        found = wait_until(matching, 5)
        if not found:
            raise AssertionError(f"there is no {role} of rank {rank}")
        return found[0]

    def signal(self, number, role, rank=None, host=None):
        os.kill(self.launcher.pid if role == "launcher" else self.find(role, rank, host).pid, number)

    def ports(self):
        """Where the job's processes listen: (pid, address, port)."""
        found = []
        for process in self.processes():
            with contextlib.suppress(OSError):
                inodes = {os.readlink(fd.path) for fd in os.scandir(f"/proc/{process.pid}/fd")}
                for line in pathlib.Path(f"/proc/{process.pid}/net/tcp").read_text().splitlines()[1:]:
                    fields = line.split()
                    if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                        address, port = fields[1].split(":")
                        found.append((process, socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)))
        return found

    def final(self):
        """The final parameters' hash; None: the job has none."""
        final = self.events("final")
        return final[-1]["params_sha256"] if final else None

    def restarts(self):
        return len(re.findall(r"^lockstep: restart \d+ of", self.err(), re.MULTILINE))

    def shared_directories(self):
        return [f"/dev/shm/{name}" for name in os.listdir("/dev/shm")
                if self.pids & {int(number) for number in re.findall(r"\d+", name)}]

    def leftovers(self):
        """What is still there of a job that has ended, after the time that it may take."""
        def remaining():
            left = [f"process {p.pid} {' '.join(p.words)[:80]}" for p in self.processes()]
            # Other jobs of this machine have theirs there too.
            left += self.shared_directories()
            return left + [f"$TMPDIR/{name}" for name in os.listdir(self.tmp)]
        left = []

        def nothing():
            left[:] = remaining()
            return not left
        wait_until(nothing, GONE_WITHIN_SECONDS)
        return left

    def close(self):
        if self.launcher is not None and self.launcher.poll() is None:
            self.launcher.kill()
            self.launcher.wait()
        wait_until(lambda: not self.processes(), GONE_WITHIN_SECONDS)  # one of them removes what the job has
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.rmdir((self.directory / "group").read_text().strip())
        for directory in self.shared_directories():
            shutil.rmtree(directory, ignore_errors=True)
        shutil.rmtree(self.directory, ignore_errors=True)
