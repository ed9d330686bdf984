"""Operators on a device that is not the CPU, for programs that were recorded as the CPU runs them.

Most are called as they are. Random ones are drawn on the host, from the CPU's stream: a recorded draw is a place in the
stream of PyTorch's CPU generator (``graph/twister.py``), and no other device can give the numbers that are there. The
CPU's attention is written out. What else only the CPU has (``mkldnn_rnn_layer``, ``histogram``) is computed on the
host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from marid.graph.node import Operation
from marid.ops.facts import facts_of

__all__ = ["HostOperator", "WrittenOut", "operator_on"]

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
        written = dict(zip(formals, facts_of(self.func).written, strict=True))
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
