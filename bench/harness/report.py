"""The section that bench/compare writes: Markdown tables of medians over rounds, smallest and largest in brackets."""
import pathlib

from harness.contestants import shown
from harness.machine import BUSY, in_words
from harness.rounds import Entry
from harness.stats import Spread, ratio

BEGIN = "<!-- bench/compare: begin (it writes what stands up to its end) -->"
END = "<!-- bench/compare: end -->"


def entries(data: dict) -> list:
    """All that took part, or should have."""
    groups = [*data["steps"].values(), data["allreduce"], *data["startup"].values(), *data["backend"].values(),
              data["collectives"]]
    return [entry for group in groups for entry in group]


def digits(value: float) -> str:
    """Three significant digits, thousands grouped."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.2g}"


def spread(values: dict, scale: float = 1) -> str:
    s = Spread.of([value * scale for value in values.values()])
    return f"{digits(s.median)} ({digits(s.low)} to {digits(s.high)})"


def times(value) -> str:
    """A ratio with its spread over rounds."""
    return f"{digits(value.median)} × ({digits(value.low)} to {digits(value.high)})" if value else "–"


def bytes_text(count: int) -> str:
    for unit, name in ((1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "KB")):
        if count >= unit and count % unit == 0:
            return f"{count // unit} {name}"
    return f"{count:,} B"


def _absent(entry: Entry, columns: int) -> str:
    why = f"failed: {entry.failed}" if entry.failed else f"skipped: {entry.skipped}"
    return f"| {entry.name} | {why.replace('|', '/')} |" + " |" * (columns - 2)


def _there(entry: Entry) -> bool:
    return bool(entry.results) and not entry.failed


def _fastest(group: list, figure):
    """The peer with the smallest median: of its ratios to lockstep, round by round, where lockstep is there."""
    def key(entry):
        versus = _versus(group, entry, figure) if _there(group[0]) else None
        return (versus or Spread.of(list(entry.series(figure).values()))).median

    return min((entry for entry in group[1:] if _there(entry)), key=key, default=None)


def _versus(group: list, peer: Entry, figure):
    return ratio(peer.series(figure), group[0].series(figure))


def _memory(result: dict) -> int:
    return max(result["peak_memory_bytes"])


def _memory_without_gpu(result: dict) -> int:
    """What a build for the CPU alone would need at most: the ratio is taken against this."""
    return max(peak - gpu for peak, gpu in zip(result["peak_memory_bytes"],
                                               result.get("gpu_library_bytes", [0] * len(result["peak_memory_bytes"]))))


def _step_ms(result: dict) -> float:
    return result["step_ms"]


def _share(group: list, entry: Entry) -> str:
    """Of the rate of large products, as lockstep measured it on all ranks at once, a step's products: theirs are the same
    as lockstep's."""
    if not _there(group[0]) or not group[0].peak_tflops:
        return "–"
    flops = next(iter(group[0].results.values()))["flops_per_step"]
    step_ms = Spread.of(list(entry.series(_step_ms).values())).median
    return f"{100 * flops / (step_ms * 1e9) / group[0].peak_tflops:.0f} %"


def _medians(entry: Entry, keys: tuple) -> list:
    return [digits(Spread.of(list(entry.series(lambda r, key=key: r[key]).values())).median) for key in keys]


def _steps(model: str, batch: int, group: list) -> list:
    lines = [f"#### {model}, {batch} samples per rank", "",
             "| | step, ms | samples/s | computation, ms | exposed communication, ms | memory of a rank, MB | "
             "share of measured peak | time, lockstep = 1 |",
             "|---|---:|---:|---:|---:|---:|---:|---:|"]
    best = _fastest(group, _step_ms)
    for entry in group:
        if not _there(entry):
            lines.append(_absent(entry, 8))
            continue
        cells = [f"**{entry.name}**" if entry is best else entry.name, spread(entry.series(_step_ms))]
        cells += _medians(entry, ("samples_per_s", "compute_ms", "exposed_comm_ms"))
        cells += [digits(Spread.of(list(entry.series(_memory).values())).median / 1e6), _share(group, entry),
                  "1" if entry.name == "lockstep" else times(_versus(group, entry, _step_ms))]
        lines.append(f"| {' | '.join(cells)} |")
    if best and _there(group[0]):
        versus = times(_versus(group, best, _step_ms))
        lines += ["", f"Against the fastest, {best.name}: a step takes it {versus} as long."]
    return [*lines, ""]


def _rows(groups: dict, label, width: int, cells_of) -> list:
    """A row for each entry of each model: `label(model)`, the entry's name, and the cells of `cells_of(group, entry)`;
    `width` columns without the label."""
    lines = []
    for model, group in groups.items():
        for entry in group:
            if _there(entry):
                lines.append(f"| {' | '.join([label(model), entry.name, *cells_of(group, entry)])} |")
            else:
                lines.append(f"| {label(model)} " + _absent(entry, width))
    return lines


def _backends(groups: dict, batches: dict) -> list:
    def cells_of(group: list, entry: Entry) -> list:
        versus = times(_versus(group, entry, _step_ms)) if entry is not group[0] and _there(group[0]) else ""
        return [spread(entry.series(_step_ms)), *_medians(entry, ("samples_per_s", "compute_ms")), versus]

    return ["### PyTorch's DDP over lockstep and over Gloo", "", "Uncompiled; the same steps without communication beside "
            "them.", "", "| model | | step, ms | samples/s | computation, ms | Gloo / lockstep |",
            "|---|---|---:|---:|---:|---:|",
            *_rows(groups, lambda model: f"{model}, {batches[model]} samples per rank", 5, cells_of), ""]


