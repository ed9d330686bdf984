"""Data-parallel training over several workers from one script: each has a replica, and a part of each batch.

    python examples/data_parallel.py --workers 2

starts workers on this machine; ``--connect tcp://gpu0:7070 tcp://gpu1:7070 --key me.json`` takes those of others. The
gradients are averaged by the workers among themselves; only the losses come here.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

import marid


class DataParallel:
    """Replicas of ``model`` on ``devices``, with an optimizer each, which stay the same through each ``step``.

    ``model`` is taken as it is on the CPU. Buffers that the forward changes (batch norm's) are those of each replica.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        devices: Sequence[str],
        optimizer: Callable[[Any], torch.optim.Optimizer],
    ) -> None:
        self.group = marid.process_group(devices)
        self.devices = list(devices)
        self.replicas = [copy.deepcopy(model).to(device) for device in devices]
        self.optimizers = [optimizer(replica.parameters()) for replica in self.replicas]

    def step(
        self, batch: torch.Tensor, target: torch.Tensor, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """One step on a batch, as one device would make it that has all of it; the loss, a mean over the batch, on the
        first device. The length of the batch must be a multiple of the number of devices."""
        count = len(self.devices)
        if len(batch) % count:
            raise ValueError(f"a batch of {len(batch)} cannot be split evenly over {count} devices")
        losses = []
        shares = zip(self.devices, self.replicas, self.optimizers, batch.chunk(count), target.chunk(count), strict=True)
        for device, replica, optimizer, x, y in shares:
            optimizer.zero_grad()
            own = loss(replica(x.to(device)), y.to(device))
            own.backward()
            losses.append(own.detach())
        self._average_gradients()
        for optimizer in self.optimizers:
            optimizer.step()
        return marid.all_reduce(losses, "mean", group=self.group)[0]

    def _average_gradients(self) -> None:
        """One reduction for all gradients of a dtype."""
        used = [[p for p in replica.parameters() if p.grad is not None] for replica in self.replicas]
        for dtype in {p.dtype for p in used[0]}:
            gradients = [[p.grad for p in one if p.dtype is dtype] for one in used]
            flat = [torch.cat([g.reshape(-1) for g in one if g is not None]) for one in gradients]
            for mean, one in zip(marid.all_reduce(flat, "mean", group=self.group), gradients, strict=True):
                for piece, gradient in zip(mean.split([g.numel() for g in one if g is not None]), one, strict=True):
                    if gradient is not None:
                        gradient.copy_(piece.view_as(gradient))


def main() -> None:
    """Train a small classifier on numbers whose classes are known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--connect", nargs="*", metavar="ADDRESS", default=[])
    parser.add_argument("--key")
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    if options.connect:
        marid.connect(*options.connect, key=options.key)
    else:
        marid.connect(workers=options.workers)
    devices = [f"remote_accelerator:{i}" for i in range(len(options.connect) or options.workers)]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.GELU(), torch.nn.Linear(64, 4))
    parallel = DataParallel(model, devices, lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
    classes = torch.randn(4, 20)
    for step in range(options.steps):
        target = torch.randint(0, 4, (32 * len(devices),))
        batch = classes[target] + torch.randn(len(target), 20)
        loss = parallel.step(batch, target, torch.nn.functional.cross_entropy)
        if step % 10 == 0 or step == options.steps - 1:
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
