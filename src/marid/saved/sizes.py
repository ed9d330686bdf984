"""Whether the instructions of a saved program return what its text says, found without memory.

A file could ask for results as large as it likes. So each different call is made on meta tensors, and shapes and dtypes
are compared with those of the text, which are bounded, and which forecasts and limits of memory go by. Strides are not
compared here: that is done where results are computed, and laid out anew where they differ, so they are bounded too.
"""

from __future__ import annotations

from typing import Any

from marid.errors import WireError
from marid.frontend.infer import Request, infer
from marid.graph.analysis import analysis_of
from marid.graph.node import Node, Spec
from marid.graph.program import Constant, Instruction, ListOf, Param, Program, Slot
from marid.ops.facts import facts_of

_GAPS = 16
"""The memory that a result may take, in that of its elements."""


def is_dense(spec: Spec) -> bool:
    """Whether a tensor with that spec takes the whole of its memory, each element once."""
    if spec.offset or spec.conj or spec.neg or spec.overlaps:
        return False
    return spec.span == spec.numel


def check_sizes(program: Program, specs: tuple[Spec | None, ...], numbers: list[Any], device: int) -> None:
    """Raise ``WireError`` for a call that cannot be made, or that returns something else than ``specs``, by slot."""
    seen: set[Any] = set()
    for slot, root in analysis_of(program).roots.items():
        spec = specs[slot]
        if slot == root and spec is not None and spec.numel and spec.span + spec.offset > _GAPS * (spec.numel + _GAPS):
            raise WireError(f"the tensor %{slot} takes much more memory than its elements")
    for index, instruction in enumerate(program.instructions):
        call = _Call(instruction, specs, numbers)
        results = tuple([(one.path, specs[one.slot]) for one in instruction.results])
        key = (instruction.op.func, *call.key, results)
        if key not in seen:
            seen.add(key)
            try:
                _check(instruction, call, results, device)
            except WireError as error:
                raise WireError(f"instruction {index} ({instruction.op}): {error}") from None


def _check(instruction: Instruction, call: _Call, results: tuple[Any, ...], device: int) -> None:
    op = instruction.op
    named = dict(call.kwargs)
    request = Request(op.func, call.args, named, list(call.values), call.same, device, False, op.view, op.mutates)
    try:
        rule = infer(request)
    except NotImplementedError:
        return  # nothing is known of it before it runs
    except Exception as error:  # whatever its meta kernel raises, the call is none
        if facts_of(op.func).shaped_by_sizes:
            return  # their meta kernels refuse what kernels take
        raise WireError(f"it cannot be called so: {type(error).__name__}: {str(error)[:200]}") from None
    if rule.eager is not None:
        return
    found = {out.path: out.spec for out in rule.outs}
    for path, spec in results:
        known = found.get(path)
        if spec is not None and (known is None or known.shape != spec.shape or known.dtype is not spec.dtype):
            raise WireError(f"it returns {known}, and the program says {spec}")


class _Call:
    """An instruction as ``infer`` takes it, and what decides that."""

    def __init__(self, instruction: Instruction, specs: tuple[Spec | None, ...], numbers: list[Any]) -> None:
        self._specs = specs
        self._numbers = numbers
        self._by_slot: dict[int, Node] = {}
        self.values: list[Node] = []
        self.same: list[int] = []
        self._slots: list[int] = []
        self.key: list[Any] = []
        self.args = tuple([self._of(arg) for arg in instruction.args])
        self.kwargs = [(name, self._of(arg)) for name, arg in instruction.kwargs]
        self.key += [name for name, _ in self.kwargs]

    def _of(self, arg: Any) -> Any:
        if isinstance(arg, Slot):
            return self._tensor(arg.index)
        if isinstance(arg, ListOf):
            self.key.append(len(arg.items))
            return tuple([self._of(item) for item in arg.items])
        if isinstance(arg, Param) and arg.draw:
            return None
        assert isinstance(arg, (Param, Constant))
        value = self._numbers[arg.index] if isinstance(arg, Param) else arg.value
        self.key.append((type(value), repr(value)))
        return value

    def _tensor(self, slot: int) -> Node:
        spec = self._specs[slot]
        if spec is None:
            raise WireError("it reads a result of which nothing is said")
        node = self._by_slot.setdefault(slot, Node(0, None, None, None, spec, None, None, None))
        self.same.append(self._slots.index(slot) if slot in self._slots else len(self._slots))
        self._slots.append(slot)
        self.values.append(node)
        self.key += [spec, self.same[-1]]
        return node
