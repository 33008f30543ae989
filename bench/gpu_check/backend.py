"""PyTorch's backend "lockstep" on GPUs: its operations, and PyTorch's own DDP and FSDP2 over it. It is compiled for the PyTorch of
this machine while other sections run."""
import json
import shutil
import signal
import subprocess

from gpu_check import build, peers
from gpu_check.check import Check, Skip
from harness.contestants import ROOT
from harness.processes import Failure

PROGRAMS = ROOT / "tests/install/c10d"
PACKAGE = ROOT / "bindings/c10d"
# DDP over lockstep and over Gloo: the same sums in another order. FSDP2 computes each layer from gathered parameters.
MOST_OFF = {"ddp": 1e-5, "sharded": 1e-4}


class Backend:
    def __init__(self, check: Check):
        self.site, self._why, self._build = check.scratch / "c10d-site", peers.why_missing(), None
        if self._why:
            return
        made = check.scratch / "c10d"
        definitions = ["-DSKBUILD_PROJECT_VERSION=0", f"-DCMAKE_INSTALL_PREFIX={self.site}"]
        package = build.packed()
        flags = build.FLAGS
        if package:  # its libraries find theirs, too
            libraries = build.PLACE / "prefix/usr/lib" / package["multiarch"]
            flags = [*build.cmake_flags(package), f"-DCMAKE_INSTALL_RPATH={libraries}",
                     "-DCMAKE_MODULE_LINKER_FLAGS=-Wl,--disable-new-dtags"]
        self._log = open(check.scratch / "c10d.log", "w")
        script = ('cmake -S "$1" -B "$2" "${@:3}" -DPython_EXECUTABLE="$(command -v python3)" && cmake --build "$2" && '
                  'cmake --install "$2"')
        self._build = subprocess.Popen(["bash", "-c", script, "bash", PACKAGE, made, *flags, *definitions],
                                       stdout=self._log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                       start_new_session=True)

    def wait(self, limit_s: float) -> str:
        """Why it is not there; empty where it is."""
        if self._build is None:
            return self._why
        try:
            code = self._build.wait(max(1.0, limit_s))
        except subprocess.TimeoutExpired:
            self.stop()
            raise Failure(f"it was not compiled in {limit_s:.0f} s") from None
        if code != 0:
            raise Failure(f"it cannot be compiled: {build.blamed(self._log)}")
        shutil.copytree(PACKAGE / "lockstep_c10d", self.site / "lockstep_c10d", dirs_exist_ok=True)
        metadata = self.site / "lockstep_c10d-0.dist-info"
        metadata.mkdir(exist_ok=True)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: lockstep-c10d\nVersion: 0\n")
        (metadata / "entry_points.txt").write_text("[torch.backends]\nlockstep = lockstep_c10d_autoload:register\n")
        return ""

    def stop(self) -> None:
        if self._build is not None and self._build.poll() is None:
            Check.kill([self._build])


def on_gpus(check: Check, data: dict, backend) -> None:
    if check.dry:
        raise Skip("PyTorch computes on real GPUs alone")
    if why := backend.wait(check.left() - 30):
        raise Skip(why)
    env = [f"PYTHONPATH={backend.site}", "MASTER_ADDR=127.0.0.1", "GLOO_SOCKET_IFNAME=lo", "OMP_NUM_THREADS=1"]
    data["runs"] = []

    def ranks(count: int, program: str, *arguments) -> list:
        alone = ["RANK=0", "WORLD_SIZE=1", "MASTER_PORT=0"] if count == 1 else []
        return check.start_ranks(count, ["env", *env, *alone, "python3", "-B", PROGRAMS / program, *arguments],
                                 check.ranks_share(count))

    def tried(job: tuple) -> dict:
        what, action = job
        try:
            return {"what": what, "ok": True, "why": action() or ""}
        except (Failure, ValueError, KeyError) as error:
            check.problem(f"{what}: {error}")
            return {"what": what, "ok": False, "why": str(error), "output": getattr(error, "output", "")}

    def operations(count: int) -> None:
        check.finish_ranks(ranks(count, "collectives.py", "cuda"), 60)

    def training() -> None:
        losses = {}
        for over, *only in (("lockstep",), ("gloo", "ddp")):  # which reduces and scatters nothing on GPUs
            done = check.finish_ranks(ranks(2, "training.py", over, "cuda", *only), 60)
            losses[over] = json.loads(done[0].out)
        off = {name: max(abs(a - b) for a, b in zip(losses["lockstep"][name], losses["gloo"]["ddp"], strict=True))
               for name in MOST_OFF}
        data["off"] = off
        for name, most in MOST_OFF.items():
            if not off[name] <= most:
                raise Failure(f"{name}: losses differ from those of DDP over Gloo by {off[name]:.1e}")

    def a_death() -> str:
        started = ranks(2, "failures.py", "dead_on_gpu")
        done = [check.finish(one, 60) for one in started]
        if done[1].code != -signal.SIGKILL or done[0].code in (0, None) or "has ended" not in done[0].err:
            raise Failure(f"the other rank ended with {done[0].code}: {done[0].last_words()}")
        return done[0].err.strip().splitlines()[-2]

    jobs = [("operations, 1 rank", lambda: operations(1)), ("operations, 2 ranks", lambda: operations(2)),
            ("DDP and FSDP2, 2 ranks", training), ("a killed rank", a_death)]
    check.in_parallel(tried, jobs, data["runs"])
