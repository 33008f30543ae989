"""torchrun --nproc-per-node 2 examples/pytorch/accelerate_loop.py: a loop of Hugging Face's accelerate, which on CPUs would take
Gloo, but keeps the group that is there."""
import torch
from accelerate import Accelerator
from digits import Digits, net
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

torch.distributed.init_process_group("lockstep")
accelerator = Accelerator(cpu=True)
model = net()
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1),
                                               DataLoader(Digits(), batch_size=32, shuffle=True))
for epoch in range(3):
    for images, labels in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
    mean = accelerator.gather(loss.detach()[None]).mean()
    accelerator.print(f"epoch {epoch + 1}: loss {mean.item():.6f} over {torch.distributed.get_backend()}")
accelerator.end_training()
