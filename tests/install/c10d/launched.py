"""Whether ranks find each other under a launcher."""
import torch
import torch.distributed as dist

dist.init_process_group("lockstep")
ones = torch.ones(1000)
dist.all_reduce(ones)
assert torch.equal(ones, torch.full((1000,), float(dist.get_world_size()))), ones
if dist.get_rank() == 0:
    print(f"{dist.get_world_size()} ranks have summed")
dist.destroy_process_group()
