"""The scripts under bench/, as people call them: once with tiny sizes, and with everything that can go wrong.

  scripts_test.py [--source DIR] [--build DIR] [unittest's arguments]

PyTorch takes part where it is installed (bench/peers/setup); the other tests pretend that it is not, or put a program
that misbehaves in its place. No figure is checked: only that it is there.
"""
import argparse
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import uuid

sys.dont_write_bytecode = True
parser = argparse.ArgumentParser()
parser.add_argument("--source", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parents[2])
parser.add_argument("--build", type=pathlib.Path)
places, others = parser.parse_known_args()
SOURCE, BUILD = places.source, (places.build or places.source / "build").absolute()
sys.path.insert(0, str(SOURCE / "bench"))

from harness import report, stats  # noqa: E402
from harness.rounds import Entry  # noqa: E402

TINY = ["--rounds", "2", "--steps", "2", "--warmup-steps", "1", "--batch", "4", "--no-peak"]
MARK = "BENCH_SCRIPTS_TEST"  # in the environment of every process that a test starts


class ScriptTest(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = pathlib.Path(directory.name)
        self.scratch = self.directory / "tmp"
        self.scratch.mkdir()
        self.mark = uuid.uuid4().hex

    def start(self, script: str, *arguments, **more) -> subprocess.Popen:
        argv = [str(SOURCE / "bench" / script), "--build", str(BUILD), *map(str, arguments)]
        return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                env={**os.environ, "TMPDIR": str(self.scratch), MARK: self.mark}, **more)

    def run_script(self, script: str, *arguments):
        """Its exit code, stdout, stderr; and that it has cleaned up."""
        process = self.start(script, *arguments)
        out, err = process.communicate(timeout=240)
        self.check_nothing_left()
        return process.returncode, out, err

    def check_nothing_left(self):
        deadline = time.monotonic() + 5  # lockstep's launcher has a reaper that ends after it
        while (left := self.processes() + os.listdir(self.scratch)) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.assertEqual(left, [])

    def processes(self) -> list:
        """Those that were started by this test and are still there."""
        found = []
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if f"{MARK}={self.mark}".encode() in pathlib.Path(f"/proc/{pid}/environ").read_bytes():
                    found.append(pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" "))
        return found

    def fake_torch(self, script: str) -> pathlib.Path:
        """A peers' directory in which `script` (bash) stands in for the interpreter that has PyTorch."""
        python = self.directory / "peers" / "torch" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text("#!/bin/bash\n" + script)
        python.chmod(0o755)
        return self.directory / "peers"

    def no_torch(self) -> pathlib.Path:
        return self.directory / "none"

    def assert_one_line(self, text: str, *words):
        self.assertEqual(len(text.splitlines()), 1, text)
        for word in words:
            self.assertIn(word, text)


class Lists(ScriptTest):
    def test_names_that_are_none_are_refused(self):
        # A part that is misspelled would measure nothing, and say nothing.
        for script, *arguments in (("compare", "--only", "step"), ("hosts/compare", "--only", "steps"),
                                   ("infer", "--models", "resnet19"), ("predictions", "check", "x.csv", "--models", "nlp"),
                                   ("predictions", "check", "x.csv", "--rates", "2gbit"),
                                   ("predictions", "advice", "x.csv", "--ranks", "12")):
            with self.subTest(script=script):
                code, _, err = self.run_script(script, *arguments)
                self.assertEqual(code, 2)
                self.assert_one_line(err, f"there is no '{arguments[-1]}', but ")


