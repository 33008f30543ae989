"""The first process of a container: makes its mounts, makes the tree read-only, and becomes the command."""
import json
import os
import pathlib
import subprocess


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def enter(spec_text: str) -> None:
    """`spec_text`: JSON with root, name, tmp, shm (size of /dev/shm), binds (place in the container → path)
    and command. Never returns."""
    spec = json.loads(spec_text)
    root = pathlib.Path(spec["root"])
    _mount("--make-rprivate", "/")
    _mount("--bind", str(root), str(root))
    for place, source in spec["binds"].items():  # mount points are made while the tree can still be written
        point = root / place.lstrip("/")
        if os.path.isdir(source):
            point.mkdir(parents=True, exist_ok=True)
        elif not point.exists():
            point.parent.mkdir(parents=True, exist_ok=True)
            point.touch()
    _mount("-o", "remount,bind,ro", str(root))
    _mount("-t", "proc", "proc", str(root / "proc"))
    _mount("--rbind", "/sys", str(root / "sys"))
    _mount("-t", "tmpfs", "-o", "mode=755,size=64k", "tmpfs", str(root / "dev"))
    for device in ("null", "zero", "full", "random", "urandom"):
        (root / "dev" / device).touch()
        _mount("--bind", f"/dev/{device}", str(root / "dev" / device))
    for link, target in (("fd", "/proc/self/fd"), ("stdin", "/proc/self/fd/0"), ("stdout", "/proc/self/fd/1"),
                         ("stderr", "/proc/self/fd/2"), ("ptmx", "pts/ptmx")):
        (root / "dev" / link).symlink_to(target)
    (root / "dev/pts").mkdir()
    _mount("-t", "devpts", "-o", "newinstance,ptmxmode=666,mode=620", "devpts", str(root / "dev/pts"))
    (root / "dev/shm").mkdir()
    _mount("-t", "tmpfs", "-o", f"mode=1777,size={spec['shm']}", "tmpfs", str(root / "dev/shm"))
    if spec["tmp"]:
        _mount("-t", "tmpfs", "-o", "mode=1777,size=256m", "tmpfs", str(root / "tmp"))
    for place, source in spec["binds"].items():
        _mount("--bind", source, str(root / place.lstrip("/")))
    subprocess.run(["hostname", spec["name"]], check=True)
    os.chroot(root)
    os.chdir("/")
    os.execv(spec["command"][0], spec["command"])
