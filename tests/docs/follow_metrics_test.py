"""examples/follow_metrics.py, with stubs of wandb and mlflow that write down what they are given.

  follow_metrics_test.py [--source DIR] [unittest's arguments]
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time
import unittest

parser = argparse.ArgumentParser()
parser.add_argument("--source", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parents[2])
places, others = parser.parse_known_args()

STUB = """
import json, os
def note(*what):
    with open(os.environ["CALLS"], "a") as file:
        file.write(json.dumps(what) + "\\n")
"""
WANDB = STUB + """
class Run:
    def log(self, numbers, step): note("send", numbers, step)
    def finish(self): note("end")
def init(project, config):
    note("begin", project, config)
    return Run()
"""
MLFLOW = STUB + """
project = None
def set_experiment(name): globals().update(project=name)
def start_run(): pass
def log_params(params): note("begin", project, params)
def log_metrics(numbers, step): note("send", numbers, step)
def end_run(): note("end")
"""


def run(begun, lr):
    return {"event": "run", "settings": {"lr": {"value": lr, "from": "default"}}, "unix_s": begun}


def step(number):
    return {"event": "step", "step": number, "loss": number / 2, "grad_norm": None, "unix_s": 5.5}


def evaluation(number, **more):
    return {"event": "eval", "step": number, "split": "val", "loss": 0.5, "best": True, "unix_s": 6.5, **more}


class Follow(unittest.TestCase):
    def setUp(self):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.directory = pathlib.Path(holder.name)
        (self.directory / "wandb.py").write_text(WANDB)
        (self.directory / "mlflow.py").write_text(MLFLOW)
        self.metrics, self.calls = self.directory / "m.jsonl", self.directory / "calls"
        self.calls.touch()

    def start(self, *arguments):
        process = subprocess.Popen(
            [sys.executable, places.source / "examples/follow_metrics.py", *arguments], cwd=self.directory,
            env={"PYTHONPATH": str(self.directory), "CALLS": str(self.calls)})
        self.addCleanup(process.kill)
        return process

    def write(self, *events, mode="a", end=""):
        with open(self.metrics, mode) as file:
            file.write("".join(json.dumps(event) + "\n" for event in events) + end)

    def told(self):
        return [json.loads(line) for line in self.calls.read_text().splitlines()]

    def wait_for(self, calls):
        end = time.monotonic() + 60
        while len(self.told()) < calls and time.monotonic() < end:
            time.sleep(0.02)
        self.assertEqual(len(self.told()), calls)

    def test_a_run_that_resumes_and_one_after_it(self):
        for package in ("wandb", "mlflow"):
            with self.subTest(package):
                self.metrics.unlink(missing_ok=True)
                self.calls.write_text("")
                process = self.start(package, "m.jsonl", "digits")  # before there is a file
                self.write(run(1, "0.1"), step(1), step(2), end='{"event": "step", "st')
                self.wait_for(3)
                whole = json.dumps(run(1, "0.1")) + "\n" + json.dumps(step(1)) + "\n"
                self.metrics.write_text(whole)  # it resumes after step 1, and comes further than it was
                self.write({"event": "resume", "step": 1}, step(2), evaluation(2), evaluation(2, ema=True), step(3))
                self.wait_for(6)
                self.write(run(2, "0.2"), step(1), {"event": "final", "steps": 1}, mode="w")
                self.assertEqual(process.wait(60), 0)
                sent = [call[1:] for call in self.told() if call[0] == "send"]
                self.assertEqual(sent, [
                    [{"train/loss": 0.5}, 1], [{"train/loss": 1.0}, 2], [{"validation/loss": 0.5}, 2],
                    [{"validation_ema/loss": 0.5}, 2], [{"train/loss": 1.5}, 3], [{"train/loss": 0.5}, 1]])
                others = [call for call in self.told() if call[0] != "send"]
                self.assertEqual(others, [["begin", "digits", {"lr": "0.1"}], ["end"],
                                          ["begin", "digits", {"lr": "0.2"}], ["end"]])

    def test_a_file_that_is_complete(self):
        self.write(run(1, "0.1"), step(1), {"event": "final", "steps": 1})
        self.assertEqual(self.start("wandb", "m.jsonl").wait(60), 0)
        self.assertEqual([call[0] for call in self.told()], ["begin", "send", "end"])
        self.assertEqual(self.told()[0][1], "lockstep")
        done = subprocess.run([places.source / "examples/follow_metrics.py", "other", "m.jsonl"], capture_output=True)
        self.assertEqual(done.returncode, 1)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *others])
