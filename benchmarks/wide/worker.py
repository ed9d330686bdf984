"""The process in which one workload is measured: ``python -m benchmarks.wide.worker``, options as JSON.

It answers with one line of JSON on stdout; what a program prints goes to stderr.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.suite.workloads import Tolerance
from benchmarks.wide.checks import Comparison, Wrong, on_host
from benchmarks.wide.workloads import WORKLOADS, Program, Workload
from benchmarks.wide.workloads.base import TRAINING

__all__ = ["COLD_SECONDS", "Options", "build"]

COLD_SECONDS = 4.0
_SETTLING = 30.0  # seconds that compilers in the background may take
_SEED = 0
_OTHER_KERNELS = Tolerance(tight=1e-3, loose=5e-2)  # than those that they are compared with


@dataclass(frozen=True)
class Options:
    """Of one measurement, of eager PyTorch and Marid both on the device ``on``.

    The warm-up is ``warmup`` turns on each device, and more until Marid's have taken ``warmup_seconds``; then the
    compiler in the background is waited for, and half as many turns follow. With ``replayed`` a turn on the device is a
    function under ``marid.compile``. With ``cold`` only that device runs, for
    ``COLD_SECONDS`` from the making of model and data on, and its outputs are written to the file ``outputs``.
    """

    workload: str
    turns: int = 40
    warmup: int = 30
    warmup_seconds: float = 3.0
    threads: int = 0
    cold: str = ""
    outputs: str = ""
    on: str = "cpu"
    replayed: bool = False


@dataclass
class _Clock:
    """Seconds, and processor seconds of all threads, of each turn on one device."""

    program: Program
    seconds: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)

    def turn(self) -> list[Tensor | float]:
        """One turn, ended by its outputs being on the host."""
        processor, seconds = time.process_time(), time.perf_counter()
        outputs = on_host(self.program.turn())
        self.seconds.append(time.perf_counter() - seconds)
        self.processor.append(time.process_time() - processor)
        return outputs


def build(workload: Workload, device: str) -> Program:
    """The program for a device, with weights and data that are the same for each."""
    torch.manual_seed(_SEED)
    return workload.build(device)


def _measure(workload: Workload, options: Options) -> dict[str, Any]:
    """Both in turn; outputs are compared after each turn, outside of the time. An accelerator draws random numbers of
    its own and Marid the CPU's everywhere, so they are compared with eager PyTorch's on the CPU."""
    import marid

    # The first product of a process may have other bits than all later ones, and so may the first large square root on
    # one of two threads (docs/decisions.md).
    square = torch.ones(300, 300)
    torch.mm(square, square)
    torch.ones(1 << 18).sqrt()
    eager, lazy = _Clock(build(workload, options.on)), _Clock(build(workload, "remote_accelerator"))
    if options.replayed:
        lazy.program = replace(lazy.program, turn=marid.compile(lazy.program.turn))
    judge = eager if options.on == "cpu" else _Clock(build(workload, "cpu"))
    torch.manual_seed(_SEED + 1)  # each device draws its own, the same random numbers
    comparison = Comparison(workload.tolerance if options.on == "cpu" else _OTHER_KERNELS)

    def run(enough: Callable[[int], bool]) -> None:
        for clock in (eager, lazy):
            clock.seconds, clock.processor = [], []
        done = 0
        while not enough(done):
            if done % 2:  # so that neither always follows the other
                outputs, expected = lazy.turn(), eager.turn()
            else:
                expected, outputs = eager.turn(), lazy.turn()
            comparison.turn(expected if judge is eager else judge.turn(), outputs)
            done += 1

    run(lambda done: done >= options.warmup and sum(lazy.seconds) >= options.warmup_seconds)
    deadline = time.monotonic() + _SETTLING
    while marid.stats().programs_compiling and time.monotonic() < deadline:
        time.sleep(0.05)
    run(lambda done: done >= options.warmup // 2)
    gc.collect()
    before = _counters()
    run(lambda done: done >= options.turns)
    facts = {name: (value - before[name]) / options.turns for name, value in _counters().items()}
    exact = not marid.stats().compiled_runs and options.on == "cpu"
    if exact or workload.tolerance is not TRAINING:  # which amplifies other rounding, in weights more than in losses
        comparison.state(judge.program.state(), lazy.program.state())
    facts["reads"] = _reads(lazy.program)
    if exact:
        comparison.demand_equal_bits()
    wall = statistics.median(lazy.seconds) / statistics.median(eager.seconds)
    return {
        "eager_ms": 1e3 * statistics.median(eager.seconds),
        "marid_ms": 1e3 * statistics.median(lazy.seconds),
        "ratio": wall,
        "processor_ratio": statistics.median(lazy.processor) / statistics.median(eager.processor),
        "turns": options.turns,
        "output": comparison.words,
        "a_turn": facts,
        "samples": {"eager": eager.seconds, "marid": lazy.seconds},
    }


def _counters() -> dict[str, float]:
    """What Marid has counted since the process started."""
    import marid

    stats = marid.stats()
    return {
        "operations": stats.ops_captured,
        "at_once": stats.ops_immediate,
        "waits": sum(sync.count for sync in stats.syncs),
        "waited_ms": 1e3 * sum(sync.seconds for sync in stats.syncs),
        "fallbacks": sum(stats.fallbacks.values()),
        "dynamic": sum(stats.dynamic.values()),
        "programs_built": stats.programs_built,
        "programs_reused": stats.programs_reused,
        "automatic_cuts": stats.automatic_cuts,
        "compiled_runs": stats.compiled_runs,
        "replays": sum(function.replays for function in stats.functions),
    }


class _ReadCounter(TorchDispatchMode):
    """Counts the calls that take a number out of a tensor of the device: ``item()``, ``bool()``, ``if``."""

    reads = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type != "cpu":
            self.reads += 1  # an optimizer's count of its steps is on the CPU
        return func(*args, **(kwargs or {}))


def _reads(program: Program) -> int:
    """How often a turn asks the device for values, waiting or not: Marid counts only those that have to wait."""
    with _ReadCounter() as counter:
        outputs = program.turn()
    return counter.reads + sum(isinstance(output, Tensor) for output in outputs)


def _start_cold(workload: Workload, options: Options) -> dict[str, Any]:
    """One device alone, from the making of model and data on: what its turns take while all is new."""
    if options.cold != "cpu":
        import marid  # noqa: F401  (the import itself is not in the time, and PyTorch's is not either)
    processor, started = time.process_time(), time.perf_counter()
    clock = _Clock(build(workload, options.cold))
    torch.manual_seed(_SEED + 1)
    outputs: list[Sequence[Tensor | float]] = []
    while not outputs or time.perf_counter() - started < COLD_SECONDS:
        outputs.append(clock.turn())
    seconds, processor = time.perf_counter() - started, time.process_time() - processor
    torch.save(outputs, options.outputs)
    facts = {name: value / len(outputs) for name, value in _counters().items()} if options.cold != "cpu" else {}
    facts["reads"] = _reads(clock.program) if options.cold != "cpu" else 0
    return {
        "ms": 1e3 * seconds / len(outputs),
        "processor_ms": 1e3 * processor / len(outputs),
        "turns": len(outputs),
        "a_turn": facts,
    }


def _answer(options: Options) -> dict[str, Any]:
    if options.threads:
        torch.set_num_threads(options.threads)
    workload = next(workload for workload in WORKLOADS if workload.name == options.workload)
    try:
        result = (_start_cold if options.cold else _measure)(workload, options)
    except Wrong as error:
        return {"status": "wrong", "message": str(error)}
    return {"status": "ok", **result}


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")  # a compiler's process must not inherit it
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        answer = _answer(Options(**json.loads(sys.argv[1])))
    except Exception as error:  # whatever a program raises is its result
        traceback.print_exc()
        answer = {"status": "failed", "message": f"{type(error).__name__}: {error}"[:2000]}
    answers.write(json.dumps(answer) + "\n")
    answers.close()
    sys.stderr.flush()
    os._exit(0)  # threads in the background may take long to end, and all that counts has been said


if __name__ == "__main__":
    main()
