"""scripts/gpu-check without a GPU: its report on invented figures, what its sections conclude from them, and
the whole of it on a machine that only claims to have one.

  gpu_check_test.py [--source DIR] [--build DIR] [unittest's arguments]
"""
import argparse
import copy
import json
import math
import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile
import time
import unittest
import unittest.mock

sys.dont_write_bytecode = True
parser = argparse.ArgumentParser()
parser.add_argument("--source", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parents[2])
parser.add_argument("--build", type=pathlib.Path)
places, others = parser.parse_known_args()
SOURCE, BUILD = places.source, (places.build or places.source / "build").absolute()
sys.path.insert(0, str(SOURCE / "bench"))

from gpu_check import build, correctness, machine, peers, report, sources, speed  # noqa: E402
from gpu_check.check import Check, Late, Skip, run_section  # noqa: E402
from harness.processes import Failure, clean_up  # noqa: E402

STEP = {"step_ms": 0.1, "step_ms_p10": 0.09, "step_ms_p90": 0.12, "graphs": True, "replays_per_step": 1.0}
BENCH = {**STEP, "model": "mlp", "batch": 64, "precision": "bf16", "samples_per_s": 640000.0, "tflops": 6.12,
         "mfu": 0.0062, "peak_tflops": 989.4}
BUCKET = {"bytes": 1500, "ready_ms": 0.1, "start_ms": 0.11, "end_ms": 0.21}
DATA = {  # of a passed section each
    "machine": {"facts": {"cpu": "Xeon", "processors": 16, "memory_bytes": 2**37, "system": "Ubuntu", "kernel": "6.1",
                          "python": "3.12"},
                "nvidia_smi": {"fields": ["name", "pstate"], "gpus": [["NVIDIA H100", "P0"]]},
                "libraries": {"libnccl.so.2": "/opt/nccl/lib", "libcudnn.so.9": None},
                "library_path": "/opt/nccl/lib", "version": "lockstep 1\n",
                "devices": "+----+\n",
                "measured": [{"device": "cuda:0", "problem": None, "threads": None, "copy_bytes_per_s": 4.265e12,
                              "products": [{"precision": "bf16", "tflops": 799.0}]},
                             {"device": "cpu", "problem": None, "threads": 16, "copy_bytes_per_s": 1e11, "products": []}]},
    "tests": {"programs": [
        {"name": "nn_cuda_pool_gpu_test", "code": 0, "seconds": 1.5, "why": "", "tests": [
            {"name": "Pool.Max", "failed": False, "tolerance": "4 ulp of 1", "largest_error": "0.5"}]},
        {"name": "nn_cuda_norm_gpu_test", "code": 77, "seconds": 0, "why": "skipped: no GPU", "tests": []}]},
    "ranks": {"steps": 30, "shared": {"2": True, "4": True}, "launcher": "passed",
              "tolerances": {"f32": [1e-5, 2e-3, 1e-4], "bf16": [2e-2, 2e-2, 2e-2], "fp16": [5e-3, 5e-3, 5e-3]},
              "runs": [{"precision": "f32", "ranks": 2, "device": "cuda", "first_loss": 1e-7, "loss": 3e-5,
                        "first_norm": 2e-7, "ok": True},
                       {"precision": "bf16", "ranks": 4, "device": "cuda", "ok": False, "why": "rank 1 of 4 hung"}]},
    "contexts": {"shared": True, "ranks": [{"rank": 0, "pid": 4711, "on": [[0, 2**29]]}], "before_bytes": [0],
                 "during_bytes": [2**30]},
    "sanitizer": {"runs": [{"name": "nn_cuda_pool_gpu_test", "tool": "memcheck", "code": 0, "errors": 0, "seconds": 9,
                            "why": ""},
                           {"name": "nn_cuda_norm_gpu_test", "tool": "racecheck", "code": None, "errors": None,
                            "why": "ended", "late": True}]},
    "graphs": {"steps": 60, "runs": [{"precision": "f32", "same": True, "sha256": "ab" * 32}],
               "times": [{"model": "mlp", "batch": 64, "yes": STEP, "no": {**STEP, "step_ms": 0.3}}]},
    "timeline": {"ranks": 2, "shared": True,
                 "models": {"mlp": {"clock": "device", "last_ready_ms": 0.16, "end_ms": 0.4, "communication_ms": 0.1,
                                    "hidden_ms": 0.05, "batch": 1024, "step_ms": 0.3, "buckets": [BUCKET]}}},
    "communication": {"runs": [{"model": "cnn", "world_size": 2, "batch": 64, "step_ms": 1.0, "compute_ms": 0.9,
                                "exposed_comm_ms": 0.1, "share": 0.1, "replays_per_step": 1.0}]},
    "throughput": {"runs": [BENCH | {"kernels_per_step": 70, "profile": {"step_ms": 0.2, "operations": [
        {"operation": "product", "calls": 9, "ms": 0.09, "bytes": 1e6, "flops": 1e9, "share_of_peak_bandwidth": 0.25,
         "floor_ms": 0.06},
        {"operation": "GELU", "calls": 3, "ms": 0.03, "bytes": 1e6, "flops": 0}]}}], "copied": [BENCH]},
    "pytorch": {"version": "2.11.0, NVIDIA H100", "rounds": 3, "build_s": 60.0, "groups": [
        {"model": "mlp", "batch": 64, "best": "compile+graph", "refused": [{"name": "max-autotune", "why": "too slow"}],
         "rows": [{"name": "lockstep", "median_ms": 0.1, "low_ms": 0.1, "high_ms": 0.11, "samples_per_s": 640000.0,
                   "mfu": 0.0062, "ratio": None},
                  {"name": "compile+graph", "median_ms": 0.15, "low_ms": 0.14, "high_ms": 0.16,
                   "samples_per_s": 426000.0, "mfu": 0.004, "ratio": [1.5, 1.4, 1.6]}]}]},
    "backend": {"runs": [{"what": "operations, 2 ranks", "ok": True, "why": ""}, {"what": "a killed rank", "ok": False, "why": "no"}],
                "off": {"ddp": 1e-7}},
}


