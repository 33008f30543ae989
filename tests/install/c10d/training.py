"""Losses of PyTorch's own DistributedDataParallel and fully_shard over lockstep, and over Gloo in the same processes."""
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lockstep_c10d  # noqa: F401: registers the backend

STEPS = 12


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
    return images, labels


def train(wrap):
    """Every rank's losses."""
    torch.manual_seed(dist.get_rank())  # wrapping makes the ranks alike
    module = wrap(Net())
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


def train_over(backend, store, rank, world_size):
    dist.init_process_group(backend, store=dist.PrefixStore(backend, store), rank=rank, world_size=world_size)
    losses = {wrap.__name__: train(wrap) for wrap in (ddp, sharded)}
    dist.destroy_process_group()
    return losses


def main():
    torch.set_num_threads(1)
    meeting = next(dist.rendezvous("env://"))
    _, rank, world_size = meeting
    ours, gloo = train_over("lockstep", *meeting), train_over("gloo", *meeting)
    for name in ours:
        difference = max(abs(one - other) for one, other in zip(ours[name], gloo[name], strict=True))
        print(f"{name} on {world_size} ranks: rank {rank}'s losses differ from Gloo's by at most {difference:.1e}, "
              f"the last is {ours[name][-1]:.4f}", flush=True)
        most = 0 if world_size <= 2 else 1e-5
        assert difference <= most and ours[name][-1] < ours[name][0], (name, ours[name], gloo[name])


main()
