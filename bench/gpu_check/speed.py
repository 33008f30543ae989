"""The sections that say how fast it is."""
import array
import json
import random
import sys
import time

from gpu_check.check import Check, Skip, model_of
from gpu_check.peers import BATCHES, GROUPS, MODELS, WORKLOADS, Peers
from harness.processes import Failure
from harness.stats import Spread, quantile, ratio


def _data(check: Check, workload: str) -> list:
    """Flags for synthetic tokens; `lockstep bench` makes the data of the other models itself."""
    sizes = check.token_sizes(workload)
    if sizes is None:
        return []
    context, vocabulary = sizes
    path = check.scratch / f"tokens-{vocabulary}.bin"
    if not path.exists():
        generator = random.Random(1)
        tokens = array.array("H", (generator.randrange(vocabulary) for _ in range(200_000)))
        if sys.byteorder == "big":
            tokens.byteswap()
        path.write_bytes(tokens.tobytes())
    return ["--data", f"tokens:{path}", "--classes", vocabulary, "--context", context]


def _step(check: Check, workload: str, batch: int, more: list, ranks: int = 1, captured: bool = False) -> dict:
    """What `lockstep bench step` says. `captured`: replays_per_step will be looked at."""
    shared, model = check.ranks_share(ranks), model_of(workload)
    argv = [check.lockstep, "bench", "step", model, "--batch", check.steps(batch), "--device", "cuda", "--json",
            *_data(check, workload), *check.smaller(model, captured), *more]
    if ranks == 1:
        return check.run_json(argv) | {"model": workload}
    timeout_s, limit_s = check.patience(ranks)
    argv += ["--timeout-seconds", timeout_s, *(["--share-devices"] if shared else [])]
    return json.loads(check.finish_ranks(check.start_ranks(ranks, argv, shared), limit_s)[0].out)


def timeline(check: Check, data: dict) -> None:
    ranks = max(2, len(check.gpus))
    data |= {"ranks": ranks, "shared": check.ranks_share(ranks), "models": {}}
    steps = check.steps(20 if data["shared"] else 200)
    for model, more in (("mlp", ["--first-bucket-mb", "0.1", "--bucket-mb", "1"]), ("cnn", [])):
        result = _step(check, model, 1024, ["--precision", "bf16", "--steps", steps, "--timeline", *more], ranks)
        data["models"][model] = result["timeline"] | {"step_ms": result["step_ms"], "batch": result["batch"]}
        if not result["timeline"]["buckets"]:
            check.problem(f"{model}: the timeline has no buckets")


def communication(check: Check, data: dict) -> None:
    if len(check.gpus) < 2:
        raise Skip("it takes more than one GPU: on one, ranks alternate, and nothing overlaps")
    data["runs"] = []
    counts = sorted({2, len(check.gpus)})
    for ranks in counts:
        for model in MODELS:
            for batch in BATCHES:
                result = _step(check, model, batch, ["--precision", "bf16", "--steps", check.steps(1000)], ranks,
                               captured=True)
                share = result["exposed_comm_ms"] / result["step_ms"]
                data["runs"].append({key: result[key] for key in ("model", "world_size", "batch", "step_ms", "compute_ms",
                                                                  "exposed_comm_ms", "replays_per_step")}
                                    | {"share": share})
                if result["replays_per_step"] != 1:
                    check.problem(f"{model} on {ranks} GPUs: {result['replays_per_step']} graph launches a step, not 1")


_FIGURES = ("model", "batch", "precision", "step_ms", "step_ms_p10", "step_ms_p90", "samples_per_s", "flops_per_step",
            "tflops", "mfu", "peak_tflops", "measured", "graphs", "replays_per_step", "graphs_refused", "engines", "fallbacks", "startup_ms", "kernels_per_step",
            "profile")

# What these models have to be computed by in 16 bits: a fallback is a fault of this check's subject.
_ENGINES = {"gpt2": {"attention": "cuDNN", "attention backward": "cuDNN", "product with GELU": "cuBLASLt"},
            "resnet50": {"convolution": "cuDNN"}}
_HALVES = {"bf16": "bf16", "fp16": "f16"}  # as engines name them


def throughput(check: Check, data: dict) -> None:
    """Every workload alone, in bf16, and some in other precisions: the largest models first, should time run out."""
    data |= {"runs": [], "copied": []}
    flags = {"bf16": ["--precision", "bf16"], "fp16": ["--precision", "fp16"], "tf32": ["--tf32"], "f32": []}
    of = {"bf16": lambda name: True, "fp16": lambda name: name in _ENGINES, "tf32": lambda name: WORKLOADS[name].tf32,
          "f32": lambda name: WORKLOADS[name].f32}
    for precision in list(flags)[:1 if check.quick else None]:
        for name, batch in reversed(GROUPS):
            if of[precision](name):
                steps = WORKLOADS[name].steps // (3 if precision == "f32" else 1)  # which take several times as long
                _one_throughput(check, data, name, batch, precision, [*flags[precision], "--steps", check.steps(steps)])
    # As training does it: the batch comes from the host in every step.
    for model in MODELS:
        result = _step(check, model, 4096, ["--precision", "bf16", "--steps", check.steps(600), "--copy-batch", "yes"])
        data["copied"].append({key: result.get(key) for key in _FIGURES})


