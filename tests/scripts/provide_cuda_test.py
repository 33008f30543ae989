"""When scripts/demo and scripts/test fetch the CUDA Toolkit, and what they say where they do not: scripts/lib/cuda.sh on
machines that exist only in the words of a false nvidia-smi and ldconfig.

  provide_cuda_test.py [--source DIR] [unittest's arguments]
"""
import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

parser = argparse.ArgumentParser()
parser.add_argument("--source", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parents[2])
places, others = parser.parse_known_args()

LACKS = "--   without CUDA: no NCCL (libnccl-dev brings it)"
HAS = "--   CUDA: toolkit 13.0.88 for 90-real"
SCRIPT = """set -euo pipefail
root=$1 build=$1/build
configure() { mkdir -p "$build"; echo "configure $*" >>"$root/calls"; cp "$root/summary" "$build/configure.log"; }
source "$2/scripts/lib/cuda.sh"
if nvidia_driver >"$root/driver"; then provide_cuda; else echo none >>"$root/calls"; fi
"""


class ProvideCuda(unittest.TestCase):
    def on(self, summary: str, library: str = "", version: str = "", capability: str = "", fetches: bool = True):
        """What was called, and what was said, on a machine whose loader finds `library` as libcuda.so.1."""
        with tempfile.TemporaryDirectory() as directory:
            root = pathlib.Path(directory)
            (root / "scripts").mkdir()
            (root / "bin").mkdir()
            (root / "summary").write_text(summary + "\n")
            (root / library if library else root / "none").write_text("")
            cached = f"\tlibcuda.so.1 (libc6,x86-64) => {root}/{library}" if library else "\tlibz.so.1 => /lib/libz.so.1"
            programs = {"bin/ldconfig": f"echo '{cached}'",
                        "bin/nvidia-smi": f"case $1 in *driver*) echo '{version}' ;; *) echo '{capability}' ;; esac"
                                          if version else "echo 'NVIDIA-SMI has failed'; exit 9",
                        "scripts/get-cudnn-frontend": "echo frontend >>\"${0%/*}/../calls\"",
                        "scripts/get-cuda": f"echo toolkit >>\"${{0%/*}}/../calls\"; exit {0 if fetches else 1}"}
            for name, text in programs.items():
                (root / name).write_text(f"#!/bin/bash\n{text}\n")
                (root / name).chmod(0o755)
            done = subprocess.run(["bash", "-c", SCRIPT, "bash", directory, places.source], capture_output=True, text=True,
                                  env={"PATH": f"{root}/bin:{os.environ['PATH']}"}, timeout=60)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(done.stdout, "")
            return (root / "calls").read_text().split("\n")[:-1], done.stderr.strip()

    def test_without_a_driver_nothing_is_fetched(self):
        self.assertEqual(self.on(LACKS), (["none"], ""))

    def test_a_toolkit_that_is_there_is_taken(self):
        self.assertEqual(self.on(HAS, "libcuda.so.580.65.06"), (["frontend", "configure "], ""))

    def test_what_is_missing_is_fetched_and_the_build_configured_anew(self):
        for machine in ({"library": "libcuda.so.580.65.06"}, {"library": "libcuda.so.1"},
                        {"version": "580.65.06", "capability": "9.0"}, {"version": "590.10", "capability": "7.0\n8.9"}):
            calls, said = self.on(LACKS, **machine)
            self.assertEqual((calls[:3], said), (["frontend", "configure ", "toolkit"], ""), machine)
            self.assertTrue(calls[3].startswith("configure -U CUDA*"), calls)

    def test_what_would_not_run_is_not_fetched(self):
        for machine, words in (({"library": "libcuda.so.550.54.14"}, ("no NCCL", "550.54.14", "580", "cudnn9-cuda-12")),
                               ({"version": "535.1", "capability": "9.0"}, ("535.1", "525")),
                               ({"version": "580.1", "capability": "7.0"}, ("compute capability 7.0", "8.0 (A100)"))):
            calls, said = self.on(LACKS, **machine)
            self.assertEqual(calls, ["frontend", "configure "], machine)
            self.assertEqual(said.count("\n"), 0, said)
            for word in (*words, "computes on the CPU only"):
                self.assertIn(word, said)

    def test_what_cannot_be_fetched_leaves_a_build_for_the_cpu(self):
        calls, said = self.on(LACKS, "libcuda.so.580.65.06", fetches=False)
        self.assertEqual(calls, ["frontend", "configure ", "toolkit"])
        self.assertIn("no NCCL", said)
        self.assertIn("scripts/get-cuda DIRECTORY", said)


unittest.main(argv=[sys.argv[0], *others])
