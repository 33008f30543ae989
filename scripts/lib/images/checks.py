"""What is asked of the images: each check runs containers of one and returns a few words, or raises Failure."""
import json
import pathlib
import re
import shutil
import subprocess
import time

from .build import size_bytes
from .container import Container, Failure, Image, Network, Switch, check, run

TRAIN = ("lockstep", "train", "cnn", "--data", "digits", "--seed", "3")
STRANGER = "12345"  # a user that no image knows
ADDED_BYTES_ALLOWED = 150_000_000
PORT = 2222


def size(image: Image, base: Image) -> str:
    added = size_bytes(image.root) - size_bytes(base.root)
    check(added <= ADDED_BYTES_ALLOWED, f"adds {added / 1e6:.1f} MB to its base, more than "
                                        f"{ADDED_BYTES_ALLOWED / 1e6:.0f}")
    return f"{size_bytes(image.root) / 1e6:.1f} MB, of which {added / 1e6:.1f} MB are not its base"


def contents(image: Image, revision: str) -> str:
    """Labels, user, and what must not be in it."""
    labels = image.config.get("Labels", {})
    for name in ("title", "description", "version", "revision", "source", "licenses"):
        check(labels.get(f"org.opencontainers.image.{name}", "") != "", f"no label org.opencontainers.image.{name}")
    check(labels["org.opencontainers.image.revision"] == revision, f"the label says revision {labels}")
    check(image.config.get("User") == "mpiuser" and image.ids("mpiuser")[0] == 1000, "its user is not mpiuser, 1000")
    check(image.config["Entrypoint"][0].endswith("/tini"), "its first process is not tini")
    check(not list((image.root / "etc/ssh").glob("ssh_host_*")), "host keys are in it: all containers would share them")
    for name in ("usr/bin/gcc", "usr/bin/cmake", "usr/bin/git", "src", "build"):
        check(not (image.root / name).exists(), f"/{name} is in it")
    check(not [path for path in (image.root / "var/lib/apt/lists").rglob("*") if path.is_file()], "apt's lists are in it")
    return f"{len(labels)} labels, user mpiuser"


def default_command(image: Image, scratch: pathlib.Path) -> str:
    """`docker run IMAGE`."""
    with Container(image, scratch, "default") as container:
        code = container.wait(300)
        return _accuracy(container.output(), code)


def _accuracy(output: str, code: int) -> str:
    found = re.findall(r"accuracy ([\d.]+) %", output)
    check(code == 0 and bool(found), f"the command ended with code {code}", output)
    check(float(found[-1]) > 90, f"trained to {found[-1]} %", output)
    return f"accuracy {found[-1]} %"


def version(image: Image, scratch: pathlib.Path, revision: str) -> str:
    """`docker run IMAGE lockstep …`."""
    with Container(image, scratch, "version", ["lockstep", "version"]) as container:
        code = container.wait(60)
        output = container.output()
    check(code == 0 and f"(git {revision})" in output, f"lockstep version ended with code {code}", output)
    return output.splitlines()[0].removeprefix("lockstep").strip()


def any_user(image: Image, scratch: pathlib.Path) -> str:
    """User ids without a name, read-only root, with and without a /tmp, alone and as several ranks."""
    tried = []
    for user, tmp, backend in ((STRANGER, True, "mpi"), (f"{STRANGER}:{STRANGER}", False, "auto"),
                               ("65534", True, "auto"), ("0", True, "auto")):
        command = ["lockstep", "launch", "-n", "2", "--", *TRAIN, "--epochs", "20", "--backend", backend]
        with Container(image, scratch, "user-" + user.replace(":", "-"), command, user=user, tmp=tmp) as container:
            code = container.wait(300)
            _accuracy(container.output(), code)
        tried.append(user + ("" if tmp else " without /tmp"))
    return ", ".join(tried)


def little_shared_memory(image: Image, scratch: pathlib.Path) -> str:
    """A /dev/shm in which nothing fits."""
    with Container(image, scratch, "shm", ["lockstep", "launch", "-n", "2", "--", *TRAIN, "--epochs", "20"],
                   shm="64k") as container:
        code = container.wait(300)
        return "64 KB of /dev/shm, " + _accuracy(container.output(), code)


def ends_on_request(image: Image, scratch: pathlib.Path) -> str:
    """`docker stop`: SIGTERM to the first process ends the job within the ten seconds that engines wait."""
    left = scratch / "stopped"
    left.mkdir()
    left.chmod(0o1777)
    command = ["lockstep", "launch", "-n", "2", "--", *TRAIN, "--epochs", "100000"]
    with Container(image, scratch, "stopped", command, user=STRANGER, binds={"/tmp": str(left)}, tmp=False) as container:
        deadline = time.monotonic() + 60
        while "epoch 3/" not in container.output():
            check(time.monotonic() < deadline and container.process.poll() is None, "it has not begun to train",
                  container.output())
            time.sleep(0.1)
        started = time.monotonic()
        container.stop()
        code = container.wait(10)
        took = time.monotonic() - started
        check(code == 143, f"ended with code {code} after SIGTERM, not 143", container.output())
    remains = [str(path.relative_to(left)) for path in left.rglob("*") if not str(path.name).startswith("entrypoint.")]
    remains = [name for name in remains if not name.startswith("entrypoint.")]
    check(not remains, f"left in /tmp: {remains}")
    return f"code {code} after {took:.1f} s, nothing left"


