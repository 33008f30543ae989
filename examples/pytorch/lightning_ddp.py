"""python examples/pytorch/lightning_ddp.py: a Trainer of Lightning's, which starts the other process itself."""
import pytorch_lightning as lightning
import torch
from digits import Digits, net
from pytorch_lightning.strategies import DDPStrategy
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net()

    def training_step(self, batch):
        loss = cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="lockstep"),
                            max_epochs=3, logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer.fit(Classifier(), DataLoader(Digits(), batch_size=32))
if trainer.is_global_zero:
    print(f"over {torch.distributed.get_backend()}: loss {trainer.callback_metrics['loss'].item():.6f}")
