"""A small GPT over workers that are too small for it: seconds and bytes of a step, beside one worker that is not, and
the bytes of placing layers by turns and by their size.

    python -m benchmarks.placement [--workers 2] [--steps 10]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional as F

import marid
from examples.train_gpt import GPT
from marid.placement.plan import Needs, cost_of
from marid.remote.launch.local import start_workers
from marid.report.units import bytes_text

DEVICE = "remote_accelerator"
BATCH, CONTEXT, VOCABULARY = 8, 64, 100


def build() -> GPT:
    """The same weights each time."""
    torch.manual_seed(0)
    return GPT(VOCABULARY, CONTEXT, 256, 6, 4, 0.0)


def train(model: nn.Module, inputs: torch.device, outputs: torch.device, steps: int) -> tuple[list[float], float]:
    """Losses, and the median seconds of a step; each is read."""
    drawn = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, times = [], []
    for _ in range(steps):
        begun = time.perf_counter()
        tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), generator=drawn)
        logits = model(tokens[:, :-1].to(inputs))
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten().to(outputs))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        times.append(time.perf_counter() - begun)
    return losses, statistics.median(times[steps // 2 :])


def by_size(layers: Mapping[str, int], devices: range) -> dict[str, int]:
    """The largest layers first, each where least is."""
    held, found = dict.fromkeys(devices, 0), {}
    for layer in sorted(layers, key=layers.__getitem__, reverse=True):
        found[layer] = min(held, key=held.__getitem__)
        held[found[layer]] += layers[layer]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    devices = range(1, options.workers + 1)
    nbytes = sum(one.numel() * one.itemsize for one in build().parameters())
    limit = 18 * nbytes // options.workers
    started = start_workers(options.workers, options=("--memory-limit", str(limit)))
    started += start_workers(1)
    try:
        marid.connect(*[worker.address for worker in started], first=1)
        alone = torch.device(DEVICE, options.workers + 1)
        expected, seconds = train(build().to(alone), alone, alone, options.steps)
        print(f"one worker: {1000 * seconds:.0f} ms a step")
        model = build()
        example = torch.zeros(BATCH, CONTEXT, dtype=torch.long)
        placement = marid.place(model, [*devices], example, training=True)
        print(placement)
        marid.reset_stats()
        losses, seconds = train(model, placement.input_device, placement.output_device, options.steps)
        assert losses == expected, "the losses differ"
        remote = marid.stats().remote
        assert remote is not None
        moved = remote.copied_bytes / options.steps
        planned = placement.forward_bytes + placement.backward_bytes
        print(
            f"{options.workers} workers of {bytes_text(limit)} (parameters: {bytes_text(nbytes)}): "
            f"{1000 * seconds:.0f} ms a step, {bytes_text(moved)} between them, planned {bytes_text(planned)}"
        )
        layers = placement.forward.layers
        turns = {layer: devices[place % len(devices)] for place, layer in enumerate(layers)}
        for name, at in (("by turns", turns), ("by size", by_size(layers, devices))):
            cost = cost_of(placement.forward, at, [*devices], Needs(True, 5))
            print(f"layers {name}: {bytes_text(cost.forward_bytes + cost.backward_bytes)} between them")
    finally:
        marid.disconnect(force=True)
        for worker in started:
            worker.stop()


if __name__ == "__main__":
    main()
