"""What is wrong with how an invocation has ended."""
import dataclasses
import json
import re

from case import ANYTHING, MUST_FAIL, SAME

# Flags that may leave all of a short run on one rank as it is (docs/flags.md, "Never refused").
HARMLESS = set("""--timeout-seconds --stall-warning-seconds --log-level --log-every --grace-seconds --backend --tail
    --bucket-mb --first-bucket-mb --check-replicas --comm-hook --sync-batchnorm --share-devices --encrypt
    --accumulate --warmup --eval-every --checkpoint-every --schedule --threads --workers --parallel --device
    --autotune --zero --find-unused --static-graph --host-timeout-seconds --export --bind-to --max-restarts --mpi
    --no-prefix --quiet --keep --keep-prefix --non-strict --label --batch""".split())

# docs/training.md, docs/launch.md; 1 is a bug.
DOCUMENTED = {0, 2, 3, 4, 5, 6, 7, 75}
STOPPED = {75, 143}
NEVER = [r"internal error", r"unexpected error", r"Assertion", r"terminate called", r"AddressSanitizer",
         r"runtime error:", r"ThreadSanitizer",
         r"Segmentation fault", r"core dumped", r"std::\w+", r"stack smashing", r"double free", r"malloc\(\)", r"Traceback"]
ERROR = re.compile(r"^(?:\[\d+(?:@[^\]]*)?\] )?(?:\[rank \d+ host [^\]]*\] )?error: ")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
OTHERS = {"--mpi": "srun", "--memory": "container", "--gpus": "docker"}
# Lines of libraries before main() or of the loader, which has no limit that is too small for it.
LOADER = re.compile(r"error while loading shared libraries|cannot allocate|failed to map segment")


@dataclasses.dataclass
class Outcome:
    code: int  # as Popen has it: -n for signal n
    out: bytes
    err: bytes
    stopped: str = ""  # why it was ended, if it did not end by itself
    left: tuple = ()  # processes and files

    @property
    def said(self):
        return self.out.decode(errors="replace") + self.err.decode(errors="replace")


def is_json(line):
    def refuse(constant):
        raise ValueError(constant)

    try:
        json.loads(line, parse_constant=refuse)
    except ValueError:
        return False
    return True


def error_lines(err):
    found = []
    for line in err.splitlines():
        if ERROR.match(line):
            text = ERROR.sub("", line)
            if text not in found:
                found.append(text)
    return found


def result(outcome, subcommand):
    """What does not depend on the clock."""
    said = outcome.said
    if "params_sha256" in said:
        return re.findall(r"params_sha256 (\w+)", said)
    if subcommand in ("eval", "infer"):
        text = outcome.out.decode(errors="replace")
        return re.sub(r".*\"event\":\"report\".*|\"\w+_(ms|s)\":(\{[^}]*\}|[^,}]*)", "", text)
    return []


def printed(outcome):
    """All that was printed but times, to see whether a flag has changed anything."""
    text = re.sub(r"-?\d[\d.e+-]*( ?(ms|s|us|%|GB/s|MB/s|samples/s|inputs/s|images/s|images|tokens/s)\b)", "", outcome.said)
    text = re.sub(r"waiting for communication.*|latency.*|\"\w+(_ms|_s|_us|_gbs)\":[^,}]*", "", text)
    return re.sub(r"\d+\.\d+", "", text) if "bench" in text or "bytes" in text else text


def flags_for(case, subcommand, before):
    named = re.findall(r"lockstep (train|eval|infer|launch)\b", before)
    if named:
        return set(case.flags[named[-1]])
    known = set(case.flags.get(subcommand, ()))
    if subcommand == "launch":
        known |= set().union(*map(set, case.flags.values()))
    if subcommand == "bench" and not known:
        known = set(case.flags["bench step"])
    return known


