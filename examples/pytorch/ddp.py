"""torchrun --nproc-per-node 2 examples/pytorch/ddp.py [BACKEND]: DistributedDataParallel."""
import sys

import torch
import torch.distributed as dist
from digits import Digits, net
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else "lockstep")
model = DistributedDataParallel(net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(Digits(), batch_size=32, sampler=DistributedSampler(Digits()))
for epoch in range(3):
    loader.sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        print(f"epoch {epoch + 1}: loss {mean.item():.6f}")
dist.destroy_process_group()
