"""Where the program and its tests come from: what scripts/pack-for-gpu has packed, or a build on this machine."""
import json
import os
import pathlib
import shutil
import subprocess
import tarfile

from gpu_check import sources
from harness.cli import say
from harness.contestants import ROOT
from harness.processes import Failure

PLACE = ROOT / ".gpu"
FLAGS = ["-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"]
ARCHIVE = PLACE / "lockstep-gpu.tar.xz"


def unpack() -> None:
    """The archive, where there is one that has not been unpacked as a whole."""
    if not ARCHIVE.exists():
        return
    stamp, found = PLACE / "unpacked", ARCHIVE.stat()
    this_one = f"{found.st_size} {found.st_mtime_ns}\n"
    if stamp.exists() and stamp.read_text() == this_one:
        return
    say(f"unpacking {ARCHIVE.relative_to(ROOT)}")
    stamp.unlink(missing_ok=True)
    for old in ("build", "prefix", "bin", "nvidia"):
        shutil.rmtree(PLACE / old, ignore_errors=True)
    try:
        with tarfile.open(ARCHIVE) as archive:
            if hasattr(tarfile, "tar_filter"):
                archive.extractall(PLACE, filter="tar")
            else:
                archive.extractall(PLACE)
    except (tarfile.TarError, EOFError, OSError) as error:  # also where Python was built without xz
        raise Failure(f"{ARCHIVE.relative_to(ROOT)} cannot be unpacked: {error} → copy it anew, or unpack it with tar") \
            from None
    stamp.write_text(this_one)


def packed() -> dict:
    stamp = PLACE / "packed.json"
    return json.loads(stamp.read_text()) if stamp.exists() else {}


def why_it_does_not_start(program: pathlib.Path) -> str:
    """Empty where it does: a program that was built on a newer system asks for libraries that this one may not have."""
    try:
        run = subprocess.run([program, "version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                             timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    said = run.stderr.strip().splitlines() or [f"it ended with {run.returncode}"]
    return "" if run.returncode == 0 else said[0]


def choose(build, no_build: bool) -> tuple:
    """The directory that holds the program, and in words how it came to be."""
    unpack()
    package = packed()
    if build is None and package.get("programs"):
        current = sources.digest(ROOT)
        if package.get("sources") == current or no_build:
            differs = "" if package.get("sources") == current else ", whose sources are not those of this checkout"
            why = why_it_does_not_start(PLACE / "build" / "lockstep")
            if not why:
                return PLACE / "build", f"packed by scripts/pack-for-gpu at {package.get('revision')}{differs}"
            if no_build:
                raise Failure(f"the packed program does not start here: {why} → leave --no-build out")
            say(f"the packed program does not start here ({why}): building with this machine's libraries")
            package = {**package, "libraries_fit": False}
        else:
            say("what is packed was built from other sources: building")
    directory = build or (ROOT / "build-gpu" if package else ROOT / "build")
    if not no_build:
        make(directory, package)
    if not os.access(directory / "lockstep", os.X_OK):
        raise Failure(f"lockstep is not built: no {directory}/lockstep → leave --no-build out, or say --build DIR")
    return directory, f"built on this machine in {directory.name}"


def cmake_flags(package: dict) -> list:
    """With what is packed in place of installed packages, unless it is for a newer system than this one."""
    flags = FLAGS
    nvidia = [f"-DNCCL_INCLUDE_DIR={PLACE}/nvidia/include", f"-DCUDNN_INCLUDE_DIR={PLACE}/nvidia/include",
              f"-DCUDNN_FRONTEND_INCLUDE_DIR={PLACE}/nvidia/cudnn-frontend/include"]
    if not package.get("libraries_fit", True):
        return [*flags, *nvidia]
    prefix, libraries = PLACE / "prefix/usr", PLACE / "prefix/usr/lib" / package["multiarch"]
    places = f"{libraries},-rpath,{libraries}/openmpi/lib"
    # Headers that differ from one architecture to another lie apart, where only a system's compiler looks by itself.
    apart = [f"-DCMAKE_{language}_STANDARD_INCLUDE_DIRECTORIES={prefix}/include/{package['multiarch']}"
             for language in ("C", "CXX", "CUDA")]
    return [*flags, *nvidia, *apart, f"-DCMAKE_PREFIX_PATH={prefix}", f"-DCMAKE_LIBRARY_ARCHITECTURE={package['multiarch']}",
            f"-DMPI_C_COMPILER={PLACE}/bin/mpicc",
            f"-DCMAKE_EXE_LINKER_FLAGS=-Wl,--disable-new-dtags,-rpath,{places}"]


def soft(directory: pathlib.Path, no_build: bool) -> pathlib.Path:
    """A build that has the program on GPUs in software, and the tests that need a GPU."""
    if not (directory / "build.ninja").exists():
        raise Failure(f"{directory} is no build → scripts/test makes one")
    if not no_build:
        say(f"building in {directory.name}")
        with open(directory / "gpu-check.log", "w") as log:
            _run(["cmake", "--build", str(directory), "--target", "lockstep_soft", "gpu_tests"], log)
    if not os.access(directory / "tests/soft/lockstep", os.X_OK):
        raise Failure(f"the program on GPUs in software is not built: no {directory}/tests/soft/lockstep → build with CUDA")
    return directory


def blamed(log) -> str:
    """The line of a build's log that says why it failed."""
    lines = pathlib.Path(log.name).read_text(errors="replace").splitlines()
    found = [line for line in lines if "error:" in line.lower()] or [line for line in lines if "FAILED" in line]
    return (found or lines or ["?"])[0]


def _run(argv: list, log) -> None:
    if subprocess.run(argv, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL).returncode != 0:
        log.flush()
        raise Failure(f"`{argv[0]} {argv[1]} …` failed: {blamed(log)} → {log.name}")


# As scripts/test does it: with what this machine has, and what can be fetched.
_SCRIPT = """set -euo pipefail
source "$1/scripts/lib/deps.sh"
source "$1/scripts/lib/build.sh"
source "$1/scripts/lib/cuda.sh"
build=$2
install_packages "${lockstep_packages[@]}"
provide_cuda
build_targets lockstep gpu_tests
"""


def make(directory: pathlib.Path, package: dict) -> None:
    """The program, and the tests that need a GPU."""
    directory.mkdir(exist_ok=True)
    with open(directory / "gpu-check.log", "w") as log:
        say(f"building in {directory.name} (its log: {log.name})")
        if not package:
            _run(["bash", "-c", _SCRIPT, "bash", str(ROOT), str(directory)], log)
            return
        for tool in ("cmake", "ninja"):
            if not shutil.which(tool):
                raise Failure(f"{tool} is not installed → scripts/pack-for-gpu on another machine brings a built program")
        if not (directory / "build.ninja").exists():
            _run(["cmake", "-S", str(ROOT), "-B", str(directory), *cmake_flags(package)], log)
        _run(["cmake", "--build", str(directory), "--target", "lockstep", "gpu_tests"], log)
