"""gpu-check's report: Markdown of what was measured, section by section."""
from harness.report import digits

_SIGN = {"passed": "passed", "failed": "**failed**", "skipped": "skipped"}


def _cell(text) -> str:
    return "–" if text is None else str(text).replace("|", "/")


def table(heads: list, rows: list) -> list:
    """The first column is text, the others are numbers."""
    return ["| " + " | ".join(heads) + " |", "|---" + "|---:" * (len(heads) - 1) + "|",
            *("| " + " | ".join(map(_cell, row)) + " |" for row in rows), ""]


def micros(ms) -> str:
    return "–" if ms is None else digits(1e3 * ms)


def percent(share) -> str:
    return "–" if share is None else f"{100 * share:.1f} %"


def mib(count) -> str:
    return "–" if count is None else f"{count / 2**20:,.0f} MiB"


def code_block(text: str) -> list:
    return ["```", *text.rstrip("\n").splitlines(), "```", ""]


def _machine(data: dict) -> list:
    f = data["facts"]
    smi = data["nvidia_smi"]
    lines = [f"{f['cpu']}, {f['processors']} processors, {f['memory_bytes'] / 2**30:.0f} GiB, {f['system']}, kernel "
             f"{f['kernel']}, Python {f['python']}.", ""]
    if smi["gpus"]:
        lines += table(["nvidia-smi -q", *(f"GPU {i}" for i in range(len(smi["gpus"])))],
                       [[field, *(gpu[i] for gpu in smi["gpus"])] for i, field in enumerate(smi["fields"])])
    for name, place in data["libraries"].items():
        lines.append(f"- {name}: " + (f"taken from {place}" if place else "not found"))
    if data["library_path"]:
        lines += ["", "All commands ran with this LD_LIBRARY_PATH:", "", *code_block(data["library_path"])]
    lines += ["", *code_block(data["version"]), *code_block(data["devices"])]
    if not data.get("measured"):
        return lines
    rows = [[f"{r['device']}, {r['threads']} threads" if r.get("threads") else r["device"],
             digits(1e-9 * r["copy_bytes_per_s"]) if r.get("copy_bytes_per_s") else None,
             *(next((digits(p["tflops"]) for p in r["products"] if p["precision"] == name), None)
               for name in ("bf16", "tf32", "f32"))] for r in data["measured"]]
    return [*lines, "What was measured of the devices: a copy within memory, reads and writes together, and products of "
            "square matrices.", "",
            *table(["device", "copy, GB/s", "bf16, TFLOP/s", "TF32, TFLOP/s", "f32, TFLOP/s"], rows)]


def _tests(data: dict) -> list:
    rows = [[p["name"], "passed" if p["code"] == 0 else "skipped" if p["code"] == 77 else "**failed**", len(p["tests"]),
             sum(t["failed"] for t in p["tests"]), p["seconds"]] for p in data["programs"]]
    lines = ["Each operation on the GPU against the CPU's, optimizers, memory, streams, recordings, collectives, and the "
             "gradient check. A test is a program, and exits with 77 where it cannot run.", "",
             *table(["program", "result", "tests", "failed", "s"], rows)]
    measured = [(t["name"], t["tolerance"], t["largest_error"]) for p in data["programs"] for t in p["tests"]
                if "tolerance" in t]
    if measured:
        lines += ["What is tolerated, and the largest error as a share of it (a test above 1 fails):", "",
                  *table(["test", "tolerance", "largest error / tolerance"], measured)]
    for program in data["programs"]:
        if program.get("output"):
            lines += [f"{program['name']} said at its end:", "", *code_block(program["output"])]
    return lines


