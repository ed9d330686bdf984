"""What tensors on a worker are for, as far as their use tells: for accounting, and as hints.

A hint may be wrong; values never depend on it.
"""

from __future__ import annotations

from typing import Any

from marid.graph.node import input_values, root_of
from marid.graph.program import Task
from marid.remote.client.buffers import Block, RemoteBuffer
from marid.semantics.marks import marks
from marid.semantics.scopes import BACKWARD, FORWARD, OPTIMIZER

__all__ = ["ROLES", "note_roles", "role_of"]

WEIGHT, GRADIENT, STATE, ACTIVATION, CACHE = "weight", "gradient", "optimizer state", "activation", "kv cache"
ROLES = (WEIGHT, GRADIENT, STATE, ACTIVATION, CACHE, "input", "other")

_MADE_IN = {BACKWARD: GRADIENT, OPTIMIZER: STATE}


def role_of(block: Block) -> str:
    """The role of a block, "input" for what came from the host and was never written."""
    return block.role or "input"


def note_roles(task: Task, step: Any) -> None:
    """Learn from a run: what it makes is named by the phase that made it, and what an optimizer writes is a weight
    unless an optimizer has made it; what a forward pass writes in place, and keeps, is a cache."""
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
            buffer.block.role = _MADE_IN.get(phase, ACTIVATION)
    written = {block.identity for block in step.writes if block.role in (None, ACTIVATION) and not block.marked}
    if not written:
        return
    for node in task.nodes:
        if node.op is None or not node.op.mutates or node.scope is None:
            continue
        role = WEIGHT if node.scope.phase == OPTIMIZER else CACHE if node.scope.module_path is not None else None
        for value in input_values(node):
            root = root_of(value)
            buffer = root.concrete if isinstance(root.concrete, RemoteBuffer) else value.concrete
            if role is not None and isinstance(buffer, RemoteBuffer) and buffer.block.identity in written:
                buffer.block.role = role
