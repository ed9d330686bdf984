"""What a node means, as read by users: made on first access, never while recording."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from marid.graph.node import Node, Spec

__all__ = ["SemanticMetadata", "metadata_of"]


@dataclass(frozen=True)
class SemanticMetadata:
    """Meaning of one recorded operation.

    ``module_path`` is the name from ``named_modules`` of the module whose forward recorded it (``""`` for the
    outermost, ``None`` outside of modules); ``execution_phase`` is ``"forward"``, ``"backward"`` or ``"optimizer"``;
    ``source`` is the user's ``file:line``.
    """

    operation_type: str
    tensor_shape: tuple[int, ...]
    dtype: torch.dtype
    device_hint: str
    module_path: str | None = None
    module_type: str | None = None
    execution_phase: str | None = None
    source: str | None = None
    workload_hints: dict[str, Any] = field(default_factory=dict)


def metadata_of(node: Node, spec: Spec) -> SemanticMetadata:
    """The metadata of a value of ``node`` with geometry ``spec``."""
    scope = node.scope
    return SemanticMetadata(
        operation_type=node.op.name if node.op is not None else "marid::source",
        tensor_shape=spec.shape,
        dtype=spec.dtype,
        device_hint=f"remote_accelerator:{spec.device}",
        module_path=scope.module_path if scope is not None else None,
        module_type=scope.module_type if scope is not None else None,
        execution_phase=scope.phase if scope is not None else None,
        source=str(node.site) if node.site is not None else None,
    )
