"""Training a GPT in less memory than its steps take: time, memory and bits.

    python -m benchmarks.memory_limit [--rounds 15] [--threads 2] [--small] [--no-compile]

Marid without a limit, and with ``marid.settings.memory_limit`` at 0.6 and 0.4 of what the planned step takes beside
parameters and optimizer state; eager PyTorch, plain and with ``torch.utils.checkpoint`` on each block;
``torch.compile`` with and without ``torch._functorch.config.activation_memory_budget``. Each is a process of its own
that keeps its model; they take one step each in turn. Printed are medians of wall and processor time, the most memory
that a process held in the measured steps beside what it held before the first one (``VmHWM``), for Marid what the
allocator saw at once in a step, and whether the parameters have the bits of the first contestant of their kind.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.suite.contestants.gpt import GPT

MIB = 1 << 20
WHOLE = {"layers": 6, "width": 256, "length": 256, "vocabulary": 512, "batch": 8}
SMALL = {"layers": 4, "width": 64, "length": 128, "vocabulary": 128, "batch": 4}
WARM = 4  # steps before the measured ones: the first makes optimizer state, the second is watched


class Checkpointed(GPT):
    """With every block computed again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)  # pyright: ignore[reportAssignmentType]
        return self.head(self.norm(x))


def _trainer(name: str, size: dict[str, int]) -> tuple[Callable[[], float], torch.nn.Module]:
    """A step of AdamW that returns its loss, and the model."""
    torch.manual_seed(0)
    of = Checkpointed if "checkpoint" in name else GPT
    model = of(size["layers"], size["width"], size["length"], size["vocabulary"])
    texts = [torch.randint(size["vocabulary"], (size["batch"], size["length"] + 1)) for _ in range(8)]
    device = "remote_accelerator" if name.startswith("marid") else "cpu"
    model, texts = model.to(device), [text.to(device) for text in texts]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_of: Any = torch.compile(model.loss) if "compile" in name else model.loss
    number = 0

    def step() -> float:
        nonlocal number
        loss = loss_of(texts[number % len(texts)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        number += 1
        return loss.item()

    return step, model


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def _contestant(pipe: Connection, name: str, share: float, size: dict[str, int], threads: int, planned: int) -> None:
    """One process: answers each ``True`` with the times of a step, and ``False`` with what it has seen."""
    torch.set_num_threads(threads)
    if name.startswith("marid"):
        import marid

        marid.settings.compile = False
    if "budget" in name:
        import torch._functorch.config as functorch

        functorch.activation_memory_budget = share
    step, model = _trainer(name, size)
    if name.startswith("marid") and share < 1:
        import marid

        marid.materialize(*model.parameters())
        state = 2 * sum(p.numel() * p.element_size() for p in model.parameters())
        marid.settings.memory_limit = marid.stats().memory_allocated + state + int(share * planned)
    before = _memory("VmRSS")
    for _ in range(WARM):
        step()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again
    while pipe.recv():
        wall, processor = time.perf_counter(), time.process_time()
        loss = step()
        pipe.send((time.perf_counter() - wall, time.process_time() - processor, loss))
    bits = hashlib.sha256()
    for parameter in model.parameters():
        bits.update(parameter.detach().cpu().numpy().tobytes())
    pipe.send({"grown": _memory("VmHWM") - before, "bits": bits.hexdigest(), "held": _held(name)})


def _held(name: str) -> int:
    """What Marid's allocator saw at once in the steps that were run last; 0 for others."""
    if not name.startswith("marid"):
        return 0
    from marid.frontend.engines import engine_of

    programs: list[Any] = engine_of(0).programs.values()  # pyright: ignore[reportAttributeAccessIssue]
    fitted = [one.executable for program in programs for kept in program.fitted.values() for one in kept.known]
    latest = max([*programs, *fitted], key=lambda one: (len(one.specialisations) > 0, one.runs))
    return max(one.planned.plan.held for one in latest.specialisations)


class Contestant:
    """A process, and the times of its steps."""

    def __init__(self, name: str, share: float, arguments: argparse.Namespace, planned: int) -> None:
        self.name = name
        self.times: list[tuple[float, float, float]] = []
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        size = SMALL if arguments.small else WHOLE
        given = theirs, name, share, size, arguments.threads, planned
        self._process = context.Process(target=_contestant, args=given, daemon=True)
        self._process.start()

    def step(self) -> None:
        self._pipe.send(True)
        self.times.append(self._pipe.recv())

    def end(self) -> dict[str, Any]:
        self._pipe.send(False)
        found = self._pipe.recv()
        self._process.join()
        return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_limit")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--small", action="store_true", help="a small model, to see that everything works")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    arguments = parser.parse_args()
    probe = Contestant("marid", 1.0, arguments, 0)
    probe.step()
    planned = probe.end()["held"]
    asked = [("marid", 1.0), ("marid, limit 0.6", 0.6), ("marid, limit 0.4", 0.4)]
    asked += [("eager", 1.0), ("eager, checkpoint on each block", 1.0)]
    if not arguments.no_compile:
        asked += [("torch.compile", 1.0), ("torch.compile, budget 0.6", 0.6), ("torch.compile, budget 0.4", 0.4)]
    contestants = []
    for name, share in asked:
        contestants.append(Contestant(name, share, arguments, planned))
        contestants[-1].step()  # each begins alone: compiling takes all processors
        contestants[-1].times.clear()
    for _ in range(arguments.rounds):
        for contestant in contestants:
            contestant.step()
    _print(contestants, planned)


def _print(contestants: list[Contestant], planned: int) -> None:
    rounds = len(contestants[0].times)
    print(f"the planned step holds {planned / MIB:.1f} MiB at once; {rounds} steps each, in turn\n")
    print(
        "| contestant | wall, ms | of its first | processor, ms | of its first | held, MiB | process grew, MiB | bits |"
    )
    print("|---|---|---|---|---|---|---|---|")
    first: dict[str, tuple[float, float, str]] = {}
    for contestant in contestants:
        wall, processor = (statistics.median(times[kind] for times in contestant.times) for kind in (0, 1))
        found = contestant.end()
        base = first.setdefault(contestant.name.partition(",")[0], (wall, processor, found["bits"]))
        held = f"{found['held'] / MIB:.1f}" if found["held"] else ""
        same = "equal" if found["bits"] == base[2] else "other"
        print(
            f"| {contestant.name} | {wall * 1e3:.0f} | {wall / base[0]:.2f} | {processor * 1e3:.0f} "
            f"| {processor / base[1]:.2f} | {held} | {found['grown'] / MIB:.0f} | {same} |"
        )


if __name__ == "__main__":
    main()
