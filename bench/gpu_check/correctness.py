"""The sections that say whether what the GPU computes is right."""
import json
import math
import re
import shutil
import signal
import time

from gpu_check import machine, sources
from gpu_check.check import Check, Late, Skip
from harness.contestants import ROOT
from harness.processes import Failure

# Relative to the loss, where that is above 1. Ranks add up in another order, and training amplifies rounding.
FIRST_STEP, LATER_STEPS = 1e-5, 2e-3
FIRST_NORM = 1e-4  # of all gradients, in the first step, relative
BF16_STEPS, BF16_NORM = 2e-2, 2e-2
FP16_STEPS, FP16_NORM = 5e-3, 5e-3  # three more bits of mantissa
# A fixed scale, with which no step overflows: a dynamic one would skip steps, and these have no norm.
_SCALED = {"fp16": ["--loss-scale", 1024]}

SKIPPED = 77  # a test program's exit code where it finds no GPU


def about_machine(check: Check, data: dict) -> None:
    data["facts"] = machine.facts()
    data["nvidia_smi"] = {"fields": ["name"], "gpus": [[gpu] for gpu in check.gpus]} if check.dry else machine.nvidia_smi()
    data["libraries"] = machine.library_directories()
    data["library_path"] = check.env.get("LD_LIBRARY_PATH", "")
    data["version"] = check.run([check.lockstep, "version"]).out
    check.note(["nvidia-smi", "-q"])
    data["devices"] = check.run([check.lockstep, "devices"]).out
    data["measured"] = check.run_json([check.lockstep, "devices", "--measure", "--json"])["measured"]
    for rates in data["measured"]:
        if rates["problem"]:
            check.problem(f"{rates['device']} could not be measured: {rates['problem']['what']}")


# ---- Test programs ----


def tests_of(check: Check) -> list:
    """Those labelled gpu: from the archive, or as ctest knows them in a build."""
    packed = check.build / "tests.json"
    if packed.exists():
        text = packed.read_text().replace("@BUILD@", str(check.build)).replace("@SOURCE@", str(ROOT))
        return json.loads(text)
    listed = check.run(["ctest", "--test-dir", check.build, "--show-only=json-v1", "-L", "gpu"], noted=False).out
    tests = []
    for test in json.loads(listed)["tests"]:
        properties = {p["name"]: p["value"] for p in test.get("properties", [])}
        if "command" not in test:  # ctest knows of no program
            raise Failure(f"{test['name']} is not built → leave --no-build out")
        tests.append({"name": test["name"], "command": test["command"],
                      "environment": properties.get("ENVIRONMENT", []), "timeout_s": properties.get("TIMEOUT", 60)})
    return tests


def _one_test(check: Check, test: dict) -> dict:
    report = check.scratch / f"{test['name']}.json"
    env = dict(word.split("=", 1) for word in test["environment"])
    done = check.run([*test["command"], f"--gtest_output=json:{report}"], test["timeout_s"], env, codes=None)
    result = {"name": test["name"], "seconds": round(done.seconds, 1), "code": done.code, "tests": [], "why": ""}
    if done.code == SKIPPED:
        result["why"] = next((line for line in done.out.splitlines() if line.startswith("skipped: ")), "skipped")
    elif done.code != 0:
        failed = list(dict.fromkeys(re.findall(r"^\[  FAILED  \] ([^\s,]+)", done.out, re.MULTILINE)))
        result["why"] = ", ".join(failed) or done.last_words()
        # What each of them has said; of one that ended by itself its last words.
        said = [done.out[done.out.find(f"[ RUN      ] {name}"):][:1500] for name in failed[:4]]
        result["output"] = "\n".join(said) or (done.out + done.err)[-3000:]
    try:
        suites = json.loads(report.read_text())["testsuites"] if report.exists() else []
    except (ValueError, KeyError):  # it was ended while it wrote
        suites = []
    for suite in suites:
        for one in suite["testsuite"]:
            entry = {"name": f"{suite['name']}.{one['name']}", "failed": bool(one.get("failures"))}
            result["tests"].append(entry | {key: one[key] for key in ("tolerance", "largest_error") if key in one})
    return result


def test_programs(check: Check, data: dict) -> None:
    tests = tests_of(check)
    if not tests:
        raise Failure("this build has no tests for GPUs: it is one without CUDA")
    data["programs"] = []

    def run(test: dict) -> dict:
        try:
            return _one_test(check, test)
        except Failure as failure:
            return {"name": test["name"], "seconds": 0, "code": -1, "tests": [], "why": str(failure)}

    # Those that may take longest first: none of them is the last one, for which all wait.
    tests.sort(key=lambda test: -test["timeout_s"])
    try:
        check.in_parallel(run, tests, data["programs"])
    finally:
        for program in data["programs"]:
            if program["code"] != 0 and not (check.dry and program["code"] == SKIPPED):
                check.problem(f"{program['name']}: {program['why']}")


