"""The table of faults: what is broken, when and how; what the launcher must say of it; how the job must end.

Numbers are positions in CASES: new cases go to the end, so that a number always means the same.
"""
import contextlib
import dataclasses
import enum
import os
import random
import signal
import time
import typing

import strangers
from faulty_job import wait_until

TIMEOUT_SECONDS = 2  # --timeout-seconds of jobs in which ranks wait in vain
HOST_SECONDS = 6  # --host-timeout-seconds, the least that there is


class Then(enum.Enum):
    RESTARTED = "restarted"  # once, by the launcher, and ends with code 0
    CONTINUES = "continues"  # without a restart, to code 0
    AGAIN = "run again"  # ends with `code`; the same command, without the fault, ends with code 0
    SAVED = "saved"  # ends with `code` and a checkpoint of its last step


@dataclasses.dataclass(frozen=True)
class Case:
    what: str
    when: str
    says: str  # a pattern in what the launcher and the ranks print
    fault: str  # LOCKSTEP_TEST_FAULT (injection.h); with do=hold the rank waits there until `act` has been called
    then: Then = Then.RESTARTED
    code: int = 0  # the exit code, where the job ends
    act: typing.Callable = None  # what is done from outside, with the job
    within: float = 20  # seconds from the fault to the end of the job, restarted or not, on a busy machine too
    launch: tuple = ()  # more words for `lockstep launch`
    train: tuple = ()  # and for `lockstep train`
    before: tuple = ()  # words of a command that becomes the launcher
    hosts: tuple = ()  # ranks of each; empty: three ranks on this host
    network: tuple = ()  # (loss, delay in seconds) of all links, from the start
    needs: tuple = ()  # "root", "mpirun", "network namespaces"
    quick: bool = False  # one of those that every change is tested with
    undisturbed: tuple = ()  # train's further words in the runs that nobody disturbs: before, and again
    resumes: bool = False  # the run after the fault resumes, and does not start anew
    once: bool = False  # with AGAIN: the launcher has restarted it once before it ends
    ranks: int = 3  # without hosts
    command: tuple = ()  # the training, where it is another than matrix.py's
    alone: bool = False  # without a launcher, whose part the rank takes
    at_step: tuple = ()  # in place of `fault`: from and to which step, at random, it comes
    times: int = 1  # how often, with at_step each time so many steps further; without, --times says it
    until_step: bool = False  # what counts are the seconds until the launcher hears of the next step; then it is stopped


# Where a rank is disturbed: the name of the phase, and its words for LOCKSTEP_TEST_FAULT.
START, DATA, FORWARD = ("start-up", "at=start"), ("data", "at=data count=300"), ("forward", "at=forward count=12")
BACKWARD, EVALUATION = ("backward", "at=backward count=12"), ("evaluation", "at=evaluation")
CHECKPOINT, SAVE = ("checkpoint", "at=checkpoint count=3"), ("end", "at=save")
RENDEZVOUS, EXIT = ("start-up", "at=main"), ("end, done", "at=exit")

CASES = []


def add(*arguments, **more):
    CASES.append(Case(*arguments, **more))


def rank_of(number):
    return rf"rank {number} of \d+ \(host \S+, pid \d+\)"


def from_outside(act):
    """As `act`, which is called when the rank has come to its place; then that rank is let go."""
    def disturb(job):
        act(job)
        job.release()
    return disturb


def sends(number, role, rank=None, host=None):
    def act(job):
        job.signal(number, role, rank, host)
        if number == signal.SIGKILL:
            time.sleep(0.3)  # the launcher is to notice before the work is done
        job.release()
    return act


def pauses(role, seconds, rank=None):
    def act(job):
        job.signal(signal.SIGSTOP, role, rank)
        job.release()
        time.sleep(seconds)
        job.signal(signal.SIGCONT, role, rank)
    return act