def _ranks(data: dict) -> list:
    f32, halves = data["tolerances"]["f32"], [(name, data["tolerances"][name]) for name in ("bf16", "fp16")]
    of_halves = "; ".join(f"{name} {of[0]:.0e}, {of[1]:.0e} and {of[2]:.0e}" for name, of in halves)
    lines = [f"`cnn` on digits, global batch 64, SGD, {data['steps']} steps, against one process on the GPU: the same "
             f"samples, so the same gradients but for rounding. Tolerated, relative: f32 {f32[0]:.0e} in the first "
             f"step's loss, {f32[1]:.0e} in all, {f32[2]:.0e} in the norm of the first step's gradients; "
             f"{of_halves}. `--check-replicas 5` ends a run in which the ranks' "
             "parameters are not bitwise equal.", ""]
    if any(data["shared"].values()):
        lines += ["Ranks share a GPU where there are more of them than GPUs. NCCL takes each for a host of its own then "
                  "(NCCL_HOSTID) and uses sockets: this shows that results are right, and nothing about time.", ""]
    rows = [[f"{r['ranks']} × {r['device']}, {r['precision']}",
             *(f"{r[key]:.1e}" if key in r else None for key in ("first_loss", "loss", "first_norm")),
             "equal" if r["ok"] else f"**differ** {r.get('why', '')}"] for r in data["runs"]]
    lines += table(["ranks", "loss, first step", "loss, largest", "gradient norm", "result"], rows)
    if "launcher" in data:
        lines += [f"Two ranks under `lockstep launch`: {data['launcher']}.", ""]
    return lines


def _contexts(data: dict) -> list:
    lines = ["NVML's processes while the ranks train: each is to appear once, on its own GPU.", ""]
    if data.get("ranks"):
        lines += table(["rank", "GPU", "memory"],
                       [[r["rank"], ", ".join(str(i) for i, _ in r["on"]) or "none",
                         ", ".join(mib(b) for _, b in r["on"])] for r in data["ranks"]])
    if data.get("during_bytes"):
        lines += table(["GPU", "memory in use before", "while they train"],
                       [[i, mib(b), mib(d)] for i, (b, d) in
                        enumerate(zip(data["before_bytes"], data["during_bytes"], strict=False))])
    return lines


def _sanitizer(data: dict) -> list:
    def result(one):
        if one.get("clean_since"):
            return f"no error on {one['clean_since']}, unchanged since"
        if one["code"] is None:
            return "nothing found until its time was up"
        return "no error" if one["code"] == 0 else "skipped" if one["code"] == 77 else f"**{one['why'] or 'failed'}**"

    return table(["program", "tool", "found", "s"],
                 [[one["name"], one["tool"], result(one), one.get("seconds")] for one in data["runs"]])


def _graphs(data: dict) -> list:
    lines = [f"`cnn` on digits for {data['steps']} steps, epochs' last, smaller steps among them, from CUDA graphs and "
             "kernel by kernel: the losses of all steps and the checksums of the parameters are to be the same.", "",
             *table(["precision", "losses and parameters", "SHA-256 of the parameters"],
                    [[r["precision"], "the same bits" if r["same"] else "**differ**", r["sha256"][:16] + "…"]
                     for r in data["runs"]])]
    if data.get("times"):
        lines += table(["bf16", "graph, µs a step", "eager, µs", "eager / graph", "graph launches a step"],
                       [[f"{t['model']}, batch {t['batch']}", micros(t["yes"]["step_ms"]), micros(t["no"]["step_ms"]),
                         digits(t["no"]["step_ms"] / t["yes"]["step_ms"]), t["yes"]["replays_per_step"]]
                        for t in data["times"]])
    return lines


def _timeline(data: dict) -> list:
    lines = []
    if data["shared"]:
        lines += [f"{data['ranks']} ranks share one GPU here, which alternates between them: the order of events is what this "
                  "shows, not their lengths.", ""]
    for model, t in data["models"].items():
        lines += [f"`{model}`, {t['batch']} samples per rank, bf16, one eager step of {digits(t['end_ms'])} ms on "
                  f"rank 0, by the {t['clock']}'s clock:", "",
                  *table(["bucket", "kB", "gradients ready, ms", "allreduce from, ms", "to, ms"],
                         [[i, digits(b["bytes"] / 1e3), f"{b['ready_ms']:.3f}", f"{b['start_ms']:.3f}",
                           f"{b['end_ms']:.3f}"] for i, b in enumerate(t["buckets"])])]
        share = t["hidden_ms"] / t["communication_ms"] if t["communication_ms"] > 0 else None
        lines += [f"The last gradient was ready at {t['last_ready_ms']:.3f} ms. Of {t['communication_ms']:.3f} ms of "
                  f"allreduce, backward hid {t['hidden_ms']:.3f} ms ({percent(share)}).", ""]
    return lines


