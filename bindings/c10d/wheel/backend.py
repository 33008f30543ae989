"""scikit-build-core, which gets the version from lockstep's CMakeLists.txt, and puts lockstep's own sources, which in a clone
are outside of this directory, into a source distribution."""
import contextlib
import pathlib
import re
import shutil

import scikit_build_core.build as core
from scikit_build_core.build import *  # noqa: F401, F403: the hooks of PEP 517

HERE = pathlib.Path(__file__).resolve().parents[1]
OWN = HERE / "lockstep"  # of a source distribution; in a clone, what one that was interrupted has left
IS_SDIST = (HERE / "PKG-INFO").exists()
CLONE = HERE.parents[1]
# What the component comm is built from, and this package.
PARTS = ("CMakeLists.txt", "LICENSE", "cmake", "base", "devices", "comm", "include/lockstep/base", "include/lockstep/comm",
         "include/lockstep/comm.h", "bindings/c10d")


def dynamic_metadata(settings, project):
    lists = (OWN if IS_SDIST else CLONE) / "CMakeLists.txt"
    if lists.exists():
        return {"version": re.search(r"project\(lockstep VERSION ([\d.]+)", lists.read_text())[1]}
    # Installed: share/lockstep/bindings/c10d.
    for file in sorted(HERE.parents[3].glob("lib*/**/lockstep_comm.pc")):
        return {"version": re.search(r"^Version: ([\d.]+)$", file.read_text(), re.MULTILINE)[1]}
    raise RuntimeError(f"there is no lockstep at {CLONE} → build this package in a clone, or in an installed lockstep")


@contextlib.contextmanager
def lockstep_within():
    if IS_SDIST:
        yield
        return
    if not (CLONE / "comm/CMakeLists.txt").exists():
        raise RuntimeError("a source distribution is made in a clone of lockstep, not in an installed one")
    shutil.rmtree(OWN, ignore_errors=True)
    try:
        for part in PARTS:
            source, target = CLONE / part, OWN / part
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("lockstep", "wheel", "__pycache__")
                                if source == HERE else None)
            else:
                shutil.copy(source, target)
        yield
    finally:
        shutil.rmtree(OWN, ignore_errors=True)


def build_sdist(directory, settings=None):
    with lockstep_within():
        return core.build_sdist(directory, settings)