# ---- Ranks ----


def _training(check: Check, ranks: int, device: str, precision: str, steps: int, name: str, more=()) -> dict:
    """Losses and gradient norms step by step, and the parameters' checksum."""
    metrics = check.scratch / f"{name}.jsonl"
    shared = device == "cuda" and check.ranks_share(ranks)
    timeout_s, limit_s = check.patience(ranks)
    argv = [check.lockstep, "train", "cnn", "--data", "digits", "--steps", steps, "--global-batch", 64, "--optimizer",
            "sgd", "--lr", 0.05, "--eval-every", 0, "--check-replicas", 5, "--device", device, "--precision", precision,
            "--metrics", metrics, "--timeout-seconds", timeout_s, "--quiet", *(["--share-devices"] if shared else []),
            *_SCALED.get(precision, []), *more]
    check.finish_ranks(check.start_ranks(ranks, argv, shared), limit_s)
    events = [json.loads(line) for line in metrics.read_text().splitlines()]
    taken = [event for event in events if event["event"] == "step"]
    if len(taken) != steps:
        raise Failure(f"{name}: {len(taken)} of {steps} steps are in the metrics file")
    return {"losses": [event["loss"] for event in taken], "norms": [event["grad_norm"] for event in taken],
            "step_ms": [event["step_ms"] for event in taken],
            "sha256": next(event["params_sha256"] for event in events if event["event"] == "final")}


def compared(run: dict, reference: dict) -> dict:
    """The largest relative differences of the first step, of all steps, and of the first step's gradient norm."""
    def off(mine, theirs):
        return abs(mine - theirs) / max(1.0, abs(theirs))

    steps = [off(mine, theirs) for mine, theirs in zip(run["losses"], reference["losses"], strict=True)]
    norm = abs(run["norms"][0] - reference["norms"][0]) / max(1e-12, abs(reference["norms"][0]))
    largest = math.nan if any(map(math.isnan, steps)) else max(steps)
    return {"first_loss": steps[0], "loss": largest, "first_norm": norm}


def within(differences: dict, precision: str) -> bool:
    if precision == "bf16":
        limits = {"first_loss": BF16_STEPS, "loss": BF16_STEPS, "first_norm": BF16_NORM}
    elif precision == "fp16":
        limits = {"first_loss": FP16_STEPS, "loss": FP16_STEPS, "first_norm": FP16_NORM}
    else:
        limits = {"first_loss": FIRST_STEP, "loss": LATER_STEPS, "first_norm": FIRST_NORM}
    return all(differences[key] <= limit for key, limit in limits.items())  # false for NaN, too


def ranks_agree(check: Check, data: dict) -> None:
    steps = check.steps(20 if check.quick else 30, 5)
    data |= {"steps": steps, "runs": [], "shared": {n: check.ranks_share(n) for n in (2, 4)},
             "tolerances": {"f32": [FIRST_STEP, LATER_STEPS, FIRST_NORM], "bf16": [BF16_STEPS, BF16_STEPS, BF16_NORM],
                            "fp16": [FP16_STEPS, FP16_STEPS, FP16_NORM]}}
    plan = [("f32", 1, "cpu"), ("f32", 2, "cuda"), ("f32", 4, "cuda"), ("bf16", 2, "cuda"), ("bf16", 4, "cuda"),
            ("fp16", 2, "cuda")]
    precisions, runs = ("f32", "bf16", "fp16"), []
    check.in_parallel(lambda precision: _training(check, 1, "cuda", precision, steps, f"{precision}-1"), precisions, runs)
    references = dict(zip(precisions, runs, strict=True))

    def compare(one: tuple) -> dict:
        precision, ranks, device = one
        row = {"precision": precision, "ranks": ranks, "device": device}
        try:
            run = _training(check, ranks, device, precision, steps, f"{precision}-{device}-{ranks}")
            row |= compared(run, references[precision])
            row["ok"] = within(row, precision)
            if not row["ok"]:
                check.problem(f"{ranks} ranks in {precision} on {device}: losses or gradients differ from one process "
                              f"({row['first_loss']:.1e} in the first step, {row['loss']:.1e} at most)")
        except Failure as failure:
            row |= {"ok": False, "why": str(failure)}
            check.problem(f"{ranks} ranks in {precision} on {device}: {failure}")
        return row

    check.in_parallel(compare, plan, data["runs"], 3)  # with up to 4 processes each
    if shutil.which("mpirun", path=check.env["PATH"]):
        _under_launcher(check, data)