def _one_throughput(check: Check, data: dict, model: str, batch: int, precision: str, flags: list) -> None:
    try:
        result = _step(check, model, batch, [*flags, *(["--profile", "--peak-tflops", "measured"] if precision == "bf16" else [])])
    except Failure as failure:
        check.problem(f"{model}, batch {batch}, {precision}: {failure}")
        return
    data["runs"].append({key: result.get(key) for key in _FIGURES})
    if result["precision"] != precision:
        check.problem(f"{model}: {result['precision']} was computed, {precision} was asked for")
    if precision not in _HALVES or check.dry:  # a GPU in software has no cuDNN
        return
    for name, wanted in _ENGINES.get(model_of(model), {}).items():
        operation = f"{name}, {_HALVES[precision]}"
        engine = result.get("engines", {}).get(operation, "nothing")
        if not engine.startswith(wanted) or operation in result["fallbacks"]:
            check.problem(f"{model}: {operation} is computed by {engine}, not by {wanted}")


ROUNDS = 3  # at least


def against_pytorch(check: Check, data: dict, peers: Peers, why_not: str, measured: list = ()) -> None:
    """Rounds: lockstep, then each configuration, one after the other on the same GPU; ratios within a round. After the
    first round the two fastest configurations of a workload take part. `measured`: runs of throughput(), which are
    lockstep's part in the first round."""
    if peers is None:
        raise Skip(why_not)
    data |= {"version": peers.version, "build_s": round(peers.seconds_to_build(), 1),
             "configurations": list(peers.configurations), "groups": []}
    check.note(["python3", "bench/peers/torch/gpu_step.py", "--model", "WORKLOAD", "--batch", "BATCH", "--configuration",
                "CONFIGURATION"])
    groups = list(reversed(GROUPS))  # the largest models first
    results = {group: {} for group in groups}  # by contestant, by round: ms
    refused = {group: {} for group in groups}
    ours = {(run["model"], run["batch"]): run for run in measured if run["precision"] == "bf16"}
    flops, rounds, end = {}, 0, time.monotonic() + max(20.0, check.left() - 20)
    took = 0.0

    def measure_lockstep(group: tuple) -> None:
        workload, batch = group
        try:
            said = ours.pop(group, None) or _step(check, workload, batch, ["--precision", "bf16", "--steps",
                                                                           min(400, WORKLOADS[workload].steps)])
            flops[group] = (said["flops_per_step"], said.get("peak_tflops"))
            results[group].setdefault("lockstep", {})[rounds] = said["step_ms"]
        except Failure as failure:
            refused[group]["lockstep"] = str(failure)

    def measure_pytorch(group: tuple, configuration: str) -> None:
        why = refused[group].get(configuration) or peers.refusal(*group, configuration)
        if not why:
            try:
                answer = peers.measure(*group, configuration, blocks=5, seconds=0.25,
                                       limit_s=max(1.0, min(20.0, check.left())))
                results[group].setdefault(configuration, {})[rounds] = quantile(answer["step_ms"], 0.5)
                return
            except Failure as failure:
                why = str(failure)
        refused[group][configuration] = why

    while rounds < (ROUNDS if check.quick else 5) and (rounds < ROUNDS or time.monotonic() + took < end):
        begin = time.monotonic()
        rounds += 1
        for group in groups:
            if check.left() < 5:
                break
            measure_lockstep(group)
            for configuration in _still_in(peers.configurations, results[group]):
                measure_pytorch(group, configuration)
        took = time.monotonic() - begin
    for group in groups:
        data["groups"].append(_group(group, results[group], refused[group], *flops.get(group, (0, None))))
        if refused[group].get("lockstep"):
            check.problem(f"{group[0]}, batch {group[1]}: {refused[group]['lockstep']}")
    data["rounds"] = min((len(results[group].get("lockstep", ())) for group in groups), default=0)
    if data["rounds"] < ROUNDS:
        check.problem(f"there was time for {data['rounds']} of {ROUNDS} rounds")
    if not any(set(results[group]) - {"lockstep"} for group in groups):
        check.problem(f"PyTorch measured nothing: {next(iter(refused[groups[0]].values()), 'unknown')}")


def _still_in(configurations: tuple, results: dict) -> list:
    """The two that were fastest in the first round; all of them before it."""
    known = {name: by_round[1] for name, by_round in results.items() if name != "lockstep" and 1 in by_round}
    return sorted(known, key=known.get)[:2] or list(configurations)


def _group(group: tuple, results: dict, refused: dict, flops: float, peak) -> dict:
    """Medians with ranges, and how many times lockstep's time each takes."""
    ours = results.get("lockstep", {})
    rows = []
    for name, by_round in results.items():
        spread = Spread.of(list(by_round.values()))
        versus = ratio(by_round, ours) if name != "lockstep" and ours else None
        tflops = 1e-9 * flops / spread.median
        rows.append({"name": name, "median_ms": spread.median, "low_ms": spread.low, "high_ms": spread.high,
                     "samples_per_s": 1e3 * group[1] / spread.median, "mfu": tflops / peak if peak else None,
                     "ratio": [versus.median, versus.low, versus.high] if versus else None})
    peers = [row for row in rows if row["ratio"]]
    best = min(peers, key=lambda row: row["ratio"][0], default=None)
    return {"model": group[0], "batch": group[1], "rows": rows, "best": best["name"] if best else None,
            "refused": [{"name": name, "why": why} for name, why in refused.items()]}
