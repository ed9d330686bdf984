"""What passes ask for and promise: each condition is a function that says what is wrong, or None."""

from __future__ import annotations

from collections.abc import Callable

from marid.execute.compiled.eligibility import admissible
from marid.execute.compiled.passes.rewriter import Rewriter, look, op_of, results_of, val_of
from marid.execute.compiled.passes.storages import Storages
from marid.ops.facts import facts_of

Condition = Callable[[Rewriter], str | None]


def well_formed(rewriter: Rewriter) -> str | None:
    """FX's own rules: every argument is made before it is used, and belongs to this graph."""
    try:
        rewriter.graph.lint()
    except RuntimeError as error:
        return str(error)
    return None


def writes_kept(rewriter: Rewriter) -> str | None:
    """Nothing that writes was added, removed or moved past another write."""
    same = rewriter.writes() == rewriter.recorded_writes
    return None if same else "an operation that writes was added, removed or moved"


def outputs_apart(rewriter: Rewriter) -> str | None:
    """The outputs are as many tensors as were recorded, laid out as these were, each all of some memory of its own."""
    outputs, recorded = rewriter.outputs(), rewriter.recorded_outputs
    storages = Storages(rewriter)
    memory = [storages.of(node) for node in outputs]
    if len(outputs) != len(recorded) or len(set(memory)) != len(memory):
        return "the outputs are not one tensor each"
    for node, own, before in zip(outputs, memory, recorded, strict=True):
        if own.op == "placeholder" or node.meta["val"].numel() != own.meta["val"].numel():
            return f"the output {node} is not computed"
        if look(node) != before:
            return f"the output {node} is not laid out as it was recorded"
    return None


def admitted(rewriter: Rewriter) -> str | None:
    """Only operators that parts may have: compiled code of others would do something else than ATen's kernels."""
    for node in rewriter.calls():
        tensors = [val_of(other) for other in (*node.all_input_nodes, *[item for _, item in results_of(node)])]
        op, dtypes = op_of(node), [tensor.dtype for tensor in tensors if tensor is not None]
        if not facts_of(op.func).made_by_passes and not admissible(op, dtypes):
            return f"{op.name} is not compiled"
    return None


ALWAYS: tuple[Condition, ...] = (well_formed, writes_kept, outputs_apart, admitted)


def violation(rewriter: Rewriter, conditions: tuple[Condition, ...]) -> str | None:
    """What is wrong with a graph, or None."""
    for condition in conditions:
        wrong = condition(rewriter)
        if wrong is not None:
            return f"{condition.__name__}: {wrong}"
    return None
