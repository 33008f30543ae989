"""Processes that are started, talked to under a deadline, and always ended.

The program that uses this adopts whatever its children orphan (mpirun's ranks, compilers of torch.compile), and ends
all of it when it leaves `clean_up()`, also after Ctrl-C. Children ask the kernel to end them if it dies itself.
"""
import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import tempfile
import time

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)


class Failure(Exception):
    """A contestant failed: one line with the cause."""

    def __init__(self, text: str, exit_code: int = 1):
        super().__init__(text)
        self.exit_code = exit_code


class Interrupted(BaseException):
    """A signal asks this program to end."""

    def __init__(self, signal_number: int):
        super().__init__(signal.Signals(signal_number).name)
        self.exit_code = 128 + signal_number


def _children() -> list:
    """Processes whose parent is this one."""
    pids = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/children") as file:
            pids += [int(pid) for pid in file.read().split()]
    return pids


def _reap(known: set) -> None:
    """Collects adopted processes that have ended; those in `known` are collected by their owners."""
    for pid in _children():
        if pid not in known:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _end(known: set, grace_s: float) -> None:
    """Ends all children that are not in `known`, first politely, and their own children."""
    deadline = time.monotonic() + grace_s
    asked = set()
    while True:
        _reap(known)
        left = [pid for pid in _children() if pid not in known]
        if not left:
            return
        late = time.monotonic() > deadline
        for pid in left:
            if late or pid not in asked:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
                asked.add(pid)
        time.sleep(0.02)


@contextlib.contextmanager
def clean_up():
    """Inside it, signals arrive as Interrupted; after it, every process that was started in it has ended."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def interrupt(number, _frame):
        raise Interrupted(number)

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in signals:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in signals:
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not leave processes running
        _end(set(), grace_s=5)


# What keeps oneDNN (ours and PyTorch's), ATen with torch.compile's code, and MKL from AVX-512; and all of lockstep's kernels.
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
# For all contestants.
common = {}


def environment(extra: dict = {}) -> dict:
    """This program's environment without what would configure a contestant beside its command line, or make it
    believe that it belongs to the job in which this program was started."""
    foreign = ("LOCKSTEP_", "OMPI_COMM", "OMPI_UNIVERSE", "PMIX_", "OMP_", "KMP_", "MKL_", "DNNL_", "ONEDNN_", "TORCH",
               "GLOO_", "SLURM_")
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(foreign) and name not in ranks}
    return {**clean, "LC_ALL": "C.UTF-8", **common, **extra}


class Process:
    """A process in a session of its own, with pipes for stdin and stdout. Its last words on stderr are kept."""

    _running = {}  # by pid: what _end() shall leave to its owner

    def __init__(self, name: str, argv: list, env: dict, pass_fds=(), cores=None):
        self.name = name
        self._errors = tempfile.TemporaryFile()
        parent = os.getpid()

        def in_child():
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            if os.getppid() != parent:  # it died before the kernel was asked
                os._exit(1)
            if cores:
                os.sched_setaffinity(0, cores)

        try:
            self._process = subprocess.Popen([str(word) for word in argv], env=env, stdin=subprocess.PIPE,
                                             stdout=subprocess.PIPE, stderr=self._errors, start_new_session=True,
                                             pass_fds=pass_fds, preexec_fn=in_child)
        except OSError as error:
            raise Failure(f"{name} cannot be started: {argv[0]}: {error.strerror}") from None
        Process._running[self._process.pid] = self
        self.stdout_fd = self._process.stdout.fileno()
        self._text = b""

    def send(self, command: dict) -> None:
        with contextlib.suppress(BrokenPipeError):  # receive() says why
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()

    def receive(self, timeout_s: float, deadline: float) -> dict:
        """The next line on stdout, which is JSON. An "error" in it is a Failure, as are an end and silence until
        `deadline`, which was `timeout_s` away when the caller began to wait."""
        while b"\n" not in self._text:
            if not self._read(deadline, timeout_s):
                raise self._ended(self._wait(deadline, timeout_s))
        line, _, self._text = self._text.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError:
            raise Failure(f"{self.name} answered what is not JSON: {line[:80].decode(errors='replace')}") from None
        if "error" in answer:
            raise Failure(f"{self.name}: {answer['error']}")
        return answer

    def output(self, timeout_s: float) -> str:
        """All of stdout, once the process has ended with code 0; anything else is a Failure."""
        deadline = time.monotonic() + timeout_s
        self._process.stdin.close()
        while self._read(deadline, timeout_s):
            pass
        code = self._wait(deadline, timeout_s)
        if code != 0:
            raise self._ended(code)
        return self._text.decode(errors="replace")

    def stop(self, grace_s: float = 5) -> None:
        """Ends the process and its children."""
        if self._process.returncode is None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.terminate()
            try:
                self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        Process._running.pop(self._process.pid, None)
        self._process.stdout.close()
        self._errors.close()
        _end(set(Process._running), grace_s)

    def _read(self, deadline: float, timeout_s: float) -> bool:
        """More of stdout; False at its end."""
        if not readable([self], deadline):
            raise self._late(timeout_s)
        piece = os.read(self.stdout_fd, 1 << 16)
        self._text += piece
        return bool(piece)

    def _wait(self, deadline: float, timeout_s: float) -> int:
        try:
            return self._process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise self._late(timeout_s) from None

    def _late(self, timeout_s: float) -> Failure:
        return Failure(f"{self.name} hangs: it did not answer within {timeout_s:g} s")

    def _ended(self, code: int) -> Failure:
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        words = self._last_words()
        return Failure(f"{self.name} {how}" + (f": {words}" if words else ""), exit_code=code)

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        ours = [line for line in lines if "error: " in line and "→" in line][:1]  # said first, repeated by the launcher
        blamed = [line for line in lines if "error" in line.lower()]
        return (ours or blamed or lines or [""])[-1][:300]


def readable(processes: list, deadline: float) -> list:
    """Those of `processes` that have said something or have ended, once there are any; none at the deadline."""
    by_fd = {process.stdout_fd: process for process in processes}
    poller = select.poll()
    for fd in by_fd:
        poller.register(fd, select.POLLIN | select.POLLHUP)
    return [by_fd[fd] for fd, _ in poller.poll(max(0.0, deadline - time.monotonic()) * 1e3)]


def run(name: str, argv: list, timeout_s: float, env: dict) -> str:
    """The stdout of a process that ends by itself with code 0 within its time."""
    process = Process(name, argv, env)
    try:
        return process.output(timeout_s)
    finally:
        process.stop()
