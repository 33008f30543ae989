"""torchrun --nproc-per-node 2 examples/pytorch/transformers_trainer.py DIR: the Trainer of Hugging Face's transformers. Its
ddp_backend has a list of names, without this one, but it keeps the group that is there."""
import sys

import torch
from digits import Digits, net
from transformers import Trainer, TrainingArguments

torch.distributed.init_process_group("lockstep")


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, images, labels):
        logits = self.net(images)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


data = [{"images": images, "labels": label} for images, label in Digits()]
arguments = TrainingArguments(sys.argv[1], use_cpu=True, num_train_epochs=3, learning_rate=0.01, disable_tqdm=True,
                              per_device_train_batch_size=32, report_to=[], save_strategy="no")
result = Trainer(model=Classifier(), args=arguments, train_dataset=data).train()
if torch.distributed.get_rank() == 0:
    print(f"over {torch.distributed.get_backend()}: loss {result.training_loss:.6f}")
torch.distributed.destroy_process_group()
