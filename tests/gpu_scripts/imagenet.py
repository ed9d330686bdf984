"""A residual network with meters, top-k accuracy and a resumed checkpoint, which asks for the GPU by its number."""

import os
import shutil
import time

import torch
from torch import nn
from torch.backends import cudnn


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(channels)

    def forward(self, x):
        return torch.relu(x + self.bn(self.conv(x)))


class Meter:
    def __init__(self):
        self.sum = self.count = 0

    def update(self, value, n):
        self.sum, self.count = self.sum + value * n, self.count + n


def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
        return [correct[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / target.size(0)) for k in topk]


def main():
    torch.manual_seed(0)
    gpu = 0 if torch.cuda.is_available() else None
    cudnn.deterministic = True
    cudnn.benchmark = False
    ngpus = torch.cuda.device_count() if gpu is not None else 1
    assert ngpus == 1
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), Block(8), Block(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 7)
    )
    if gpu is not None:
        torch.cuda.set_device(gpu)
        model = model.cuda(gpu)
        device = torch.device(f"cuda:{gpu}")
    else:
        device = torch.device("cpu")
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
    images, targets = torch.rand(24, 3, 12, 12), torch.randint(7, (24,))
    best = 0
    for epoch in range(2):
        losses, top1, end = Meter(), Meter(), time.time()
        for part, target in zip(images.split(8), targets.split(8), strict=True):
            part, target = part.to(device, non_blocking=True), target.to(device, non_blocking=True)
            output = model(part)
            loss = criterion(output, target)
            acc1, _acc5 = accuracy(output, target, topk=(1, 5))
            losses.update(loss.item(), part.size(0))
            top1.update(acc1[0].item(), part.size(0))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert time.time() >= end
        scheduler.step()
        print(f"Epoch {epoch} Loss {losses.sum / losses.count:.5f} Acc@1 {top1.sum / top1.count:.2f}")
        best = max(best, top1.sum / top1.count)
        state = {
            "epoch": epoch,
            "state_dict": model.state_dict(),
            "best": torch.tensor(best),
            "opt": optimizer.state_dict(),
        }
        torch.save(state, "checkpoint.pth.tar")
        shutil.copyfile("checkpoint.pth.tar", "model_best.pth.tar")
    loc = f"cuda:{gpu}" if gpu is not None else "cpu"
    checkpoint = torch.load("model_best.pth.tar", map_location=loc)
    best = checkpoint["best"].to(gpu) if gpu is not None else checkpoint["best"]
    model.load_state_dict(checkpoint["state_dict"])
    optimizer.load_state_dict(checkpoint["opt"])
    model.eval()
    with torch.no_grad():
        print(best.item(), round(model(images.to(device)).sum().item(), 4), os.path.exists("model_best.pth.tar"))


if __name__ == "__main__":
    main()