class Compare(ScriptTest):
    def compare(self, *arguments):
        return self.run_script("compare", *TINY, "--starts", 1, *arguments)

    def test_without_pytorch_it_says_so_and_measures_the_others(self):
        figures = self.directory / "figures.json"
        code, out, err = self.compare("--peers-dir", self.no_torch(), "--sizes", "4K,64K", "--json", figures)
        self.assertEqual(code, 0, err)
        self.assertEqual([line for line in err.splitlines() if "skipped" in line],
                         ["skipped: PyTorch and Gloo: not installed → bench/peers/setup installs it"])
        self.assertEqual(out.count("| PyTorch | skipped: not installed"), 4, out)  # 2 models: steps, start
        self.assertIn("Gloo: skipped: not installed", out)
        data = json.loads(figures.read_text())
        for model in ("mlp", "cnn"):
            lockstep = data["steps"][model][0]
            self.assertEqual([result["round"] for result in lockstep["results"]], [1, 2])
            for result in lockstep["results"]:
                self.assertEqual((result["model"], result["world_size"], result["batch"]), (model, 2, 4))
                self.assertGreater(result["step_ms"], 0)
            self.assertEqual(len(data["startup"][model][0]["results"]), 1)
        for contestant in data["allreduce"][:2]:
            for result in contestant["results"]:
                self.assertEqual([result[size]["bytes"] for size in ("4096", "65536")], [4096, 65536])
                self.assertEqual(result["65536"]["wrong"], 0)
        self.assertEqual(data["allreduce"][1]["name"], "MPI_Allreduce")
        self.assertRegex(out, r"\| 64 KB \|.* × \(")

    def test_steps_are_shares_of_the_measured_peak(self):
        code, out, err = self.run_script("compare", *[word for word in TINY if word != "--no-peak"], "--only", "steps",
                                         "--models", "mlp", "--peers-dir", self.no_torch())
        self.assertEqual(code, 0, err)
        self.assertRegex(out, r"\| lockstep \|.*\| [1-9]\d* % \| 1 \|")

    def test_its_section_is_replaced_and_the_rest_of_the_file_kept(self):
        results = self.directory / "results.md"
        results.write_text("# Results\n\nbefore\n")
        arguments = ("--peers-dir", self.no_torch(), "--only", "allreduce", "--out", results)
        self.assertEqual(self.compare(*arguments, "--sizes", "4K")[0], 0)
        results.write_text(results.read_text() + "\nafter\n")
        self.assertEqual(self.compare(*arguments, "--sizes", "8K")[0], 0)
        text = results.read_text()
        self.assertTrue(text.startswith("# Results\n\nbefore\n\n<!-- bench/compare: begin"), text)
        self.assertTrue(text.endswith("<!-- bench/compare: end -->\n\nafter\n"), text)
        self.assertEqual(text.count("### Allreduce"), 1)
        self.assertNotIn("| 4 KB |", text)
        self.assertIn("| 8 KB |", text)

    def test_a_peer_that_crashes_is_named_and_the_others_go_on(self):
        peers = self.fake_torch("echo 'ImportError: no such thing' >&2\nexit 3\n")
        code, out, err = self.compare("--peers-dir", peers, "--models", "mlp", "--sizes", "4K")
        self.assertEqual(code, 1, err)
        self.assertIn("ended with exit code 3: ImportError: no such thing", err)
        self.assertRegex(out, r"\| PyTorch eager \| failed: PyTorch eager, rank [01] ended with exit code 3")
        self.assertRegex(out, r"\| lockstep \| [\d.]+ \(")
        self.assertRegex(out, r"\| 4 KB \| [\d.]+ \(.* × \(")

    def test_a_peer_that_dies_after_a_while_is_out(self):
        # Answers that it is there, that it has built, and once that it has measured; then it is killed.
        peers = self.fake_torch("""
            answer() { read -r; echo "$1"; }
            echo '{}'
            answer '{"startup_ms":1,"peak_memory_bytes":1,"gpu_library_bytes":0}'
            answer '{"step_ms":[1,1],"compute_ms":[1,1],"peak_memory_bytes":1,"gpu_library_bytes":0}'
            read -r; kill -9 $$
            """)
        code, out, err = self.compare("--peers-dir", peers, "--models", "mlp", "--only", "steps")
        self.assertEqual(code, 1, err)
        self.assertRegex(out, r"\| PyTorch eager \| failed: PyTorch eager, rank [01] was ended by SIGKILL \|")
        self.assertRegex(out, r"\| lockstep \| [\d.]+ \(")

    def test_a_peer_that_hangs_is_named_and_ended_with_all_it_started(self):
        peers = self.fake_torch("trap '' TERM; sleep 1000 & while :; do sleep 1; done\n")
        code, out, err = self.compare("--peers-dir", peers, "--only", "allreduce", "--sizes", "4K",
                                      "--timeout-seconds", 15)
        self.assertEqual(code, 1, err)
        self.assertRegex(out, r"Gloo: failed: Gloo, rank [01] hangs: it did not answer within 15 s")
        self.assertRegex(out, r"\| 4 KB \| [\d.]+ \(")

    def test_what_cannot_work_is_said_in_one_line_before_anything_is_measured(self):
        for arguments, code, words in (
                (["--rank", "2"], 2, ["--rank", "→"]),
                (["--rounds", "0"], 2, ["--rounds", "'0'", "→"]),
                (["--sizes", "4K,2"], 2, ["'2'", "→"]),
                (["--sizes", "4K,4096"], 2, ["twice", "→"]),
                (["--only", "step"], 2, ["'step'", "steps, allreduce, startup", "→"]),
                (["--models", "mlp,", "--only", "steps"], 2, ["not a name", "→"]),
                (["--out", "/nowhere/results.md"], 3, ["/nowhere/results.md", "No such file", "→"]),
                (["--json", str(self.directory)], 3, ["Is a directory", "→"])):
            got, out, err = self.run_script("compare", *arguments, "--peers-dir", self.no_torch())
            self.assertEqual((got, out), (code, ""), err)
            self.assert_one_line(err, *words)
        got, out, err = self.run_script("compare", "--peers-dir", self.no_torch(), "--models", "mpl", "--only", "steps")
        self.assertEqual((got, out), (2, ""), err)
        self.assertIn("did you mean 'mlp'", err)
        got, out, err = self.run_script("compare", "--build", self.directory)
        self.assertEqual((got, out), (1, ""), err)
        self.assert_one_line(err, "lockstep is not built", "cmake --build build")

    def test_killed_it_leaves_no_process(self):
        peers = self.fake_torch("echo '{}'; exec sleep 1000\n")
        for arguments, begun in ((["--only", "allreduce", "--peers-dir", peers], "sleep 1000"),
                                 (["--only", "steps", "--models", "mlp", "--steps", "1000000", "--peers-dir",
                                   self.no_torch()], "--steps 1000000")):
            process = self.begin(begun, *arguments)
            process.kill()
            process.communicate(timeout=30)
            deadline = time.monotonic() + 10
            while self.processes() and time.monotonic() < deadline:
                time.sleep(0.05)
            self.assertEqual(self.processes(), [])

    def begin(self, begun: str, *arguments) -> subprocess.Popen:
        """bench/compare in the background, once it has started a process whose command line has `begun` in it."""
        process = self.start("compare", *TINY, *arguments, start_new_session=True)
        deadline = time.monotonic() + 60
        while not any(begun.encode() in command and b"bench/compare" not in command for command in self.processes()):
            self.assertIsNone(process.poll(), process.poll() is not None and process.communicate())
            self.assertLess(time.monotonic(), deadline, "it never began")
            time.sleep(0.05)
        return process

    def test_interrupted_it_leaves_no_process(self):
        # One turn at a peer that waits for ever, one while lockstep's ranks compute.
        peers = self.fake_torch("echo '{}'; sleep 1000\n")
        for arguments, begun in ((["--only", "allreduce", "--sizes", "4K"], "sleep 1000"),
                                 (["--only", "steps", "--models", "mlp", "--steps", "1000000", "--peers-dir",
                                   self.no_torch()], "--steps 1000000")):
            for number in (signal.SIGINT, signal.SIGTERM):
                process = self.begin(begun, "--peers-dir", peers, *arguments)
                process.send_signal(number)
                out, err = process.communicate(timeout=30)
                self.assertEqual((process.returncode, out), (128 + number, ""), err)
                self.assertIn(f"ended by {number.name}", err)
                self.check_nothing_left()

    def test_interrupted_it_reports_what_it_has_measured(self):
        out_file, figures = self.directory / "results.md", self.directory / "figures.json"
        out_file.write_text("# Results\n")
        process = self.start("compare", *TINY, "--only", "steps", "--models", "mlp,cnn:8", "--rounds", 100000,
                             "--peers-dir", self.no_torch(), "--out", out_file, "--json", figures)
        for line in process.stderr:
            if "round 3 of" in line:
                break
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
        self.assertEqual(process.returncode, 128 + signal.SIGTERM, err)
        self.assertIn("#### mlp", out)
        self.assertRegex(out, r"\| \*?\*?lockstep\*?\*? \| [0-9]")
        self.assertNotIn("#### cnn", out)  # its turn never came
        self.assertGreaterEqual(len(json.loads(figures.read_text())["steps"]["mlp"][0]["results"]), 2)
        self.assertEqual(out_file.read_text(), "# Results\n")
        self.assertIn(f"{out_file} is as it was", err)
        self.check_nothing_left()


