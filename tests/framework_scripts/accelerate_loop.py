"""Accelerate: a prepared model, optimizer, schedule and loader; accumulation, clipping, saved and loaded state."""

import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(gradient_accumulation_steps=2)
assert accelerator.device.type == sys.argv[-1], accelerator.device
set_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
data = DataLoader(TensorDataset(torch.randn(32, 4), torch.randn(32, 1)), batch_size=8, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), 0.05)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)


def train(epoch):
    for x, y in data:
        with accelerator.accumulate(model):
            loss = F.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        print(f"{epoch}: {accelerator.gather(loss.detach()).mean().item():.6f}")


for epoch in range(3):
    if epoch == 2:
        accelerator.save_state("state")
    train(epoch)
accelerator.load_state("state")
train(2)  # in the same order
print(f"{sum(p.sum().item() for p in accelerator.unwrap_model(model).parameters()):.6f}")
