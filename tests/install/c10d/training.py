"""training.py BACKEND [cuda [ddp]]: losses of PyTorch's own DistributedDataParallel and fully_shard over it, as JSON."""
import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

STEPS = 12
DEVICE = torch.device(sys.argv[2] if len(sys.argv) > 2 else "cpu")


class Net(nn.Module):
    """Convolutions, a normalisation with buffers, parameters of odd sizes, and 1.3 million in one layer."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 7, 3, padding=1)
        self.norm = nn.BatchNorm2d(7)
        self.fc1 = nn.Linear(7 * 14 * 14, 953)
        self.fc2 = nn.Linear(953, 10)

    def forward(self, x):
        x = nn.functional.max_pool2d(torch.relu(self.norm(self.conv(x))), 2)
        return self.fc2(torch.relu(self.fc1(x.flatten(1))))


def batch(step):
    """Noise with a bright row, whose place is the label."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    images, labels = torch.rand(8, 1, 28, 28, generator=generator), torch.randint(10, (8,), generator=generator)
    images[torch.arange(8), 0, 2 * labels] += 3
    return images.to(DEVICE), labels.to(DEVICE)


def train(wrap):
    """Every rank's losses."""
    torch.manual_seed(dist.get_rank())  # wrapping makes the ranks alike
    module = wrap(Net().to(DEVICE))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.02, momentum=0.9)
    losses = []
    for step in range(STEPS):
        images, labels = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def ddp(net):
    # Several buckets, the first of them small.
    return DistributedDataParallel(net, bucket_cap_mb=1)


def sharded(net):
    for parameter in [*net.parameters(), *net.buffers()]:
        dist.broadcast(parameter.detach(), src=0)
    fully_shard(net.fc1)
    return fully_shard(net)


def main():
    backend = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    if DEVICE.type == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    losses = {wrap.__name__: train(wrap) for wrap in (ddp, sharded) if wrap.__name__ in (sys.argv[3:] or wrap.__name__)}
    dist.destroy_process_group()
    print(json.dumps(losses), flush=True)
    # Gloo's threads may still hold work of Python's, and abort the process that they ask for its lock while it ends
    # (ProcessGroupGloo::runLoop()).
    if backend == "gloo":
        os._exit(0)


main()
