"""What is found in a recorded graph: patterns of functions, operators that are one by themselves, and what only the
whole graph tells (heads, residual branches, caches, steps of optimizers, moving averages)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from torch import fx

from marid.graph.computation import Recorded
from marid.graph.node import Node, Value, root_of
from marid.semantics.canonical import Canonical
from marid.semantics.details import describe
from marid.semantics.library import OPERATORS, patterns
from marid.semantics.patterns import Match, matches_in, nodes_of
from marid.semantics.scopes import BACKWARD, FORWARD, OPTIMIZER
from marid.semantics.user_patterns import registered

_BRANCH = 400
"""A residual branch with more canonical nodes than this is none."""


def matches_of(recorded: Recorded, known: Mapping[Value, str]) -> list[Match]:
    """All patterns of a graph, in program order."""
    forward, again, others = _parted(recorded)
    weight = _weights(known)
    found: list[Match] = []
    order = {node: index for index, node in enumerate(recorded.operations)}
    for operations in (forward, again):
        if operations:
            canonical = Canonical(recorded, operations, weight)
            here = [*_by_operator(canonical), *matches_in(canonical, [*registered(), *patterns()])]
            here += [*_heads(canonical), *_residuals(canonical), *_caches(canonical, known)]
            here += _averages(canonical, known)
            found += [match for match in here if describe(match, canonical)]
            for match in here:
                match.inputs = match.results = ()
            canonical.forget()
    found += _optimizers(others)
    for match in found:
        match.nodes = sorted(match.nodes, key=order.__getitem__)
    return sorted((match for match in found if match.nodes), key=lambda match: order[match.nodes[0]])


def _parted(recorded: Recorded) -> tuple[list[Node], list[Node], list[Node]]:
    """What the forward runs, what a backward runs of it again (checkpoints), and steps of optimizers."""
    forward: list[Node] = []
    again: list[Node] = []
    steps: list[Node] = []
    for node in recorded.operations:
        scope = node.scope
        phase = scope.phase if scope is not None else FORWARD
        if phase == OPTIMIZER:
            steps.append(node)
        elif phase == BACKWARD:
            if scope is not None and scope.module_path is not None:
                again.append(node)
        else:
            forward.append(node)
    return forward, again, steps


def _weights(known: Mapping[Value, str]) -> Callable[[Value], bool]:
    def weight(value: Value) -> bool:
        role = known.get(value)
        if role is not None:
            return role == "parameter"
        spec = value.spec
        return spec is not None and len(spec.shape) <= 2 and spec.dtype.is_floating_point

    return weight


def _by_operator(canonical: Canonical) -> list[Match]:
    found = []
    for one in canonical.graph.nodes:
        for node in one.meta.get("nodes", ())[:1]:
            named = OPERATORS.get(node.op.name)
            if node.op.name == "aten::index" and len(one.args) == 2 and canonical.is_weight(one.args[0]):
                named = ("embedding", "indexed")
            if named is not None:
                nodes = list(nodes_of(canonical, [one]))
                found.append(Match(named[0], nodes, named[1] or None, {}, one.all_input_nodes, [one]))
    return found


_READS_LOGITS = {"log_softmax", "argmax", "logsumexp", "nll_loss"}
_CALCULATE = {"linear", "matmul", "conv", "grow", "embedding", "layer_norm", "write", "index_copy"}


def _heads(canonical: Canonical) -> list[Match]:
    """Linear layers that give logits: as wide as an embedding is long, or read by a loss."""
    vocabularies = {
        shape[0]
        for node in canonical.graph.nodes
        if node.target == "embedding" and (shape := node.args[0].meta.get("shape"))
    }
    asked = {value.node for value in canonical.recorded.asked}
    found = []
    for node in canonical.graph.nodes:
        if node.target != "linear" or not node.meta.get("shape"):
            continue
        width = node.meta["shape"][-1]
        if (
            any(user.target in _READS_LOGITS for user in node.users)
            or (width in vocabularies and _ends(node))
            or _is_result(node, asked)
        ):
            found.append(Match("head", list(nodes_of(canonical, [node])), None, {}, node.all_input_nodes, [node]))
    return found


def _is_result(node: fx.Node, asked: set[Node]) -> bool:
    """Whether it is asked for and read by nothing."""
    return not node.users and any(recorded in asked for recorded in node.meta["nodes"])


def _ends(node: fx.Node) -> bool:
    """Whether no layer comes behind it."""
    seen: set[fx.Node] = set()
    waiting = list(node.users)
    while waiting:
        at = waiting.pop()
        if at in seen:
            continue
        if at.target in _CALCULATE or "attention" in str(at.target) or len(seen) > _BRANCH:
            return False
        seen.add(at)
        waiting += at.users
    return True


def _residuals(canonical: Canonical) -> list[Match]:
    """Sums of something and what was made of it, with all that lies between."""
    places = {node: index for index, node in enumerate(canonical.graph.nodes)}
    found = []
    for node in canonical.graph.nodes:
        if node.target != "add":
            continue
        a, b = sorted(node.args, key=places.__getitem__)
        same = _count(a) == _count(b) == _count(node)
        if not same or canonical.is_weight(a) or len(node.meta["shape"] or ()) < 2:
            continue
        branch = _between(a, b, places)
        if branch and any(one.target in ("linear", "conv", "matmul") for one in branch):
            nodes = nodes_of(canonical, [*branch, node])
            found.append(Match("residual", list(nodes), None, {}, [a], [node]))
    return found


def _between(start: fx.Node, end: fx.Node, places: Mapping[fx.Node, int]) -> set[fx.Node]:
    """The nodes on paths from ``start`` to ``end``; empty where there are none, or too many."""
    seen: set[fx.Node] = set()
    waiting = [end]
    while waiting:
        node = waiting.pop()
        if node in seen or node is start or places[node] < places[start]:
            continue
        seen.add(node)
        if len(seen) > _BRANCH:
            return set()
        waiting += node.all_input_nodes
    reached = {start}
    for node in sorted(seen, key=places.__getitem__):
        if any(arg in reached for arg in node.all_input_nodes):
            reached.add(node)
    reached.remove(start)
    return reached if end in reached else set()


_WRITES = ("index_copy", "index_put", "write", "scatter", "slice_scatter", "copy")
_FRESH = ("zeros", "empty", "full", "new_zeros", "new_empty", "zeros_like", "empty_like")


def _caches(canonical: Canonical, known: Mapping[Value, str]) -> list[Match]:
    """What is written into memory of before, or put behind it, in a module: read by attention, or a recurrent state."""
    found = []
    for node in canonical.graph.nodes:
        grown = node.target == "grow"
        if not grown and node.target not in _WRITES:
            continue
        recorded: Node = node.meta["nodes"][0]
        if recorded.scope is None or recorded.scope.module_path is None:
            continue
        source = node.args[0]
        while isinstance(source, fx.Node) and source.target in ("grow", "part", *_WRITES):
            source = source.args[0]
        if not isinstance(source, fx.Node) or not (source.op == "placeholder" or source.target in _FRESH):
            continue
        if source.op == "placeholder" and known.get(root_of(source.meta["value"])) in ("parameter", "buffer"):
            continue
        read = _leads_to_attention(node)
        if not read and grown:
            continue
        name, variant = ("kv cache", "grown" if grown else "static") if read else ("recurrent state", "written")
        memory = [source.meta["value"].node if source.op == "placeholder" else source.meta["nodes"][0], recorded]
        found.append(Match(name, list(nodes_of(canonical, [node])), variant, {}, [source], [node], memory))
    return found


def _leads_to_attention(node: fx.Node, depth: int = 8) -> bool:
    waiting = [(node, depth)]
    while waiting:
        at, left = waiting.pop()
        for user in at.users:
            name = str(user.target)
            if name == "matmul" or "attention" in name:
                return True
            if left and name in (
                "part",
                "mul",
                "index_copy",
                "index_put",
                "write",
                "grow",
                "index",
                "add",
                "cat",
                "neg",
                "linear",
            ):
                waiting.append((user, left - 1))
    return False


def _averages(canonical: Canonical, known: Mapping[Value, str]) -> list[Match]:
    """Weights that follow parameters slowly: ``average.lerp_(parameter, 0.01)``, ``average.mul_(a).add_(p)``."""
    found = []
    for node in canonical.graph.nodes:
        if node.target not in ("lerp", "add") or len(node.args) != 2 or not node.meta["nodes"][0].op.mutates:
            continue
        recorded = node.meta["nodes"][0]
        if recorded.scope is not None and recorded.scope.module_path is not None:
            continue
        roles = [known.get(root_of(arg.meta["value"])) if arg.op == "placeholder" else None for arg in node.args]
        if all(arg.op == "placeholder" for arg in node.args) and "parameter" in roles and "gradient" not in roles:
            found.append(
                Match("moving average", list(nodes_of(canonical, [node])), None, {}, node.all_input_nodes, [node])
            )
    return found


def _optimizers(steps: Sequence[Node]) -> list[Match]:
    """Each optimizer's step, by the optimizer that made it."""
    found: dict[str | None, list[Node]] = {}
    for node in steps:
        found.setdefault(node.scope.module_type, []).append(node)
    return [Match("optimizer step", nodes, name) for name, nodes in found.items()]


def _count(node: fx.Node) -> int:
    return math.prod(node.meta.get("shape") or ())
