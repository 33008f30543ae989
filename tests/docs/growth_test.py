"""How large each module is, beside the last release: lines and files of its code and of its tests, and the documents.

  growth_test.py [--source DIR] [--build DIR] [--update] [unittest's arguments]

Prints a table; with --build also the seconds that each module's tests took there the last time. Fails where lines of code,
tests or documents have grown by more than a tenth and 200 lines (documents: a tenth and 4,000 bytes) and the newest section
of CHANGELOG.md does not say why, in an entry "Grown: nn (reason), tests/nn (reason), documents (reason)". --update writes
docs/results/size.csv: done when a release is cut, and then only.
"""
import argparse
import csv
import pathlib
import re
import subprocess
import sys
import unittest

sys.dont_write_bytecode = True
parser = argparse.ArgumentParser()
parser.add_argument("--source", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parents[2])
parser.add_argument("--build", type=pathlib.Path)
parser.add_argument("--update", action="store_true")
places, others = parser.parse_known_args()
SOURCE = places.source.absolute()
BASE = SOURCE / "docs/results/size.csv"

CODE = {".cpp", ".h", ".cu", ".cuh", ".c", ".py", ".cmake", ".in"}
SHARE, LEAST_LINES, LEAST_BYTES = 0.10, 200, 4000


def files_of(source: pathlib.Path) -> list[str]:
    """What git lists, or all but builds and caches where this is no checkout."""
    listed = subprocess.run(["git", "-C", source, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    if listed.returncode == 0:
        return [name for name in listed.stdout.split("\0") if name and (source / name).is_file()]
    return [str(path.relative_to(source)) for path in source.rglob("*")
            if path.is_file() and not re.match(r"build|\.git$|\.cache", path.relative_to(source).parts[0])]


def is_code(path: pathlib.Path) -> bool:
    if path.suffix in CODE or path.name == "CMakeLists.txt":
        return True
    return path.suffix == "" and path.read_bytes()[:2] == b"#!"


def part_of(name: str) -> str:
    """"nn", "tests/nn", or "." for files at the root."""
    parts = name.split("/")
    if len(parts) == 1:
        return "."
    return "/".join(parts[:2]) if parts[0] == "tests" and len(parts) > 2 else parts[0]


def measure(source: pathlib.Path) -> dict[str, dict[str, int]]:
    """part: {"lines", "files", "bytes"}; documents are one part, whose bytes count."""
    sizes: dict[str, dict[str, int]] = {}
    for name in files_of(source):
        path = source / name
        document = path.suffix == ".md"
        if not document and (path.is_symlink() or not is_code(path)):
            continue
        size = sizes.setdefault("documents" if document else part_of(name), {"lines": 0, "files": 0, "bytes": 0})
        text = path.read_bytes()
        size["lines"] += text.count(b"\n")
        size["files"] += 1
        size["bytes"] += len(text)
    return sizes


def read_base(path: pathlib.Path) -> dict[str, dict[str, int]]:
    with path.open() as file:
        return {row.pop("part"): {key: int(value) for key, value in row.items()} for row in csv.DictReader(file)}


def write_base(path: pathlib.Path, sizes: dict[str, dict[str, int]]) -> None:
    with path.open("w") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["part", "lines", "files", "bytes"])
        for part in sorted(sizes):
            writer.writerow([part, *(sizes[part][key] for key in ("lines", "files", "bytes"))])


def grown(before: dict[str, dict[str, int]], now: dict[str, dict[str, int]]) -> dict[str, str]:
    """part: by how much, of those that have grown beyond the bound. A part that is new has grown from nothing."""
    found = {}
    for part, size in now.items():
        key, least = ("bytes", LEAST_BYTES) if part == "documents" else ("lines", LEAST_LINES)
        old = before.get(part, {key: 0})[key]
        if size[key] - old > max(SHARE * old, least):
            found[part] = f"{old} to {size[key]} {key}"
    return found


def named(changelog: str) -> set[str]:
    """The parts that entries "Grown: …" of the newest section name."""
    sections = re.split(r"^## ", changelog, flags=re.MULTILINE)
    newest = sections[1] if len(sections) > 1 else ""
    entries = re.findall(r"^- Grown: (.*?)(?=^- |\Z)", newest, re.MULTILINE | re.DOTALL)
    return {part for entry in entries for part in re.findall(r"([\w./]+) \([^)]+\)", entry)}


def seconds_of(build: pathlib.Path) -> dict[str, float]:
    """Test seconds by module, of ctest's last runs."""
    costs = build / "Testing/Temporary/LastTest.log"
    found: dict[str, float] = {}
    if costs.is_file():
        text = costs.read_text(errors="replace")
        for name, seconds in re.findall(r"^\d+/\d+ Test: (\S+)$.*?^Test time = +([\d.]+) sec", text, re.MULTILINE | re.DOTALL):
            module = re.split(r"[_.]", name)[0]
            found[module] = found.get(module, 0.0) + float(seconds)
    return found


def table(before: dict[str, dict[str, int]], now: dict[str, dict[str, int]], seconds: dict[str, float]) -> str:
    lines = [f"{'part':<20}{'lines':>8}{'before':>8}{'files':>7}{'before':>8}{'test seconds':>14}"]
    nothing = {"lines": 0, "files": 0}
    for part in sorted(now):
        old = before.get(part, nothing)
        took = seconds.get(part.removeprefix("tests/")) if part.startswith("tests/") else None
        lines.append(f"{part:<20}{now[part]['lines']:>8}{old['lines']:>8}{now[part]['files']:>7}{old['files']:>8}"
                     f"{'' if took is None else f'{took:.0f}':>14}")
    total = [sum(sizes.get(p, nothing)[key] for p in {*now, *before}) for key in ("lines", "files") for sizes in (now, before)]
    lines.append(f"{'all':<20}{total[0]:>8}{total[1]:>8}{total[2]:>7}{total[3]:>8}")
    if "documents" in now:
        lines.append(f"documents: {now['documents']['bytes']} bytes, before {before.get('documents', {'bytes': 0})['bytes']}")
    return "\n".join(lines)


class Growth(unittest.TestCase):
    def test_what_has_grown_is_named(self):
        before, now = read_base(BASE), measure(SOURCE)
        print("\n" + table(before, now, seconds_of(places.build) if places.build else {}))
        reasons = named((SOURCE / "CHANGELOG.md").read_text())
        self.assertEqual({part: by for part, by in grown(before, now).items() if part not in reasons}, {},
                         'in CHANGELOG.md\'s newest section, as "- Grown: PART (reason), …"')

    def test_the_bound(self):
        def sizes(**lines):
            return {part: {"lines": count, "files": 1, "bytes": 10 * count} for part, count in lines.items()}
        self.assertEqual(grown(sizes(nn=10000, comm=100), sizes(nn=11000, comm=300)), {})
        self.assertEqual(grown(sizes(nn=10000, comm=100), sizes(nn=11001, comm=301)),
                         {"nn": "10000 to 11001 lines", "comm": "100 to 301 lines"})
        self.assertEqual(grown({}, sizes(new=201)), {"new": "0 to 201 lines"})
        self.assertEqual(grown(sizes(documents=1000), sizes(documents=1400)), {})
        self.assertEqual(grown(sizes(documents=1000), sizes(documents=1401)), {"documents": "10000 to 14010 bytes"})

    def test_names(self):
        text = "# C\n\n## 2\n\n- Grown: nn (two kernels),\n  tests/nn (their tests).\n- Other (x).\n\n## 1\n\n- Grown: comm (y).\n"
        self.assertEqual(named(text), {"nn", "tests/nn"})
        self.assertEqual([part_of(n) for n in ("nn/a.h", "tests/nn/a.cpp", "tests/CMakeLists.txt", "CMakeLists.txt")],
                         ["nn", "tests/nn", "tests", "."])


if __name__ == "__main__":
    if places.update:
        write_base(BASE, measure(SOURCE))
    else:
        unittest.main(argv=[sys.argv[0], *others])