@unittest.skipUnless((BUILD / "peers/torch/bin/python").exists(), "PyTorch is not installed → bench/peers/setup")
class PyTorch(ScriptTest):
    def test_takes_part_in_everything(self):
        figures = self.directory / "figures.json"
        code, out, err = self.run_script("compare", *TINY, "--starts", 1, "--models", "mlp", "--sizes", "4K",
                                         "--json", figures)
        self.assertEqual(code, 0, err)
        data = json.loads(figures.read_text())
        lockstep, *peers = data["steps"]["mlp"]
        figures = {"model", "world_size", "batch", "precision", "threads", "backend", "steps", "step_ms", "step_ms_p10",
                   "step_ms_p90", "samples_per_s", "compute_ms", "exposed_comm_ms", "peak_memory_bytes", "startup_ms"}
        self.assertEqual([peer["name"] for peer in peers], ["PyTorch eager", "PyTorch compile"])
        for peer in peers:
            self.assertEqual(len(peer["results"]), 2)
            for result in peer["results"]:
                self.assertEqual(len(result["peak_memory_bytes"]), 2)
                # What tables are made of goes by the same names; lockstep says more of itself.
                self.assertLessEqual(figures, set(lockstep["results"][0]) & set(result))
        self.assertIn("4096", data["allreduce"][2]["results"][0])
        self.assertGreater(data["startup"]["mlp"][1]["results"][0]["startup_ms"], 0)
        self.assertIn("Against the fastest, PyTorch ", out)

    def test_its_collectives_over_each_backend(self):
        figures = self.directory / "figures.json"
        code, out, err = self.run_script("compare", "--only", "collectives", "--rounds", 1, "--sizes", "4,4K", "--json", figures)
        self.assertEqual(code, 0, err)
        lockstep, gloo = json.loads(figures.read_text())["collectives"]
        self.assertEqual((lockstep["name"], gloo["name"]), ("lockstep", "Gloo"))
        wanted = {f"{kind} {size}" for kind in ("all_reduce", "all_gather", "reduce_scatter") for size in (4, 4096)}
        for entry in (gloo, lockstep) if (BUILD / "c10d/site/lockstep_c10d").exists() else (gloo,):
            self.assertEqual(set(entry["results"][0]) - {"round"}, wanted)
            self.assertTrue(all(entry["results"][0][key]["time_us"] > 0 for key in wanted))
        self.assertEqual(out.count("| 4 KB |"), 3)

    def test_its_loss_of_rows_is_that_of_its_other_layout(self):
        program = f"""
import sys
sys.path.insert(0, {str(SOURCE / "bench/peers/torch")!r})
import torch
import torch.nn.functional as F
from models import GPT2_ROWS, GPT2_TOKENS, MODELS, Gpt, Model, loss_of, token_batch
assert GPT2_ROWS % 64 == 0 and GPT2_ROWS - GPT2_TOKENS in range(64)
small = Model(lambda: Gpt(1, 2, 8, 16, GPT2_ROWS), token_batch(16, GPT2_TOKENS))
for model in [small, *(MODELS[name] for name in ("mlp", "cnn", "bert", "rnn", "lstm", "gru", "gpt"))]:
    torch.manual_seed(1)
    module, (inputs, labels) = model.make(), model.batch(2)
    logits = module(inputs)
    other = F.cross_entropy(logits.transpose(1, 2) if logits.dim() == 3 else logits, labels)
    loss = loss_of(logits, labels)
    assert abs(loss - other) < 1e-5 * other, (loss, other)
    loss.backward()
"""
        done = subprocess.run([BUILD / "peers/torch/bin/python", "-B", "-c", program], capture_output=True, text=True,
                              timeout=300)
        self.assertEqual(done.returncode, 0, done.stderr)


