"""The workloads of the wide suite, a module for each kind: ordinary PyTorch, the same for every device."""

from __future__ import annotations

from benchmarks.wide.workloads import (
    algorithms,
    derivatives,
    encoders,
    estimation,
    generation,
    generative,
    graphs,
    numerics,
    recurrent,
    reinforcement,
    sequences,
    tabular,
    vision,
)
from benchmarks.wide.workloads.base import Program, Workload

__all__ = ["WORKLOADS", "Program", "Workload"]

WORKLOADS: tuple[Workload, ...] = (
    *recurrent.WORKLOADS,
    *reinforcement.WORKLOADS,
    *derivatives.WORKLOADS,
    *generation.WORKLOADS,
    *encoders.WORKLOADS,
    *vision.WORKLOADS,
    *graphs.WORKLOADS,
    *numerics.WORKLOADS,
    *tabular.WORKLOADS,
    *generative.WORKLOADS,
    *sequences.WORKLOADS,
    *estimation.WORKLOADS,
    *algorithms.WORKLOADS,
)
