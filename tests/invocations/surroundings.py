"""Alterations of an invocation's environment, descriptors, limits, and signals to it. As those of words.py."""
import os
import resource
import signal

from case import ANYTHING, SAME

VARIABLES = {
    "OMP_NUM_THREADS": ["0", "-1", "1", "2", "999999", "abc", "", "1,2"], "OMP_THREAD_LIMIT": ["1", "0", "2", "x"],
    "OMP_DYNAMIC": ["true", "x"], "OMP_MAX_ACTIVE_LEVELS": ["0", "x"],
    "OMP_STACKSIZE": ["1", "1k", "10G", "x", "64k"], "OMP_PROC_BIND": ["true", "close", "x"],
    "OMP_PLACES": ["cores", "{0}", "{99}", "x"], "OMP_SCHEDULE": ["dynamic", "x"],
    "OMP_WAIT_POLICY": ["active", "passive", "x"], "OMP_CANCELLATION": ["true"],
    "OMP_DISPLAY_ENV": ["true", "verbose"], "GOMP_SPINCOUNT": ["0", "infinite", "x"],
    "GOMP_CPU_AFFINITY": ["0", "99", "x"], "GOMP_STACKSIZE": ["1", "x"], "ONEDNN_VERBOSE": ["1"],
    "ONEDNN_MAX_CPU_ISA": ["SSE41", "AVX2", "x", ""], "ONEDNN_DEFAULT_FPMATH_MODE": ["BF16", "x"],
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": ["0", "-1", "x"], "ONEDNN_JIT_DUMP": ["0"], "DNNL_VERBOSE": ["2"],
    "TMPDIR": ["/proc/nowhere", "", "/dev/null", "relative", "/" + "x" * 300, "/proc"],
    "HOME": [None, "", "/proc/nowhere"], "LANG": ["de_DE.UTF-8", "x", "", "C", "tr_TR.UTF-8"],
    "LC_ALL": ["de_DE.UTF-8", "POSIX", "x", "tr_TR"], "LC_NUMERIC": ["de_DE.UTF-8"],
    "PATH": [None, "", "/proc/nowhere"], "TERM": ["", "dumb", "x"], "COLUMNS": ["0", "-1", "x", "1", "99999"],
    "TZ": ["x", ""], "USER": [None, "", "a/b", "x" * 300], "LD_BIND_NOW": ["1"], "MALLOC_ARENA_MAX": ["1"],
    "MALLOC_PERTURB_": ["165"], "GLIBC_TUNABLES": ["glibc.malloc.check=3", "x"], "PYTHONPATH": ["x"],
    "XDG_CACHE_HOME": ["/proc/nowhere", ""], "NO_COLOR": ["1"], "RANK": ["0", "1", "-1", "x", "", "99"],
    "WORLD_SIZE": ["1", "2", "0", "-1", "x", ""], "LOCAL_RANK": ["0", "3", "x", "-1"],
    "LOCAL_WORLD_SIZE": ["1", "0", "x", "4"],
    "MASTER_ADDR": ["", "no.such.host.invalid", "127.0.0.1", "x y", "::1", "256.1.1.1"],
    "MASTER_PORT": ["0", "-1", "70000", "x", "", "1"], "GROUP_RANK": ["0"], "TORCHELASTIC_RUN_ID": ["x"],
    "PMI_SIZE": ["2", "1", "x"], "PMI_RANK": ["0", "1", "x"], "PMI_FD": ["3"], "PMIX_RANK": ["0"],
    "PMIX_NAMESPACE": ["x"], "SLURM_PROCID": ["0", "1", "x"], "SLURM_NTASKS": ["2", "1", "x"], "SLURM_JOB_ID": ["5"],
    "SLURM_LOCALID": ["0"], "SLURM_STEP_ID": ["0"], "OMPI_COMM_WORLD_RANK": ["0", "x"],
    "OMPI_COMM_WORLD_SIZE": ["2", "x", "1"], "MPI_LOCALNRANKS": ["2"], "JSM_NAMESPACE_RANK": ["0"],
    "MV2_COMM_WORLD_RANK": ["0"], "FLUX_TASK_RANK": ["0"], "PALS_RANKID": ["0"],
    "LOCKSTEP_BATCH": ["4", "x", "", "-1"], "LOCKSTEP_EPOCS": ["1"], "LOCKSTEP_LR": ["0.1", "nan", "1e999"],
    "LOCKSTEP_DATA": ["x"], "LOCKSTEP_JOB_SECRET": ["x", "", "0123456789abcdef0123456789abcdef", "x" * 5000],
    "LOCKSTEP_BIND": ["x", "none", "core", ""], "LOCKSTEP_SHM_SOCKETS": ["x", "auto", "2", "-1"],
    "LOCKSTEP_SOCKET_IFNAME": ["x", "lo", "^lo", ""], "LOCKSTEP_LISTEN": ["x", "0.0.0.0", "::", ""],
    "LOCKSTEP_FLIGHT_DIR": ["/proc/nowhere", "", "."], "LOCKSTEP_STATUS_FD": ["99", "x", "-1", "1"],
    "LOCKSTEP_LAUNCHER": ["x", "", "unix:/proc/nowhere"], "LOCKSTEP_ATTEMPT": ["x", "3", "-1"],
    "LOCKSTEP_CHECKPOINT_STEP": ["x", "9", "-1"], "LOCKSTEP_HOST_NAME": ["x", "", "a b"], "LOCKSTEP_JOB": ["x"],
    "LOCKSTEP_SHM_DIR": ["/proc/nowhere", ""], "LOCKSTEP_THREADS": ["2", "0"],
    "LOCKSTEP_CONFIG": ["none.toml", "run.toml"], "LOCKSTEP_": ["x"],
    "LOCKSTEP_QUIET": ["1", "yes", "maybe", "false", ""], "CUDA_VISIBLE_DEVICES": ["0", "-1", "x", None],
    "CUDA_DEVICE_ORDER": ["x"], "NCCL_DEBUG": ["INFO", "x"],
}