_FORMULA = ("Model FLOP/s utilisation (MFU) is 2 floating-point operations for each multiply-add of the model's matrix "
            "products and convolutions, forward and backward, without the input gradient of what reads the data, and of "
            "attention for the pairs that a causal mask leaves, divided by the time of a step and by the GPU's peak for dense products of the precision")


def _throughput(data: dict) -> list:
    peaks = {r["precision"]: r["peak_tflops"] for r in data["runs"] if r.get("peak_tflops")}
    stated = "; ".join(f"{name} {value:g}" for name, value in peaks.items())
    lines = [f"{_FORMULA} ({stated or 'not known for this GPU'} TFLOP/s, by the data sheet). The batch stays on the GPU. "
             "AdamW, parameters and optimizer in f32.", "",
             *table(["model, batch, precision", "step, µs", "10 % to 90 %", "samples/s", "TFLOP/s", "MFU",
                     "of measured products", "graph launches a step"],
                    [[f"{r['model']}, {r['batch']}, {r['precision']}", micros(r["step_ms"]),
                      f"{micros(r['step_ms_p10'])} to {micros(r['step_ms_p90'])}", f"{r['samples_per_s']:,.0f}",
                      digits(r["tflops"]), percent(r.get("mfu")), percent((r.get("measured") or {}).get("mfu")),
                      r["replays_per_step"]] for r in data["runs"]])]
    for run in data["runs"]:
        lines += _profile(run) if run.get("profile") else []
    if data.get("copied"):
        lines += ["With a batch that is copied from the host in every step, as in training:", "",
                  *table(["model, batch, precision", "step, µs", "samples/s"],
                         [[f"{r['model']}, {r['batch']}, {r['precision']}", micros(r["step_ms"]),
                           f"{r['samples_per_s']:,.0f}"] for r in data["copied"]])]
    return lines


def _profile(run: dict) -> list:
    """Where the time of a step goes: what took longest."""
    costs = run["profile"]["operations"]
    whole = sum(cost["ms"] for cost in costs) or 1
    kernels = f"{run['kernels_per_step']} kernels" if run.get("kernels_per_step") else "no graph"
    rows = [[cost["operation"], cost["calls"], micros(cost["ms"]), micros(cost.get("floor_ms")), percent(cost["ms"] / whole),
             percent(cost.get("share_of_peak_bandwidth")),
             digits(1e-9 * cost["flops"] / cost["ms"]) if cost["flops"] and cost["ms"] else ""] for cost in costs[:12]]
    return [f"#### One step of {run['model']}, batch {run['batch']}, {run['precision']}: {kernels}", "",
            *table(["operation", "calls", "time, µs", "at least, µs", "share", "of peak bandwidth", "TFLOP/s"], rows)]


def _pytorch(data: dict) -> list:
    lines = [f"PyTorch {data['version']}: bf16 autocast, fused AdamW, channels_last for convolutions; \"+graph\" is the "
             "whole step in one CUDA graph, compile is torch.compile. The same models, batches on the GPU, "
             f"a process for each, on the same GPU one after the other, {data['rounds']} rounds; medians, ratios are taken "
             f"within a round (smallest to largest in brackets). Its compilers ran while other sections did, "
             f"{data['build_s']:.0f} s in all; max-autotune, which takes minutes, is left out. After the first round, for "
             "which lockstep was measured in the section Throughput, the two fastest configurations take part. PyTorch's "
             "GPT-2 has 50,304 rows, as nanoGPT's, lockstep's 50,257.", ""]
    for group in data["groups"]:
        rows = []
        for row in group["rows"]:
            name = f"**{row['name']}**" if row["name"] in ("lockstep", group["best"]) else row["name"]
            versus = row["ratio"]
            rows.append([name, f"{micros(row['median_ms'])} ({micros(row['low_ms'])} to {micros(row['high_ms'])})",
                         f"{row['samples_per_s']:,.0f}", percent(row.get("mfu")),
                         f"{digits(versus[0])} × ({digits(versus[1])} to {digits(versus[2])})" if versus else "1"])
        lines += [f"#### {group['model']}, batch {group['batch']}", "",
                  *table(["", "step, µs", "samples/s", "MFU", "time, lockstep = 1"], rows)]
        lines += [f"- {one['name']}: {one['why']}" for one in group["refused"]]
        lines += [""] if group["refused"] else []
    best = [(g, next(r for r in g["rows"] if r["name"] == g["best"])) for g in data["groups"] if g["best"]]
    if best:
        lines += ["Against the fastest configuration of each:", "",
                  *table(["model, batch", "fastest PyTorch", "its time, lockstep = 1", "at least as fast"],
                         [[f"{g['model']}, {g['batch']}", r["name"],
                           f"{digits(r['ratio'][0])} × ({digits(r['ratio'][1])} to {digits(r['ratio'][2])})",
                           "yes" if r["ratio"][0] >= 1 else "**no**"] for g, r in best])]
    return lines


