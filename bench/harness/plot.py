"""The figure of bench/scaling, as SVG that follows the reader's light or dark theme."""
import math
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 860, 400
TOP, BOTTOM, PANEL = 64, 328, 330  # of the plots, and the width of one
LEFTS = {"weak": 76, "strong": 500}

COLOURS = 4  # of series; more begin again

# Plain classes and no variables, which viewers other than browsers do not know.
_SHAPES = """
  text { font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; }
  text.title { font-size: 14px; font-weight: 600; }
  .grid, .axis { stroke-width: 1; } .ideal { stroke-width: 1.5; stroke-dasharray: 5 4; fill: none; }
  .line { stroke-width: 2; fill: none; stroke-linejoin: round; } .spread { stroke-width: 1.5; opacity: 0.55; }
  .dot { stroke-width: 2; }
"""


def _theme(paper: str, ink: str, faint: str, grid: str, crowded: str, series: list) -> str:
    rules = [f"text {{ fill: {ink}; }} text.faint {{ fill: {faint}; }} .paper {{ fill: {paper}; }}",
             f".crowded {{ fill: {crowded}; }} .grid {{ stroke: {grid}; }}",
             f".axis, .ideal, .dot.any {{ stroke: {faint}; }}"]
    rules += [f".s{i} {{ stroke: {colour}; }} .dot.s{i} {{ fill: {colour}; }}" for i, colour in enumerate(series)]
    return "\n".join([*rules, f".dot.open {{ fill: {paper}; }}"])


_LIGHT = _theme("#ffffff", "#1f2328", "#59636e", "#d8dee4", "#f3f4f6", ["#0969da", "#bc4c00", "#1a7f37", "#8250df"])
_DARK = _theme("#0d1117", "#e6edf3", "#9198a1", "#2a313a", "#161b22", ["#4493f8", "#f0883e", "#3fb950", "#ab7df8"])
STYLE = f"{_SHAPES}{_LIGHT}\n@media (prefers-color-scheme: dark) {{\n{_DARK}\n}}\n"


