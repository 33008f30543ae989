"""Golden files: what is left of the tensors that PyTorch computed. golden.h reads them.

Each is a safetensors file with one row a tensor, in f64 and f32:

    names     u8        the rows' names, each followed by a line feed
    summary   (R, 8)    elements, largest magnitude, L2 norm, four projections on signs ("NAME/sign/P"), 0
    samples   (R, 64)   elements, all of a tensor that has no more, else those at below("NAME/place", 64, elements)

Beside them stand whatever else `extra` names. A name that begins with the file's own is left without it.
"""
import pathlib
import platform

import numpy as np
import safetensors
import safetensors.numpy
import torch

import counter

HERE = pathlib.Path(__file__).parent / "golden"
SAMPLES = 64
PROJECTIONS = 4
SMALLEST = 1e-5  # what is smaller as a whole is as good as rounding, and compares nothing


class Golden:
    def __init__(self, name: str):
        self.name = name
        self.rows: dict = {}
        self.extra: dict = {}

    def add(self, name: str, tensor) -> None:
        values = tensor.detach().double().numpy().ravel()
        largest = np.abs(values).max()
        assert name not in self.rows and largest > SMALLEST, f"{self.name}: {name} is at most {largest}"
        summary = [values.size, largest, np.linalg.norm(values)]
        for p in range(PROJECTIONS):
            summary.append(float(np.dot(values, counter.signs(f"{name}/sign/{p}", values.size))))
        if values.size > SAMPLES:
            values = values[counter.below(f"{name}/place", (SAMPLES,), values.size)]
        samples = np.zeros(SAMPLES, np.float32)
        samples[: values.size] = values
        self.rows[name] = (summary + [0.0], samples)

    def save(self) -> None:
        names = "".join(name + "\n" for name in self.rows).encode()
        tensors = {"names": np.frombuffer(names, np.uint8), "summary": np.array([row[0] for row in self.rows.values()]),
                   "samples": np.stack([row[1] for row in self.rows.values()]), **self.extra}
        save(self.name, tensors)
        print(f"{self.name}: {len(self.rows)} tensors")


def save(name: str, tensors: dict) -> None:
    metadata = {"made by": f"torch {torch.__version__}, safetensors {safetensors.__version__}, {platform.machine()}"}
    HERE.mkdir(exist_ok=True)
    path = HERE / f"{name}.safetensors"
    safetensors.numpy.save_file({key: np.ascontiguousarray(value) for key, value in tensors.items()}, path, metadata)
    path.chmod(0o644)