def _collective(title: str, about: str, group: list, sizes: list, prefix: str = "") -> list:
    """`prefix` + the size is a result's key."""
    peers = group[1:]
    lines = [title, "", about, "",
             "| bytes | lockstep | " + " | ".join(f"{p.name} | {p.name} / lockstep" for p in peers) + " |",
             "|---:|" + "---:|" * (1 + 2 * len(peers))]
    for size in sizes:
        def time_us(result, size=size):
            return result[f"{prefix}{size}"]["time_us"]
        cells = [bytes_text(size), spread(group[0].series(time_us)) if _there(group[0]) else "–"]
        for peer in peers:
            there = _there(peer)
            cells += [spread(peer.series(time_us)) if there else "–", times(there and _versus(group, peer, time_us))]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", *_notes(group)]


def _startup_ms(result: dict) -> float:
    return result["startup_ms"]


def _startup(groups: dict) -> list:
    def cells_of(group: list, entry: Entry) -> list:
        gpu = max(max(r.get("gpu_library_bytes", [0])) for r in entry.results.values())
        versus = ["1", "1"] if entry.name == "lockstep" else [times(_versus(group, entry, _startup_ms)),
                                                              times(_versus(group, entry, _memory_without_gpu))]
        return [spread(entry.series(_startup_ms)), spread(entry.series(_memory), 1e-6), digits(gpu / 1e6), *versus]

    return ["### Starting", "", "From the start of the processes to the end of the first step, and the most memory of "
            "a rank till then. PyTorch's memory counts without the files of GPU libraries that its build maps.", "",
            "| model | | start, ms | memory, MB | of it GPU libraries | start, lockstep = 1 | memory, lockstep = 1 |",
            "|---|---|---:|---:|---:|---:|---:|", *_rows(groups, lambda model: model, 6, cells_of), ""]


def _notes(group: list) -> list:
    absent = [entry for entry in group if not _there(entry)]
    notes = [f"{entry.name}: {'failed: ' + entry.failed if entry.failed else 'skipped: ' + entry.skipped}"
             for entry in absent]
    return [line for note in notes for line in (note, "")]


def _rounds(data: dict) -> str:
    """How many there were: less than planned where time was up."""
    counts = {len(entry.results) for entry in entries(data) if _there(entry)}
    return f"{min(counts)} to {max(counts)}" if len(counts) > 1 else f"{next(iter(counts), 0)}"


def _commands(data: dict) -> list:
    seen = {}
    for entry in entries(data):
        if entry.command:
            seen.setdefault(shown(entry.command), None)
    return ["### Single measurements", "", "```", *seen, "```", ""] if seen else []


def section(data: dict) -> str:
    s, v = data["settings"], data["versions"]
    cores = data["machine"]["cores"]
    crowded = f", more than there are cores ({cores})" if s["ranks"] * s["threads"] > cores else ""
    lines = [BEGIN, "## Against PyTorch, Gloo and MPI", "",
             f"`{shown(data['command'])}`, {data['machine']['date']}: {s['ranks']} ranks with {s['threads']} "
             f"thread{'s' if s['threads'] > 1 else ''} each{crowded}. Contestants alternate, {_rounds(data)} rounds; "
             "a figure is the median over rounds, with the smallest and the largest in brackets; ratios are taken "
             f"within each round. Load average when it began: {data['load_average_before']:.1f}."
             + (" **Others were at work on the machine: do not rely on these figures.**"
                if data["load_average_before"] > BUSY else ""), "",
             f"Machine: {in_words(data['machine'])}. lockstep {v['lockstep']}, sources {v['sources']}, {v['compiler']}"
             f"; PyTorch {v['PyTorch']}; Open MPI {v['Open MPI']}; oneDNN {v['oneDNN']}.", ""]
    if data["steps"]:
        lines += ["### A training step", "", f"f32, AdamW, synthetic data; {s['steps']} steps per turn, of each "
                  "the slowest rank's time.", ""]
        for model, group in data["steps"].items():
            lines += _steps(model, s["batches"][model], group)
    if data["allreduce"]:
        lines += _collective("### Allreduce", "In place, f32, µs.", data["allreduce"], s["sizes"])
    if data["startup"]:
        lines += _startup(data["startup"])
    if data["backend"]:
        lines += _backends(data["backend"], s["batches"])
    if data["collectives"]:
        for kind, about in (("all_reduce", "In place"), ("all_gather", "Into so many bytes"),
                            ("reduce_scatter", "Of so many bytes on each rank")):
            lines += _collective(f"### PyTorch's {kind} over lockstep and over Gloo", f"{about}, f32, µs.",
                                 data["collectives"], s["sizes"], f"{kind} ")
    lines += _commands(data)
    return "\n".join([*lines, END]) + "\n"


def put_into(path: pathlib.Path, text: str) -> None:
    """Writes the section in place of an earlier one, or at the end of the file."""
    before = path.read_text(encoding="utf-8") if path.exists() else "# Results\n"
    begin, end = before.find(BEGIN), before.find(END)
    if 0 <= begin < end:
        after = before[:begin] + text.rstrip("\n") + before[end + len(END):]
    else:
        after = before.rstrip("\n") + "\n\n" + text
    scratch = path.with_name(path.name + ".new")
    scratch.write_text(after, encoding="utf-8")
    scratch.replace(path)
