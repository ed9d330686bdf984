"""What the suite measures: the workloads, their sizes, who takes part, and how far outputs may differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["SLOW", "WORKLOADS", "Tolerance", "Workload"]

EAGER = "eager"
SLOW = ("torch.compile", "torch.compile whole step", "torch.compile, static cache")
"""Peers that compile for tens of seconds: left out by ``--quick``."""


@dataclass(frozen=True)
class Tolerance:
    """How far an output may be from the reference: strictly over the first ``strict`` outputs of a sequence, then
    within ``loose``, because training amplifies rounding. Both are relative, with a tenth of it absolute."""

    tight: float = 1e-4
    loose: float = 1e-4
    strict: int = 10


@dataclass(frozen=True)
class Workload:
    """``kind`` is ``"steady"`` (contestants take turns, each in one process), ``"start"`` (fresh processes, the time
    from their start to a number of steps), ``"passes"`` (fresh processes, all calls together and the last) or
    ``"memory"`` (fresh processes, the largest resident memory).

    ``unit`` is what a figure is multiplied by ``scale`` to be in. ``calls`` a turn, after ``warmup`` calls, twice; for
    fresh processes, the calls of each. Outputs of peers in ``unchecked`` compute something else on purpose.
    """

    name: str
    title: str
    contestant: str
    options: Mapping[str, Any]
    peers: tuple[str, ...]
    unit: str
    scale: float
    kind: str = "steady"
    calls: int = 10
    warmup: int = 10
    steps: tuple[int, ...] = ()
    rounds: int = 10
    tolerance: Tolerance = Tolerance()
    quick: Mapping[str, Any] = field(default_factory=dict)
    reference: str = EAGER
    unchecked: tuple[str, ...] = ()

    def sized(self, quick: bool) -> Workload:
        """With small sizes and few rounds, to see that everything works."""
        if not quick:
            return self
        changes: dict[str, Any] = {
            "rounds": min(self.rounds, 3),
            "calls": min(self.calls, 3),
            "warmup": min(self.warmup, 3),
        }
        if self.steps:
            changes["steps"] = (1, 3, 6)
        if self.kind == "memory":
            changes["calls"] = self.calls  # memory is planned from the third run on
        options = {**self.options, **self.quick}
        title = f"{self.title} [quick: smaller]"
        return Workload(**{**self.__dict__, **changes, "options": options, "title": title})


_TRAINING = Tolerance(tight=1e-3, loose=0.1, strict=10)
_GPT = {"layers": 4, "width": 128, "length": 64, "batch": 8, "vocabulary": 1000}
_LARGE_GPT = {"layers": 6, "width": 256, "length": 256, "batch": 8, "vocabulary": 1000}
_TINY_GPT = {"layers": 1, "width": 32, "length": 16, "batch": 2, "vocabulary": 50}
_TRAINERS = (
    EAGER,
    "eager, fused AdamW",
    "torch.compile",
    "torch.compile whole step",
    "marid",
    "marid.compile",
)

WORKLOADS = (
    Workload(
        "tiny",
        "1,000 operations on 4x4 tensors, recorded and read",
        "small",
        {"task": "tiny", "operations": 1000, "record_only": False},
        (EAGER, "JAX", "MLX", "tinygrad", "marid", "marid.compile"),
        unit="µs an operation",
        scale=1e6,
        calls=10,
        rounds=20,
    ),
    Workload(
        "tiny-record",
        "the same, the recording alone",
        "small",
        {"task": "tiny", "operations": 1000, "record_only": True},
        (EAGER, "MLX", "tinygrad", "marid"),
        unit="µs an operation",
        scale=1e6,
        calls=10,
        rounds=20,
    ),
    Workload(
        "pointwise",
        "tanh(a*b+c)*sigmoid(a)-c on 16M elements",
        "small",
        {"task": "pointwise", "size": 1 << 24},
        (EAGER, "copy", "torch.compile", "JAX", "MLX", "tinygrad", "marid", "marid.compile"),
        unit="ms",
        scale=1e3,
        calls=3,
        warmup=12,
        quick={"size": 1 << 18},
        unchecked=("copy",),
    ),
    Workload(
        "mlp",
        "training step of an MLP 256-512-512-10, batch 64, SGD with momentum, loss read",
        "small",
        {"task": "mlp", "widths": [256, 512, 512, 10], "batch": 64},
        (EAGER, "torch.compile", "JAX", "MLX", "tinygrad", "marid", "marid.compile"),
        unit="ms a step",
        scale=1e3,
        calls=20,
        warmup=20,
        rounds=15,
        tolerance=_TRAINING,
    ),
    Workload(
        "gpt",
        "training step of a GPT: 4 layers, d 128, T 64, B 8, V 1000, AdamW; loss read at each step",
        "gpt",
        {"task": "train", **_GPT},
        _TRAINERS,
        unit="ms a step",
        scale=1e3,
        calls=8,
        warmup=24,
        rounds=12,
        tolerance=_TRAINING,
        quick=_TINY_GPT,
    ),
    Workload(
        "gpt-unread",
        "the same, 10 steps and only the last loss read",
        "gpt",
        {"task": "train-unread", "steps": 10, **_GPT},
        _TRAINERS,
        unit="ms a step",
        scale=1e3,
        calls=2,
        warmup=3,
        rounds=8,
        tolerance=Tolerance(tight=0.01, loose=0.1, strict=2),
        quick={**_TINY_GPT, "steps": 3},
    ),
    Workload(
        "gpt-start",
        "the GPT training step in a fresh process: time from its start to step 1, 50 and 500",
        "gpt",
        {"task": "train", **_GPT},
        (EAGER, "torch.compile", "torch.compile whole step", "marid"),
        unit="s",
        scale=1,
        kind="start",
        steps=(1, 50, 500),
        rounds=2,
        tolerance=_TRAINING,
        quick=_TINY_GPT,
    ),
    Workload(
        "llama",
        "Hugging Face Llama, hidden 512, 8 layers, vocabulary 32000: prompt 32, 64 greedy tokens",
        "llama",
        {"width": 512, "layers": 8, "vocabulary": 32000, "prompt": 32, "tokens": 64},
        (
            "eager, dynamic cache",
            "eager, static cache",
            "torch.compile, static cache",
            "marid, dynamic cache",
            "marid, static cache",
        ),
        unit="ms a token",
        scale=1e3,
        calls=1,
        warmup=2,
        rounds=8,
        tolerance=Tolerance(tight=0, loose=0),
        quick={"width": 64, "layers": 2, "vocabulary": 500, "prompt": 8, "tokens": 6},
        reference="eager, dynamic cache",
    ),
    Workload(
        "shapes",
        "GPT forward with batch sizes 1 to 16 shuffled, 5 passes, compiling included",
        "gpt",
        {"task": "shapes", **_GPT, "batch": 16},
        (EAGER, "torch.compile", "marid", "marid.compile"),
        unit="s",
        scale=1,
        kind="passes",
        calls=5,
        rounds=2,
        quick={**_TINY_GPT, "batch": 4},
    ),
    Workload(
        "memory",
        "training steps of a GPT, 6 layers, d 256, T 256, B 8: the most memory resident",
        "gpt",
        {"task": "memory", **_LARGE_GPT},
        (EAGER, "torch.compile", "marid", "marid.compile"),
        unit="MB",
        scale=1e-6,
        kind="memory",
        calls=10,
        rounds=2,
        tolerance=_TRAINING,
        quick=_TINY_GPT,
    ),
)
