"""Which sources a program was built from, as one number: whether what was packed is what the checkout holds now. The
machine that a checkout is copied to may have no git."""
import hashlib
import pathlib
import re

_KINDS = (".h", ".cpp", ".cu", ".cuh", ".in", ".cmake", ".c", ".S", ".txt")


def digest(root: pathlib.Path) -> str:
    sums = hashlib.sha256()
    files = [root / "CMakeLists.txt"]
    modules = [file.parent for file in root.glob("*/CMakeLists.txt")]
    for module in [*modules, root / "cmake", root / "include"]:
        files += [path for path in module.rglob("*") if path.suffix in _KINDS]
    for path in sorted(files):
        if path.is_file():
            sums.update(f"{path.relative_to(root)}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return sums.hexdigest()[:16]


def digest_with_includes(root: pathlib.Path, names: list) -> str:
    """Of these files and all that they include by "…" from the root, directly or not. One that is not there counts as
    empty."""
    sums, pending, seen = hashlib.sha256(), list(names), set()
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        for place in (root / name, root / "include" / name):
            if place.is_file():
                pending += re.findall(r'^#include "([^"]+)"', place.read_text(encoding="utf-8"), re.MULTILINE)
                break
    for name in sorted(seen):
        place = next((place for place in (root / name, root / "include" / name) if place.is_file()), None)
        sums.update(f"{name}\0".encode() + (hashlib.sha256(place.read_bytes()).digest() if place else b""))
    return sums.hexdigest()[:16]


if __name__ == "__main__":
    print(digest(pathlib.Path(__file__).resolve().parents[2]))
