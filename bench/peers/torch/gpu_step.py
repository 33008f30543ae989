#!/usr/bin/env python3
"""Training steps of PyTorch on one GPU in bf16 (autocast) with fused AdamW, for scripts/gpu-check.

  gpu_step.py --model mlp --batch 64 --configuration compile+graph     # measures once and prints one JSON object
  gpu_step.py --model mlp                                              # reads commands from stdin, one JSON object per line

Commands: {"do": "build", "batch": B, "configuration": C}, then {"do": "step", …, "blocks": N, "block_s": S}. Each is
answered with one line; what cannot be built is "refused", with the reason. A step is forward, backward and update on
one batch that stays on the GPU, as `lockstep bench step` takes it. Times are of blocks of steps, from an idle GPU to an
idle GPU, in ms a step.

Configurations: eager; compile, reduce-overhead, max-autotune (modes of torch.compile); with "+graph" the whole step,
update and all, is captured in one CUDA graph. Convolutions run in channels_last. What is not built --build-seconds after
the start of the process is refused.
"""
import argparse
import json
import os
import signal
import sys
import time

IMAGE_MODELS = ("cnn", "resnet18-cifar", "resnet18", "resnet50", "vgg11", "mobilenet-v2")
MODES = {"eager": None, "compile": "default", "reduce-overhead": "reduce-overhead",
         "max-autotune": "max-autotune"}


class Step:
    """One model in one configuration."""

    def __init__(self, torch, model: str, batch: int, configuration: str):
        from models import MODELS, loss_of

        mode, _, graph = configuration.partition("+")
        if mode not in MODES or graph not in ("", "graph"):
            raise ValueError(f"unknown configuration '{configuration}'")
        self.torch = torch
        torch.manual_seed(1)
        spec = MODELS[model]
        module = spec.make().cuda()
        inputs, labels = (tensor.cuda() for tensor in spec.batch(batch))
        if model in IMAGE_MODELS:
            module = module.to(memory_format=torch.channels_last)
            inputs = inputs.to(memory_format=torch.channels_last)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.01, fused=True,
                                      capturable=bool(graph))

        def forward():
            with torch.autocast("cuda", dtype=torch.bfloat16):
                return loss_of(module(inputs), labels)

        if MODES[mode] is not None:
            forward = torch.compile(forward, mode=MODES[mode])

        # A graph has addresses and owns nothing: what it reads and writes is kept here as long as it may be replayed.
        self._kept = (module, optimizer, inputs, labels, forward)

        def step():
            optimizer.zero_grad(set_to_none=True)
            loss = forward()
            loss.backward()
            optimizer.step()
            return loss

        self.loss = None
        self.run = step
        if graph:
            self._capture(step)
        for _ in range(5):
            self.once()
        torch.cuda.synchronize()

    def _capture(self, step) -> None:
        torch = self.torch
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(5):
                step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.loss = step()
        self.run = graph.replay

    def once(self) -> None:
        result = self.run()
        if result is not None:
            self.loss = result

    def block_ms(self, steps: int) -> float:
        self.torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            self.once()
        self.torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - begin) / steps

    def measure(self, blocks: int, block_s: float) -> dict:
        about = self.block_ms(10)
        steps = max(10, min(2000, int(1e3 * block_s / about)))
        self.block_ms(max(1, steps // 4))
        times = [self.block_ms(steps) for _ in range(blocks)]
        loss = float(self.loss)
        if not loss < float("inf"):
            raise RuntimeError(f"the loss became {loss} while it was measured")
        return {"step_ms": times, "steps_a_block": steps, "loss": loss}


class Late(Exception):
    pass


_LATE = "it was not compiled in time"


class Limit:
    """What runs in it is ended with Late at `end`, by time.monotonic(): compilers take what time they like. Again and
    again, since what runs when a signal comes may swallow an exception."""

    def __init__(self, end: float):
        self.end = end

    def __enter__(self):
        def late(*_):
            raise Late(_LATE)

        if time.monotonic() >= self.end:
            late()
        signal.signal(signal.SIGALRM, late)
        if self.end < float("inf"):
            signal.setitimer(signal.ITIMER_REAL, self.end - time.monotonic(), 1)

    def __exit__(self, *_):
        signal.setitimer(signal.ITIMER_REAL, 0)


class Worker:
    def __init__(self, torch, model: str, build_end: float = float("inf")):
        self.torch, self.model, self.build_end, self.steps = torch, model, build_end, {}

    def build(self, batch: int, configuration: str) -> dict:
        begin = time.monotonic()
        said = {"version": f"{self.torch.__version__}, {self.torch.cuda.get_device_name()}"}
        try:
            with Limit(self.build_end):
                self.steps[batch, configuration] = Step(self.torch, self.model, batch, configuration)
        except Exception as error:  # of the compiler or of a capture: the other configurations continue
            self.torch.cuda.synchronize()
            if time.monotonic() >= self.build_end and not isinstance(error, Late):  # which the compiler has wrapped
                error = Late(_LATE)
            lines = str(error).strip().splitlines()
            said["refused"] = f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
        self.torch.cuda.empty_cache()  # what no graph needs is for others: several processes share the GPU
        return said | {"build_s": time.monotonic() - begin}

    def step(self, batch: int, configuration: str, blocks: int, block_s: float) -> dict:
        said = self.steps[batch, configuration].measure(blocks, block_s)
        self.torch.cuda.empty_cache()
        return said


def main() -> None:
    begin = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--configuration")
    parser.add_argument("--build-seconds", type=float, default=float("inf"))
    options = parser.parse_args()
    # Libraries print where they like: the answers' channel is ours alone.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(values: dict) -> None:
        answers.write(json.dumps(values) + "\n")

    try:
        import torch

        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
        worker = Worker(torch, options.model, begin + options.build_seconds)
        if options.configuration:
            built = worker.build(options.batch, options.configuration)
            if "refused" in built:
                raise RuntimeError(built["refused"])
            answer(built | worker.step(options.batch, options.configuration, 10, 0.1))
        else:
            for line in sys.stdin:
                command = json.loads(line)
                answer({"build": worker.build, "step": worker.step}[command.pop("do")](**command))
    except (Exception, KeyboardInterrupt) as error:  # one line for the caller, whatever it was
        answer({"error": (f"{type(error).__name__}: {error}".splitlines() or [""])[0]})
        answers.flush()
        os._exit(1)
    answers.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
