"""What a node means, as read by users: made on first access, never while recording."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from marid.graph.node import Node, Spec
from marid.semantics.marks import marked
from marid.semantics.scopes import Scope
from marid.semantics.written import written_as


@dataclass(frozen=True)
class SemanticMetadata:
    """Meaning of one recorded operation.

    ``module_path`` is the name from ``named_modules`` of the module whose forward recorded it (``""`` for the
    outermost, ``None`` outside of modules), ``module_type`` the name of its class, and ``modules`` both of every module
    that it is in, from the outermost inward; an operation of a backward has those of what it is the backward of.
    ``execution_phase`` is ``"forward"``, ``"backward"``, ``"optimizer"``, ``"prefill"``, ``"decode"`` or a word of the
    user's; ``source`` is the user's ``file:line``, and ``written_as`` what stands there (``"nn.Linear"``,
    ``"torch.matmul"``, ``"@"``).

    Of a node of a graph also: ``role`` says what its result is for (``"parameter"``, ``"buffer"``, ``"gradient"``,
    ``"optimizer state"``, ``"kv cache"``, ``"recurrent state"``, ``"activation"``, ``"input"``, ``"output"``, or what
    ``marid.mark`` said); ``pattern`` names what it is a part of (``"attention"``); ``flops`` and ``bytes`` are what
    running it takes. ``workload_hints`` has what there is beside: ``"mode"`` (``"training"`` or ``"evaluation"``),
    what a pattern found out (``"attention": {"heads": 4, ...}``), and what enrichers said.
    """

    operation_type: str
    tensor_shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    device_hint: str | None
    module_path: str | None = None
    module_type: str | None = None
    execution_phase: str | None = None
    source: str | None = None
    workload_hints: dict[str, Any] = field(default_factory=dict)
    modules: tuple[tuple[str, str], ...] = ()
    written_as: str | None = None
    role: str | None = None
    pattern: str | None = None
    flops: int = 0
    bytes: int = 0


def metadata_of(node: Node, spec: Spec | None, scope: Scope | None = None) -> SemanticMetadata:
    """The metadata of a value of ``node`` with geometry ``spec``, as far as the node alone tells; ``scope`` in place of
    that which it was recorded in."""
    scope = node.scope if scope is None else scope
    calls = scope.calls() if scope is not None else []
    return SemanticMetadata(
        operation_type=node.op.name if node.op is not None else "marid::source",
        tensor_shape=spec.shape if spec is not None else None,
        dtype=spec.dtype if spec is not None else None,
        device_hint=f"remote_accelerator:{spec.device}" if spec is not None else None,
        module_path=scope.module_path if scope is not None else None,
        module_type=scope.module_type if scope is not None else None,
        execution_phase=scope.phase if scope is not None else None,
        source=str(node.site) if node.site is not None else None,
        modules=tuple((call.module_path or "", call.module_type or "") for call in calls),
        written_as=written_as(node.site, scope),
        role=marked(node),
    )
