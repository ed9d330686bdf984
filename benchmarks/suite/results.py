"""Figures: a row for each workload, metric and peer, with its samples; and their JSON."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["SCHEMA", "Report", "Row", "paired_ratio", "spread"]

SCHEMA = 1
STATUSES = ("ok", "missing", "left out", "failed", "wrong")


@dataclass
class Row:
    """One figure of one peer.

    ``status`` is ``"ok"``, ``"missing"`` (not installed), ``"left out"`` (on request), ``"failed"`` (it raised or took
    too long) or ``"wrong"`` (its output was not the reference's); ``message`` says more. Only where it is ``"ok"`` are
    there ``samples``: seconds (bytes for memory) by round; rounds of one index were taken beside each other.
    ``median`` is that of all samples. ``ratio`` is the median over rounds of the round's median divided by the
    reference's in the same round. ``first`` are the seconds of making model and data and of the first call, compiling
    included; ``agreement`` is how close the outputs were to the reference's.
    """

    workload: str
    metric: str
    unit: str
    scale: float
    peer: str
    status: str = "ok"
    message: str = ""
    samples: list[list[float]] = field(default_factory=list)
    median: float | None = None
    ratio: float | None = None
    spread: float | None = None
    first: float | None = None
    peak_bytes: int | None = None
    agreement: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(map(len, self.samples))

    def refuse(self, status: str, message: str) -> None:
        """There is no figure: whatever was measured is dropped, never reported."""
        self.status, self.message = status, message
        self.samples, self.median, self.ratio, self.spread, self.first = [], None, None, None, None
        self.peak_bytes = None

    def summarise(self, reference: Row | None) -> None:
        """Fill in median, spread and ratio from the samples."""
        if self.status != "ok" or not self.samples:
            return
        everything = [sample for samples in self.samples for sample in samples]
        self.median, self.spread = statistics.median(everything), spread(everything)
        if reference is not None and reference.status == "ok":
            self.ratio = paired_ratio(self.samples, reference.samples)


def paired_ratio(samples: Sequence[Sequence[float]], reference: Sequence[Sequence[float]]) -> float | None:
    """The median over rounds of the ratio of medians, so that a machine whose speed drifts does not decide."""
    ratios = [
        statistics.median(mine) / theirs
        for mine, other in zip(samples, reference, strict=False)
        if mine and other and (theirs := statistics.median(other)) > 0
    ]
    return statistics.median(ratios) if ratios else None


def spread(samples: Sequence[float]) -> float | None:
    """The distance between the quartiles as a share of the median; None for fewer than four samples."""
    middle = statistics.median(samples)
    if len(samples) < 4 or middle <= 0:
        return None
    lower, _, upper = statistics.quantiles(samples, n=4)
    return (upper - lower) / middle


@dataclass
class Report:
    """All of a run of ``python -m benchmarks.suite``: what ``--json`` writes."""

    machine: dict[str, Any]
    versions: dict[str, str]
    options: dict[str, Any]
    workloads: dict[str, str]
    started: str
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    schema: int = SCHEMA

    @property
    def failed(self) -> bool:
        """Whether a check failed, or Marid or the reference did not run."""
        return any(
            row.status == "wrong" or (row.status == "failed" and row.peer.startswith(("marid", "eager")))
            for row in self.rows
        )

    def to_json(self) -> str:
        return json.dumps(_finite(asdict(self)), indent=1, allow_nan=False)

    def write(self, path: Path) -> None:
        path.write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Report:
        """A report written before. Raises ``ValueError`` when the file is none of this schema."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(data, dict) or data.pop("schema", None) != SCHEMA:
                raise ValueError(f"not a report of schema {SCHEMA}")
            rows = [Row(**row) for row in data.pop("rows")]
            if any(row.status not in STATUSES for row in rows):
                raise ValueError("a row has an unknown status")
            return cls(**data, rows=rows)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} cannot be read as figures of the suite: {error}") from error


def _finite(item: Any) -> Any:
    """JSON has no infinities: text in their place."""
    if isinstance(item, dict):
        return {str(key): _finite(value) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        return [_finite(value) for value in item]
    return str(item) if isinstance(item, float) and not math.isfinite(item) else item