def _communication(data: dict) -> list:
    return ["A step minus the same step with collectives replaced by nothing, blocks of both alternating; goal: under "
            "3 % of the step.", "",
            *table(["model, batch per rank", "GPUs", "step, µs", "computation, µs", "exposed, µs", "share",
                    "graph launches a step"],
                   [[f"{r['model']}, {r['batch']}", r["world_size"], micros(r["step_ms"]), micros(r["compute_ms"]),
                     micros(r["exposed_comm_ms"]), percent(r["share"]) if r["share"] < 0.03 else
                     f"**{percent(r['share'])}**", r["replays_per_step"]] for r in data["runs"]])]


def _backend(data: dict) -> list:
    lines = table(["of tensors on a GPU", ""], [[run["what"], "passed" if run["ok"] else "**failed**"] for run in data["runs"]])
    lines += ["Ranks that share a GPU reach each other over sockets.", ""]
    if "off" in data:
        lines += ["Losses of 12 steps differ from those of DDP over Gloo by at most "
                  + ", ".join(f"{off:.1e} ({name})" for name, off in data["off"].items()) + ".", ""]
    return lines


RENDERERS = {"machine": _machine, "tests": _tests, "ranks": _ranks, "contexts": _contexts, "sanitizer": _sanitizer,
             "graphs": _graphs, "timeline": _timeline, "throughput": _throughput, "pytorch": _pytorch,
             "communication": _communication, "backend": _backend}


def _section(section: dict) -> list:
    lines = [f"### {section['title']}", "", f"{_SIGN[section['status']]} in {section['seconds']:g} s", ""]
    lines += [f"- {problem}" for problem in section["problems"]] + ([""] if section["problems"] else [])
    if section["data"]:
        try:
            lines += RENDERERS[section["name"]](section["data"])
        except Exception:  # it was cut short: what it has stands in the JSON file
            lines += ["What it had measured by then is in the JSON file beside this one.", ""]
    if section["commands"]:
        lines += code_block("\n".join(section["commands"]))
    return lines


def _in_short(problems: list) -> str:
    more = f" (and {len(problems) - 2} more)" if len(problems) > 2 else ""
    return "; ".join(problems[:2]) + more


def markdown(data: dict) -> str:
    """`data`: what gpu-check writes as JSON."""
    sections = data["sections"]
    names = ", ".join(dict.fromkeys(data["gpus"]))
    lines = [f"# GPU check: {len(data['gpus'])} × {names}, {data['date'][:10]}", "",
             f"`{data['command']}`, {data['date']}, {data['seconds']:.0f} s. lockstep {data['program']}.", ""]
    lines += table(["section", "result", "s"], [[s["title"], _SIGN[s["status"]], f"{s['seconds']:g}"] for s in sections])
    for status, words in (("failed", "Failed:"), ("skipped", "Skipped:")):
        shown = [s for s in sections if s["status"] == status]
        if shown:
            lines += [words, "", *(f"- {s['title']}: {_in_short(s['problems'])}" for s in shown), ""]
    for section in sections:
        lines += _section(section)
    return "\n".join(lines).rstrip("\n") + "\n"
