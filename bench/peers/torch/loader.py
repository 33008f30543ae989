#!/usr/bin/env python3
"""loader.py: rows per second of PyTorch's DataLoader over a table in memory, as bench/micro_loader.cpp has it: a dataset of
(numbers, codes, target) for each row, shuffled, batched by the default collate function; and, faster, a TensorDataset whose
batches are taken at once by a BatchSampler."""
import time

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

ROWS, NUMBERS, SECONDS = 90_000, 16, 2.0


def rate(loader, rows_of):
    """The best of three: what a busy machine slows down is left out."""
    best = 0.0
    for _ in range(3):
        begin, rows = time.perf_counter(), 0
        while time.perf_counter() - begin < SECONDS / 3:
            for batch in loader:
                rows += rows_of(batch)
                if time.perf_counter() - begin > SECONDS / 3:
                    break
        best = max(best, rows / (time.perf_counter() - begin))
    return best


def main():
    torch.set_num_threads(1)
    numbers = torch.rand(ROWS, NUMBERS)
    codes = torch.randint(100, (ROWS, 2))
    target = torch.rand(ROWS)
    rows = TensorDataset(numbers, codes, target)
    for batch in (32, 256, 4096):
        plain = DataLoader(rows, batch_size=batch, shuffle=True)
        at_once = DataLoader(rows, sampler=BatchSampler(RandomSampler(rows), batch, False), batch_size=None)
        print(f"batch {batch}: {rate(plain, lambda b: len(b[0])):,.0f} rows/s; indexed by whole batches "
              f"{rate(at_once, lambda b: len(b[0])):,.0f} rows/s", flush=True)


main()
