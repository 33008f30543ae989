#!/usr/bin/env python3
"""The program stays small, kernels for GPUs included: below a limit without its symbols, and with a limited number of
kernels, which is what makes it grow.

  size_test.py --program FILE [--kernels]     # --kernels prints how often each kernel is instantiated

Kernels are counted by the stubs that start them, which are in the program as long as it has its symbols.
"""
import argparse
import collections
import pathlib
import re
import subprocess
import sys
import tempfile

MOST_BYTES = 20_000_000
# Of these 144 are functions of elements, each in f32, bf16 and f16, with packs and without; 36 softmaxes of losses, of
# labels and of probabilities; 25 of own models.
MOST_KERNELS = 640
STUB = re.compile(r"__device_stub__\w*?GLOBAL__N__[0-9a-f]+_\d+_\w+?_cu_[0-9a-f]{8}(?:_\d+)?(\d+)([a-z]\w*)")


def kernels_of(program: pathlib.Path) -> collections.Counter:
    """By name, how many instantiations there are."""
    symbols = subprocess.run(["nm", program], check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    stubs = {name for name in symbols if "__device_stub__" in name and name.endswith("__handle")}  # one of each has that
    counts = collections.Counter()
    for stub in stubs:
        found = STUB.search(stub)
        # The hash before it ends in figures, too: the name is as long as the last of them say.
        length = next((n for n in (int(found[1][-2:]), int(found[1][-1:])) if 0 < n <= len(found[2])), 0) if found else 0
        counts[found[2][:length] if length else stub] += 1
    return counts


def stripped_bytes(program: pathlib.Path) -> int:
    with tempfile.TemporaryDirectory() as directory:
        stripped = pathlib.Path(directory) / program.name
        subprocess.run(["strip", "-o", stripped, program], check=True)
        return stripped.stat().st_size


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=pathlib.Path, required=True)
    parser.add_argument("--kernels", action="store_true")
    given = parser.parse_args()
    counts = kernels_of(given.program)
    if given.kernels:
        for name, count in counts.most_common():
            print(f"{count:4} {name}")
    size, kernels = stripped_bytes(given.program), counts.total()
    print(f"{given.program}: {size / 1e6:.1f} MB without symbols, of {MOST_BYTES / 1e6:.0f}; {kernels} kernels, of {MOST_KERNELS}")
    return 1 if size > MOST_BYTES or kernels > MOST_KERNELS else 0


if __name__ == "__main__":
    sys.exit(main())
