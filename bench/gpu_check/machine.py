"""What is on this machine: its GPUs, and where NVIDIA's libraries are."""
import ctypes
import glob
import os
import pathlib
import re
import shutil
import subprocess
import sys

from harness.contestants import ROOT

CUBLASLT = ("libcublasLt.so.13", "libcublasLt.so.12")  # one of them
LIBRARIES = (*CUBLASLT, "libcudnn.so.9", "libnccl.so.2")


def _said(argv: list, timeout_s: float = 20) -> str:
    """What a command that succeeds prints: nvidia-smi complains on stdout, too."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def visible_gpus() -> list:
    """Names of those that CUDA_VISIBLE_DEVICES leaves, as far as their number goes: machines' GPUs are of one kind."""
    names, visible = gpu_names(), os.environ.get("CUDA_VISIBLE_DEVICES")
    return names if visible is None else names[:len([word for word in visible.split(",") if word.strip()])]


def gpu_names() -> list:
    """As nvidia-smi or, without it, NVML reports; none where there is no GPU or no driver."""
    if shutil.which("nvidia-smi"):
        return re.findall(r"^GPU \d+: (.*?)(?: \(UUID.*)?$", _said(["nvidia-smi", "-L"]), re.MULTILINE)
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    count = ctypes.c_uint(0)
    if nvml.nvmlInit_v2() != 0 or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return []
    names = []
    for index in range(count.value):
        device, name = ctypes.c_void_p(), ctypes.create_string_buffer(96)
        nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device))
        nvml.nvmlDeviceGetName(device, name, len(name))
        names.append(name.value.decode(errors="replace"))
    return names


def packages_with_libraries() -> list:
    """Directories of Python packages that carry NVIDIA's libraries, as PyTorch's do."""
    places = _said(["python3", "-c", "import sys; print('\\n'.join(p for p in sys.path if p.endswith('-packages')))"])
    return [path for place in places.splitlines() for path in sorted(glob.glob(f"{place}/nvidia/*/lib"))]


def library_directories() -> dict:
    """For those of LIBRARIES that the loader would not find by itself: where they are, or None."""
    cached = {line.split()[0] for line in _said(["ldconfig", "-p"]).splitlines() if "=>" in line}
    known = [p for p in os.environ.get("LD_LIBRARY_PATH", "").split(":") if p]
    places = ["/usr/local/cuda/lib64", "/usr/local/cuda/targets/x86_64-linux/lib", "/usr/lib/x86_64-linux-gnu",
              "/usr/local/nvidia/lib64", *sorted(glob.glob(f"{ROOT}/.cache/cuda/nvidia/*/lib"))]
    found, packages = {}, None
    for name in LIBRARIES:
        if name in cached or any(os.path.exists(f"{place}/{name}") for place in known):
            continue
        where = next((place for place in places if os.path.exists(f"{place}/{name}")), None)
        if where is None:
            packages = packages_with_libraries() if packages is None else packages
            where = next((place for place in packages if os.path.exists(f"{place}/{name}")), None)
        found[name] = where
    for one, other in (CUBLASLT, reversed(CUBLASLT)):
        if found.get(one, "") is None and found.get(other, "") is not None:
            del found[one]
    return found


def library_path() -> str:
    """For LD_LIBRARY_PATH: what the environment has, and what is missing there. Where a library is a Python package's,
    so are those that it opens itself (cuDNN's parts, NVRTC)."""
    extra = [place for place in library_directories().values() if place]
    if any("/site-packages/" in place or "/dist-packages/" in place for place in extra):
        extra += packages_with_libraries()
    known = [p for p in os.environ.get("LD_LIBRARY_PATH", "").split(":") if p]
    return ":".join(dict.fromkeys(known + extra))


def facts() -> dict:
    with open("/proc/meminfo") as file:
        memory = int(re.search(r"MemTotal:\s+(\d+)", file.read())[1]) * 1024
    with open("/proc/cpuinfo") as file:
        cpu = re.search(r"model name\s*: (.*)", file.read())
    release = pathlib.Path("/etc/os-release")
    system = re.search(r'PRETTY_NAME="?([^"\n]*)', release.read_text() if release.exists() else "")
    return {"system": system[1] if system else "unknown", "kernel": os.uname().release,
            "cpu": cpu[1] if cpu else "unknown", "processors": len(os.sched_getaffinity(0)), "memory_bytes": memory,
            "python": sys.version.split()[0]}


def nvidia_smi() -> dict:
    """A part of nvidia-smi -q, of each GPU, as it names things."""
    fields = ("name,driver_version,pci.bus_id,compute_cap,memory.total,memory.used,temperature.gpu,pstate,power.draw,"
              "power.limit,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,ecc.mode.current,mig.mode.current,"
              "compute_mode,persistence_mode")
    rows = _said(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]).strip().splitlines()
    return {"fields": fields.split(","), "gpus": [[cell.strip() for cell in row.split(",")] for row in rows]}
