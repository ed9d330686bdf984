"""``marid.first_nan``: which operator made the first NaN of what is recorded, found by doing it on copies."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map_only

from marid.api import graph
from marid.errors import LazyTensorError
from marid.frontend.materialize import pending_nodes, read_value
from marid.graph.dispatch_state import concretely
from marid.semantics.tracebacks import folded

_UNINITIALIZED = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
}


@dataclass(frozen=True, eq=False)
class FirstNan:
    """An operator whose result has a NaN, or where it was asked for an infinity, that was in none before it.

    ``operator`` as ``"aten::log"``; ``source``, ``module_path`` and ``phase`` say where it was recorded. ``count`` of
    the ``total`` elements of its results are no numbers. ``inputs`` are its tensor arguments, on the CPU, as they were
    before. With ``was_there`` it had run before, and ``inputs`` has its result.
    """

    operator: str
    module_path: str | None
    phase: str | None
    source: str | None
    count: int
    total: int
    was_there: bool
    inputs: list[torch.Tensor] = field(repr=False)
    _call: str = field(repr=False)

    def __str__(self) -> str:
        module = f" in module {self.module_path!r}" if self.module_path else ""
        before = ", which had run before" if self.was_there else ""
        place = f"{self.source or '<unknown>'}{module} ({self.phase or 'forward'}){before}"
        return f"{self.operator} at {place}: {self.count:,} of {self.total:,} elements"

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write a script that does the operation again, and beside it its inputs (read with ``weights_only=True``);
        the path of the script. Raises ``OSError``."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self.inputs, folder / "inputs.pt")
        script = folder / "reproduce.py"
        script.write_text(_SCRIPT.format(about=str(self).replace('"""', "'''").replace("\\", "/"), call=self._call))
        return script


_SCRIPT = '''"""{about}"""

from pathlib import Path

import torch

inputs = torch.load(Path(__file__).with_name("inputs.pt"), weights_only=True)
result = {call}
print(result)
'''


@folded
def first_nan(*tensors: torch.Tensor, infinite: bool = False) -> FirstNan | None:
    """The first operator whose result has a NaN (or, with ``infinite``, an infinity), of what must run for these
    tensors, or of all that is pending; None when there is none.

    It is found by running copies, operation by operation and in program order: nothing that is recorded counts as run,
    and no value changes. Ask before values are read, since what has run is forgotten; within ``marid.no_sync()``
    nothing runs ahead. Memory that nobody has written is not looked at. The values of inputs that are on workers are
    brought here.

    Raises ``TypeError`` for anything that is not a lazy tensor, ``LazyTensorError`` for a tensor with a NaN that has
    run already, and what an operation raises.
    """
    recorded = graph(*tensors)
    for tensor in tensors:
        if not pending_nodes(tensor) and _bad(read_value(tensor._value), infinite)[0]:
            raise LazyTensorError(
                "this tensor has run, and what made it is forgotten; call marid.first_nan() before its value is read, "
                "or record the step within marid.no_sync() and ask behind it"
            )
    module: Any = recorded.to_fx()
    inputs = _copies(module.inputs())
    search = _Search(module, infinite)
    try:
        with torch.no_grad(), concretely():
            search.run(*inputs)
    except _Found as found:
        return found.what
    return None


class _Found(Exception):
    def __init__(self, what: FirstNan) -> None:
        super().__init__(str(what))
        self.what = what


class _Search(torch.fx.Interpreter):
    """Runs a graph up to the first NaN, where it raises ``_Found``."""

    def __init__(self, module: torch.fx.GraphModule, infinite: bool) -> None:
        super().__init__(module)
        self._infinite = infinite

    def run_node(self, n: torch.fx.Node) -> Any:
        if n.op == "placeholder":
            result = super().run_node(n)
            self._look(n, [result], [result], "inputs[0]", was_there=True)
            return result
        if n.op != "call_function" or n.target is operator.getitem:
            return super().run_node(n)
        known = n.meta["marid"].operation_type
        func = _overload(n.target)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        writes = func is not None and func._schema.is_mutable
        given = tree_map_only(torch.Tensor, torch.Tensor.clone, (args, kwargs)) if writes else (args, kwargs)
        result = super().run_node(n)
        is_view = func is not None and any(a.alias_info and not a.alias_info.is_write for a in func._schema.arguments)
        if not is_view and known not in _UNINITIALIZED:
            made = _tensors((result, args, kwargs) if writes else result)
            self._look(n, made, _tensors(given), _called(n.target, known, *given), was_there=False)
        return result

    def _look(
        self, n: torch.fx.Node, made: list[torch.Tensor], inputs: list[torch.Tensor], call: str, was_there: bool
    ) -> None:
        once = {id(tensor): tensor for tensor in made}  # what is written in place is returned too
        counts = [_bad(tensor, self._infinite) for tensor in once.values()]
        if not any(count for count, _ in counts):
            return
        known = n.meta["marid"]
        raise _Found(
            FirstNan(
                known.operation_type,
                known.module_path,
                known.execution_phase,
                known.source,
                sum(count for count, _ in counts),
                sum(total for _, total in counts),
                was_there,
                [tensor.detach().clone() for tensor in inputs],
                call,
            )
        )


def _bad(tensor: torch.Tensor, infinite: bool) -> tuple[int, int]:
    """How many elements are no numbers, and how many there are."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 0, tensor.numel()
    bad = ~torch.isfinite(tensor) if infinite else torch.isnan(tensor)
    return int(bad.sum()), tensor.numel()


def _copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies that share memory among each other as the tensors do."""
    storages: dict[int, torch.UntypedStorage] = {}
    found = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        own = storages.setdefault(storage._cdata, storage.clone())
        copy = torch.empty(0, dtype=tensor.dtype, device="cpu")
        copy.set_(own, tensor.storage_offset(), tensor.shape, tensor.stride())
        copy = torch._C._conj(copy) if tensor.is_conj() else copy  # pyright: ignore[reportAttributeAccessIssue]
        found.append(torch.ops.aten._neg_view(copy) if tensor.is_neg() else copy)
    return found


def _tensors(item: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(item)[0] if isinstance(leaf, torch.Tensor)]


def _overload(target: Any) -> Any:
    """The operator overload that a node calls; None where it draws, and calls it with a generator."""
    return target if isinstance(target, torch._ops.OpOverload) else None


def _called(target: Any, name: str, args: Any, kwargs: Any) -> str:
    """The call as Python text, with ``inputs[i]`` in place of tensors."""
    func = _overload(target)
    namespace, _, operator = name.partition("::")
    overload = f".{func._overloadname}" if func is not None else ""
    count = iter(range(1 << 30))
    texts = [_text(arg, count) for arg in args] + [f"{key}={_text(arg, count)}" for key, arg in kwargs.items()]
    return f"torch.ops.{namespace}.{operator}{overload}({', '.join(texts)})"


def _text(arg: Any, count: Iterator[int]) -> str:
    if isinstance(arg, torch.Tensor):
        return f"inputs[{next(count)}]"
    if isinstance(arg, (list, tuple)):
        return f"[{', '.join(_text(item, count) for item in arg)}]"
    if isinstance(arg, (float, complex)) and arg * 0 != 0:  # nan and infinities have no literals
        return f"complex({str(arg)!r})" if isinstance(arg, complex) else f"float({str(arg)!r})"
    return f"torch.{arg!r}" if isinstance(arg, torch.device) else repr(arg)