class Peers(ScriptTest):
    def test_mpi_alone_has_the_keys_of_lockstep_bench(self):
        code, out, err = self.run_script("peers/run", "allreduce", "4K", "--transport", "mpi")
        self.assertEqual(code, 0, err)
        result = json.loads(out)
        self.assertEqual((result["bytes"], result["world_size"], result["wrong"]), (4096, 2, 0))
        for key in ("time_us", "algbw_gbs", "busbw_gbs", "out_of_place_time_us"):
            self.assertGreater(result[key], 0)

    def test_without_pytorch(self):
        code, out, err = self.run_script("peers/run", "--peers-dir", self.no_torch(), "step", "mlp")
        self.assertEqual((code, out), (1, ""))
        self.assert_one_line(err, "not installed", "bench/peers/setup")

    def test_setup_knows_its_flags(self):
        for arguments in (["--dirr", "x"], ["tensorflow"], ["--dir"]):
            done = subprocess.run([SOURCE / "bench/peers/setup", *arguments], capture_output=True, text=True)
            self.assertEqual((done.returncode, done.stdout), (2, ""))
            self.assert_one_line(done.stderr, "→")


class Processes(ScriptTest):
    """What bench/harness/processes.py promises, in a program of a few lines."""

    # Itself and what it starts, both of which have better things to do than to end.
    STUBBORN = "trap '' TERM; sleep 1000 & trap '' TERM; echo '{}'; while :; do sleep 1; done"

    def run_lines(self, lines: str):
        program = f"""
import os, sys, time
sys.dont_write_bytecode = True
sys.path.insert(0, {str(SOURCE / "bench")!r})
from harness import processes
from harness.processes import Process, clean_up, environment
with clean_up():
    peer = Process("peer", ["bash", "-c", {self.STUBBORN!r}], environment())
    peer.receive(10, time.monotonic() + 10)
{lines}
"""
        return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60,
                              env={**os.environ, MARK: self.mark})

    def test_what_is_stopped_is_gone_with_all_it_started_and_others_stay(self):
        done = self.run_lines("""
    other = Process("other", ["bash", "-c", "echo '{}'; read -r"], environment())
    other.receive(10, time.monotonic() + 10)
    peer.stop(grace_s=0.5)
    print(processes._children() == [other._process.pid])
""")
        self.assertEqual((done.returncode, done.stdout), (0, "True\n"), done.stderr)
        self.assertEqual(self.processes(), [])

    def test_what_nobody_has_stopped_is_gone_in_the_end(self):
        done = self.run_lines("    raise SystemExit(7)")
        self.assertEqual(done.returncode, 7, done.stderr)
        self.assertEqual(self.processes(), [])