# A rank's own program.
for phase, quick in ((START, False), (DATA, False), (FORWARD, False), (BACKWARD, True), (EVALUATION, True)):
    add("rank 1 is killed", phase[0], rf"restart 1 of 3.*: {rank_of(1)} failed first: it was ended by SIGKILL",
        f"rank=1 {phase[1]} do=kill", quick=quick)
for phase in (FORWARD, CHECKPOINT, EVALUATION, SAVE):
    add("rank 0 is killed", phase[0], rf"restart 1 of 3.*: {rank_of(0)} failed first: it was ended by SIGKILL",
        f"rank=0 {phase[1]} do=kill", quick=phase is CHECKPOINT)
add("rank 1 is killed while rank 0 writes", "checkpoint", rf"restart 1 of 3.*: {rank_of(1)} failed first: .*SIGKILL",
    f"rank=0 {CHECKPOINT[1]} do=hold", act=sends(signal.SIGKILL, "program", 1))
add("rank 1 is killed while rank 0 writes the result", "end", rf"restart 1 of 3.*: {rank_of(1)} failed first: .*SIGKILL",
    f"rank=0 {SAVE[1]} do=hold", act=sends(signal.SIGKILL, "program", 1))
add("rank 1 is killed when the work is reported done", EXIT[0], "not restarted: the ranks had reported that their work was "
    "done", f"rank=1 {EXIT[1]} do=kill", Then.AGAIN, 137)
for phase in (FORWARD, BACKWARD):
    add("rank 2 breaks memory (SIGSEGV)", phase[0], rf"restart 1 of 3.*: {rank_of(2)} failed first: .*SIGSEGV",
        f"rank=2 {phase[1]} do=segv")
for phase in (START, DATA, FORWARD, BACKWARD, EVALUATION):
    add("rank 1 throws an exception", phase[0],
        rf"restart 1 of 3.*: {rank_of(1)} failed first: it exited with code 1", f"rank=1 {phase[1]} do=throw",
        quick=phase is DATA)
add("rank 1 finds a sample that cannot be read", "data", "not restarted: exit code 3 is for bad or missing input data",
    f"rank=1 {DATA[1]} do=bad-data", Then.AGAIN, 3, quick=True)
for phase in (START, DATA, FORWARD, BACKWARD, EVALUATION):
    add("rank 1 loops for ever", phase[0], rf"restart 1 of 3.*: {rank_of(1)} held up the others: rank \d waited for it in "
        "vain", f"rank=1 {phase[1]} do=loop", quick=phase is FORWARD)
for phase in (START, DATA, FORWARD, BACKWARD, EVALUATION):
    add("rank 1 exits with code 0 too early", phase[0], rf"restart 1 of 3.*: {rank_of(1)} held up the others",
        f"rank=1 {phase[1]} do=exit0")
for phase in (START, DATA, FORWARD, BACKWARD, EVALUATION):
    add("rank 1 is stopped (SIGSTOP)", phase[0], rf"{rank_of(1)} was stopped by SIGSTOP(.|\n)*restart 1 of 3.*: "
        rf"{rank_of(1)} held up the others", f"rank=1 {phase[1]} do=stop", quick=phase is BACKWARD)
for phase in (CHECKPOINT, SAVE):
    add("rank 0 is stopped (SIGSTOP)", phase[0], rf"restart 1 of 3.*: {rank_of(0)} held up the others",
        f"rank=0 {phase[1]} do=stop")
add("rank 1 is stopped for a second (SIGSTOP, SIGCONT)", "forward", rf"{rank_of(1)} was stopped by SIGSTOP",
    f"rank=1 {FORWARD[1]} do=hold", Then.CONTINUES, act=pauses("program", 1, 1))
add("rank 1 is stopped when the work is done, then resumed", EXIT[0], rf"{rank_of(1)} was stopped by SIGSTOP",
    f"rank=1 {EXIT[1]} do=hold", Then.CONTINUES, act=pauses("program", 1, 1))


# Memory.
def little_memory(limit):
    return ("bash", "-c", f'ulimit -v {limit >> 10}; exec "$@"', "bash")


