"""What tensors on a worker are for, as far as their use tells: for accounting, and as hints.

A hint may be wrong; values never depend on it.
"""

from __future__ import annotations

from typing import Any

from marid.graph.node import Node, input_values, root_of
from marid.graph.program import Task
from marid.remote.buffers import Block, RemoteBuffer
from marid.semantics.caches import grows
from marid.semantics.marks import marks
from marid.semantics.scopes import BACKWARD, FORWARD, OPTIMIZER

__all__ = ["ROLES", "note_roles", "role_of"]

WEIGHT, GRADIENT, STATE, ACTIVATION, CACHE = "weight", "gradient", "optimizer state", "activation", "kv cache"
BUFFER = "buffer"
ROLES = (WEIGHT, GRADIENT, STATE, ACTIVATION, CACHE, BUFFER, "recurrent state", "input", "other")

_MADE_IN = {BACKWARD: GRADIENT, OPTIMIZER: STATE}


def role_of(block: Block) -> str:
    """The role of a block, "input" for what came from the host and was never written."""
    return block.role or "input"


def note_roles(task: Task, step: Any) -> None:
    """Learn from a run: what it makes is named by the phase that made it, and what an optimizer writes is a weight
    unless an optimizer has made it; what a forward pass writes in place, or puts behind what it has kept, is a cache,
    but for what norms count, which are buffers."""
    made = {block.identity for block in step.makes}
    for value in task.outputs:
        buffer = value.concrete
        if not isinstance(buffer, RemoteBuffer):
            continue
        marked = marks.get(root_of(value))
        if marked is not None:
            buffer.block.role, buffer.block.marked = marked, True
        elif buffer.block.identity in made and buffer.block.role is None:
            phase = value.node.scope.phase if value.node.scope is not None else FORWARD
            buffer.block.role = CACHE if grows(value.node) else _MADE_IN.get(phase, ACTIVATION)
    written = {block.identity for block in step.writes if block.role in (None, ACTIVATION) and not block.marked}
    if not written:
        return
    for node in task.nodes:
        if node.op is None or not node.op.mutates or node.scope is None:
            continue
        role = WEIGHT if node.scope.phase == OPTIMIZER else _written_by(node)
        for value in input_values(node):
            root = root_of(value)
            buffer = root.concrete if isinstance(root.concrete, RemoteBuffer) else value.concrete
            if role is not None and isinstance(buffer, RemoteBuffer) and buffer.block.identity in written:
                buffer.block.role = role


def _written_by(node: Node) -> str | None:
    """The role of what an operator writes in a forward and keeps: statistics of norms and counts are buffers."""
    assert node.op is not None
    assert node.scope is not None
    if node.scope.module_path is None:
        return None
    counts = node.spec is not None and not node.spec.shape
    return BUFFER if counts or "batch_norm" in node.op.name else CACHE