# ---- Several hosts ----


class Hosts:
    """Containers of an image that run its sshd, each in a network namespace of its own, all on one switch. `keys`: a
    directory for ~/.ssh."""

    def __init__(self, image: Image, scratch: pathlib.Path, user: str, names: tuple, keys: pathlib.Path,
                 others: tuple = ()):
        """`others`: names of hosts on which nothing runs yet."""
        self.scratch = scratch
        self.results = scratch / "results"
        self.results.mkdir()
        self.results.chmod(0o1777)
        self.addresses = {name: f"10.77.1.{i}" for i, name in enumerate((*names, *others), 1)}
        self.networks = {name: Network(address) for name, address in self.addresses.items()}
        self.switch = Switch(list(self.networks.values()))
        self.binds = {"/home/mpiuser/.ssh": str(keys), "/results": str(self.results)}
        self.containers = {}
        try:
            for name in names:
                self.start(image, name, user, ["sshd"])
            for container in self.containers.values():
                self._wait_for_sshd(container)
        except BaseException:
            self.close()
            raise

    def start(self, image: Image, name: str, user: str, arguments: list, **options) -> Container:
        """A container on the host `name`, which is called by the first part of that name."""
        container = Container(image, self.scratch, name.partition(".")[0], arguments, user=user, hosts=self.addresses,
                              network=self.networks[name], binds=self.binds | options.pop("binds", {}), **options)
        self.containers[name] = container
        return container

    def _wait_for_sshd(self, container: Container) -> None:
        deadline = time.monotonic() + 20
        while f"listening on 0.0.0.0 port {PORT}" not in container.output():
            check(container.process.poll() is None and time.monotonic() < deadline,
                  f"sshd on {container.name} does not listen", container.output())
            time.sleep(0.05)

    def run(self, *arguments: str, **options) -> str:
        """On the first host."""
        return next(iter(self.containers.values())).run(*arguments, **options)

    def close(self) -> None:
        for container in self.containers.values():
            container.close()
        for network in (*self.networks.values(), self.switch):
            network.close()

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def two_hosts(image: Image, scratch: pathlib.Path, user: str) -> Hosts:
    """`one` and `two`, with keys that belong to their user."""
    scratch = scratch / f"hosts-{user}"
    keys = scratch / "keys"
    keys.mkdir(parents=True)
    run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(keys / "id_ed25519")], timeout_s=20)
    for path in (keys, *keys.iterdir()):
        shutil.chown(path, image.ids(user)[0])
    return Hosts(image, scratch, user, ("one", "two"), keys)


def _losses(path: pathlib.Path) -> tuple:
    """Each step's loss, and the sum over the parameters at the end."""
    events = [json.loads(line) for line in path.read_text().splitlines()]
    return ([event["loss"] for event in events if event["event"] == "step"],
            next(event["params_sha256"] for event in events if event["event"] == "final"))


def ssh(hosts: Hosts) -> str:
    """Who gets in, and who does not."""
    (first, _), (second, container) = hosts.containers.items()
    who = hosts.run("ssh", second, "id -u; hostname; id -un").split()
    check(who[1:] == [second, "mpiuser"], f"ssh to {second} came out at {who}")
    other = hosts.results / "stranger"
    run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other)], timeout_s=20)
    shutil.chown(other, container.image.ids(container.user)[0])
    refused = hosts.run("ssh", "-o", "IdentitiesOnly=yes", "-i", "/results/stranger", "-F", "/dev/null", "-p", str(PORT),
                        "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null",
                        second, "true", expect=255)
    check("Permission denied (publickey)" in refused, "another key was not refused", refused)
    return f"{first} to {second} as user {who[0]}, another key refused"


def train_across(hosts: Hosts, command: list, ranks: int) -> str:
    """Digits over both hosts, and the same number of ranks on one: the same losses, the same parameters."""
    options = ["--epochs", "4", "--threads", "1"]
    across = hosts.run(*command, *TRAIN, *options, "--metrics", "/results/across.jsonl", timeout_s=300)
    hosts.run("lockstep", "launch", "-n", str(ranks), "--", *TRAIN, *options, "--metrics", "/results/one.jsonl",
              timeout_s=300)
    losses, parameters = _losses(hosts.results / "across.jsonl")
    expected, expected_parameters = _losses(hosts.results / "one.jsonl")
    check(len(losses) > 0 and f"with {ranks} ranks" in across, f"it was not a job of {ranks} ranks", across)
    differing = [step for step, pair in enumerate(zip(losses, expected), 1) if pair[0] != pair[1]]
    check(len(losses) == len(expected) and not differing and parameters == expected_parameters,
          f"the losses differ from those of one host in {len(differing)} of {len(losses)} steps", across)
    for path in hosts.results.glob("*.jsonl"):
        path.unlink()
    nothing_left(hosts)
    return f"{ranks} ranks, {len(losses)} losses and the parameters bitwise those of one host"