for phase in (START, FORWARD):
    add("rank 1 eats memory up to its limit (ulimit -v)", phase[0],
        rf"restart 1 of 3.*: {rank_of(1)} (failed first|held up the others)", f"rank=1 {phase[1]} do=eat",
        before=little_memory(1 << 30), quick=phase is START)

# The rank's wrapper, mpirun and the launcher.
for phase in (START, FORWARD, BACKWARD, CHECKPOINT, EVALUATION, SAVE):
    add("rank 1's wrapper is killed", phase[0], rf"restart 1 of 3.*: {rank_of(1)}.*(killed|SIGKILL)",
        f"rank=0 {phase[1]} do=hold", act=sends(signal.SIGKILL, "wrapper", 1), quick=phase is CHECKPOINT)
add("rank 1's wrapper is stopped for a second", "forward", "", f"rank=0 {FORWARD[1]} do=hold", Then.CONTINUES,
    act=pauses("wrapper", 1, 1))
for phase in (START, FORWARD, CHECKPOINT, SAVE):
    add("mpirun is killed (--mpi)", phase[0], "restart 1 of 3.*: .*mpirun.*SIGKILL", f"rank=0 {phase[1]} do=hold",
        act=sends(signal.SIGKILL, "mpirun"), launch=("--mpi",), needs=("mpirun",))
add("rank 1 is killed under mpirun (--mpi)", "forward", rf"restart 1 of 3.*: {rank_of(1)} failed first: .*SIGKILL",
    f"rank=1 {FORWARD[1]} do=kill", launch=("--mpi",), needs=("mpirun",))
add("mpirun is stopped for a second (--mpi)", "forward", "", f"rank=0 {FORWARD[1]} do=hold", Then.CONTINUES,
    act=pauses("mpirun", 1), launch=("--mpi",), needs=("mpirun",))
for phase in (START, FORWARD, BACKWARD, CHECKPOINT, EVALUATION, SAVE):
    add("the launcher is killed", phase[0], "", f"rank=0 {phase[1]} do=hold", Then.AGAIN, 137,
        act=sends(signal.SIGKILL, "launcher"), quick=phase is FORWARD)
add("the launcher is stopped for a second", "forward", "", f"rank=0 {FORWARD[1]} do=hold", Then.CONTINUES,
    act=pauses("launcher", 1))
for phase in (FORWARD, CHECKPOINT, EVALUATION):
    add("the launcher gets SIGTERM", phase[0], "which is saved in ck", f"rank=0 {phase[1]} do=hold", Then.AGAIN, 75,
        act=sends(signal.SIGTERM, "launcher"))
add("rank 1 gets SIGTERM", "forward", "which is saved in ck", f"rank=0 {FORWARD[1]} do=hold", Then.AGAIN, 75,
    act=sends(signal.SIGTERM, "program", 1))


# Disks. A small one of its own is mounted where the launcher and its ranks alone see it.
def small_disk(directory, kib):
    return ("unshare", "-m", "sh", "-c",
            f'mkdir -p {directory} && mount -t tmpfs -o size={kib}k lockstep-test {directory} && exec "$@"', "sh")


def remove_checkpoints(job):
    """At one moment, whatever is being written there."""
    (job.work / "ck").rename(job.directory / "removed")


def nothing_written(job, *directories):
    """When the checkpoint before this step is on the disk."""
    if not wait_until(lambda: not [half for directory in directories or ("ck",)
                                   for half in (job.work / directory).glob(".step-*")], 10):
        raise AssertionError("a checkpoint is still being written")