def problems(case, outcome, base, new_files):
    """A list of sentences; `base` is the outcome of the invocation as it was before it was altered."""
    words = [word for word in case.words if isinstance(word, str)]
    subcommand = words[0] if words and words[0] == case.words[0] else ""
    if subcommand in ("bench", "export"):
        subcommand = " ".join(words[:2])
    others_program = subcommand == "launch" and ("lockstep" not in words or "--" not in words)
    found = [f"left over: {what}" for what in outcome.left]
    code = outcome.code
    err = outcome.err.decode(errors="replace")
    errors = error_lines(err)
    asks_for_help = any(word in ("--help", "-h", "--version", "--h", "help") for word in words)

    if outcome.stopped:
        found += [f"does not end: {outcome.stopped}"] if outcome.stopped.startswith("!") else []
        if code not in STOPPED and code != -15 and not others_program:
            found.append(f"ended with {code} when it was asked to stop")
    elif case.signal and code in (-case.signal[0], 128 + case.signal[0]):
        pass
    elif code < 0:
        if code != -13 or "gone" not in (case.stdout, case.stderr):
            found.append(f"ended by signal {-code}")
    elif code not in DOCUMENTED and not others_program and not (code == 141 and "gone" in (case.stdout, case.stderr)) \
            and not (subcommand == "launch" and code in (126, 127)):
        if not (code == 127 and LOADER.search(err)):
            found.append(f"exit code {code}")
    for pattern in NEVER:
        if match := re.search(pattern, outcome.said):
            found.append(f"says {match[0]!r}")
    try:
        if not others_program:
            outcome.out.decode(), outcome.err.decode()
    except UnicodeDecodeError:
        found.append("prints what is not UTF-8")
    if case.stderr != "terminal" and not others_program and re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]",
                                                                      outcome.err.decode(errors="replace")):
        found.append("prints control characters")

    if code in DOCUMENTED - {0, 75} and case.stderr in ("", "terminal") and not others_program and not outcome.stopped:
        of_hosts = len(errors) > 1 and all(error.startswith("host ") for error in errors)  # a line for each
        launchers = subcommand == "launch" and not errors and re.search(r"^lockstep: ", err, re.MULTILINE)
        if len(errors) != 1 and not of_hosts and not launchers:
            found.append(f"{len(errors)} error lines")
        elif code == 2 and errors and " \u2192 " not in errors[0]:
            found.append("no remedy")
        for error in errors:
            cause, _, remedy = error.partition(" \u2192 ")
            for match in FLAG.finditer(remedy):
                flag, before = match[0], remedy[:match.start()]
                if flag == "--help" or flag in OTHERS and OTHERS[flag] in error or flag in cause or flag in words:
                    continue
                if flag not in flags_for(case, subcommand, before):
                    found.append(f"the remedy's {flag} is none of {subcommand}'s")
        after = re.split(r"^.*error: .*$", err, flags=re.MULTILINE)[-1].strip()
        if errors and after and subcommand != "launch" and not case.environment.get("ONEDNN_VERBOSE"):
            found.append(f"more after the error: {after[:200]!r}")
    if code == 0:
        if errors and subcommand != "launch":
            found.append("an error line and exit code 0")
        if re.search(r"(?i)(loss|accuracy)\S* -?(nan|inf)\b", outcome.said):
            found.append("NaN and exit code 0")
        if case.stdout and base.out.strip() and not others_program and (case.stdout != "gone" or len(outcome.out)):
            found.append(f"standard output {case.stdout}, and exit code 0")
        if "--json" in words and not case.stdout and subcommand != "launch":
            found += [f"no JSON: {line[:80]!r}" for line in outcome.out.decode(errors="replace").splitlines()
                      if not is_json(line)][:1]
        if not case.stdout and not asks_for_help:
            if subcommand == "train" and "params_sha256" not in outcome.said:
                found.append("no final line")
            if subcommand in ("eval", "infer", "checkpoint", "version", "devices") and not outcome.out.strip():
                found.append("nothing on standard output")
        if case.expects == MUST_FAIL and not asks_for_help:
            found.append("exit code 0, and was to be refused")
        if case.expects == SAME and base.code == 0 and not case.stdout and not asks_for_help \
                and result(outcome, subcommand) != result(base, subcommand):
            found.append("another result than before")
        # A default, what several subcommands share, or what the command line overrides.
        of_default = re.search(r" (no|0|none|auto|f32|cpu|yes|1|cross_entropy|adamw)( in .*)?$", case.done[0]) or re.match(
            r"with --(text|quotes|image-size|seed|batch|global-batch|epochs|steps)\b.* in (the environment|a file)$", case.done[0], re.DOTALL)
        added = not of_default and re.match(r"with (--[\w-]+)(?: (.*))?( in (the environment|a file))?$",
                                            case.done[0]) if len(case.done) == 1 else None
        if added and added[1] not in HARMLESS and case.expects == ANYTHING and not asks_for_help and not new_files \
                and printed(outcome) == printed(base):
            found.append(f"no effect: {added[0]}")
    return found
