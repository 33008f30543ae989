#!/usr/bin/env python3
"""loader.py [--images]: samples per second of PyTorch's DataLoader, as bench/micro_loader.cpp has them.

Rows of a table in memory: a dataset of (numbers, codes, target) for each row, shuffled, batched by the default collate
function; and, faster, a TensorDataset whose batches are taken at once by a BatchSampler.

With --images JPEGs of 500 x 375, as ImageNet's are on average, by torchvision's ImageFolder and its usual transforms of
training; needs torchvision. lockstep's loader reads the same folder: `build/micro --benchmark_filter=LoadImages` runs in
turn with it.
"""
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

ROWS, NUMBERS, SECONDS = 90_000, 16, 2.0
MICRO = pathlib.Path(__file__).parents[3] / "build" / "micro"


def rate(loader, rows_of, seconds=SECONDS):
    """The best of three: what a busy machine slows down is left out."""
    best = 0.0
    for _ in range(3):
        begin, rows = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds / 3:
            for batch in loader:
                rows += rows_of(batch)
                if time.perf_counter() - begin > seconds / 3:
                    break
        best = max(best, rows / (time.perf_counter() - begin))
    return best


def rows():
    numbers = torch.rand(ROWS, NUMBERS)
    codes = torch.randint(100, (ROWS, 2))
    target = torch.rand(ROWS)
    table = TensorDataset(numbers, codes, target)
    for batch in (32, 256, 4096):
        plain = DataLoader(table, batch_size=batch, shuffle=True)
        at_once = DataLoader(table, sampler=BatchSampler(RandomSampler(table), batch, False), batch_size=None)
        print(f"batch {batch}: {rate(plain, lambda b: len(b[0])):,.0f} rows/s; indexed by whole batches "
              f"{rate(at_once, lambda b: len(b[0])):,.0f} rows/s", flush=True)


def draw(folder):
    """Waves and some noise: about as many bytes as a photograph of this size."""
    from PIL import Image

    y, x, c = np.mgrid[0:375, 0:500, 0:3]
    random = np.random.default_rng(1)
    for i in range(128):
        place = folder / ("val" if i % 16 == 0 else "train") / f"class{i % 2}"
        place.mkdir(parents=True, exist_ok=True)
        wave = 60 * np.sin(x / (17.0 + i % 7) + c) + 40 * np.sin(y / 11.0 - x / 29.0)
        pixels = np.clip(128 + wave + random.integers(-16, 17, wave.shape), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(place / f"{i}.jpg", quality=90)


def images():
    import torchvision
    from torchvision import transforms as T

    usual = T.Compose([T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.ToTensor(),
                       T.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])])
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        draw(folder)
        train = torchvision.datasets.ImageFolder(folder / "train", usual)
        for workers in (0, 1):
            for turn in range(2):
                loader = DataLoader(train, batch_size=32, shuffle=True, num_workers=workers,
                                    persistent_workers=workers > 0)
                print(f"workers {workers}, turn {turn + 1}: DataLoader "
                      f"{rate(loader, lambda b: len(b[0]), 9):,.0f} images/s", flush=True)
                ours = subprocess.run([MICRO, f"--benchmark_filter=LoadImages/workers:{workers}",
                                       "--benchmark_min_time=3"], text=True, capture_output=True, check=True,
                                      env=os.environ | {"MICRO_IMAGES": name, "OMP_NUM_THREADS": "1"})
                print("  lockstep", ours.stdout.splitlines()[-1].split("items_per_second=")[-1].strip(), flush=True)


def main():
    torch.set_num_threads(1)
    images() if "--images" in sys.argv[1:] else rows()


main()