def _under_launcher(check: Check, data: dict) -> None:
    """As users start ranks: by `lockstep launch`, whose mpirun may come from the archive."""
    shared = check.ranks_share(2)
    argv = [check.lockstep, "launch", "-n", 2, "--no-prefix", "--"]
    train = [check.lockstep, "train", "mlp", "--data", "digits", "--steps", check.steps(12, 4), "--device", "cuda", "--check-replicas", 4,
             "--quiet"]
    if shared:
        argv += ["bash", "-c", 'NCCL_HOSTID=rank$OMPI_COMM_WORLD_RANK exec "$@"', "-"]
        train.append("--share-devices")
    env = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"} if shared else {}
    try:
        check.run([*argv, *train], 60, env)
        data["launcher"] = "passed"
    except Failure as failure:
        data["launcher"] = str(failure)
        check.problem(str(failure))


# ---- Contexts ----


def contexts(check: Check, data: dict) -> None:
    ranks = max(2, len(check.gpus))
    shared = check.ranks_share(ranks)
    metrics = check.scratch / "contexts.jsonl"
    argv = [check.lockstep, "train", "cnn", "--data", "digits", "--epochs", 1000000, "--eval-every", 0, "--device", "cuda",
            "--quiet", "--metrics", metrics, *(["--share-devices"] if shared else [])]
    before = check.run_json([check.lockstep, "devices", "--json"])
    started = check.start_ranks(ranks, argv, shared)
    pids = [process.pid for process, _, _ in started]
    listed, seen = {}, {}
    try:
        end = time.monotonic() + min(check.seconds(40), check.left())
        while time.monotonic() < end and len(seen) < ranks:
            time.sleep(0.5)
            ended = [process for process, _, _ in started if process.poll() is not None]
            if ended:
                all_of_them, started = started, []
                check.finish_ranks(all_of_them, 5)
                raise Failure("the ranks ended before they could be looked at")
            if not metrics.exists() or metrics.read_text().count("\n") < 20:
                continue  # no context is made later than in the first steps
            listed = check.run_json([check.lockstep, "devices", "--json"])
            seen = {}
            for gpu in listed["gpus"]:
                for process in gpu.get("processes") or []:
                    if process["pid"] in pids:
                        seen.setdefault(process["pid"], []).append((gpu["index"], process["memory_bytes"]))
            if not seen and (check.dry or time.monotonic() > end - 20):
                break  # this machine does not report it
    finally:
        for process, _, _ in started:
            process.send_signal(signal.SIGTERM)
        for one in started:
            check.finish(one, 10)
    if not listed:
        raise Failure("the ranks did not get to train")
    data["before_bytes"] = [gpu.get("memory_used_bytes") for gpu in before["gpus"]]
    data["during_bytes"] = [gpu.get("memory_used_bytes") for gpu in listed["gpus"]]
    data["shared"] = shared
    if not seen:
        raise Skip("NVML reports no processes here")
    data["ranks"] = [{"rank": rank, "pid": pid, "on": seen.get(pid, [])} for rank, pid in enumerate(pids)]
    for rank, pid in enumerate(pids):
        where = [index for index, _ in seen.get(pid, [])]
        if len(where) != 1:
            check.problem(f"rank {rank} has {len(where)} contexts, on GPUs {where}")
    if not shared:
        used = [index for places in seen.values() for index, _ in places]
        if len(set(used)) != len(used):
            check.problem(f"two ranks are on one GPU: {sorted(used)}")


# ---- compute-sanitizer ----

# Tests of all kernels that we wrote, as nn_cuda_NAME_gpu_test; those with the most shared memory first.
WATCHED = ("attention", "operators", "few_channels", "layer_norm", "embedding", "relu_mask", "norm", "loss", "bias", "optim",
           "pool", "pointwise", "rnn")
# Files of nn/ops/cuda that a test is about, where it is not NAME.cu alone.
KERNELS = {"attention": ("attention_forward.cu", "attention_backward.cu"), "embedding": ("embedding.cu", "token_order.cu"),
           "rnn": ("rnn_steps.cu",)}


def digests(root) -> dict:
    """For each of WATCHED: its kernels' files, with all that they include of this tree, as one number."""
    return {name: sources.digest_with_includes(root, [f"nn/ops/cuda/{file}" for file in KERNELS.get(name, (f"{name}.cu",))])
            for name in WATCHED}


