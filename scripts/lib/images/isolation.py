"""A program's own mount and process namespaces, in which whatever it makes ends with it.

Mounts, network namespaces without names and processes of any depth are gone when the first process in there has ended,
however it went, kill -9 included. What is left for the outside to remove is one directory.
"""
import contextlib
import ctypes
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def die_with_parent() -> None:
    """For `preexec_fn`: the kernel kills the child when the thread that started it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class _Ended(BaseException):
    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


def _remove(directory: pathlib.Path) -> None:
    # The last processes in there may still be dying, and hold files open for a moment.
    for _ in range(100):
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return
        time.sleep(0.1)
    print(f"try-images: {directory} could not be removed", file=sys.stderr)


def run_isolated(arguments: list) -> int:
    """Runs this program again with `--inside SCRATCH` before `arguments`, in namespaces of its own, and removes SCRATCH.
    Returns its exit code, or 128 + n after signal n. Needs root."""
    scratch = pathlib.Path(tempfile.mkdtemp(prefix="lockstep-images-"))

    def end(number, _frame):
        raise _Ended(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    child = None
    try:
        child = subprocess.Popen(
            ["unshare", "--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc", sys.executable, "-B",
             sys.argv[0], "--inside", str(scratch), *arguments],
            stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_parent)
        return child.wait()
    except _Ended as ended:
        print("try-images: " + signal.Signals(ended.number).name + ": cleaning up", file=sys.stderr)
        return 128 + ended.number
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
            child.wait()
        _remove(scratch)
