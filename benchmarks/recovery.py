"""From a worker's loss to going on: a training loop of small steps, whose worker is killed (SIGKILL) behind the last.

Prints for each round how long the steps took, how long the read took that found the worker lost, and how long as many
steps take when they are done again at once on a worker that is there: what is beyond that is the price of the loss.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import time
from typing import Any

import torch

import marid
from marid.report.traffic import traffic

DEVICE = "remote_accelerator"


def train(steps: int) -> tuple[torch.Tensor, float]:
    """So many steps, with a read at each; a weight, and the seconds."""
    torch.manual_seed(0)
    first = torch.nn.Linear(64, 64)
    model = torch.nn.Sequential(first, torch.nn.ReLU(), torch.nn.Linear(64, 8)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(32, 64).to(DEVICE)
    started = time.perf_counter()
    for _ in range(steps):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()
    return first.weight.sum(), time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=230)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    marid.connect(workers=1)
    from marid.frontend.engines import engine_of

    engine: Any = engine_of(0)
    beyond = []
    for number in range(options.rounds):
        weight, seconds = train(options.steps)
        expected = weight.detach().item()
        before = traffic.recoveries
        os.kill(engine.link.welcome["pid"], signal.SIGKILL)
        started = time.perf_counter()
        found = (weight.detach() * 1).item()
        lost = time.perf_counter() - started
        assert found == expected
        assert traffic.recoveries == before + 1
        beyond.append(lost)
        print(f"round {number}: {options.steps} steps {seconds:.2f} s, lost to going on {lost:.2f} s")
        del weight
    usual, most = statistics.median(beyond), max(beyond)
    print(f"lost to going on: median {usual:.2f} s, most {most:.2f} s; load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
