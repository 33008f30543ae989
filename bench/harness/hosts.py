"""Hosts that are network namespaces of this machine (bench/hosts/netns), and ranks on them. Takes root."""
import contextlib
import ctypes
import json
import os
import random
import secrets
import socket

from harness.contestants import ROOT
from harness.processes import Failure, Process, environment, run

NETNS = ROOT / "bench/hosts/netns"
NAME = "lscmp"


def address(host: int) -> str:
    return f"10.213.77.{host + 1}"


def on_host(host: int, argv: list) -> list:
    return [NETNS, "--name", NAME, "exec", host, *argv]


@contextlib.contextmanager
def hosts(count: int, rate: str):
    if os.geteuid() != 0:
        raise Failure("network namespaces take root → the same command with sudo")
    env = environment()
    run("netns", [NETNS, "--name", NAME, "up", count, rate], 30, env)
    try:
        yield
    finally:
        run("netns", [NETNS, "--name", NAME, "down"], 30, env)


def listen_on(host: int) -> socket.socket:
    """A socket that listens on a host, made by a process that is not there."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/ns/net") as here, open(f"/run/netns/{NAME}{host}") as there:
        if libc.setns(there.fileno(), 0) != 0:
            raise Failure(f"cannot enter {NAME}{host}: {os.strerror(ctypes.get_errno())}")
        try:
            return socket.create_server((address(host), 0), backlog=128)
        finally:
            libc.setns(here.fileno(), 0)


class Ranks:
    """One process per host, started together; what each prints as its last line is JSON."""

    def __init__(self, name: str, count: int, timeout_s: float):
        self.name, self._count, self._timeout_s = name, count, timeout_s
        self._secret = secrets.token_hex(16)

    def run(self, argv: list) -> list:
        port = random.randrange(20000, 29000)
        processes = []
        try:
            for rank in range(self._count):
                env = environment({"RANK": str(rank), "WORLD_SIZE": str(self._count), "LOCAL_RANK": "0",
                                   "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": address(0), "MASTER_PORT": str(port),
                                   "LOCKSTEP_JOB_SECRET": self._secret})
                cores = sorted(os.sched_getaffinity(0))
                share = [cores[rank]] if self._count <= len(cores) else None
                processes.append(Process(f"{self.name}, rank {rank}", on_host(rank, argv), env, cores=share))
            texts = [process.output(self._timeout_s) for process in processes]
        finally:
            for process in processes:
                process.stop()
        return [json.loads(text.strip().splitlines()[-1]) if text.strip() else None for text in texts]
