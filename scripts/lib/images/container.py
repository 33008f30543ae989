"""Containers without an engine: a process in namespaces of its own, on an image's read-only tree, without capabilities.

What an engine or a kubelet does with an image, as far as the image can notice: entry point, command, environment, user,
a /dev with 64 MB of /dev/shm, /proc, /etc/hosts, and no way to gain privileges.
"""
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

from .isolation import die_with_parent


class Failure(Exception):
    """A step went wrong: one line, and the output that explains it."""

    def __init__(self, text: str, output: str = ""):
        super().__init__(text)
        self.output = output


def check(condition: bool, text: str, output: str = "") -> None:
    if not condition:
        raise Failure(text, output)


@dataclasses.dataclass
class Image:
    """A tree on this disk, and the image's configuration as OCI has it (Entrypoint, Cmd, Env, User, Labels)."""
    root: pathlib.Path
    config: dict

    @staticmethod
    def read(directory: pathlib.Path) -> "Image":
        return Image(directory / "root", json.loads((directory / "config.json").read_text()))

    def write(self, directory: pathlib.Path) -> None:
        """Copies it to a new directory, from which it can be read again."""
        directory.mkdir()
        run(["cp", "--archive", str(self.root), str(directory / "root")], timeout_s=600)
        (directory / "config.json").write_text(json.dumps(self.config, indent=1) + "\n")

    def environment(self, user: str) -> dict:
        """As engines make it: HOME from /etc/passwd, or / for users that it does not know."""
        environment = dict(entry.split("=", 1) for entry in self.config.get("Env", []))
        environment.setdefault("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
        environment.setdefault("HOME", self._account(user).get("home", "/"))
        return environment

    def ids(self, user: str) -> tuple:
        """User and group number of "12345", "12345:0" or "mpiuser"."""
        name, _, group = user.partition(":")
        account = self._account(name)
        uid = int(name) if name.isdigit() else account["uid"]
        return uid, int(group) if group else account.get("gid", 0)

    def _account(self, user: str) -> dict:
        name = user.partition(":")[0]
        for line in (self.root / "etc/passwd").read_text().splitlines():
            fields = line.split(":")
            if name in (fields[0], fields[2]):
                return {"uid": int(fields[2]), "gid": int(fields[3]), "home": fields[5]}
        return {}


class Network:
    """A network namespace, held by a process that sleeps in it."""

    def __init__(self, address: str = ""):
        self.address = address
        self.holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"], stdin=subprocess.DEVNULL,
                                       preexec_fn=die_with_parent)
        deadline = time.monotonic() + 20
        while pathlib.Path(f"/proc/{self.holder.pid}/comm").read_text().strip() != "sleep":  # then unshare is done
            check(time.monotonic() < deadline, "unshare --net has made no network namespace")
            time.sleep(0.01)
        self.command("ip", "link", "set", "lo", "up")

    def command(self, *arguments: str) -> None:
        run(["nsenter", f"--net=/proc/{self.holder.pid}/ns/net", *arguments], timeout_s=20)

    def close(self) -> None:
        self.holder.kill()
        self.holder.wait()


class Switch(Network):
    """Joins networks: each one has an eth0 with its address, /24, and reaches the others."""

    def __init__(self, networks: list):
        super().__init__()
        self.command("ip", "link", "add", "bridge", "type", "bridge")
        self.command("ip", "link", "set", "bridge", "up")
        for i, network in enumerate(networks):
            run(["ip", "link", "add", "eth0", "netns", str(network.holder.pid), "type", "veth", "peer", "name", f"port{i}",
                 "netns", str(self.holder.pid)], timeout_s=20)
            self.command("ip", "link", "set", f"port{i}", "master", "bridge", "up")
            network.command("ip", "address", "add", network.address + "/24", "dev", "eth0")
            network.command("ip", "link", "set", "eth0", "up")