def lost_host(hosts: Hosts) -> str:
    """The second host ends in the middle of a job, everything on it at once: the launcher names it and leaves nothing."""
    (first, container), (second, lost) = hosts.containers.items()
    job = container.begin("lockstep", "launch", "--hosts", f"{first}:1,{second}:1", "--", *TRAIN, "--epochs", "1000000")
    lines = []
    for line in job.stdout:
        lines.append(line)
        if "epoch 3/" in line:
            lost.close()
            hosts.containers.pop(second)
            break
    started = time.monotonic()
    try:
        lines += job.communicate(timeout=90)[0].splitlines(keepends=True)
    except subprocess.TimeoutExpired:
        job.kill()
        raise Failure(f"the launcher still runs 90 s after {second} was lost", "".join(lines)) from None
    took = time.monotonic() - started
    output = "".join(lines)
    check(second not in hosts.containers, "it has not begun to train", output)
    check(job.returncode in (4, 5), f"ended with code {job.returncode}, not 4 or 5", output)
    said = [line for line in lines if line.startswith("lockstep:") and second in line]
    check(bool(said), f"the launcher does not name {second}", output)
    nothing_left(hosts)
    return f"code {job.returncode} after {took:.1f} s: {said[0].strip()}"


def nothing_left(hosts: Hosts, within_s: float = 5) -> None:
    """No process but sshd, and no file, is left on either host."""
    for container in hosts.containers.values():
        deadline = time.monotonic() + within_s
        while True:
            found = container.run("sh", "-c", "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline; echo; done; "
                                              "ls -d /tmp/* /dev/shm/* 2>/dev/null", entry=False, expect=None)
            left = [line for line in found.splitlines()
                    if line.strip() and not re.match(r"^/usr/bin/tini|^sshd: |^/usr/sbin/sshd|^sh -c |^tr |^ls |"
                                                     r"^/tmp/entrypoint\.|^/(tmp|dev/shm)/\*", line)]
            if not left:
                break
            if time.monotonic() > deadline:
                raise Failure(f"left on {container.name}: {left[0]}", found)
            time.sleep(0.2)


def mpi_operator(image: Image, scratch: pathlib.Path, manifest: dict) -> str:
    """An MPIJob's pods as Kubeflow's operator makes them (v2beta1): its key as a secret of root's, a host file, variables
    for the launcher. The launcher's own command, as the manifest has it."""
    scratch = scratch / "operator"
    keys = scratch / "keys"
    keys.mkdir(parents=True)
    run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-m", "PEM", "-N", "", "-f", str(keys / "id_rsa")], timeout_s=20)
    shutil.copy(keys / "id_rsa.pub", keys / "authorized_keys")
    for path in keys.iterdir():
        path.chmod(0o644)
    keys.chmod(0o1777)
    job, spec = manifest["metadata"]["name"], manifest["spec"]
    slots, replicas = spec["slotsPerWorker"], spec["mpiReplicaSpecs"]
    workers = [f"{job}-worker-{i}.{job}.default.svc" for i in range(replicas["Worker"]["replicas"])]
    launcher = f"{job}-launcher.{job}.default.svc"
    pods = {role: replicas[role]["template"]["spec"] for role in ("Launcher", "Worker")}
    ids = {role: "{runAsUser}:{runAsGroup}".format(**pod["securityContext"]) for role, pod in pods.items()}
    check(pods["Worker"]["containers"][0]["args"] == ["sshd"], "the workers do not run sshd")
    hostfile = scratch / "hostfile"
    hostfile.write_text("".join(f"{worker} slots={slots}\n" for worker in workers))
    variables = {"K_MPI_JOB_ROLE": "launcher", "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
                 "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile", "OMPI_MCA_orte_set_default_slots": str(slots),
                 "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10", "NVIDIA_VISIBLE_DEVICES": "",
                 "NVIDIA_DRIVER_CAPABILITIES": ""}
    with Hosts(image, scratch, ids["Worker"], tuple(workers), keys, (launcher,)) as hosts:
        container = hosts.start(image, launcher, ids["Launcher"], pods["Launcher"]["containers"][0]["args"],
                                environment=variables, binds={"/etc/mpi/hostfile": str(hostfile)})
        code = container.wait(300)
        output = container.output()
        said = _accuracy(output, code)
    ranks = slots * len(workers)
    check(f"with {ranks} ranks" in output, f"it was not a job of {ranks} ranks", output)
    return f"{ranks} ranks in {len(workers)} pods, {said}"


def nvidia_libraries(image: Image, scratch: pathlib.Path) -> str:
    """They are found by the loader, without a variable that sessions over ssh would not have."""
    with Container(image, scratch, "libraries", ["lockstep", "version"]) as container:
        container.wait(60)
        output = container.output()
    found = re.findall(r"^(cuBLASLt|cuDNN|NCCL) +(\d[\d.]+)$", output, re.MULTILINE)
    check(len(found) == 3, "not all of cuBLASLt, cuDNN and NCCL can be opened", output)
    return ", ".join(" ".join(pair) for pair in found)
