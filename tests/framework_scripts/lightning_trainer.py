"""Lightning: checkpoints saved and resumed, accumulation, clipping, bfloat16; and Fabric."""

import sys

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

ACCELERATOR, DEVICE = sys.argv[1:]
if ACCELERATOR == "marid":
    import marid.lightning  # noqa: F401


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        self.losses = []

    def training_step(self, batch, _index):
        loss = F.mse_loss(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch, _index):
        self.log("val", F.mse_loss(self.layers(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.05)


def model_and_data():
    torch.manual_seed(0)
    generator = torch.Generator("cpu").manual_seed(0)
    x, y = (torch.randn(32, n, generator=generator, device="cpu") for n in (4, 1))
    with torch.device("cpu"):
        return Model(), DataLoader(TensorDataset(x, y), batch_size=8)


def train(resume=None, **options):
    model, data = model_and_data()
    saved = ModelCheckpoint("saved", filename="{epoch}")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(accelerator=ACCELERATOR, devices=1, callbacks=[saved], **quiet, **options)
    trainer.fit(model, data, data, ckpt_path=resume)
    assert trainer.strategy.root_device.type == model.losses[0].device.type == DEVICE
    print([f"{loss.item():.6f}" for loss in model.losses], f"{trainer.callback_metrics['val'].item():.6f}")
    return saved.best_model_path


train(max_epochs=3, resume=train(max_epochs=2))
train(max_epochs=1, accumulate_grad_batches=2, gradient_clip_val=0.5)
train(max_epochs=1, precision="bf16-mixed")

fabric = L.Fabric(accelerator=ACCELERATOR, devices=1, precision="bf16-mixed")
model, data = model_and_data()
layers, optimizer = fabric.setup(model.layers, torch.optim.SGD(model.layers.parameters(), 0.1))
for x, y in fabric.setup_dataloaders(data):
    optimizer.zero_grad()
    loss = F.mse_loss(layers(x), y)
    assert loss.device.type == DEVICE
    fabric.backward(loss)
    optimizer.step()
    print(f"{loss.item():.6f}")