class Figures(unittest.TestCase):
    def test_ratios_are_taken_within_rounds_that_both_have(self):
        spread = stats.ratio({1: 10, 2: 40, 3: 30, 5: 1}, {1: 5, 2: 10, 3: 10, 4: 1})
        self.assertEqual((spread.low, spread.median, spread.high), (2, 3, 4))
        self.assertIsNone(stats.ratio({1: 1}, {2: 1}))

    def test_the_slowest_rank_counts_step_by_step(self):
        self.assertEqual(stats.slowest([[1, 5, 2], [3, 4, 2]]), [3, 5, 2])
        with self.assertRaises(ValueError):
            stats.slowest([[1, 2], [1]])

    def test_quantiles_are_those_of_lockstep_bench(self):
        self.assertEqual([stats.quantile([4, 1, 3, 2], q) for q in (0, 0.5, 1)], [1, 3, 4])

    def test_the_fastest_peer_is_the_one_that_is_compared_with(self):
        def entry(name, *times, **more):
            return Entry(name, results={i: {"step_ms": t, "samples_per_s": 1, "compute_ms": 1, "exposed_comm_ms": 0,
                                            "peak_memory_bytes": [1]} for i, t in enumerate(times)}, **more)
        lines = report._steps("m", 32, [entry("lockstep", 1, 2), entry("slow", 8, 8), entry("fast", 4, 6),
                                    entry("faster, but failed", 1, failed="it did")])
        self.assertIn("Against the fastest, fast: a step takes it 3.50 × (3.00 to 4.00) as long.", lines)
        self.assertTrue(any(line.startswith("| faster, but failed | failed: it did |") for line in lines))


