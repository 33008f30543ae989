"""One rank of a training that others disturb, for bench/failures: under torchrun, with checkpoints, or with TorchFT.

failing.py MODEL BATCH elastic|torchft FILE CHECKPOINT_STEPS: appends "seconds steps" to FILE-RANK after each step: the time
by time.time(), and how many steps of all ranks' samples there have been.
"""
import datetime
import os
import sys
import time

import torch
import torch.distributed as dist
from models import MODELS, loss_of
from torch.nn.parallel import DistributedDataParallel


class Elastic:
    """torchrun starts all ranks again when one fails; the state is in a file by then."""

    def __init__(self, module, file: str, every: int):
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
        self.rank, self.path, self.every, self.count = dist.get_rank(), file + ".checkpoint", every, 0
        self.module, self.optimizer = DistributedDataParallel(module), torch.optim.AdamW(module.parameters())
        if os.path.exists(self.path):
            state = torch.load(self.path)
            module.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.count = state["count"]

    def end_step(self) -> float:
        self.count += 1
        if self.rank == 0 and self.count % self.every == 0:
            torch.save({"model": self.module.module.state_dict(), "optimizer": self.optimizer.state_dict(),
                        "count": self.count}, self.path + ".new")
            os.replace(self.path + ".new", self.path)
        return self.count


class TorchFt:
    """The ranks that are left continue with fewer samples, and send their state to one that comes back."""

    def __init__(self, module):
        import torchft
        self.rank, self.ranks = int(os.environ["PEER_RANK"]), int(os.environ["PEER_RANKS"])
        inner = torch.optim.AdamW(module.parameters())

        def state():
            return {"model": module.state_dict(), "optimizer": inner.state_dict()}

        def load(found):
            module.load_state_dict(found["model"])
            inner.load_state_dict(found["optimizer"])

        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=datetime.timedelta(seconds=5)), min_replica_size=1, state_dict=state,
            load_state_dict=load, replica_id=f"rank{self.rank}", rank=0, world_size=1, store_addr="127.0.0.1",
            store_port=self.store.port, timeout=datetime.timedelta(seconds=10))
        self.module = torchft.DistributedDataParallel(self.manager, module)
        self.optimizer = torchft.Optimizer(self.manager, inner)

    def end_step(self) -> float:
        return self.manager.batches_committed() / self.ranks


def main() -> None:
    model, batch, kind, file, every = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5])
    torch.set_num_threads(1)
    torch.manual_seed(1)
    module = MODELS[model].make()
    inputs, labels = MODELS[model].batch(batch)
    training = Elastic(module, file, every) if kind == "elastic" else TorchFt(module)
    with open(f"{file}-{training.rank}", "a", buffering=1) as log:
        while True:
            training.optimizer.zero_grad()
            loss_of(training.module(inputs), labels).backward()
            training.optimizer.step()
            log.write(f"{time.time()} {training.end_step()}\n")


if __name__ == "__main__":
    main()
