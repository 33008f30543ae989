"""torchrun --nproc-per-node 2 examples/pytorch/fsdp2.py DIR: fully_shard over a DeviceMesh, and its checkpoint in DIR."""
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from digits import Digits, net
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

dist.init_process_group("lockstep")
mesh = DeviceMesh("cpu", range(dist.get_world_size()))
model = net()
for layer in (model[1], model[3], model):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
images, labels = (part[dist.get_rank()::dist.get_world_size()] for part in (Digits().images, Digits().labels))
for step in range(20):
    optimizer.zero_grad()
    loss = cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
checkpoint.save(get_model_state_dict(model), checkpoint_id=sys.argv[1])
if dist.get_rank() == 0:
    print(f"step {step + 1}: loss {loss.item():.6f}, saved in {sys.argv[1]}")
dist.destroy_process_group()
