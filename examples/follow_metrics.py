#!/usr/bin/env python3
"""Sends a metrics file to Weights & Biases or MLflow, while lockstep writes it or afterwards, until the run's end.

    lockstep train cnn --data digits --metrics m.jsonl &
    follow_metrics.py wandb|mlflow m.jsonl [PROJECT]

Where a run resumes, lockstep cuts the lines of steps that are done again, with the same numbers: they are not sent twice.
"""
import json
import sys
import time


def events_in(path, pause=1.0):
    """Each line as it comes, and whether it is the first one; all of them again where the file was cut."""
    offset, last = 0, b""
    while True:
        try:
            with open(path, "rb") as file:
                file.seek(offset - len(last))
                if file.read(len(last)) != last:
                    offset, last = 0, b""
                file.seek(offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    first, last, offset = offset == 0, line, offset + len(line)
                    yield first, json.loads(line)
        except FileNotFoundError:
            pass
        time.sleep(pause)


class Wandb:
    def begin(self, project, settings):
        import wandb
        self.run = wandb.init(project=project, config=settings)

    def send(self, numbers, step):
        self.run.log(numbers, step=step)

    def end(self):
        self.run.finish()


class Mlflow:
    def begin(self, project, settings):
        import mlflow
        self.mlflow = mlflow
        mlflow.set_experiment(project)
        mlflow.start_run()
        mlflow.log_params(settings)

    def send(self, numbers, step):
        self.mlflow.log_metrics(numbers, step=step)

    def end(self):
        self.mlflow.end_run()


def follow(tracker, path, project):
    begun, sent = None, {}
    for first, event in events_in(path):
        kind, step = event["event"], event.get("step")
        if first and event != begun:  # another run in the same file
            if begun:
                tracker.end()
            begun, sent = event, {}
            tracker.begin(project, {name: setting["value"] for name, setting in event["settings"].items()})
        elif kind in ("step", "eval") and step > sent.get((kind, event.get("ema")), 0):
            sent[kind, event.get("ema")] = step
            group = "train" if kind == "step" else "validation_ema" if event.get("ema") else "validation"
            tracker.send({f"{group}/{name}": value for name, value in event.items()
                          if type(value) in (int, float) and name not in ("step", "unix_s")}, step)
        elif kind == "final":
            break
    tracker.end()


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4) or sys.argv[1] not in ("wandb", "mlflow"):
        sys.exit(__doc__)
    follow(Wandb() if sys.argv[1] == "wandb" else Mlflow(), sys.argv[2], (sys.argv + ["lockstep"])[3])