def found_clean_before(reports, gpu: str) -> dict:
    """By tool, test and digest: the date of the last report in the directory in which nothing was found on such a GPU."""
    known = {}
    for path in sorted(reports.glob("gpu-*.json")):
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
            sections = [s for s in report["sections"] if s["name"] == "sanitizer"] if report["gpus"][0] == gpu else []
            for one in [one for section in sections for one in section["data"].get("runs", [])]:
                if one["code"] == 0 and one.get("digest"):
                    key = one["tool"], one["name"], one["digest"]
                    known[key] = max(known.get(key, ""), one.get("clean_since") or report["date"][:10])
        except (ValueError, KeyError, IndexError, TypeError, OSError):  # not a report of this kind
            continue
    return known


def sanitizer(check: Check, data: dict) -> None:
    """Of kernels that have changed since nothing was found in them."""
    tests = {test["name"]: test for test in tests_of(check)}
    of_kernels = digests(ROOT)
    programs = [tests[f"nn_cuda_{name}_gpu_test"] | {"digest": of_kernels[name]} for name in WATCHED]
    clean = found_clean_before(ROOT / "docs/results", check.gpus[0])
    tool = shutil.which("compute-sanitizer", path=f"{check.env['PATH']}:/usr/local/cuda/bin")
    if not tool:
        raise Skip("compute-sanitizer is not installed")
    if check.dry:
        raise Skip("it watches GPUs alone")
    limit_s = 40 if check.quick else 75
    data["runs"] = []

    def run(job):
        tool_name, test = job
        argv = [tool, "--tool", tool_name, "--error-exitcode", 99, *test["command"]]
        result = {"tool": tool_name, "name": test["name"], "code": None, "why": "", "errors": None, "digest": test["digest"]}
        if since := clean.get((tool_name, test["name"], test["digest"])):
            return result | {"code": 0, "errors": 0, "clean_since": since}
        try:
            done = check.run(argv, limit_s, codes=None)
        except Late as late:  # watched for as long as there was time: no error is no proof
            return result | {"why": str(late), "late": True}
        except Failure as failure:
            return result | {"code": -1, "why": str(failure)}
        said = re.search(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)", done.out + done.err)
        errors = int(said[1] or said[2]) if said else None
        unable = "not supported" in (done.out + done.err) and errors is None
        return result | {"code": done.code, "errors": errors, "unable": unable, "seconds": round(done.seconds, 1),
                         "why": "" if done.code == 0 else done.last_words()}

    jobs = [(name, test) for name in ("racecheck", "memcheck") for test in programs]
    check.in_parallel(run, jobs, data["runs"])
    if all(one.get("unable") for one in data["runs"]):
        raise Skip("compute-sanitizer does not work on this machine")
    for one in data["runs"]:
        if one["code"] not in (None, 0):
            check.problem(f"{one['tool']} {one['name']}: {one['why'] or 'failed'}")


# ---- Graphs ----


def graphs_equal_eager(check: Check, data: dict) -> None:
    steps = check.steps(60, 5)
    data |= {"steps": steps, "runs": []}
    for precision in ("f32", "bf16", "fp16"):
        runs = {}
        for graphs in ("yes", "no"):
            runs[graphs] = _training(check, 1, "cuda", precision, steps, f"graphs-{precision}-{graphs}",
                                     ["--graphs", graphs])
        same = runs["yes"]["losses"] == runs["no"]["losses"] and runs["yes"]["sha256"] == runs["no"]["sha256"]
        data["runs"].append({"precision": precision, "same": same, "sha256": runs["yes"]["sha256"]})
        if not same:
            check.problem(f"graph and eager differ in {precision}")
    data["times"] = []
    for model, batch in (("mlp", check.steps(64)), ("cnn", check.steps(64))):
        row = {"model": model, "batch": batch}
        for graphs in ("yes", "no"):
            result = check.run_json([check.lockstep, "bench", "step", model, "--batch", batch, "--device", "cuda",
                                     "--precision", "bf16", "--steps", check.steps(1000), "--graphs", graphs, "--json"])
            row[graphs] = {key: result.get(key) for key in ("step_ms", "step_ms_p10", "step_ms_p90", "graphs",
                                                            "replays_per_step", "graphs_refused")}
        data["times"].append(row)
        if not row["yes"]["graphs"]:
            check.problem(f"{model}: steps are not captured: {row['yes']['graphs_refused']}")
        elif row["yes"]["replays_per_step"] != 1:
            check.problem(f"{model}: {row['yes']['replays_per_step']} graph launches a step, not 1")
