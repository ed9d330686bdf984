"""Fine-tune a classifier of small pictures: a network trained on one task keeps its layers and gets a new last one.

    python examples/fine_tune.py --epochs 3

The pictures are drawn here, so that nothing has to be fetched: horizontal and vertical bars first, then discs, rings
and crosses. Batches come from a ``DataLoader``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

SIZE = 16
FEATURES = 32 * (SIZE // 4) ** 2  # that the last layer is given


def shapes(count: int, kinds: tuple[str, ...]) -> TensorDataset:
    """Noisy pictures of shapes at random places, and which shape each is."""
    line = torch.arange(SIZE)
    middle = torch.randint(5, SIZE - 5, (count, 2, 1, 1))
    down, right = line.view(1, -1, 1) - middle[:, 0], line.view(1, 1, -1) - middle[:, 1]
    radius = torch.sqrt((down**2 + right**2).float())
    near = (down.abs() <= 4) & (right.abs() <= 4)
    drawn = {
        "horizontal": (down.abs() <= 1) & near,
        "vertical": (right.abs() <= 1) & near,
        "disc": radius <= 4,
        "ring": (radius - 4).abs() <= 1,
        "cross": ((down.abs() <= 1) | (right.abs() <= 1)) & near,
    }
    labels = torch.randint(len(kinds), (count,))
    clean = torch.stack([drawn[kind] for kind in kinds])[labels, torch.arange(count)].float()
    return TensorDataset((clean + 0.4 * torch.randn_like(clean)).unsqueeze(1), labels)


def network(classes: int) -> nn.Sequential:
    """Convolutions, and a linear layer at the end."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(FEATURES, classes),
    )  # fmt: skip


def train(model: nn.Module, parameters: Iterable[nn.Parameter], data: TensorDataset, epochs: int, name: str) -> None:
    """Optimise ``parameters``; print the mean loss of each epoch."""
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    model.train()
    for epoch in range(1, epochs + 1):
        losses: list[Tensor] = []
        for pictures, labels in DataLoader(data, batch_size=64, shuffle=True):
            loss = F.cross_entropy(model(pictures), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        print(f"{name}: epoch {epoch}/{epochs}  loss {torch.stack(losses).mean().item():.6f}", flush=True)


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """The share of pictures that are taken for what they are."""
    model.eval()
    right = [
        (model(pictures).argmax(1) == labels).float().mean() for pictures, labels in DataLoader(data, batch_size=64)
    ]
    return torch.stack(right).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a classifier of small pictures.")
    parser.add_argument("--epochs", type=int, default=3, help="of each of the two trainings")
    parser.add_argument("--pictures", type=int, default=2048)
    options = parser.parse_args()

    torch.manual_seed(1)
    model = network(2)
    train(model, model.parameters(), shapes(options.pictures, ("horizontal", "vertical")), options.epochs, "bars")

    for parameter in model.parameters():
        parameter.requires_grad_(False)
    kinds = ("disc", "ring", "cross")
    model[-1] = nn.Linear(FEATURES, len(kinds))
    train(model, model[-1].parameters(), shapes(options.pictures // 4, kinds), options.epochs, "shapes")
    print(f"{accuracy(model, shapes(256, kinds)):.1%} of new pictures are recognised")


if __name__ == "__main__":
    main()
