"""What tensors are for: parameters, buffers, gradients, optimizer states, caches, recurrent states, activations, inputs
and outputs.

What modules and optimizers hold is known of them; the rest follows from use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from marid.graph.computation import Recorded
from marid.graph.node import Node, Output, Value, root_of
from marid.semantics.expressions import base_name
from marid.semantics.memory_roles import ACTIVATION, BUFFER, GRADIENT, INPUT, MADE_IN, STATE
from marid.semantics.scopes import FORWARD

if TYPE_CHECKING:
    from marid.semantics.patterns import Match

PARAMETER = "parameter"
_WEIGHTS = {
    "linear": (1, 2), "addmm": (0, 2), "convolution": (1, 2), "embedding": (0,), "native_layer_norm": (2, 3),
    "native_group_norm": (1, 2), "native_batch_norm": (1, 2), "_native_batch_norm_legit": (1, 2),
}  # fmt: skip
"""The arguments that are parameters, where nobody says what they are."""
_STATISTICS = {"native_batch_norm": (3, 4), "_native_batch_norm_legit": (3, 4), "_batch_norm_with_update": (3, 4)}


def roles_of(recorded: Recorded, known: Mapping[Value, str], matches: Sequence[Match]) -> dict[Node, str]:
    """The role of each source and of each operation's result. ``known`` are roles by the value that made the memory."""
    of = dict(known)
    for value, role in _by_use(recorded):
        of.setdefault(value, role)
    for match in matches:
        for node in match.memory:
            if of.get(root_of(node)) not in (PARAMETER, BUFFER, GRADIENT, STATE):
                of[root_of(node)] = match.name
    found = {source: _role(source, of) or INPUT for source in recorded.sources}
    asked = {value.node for value in recorded.asked}
    for node in recorded.operations:
        role = _role(node, of)
        if role is None:
            phase = node.scope.phase if node.scope is not None else FORWARD
            role = MADE_IN.get(phase) or ("output" if node in asked else ACTIVATION)
        found[node] = role
    return found


def _role(node: Node, of: Mapping[Value, str]) -> str | None:
    """The role of the memory that a node makes or writes."""
    target: Value = node
    if node.op is not None and node.op.mutates and node.args:
        first = node.args[0][0] if isinstance(node.args[0], tuple) and node.args[0] else node.args[0]
        target = first if isinstance(first, (Node, Output)) else node
    elif node.outs:
        roles = [of.get(root_of(out)) for ref in node.outs if (out := ref()) is not None]
        return next((role for role in roles if role is not None), None)
    return of.get(root_of(target))


def _by_use(recorded: Recorded) -> list[tuple[Value, str]]:
    """What operators say of their arguments, if these come from outside."""
    found: list[tuple[Value, str]] = []
    for node in recorded.operations:
        if node.op is None:
            continue
        name, (args, _) = base_name(node), recorded.arguments[node]
        for table, role in ((_WEIGHTS, PARAMETER), (_STATISTICS, BUFFER)):
            for place in table.get(name, ()):
                value = args[place] if place < len(args) else None
                if isinstance(value, (Node, Output)) and root_of(value).node not in recorded.arguments:
                    found.append((root_of(value), role))
    return found
