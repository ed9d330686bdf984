"""What recording and replaying cost, beside what they cannot go below, in one interleaved run.

    python benchmarks/capture.py [--json FILE]

Recording is compared with a bare ``__torch_dispatch__`` wrapper subclass that only creates its output; replay of a
cached flat program with the same ATen calls made directly. All times are medians over rounds, in microseconds an
operation; outputs are checked first. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch._C import _disabled_torch_function_impl

import marid
from marid.frontend import handles
from marid.frontend.engines import local_engine as engine
from marid.graph.dispatch_state import concretely
from marid.graph.program import bind

DEVICE = torch.device("remote_accelerator", 0)
SHAPE = (4, 4)


class Bare(torch.Tensor):
    """The least a Python tensor subclass can do for an operation."""

    __torch_function__ = _disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _bare()


def _bare() -> torch.Tensor:
    make = torch.Tensor._make_wrapper_subclass  # pyright: ignore[reportAttributeAccessIssue]
    return make(Bare, SHAPE, dtype=torch.float32, device=DEVICE)


OPERATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "add (two tensors)": lambda x: torch.add(x, x),
    "mul (tensor, number)": lambda x: torch.mul(x, 2.0),
    "tanh": torch.tanh,
    "neg": torch.neg,
    "transpose (view)": lambda x: x.t(),
}


def timed(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, count: int) -> float:
    started = time.perf_counter()
    for _ in range(count):
        function(x)
    return (time.perf_counter() - started) / count * 1e6


def recording(rounds: int, count: int) -> list[dict[str, Any]]:
    """Microseconds an operation: bare, and recorded with stamping on."""
    bare, lazy = _bare(), torch.ones(SHAPE, device=DEVICE)
    rows = []
    for name, function in OPERATIONS.items():
        assert torch.equal(function(lazy).cpu(), function(torch.ones(SHAPE)))
        timed(function, bare, count)
        timed(function, lazy, count)
        pairs = [(timed(function, bare, count), timed(function, lazy, count)) for _ in range(rounds)]
        rows.append(
            {
                "operation": name,
                "bare_us": statistics.median(a for a, _ in pairs),
                "marid_us": statistics.median(b for _, b in pairs),
                "ratio": statistics.median(b / a for a, b in pairs),
                "samples": rounds,
            }
        )
    return rows


def linearity(sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """Microseconds a recorded operation in one chain of ``size`` live pending nodes."""
    limits = marid.settings.max_pending_nodes, marid.settings.max_pending_bytes
    marid.settings.max_pending_nodes, marid.settings.max_pending_bytes = 1 << 40, 1 << 60
    rows = []
    try:
        for size in sizes:
            x = torch.ones(SHAPE, device=DEVICE)
            gc.collect()
            handles.tape(0).budget = 1 << 60
            started = time.perf_counter()
            for _ in range(size):
                x = x + x
            rows.append({"nodes": size, "us_an_op": (time.perf_counter() - started) / size * 1e6})
            del x
    finally:
        marid.settings.max_pending_nodes, marid.settings.max_pending_bytes = limits
        handles.tape(0).budget = 0
    return rows


def replay(rounds: int, length: int) -> dict[str, Any]:
    """A cached program of ``length`` pointwise operations against the same ATen calls in a loop over a list."""
    ops = [torch.ops.aten.add.Tensor._op, torch.ops.aten.mul.Tensor._op, torch.ops.aten.tanh.default._op]

    def record() -> torch.Tensor:
        x = source
        for i in range(length):
            x = x + source if i % 3 == 0 else x * source if i % 3 == 1 else torch.tanh(x)
        return x

    def direct(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for i in range(length):
            x = ops[i % 3](x, y) if i % 3 < 2 else ops[2](x)
        return x

    source = torch.rand(SHAPE, device=DEVICE)
    plain = source.cpu()
    for _ in range(3):
        assert torch.equal(record().cpu(), direct(plain, plain))
    totals: dict[str, list[float]] = {"direct": [], "program": [], "cut_and_run": []}
    cache = engine.programs  # pyright: ignore[reportAttributeAccessIssue]
    for _ in range(rounds):
        with concretely():
            started = time.perf_counter()
            direct(plain, plain)
            totals["direct"].append(time.perf_counter() - started)
        result = record()
        nodes = handles.tape(0).cut([result._value.node])
        task = bind(nodes)
        program = cache.find(task)
        engine.wait()
        task.resolve()
        with concretely():
            started = time.perf_counter()
            program.specialised(task).run(task, engine._twisters.at)
            totals["program"].append(time.perf_counter() - started)
        del task, nodes
        started = time.perf_counter()
        marid.materialize(result)
        totals["cut_and_run"].append(time.perf_counter() - started)
    us = {name: statistics.median(times) / length * 1e6 for name, times in totals.items()}
    return {
        "operations": length,
        "aten_us": us["direct"],
        "replay_above_aten_us": us["program"] - us["direct"],
        "cut_bind_and_replay_above_aten_us": us["cut_and_run"] - us["direct"],
        "samples": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--nodes", type=int, default=1_000_000, help="the longest chain")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with torch.no_grad():
        figures = {
            "torch": torch.__version__,
            "python": sys.version.split()[0],
            "recording": recording(options.rounds, 2000),
            "replay": replay(4 * options.rounds, 300),
            "linearity": linearity((options.nodes // 100, options.nodes // 10, options.nodes)),
        }
    print(f"PyTorch {figures['torch']}, Python {figures['python']}, one thread; medians")
    print(f"\n{'recording an operation':28}{'bare µs':>10}{'marid µs':>10}{'ratio':>8}{'samples':>9}")
    for row in figures["recording"]:
        print(
            f"{row['operation']:28}{row['bare_us']:10.2f}{row['marid_us']:10.2f}{row['ratio']:8.2f}{row['samples']:9}"
        )
    again = figures["replay"]
    print(f"\nreplay of a cached program of {again['operations']} operations ({again['samples']} samples):")
    print(f"  the ATen calls alone                {again['aten_us']:6.2f} µs an operation")
    print(f"  replay above them                   {again['replay_above_aten_us']:6.2f} µs an operation")
    print(f"  cut, key and replay above them      {again['cut_bind_and_replay_above_aten_us']:6.2f} µs an operation")
    print("\nrecording one chain:")
    for row in figures["linearity"]:
        print(f"  {row['nodes']:>9,} pending nodes  {row['us_an_op']:6.2f} µs an operation")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(figures, file, indent=2)


if __name__ == "__main__":
    main()