class Inference(ScriptTest):
    TINY = ["--rounds", 2, "--images", 2, "--tokens", 3]

    def test_lockstep_alone(self):
        figures = self.directory / "figures.json"
        code, out, err = self.run_script("infer", *self.TINY, "--peers-dir", self.no_torch(), "--models",
                                         "resnet18-cifar,gpt", "--json", figures)
        self.assertEqual(code, 0, err)
        self.assertEqual(out.count("| PyTorch | skipped: not installed"), 2, out)
        data = json.loads(figures.read_text())
        for model in ("resnet18-cifar", "gpt"):
            for entry in data[model]:
                for result in entry.get("results", []):
                    self.assertGreater(result["per_s"], 0)
                    self.assertGreater(result["ms"], 0)
            self.assertEqual([r["round"] for r in data[model][0]["results"]], [1, 2])
            self.assertIn(f"### {model}", out)

    def test_a_peer_that_fails_is_named_and_the_others_go_on(self):
        peers = self.fake_torch("echo boom >&2; exit 3")
        code, out, err = self.run_script("infer", *self.TINY, "--peers-dir", peers, "--models", "resnet18-cifar")
        self.assertEqual(code, 1, err)
        self.assertIn("PyTorch eager ended with exit code 3: boom", err)
        self.assertIn("| lockstep, 1 stream |", out)


class Balance(ScriptTest):
    def test_beside_a_load(self):
        if len(os.sched_getaffinity(0)) < 2:
            self.skipTest("one processor")
        code, out, err = self.run_script("balance", "--speeds", "load", "--rounds", 1, "--seconds", 1, "--global-batch", 96,
                                         "--shards", 8, "--peers-dir", self.no_torch(), "--no-peer")
        self.assertEqual(code, 0, err)
        self.assertRegex(out, r"load +equal +\d+\.\d%")
        self.assertRegex(out, r"load +auto +\d+\.\d%")

    def test_wrong_usage(self):
        for arguments, says in ((["--speeds", "1:x", "--no-peer"], "'1:x' is no list of speeds"),
                                (["--peers-dir", self.no_torch()], "or leave it out: --no-peer")):
            code, _, err = self.run_script("balance", *arguments)
            self.assertGreater(code, 0)
            self.assert_one_line(err, says)


class LibTorch(ScriptTest):
    def test_it_needs_pytorch(self):
        code, out, err = self.run_script("libtorch", "--peers-dir", self.no_torch())
        self.assertEqual((code, out), (1, ""))
        self.assertEqual(err.splitlines()[-1], "bench/libtorch: PyTorch is not installed → bench/peers/setup torch")

    def test_wrong_usage(self):
        code, _, err = self.run_script("libtorch", "--optimizer", "adagrad")
        self.assertEqual(code, 2)
        self.assert_one_line(err, "adagrad", "→")


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *others], verbosity=2)
