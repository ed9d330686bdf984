"""The invariant of the executor: the result of every kernel has the geometry that was recorded for it.

What an operation returns is predicted when it is recorded, and the user has seen it by the time it runs. So size,
strides, offset, dtype, the two bits of complex views, and in whose memory a result lies, are compared where they are
computed: by ``native/execute.cpp`` for tables, here for programs that run in Python. A result that differs is laid out
as recorded, or raises where that cannot be; it is counted, and the recorder is told, so that the next recording of
such a call is exact.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from marid.errors import LazyTensorError
from marid.graph.analysis import analysis_of
from marid.graph.arguments import leaves
from marid.graph.node import Node, Operation, Spec, strides_alike
from marid.graph.program import Instruction, Program, Result
from marid.native import module
from marid.ops.facts import facts_of
from marid.report.stats import counters
from marid.semantics.scopes import text_of_site


@dataclass(frozen=True, slots=True)
class Misprediction:
    """A result that was recorded otherwise than its kernel made it.

    ``recorded`` and ``seen`` are its specs; ``shares`` says that it lies in memory that it was not to share, or the
    other way round. ``specs`` and ``params`` are those of the run, and ``node`` stands for the instruction.
    """

    node: Node
    instruction: Instruction
    path: tuple[int, ...]
    recorded: Spec
    seen: Spec
    shares: bool
    specs: tuple[Spec | None, ...]
    params: list[Any]

    def __str__(self) -> str:
        return f"recorded {self.recorded}, computed {self.seen}" + (" in other memory" if self.shares else "")


_listeners: list[Callable[[Misprediction], None]] = []


def when_mispredicted(listener: Callable[[Misprediction], None]) -> None:
    """Call ``listener`` with each misprediction that is found."""
    _listeners.append(listener)


class Noted:
    """Context manager: the mispredictions that are found inside, on this thread; not to be nested."""

    def __enter__(self) -> list[Misprediction]:
        _on_thread.noted = found = []
        return found

    def __exit__(self, *_: object) -> None:
        _on_thread.noted = None


class _OnThread(threading.local):
    noted: list[Misprediction] | None = None


_on_thread = _OnThread()


def report(misprediction: Misprediction) -> None:
    """Count a misprediction at the line of its operation, and tell the recorder."""
    site = text_of_site(misprediction.node.site)
    counters.count_misprediction(misprediction.instruction.op.name, site, str(misprediction))
    for listener in _listeners:
        listener(misprediction)
    if _on_thread.noted is not None:
        _on_thread.noted.append(misprediction)


def settle(
    program: Program,
    index: int,
    node: Node,
    tensors: dict[int, Any],
    specs: tuple[Spec | None, ...],
    params: list[Any],
) -> None:
    """Lay the results of instruction ``index`` out as recorded where they are not, among ``tensors`` by slot. What does
    not keep its geometry is left alone. Raises ``LazyTensorError`` where that cannot be."""
    instruction, analysis = program.instructions[index], analysis_of(program)
    shared = analysis.shared[index]
    given = [tensors[slot] for slot in analysis.reads[index]]
    for result in instruction.results:
        spec, tensor = specs[result.slot], tensors[result.slot]
        base = tensors[shared[result.slot]] if result.slot in shared else None
        if spec is None or result.slot in analysis.unsettled or agrees(tensor, spec, base, given):
            continue
        owned = (base is not None or all(tensor is not one for one in leaves(given))) and _has_its_memory(tensor, base)
        if tensor.device.type == "cpu":  # kernels of other devices may lay out otherwise than the CPU's
            report(_misprediction(node, instruction, result, tensor, spec, owned, specs, params))
        elif result.path and result.path[0]:
            tensor = _as_on_the_cpu(tensor, spec)
        try:
            tensors[result.slot] = _laid_out(tensor, spec, base, owned, instruction.op)
        except LazyTensorError:
            for one in instruction.results:  # what is not what was recorded is nobody's value
                del tensors[one.slot]
            raise
    for slot in analysis.resized[index]:
        spec, tensor = specs[slot], tensors[slot]
        if spec is not None and not agrees(tensor, spec, tensor, given):
            tensors[slot] = _laid_out(tensor, spec, tensor, True, instruction.op)


def _misprediction(
    node: Node,
    instruction: Instruction,
    result: Result,
    tensor: torch.Tensor,
    spec: Spec,
    owned: bool,
    specs: tuple[Spec | None, ...],
    params: list[Any],
) -> Misprediction:
    seen = Spec(*_placement(tensor), tensor.dtype, spec.device, tensor.is_conj(), tensor.is_neg())
    return Misprediction(node, instruction, result.path, spec, seen, not owned, specs, params)


def _as_on_the_cpu(tensor: torch.Tensor, spec: Spec) -> torch.Tensor:
    """What another device's kernel keeps for its backward, in place of what the CPU's keeps: statistics in another
    precision, or not at all."""
    if tensor.dtype is not spec.dtype and tensor.is_floating_point() and spec.dtype.is_floating_point:
        tensor = tensor.to(spec.dtype)
    if tuple(tensor.shape) != spec.shape and (spec.numel == 0 or tensor.numel() == 0):
        tensor = tensor.new_zeros(spec.shape)
    return tensor


def _laid_out(
    tensor: torch.Tensor, spec: Spec, base: torch.Tensor | None, owned: bool, made_by: Operation
) -> torch.Tensor:
    """``tensor`` with the geometry ``spec``: a view of ``base``, or with memory of its own. Raises ``LazyTensorError``
    where that would be another tensor."""
    same = tensor.dtype is spec.dtype and tensor.is_conj() == spec.conj and tensor.is_neg() == spec.neg
    if same and tuple(tensor.shape) == spec.shape:
        if owned and tensor.storage_offset() == spec.offset and strides_alike(tensor.stride(), spec):
            return torch.as_strided(tensor, spec.shape, spec.stride, spec.offset)
        if base is None and not spec.overlaps:
            return _copy(tensor, spec)
    fault = "This is a fault of Marid's, please report it"
    if facts_of(made_by.func).of_others:
        fault = "Its fake kernel and its kernel disagree"
    raise LazyTensorError(
        f"its result is not what was recorded ({spec} recorded, {list(tensor.shape)} of {tensor.dtype} with strides "
        f"{list(tensor.stride())} computed{'' if owned else ', in other memory'}). {fault}; "
        "recorded once more, the operation is recorded as it was computed now"
    )


def _copy(tensor: torch.Tensor, spec: Spec) -> torch.Tensor:
    block = torch.empty(spec.offset + spec.span, dtype=spec.dtype, device=tensor.device)
    made = block.as_strided(spec.shape, spec.stride, spec.offset)
    made = torch.ops.aten._conj.default(made) if spec.conj else made
    made = torch.ops.aten._neg_view.default(made) if spec.neg else made
    return made.copy_(tensor)


def agrees(tensor: Any, spec: Spec, base: torch.Tensor | None, given: list[Any]) -> bool:
    """Whether a result has the geometry ``spec``, as a view of ``base``, or as a tensor of its own: none of those that
    were ``given``."""
    return module.agrees(tensor, spec, base, given)


def _placement(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


def _has_its_memory(tensor: torch.Tensor, base: torch.Tensor | None) -> bool:
    """Whether a result lies in memory of its own, or in that of what it is a view of."""
    storage = tensor.untyped_storage()
    if base is not None:
        return storage._cdata == base.untyped_storage()._cdata
    return torch._C._storage_Use_Count(storage._cdata) == 2  # the tensor, and `storage`


module.configure_geometry(Spec)
