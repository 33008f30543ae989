#!/usr/bin/env python3
"""Files of events of lockstep as TensorBoard reads them, and the status server's text as Prometheus' client does.

    tensorboard_check.py --lockstep build/lockstep [unittest's arguments]

The packages tensorboard and prometheus_client are this Python's, or those of the environment peers/tensorboard beside the
program; exit code 77 where there are none.
"""
import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.request

ARGUMENTS = argparse.ArgumentParser()
ARGUMENTS.add_argument("--lockstep", required=True, type=os.path.abspath)
OPTIONS, REST = ARGUMENTS.parse_known_args()

try:
    from prometheus_client.parser import text_string_to_metric_families
    from tensorboard.backend.event_processing import event_accumulator, plugin_event_accumulator
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
except ImportError as error:
    python = pathlib.Path(OPTIONS.lockstep).parent / "peers/tensorboard/bin/python"
    if python.exists() and pathlib.Path(sys.executable) != python:
        os.execv(python, [python, *sys.argv])
    print(f"skipped: {error}")
    sys.exit(77)

ENVIRONMENT = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
TRAIN = ["train", "mlp", "--hidden", "8", "--data", "digits", "--threads", "1", "--batch", "64", "--quiet"]


class Followers(unittest.TestCase):
    def setUp(self):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.directory = pathlib.Path(holder.name)

    def train(self, *words):
        subprocess.run([OPTIONS.lockstep, *TRAIN, *words], cwd=self.directory, env=ENVIRONMENT, check=True, timeout=300)

    def board(self, module=event_accumulator):
        """Of programs that read files of events; of TensorBoard's own plugins with plugin_event_accumulator."""
        accumulator = module.EventAccumulator(str(self.directory / "b"), {"scalars": 0, "tensors": 0, "histograms": 0})
        accumulator.Reload()
        return accumulator

    def metrics(self, kind):
        with open(self.directory / "m.jsonl") as file:
            return [event for event in map(json.loads, file) if event["event"] == kind]

    def test_tensorboard_reads_all_of_it(self):
        keep = ["--checkpoint-dir", "c", "--checkpoint-every", "4", "--keep", "0"]
        follow = ["--tensorboard", "b", "--histogram-steps", "2", "--metrics", "m.jsonl", "--ema", "0.9"]
        self.train("--steps", "6", "--eval-steps", "3", *keep, *follow)
        for path in (self.directory / "b").iterdir():
            self.assertEqual(next(iter(EventFileLoader(str(path)).Load())).file_version, "brain.Event:2")
        board = self.board()
        for kind, group in (("step", "train"), ("eval", "validation"), ("eval", "validation_ema")):
            events = [event for event in self.metrics(kind) if kind == "step" or event.get("ema", False) == ("_" in group)]
            for name in ("loss", "lr", "grad_norm", "memory_bytes") if kind == "step" else ("loss", "accuracy"):
                read = board.Scalars(f"{group}/{name}")
                known = [event for event in events if event[name] is not None]
                self.assertEqual([event.step for event in read], [event["step"] for event in known])
                for one, other in zip(read, known):
                    self.assertAlmostEqual(one.value, other[name], delta=1e-6 * abs(other[name]))
        text = board.Tensors("settings")[0].tensor_proto.string_val[0].decode()
        self.assertIn("| model | mlp |", text)
        self.assertEqual(board.SummaryMetadata("settings").plugin_data.plugin_name, "text")
        histograms = board.Histograms("gradients/fc1.weight")
        self.assertEqual([event.step for event in histograms], [2, 4, 6])
        for event in histograms:
            value = event.histogram_value
            self.assertAlmostEqual(sum(value.bucket), value.num, delta=1e-6)
            self.assertEqual(value.num, 8 * 64)
            self.assertEqual(len(value.bucket), 30)
            self.assertEqual(value.bucket_limit[-1], value.max)
            self.assertLessEqual(value.min, value.bucket_limit[0])
        shown = self.board(plugin_event_accumulator)
        for tag, plugin in (("train/loss", "scalars"), ("settings", "text"), ("parameters/fc1.bias", "histograms")):
            self.assertEqual(shown.SummaryMetadata(tag).plugin_data.plugin_name, plugin)
        shapes = [[size.size for size in event.tensor_proto.tensor_shape.dim] for event in shown.Tensors("gradients/fc1.weight")]
        self.assertEqual(shapes, [[30, 3]] * 3)

    def test_steps_that_are_done_again_are_dropped(self):
        line = ["--steps", "6", "--checkpoint-dir", "c", "--checkpoint-every", "4", "--keep", "0", "--tensorboard", "b"]
        self.train(*line)
        shutil.rmtree(self.directory / "c/step-0000000006")
        self.train(*line, "--resume", "auto")
        self.assertEqual(len(list((self.directory / "b").iterdir())), 2)
        self.expect_six_steps()
        self.train(*line[:2], "--tensorboard", "b")  # another run in the place of this one
        self.expect_six_steps()

    def expect_six_steps(self):
        six = [1, 2, 3, 4, 5, 6]
        self.assertEqual([event.step for event in self.board().Scalars("train/loss")], six)
        self.assertEqual([event.step for event in self.board(plugin_event_accumulator).Tensors("train/loss")], six)

    def test_prometheus_reads_the_status(self):
        with open(self.directory / "said", "w") as said:
            process = subprocess.Popen([OPTIONS.lockstep, *TRAIN, "--steps", "1000000", "--ema", "0.9", "--status-port", "0"],
                                       cwd=self.directory, env=ENVIRONMENT, stderr=said)
        try:
            for _ in range(600):
                found = re.search(r"(http://\S+)/metrics", (self.directory / "said").read_text())
                text = urllib.request.urlopen(found[1] + "/metrics", timeout=10).read().decode() if found else ""
                if "validation_loss" in text:
                    break
                time.sleep(0.1)
            samples = {(sample.name, sample.labels.get("weights")): (family, sample)
                       for family in text_string_to_metric_families(text) for sample in family.samples}
            for name in ("step", "epoch", "loss", "learning_rate", "gradient_norm", "samples_per_second", "step_seconds",
                         "communication_wait_seconds", "memory_bytes", "planned_steps", "healthy", "restarts"):
                family, sample = samples[f"lockstep_{name}", None]
                self.assertEqual(family.type, "gauge")
                self.assertTrue(family.documentation)
            family, sample = samples["lockstep_samples_total", None]
            self.assertEqual(family.type, "counter")
            self.assertEqual(sample.value % 1, 0)
            self.assertEqual(samples["lockstep_info", None][1].labels["model"], "mlp")
            for weights in ("last", "average"):
                self.assertGreater(samples["lockstep_validation_accuracy", weights][1].value, 0)
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *REST])