class Case(unittest.TestCase):
    def directory(self) -> pathlib.Path:
        made = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.addCleanup(made.cleanup)
        return pathlib.Path(made.name)

    def checking(self, build: pathlib.Path, quick: bool = False, seconds: float = 60) -> Check:
        check = Check(build, ["GPU"], quick, {}, time.monotonic() + seconds)
        self.addCleanup(lambda: subprocess.run(["rm", "-rf", check.scratch], check=True))
        return check


def write(root: pathlib.Path, files: dict) -> None:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def executable(path: pathlib.Path, text: str) -> pathlib.Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def whole_report() -> dict:
    sections = [{"name": name, "title": f"About {name}", "status": "passed", "problems": [], "seconds": 1.5,
                 "commands": [f"build/lockstep {name}"], "data": copy.deepcopy(data)} for name, data in DATA.items()]
    return {"schema": 1, "date": "2026-11-21T12:00:00+00:00", "gpus": ["NVIDIA H100 80GB HBM3"], "program": "built here",
            "command": "scripts/gpu-check", "seconds": 300.0, "sections": sections}


class Report(Case):
    def test_holds_every_section_with_its_commands(self):
        self.assertEqual(set(DATA), set(report.RENDERERS))
        text = report.markdown(json.loads(json.dumps(whole_report())))
        for name in DATA:
            self.assertIn(f"### About {name}", text)
            self.assertIn(f"build/lockstep {name}", text)
        self.assertNotIn("What it had measured by then", text, "a section could not be rendered")
        for words in ("# GPU check: 1 × NVIDIA H100 80GB HBM3, 2026-11-21",
                      "| nn_cuda_norm_gpu_test | skipped | 0 | 0 | 0 |", "| Pool.Max | 4 ulp of 1 | 0.5 |",
                      "libnccl.so.2: taken from /opt/nccl/lib", "libcudnn.so.9: not found",
                      "| 2 × cuda, f32 | 1.0e-07 | 3.0e-05 | 2.0e-07 | equal |", "**differ** rank 1 of 4 hung",
                      "| 0 | 0 | 512 MiB |", "nothing found until its time was up", "the same bits",
                      "| mlp, batch 64 | 100 | 300 | 3.00 | 1.0 |", "backward hid 0.050 ms (50.0 %)", "**10.0 %**",
                      "(bf16 989.4 TFLOP/s, by the data sheet)", "1.50 × (1.40 to 1.60)", "| 0.6 % |",
                      "| operations, 2 ranks | passed |", "by at most 1.0e-07 (ddp)", "bf16: 70 kernels", "| product | 9 | 90.0 | 60.0 | 75.0 % | 25.0 % | 11.1 |",
                      "| cuda:0 | 4,265 | 799 | – | – |", "| cpu, 16 threads | 100 |", "| GELU | 3 |",
                      "- max-autotune: too slow", "| mlp, 64 | compile+graph | 1.50 × (1.40 to 1.60) | yes |"):
            self.assertIn(words, text)

    def test_failures_stand_at_the_top_and_do_not_hide_the_rest(self):
        data = whole_report()
        data["sections"][2] |= {"status": "failed", "problems": ["2 ranks differ", "4 ranks hung"]}
        data["sections"][4] |= {"status": "skipped", "problems": ["not installed"], "data": {}}
        data["sections"][5] |= {"status": "failed", "problems": ["cut short"], "data": {"steps": 60}}
        text = report.markdown(data)
        top = text[:text.index("### About machine")]
        self.assertIn("- About ranks: 2 ranks differ; 4 ranks hung", top)
        self.assertIn("- About graphs: cut short", top)
        self.assertIn("Skipped:\n\n- About sanitizer: not installed", top)
        self.assertIn("| About ranks | **failed** | 1.5 |", top)
        self.assertEqual(text.count("What it had measured by then is in the JSON file"), 1)
        self.assertIn("### About pytorch", text)

    def test_tables_are_whole(self):
        columns = None
        for line in report.markdown(whole_report()).splitlines():
            if not line.startswith("|"):
                columns = None
            elif columns is None:
                columns = line.count("|")
            self.assertTrue(columns is None or line.count("|") == columns, line)


