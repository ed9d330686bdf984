"""Which operators a worker runs, and how they run on its device.

An operator is named ``namespace.name.overload``. It must be in the list (``admitted.py``), or in a namespace that an
import has added, and its arguments and results must be of kinds that can be sent. One whose kernel trusts its arguments
runs behind a check of them (``checks.py``): what is called, the ``target`` of its operation, is an operator of a
namespace of its own with the same schema. What the operation is, and so what is known of it, stays. Nothing else of
PyTorch can be named.

Programs are recorded as the CPU runs them. On another device most operators are called as they are. Random ones are
drawn on the host, from the CPU's stream: a recorded draw is a place in the stream of PyTorch's CPU generator
(``graph/twister.py``), and no other device can give the numbers that are there. The CPU's attention is written out.
What else only the CPU has (``mkldnn_rnn_layer``, ``histogram``) is computed on the host.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
from collections.abc import Callable
from typing import Any

import torch

from marid.errors import WireError
from marid.graph.node import Operation
from marid.graph.operators import operation_of, written_arguments
from marid.remote.worker.admitted import is_admitted
from marid.remote.worker.checks import CHECKS

__all__ = ["HostOperator", "WrittenOut", "admit_namespace", "check_call", "kind_of", "operator_named", "operator_on"]

# --- which operators there are ---------------------------------------------------------------------------------------


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
    """Raise ``WireError`` for a number in the place of a dtype, a layout or a memory format."""
    formals = op.func._schema.arguments
    named = {formal.name: formal for formal in formals}
    given = [*zip(formals, args, strict=False), *[(named.get(name), value) for name, value in kwargs]]
    for formal, value in given:
        kind = "" if formal is None else kind_of(formal).removeprefix("Optional[").removesuffix("]")
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


# --- on a device that is not the CPU ---------------------------------------------------------------------------------


_HOST = torch.device("cpu")


def operator_on(device: torch.device, op: Operation, draws: bool) -> Operation:
    """What does the work of ``op`` on a device; it ``draws`` random numbers or not."""
    if device.type == _HOST.type:
        return op
    if draws:
        return HostOperator(op, device)
    written_out = _WRITTEN_OUT.get(op.func)
    if written_out is not None:
        return WrittenOut(op, written_out)
    return op if _has_kernel(op.func, device.type) else HostOperator(op, device)


@functools.cache
def _has_kernel(func: torch._ops.OpOverload, device: str) -> bool:
    return torch._C._dispatch_has_computed_kernel_for_dispatch_key(func.name(), device.upper())


class WrittenOut(Operation):
    """``of``, done by a function of other operators."""

    __slots__ = ()

    def __init__(self, of: Operation, function: Callable[..., Any]) -> None:
        super().__init__(of.func, of.mutates, of.view)
        self.call = function


class HostOperator(Operation):
    """``of``, for tensors on ``device``: what it is given is copied to the host, and what it has written and made is
    copied back. It can be called like the operator itself, and has its schema."""

    __slots__ = ("_device", "_schema")

    waits = True

    def __init__(self, of: Operation, device: torch.device) -> None:
        super().__init__(of.func, of.mutates, of.view, of.target)
        self._device = device
        self._schema = of.func._schema
        self.call = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []

        def to_host(item: Any) -> Any:
            if isinstance(item, (list, tuple)):
                return [to_host(part) for part in item]
            if not isinstance(item, torch.Tensor):
                return item
            copies.append((item, item.to(_HOST, copy=True)))
            return copies[-1][1]

        def to_device(item: Any) -> Any:
            if isinstance(item, (list, tuple)):
                return [to_device(part) for part in item]
            if not isinstance(item, torch.Tensor):
                return item
            given = next((tensor for tensor, copy in copies if copy is item), None)
            return item.to(self._device) if given is None else given

        named = {name: _HOST if name == "device" else to_host(arg) for name, arg in kwargs.items()}
        returned = self.target._op(*[to_host(arg) for arg in args], **named)
        formals = [formal.name for formal in self._schema.arguments]
        written = dict(zip(formals, written_arguments(self.func), strict=True))
        for name, arg in [*zip(formals, args, strict=False), *kwargs.items()]:
            if written[name] and isinstance(arg, torch.Tensor):
                arg.copy_(next(copy for tensor, copy in copies if tensor is arg))
        return to_device(returned)


# --- attention -------------------------------------------------------------------------------------------------------


def _scores(
    query: torch.Tensor, key: torch.Tensor, is_causal: bool, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    scores = query @ key.transpose(-2, -1) * scale
    if is_causal:
        rows, columns = scores.shape[-2:]
        later = torch.ones(rows, columns, dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
    return scores


def _weights(scores: torch.Tensor, logsumexp: torch.Tensor) -> torch.Tensor:
    """Softmax of scores; rows of which nothing is attended to are 0 (their ``logsumexp`` is 0 then)."""
    return (scores - logsumexp.unsqueeze(-1)).exp()


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,  # noqa: ARG001  (always 0: the CPU's kernel has none)
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``_scaled_dot_product_flash_attention_for_cpu``; (batch, heads, length, width) each."""
    q, k, v = (_wide(one) for one in (query, key, value))
    scores = _scores(q, k, is_causal, attn_mask, _scale(query, scale))
    logsumexp = scores.logsumexp(-1)
    logsumexp = logsumexp.masked_fill(logsumexp == -torch.inf, 0)
    return (_weights(scores, logsumexp) @ v).to(query.dtype), logsumexp


def _attention_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    dropout_p: float,  # noqa: ARG001
    is_causal: bool,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, ...]:
    """Its backward, of the weights made again (Dao et al., "FlashAttention", 2022, appendix B.4)."""
    g, q, k, v, o = (_wide(one) for one in (grad_out, query, key, value, out))
    factor = _scale(query, scale)
    weights = _weights(_scores(q, k, is_causal, attn_mask, factor), logsumexp)
    inner = weights * (g @ v.transpose(-2, -1) - (g * o).sum(-1, keepdim=True)) * factor
    found = inner @ k, inner.transpose(-2, -1) @ q, weights.transpose(-2, -1) @ g
    return tuple([one.to(query.dtype) for one in found])


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _scale(query: torch.Tensor, scale: float | None) -> float:
    return query.size(-1) ** -0.5 if scale is None else scale


_WRITTEN_OUT: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
}
