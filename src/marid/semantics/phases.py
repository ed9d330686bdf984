"""When operations run: forward, backward and optimizer are recorded; prefill and decode follow from caches and the
length of queries; a user's own phase stays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from marid.graph.computation import Recorded
from marid.graph.node import Node
from marid.semantics.scopes import BACKWARD, FORWARD, OPTIMIZER, Scope

if TYPE_CHECKING:
    from marid.semantics.patterns import Match

PREFILL, DECODE = "prefill", "decode"


def phases_of(recorded: Recorded, scopes: Mapping[Node, Scope], matches: Sequence[Match], mode: str) -> dict[Node, str]:
    """The phase of each operation. Where attention reads a cache, what leads to it decodes if it asks for one position
    of several, and prefills otherwise."""
    found = {node: scopes[node].phase if node in scopes else FORWARD for node in recorded.operations}
    steps = _steps(recorded, matches) if mode == "evaluation" else []
    if not steps:
        return found
    turns = iter([*steps[1:], (len(recorded.operations), steps[-1][1])])
    until, following = next(turns)
    phase = steps[0][1]
    for index, node in enumerate(recorded.operations):
        while index >= until and until < len(recorded.operations):
            phase = following
            until, following = next(turns)
        if found[node] == FORWARD:
            found[node] = phase
    return found


def _steps(recorded: Recorded, matches: Sequence[Match]) -> list[tuple[int, str]]:
    """Where steps of a generation begin, and what they are."""
    place = {node: index for index, node in enumerate(recorded.operations)}
    cached = {_module(match) for match in matches if match.name == "kv cache"} - {None}
    begins = sorted(place[match.nodes[0]] for match in matches if match.name == "embedding")
    steps: list[tuple[int, str]] = []
    last = -1
    for match in matches:
        if match.name != "attention" or _module(match) not in cached or "queries" not in match.details:
            continue
        at = place[match.nodes[0]]
        several = (match.details.get("keys") or 0) > 1
        phase = DECODE if match.details["queries"] == 1 and several else PREFILL
        if not steps or steps[-1][1] != phase:
            between = [begin for begin in begins if last < begin < at]
            steps.append(((between[0] if between else at) if steps else 0, phase))
        last = at
    return steps


def _module(match: Match) -> str | None:
    """The module that most of a match's operations were recorded in."""
    scopes = [node.scope for node in match.nodes if node.scope is not None]
    paths = [scope.module_path for scope in scopes if scope.module_path is not None]
    return max(set(paths), key=paths.count) if paths else None


_DROPS = {"aten::bernoulli_", "aten::native_dropout"}


def mode_of(recorded: Recorded) -> str:
    """ "training" where there is a backward, an optimizer's step, dropout, or a batch norm that takes statistics."""
    for node in recorded.operations:
        scope, name = node.scope, node.op.name if node.op is not None else ""
        if scope is not None and scope.phase in (BACKWARD, OPTIMIZER):
            return "training"
        if name in _DROPS and scope is not None and scope.module_path is not None:
            return "training"
        if "batch_norm" in name and _takes_statistics(recorded, node):
            return "training"
    return "evaluation"


def _takes_statistics(recorded: Recorded, node: Node) -> bool:
    statistics = recorded.argument(node, 3, "running_mean") is not None
    return statistics and recorded.argument(node, 5, "training") is True