class Conclusions(Case):
    RUN = {"losses": [2.0, 1.0, 0.5], "norms": [3.0, 2.0, 1.0]}

    def test_ranks_are_equal_within_what_is_stated(self):
        for precision, equal, changes in (
                ("f32", True, {}), ("f32", True, {"losses": [2.00001, 1.001, 0.5015]}),
                ("f32", False, {"losses": [2.0001, 1.0, 0.5]}),  # the first step is exact
                ("f32", False, {"losses": [2.0, 1.0, 0.503]}), ("f32", False, {"norms": [3.001, 2.0, 1.0]}),
                ("f32", False, {"losses": [2.0, math.nan, 0.5]}), ("bf16", True, {"losses": [2.02, 1.01, 0.51]}),
                ("bf16", False, {"losses": [2.1, 1.0, 0.5]}), ("fp16", True, {"losses": [2.005, 1.0025, 0.5]}),
                ("fp16", False, {"losses": [2.02, 1.0, 0.5]})):
            differing = correctness.compared(self.RUN | changes, self.RUN)
            self.assertEqual(correctness.within(differing, precision), equal, (precision, changes))

    def test_kernels_with_shared_memory_are_watched(self):
        kernels = SOURCE / "nn/ops/cuda"
        shared = {path.name for path in kernels.iterdir() if "__shared__" in path.read_text()}
        users = {path.stem for path in kernels.glob("*.cu")
                 if path.name in shared or any(f'/{name}"' in path.read_text() for name in shared)}
        tests = {pathlib.Path(file).stem: test for test, files in correctness.KERNELS.items() for file in files}
        self.assertGreater(len(users), 5)
        for name in correctness.WATCHED:
            for file in correctness.KERNELS.get(name, (f"{name}.cu",)):
                self.assertTrue((kernels / file).exists(), file)
        for kernel in users:
            self.assertIn(tests.get(kernel, kernel), correctness.WATCHED)

    def test_the_fastest_peer_is_compared_within_rounds(self):
        results = {"lockstep": {1: 1.0, 2: 2.0}, "eager": {1: 3.0, 2: 4.0}, "compile": {1: 1.1}}
        group = speed._group(("mlp", 64), results, {"max-autotune": "too slow"}, 2e9, 100.0)
        self.assertEqual(group["best"], "compile")
        rows = {row["name"]: row for row in group["rows"]}
        self.assertEqual(rows["eager"]["ratio"], [2.5, 2.0, 3.0])
        self.assertAlmostEqual(rows["lockstep"]["mfu"], 2 / 1.5 / 100)
        self.assertEqual(group["refused"], [{"name": "max-autotune", "why": "too slow"}])


