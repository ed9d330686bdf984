"""What memory is for, as single operations tell: for accounting, and for what may wait on the host.

``semantics/roles.py`` looks at a whole program, and knows more.
"""

from __future__ import annotations

from marid.graph.arguments import input_values
from marid.graph.node import Node, Value, root_of
from marid.semantics.caches import grows
from marid.semantics.marks import marks
from marid.semantics.scopes import BACKWARD, FORWARD, OPTIMIZER

INPUT, WEIGHT, GRADIENT, STATE = "input", "weight", "gradient", "optimizer state"
ACTIVATION, CACHE, BUFFER = "activation", "kv cache", "buffer"
MADE_IN = {BACKWARD: GRADIENT, OPTIMIZER: STATE}


def made_as(value: Value) -> str:
    """The role of new memory, by what its user has said (``marid.mark``), or by the operation that makes it."""
    node = value.node
    if (marked := marks.get(root_of(value))) is not None:
        return marked
    if node.op is None:
        return INPUT
    phase = node.scope.phase if node.scope is not None else FORWARD
    return CACHE if grows(node) else MADE_IN.get(phase, ACTIVATION)


def written_as(node: Node) -> str | None:
    """The role of memory that an operation writes: what an optimizer writes is a weight unless an optimizer has made
    it; what is written in a module's forward is a cache, but for the statistics of norms and counts, which are
    buffers. None where it says nothing."""
    if node.op is None or not node.op.mutates or node.scope is None:
        return None
    if node.scope.phase == OPTIMIZER:
        return WEIGHT
    if node.scope.module_path is None:
        return None
    target = next(input_values(node), None)
    counts = target is not None and target.spec is not None and not target.spec.shape
    return BUFFER if counts or "batch_norm" in node.op.name else CACHE
