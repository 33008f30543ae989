"""bench/peers/torch/gpu_step.py, PyTorch's step in a CUDA graph, with a PyTorch that computes nothing.

  gpu_step_test.py [unittest's arguments]
"""
import gc
import pathlib
import sys
import time
import types
import unittest
import unittest.mock
import weakref

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench/peers/torch"))

import gpu_step  # noqa: E402


class FakeTorch:
    """As much of PyTorch as gpu_step.py asks for, without a GPU. A captured graph owns nothing, as CUDA's."""

    class Thing:
        def __init__(self, *arguments, **more):
            pass

        def cuda(self, **more):
            return self

        to = parameters = cuda

        def __call__(self, *arguments):
            return FakeTorch.Thing()

        def backward(self):
            pass

        zero_grad = step = wait_stream = lambda self, *arguments, **more: None

        def __enter__(self):
            return self

        def __exit__(self, *what):
            return False

        def __float__(self):
            return 1.0

    class Graph(Thing):
        def replay(self):
            return None

    def __init__(self):
        thing, made = FakeTorch.Thing, []
        self.made = made

        def making(*arguments, **more):
            made.append(weakref.ref(it := thing()))
            return it

        self.manual_seed = lambda seed: None
        self.compile = lambda forward, mode: forward
        self.autocast = lambda *arguments, **more: thing()
        self.channels_last, self.bfloat16 = "channels_last", "bfloat16"
        self.cuda = types.SimpleNamespace(Stream=thing, current_stream=thing, stream=thing, synchronize=lambda: None,
                                          empty_cache=lambda: None, CUDAGraph=FakeTorch.Graph, graph=thing)
        self.optim = types.SimpleNamespace(AdamW=making)
        self.models = types.SimpleNamespace(
            MODELS={"mlp": types.SimpleNamespace(make=making, batch=lambda samples: (making(), making()))},
            loss_of=lambda logits, labels: thing())


class GraphedStep(unittest.TestCase):
    def test_keeps_what_its_graph_reads(self):
        for configuration in ("eager+graph", "compile+graph"):
            torch = FakeTorch()
            with unittest.mock.patch.dict(sys.modules, models=torch.models):
                step = gpu_step.Step(torch, "mlp", 4, configuration)
            gc.collect()
            self.assertEqual(len(torch.made), 4, "module, inputs, labels, optimizer")
            self.assertTrue(all(made() is not None for made in torch.made), configuration)
            self.assertGreater(len(step.measure(2, 1e-4)["step_ms"]), 1)
            del step
            gc.collect()
            self.assertTrue(all(made() is None for made in torch.made), "and lets go of it")

    def test_what_is_not_compiled_in_time_is_refused_and_the_others_stay(self):
        torch = FakeTorch()
        torch.__version__ = "2"
        torch.cuda.get_device_name = lambda: "GPU"

        def compile_for_ever(forward, mode):
            while True:
                try:
                    time.sleep(60)
                except gpu_step.Late:
                    if not hasattr(torch, "swallowed"):
                        torch.swallowed = True
                        continue
                    raise RuntimeError("backend='inductor' raised:") from None

        torch.compile = compile_for_ever
        with unittest.mock.patch.dict(sys.modules, models=torch.models):
            worker = gpu_step.Worker(torch, "mlp", time.monotonic() + 0.5)
            self.assertNotIn("refused", worker.build(4, "eager+graph"))
            begin = time.monotonic()
            self.assertIn("not compiled in time", worker.build(4, "compile")["refused"])
            self.assertLess(time.monotonic() - begin, 10)
            self.assertIn("not compiled in time", worker.build(4, "eager")["refused"], "its time is up")
            self.assertIn("step_ms", worker.step(4, "eager+graph", 2, 1e-4))


if __name__ == "__main__":
    unittest.main()
