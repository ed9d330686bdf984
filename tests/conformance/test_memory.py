"""What ``ops/`` says operators do to memory, compared with what their kernels do."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from marid.graph.program import operation_of
from marid.ops import facts
from marid.ops.facts import facts_of

from . import opinfo

OPERATORS = sorted(opinfo.operators(), key=opinfo.name_of)
QUICK = 1  # sample of each operator in the ordinary run


class _Watch(TorchDispatchMode):
    """Compares each call of an ATen operator with the record: as operators come to the recorder, below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formals = func._schema.arguments
        given = [args[i] if i < len(args) else kwargs.get(a.name) for i, a in enumerate(formals)]
        before = [[_content(tensor) for tensor in _tensors(arg)] for arg in given]
        memory = [[_memory(tensor) for tensor in _tensors(arg)] for arg in given]
        returned = func(*args, **kwargs)
        for arg, blocks in zip(given, memory, strict=True):
            blocks += [_memory(tensor) for tensor in _tensors(arg)]  # what is resized may lie elsewhere now
        if func.namespace == "aten":
            self._check_writes(func, given, before)
            self._check_results(func, memory, returned)
        return returned

    def _check_writes(self, func: Any, given: list[Any], before: list[list[Any]]) -> None:
        for formal, arg, content, writes in zip(
            func._schema.arguments, given, before, facts_of(func).written, strict=True
        ):
            changed = any(_content(t) != old for t, old in zip(_tensors(arg), content, strict=True))
            shares_written = any(
                _memory(a) == _memory(b)
                for other, written in zip(given, facts_of(func).written, strict=True)
                if written
                for a in _tensors(other)
                for b in _tensors(arg)
            )
            if changed and not writes and not shares_written:
                self.wrong.add(f"{func} writes {formal.name}")

    def _check_results(self, func: Any, memory: list[list[Any]], returned: Any) -> None:
        shared = facts_of(func).shared
        results = [returned] if len(shared) == 1 else list(returned or ())
        for which, (position, result) in enumerate(zip(shared, results, strict=True)):
            for tensor in _tensors(result):
                mine = _memory(tensor)
                if mine is None:  # nothing lies in it
                    continue
                found = {index for index, blocks in enumerate(memory) if mine in blocks}
                if position is None and found:
                    self.wrong.add(f"{func}: result {which} lies in the memory of argument {min(found)}")
                elif position is not None and position not in found:
                    self.wrong.add(f"{func}: result {which} does not lie in the memory of argument {position}")
        if operation_of(func).view and any(facts_of(func).written):
            self.wrong.add(f"{func} is a view and a write")


def _tensors(arg: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(arg) if isinstance(leaf, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> Any:
    """Which block a tensor lies in; None where it has none."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return None
    storage = tensor.untyped_storage()
    return storage.data_ptr() if storage.nbytes() else None


def _content(tensor: torch.Tensor) -> Any:
    """The bytes of the elements of a tensor."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or not tensor.numel():
        return None
    storage = tensor.untyped_storage()
    return tensor.shape, ctypes.string_at(storage.data_ptr(), storage.nbytes())  # numpy's memory cannot be resized


def _run(op: opinfo.OpInfo, dtype: torch.dtype, count: int | None) -> set[str]:
    watch = _Watch()
    variants = [op, op.inplace_variant] if op.inplace_variant is not None else [op]
    for sample in itertools.islice(opinfo.samples_of(op, dtype, False), count):
        for variant in variants:
            outcomes = []
            for mode in (contextlib.nullcontext(), watch):

                def call(variant: Any = variant, sample: Any = sample, mode: Any = mode) -> Any:
                    copied = opinfo.cloned(sample)
                    with mode, torch.no_grad():
                        return opinfo.call(variant, copied)

                try:
                    outcomes.append(opinfo.outcome_of(call)[0])
                except opinfo.SparseSample:
                    break
            if outcomes == ["value", "error"]:
                watch.wrong.add(f"{op.name} raises while it is watched")
    return watch.wrong


def _check(op: opinfo.OpInfo, count: int | None) -> None:
    supported = op.supported_dtypes("cpu")
    dtypes = [dtype for dtype in (torch.float32, torch.int64) if dtype in supported][: 1 if count else 2]
    wrong = {line for dtype in dtypes for line in _run(op, dtype, count)}
    assert not wrong, "\n".join(sorted(wrong))


@pytest.mark.parametrize("op", OPERATORS, ids=opinfo.name_of)
def test_the_record_agrees_with_the_kernels(op: opinfo.OpInfo) -> None:
    """On the first samples: whose memory results lie in, and which arguments are written."""
    _check(op, QUICK)


def test_the_comparison_finds_what_is_not_in_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    said = ("writes", "views_as")
    schemas_alone = {name: {k: v for k, v in row.items() if k not in said} for name, row in facts.ROWS.items()}
    monkeypatch.setattr(facts, "ROWS", schemas_alone)
    monkeypatch.setitem(globals(), "facts_of", facts_of.__wrapped__)
    by_name = {opinfo.name_of(op): op for op in OPERATORS}
    found = {name: _run(by_name[name], torch.float32, None) for name in ("matmul", "unsafe_chunk", "native_batch_norm")}
    assert all(found.values()), found


@pytest.mark.conformance
@pytest.mark.parametrize("op", OPERATORS, ids=opinfo.name_of)
def test_the_record_agrees_with_the_kernels_on_every_sample(op: opinfo.OpInfo) -> None:
    _check(op, None)