class Panel:
    """One plot: numbers of ranks to the right; upwards an efficiency in percent, or a speed-up."""

    def __init__(self, mode: str, series: list, cores: float):
        self.mode, self.series = mode, series
        self.left, self.right = LEFTS[mode], LEFTS[mode] + PANEL
        self.key, self.scale = ("efficiency", 100) if mode == "weak" else ("speedup", 1)
        self.ranks = sorted({point["ranks"] for s in series for point in s["points"]})
        self.cores = cores
        # Doublings are evenly spaced: 1, 2, 4, … as people scale; for speed-ups both ways, so ideal is straight.
        self.x_low, self.x_high = math.log2(self.ranks[0]), math.log2(self.ranks[-1])
        values = [point[self.key]["high"] * self.scale for s in series for point in s["points"] if point[self.key]]
        self.ideal = self.ranks[-1] / self.ranks[0]
        if mode == "weak":
            self.y_low, self.y_high = 0, max(110.0, math.ceil(max(values, default=0) / 10) * 10.0)
            self.ticks = [tick for tick in range(0, int(self.y_high) + 1, 20)]
        else:
            lows = [point[self.key]["low"] for s in series for point in s["points"] if point[self.key]]
            self.y_low = math.log2(min([1.0, *lows])) - 0.12
            self.y_high = math.log2(max([2.0, self.ideal, *values])) + 0.05
            self.ticks = [2.0**k for k in range(math.ceil(self.y_low), math.floor(self.y_high) + 1)]

    def x(self, ranks: float) -> float:
        if self.x_high == self.x_low:
            return (self.left + self.right) / 2
        inset = 22  # points do not sit on the frame
        share = (math.log2(ranks) - self.x_low) / (self.x_high - self.x_low)
        return self.left + inset + share * (PANEL - 2 * inset)

    def y(self, value: float) -> float:
        at = value if self.mode == "weak" else math.log2(value)
        return BOTTOM - (at - self.y_low) / (self.y_high - self.y_low) * (BOTTOM - TOP)

    def draw(self, colours: dict) -> list:
        lines = (part for s in self.series for part in self._line(s, colours[s["model"]]))
        return [*self._frame(), *self._ideal(), *lines]

    def _frame(self) -> list:
        title, y_label = (("Weak scaling: each rank keeps its batch", "efficiency (%)") if self.mode == "weak" else
                          ("Strong scaling: all share one batch", "speed-up (×)"))
        parts = [text(self.left, TOP - 16, title, "title")]
        crowded = [n for n in self.ranks if n > self.cores]
        if crowded:
            fitting = [n for n in self.ranks if n <= self.cores]
            begin = (self.x(fitting[-1]) + self.x(crowded[0])) / 2 if fitting else self.left
            parts.append(f'<rect class="crowded" x="{begin:.1f}" y="{TOP}" width="{self.right - begin:.1f}" '
                         f'height="{BOTTOM - TOP}"/>')
            parts.append(text(self.right - 6, BOTTOM - 8, "more than cores", "faint", "end"))
        for tick in self.ticks:
            y = self.y(tick)
            parts.append(f'<line class="grid" x1="{self.left}" x2="{self.right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(text(self.left - 8, y + 4, f"{tick:g}", "faint", "end"))
        for ranks in self.ranks:
            parts.append(text(self.x(ranks), BOTTOM + 20, str(ranks), "faint", "middle"))
        parts.append(f'<line class="axis" x1="{self.left}" x2="{self.right}" y1="{BOTTOM}" y2="{BOTTOM}"/>')
        parts.append(text((self.left + self.right) / 2, BOTTOM + 42, "ranks (processes)", "", "middle"))
        middle, x = (TOP + BOTTOM) / 2, self.left - 48
        parts.append(f'<text x="{x}" y="{middle}" text-anchor="middle" transform="rotate(-90 {x} {middle})">'
                     f'{y_label}</text>')
        return parts

    def _ideal(self) -> list:
        first, last = self.ranks[0], self.ranks[-1]
        begin, end = (100.0, 100.0) if self.mode == "weak" else (1.0, self.ideal)
        line = (f'<path class="ideal" d="M{self.x(first):.1f} {self.y(begin):.1f}L{self.x(last):.1f} '
                f'{self.y(end):.1f}"/>')
        return [line] if last > first else []

    def _line(self, series: dict, colour: str) -> list:
        points = [point for point in series["points"] if point[self.key]]
        at = [(self.x(p["ranks"]), self.y(p[self.key]["median"] * self.scale)) for p in points]
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y in at)
        parts = [f'<path class="line {colour}" d="M{line}"/>'] if at else []
        for point, (x, y) in zip(points, at):
            low, high = (self.y(point[self.key][end] * self.scale) for end in ("low", "high"))
            kind = f"dot {colour} open" if point["oversubscribed"] else f"dot {colour}"
            parts.append(f'<line class="spread {colour}" x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>')
            parts.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>')
        return parts


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def scaling(data: dict) -> str:
    """`data` is what bench/scaling writes as JSON."""
    models = list(dict.fromkeys(series["model"] for series in data["series"]))
    colours = {model: f"s{i % COLOURS}" for i, model in enumerate(models)}
    cores = data["machine"]["cores"] / data["threads"]
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
             f'height="{HEIGHT}" role="img" aria-label="Scaling of lockstep with the number of ranks">', f"<style>{STYLE}</style>",
             f'<rect width="{WIDTH}" height="{HEIGHT}" rx="6" class="paper"/>']
    for mode in LEFTS:
        series = [s for s in data["series"] if s["mode"] == mode]
        if series:
            parts += Panel(mode, series, cores).draw(colours)
    x = LEFTS["weak"]
    for model in models:
        parts.append(f'<line class="line {colours[model]}" x1="{x}" x2="{x + 22}" y1="20" y2="20"/>')
        parts.append(text(x + 28, 24, model))
        x += 28 + 8 * len(model) + 24
    parts += [f'<path class="ideal" d="M{x} 20L{x + 22} 20"/>', text(x + 28, 24, "ideal")]
    if any(point["oversubscribed"] for series in data["series"] for point in series["points"]):
        x += 90
        parts += [f'<circle class="dot any open" cx="{x}" cy="20" r="4.5"/>',
                  text(x + 12, 24, "oversubscribed")]
    threads = data["threads"]
    note = (f"{data['machine']['cpu']}, {data['machine']['cores']} cores; {threads} "
            f"thread{'s' if threads > 1 else ''} a rank. Median and range of {data['rounds']} rounds.")
    parts.append(text(WIDTH - 30, HEIGHT - 10, note, "faint", "end"))
    return "\n".join(parts) + "\n</svg>\n"