def set_variable(case, drawn):
    name = drawn.choice(sorted(VARIABLES))
    value = drawn.choice(VARIABLES[name])
    case.environment.pop(name, None)
    if value is not None:
        case.environment[name] = value
    elif name == "CUDA_VISIBLE_DEVICES":
        case.environment[name] = ""
    if name in ("WORLD_SIZE", "RANK", "MASTER_ADDR"):
        case.environment.setdefault("LOCKSTEP_TIMEOUT_SECONDS", "2")
    harmless = name.startswith(("OMP_", "GOMP", "ONEDNN_P", "ONEDNN_J", "LC_", "LANG", "TERM", "COLUMNS", "TZ", "USER",
                                "MALLOC",
                                "GLIBC", "PYTHON", "NO_COLOR", "LD_", "HOME", "XDG", "GROUP_RANK", "TORCHELASTIC"))
    case.did(f"{name}={value if value is None else value[:40]!r}", SAME if harmless else ANYTHING)


LAUNCHERS = [
    {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
    {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, {"WORLD_SIZE": "2"}, {"RANK": "0"},
    {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
    {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "1"}, {"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_FD": "7"},
    {"PMI_RANK": "1", "PMI_SIZE": "2"}, {"PMI_SIZE": "1", "PMI_RANK": "0"},
    {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "1"},
    {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
    {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2"}, {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
    {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, {"OMPI_COMM_WORLD_RANK": "0"},
    {"PMIX_RANK": "0", "PMIX_NAMESPACE": "x"}, {"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2"},
    {"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"},
    {"LOCKSTEP_LAUNCHER": "unix:/proc/nowhere", "RANK": "0", "WORLD_SIZE": "2"},
    {"LOCKSTEP_LAUNCHER": "x", "LOCKSTEP_JOB": "/proc/nowhere"}, {"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "2"},
    {"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "2"}, {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"},
    {"PALS_RANKID": "0", "PALS_SIZE": "2"},
]


def other_launcher(case, drawn):
    variables = dict(drawn.choice(LAUNCHERS))
    if drawn.random() < 0.3:
        variables.pop(drawn.choice(sorted(variables)))
    case.environment.update(variables)
    case.environment.setdefault("LOCKSTEP_TIMEOUT_SECONDS", "2")
    case.did("in the environment " + " ".join(f"{name}={value}" for name, value in variables.items()))


def spoil_descriptor(case, drawn):
    which = drawn.choice(["stderr a terminal", "stdin closed", "stdin a directory", "stdout closed", "stdout full",
                          "stdout gone", "stderr closed", "stderr full",
                          "stderr gone"])
    name, what = which.split(" ", 1)
    setattr(case, name, what.split()[-1])
    case.terminal = drawn.choice([(24, 80), (0, 0), (1, 1), (2, 20000)])
    case.did(which, SAME if name != "stdout" else ANYTHING)


LIMITS = {"NOFILE": [3, 8, 16, 24, 64], "AS": [1 << 26, 1 << 28, 1 << 29, 1 << 30], "FSIZE": [0, 100, 5000],
          "STACK": [1 << 16, 1 << 18, 1 << 20],
          "MEMLOCK": [0], "CORE": [0], "DATA": [1 << 24, 1 << 27], "NPROC": [0, 1], "SIGPENDING": [0], "NICE": [0]}


def set_limit(case, drawn):
    name = drawn.choice(sorted(LIMITS))
    value = drawn.choice(LIMITS[name])
    case.limits.append((getattr(resource, f"RLIMIT_{name}"), value))
    if name == "NPROC":  # no limit of root's
        case.user = 65534 if os.geteuid() == 0 else 0
    case.did(f"ulimit {name} {value}", SAME)


def surroundings(case, drawn):
    def of_nobody():
        if os.geteuid() == 0:
            case.user = 65534

    ways = {
        "umask 777": lambda: setattr(case, "umask", 0o777),
        "in a directory that is gone": lambda: ((case.directory / "gone").mkdir(), setattr(case, "work", "gone")),
        "in a directory that may not be written": lambda: (case.directory.chmod(0o555), of_nobody()),
        "without a home": lambda: case.environment.pop("HOME", None),
        "with an environment of one variable": lambda: (case.environment.clear(),
                                                        case.environment.update({"CUDA_VISIBLE_DEVICES": ""})),
    }
    way = drawn.choice(sorted(ways))
    ways[way]()
    case.did(way)


def strange_input(case, drawn):
    """Of what it reads from standard input."""
    if not case.stdin or not isinstance(case.stdin, bytes):
        return False
    case.stdin = drawn.choice([b"", b"\n", b"\n\n\n", b"\0", b"a\0b\n", b"caf\xe9\n", b"\xff\xfe", b"\xef\xbb\xbfa\n",
                               b"a\r\nb\r\n", b"x " * 20000,
                               b"[MASK] " * 30, "\U0001f600\u4e2d\u0301\n".encode(), b"[CLS] [SEP] [PAD]\n", b"a" * 3000, b" \t "])
    case.did(f"{case.stdin[:40]!r} on standard input")


def end_early(case, drawn):
    case.signal = drawn.choice([signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1,
                                signal.SIGQUIT]), drawn.uniform(0, 0.12)
    if "--steps" in case.words[:-1]:
        case.words[case.words.index("--steps") + 1] = "100000000"
    case.did(f"{case.signal[0].name} after {case.signal[1]:.3f} s")
