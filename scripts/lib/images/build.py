"""Builds the Dockerfiles without an engine: buildah, in a chroot, with a storage of its own, and a base image made by
debootstrap. Nothing but Debian's mirrors is asked for anything."""
import json
import os
import pathlib
import shutil
import subprocess

from .container import Failure, Image, check, run

# What Debian's own slim image leaves out of a minimal system: manuals, translations, and what apt keeps.
_SLIM = ("usr/share/man", "usr/share/info", "usr/share/locale", "usr/share/doc", "usr/share/doc-base",
         "usr/share/lintian", "usr/share/linda", "var/lib/apt/lists", "var/cache/apt", "var/log")
MIRROR = "http://deb.debian.org/debian"


class Builder:
    """Images under names of this builder's own. `scratch`: a directory with space for a few times their size."""

    def __init__(self, source: pathlib.Path, scratch: pathlib.Path):
        self.source, self.scratch = source, scratch
        policy = scratch / "policy.json"
        policy.write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
        (scratch / "tmp").mkdir()
        self._options = ["--root", str(scratch / "storage"), "--runroot", str(scratch / "run"), "--storage-driver", "vfs"]
        self._policy = ["--signature-policy", str(policy)]
        self._environment = {**os.environ, "TMPDIR": str(scratch / "tmp"), "BUILDAH_ISOLATION": "chroot"}

    def _buildah(self, command: str, *arguments: str, timeout_s: float = 120) -> str:
        return run(["buildah", *self._options, command, *arguments], timeout_s=timeout_s, env=self._environment)

    def base(self, suite: str) -> Image:
        """The image `localhost/base`, as close to Debian's slim image as debootstrap gets."""
        context = self.scratch / "base"
        root = context / "root"
        root.mkdir(parents=True)
        run(["debootstrap", "--variant=minbase", suite, str(root), MIRROR], timeout_s=900)
        for place in _SLIM:
            for entry in (root / place).iterdir() if (root / place).is_dir() else ():
                if place == "usr/share/doc":  # licences stay
                    for file in entry.rglob("*") if entry.is_dir() else ():
                        if file.name != "copyright" and not file.is_dir():
                            file.unlink()
                elif entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()
        subprocess.run(["tar", "-C", str(root), "--exclude=./dev/*", "--exclude=./proc/*", "-cf",
                        str(context / "base.tar"), "."], check=True)
        shutil.rmtree(root)
        (context / "Containerfile").write_text('FROM scratch\nADD base.tar /\nCMD ["bash"]\n')
        self._buildah("bud", *self._policy, "--tag", "localhost/base", str(context), timeout_s=300)
        shutil.rmtree(context)
        return self.unpack("localhost/base")

    def build(self, dockerfile: str, tag: str, arguments: dict, contexts: dict | None = None,
              timeout_s: float = 2 * 3600) -> Image:
        command = ["--pull=never", "--network", "host", "--file", str(self.source / dockerfile), "--tag", f"localhost/{tag}"]
        for name, value in arguments.items():
            command += ["--build-arg", f"{name}={value}"]
        for name, value in (contexts or {}).items():
            command += ["--build-context", f"{name}={value}"]
        self._buildah("bud", *self._policy, *command, str(self.source), timeout_s=timeout_s)
        return self.unpack(f"localhost/{tag}")

    def unpack(self, tag: str) -> Image:
        """Its tree on this disk, to be read only, and its configuration."""
        container = self._buildah("from", *self._policy, "--pull=never", tag).strip().splitlines()[-1]
        root = pathlib.Path(self._buildah("mount", container).strip().splitlines()[-1])
        check(root.is_dir(), f"buildah mount said {root}")
        described = self._buildah("inspect", "--type", "image", tag)
        try:
            config = json.loads(described)["OCIv1"]["config"]
        except (ValueError, KeyError) as error:
            raise Failure(f"buildah inspect: {error!r}", described) from None
        return Image(root, config)


def size_bytes(root: pathlib.Path) -> int:
    """What its files hold, hard links counted once: the size of a layer before compression."""
    return int(run(["du", "--summarize", "--bytes", "--one-file-system", str(root)], timeout_s=120).split()[0])