class Sections(Case):
    def setUp(self):
        self.check = self.checking(BUILD, quick=True)

    def run_one(self, action, limit_s=20):
        return run_section(self.check, "x", "X", limit_s, action)

    def test_what_happens_in_one_stays_in_it(self):
        def fails(check, data):
            data["half"] = 1
            check.run(["bash", "-c", "echo 'error: broken → mend it' >&2; exit 3"])

        section = self.run_one(fails)
        self.assertEqual((section.status, section.data), ("failed", {"half": 1}))
        self.assertIn("ended with 3: error: broken → mend it", section.problems[0])
        self.assertEqual(len(section.commands), 1)

        skips = unittest.mock.Mock(side_effect=Skip("not here"))
        self.assertEqual((self.run_one(skips).status, self.run_one(skips).problems), ("skipped", ["not here"]))
        for action in (lambda check, data: data["missing"], lambda check, data: check.missing,
                       lambda check, data: next(iter([])), lambda check, data: check.problem("odd")):
            self.assertEqual(self.run_one(action).status, "failed")
        self.assertEqual(self.run_one(lambda check, data: None).status, "passed")

    def test_what_hangs_is_ended_with_all_it_started(self):
        mark = self.check.scratch / "pid"

        def hangs(check, data):
            check.run(["bash", "-c", f"sleep 1000 & echo $! >{mark}; wait"], 60)

        section = self.run_one(hangs, limit_s=1)
        self.assertEqual(section.status, "failed")
        self.assertIn("was ended after", section.problems[0])
        self.assertLess(section.seconds, 10)
        deadline, state = time.monotonic() + 5, "?"
        while state not in ("gone", "Z") and time.monotonic() < deadline:  # ended, though nobody has collected it yet
            try:
                state = pathlib.Path(f"/proc/{mark.read_text().strip()}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                state = "gone"
        self.assertIn(state, ("gone", "Z"))

    def test_ranks_that_hang_are_ended_together(self):
        def hangs(check, data):
            check.finish_ranks(check.start_ranks(4, ["bash", "-c", "trap '' TERM; while :; do sleep 1; done"],
                                                 shared=False), 60)

        section = self.run_one(hangs, limit_s=1)
        self.assertRegex(section.problems[0], "rank 0 of 4 was ended after")
        self.assertLess(section.seconds, 10)  # 3 s of patience, not 3 s per rank

    def test_what_runs_in_parallel_ends_with_an_exception(self):
        def job(number):
            if number == 1:
                time.sleep(0.5)
                raise AttributeError("odd")
            return self.check.run(["bash", "-c", "sleep 60"] if number > 1 else ["true"], 60, codes=None).code

        results, begin = [], time.monotonic()
        with self.assertRaisesRegex(AttributeError, "odd"):
            self.check.in_parallel(job, list(range(9)), results, 3)
        self.assertEqual(results, [0])
        self.assertLess(time.monotonic() - begin, 10)

    def test_lateness_is_no_failure_of_its_own(self):
        with self.assertRaises(Late):
            self.check.run(["sleep", "60"], 0.2)
        with self.assertRaises(Failure) as raised:
            self.check.run(["/nowhere/compute-sanitizer"])
        self.assertNotIsInstance(raised.exception, Late)

    @unittest.skipUnless((BUILD / "tests" / "comm_agree_test").exists(), "it is not built")
    def test_ranks_of_a_test_write_one_file(self):
        test = {"name": "comm_agree_test.np3", "timeout_s": 60, "environment": ["LOCKSTEP_TEST_GROUP=tcp"],
                "command": [str(SOURCE / "tests/support/run_ranks"), "3", str(BUILD / "tests" / "comm_agree_test")]}
        result = correctness._one_test(self.check, test)
        self.assertEqual(result["code"], 0, result)
        self.assertGreater(len(result["tests"]), 2)
        # All ranks get one name: here it is a pipe, which would have what each of them writes.
        done = subprocess.run([*test["command"], "--gtest_output=json:/dev/stderr"], capture_output=True, text=True,
                              env=self.check.env | {"LOCKSTEP_TEST_GROUP": "tcp"}, timeout=60, check=True)
        self.assertEqual(done.stderr.count('"testsuites"'), 1)

    def test_ranks_are_joined_and_the_first_that_fails_is_named(self):
        def ranks(check, data):
            script = 'echo "$RANK/$WORLD_SIZE $NCCL_HOSTID"; [[ $RANK != 1 ]] || { echo "error: ill" >&2; exit 4; }'
            started = check.start_ranks(3, ["bash", "-c", script], shared=True)
            with self.assertRaisesRegex(Failure, "rank 1 of 3 ended with 4: error: ill"):
                check.finish_ranks(started, 10)
            done = check.finish_ranks(check.start_ranks(2, ["bash", "-c", "echo $RANK$NCCL_HOSTID"], shared=True), 10)
            data["said"] = [one.out for one in done]

        section = self.run_one(ranks)
        self.assertEqual((section.status, section.data), ("passed", {"said": ["0rank0\n", "1rank1\n"]}), section.problems)


class Peers(Case):
    """PyTorch's part, played by a program that answers as gpu_step.py does."""

    PLAYED = r"""#!/bin/bash
if [[ $1 == -c ]]; then echo "2.11.0 13.0 ${CUDA:-True}"; exit; fi
MODEL=$4
while read -r line; do
  case $line in
    *build*16*compile\"*) echo '{"version": "2.11.0", "build_s": 2, "refused": "Late: it was not compiled in time"}' ;;
    *build*64*compile\"*) [[ $MODEL != lstm ]] || sleep 60; echo '{"version": "2.11.0", "build_s": 1}' ;;
    *build*) echo '{"version": "2.11.0", "build_s": 1.5}' ;;
    *step*compile+graph*) [[ -z ${HANG:-} ]] || { touch "$HANG"; sleep 60; }; echo '{"step_ms": [3, 3, 3]}' ;;
    *step*eager+graph*) echo '{"step_ms": [2, 1, 3]}' ;;
    *step*) echo '{"step_ms": [4, 4, 4]}' ;;
  esac
done
"""
    LOCKSTEP = r"""#!/bin/bash
echo '{"step_ms": 1.0, "flops_per_step": 1e9, "peak_tflops": 100}'
"""

    def section(self, limit_s: float, measured: list = (), **more):
        directory = self.directory()
        for name, text in (("python3", self.PLAYED), ("lockstep", self.LOCKSTEP)):
            executable(directory / name, text)
        check = self.checking(directory, seconds=100)
        check.env |= {"PATH": f"{directory}:{check.env['PATH']}", **more}
        torch = peers.Peers(check.env, check.scratch, quick=False, compile_s=-7)  # and 10 s more
        self.addCleanup(torch.stop)
        torch.wait_until_built()
        return run_section(check, "pytorch", "PyTorch", limit_s,
                           lambda check, data: speed.against_pytorch(check, data, torch, "", measured))

    def test_one_that_hangs_does_so_once(self):
        directory = self.directory()
        section = self.section(9, HANG=f"{directory}/hung")
        self.assertTrue((directory / "hung").exists())
        self.assertLess(section.seconds, 16)
        self.assertEqual(section.problems, ["there was time for 0 of 3 rounds"])
        first = section.data["groups"][0]
        self.assertIn("hangs", {one["name"]: one["why"] for one in first["refused"]}["compile+graph"])
        self.assertEqual(first["best"], "eager+graph", "what was measured before counts")
        text = report.markdown(whole_report() | {"sections": [vars(section)]})
        self.assertNotIn("What it had measured by then", text)

    def test_take_turns_with_lockstep_and_the_fastest_counts(self):
        section = self.section(50)
        self.assertEqual((section.status, section.problems), ("passed", []))
        self.assertEqual((section.data["version"], section.data["rounds"]), ("2.11.0", 5))
        self.assertEqual([(g["model"], g["batch"]) for g in section.data["groups"]],
                         [("gpt2-1024", 16), ("gpt2", 16), ("gpt", 64), ("lstm", 64), ("resnet50", 64),
                          ("resnet18-cifar", 512), ("cnn", 4096), ("cnn", 64), ("mlp", 4096), ("mlp", 64)])
        for group in section.data["groups"]:
            rows = {row["name"]: row for row in group["rows"]}
            refused = {one["name"]: one["why"] for one in group["refused"]}
            self.assertAlmostEqual(rows["lockstep"]["mfu"], 0.01)
            if group["model"] == "lstm":
                self.assertEqual(set(rows), {"lockstep"})
                self.assertIn("hangs", refused["compile+graph"])
                continue
            self.assertEqual(group["best"], "eager+graph")
            self.assertEqual(rows["eager+graph"]["ratio"], [2, 2, 2])
            self.assertEqual(set(rows), {"lockstep", "eager", "eager+graph", "compile+graph"} |
                             (set() if group["batch"] == 16 else {"compile"}))
            self.assertEqual(refused, {"compile": "Late: it was not compiled in time"} if group["batch"] == 16 else {})
        text = report.markdown(whole_report() | {"sections": [vars(section)]})
        self.assertNotIn("What it had measured by then", text)
        self.assertIn("| mlp, 64 | eager+graph | 2.00 × (2.00 to 2.00) | yes |", text)

    def test_the_section_throughput_is_the_first_round_and_the_fastest_two_have_more(self):
        measured = [{"model": "gpt2-1024", "batch": 16, "precision": precision, "step_ms": ms, "flops_per_step": 1e9,
                     "peak_tflops": 100} for precision, ms in (("bf16", 8.0), ("f32", 1000.0))]
        section = self.section(50, measured)
        rows = {row["name"]: row for row in section.data["groups"][0]["rows"]}
        self.assertEqual((rows["lockstep"]["low_ms"], rows["lockstep"]["high_ms"]), (1, 8))
        self.assertEqual(rows["eager+graph"]["ratio"], [2, 0.25, 2])
        self.assertEqual(rows["eager"]["ratio"], [0.5, 0.5, 0.5], "in the first round alone")
        self.assertEqual(speed._still_in(("a", "b", "c"), {"lockstep": {1: 1}}), ["a", "b", "c"])
        self.assertEqual(speed._still_in(("a", "b", "c"), {"a": {1: 3}, "b": {1: 1}, "c": {1: 2}}), ["b", "c"])


class Sources(Case):
    def test_a_change_shows(self):
        root = self.directory()
        write(root, {"CMakeLists.txt": "x", "nn/CMakeLists.txt": "x", "nn/a.cu": "1"})
        first = sources.digest(root)
        write(root, {"nn/notes.md": "not a source"})
        self.assertEqual(sources.digest(root), first)
        write(root, {"nn/a.cu": "2"})
        second = sources.digest(root)
        self.assertNotEqual(second, first)
        write(root, {"new_module/CMakeLists.txt": "x"})
        self.assertNotEqual(sources.digest(root), second)


class Changed(Case):
    """compute-sanitizer takes the time for kernels alone that have changed."""

    def test_a_kernel_changes_with_what_it_includes(self):
        root = self.directory()
        write(root, {"nn/ops/cuda/norm.cu": '#include "nn/ops/cuda/reduce.cuh"\n',
                     "nn/ops/cuda/reduce.cuh": '#include "lockstep/x.h"\n#include <cuda.h>\n',
                     "include/lockstep/x.h": '#include "nn/ops/cuda/norm.cu"\n'})
        first = correctness.digests(root)
        (root / "include/lockstep/x.h").write_text("1")
        second = correctness.digests(root)
        self.assertEqual({name for name in first if first[name] != second[name]}, {"norm"})

    def test_what_was_clean_before_is_not_run_again(self):
        root = self.directory()
        (root / "bin").mkdir()
        executable(root / "bin/compute-sanitizer", f'#!/bin/bash\necho "$2" >>{root}/said\necho "ERROR SUMMARY: 0 errors"\n')
        check = self.checking(root)
        check.env |= {"PATH": f"{root}/bin:{check.env['PATH']}"}
        write(root, {"tests.json": json.dumps(
            [{"name": f"nn_cuda_{name}_gpu_test", "command": ["true"], "environment": [], "timeout_s": 9}
             for name in correctness.WATCHED])})
        with unittest.mock.patch.object(correctness, "ROOT", root):
            def run() -> tuple:
                section = run_section(check, "sanitizer", "S", 50, correctness.sanitizer)
                self.assertEqual((section.status, section.problems), ("passed", []))
                said = len((root / "said").read_text().splitlines()) if (root / "said").exists() else 0
                (root / "said").unlink(missing_ok=True)
                return section, said

            section, said = run()
            self.assertEqual(said, 2 * len(correctness.WATCHED))
            whole = whole_report() | {"gpus": ["GPU"], "sections": [vars(section)]}
            write(root, {"docs/results/gpu-x-1.json": json.dumps(whole), "docs/results/gpu-x-2.json": "[]",
                         "nn/ops/cuda/loss.cu": "changed"})
            section, said = run()
            self.assertEqual(said, 2, "loss, with two tools")
            text = report.markdown(whole | {"sections": [vars(section)]})
            self.assertIn("| nn_cuda_norm_gpu_test | racecheck | no error on 2026-11-21, unchanged since |", text)
            check.gpus = ["another GPU"]
            self.assertEqual(run()[1], 2 * len(correctness.WATCHED))


class Choice(Case):
    """Of the packed program and a build."""

    def test_a_program_that_does_not_start_is_built_anew(self):
        root = self.directory()
        place = root / ".gpu"
        program = place / "build" / "lockstep"
        write(root, {"CMakeLists.txt": "x"})
        write(place, {"build/lockstep": "", "packed.json": json.dumps(
            {"programs": True, "sources": sources.digest(root), "revision": "1", "multiarch": "x86_64-linux-gnu"})})
        made = []

        def make(where, package):
            made.append(package)
            where.mkdir()
            executable(where / "lockstep", "#!/bin/sh\n")

        with unittest.mock.patch.multiple(build, PLACE=place, ARCHIVE=place / "none", ROOT=root, make=make):
            executable(program, "#!/bin/sh\necho \"version `GLIBC_2.99' not found\" >&2\nexit 1\n".replace("`", ""))
            with self.assertRaisesRegex(Failure, "does not start here: .*GLIBC_2.99"):
                build.choose(None, no_build=True)
            self.assertEqual(build.choose(None, no_build=False)[0], root / "build-gpu")
            self.assertFalse(any("CMAKE_PREFIX_PATH" in flag for flag in build.cmake_flags(made[0])))
            self.assertTrue(any("CUDNN_FRONTEND" in flag for flag in build.cmake_flags(made[0])))
            program.write_text("#!/bin/sh\nexit 0\n")
            self.assertEqual(build.choose(None, no_build=False)[0], place / "build")
            self.assertEqual(len(made), 1)


class Packed(Case):
    """Tests of an archive, which is unpacked elsewhere than it was made."""

    def setUp(self):
        self.root = self.directory()
        self.check = self.checking(self.root / ".gpu/build", quick=True)
        self.check.build.mkdir(parents=True)

    def test_are_found_and_find_their_files(self):
        (self.root / "tests").mkdir()
        program = executable(self.check.build / "a_test", '#!/bin/bash\ncat "$LOCKSTEP_TEST_SOURCE/golden" && [[ $CACHE == */.gpu/build/cache ]]\n')
        write(self.root, {"golden": "right\n", ".gpu/build/tests.json": json.dumps(
            [{"name": "a_gpu_test", "command": ["@BUILD@/a_test", "@SOURCE@/tests/x"], "timeout_s": 10,
              "environment": ["CACHE=@BUILD@/cache", "LOCKSTEP_TEST_SOURCE=@SOURCE@"]}])})
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir("/")
        with unittest.mock.patch.object(correctness, "ROOT", self.root):
            test, = correctness.tests_of(self.check)
            self.assertEqual(test["command"], [str(program), f"{self.root}/tests/x"])
            data = {}
            correctness.test_programs(self.check, data)
        self.assertEqual(self.check.section.problems, [])
        self.assertEqual([program["code"] for program in data["programs"]], [0])

    def test_pack_for_gpu_says_where_the_sources_are(self):
        script = (SOURCE / "scripts/pack-for-gpu").read_text()
        program = script.split("<<'PY'\n")[1].split("\nPY\n")[0]
        built, place = self.root / "built", self.root / "place"
        (built / "tests").mkdir(parents=True)
        (place / "tests").mkdir(parents=True)
        listed = {"tests": [{"name": "a_gpu_test", "command": [f"{self.root}/tests/support/run_ranks", "2"],
                             "properties": [{"name": "ENVIRONMENT", "value": [f"XDG_CACHE_HOME={built}/cache"]}]}]}
        write(self.root, {"listed.json": json.dumps(listed)})
        subprocess.run([sys.executable, "-c", program, self.root / "listed.json", self.root, built, place], check=True)
        test, = json.loads((place / "tests.json").read_text())
        self.assertEqual(test["command"], ["@SOURCE@/tests/support/run_ranks", "2"])
        self.assertEqual(test["environment"], ["XDG_CACHE_HOME=@BUILD@/cache", "LOCKSTEP_TEST_SOURCE=@SOURCE@"])

    @unittest.skipUnless((BUILD / "tests/parity_tests").exists(), "it is not built")
    def test_parity_reads_where_it_is_told(self):
        def passes(**more) -> bool:
            done = subprocess.run([BUILD / "tests/parity_tests", "--gtest_filter=Ops.CrossEntropy"], cwd="/", timeout=60,
                                  env=self.check.env | more, capture_output=True, text=True)
            self.assertIn("Ops.CrossEntropy", done.stdout)
            return done.returncode == 0

        golden = self.root / "tests/parity/golden"
        golden.parent.mkdir(parents=True)
        golden.symlink_to((SOURCE / "tests/parity/golden").absolute())
        self.assertTrue(passes())
        self.assertTrue(passes(LOCKSTEP_TEST_SOURCE=str(self.root)))
        golden.unlink()
        self.assertFalse(passes(LOCKSTEP_TEST_SOURCE=str(self.root)))

    def test_have_no_other_path_of_the_machine_that_built_them(self):
        sources_of_gpu_tests = [*SOURCE.glob("tests/*/cuda/*.cpp"), *SOURCE.glob("tests/*/*cuda*_test.cpp"),
                                *SOURCE.glob("tests/parity/*_test.cpp"), *SOURCE.glob("tests/nn/gradient*_test.cpp")]
        self.assertGreater(len(sources_of_gpu_tests), 30)
        alone = {"twins_test.cpp", "weight_files_test.cpp", "gradient_coverage_test.cpp"}  # which need no GPU
        for path in sources_of_gpu_tests:
            if path.name not in alone:
                self.assertNotIn("LOCKSTEP_SOURCE_DIR", path.read_text(), path)


class Archive(Case):
    def test_is_unpacked_once_and_whole(self):
        directory = self.directory()
        place = directory / ".gpu"
        write(place, {"tree/packed.json": '{"programs": false}', "tree/bin/mpirun": "1"})
        archive, program = place / "lockstep-gpu.tar.xz", place / "bin" / "mpirun"

        def pack():
            with tarfile.open(archive, "w:xz") as made:
                made.add(place / "tree", ".")

        with unittest.mock.patch.multiple(build, PLACE=place, ARCHIVE=archive, ROOT=directory):
            build.unpack()
            self.assertEqual(build.packed(), {})
            pack()
            whole = archive.read_bytes()
            archive.write_bytes(whole[:len(whole) // 2])
            with self.assertRaisesRegex(Failure, "cannot be unpacked"):
                build.unpack()
            archive.write_bytes(whole)
            build.unpack()
            self.assertEqual(build.packed(), {"programs": False})
            program.write_text("kept")
            build.unpack()
            self.assertEqual(program.read_text(), "kept")
            # Another one, though it may be of an earlier hour.
            pack()
            os.utime(archive, (1, 1))
            build.unpack()
            self.assertEqual(program.read_text(), "1")


class Program(Case):
    def run_check(self, *arguments, path=None):
        env = {**os.environ, **({"PATH": f"{path}:{os.environ['PATH']}"} if path else {})}
        return subprocess.run([SOURCE / "scripts/gpu-check", *map(str, arguments)], capture_output=True, text=True,
                              env=env, timeout=200)

    def refused(self, code: int, *arguments) -> str:
        done = self.run_check(*arguments)
        self.assertEqual((done.returncode, done.stdout), (code, ""), done.stderr)
        self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
        return done.stderr

    @unittest.skipIf(machine.gpu_names(), "this machine has a GPU")
    def test_without_a_gpu_it_says_so_in_one_line(self):
        self.assertIn("there is no GPU", self.refused(4))

    def test_wrong_usage_is_one_line(self):
        for arguments in (["--only", "test"], ["--fast"], ["--out"]):
            self.refused(2, *arguments)

    @unittest.skipIf(machine.gpu_names(), "this machine has a GPU")
    def test_every_section_is_reported_where_all_of_them_fail(self):
        """nvidia-smi reports a GPU that nobody can use."""
        directory = self.directory()
        executable(directory / "nvidia-smi", '#!/bin/bash\n[[ $1 != -L ]] || echo "GPU 0: NVIDIA Pretended GPU (UUID: GPU-0)"\n')
        out = directory / "out"
        done = self.run_check("--no-build", "--build", BUILD, "--out", out, "--quick", path=directory)
        self.assertEqual(done.returncode, 1, done.stderr)
        reports = sorted(out.iterdir())
        self.assertEqual([path.suffix for path in reports], [".json", ".md"])
        self.assertTrue(reports[0].name.startswith("gpu-pretended-gpu-20"))
        data = json.loads(reports[0].read_text())
        by_name = {section["name"]: section for section in data["sections"]}
        self.assertEqual(set(by_name), set(DATA))
        self.assertEqual(by_name["machine"]["status"], "passed", by_name["machine"]["problems"])
        for name in ("ranks", "contexts", "graphs", "timeline", "throughput"):
            self.assertEqual(by_name[name]["status"], "failed", name)
            self.assertRegex(" ".join(by_name[name]["problems"]), "driver|CPU only", name)
        for name in ("backend", "communication", "pytorch"):
            self.assertEqual(by_name[name]["status"], "skipped", name)
        text = reports[1].read_text()
        self.assertEqual(text, done.stdout)
        self.assertEqual(text.count("\n### "), len(DATA))


if __name__ == "__main__":
    with clean_up():
        unittest.main(argv=[sys.argv[0], *others])
