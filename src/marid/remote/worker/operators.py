"""Which operators a worker runs: those of ATen and of Marid in a list, and those of modules it was told to import.

An operator is named ``namespace.name.overload``. It must be in the list (``admitted.py``), or in a namespace that an
import has added, and its arguments and results must be of kinds that can be sent. One whose kernel trusts its arguments
runs behind a check of them (``checks/``): what is called, the ``target`` of its operation, is an operator of a
namespace of its own with the same schema. What the operation is, and so what is known of it, stays. Nothing else of
PyTorch can be named.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from marid.errors import WireError
from marid.graph.node import Operation
from marid.graph.program import operation_of
from marid.remote.worker.admitted import is_admitted
from marid.remote.worker.checks import CHECKS

_NAME = re.compile(r"[A-Za-z_]\w{0,63}\.[A-Za-z_]\w{0,127}\.[A-Za-z_]\w{0,127}", re.ASCII)

_ARGUMENTS = {
    *("Tensor", "Optional[Tensor]", "List[Tensor]", "List[Optional[Tensor]]", "Optional[List[Tensor]]"),
    *("number", "Optional[number]", "int", "Optional[int]", "float", "Optional[float]", "bool", "Optional[bool]"),
    *("str", "Optional[str]", "List[int]", "Optional[List[int]]", "List[float]", "Optional[List[float]]"),
    *("List[bool]", "List[number]", "SymInt", "Optional[SymInt]", "List[SymInt]", "Optional[List[SymInt]]"),
    *("ScalarType", "Optional[ScalarType]", "Layout", "Optional[Layout]", "MemoryFormat", "Optional[MemoryFormat]"),
    *("Device", "Optional[Device]", "Generator", "Optional[Generator]", "SymBool", "SymFloat"),
}
_RESULTS = {"Tensor", "Optional[Tensor]", "List[Tensor]", "number", "int", "float", "bool", "SymInt", "SymFloat"}

_TAGS = {torch.Tag.nondeterministic_seeded, torch.Tag.inplace_view}
_INSIDE = {"ScalarType": torch.dtype, "Layout": torch.layout, "MemoryFormat": torch.memory_format}
_INSIDE |= {"Device": torch.device, "Generator": torch.Generator}
"""What a call must not have a number for."""
_CHECKED = "marid_checked"
_library = torch.library.Library(_CHECKED, "DEF")
_defined: set[str] = set()
_LISTED = {"aten", "marid"}
_namespaces = {*_LISTED, "torch_nn"}
_HOMES = {"torch_nn": "torch.nn.modules.linear_cross_entropy"}
"""Modules of PyTorch that define operators when they are imported, which PyTorch does when it needs them."""


def admit_namespace(name: str) -> None:
    """Let the operators of ``torch.ops.<name>`` be named."""
    _namespaces.add(name)
    operator_named.cache_clear()


@contextlib.contextmanager
def also_admitted(names: Iterable[str]) -> Iterator[None]:
    """Inside, the operators of ``torch.ops.<name>`` can be named too."""
    added = {*names} - _namespaces
    _namespaces.update(added)
    operator_named.cache_clear()
    try:
        yield
    finally:
        _namespaces.difference_update(added)
        operator_named.cache_clear()


@functools.lru_cache(16384)
def operator_named(name: str) -> Operation:
    """The operation of that name, always the same object. Raises ``WireError`` for one that is not admitted."""
    if not _NAME.fullmatch(name):
        raise WireError("an operator's name is not of the form namespace.name.overload")
    namespace, base, overload = name.split(".")
    if namespace not in _namespaces:
        raise WireError(f"operators of {namespace!r} are not admitted")
    if namespace in _HOMES and importlib.util.find_spec(_HOMES[namespace]) is not None:
        importlib.import_module(_HOMES[namespace])
    if overload.startswith("__") or not torch._C._dispatch_has_kernel(_qualified(namespace, base, overload)):
        raise WireError(f"there is no operator {name}")
    func = getattr(getattr(getattr(torch.ops, namespace), base), overload, None)
    if not isinstance(func, torch._ops.OpOverload):
        raise WireError(f"there is no operator {name}")
    unfit = [a.name for a in func._schema.arguments if kind_of(a) not in _ARGUMENTS]
    if unfit or any(str(r.type) not in _RESULTS for r in func._schema.returns):
        raise WireError(f"operator {name} takes or returns what cannot be sent")
    if namespace in _LISTED and not is_admitted(func):
        raise WireError(f"operator {name} is not admitted: it is not in the list of what is known to be safe")
    check = CHECKS.get(base) if namespace in _LISTED else None
    return operation_of(func, None if check is None else _checked(func, check))


def kind_of(formal: Any) -> str:
    """The type of an argument in a schema, by which numbers are told from what PyTorch has as numbers only inside:
    dtypes, layouts and memory formats, which it does not check."""
    return str(formal.real_type)


def check_call(op: Operation, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> None:
    """Raise ``WireError`` for a number in the place of a dtype, a layout or a memory format, and for nothing in that of
    what must be there: kernels take a tensor that is none as they take others."""
    formals = op.func._schema.arguments
    named = {formal.name: formal for formal in formals}
    given = [*zip(formals, args, strict=False), *[(named.get(name), value) for name, value in kwargs]]
    for formal, value in given:
        whole = "" if formal is None else kind_of(formal)
        kind = whole.removeprefix("Optional[").removesuffix("]")
        items = value if isinstance(value, (list, tuple)) and "Optional[Tensor]" not in whole else ()
        missing = value is None and whole and not whole.startswith("Optional[")
        if missing or any(item is None for item in items):
            raise WireError(f"{op} is given nothing where it needs something")
        if kind in _INSIDE and value is not None and not isinstance(value, _INSIDE[kind]):
            raise WireError(f"{op} is given no {kind} where it takes one")


def _checked(func: Any, check: Callable[[dict[str, Any]], None]) -> Any:
    """An operator that does what ``func`` does, behind a check of its arguments."""
    base = func._schema.name.partition("::")[2]
    if base not in _defined:
        for overload in func.overloadpacket.overloads():  # all at once: PyTorch looks only once which there are
            _define(getattr(func.overloadpacket, overload), check)
        _defined.add(base)
    return getattr(getattr(getattr(torch.ops, _CHECKED), base), func._schema.overload_name or "default")


def _define(func: Any, check: Callable[[dict[str, Any]], None]) -> None:
    schema = func._schema
    formals = [(formal.name, formal.default_value) for formal in schema.arguments]
    names = [name for name, _ in formals]

    def checked(*args: Any, **kwargs: Any) -> Any:
        given = dict(formals)
        given.update(zip(names, args, strict=False))
        given.update(kwargs)
        check(given)
        return func(*args, **kwargs)

    _library.define(str(schema).partition("::")[2], tags=tuple([tag for tag in func.tags if tag in _TAGS]))
    name = schema.name.partition("::")[2] + ("." + schema.overload_name if schema.overload_name else "")
    _library.impl(name, checked, "CompositeExplicitAutograd")


def _qualified(namespace: str, base: str, overload: str) -> str:
    return f"{namespace}::{base}" + ("" if overload == "default" else f".{overload}")