def cut_newest(job):
    """Half of the newest checkpoint's weights is lost, and the rank dies."""
    nothing_written(job)
    newest = max((job.work / "ck").glob("step-*"))
    with open(newest / "weights.safetensors", "r+b") as file:
        file.truncate(file.seek(0, 2) // 2)
    job.signal(signal.SIGKILL, "program", 1)


add("the disk of the checkpoints is full from the start", "checkpoint", "No space left on device.*training continues",
    f"rank=0 {CHECKPOINT[1].replace('3', '1')} do=hold", Then.AGAIN, 3, act=from_outside(lambda job: None),
    before=small_disk("ck", 400), needs=("root",))
add("the disk of the metrics is full", "forward", "[Nn]o space left on device", f"rank=0 {FORWARD[1]} do=hold", Then.AGAIN, 3,
    act=from_outside(lambda job: None), before=small_disk("small", 4), needs=("root",),
    train=("--metrics", "small/m.jsonl"))
add("the disk fails once (EIO)", "checkpoint", "cannot flush .*Input/output error.*training continues",
    f"rank=0 {CHECKPOINT[1]} do=eio", Then.CONTINUES, quick=True)
add("the disk fails (EIO) when the result is saved", "end", "training is complete, but its weights are lost",
    f"rank=0 {SAVE[1]} do=eio", Then.AGAIN, 3)
add("each flush takes half a second more", "checkpoint", "", f"rank=0 {CHECKPOINT[1]} do=slow", Then.CONTINUES)
for phase in (FORWARD, CHECKPOINT):
    add("somebody removes the directory of the checkpoints", phase[0], "ck", f"rank=0 {phase[1]} do=hold", Then.AGAIN, 3,
        act=from_outside(remove_checkpoints))
add("rank 1 is killed, and the newest checkpoint is cut", "forward", "the one before it is taken",
    f"rank=0 {FORWARD[1]} do=hold", act=from_outside(cut_newest))
add("rank 1 is killed, and all checkpoints are gone", "forward", "taken a checkpoint of step 10, and ck on host .* has none",
    f"rank=0 {FORWARD[1]} do=hold", Then.AGAIN, 6, once=True,
    act=from_outside(lambda job: (nothing_written(job), remove_checkpoints(job), job.signal(signal.SIGKILL, "program", 1))))

# Checkpoints in parts: each rank writes its own.
PARTS = ("--zero", "1")


def cut_part(job):
    """Half of a part of the newest checkpoint is lost, and the rank dies."""
    nothing_written(job)
    newest = max((job.work / "ck").glob("step-*"))
    with open(newest / "optimizer-00001-of-00003.safetensors", "r+b") as file:
        file.truncate(file.seek(0, 2) // 2)
    job.signal(signal.SIGKILL, "program", 1)


for rank, quick in ((0, False), (2, True)):
    add(f"rank {rank} is killed while it writes (--zero 1)", "checkpoint",
        rf"restart 1 of 3.*: {rank_of(rank)} failed first: it was ended by SIGKILL", f"rank={rank} {CHECKPOINT[1]} do=kill",
        train=PARTS, quick=quick)
for rank in (0, 2):
    add(f"rank 1 is killed while rank {rank} writes (--zero 1)", "checkpoint",
        rf"restart 1 of 3.*: {rank_of(1)} failed first: .*SIGKILL", f"rank={rank} {CHECKPOINT[1]} do=hold",
        act=sends(signal.SIGKILL, "program", 1), train=PARTS)
add("rank 2 is stopped while it writes (--zero 1)", "checkpoint", rf"restart 1 of 3.*: {rank_of(2)} held up the others",
    f"rank=2 {CHECKPOINT[1]} do=stop", train=PARTS)
# Both ranks say it, in no order.
add("rank 2's disk fails once (EIO) (--zero 1)", "checkpoint",
    r"\A(?=(.|\n)*cannot flush .*optimizer-00002-of-00003.*Input/output error.*training continues)"
    r"(?=(.|\n)*the part of rank 2 is not on the disk.*training continues)", f"rank=2 {CHECKPOINT[1]} do=eio",
    Then.CONTINUES, train=PARTS, quick=True)
add("each flush of rank 2 takes half a second more (--zero 1)", "checkpoint", "", f"rank=2 {CHECKPOINT[1]} do=slow",
    Then.CONTINUES, train=PARTS)
add("the launcher gets SIGTERM while rank 2 writes (--zero 1)", "checkpoint", "which is saved in ck",
    f"rank=2 {CHECKPOINT[1]} do=hold", Then.AGAIN, 75, act=sends(signal.SIGTERM, "launcher"), train=PARTS)
add("the disk of the checkpoints is full from the start (--zero 1)", "checkpoint", "No space left on device.*training continues",
    f"rank=0 {CHECKPOINT[1].replace('3', '1')} do=hold", Then.AGAIN, 3, act=from_outside(lambda job: None),
    before=small_disk("ck", 300), needs=("root",), train=PARTS)
add("somebody removes the directory of the checkpoints (--zero 1)", "checkpoint", "ck", f"rank=2 {CHECKPOINT[1]} do=hold",
    Then.AGAIN, 3, act=from_outside(remove_checkpoints), train=PARTS)
add("rank 1 is killed, and a part of the newest checkpoint is cut (--zero 1)", "forward", "the one before it is taken",
    f"rank=0 {FORWARD[1]} do=hold", act=from_outside(cut_part), train=PARTS)

# Strangers on the ports.
for kind, quick in (("garbage", True), ("silence", False), ("flood", False)):
    add(f"strangers connect to the ports: {kind}", "start-up", "", f"rank=1 {RENDEZVOUS[1]} do=hold", Then.CONTINUES,
        act=from_outside(getattr(strangers, kind)), quick=quick)


# Hosts, whose network the test carries (hosts.py).
def on_hosts(*arguments, ranks=(2, 1), **more):
    add(*arguments, hosts=ranks, needs=("root", "network namespaces", "mpirun"), **more)


def cut(host, seconds=None):
    def act(job):
        job.hosts.cut(host)
        job.release()
        if seconds is not None:
            time.sleep(seconds)
            job.hosts.mend(host)
    return act


for phase in (START, FORWARD, BACKWARD, CHECKPOINT, EVALUATION, SAVE):
    on_hosts("the link of a host is cut for 1 s", phase[0], "", f"rank=0 {phase[1]} do=hold", Then.CONTINUES, act=cut(1, 1),
             within=20, train=("--timeout-seconds", "20"))
on_hosts("the link of a host is cut for 3 s", "forward", "", f"rank=0 {FORWARD[1]} do=hold", Then.CONTINUES, act=cut(1, 3),
         within=20, train=("--timeout-seconds", "20"))
for phase in (START, FORWARD, BACKWARD, CHECKPOINT, EVALUATION, SAVE):
    on_hosts("the link of a host is cut for good", phase[0], r"host lkm\d+b \(rank 2\) was lost", f"rank=0 {phase[1]} do=hold",
             Then.AGAIN, 4, act=cut(1), train=("--timeout-seconds", "60"))
for phase in (START, FORWARD):
    on_hosts("one host of three is cut off", phase[0], r"host lkm\d+c( \(rank 2\))? was lost", f"rank=0 {phase[1]} do=hold",
             Then.AGAIN, 4, act=cut(2), within=20, ranks=(1, 1, 1), train=("--timeout-seconds", "60"))
on_hosts("the link between the ranks of two hosts breaks, and ssh's does not", "forward",
         r"rank \d \(host \S+\) has not answered for 3\d", f"rank=0 {FORWARD[1]} do=hold", Then.AGAIN, 4,
         act=from_outside(lambda job: job.hosts.cut_but_ssh(1)), within=60, train=("--timeout-seconds", "60"))
on_hosts("5 % of all packets are lost", "all", "", f"rank=0 {FORWARD[1]} do=hold", Then.CONTINUES,
         act=from_outside(lambda job: None), network=(0.05, 0), within=120,
         train=("--timeout-seconds", "60", "--epochs", "1"), undisturbed=("--epochs", "1"))
on_hosts("all packets are 100 ms late", "all", "", f"rank=0 {FORWARD[1]} do=hold", Then.CONTINUES,
         act=from_outside(lambda job: None), network=(0, 0.1), within=120,
         train=("--timeout-seconds", "60", "--epochs", "1"), undisturbed=("--epochs", "1"))
MIRROR = ("--checkpoint-mirror", "mirror")
on_hosts("the disk of the checkpoints is lost, and a rank dies (--checkpoint-mirror)", "forward",
         rf"{rank_of(2)} failed first: it was ended by SIGKILL", f"rank=0 {FORWARD[1]} do=hold", Then.AGAIN, 137,
         act=from_outside(lambda job: (nothing_written(job, "ck", "mirror"), remove_checkpoints(job),
                                       job.signal(signal.SIGKILL, "program", 2))),
         train=MIRROR, undisturbed=MIRROR, resumes=True)
for phase in (FORWARD, EVALUATION):
    on_hosts("a rank on the other host is killed", phase[0], rf"{rank_of(2)} failed first: it was ended by SIGKILL",
             f"rank=2 {phase[1]} do=kill", Then.AGAIN, 137)
on_hosts("Open MPI's daemon on the other host is killed (--mpi)", "forward", "Open MPI's daemon on host .*SIGKILL",
         f"rank=0 {FORWARD[1]} do=hold", Then.AGAIN, 4, act=sends(signal.SIGKILL, "orted", host=1), launch=("--mpi",))
on_hosts("the launcher's helper on the other host is killed", "forward", r"host lkm\d+b \(rank 2\) was lost",
         f"rank=0 {FORWARD[1]} do=hold", Then.AGAIN, 4, act=sends(signal.SIGKILL, "helper", host=1))
on_hosts("the launcher is killed", "forward", "", f"rank=0 {FORWARD[1]} do=hold", Then.AGAIN, 137,
         act=sends(signal.SIGKILL, "launcher"))
for kind in ("garbage", "silence", "flood"):
    on_hosts(f"strangers connect to the ports: {kind}", "start-up", "", f"rank=2 {RENDEZVOUS[1]} do=hold", Then.CONTINUES,
             act=from_outside(getattr(strangers, kind)))
on_hosts("strangers connect to Open MPI's ports: garbage (--mpi)", "start-up", "", f"rank=2 {RENDEZVOUS[1]} do=hold", Then.CONTINUES,
         act=from_outside(strangers.garbage_to_open_mpi), within=30, launch=("--mpi",))

# Hosts, and the launcher continues with what is left of them: shards make the parameters the same on fewer ranks.
SHARDS = ("--shards", "3")


def goes_on(*arguments, **more):
    on_hosts(*arguments, launch=("--min-ranks", "1"), train=(*SHARDS, "--timeout-seconds", "60"), undisturbed=SHARDS, within=25,
             **more)


for phase in (FORWARD, CHECKPOINT, EVALUATION):
    goes_on("the link of a host is cut for good (--max-restarts)", phase[0],
            r"restart 1 of 3.*host lkm\d+b \(rank 2\) was lost.* on 2 ranks", f"rank=0 {phase[1]} do=hold", act=cut(1))
for phase in (START, FORWARD):
    goes_on("one host of three is cut off (--max-restarts)", phase[0],
            r"restart 1 of 3.*host lkm\d+c( \(rank 2\))? was lost.* on 2 ranks", f"rank=0 {phase[1]} do=hold", act=cut(2),
            ranks=(1, 1, 1))
for phase in (FORWARD, BACKWARD):
    goes_on("a rank on the other host is killed (--max-restarts)", phase[0],
            rf"restart 1 of 3.*{rank_of(2)} failed first: it was ended by SIGKILL.* on 3 ranks", f"rank=2 {phase[1]} do=kill")


# Memory that the kernel takes back.
def control_group(mib):
    """The launcher and what it starts get no more than that much memory together, in a group that the test removes."""
    return ("bash", "-c", f"""
parent=/sys/fs/cgroup/memory most=memory.limit_in_bytes
[ -e $parent/$most ] || parent=/sys/fs/cgroup most=memory.max
group=$parent/lockstep-test-$$
mkdir $group && echo $group > ../group && echo {mib}M > $group/$most && echo $$ > $group/cgroup.procs && exec "$@\"""", "bash")


add("rank 1 eats memory until the kernel ends it (control group)", "forward",
    rf"restart 1 of 3.*: {rank_of(1)} failed first: it was ended by SIGKILL.*kernel ended 1 process for lack of memory",
    f"rank=1 {FORWARD[1]} do=eat", before=control_group(600), needs=("root", "memory control groups"))


def kill_reaper_and_rank(job):
    """What removes a job's files when the launcher is killed, and then what makes it restart."""
    job.signal(signal.SIGKILL, "reaper")
    job.signal(signal.SIGKILL, "program", 1)


for phase in (START, FORWARD):
    add("the launcher's cleaning process is killed, and rank 1", phase[0],
        rf"restart 1 of 3.*: {rank_of(1)} failed first: it was ended by SIGKILL", f"rank=0 {phase[1]} do=hold",
        act=from_outside(kill_reaper_and_rank))

# At random steps. Text and an LSTM: with dropout, and with states that are carried from row to row.
LSTM = ("lockstep", "train", "lstm", "--data", "text:text.txt", "--width", "24", "--context", "16", "--dropout", "0.2",
        "--global-batch", "12", "--steps", "240", "--schedule", "cosine", "--warmup", "10", "--clip-norm", "1", "--quiet",
        "--threads", "1", "--checkpoint-dir", "ck", "--checkpoint-every", "3", "--keep", "2", "--resume", "auto")


def kills_launcher_or_rank(job):
    role, rank = random.choice([("launcher", None), ("program", 0), ("program", 1)])
    job.signal(signal.SIGKILL, role, rank)


for ranks, more in ((1, ()), (2, ()), (1, ("--stateful",)), (2, ("--stateful",))):
    killed = "the process" if ranks == 1 else "a rank or the launcher"
    add(f"{killed} is killed twice{', ' * bool(more)}{''.join(more)}",
        "a random step and resumed", "", "", Then.AGAIN, 137,
        act=kills_launcher_or_rank if ranks > 1 else sends(signal.SIGKILL, "launcher"), ranks=ranks, command=(*LSTM, *more),
        alone=ranks == 1, at_step=(1, 100), times=2, resumes=True)


def signals_all(job):
    """As schedulers do that know the processes of a job."""
    for process in job.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)


def stops_rank_first(job):
    job.signal(signal.SIGSTOP, "program")
    job.signal(signal.SIGTERM, "launcher")


for ranks in (1, 2):
    for what, act, before in (
            ("its group gets SIGTERM after the launcher (timeout)", sends(signal.SIGTERM, "launcher"), ("timeout", "600")),
            ("the launcher gets SIGTERM", sends(signal.SIGTERM, "launcher"), ()),
            ("every process gets SIGTERM", signals_all, ()),
            # What runs in a shell's background ignores Ctrl-C.
            ("the launcher's process group gets SIGINT (Ctrl-C)", lambda job: os.killpg(job.launcher.pid, signal.SIGINT),
             ("env", "--default-signal=INT")),
            ("the launcher gets SIGTERM while a rank is stopped", stops_rank_first, ())):
        add(f"{what}, {ranks} rank{'s' * (ranks > 1)}", "a random step and stopped", "which is saved in ck", "", Then.SAVED, 75,
            act=act, before=before, ranks=ranks, command=LSTM, at_step=(1, 100),
            train=("--checkpoint-every", "0", "--steps", "100000000"))

# How long a restart takes.
CNN = ("lockstep", "train", "cnn", "--data", "digits", "--global-batch", "64", "--epochs", "1000000", "--quiet", "--threads",
       "1", "--checkpoint-dir", "ck", "--checkpoint-every", "10", "--resume", "auto")


def kills_rank(job):
    programs = [process for process in job.processes() if process.role == "program"]
    if any("LOCKSTEP_SPARE" in process.variables for process in programs):
        programs.remove(max(programs, key=lambda process: process.pid))  # the spare, which started last
    os.kill(random.choice(programs).pid, signal.SIGKILL)


def kills_host(job, stays_away=False):
    """Any but the first; it answers again at once, or when the job has continued without it."""
    host = random.choice(job.hosts.names[1:])
    job.set_away(host if stays_away else None)
    for process in job.processes():
        if process.host == host:
            with contextlib.suppress(ProcessLookupError):  # one that has ended with another
                os.kill(process.pid, signal.SIGKILL)


def again(what, act, **more):
    add(what, "any time, until the next step", "", "", Then.RESTARTED, 75, act=act, command=CNN, times=3, until_step=True, **more)


for ranks in (2, 4):
    again(f"one of {ranks} ranks is killed", kills_rank, ranks=ranks)
for what, act, ranks in (("a random rank is killed", kills_rank, (2, 2)), ("a host is killed", kills_host, (1, 1, 1)),
                         ("a host is killed and stays away", lambda job: kills_host(job, True), (1, 1, 1))):
    again(what, act, hosts=ranks, needs=("root", "network namespaces"), launch=("--min-ranks", str(ranks[0])))


# Ranks that outlive others, and keep their processes.
def in_place(what, phase, culprit, fault, **more):
    add(f"{what}, in place", phase[0], rf"restart 1 of 3 in place: {culprit}", f"{fault.split()[0]} {phase[1]} {fault.split()[1]}",
        launch=("--in-place",), **more)


for phase, quick in ((DATA, False), (FORWARD, False), (BACKWARD, True), (EVALUATION, False)):
    in_place("rank 1 is killed", phase, rf"{rank_of(1)} failed first: it was ended by SIGKILL", "rank=1 do=kill", quick=quick)
for phase, quick in ((FORWARD, True), (CHECKPOINT, False), (EVALUATION, False), (SAVE, False)):
    in_place("rank 0 is killed", phase, rf"{rank_of(0)} failed first: it was ended by SIGKILL", "rank=0 do=kill", quick=quick)
in_place("rank 2 breaks memory (SIGSEGV)", BACKWARD, rf"{rank_of(2)} failed first: .*SIGSEGV", "rank=2 do=segv")
in_place("rank 1 throws an exception", EVALUATION, rf"{rank_of(1)} failed first: it exited with code 1", "rank=1 do=throw")
add("rank 1 is killed before it can be replaced, in place", START[0], rf"restart 1 of 3 in .* s: {rank_of(1)} failed first: .*SIGKILL",
    f"rank=1 {START[1]} do=kill", launch=("--in-place",))
add("rank 1 finds a sample that cannot be read, in place", "data", "not restarted: exit code 3 is for bad or missing input data",
    f"rank=1 {DATA[1]} do=bad-data", Then.AGAIN, 3, launch=("--in-place",))
add("rank 1 is stopped (SIGSTOP), in place", BACKWARD[0], rf"{rank_of(1)} was stopped by SIGSTOP(.|\n)*restart 1 of 3 in place: "
    rf"{rank_of(1)} held up the others", f"rank=1 {BACKWARD[1]} do=stop", launch=("--in-place",))
add("the launcher is asked to end while rank 1 is replaced", BACKWARD[0], "", f"rank=0 {BACKWARD[1]} do=hold", Then.AGAIN, 137,
    act=lambda job: (job.signal(signal.SIGKILL, "program", 1), job.signal(signal.SIGTERM, "launcher"), job.release()),
    launch=("--in-place",))
for ranks in (2, 4):
    again(f"one of {ranks} ranks is killed, in place", kills_rank, ranks=ranks, launch=("--in-place",))
