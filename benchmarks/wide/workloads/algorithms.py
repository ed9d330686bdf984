"""Algorithms written with tensors as arrays: elements read and written one by one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.wide.workloads.base import Output, Program, Workload

__all__ = ["WORKLOADS"]


def time_warping(device: str) -> Program:
    """The table of dynamic time warping of two sequences of 14 numbers."""
    one, other = torch.randn(14).to(device), torch.randn(14).to(device)

    def turn() -> Sequence[Output]:
        costs = torch.full((15, 15), float("inf"), device=device)
        costs[0, 0] = 0
        for i in range(1, 15):
            for j in range(1, 15):
                before = torch.stack([costs[i - 1, j], costs[i, j - 1], costs[i - 1, j - 1]])
                costs[i, j] = (one[i - 1] - other[j - 1]).abs() + torch.min(before)
        return [costs[14, 14].item()]

    return Program(turn)


def suppressed_boxes(device: str) -> Program:
    """Non-maximum suppression of 80 boxes: the best is kept, those that overlap it are dropped."""
    corners = torch.rand(80, 2) * 100
    boxes = torch.cat([corners, corners + torch.rand(80, 2) * 30], dim=1).to(device)
    scores = torch.rand(80).to(device)

    def area(box: Tensor) -> Tensor:
        return (box[..., 2] - box[..., 0]) * (box[..., 3] - box[..., 1])

    def turn() -> Sequence[Output]:
        order, kept = scores.argsort(descending=True), list[float]()
        while order.numel() > 0:
            best, rest = order[0], order[1:]
            kept.append(best.item())
            low = torch.max(boxes[best, :2], boxes[rest, :2])
            high = torch.min(boxes[best, 2:], boxes[rest, 2:])
            shared = (high - low).clamp(min=0).prod(dim=1)
            overlap = shared / (area(boxes[best]) + area(boxes[rest]) - shared)
            order = rest[overlap <= 0.5]
        return kept

    return Program(turn)


WORKLOADS = (
    Workload("time-warping", "dynamic time warping, a table of 14 by 14 filled one by one", time_warping),
    Workload("boxes", "non-maximum suppression of 80 boxes", suppressed_boxes),
)