class Container:
    """A running container. Ends, with everything in it, by `close()` or with this program."""

    def __init__(self, image: Image, scratch: pathlib.Path, name: str, arguments: list | None = None, *,
                 user: str | None = None, network: Network | None = None, tmp: bool = True, shm: str = "64m", hosts: dict | None = None,
                 environment: dict | None = None, binds: dict | None = None):
        """`arguments`: in place of the image's Cmd. `tmp`: a tmpfs at /tmp; without one the container can write to /dev
        alone. `shm`: the size of /dev/shm, as engines have it. `binds`: what of this machine stands where in the container, writable as its modes have it."""
        self.image, self.name = image, name
        self.user = user or image.config.get("User") or "0"
        self.environment = image.environment(self.user) | {"HOSTNAME": name} | (environment or {})
        self.log = scratch / f"{name}.log"
        self.network = network or Network("127.0.0.1")
        hosts_file = scratch / f"{name}.hosts"
        names = {"localhost": "127.0.0.1"} | (hosts or {name: "127.0.0.1"})
        hosts_file.write_text("".join(f"{address}\t{host}\n" for host, address in names.items()))
        command = image.config.get("Cmd", []) if arguments is None else arguments
        spec = {"root": str(image.root), "name": name, "tmp": tmp, "shm": shm,
                "binds": {"/etc/hosts": str(hosts_file)} | (binds or {}),
                "command": self._as_user([*image.config.get("Entrypoint", []), *command])}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                ["nsenter", f"--net=/proc/{self.network.holder.pid}/ns/net", "unshare", "--mount", "--pid", "--uts", "--ipc",
                 "--fork", "--kill-child=KILL", sys.executable, "-B", "-c",
                 "import sys; sys.path.insert(0, sys.argv[1]); from images import enter; enter.enter(sys.argv[2])",
                 str(pathlib.Path(__file__).resolve().parents[1]), json.dumps(spec)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=die_with_parent)

    def _as_user(self, command: list) -> list:
        uid, gid = self.image.ids(self.user)
        variables = [f"{key}={value}" for key, value in self.environment.items()]
        return ["/usr/bin/setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--bounding-set=-all",
                "--inh-caps=-all", "--no-new-privs", "/usr/bin/env", "-i",
                "--chdir=" + (self.image.config.get("WorkingDir") or "/"), *variables, *command]

    def first_process(self) -> int:
        """The process with number 1 in there, by its number out here."""
        children = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        check(len(children) == 1, f"{self.name} has ended", self.output())
        return int(children[0])

    def run(self, *arguments: str, timeout_s: float = 120, entry: bool = True, expect: int | None = 0) -> str:
        """A command in the running container, as its user and by way of its entry point unless `entry` is false. Returns
        what it wrote."""
        return run(self._inside(arguments, entry), timeout_s=timeout_s, expect=expect)

    def begin(self, *arguments: str) -> subprocess.Popen:
        """As `run`, but does not wait: stdout is a pipe of text, both outputs together."""
        return subprocess.Popen(self._inside(arguments, True), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True, errors="replace", preexec_fn=die_with_parent)

    def _inside(self, arguments: tuple, entry: bool) -> list:
        prefix = self.image.config.get("Entrypoint", []) if entry else []
        return ["nsenter", f"--target={self.first_process()}", "--mount", "--uts", "--ipc", "--net", "--pid", "--root", "--wd",
                *self._as_user([*prefix, *arguments])]

    def wait(self, timeout_s: float = 120) -> int:
        """Its exit code, 128 + n for signal n."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise Failure(f"{self.name} is still running after {timeout_s} s", self.output()) from None
        return code if code >= 0 else 128 - code

    def stop(self) -> None:
        """What `docker stop` begins with."""
        subprocess.run(["kill", f"-{signal.SIGTERM.value}", str(self.first_process())], check=True)

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def close(self) -> None:
        """Ends everything in it at once, and its network with it."""
        # --kill-child does not reach a process that has changed its user.
        children = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        for pid in children.read_text().split() if children.exists() else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self.network.close()

    def __enter__(self) -> "Container":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def run(command: list, *, timeout_s: float, expect: int | None = 0, **options) -> str:
    """Runs a command to its end and returns what it wrote, stdout and stderr together."""
    name = next((word for word in command if not re.match(r"^-|.*(nsenter|setpriv|env)$|.*=", word)), command[0])
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              text=True, errors="replace", timeout=timeout_s, preexec_fn=die_with_parent, **options)
    except subprocess.TimeoutExpired as late:
        output = (late.stdout or b"").decode(errors="replace")
        raise Failure(f"{name} has not ended after {timeout_s} s", output) from None
    if expect is not None and done.returncode != expect:
        raise Failure(f"{name} ended with code {done.returncode}, not {expect}", done.stdout)
    return done.stdout
