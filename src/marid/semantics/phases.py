"""When operations run: prefill and decode are told by caches and the length of queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from marid.graph.computation import Recorded
from marid.graph.node import Node
from marid.semantics.scopes import BACKWARD, FORWARD, OPTIMIZER, Scope

if TYPE_CHECKING:
    from marid.semantics.patterns import Match

__all__ = ["mode_of", "phases_of"]

PREFILL, DECODE = "prefill", "decode"


def phases_of(recorded: Recorded, scopes: Mapping[Node, Scope], matches: Sequence[Match]) -> dict[Node, str]:
    """The phase of each operation."""
    return {node: scopes[node].phase if node in scopes else FORWARD for node in recorded.operations}


_TRAINS = {"aten::bernoulli_", "aten::native_dropout"}


def mode_of(recorded: Recorded) -> str:
    """ "training" where there is a backward, an optimizer's step, dropout, or a batch norm that takes statistics."""
    for node in recorded.operations:
        phase = node.scope.phase if node.scope is not None else FORWARD
        if phase in (BACKWARD, OPTIMIZER):
            return "training"
        name = node.op.name if node.op is not None else ""
        inside = node.scope is not None and node.scope.module_path is not None
        if (inside and name in _TRAINS) or (
            name.startswith("aten::native_batch_norm") and _takes_statistics(recorded, node)
        ):
            return "training"
    return "evaluation"


def _takes_statistics(recorded: Recorded, node: Node) -> bool:
    return recorded.argument(node, 5, "training") is True and recorded.argument(node, 3, "running_mean") is not None
