"""The programs in examples/: what they print.

  examples_test.py [--source DIR] [--build DIR] [unittest's arguments]
"""
import argparse
import pathlib
import re
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
parser = argparse.ArgumentParser()
parser.add_argument("--source", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parents[2])
parser.add_argument("--build", type=pathlib.Path)
places, others = parser.parse_known_args()
BUILD = (places.build or places.source / "build").absolute()

import shell  # noqa: E402

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
import job  # noqa: E402


class Examples(unittest.TestCase):
    def setUp(self):
        holder = tempfile.TemporaryDirectory(prefix="lockstep-examples-")
        self.addCleanup(holder.cleanup)
        self.directory = pathlib.Path(holder.name)

    def run_in(self, command, code=0):
        done = shell.run(command, self.directory, BUILD)
        self.assertEqual(done.returncode, code, f"{command}\n{done.stdout}{done.stderr}")
        return done

    def lines(self, command):
        return self.run_in(command).stdout.splitlines()

    # One batch after the other: the sizes that the module has seen, and those outside.
    def batches(self, lines):
        seen, batches = [], []
        for line in lines:
            if inside := re.fullmatch(r"\tIn Model: input size (\[.*?\])( output size (\[.*?\]))?", line):
                seen.append((inside[1], inside[3]))
            elif outside := re.fullmatch(r"Outside: input size (\[.*?\]) output size (\[.*?\])(, .*)?", line):
                batches.append((sorted(seen, reverse=True), (outside[1], outside[2])))
                seen = []
        self.assertEqual(seen, [])
        return batches

    def test_data_parallel_cuts_batches(self):
        for devices, of_30, of_10 in ((1, [30], [10]), (2, [15, 15], [5, 5]), (3, [10, 10, 10], [4, 4, 2]),
                                      (8, [4] * 7 + [2], [2] * 5)):
            with self.subTest(devices=devices):
                lines = self.lines(f"data_parallel {devices}")
                said = [line for line in lines if "use" in line]
                self.assertEqual(said, [f"Let's use {devices} devices!"] if devices > 1 else [])
                self.assertEqual(lines[:len(said)], said)
                wanted = [([(f"[{n}, 5]", f"[{n}, 2]") for n in pieces], (f"[{count}, 5]", f"[{count}, 2]"))
                          for count, pieces in ((30, of_30), (30, of_30), (30, of_30), (10, of_10))]
                self.assertEqual(self.batches(lines), wanted)
        self.assertIn("give it at least one", self.run_in("data_parallel 0", code=2).stderr)
        self.assertEqual(self.lines("data_parallel"), self.lines("data_parallel 1"))  # there is no GPU

    def test_sequences_along_both_axes(self):
        lines = self.lines("sequences")
        middle = lines.index("sequence first")
        self.assertEqual(lines[0], "batch first")
        losses = []
        for part, piece, whole in ((lines[:middle], "[4, 10, 5]", "[16, 10, 5]"),
                                   (lines[middle:], "[10, 4, 5]", "[10, 16, 5]")):
            self.assertEqual(self.batches(part), [([(piece, None)] * 4, (whole, whole))] * 3)
            for difference in re.findall(r"difference to one device (\S+)", "\n".join(part)):
                self.assertLess(float(difference), 1e-6)  # in order: values are of the size of 1
            losses.append([float(loss) for loss in re.findall(r"^loss (\S+)$", "\n".join(part), re.MULTILINE)])
            self.assertEqual(len(losses[-1]), 3)
            self.assertEqual(losses[-1], sorted(set(losses[-1]), reverse=True))  # it learns

    # The loss of each piece on its device: the same training on any number of them, and by lockstep train.
    def test_several_inputs_and_outputs(self):
        losses = {}
        for devices in (1, 3):
            *lines, last = self.lines(f"several_inputs loop {devices}")
            estimate = re.fullmatch(r"estimate (\S+), log of the variance (\S+)", last)
            self.assertAlmostEqual(float(estimate[1]), 0.5, delta=0.1)  # of readings from 0.4 to 0.6
            self.assertLess(float(estimate[2]), 0)
            losses[devices] = [float(re.fullmatch(r"epoch \d: loss (\S+)", line)[1]) for line in lines]
            self.assertEqual(len(losses[devices]), 8)
        for one, three in zip(losses[1], losses[3]):
            self.assertAlmostEqual(one, three, delta=2e-3)  # three digits, and sums in another order
        self.assertLess(losses[1][-1], losses[1][0] - 0.5)
        ends = []
        for command in ("several_inputs", "several_inputs --parallel dp --device cpu:0,1,2",
                        "lockstep launch -n 2 --no-prefix -- several_inputs --batch 16"):
            found = re.findall(r"^loss (\S+) ", self.run_in(f"{command} --epochs 3").stdout, re.MULTILINE)
            self.assertEqual(len(found), 1, command)
            ends.append(float(found[0]))
        for end in ends:
            self.assertAlmostEqual(end, ends[0], delta=5e-3, msg=ends)
            self.assertLess(end, -1)

    def test_two_ways_train_alike(self):
        commands = [f"two_ways dp {devices}" for devices in (1, 2, 3)]
        commands += ["two_ways ddp", *(f"lockstep launch -n {ranks} --no-prefix -- two_ways ddp" for ranks in (2, 3)),
                     "for r in 0 1; do RANK=$r LOCAL_RANK=$r WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 "
                     f"MASTER_PORT={job.free_port()} two_ways ddp & done"]
        results = {}
        for command in commands:
            found = re.findall(r"^loss (\S+)  accuracy (\S+) %$", self.run_in(command).stdout, re.MULTILINE)
            self.assertEqual(len(found), 1, command)
            results[command] = tuple(map(float, found[0]))
        loss, accuracy = results[commands[0]]
        self.assertGreater(accuracy, 95)
        for command in commands:
            self.assertAlmostEqual(results[command][0], loss, delta=2e-4, msg=results)
            self.assertAlmostEqual(results[command][1], accuracy, delta=0.2, msg=results)
        self.run_in("two_ways", code=2)

    def test_saves_and_loads_in_all_four_ways(self):
        lines = self.lines("save_and_load .")
        losses = [float(line.split()[1]) for line in lines[:2]]
        self.assertLess(losses[1], losses[0] / 5)
        self.assertEqual(lines[2:7], [f"{way}: equal" for way in (
            "wrapped into plain", "inner into plain", "wrapped into wrapped", "plain into wrapped",
            "PyTorch's wrapped into plain")])
        self.assertRegex(lines[7], r'^by its word: .*missing "weight", "bias"; unexpected "module.weight", "module.bias"')
        files = [(self.directory / f"{name}.safetensors").read_bytes() for name in ("wrapped", "inner", "plain")]
        self.assertEqual(files[0], files[1])
        self.assertEqual(files[0], files[2])
        self.assertIn(b'"weight"', files[0])
        self.assertNotIn(b"module", files[0])
        self.assertIn(b"logits", (self.directory / "linear.onnx").read_bytes())
        self.run_in("save_and_load nowhere", code=3)

    def test_infers_on_a_chosen_device(self):
        self.assertEqual(self.lines("chosen_device cpu 1"),
                         ["[2, 3] on cpu:0, on cpu:1, and back: equal", "[1, 1000], cpu:1"])
        self.assertIn("there is no device 9: there are 4 devices, cpu:0 to cpu:3", self.run_in("chosen_device cpu 9", code=2).stderr)
        self.run_in("chosen_device cuda 0", code=4)
        self.assertIn("missing.pth", self.run_in("chosen_device cpu 0 missing.pth", code=3).stderr)

    def test_lines_of_the_table(self):
        place = "[12, 10] on cpu:1, [12, 10] on cpu:0; there are 3 devices, cpu:0 to cpu:2"
        self.assertEqual(self.lines("from_pytorch ."), [
            place, "rank 0 of 1, local rank 0, cpu: 1408 samples, 0 parameters missing"])
        for launcher in ("lockstep launch -n 2 --no-prefix --", "mpirun -np 2"):
            lines = self.lines(f"{launcher} from_pytorch .")
            self.assertEqual(lines.count(place), 2)
            self.assertEqual([line for line in lines if line.startswith("rank")], [
                f"rank {rank} of 2, local rank {rank}, cpu: 704 samples, 0 parameters missing" for rank in (0, 1)])


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *others])
