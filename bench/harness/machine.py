"""What the figures were measured on."""
import datetime
import os
import platform
import re
import subprocess

from harness.contestants import ROOT, Settings, usable_cores
from harness.processes import environment, run


def _first(path: str, pattern: str, otherwise: str = "unknown") -> str:
    try:
        with open(path) as file:
            found = re.search(pattern, file.read(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else otherwise


BUSY = 0.5  # a load average above which figures are not to be relied on


def load_average() -> float:
    """Of the last minute: how many processes wanted a core, this one's contestants included."""
    return os.getloadavg()[0]


def describe() -> dict:
    """The machine; sizes in bytes."""
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": _first("/proc/cpuinfo", r"^model name\s*:(.*)$"),
        "cpu_family": _first("/proc/cpuinfo", r"^cpu family\s*:(.*)$"),
        "cpu_model": _first("/proc/cpuinfo", r"^model\s*:(.*)$"),
        "cores": len(usable_cores()),
        "memory_bytes": 1024 * int(_first("/proc/meminfo", r"^MemTotal:\s*(\d+)", "0")),
        "kernel": f"{platform.system()} {platform.release()}",
        "system": _first("/etc/os-release", r'^PRETTY_NAME="?([^"\n]*)'),
    }


def versions(settings: Settings) -> dict:
    """By name, as `lockstep version` gives them, and the sources' revision."""
    lines = run("lockstep version", [settings.lockstep, "version"], settings.timeout_s, environment()).splitlines()
    told = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in lines if re.search(r"\S\s{2,}\S", line))
    try:
        revision = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty", "--abbrev=12"], text=True,
                                  capture_output=True).stdout.strip()
    except OSError:
        revision = ""
    # "Open MPI v4.1.4, package: …" and "2.6.3 (computes with …)"
    mpi = re.sub(r"^Open MPI v?", "", told.get("MPI", "none").split(",")[0])
    return {"lockstep": told.get("lockstep", "unknown"), "sources": revision or "unknown",
            "compiler": told.get("build", "unknown"), "Open MPI": mpi, "oneDNN": told.get("oneDNN", "unknown")}


def in_words(machine: dict) -> str:
    gib = machine["memory_bytes"] / 2**30
    return (f"{machine['cpu']} (family {machine['cpu_family']}, model {machine['cpu_model']}), {machine['cores']} "
            f"cores, {gib:.0f} GiB, {machine['system']}, {machine['kernel']}")
