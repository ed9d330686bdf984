"""Operators on a device that is not the CPU, for programs that were recorded as the CPU runs them.

Most are called as they are. What their kernels keep for the backward becomes what the CPU's keep
(``execute/geometry.py``), and those that take it are given it as they expect it. Random ones are drawn on the host,
from the CPU's stream: a recorded draw is a place in the stream of PyTorch's CPU generator
(``graph/mersenne_twister.py``), and no other device can give the numbers that are there. The CPU's attention is written
out. What else only the CPU has (``mkldnn_rnn_layer``, ``histogram``), or has otherwise (``_embedding_bag``, the drivers
of ``linalg_lstsq``), is computed on the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from marid.graph.arguments import map_leaves
from marid.graph.node import Operation
from marid.graph.program import Constant, Instruction, Param, Program
from marid.ops.facts import facts_of

_aten: Any = torch.ops.aten
_HOST = torch.device("cpu")
_flash_attention = _aten._scaled_dot_product_flash_attention.default
_flash_attention_backward = _aten._scaled_dot_product_flash_attention_backward.default
_efficient_attention = _aten._scaled_dot_product_efficient_attention.default
_efficient_attention_backward = _aten._scaled_dot_product_efficient_attention_backward.default
_FLASH_WIDTH = 256  # of a head, at most: TORCH_CHECK in aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp
_ROWS = 32  # of logsumexp, at a time: kAlignLSE in aten/src/ATen/native/transformers/cuda/mem_eff_attention


def operator_on(device: torch.device, op: Operation, draws: bool) -> Operation:
    """What does the work of ``op`` on a device; it ``draws`` random numbers or not."""
    if device.type == _HOST.type:
        return op
    if draws or op.func in _ON_HOST:
        return HostOperator(op, device)
    written_out = _WRITTEN_OUT.get(op.func)
    if written_out is not None:
        return WrittenOut(op, written_out)
    return op if _has_kernel(op.func, device.type) else HostOperator(op, device)


@functools.cache
def _has_kernel(func: torch._ops.OpOverload, device: str) -> bool:
    return torch._C._dispatch_has_computed_kernel_for_dispatch_key(func.name(), device.upper())


def for_device(program: Program, device: torch.device) -> Program:
    """The same instructions, for tensors on ``device``."""

    def placed(instruction: Instruction) -> Instruction:
        op, named = instruction.op, instruction.kwargs
        if takes_device(op, device):
            named = (*named, ("device", Constant(device)))
        draws = any(isinstance(arg, Param) and arg.draw for arg in instruction.operands())
        return Instruction(operator_on(device, op, draws), instruction.args, named, instruction.results)

    instructions = tuple([placed(instruction) for instruction in program.instructions])
    return Program(program.key, instructions, program.input_slots, program.output_slots, program.slot_count)


def takes_device(op: Operation, device: torch.device) -> bool:
    """Whether ``op`` has to be told that what it makes is to lie on ``device``."""
    return op.factory and device.type != _HOST.type and any(a.name == "device" for a in op.func._schema.arguments)


class WrittenOut(Operation):
    """``of``, done by a function of other operators."""

    __slots__ = ()

    def __init__(self, of: Operation, function: Callable[..., Any]) -> None:
        super().__init__(of.func, of.mutates, of.view)
        self.call = function


class HostOperator(Operation):
    """``of``, for tensors on ``device``: what it is given is copied to the host, and what it has written and made is
    copied back. It can be called like the operator itself, and has its schema."""

    __slots__ = ("_called", "_device", "_schema")

    waits = True

    def __init__(self, of: Operation, device: torch.device) -> None:
        super().__init__(of.func, of.mutates, of.view, of.target)
        self._called = of.call
        self._device = device
        self._schema = of.func._schema
        self.call = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []

        def to_host(item: Any) -> Any:
            if not isinstance(item, torch.Tensor):
                return item
            copies.append((item, item.to(_HOST, copy=True)))
            return copies[-1][1]

        def to_device(item: Any) -> Any:
            if not isinstance(item, torch.Tensor):
                return item
            given = next((tensor for tensor, copy in copies if copy is item), None)
            return item.to(self._device) if given is None else given

        named = {name: _HOST if name == "device" else map_leaves(to_host, arg, list) for name, arg in kwargs.items()}
        returned = self._called(*map_leaves(to_host, args, list), **named)
        formals = [formal.name for formal in self._schema.arguments]
        written = dict(zip(formals, facts_of(self.func).written, strict=True))
        for name, arg in [*zip(formals, args, strict=False), *kwargs.items()]:
            if written[name] and isinstance(arg, torch.Tensor):
                arg.copy_(next(copy for tensor, copy in copies if tensor is arg))
        return map_leaves(to_device, returned, list)


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
    kernel = _kernel_for(is_causal, attn_mask, query, key, value)
    if kernel is not None:
        run, given = (_flash_attention, ()) if kernel == "flash" else (_efficient_attention, (None, True))
        out, logsumexp, *_ = run(query, key, value, *given, 0.0, is_causal, scale=scale)
        return out, logsumexp[..., : query.size(-2)]
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
    kernel = _kernel_for(is_causal, attn_mask, query, key, value)
    if kernel is not None:
        given = _aligned(grad_out), query, key, value
        if kernel == "flash":
            return _flash_attention_backward(
                *given, *_kept_for_flash(query, key, out, logsumexp, is_causal), scale=scale
            )
        return _efficient_attention_backward(*given, *_kept_for_efficient(out, logsumexp, is_causal), scale=scale)[:3]
    g, q, k, v, o = (_wide(one) for one in (grad_out, query, key, value, out))
    factor = _scale(query, scale)
    weights = _weights(_scores(q, k, is_causal, attn_mask, factor), logsumexp)
    inner = weights * (g @ v.transpose(-2, -1) - (g * o).sum(-1, keepdim=True)) * factor
    found = inner @ k, inner.transpose(-2, -1) @ q, weights.transpose(-2, -1) @ g
    return tuple([one.to(query.dtype) for one in found])


def _kernel_for(is_causal: bool, mask: torch.Tensor | None, *tensors: torch.Tensor) -> str | None:
    """Which of CUDA's kernels computes the same, if one does: "flash", "efficient" or None. They take rows of 16 bytes
    side by side, and no mask here, whose rows one of them wants padded. Flash attention has no float32, and is causal
    from the last row and column on, where the CPU's is from the first ones."""
    query, key, _ = tensors
    if mask is not None or not all(one.is_cuda and one.numel() and _is_aligned(one) for one in tensors):
        return None
    if query.dtype is torch.float32:
        return "efficient"
    if query.dtype not in (torch.bfloat16, torch.float16) or query.size(-1) > _FLASH_WIDTH:
        return None
    return "efficient" if is_causal and query.size(-2) != key.size(-2) else "flash"


def _is_aligned(tensor: torch.Tensor) -> bool:
    steps = (tensor.size(-1), *tensor.stride()[:-1])
    return tensor.stride(-1) == 1 and all(step * tensor.itemsize % 16 == 0 for step in steps)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if _is_aligned(tensor) else tensor.contiguous()


def _kept_for_efficient(out: torch.Tensor, logsumexp: torch.Tensor, is_causal: bool) -> tuple[Any, ...]:
    rows = -out.size(-2) % _ROWS  # whole blocks of rows, those that there are not weighing nothing
    blocks = torch.nn.functional.pad(logsumexp, (0, rows), value=torch.inf).contiguous()
    out = out.transpose(1, 2).contiguous().transpose(1, 2)  # laid out otherwise, gradients of 16-bit types are garbage
    none = torch.zeros((), dtype=torch.int64, device=out.device)  # there is no dropout
    return None, out, blocks, none, none, 0.0, (True, True, True, False), is_causal


def _kept_for_flash(
    query: torch.Tensor, key: torch.Tensor, out: torch.Tensor, logsumexp: torch.Tensor, is_causal: bool
) -> tuple[Any, ...]:
    none = torch.zeros(2, dtype=torch.uint64, device=out.device)  # there is no dropout
    lengths = None, None, query.size(-2), key.size(-2)
    return out, logsumexp.contiguous(), *lengths, 0.0, is_causal, none, none[:0]


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _scale(query: torch.Tensor, scale: float | None) -> float:
    return query.size(-1) ** -0.5 if scale is None else scale


# --- statistics ------------------------------------------------------------------------------------------------------


def _with_wide(func: Any, names: tuple[str, ...]) -> Callable[..., Any]:
    """``func``, given the arguments of these names in float32 where they are narrower: the CPU keeps statistics in the
    dtype of the input, and the kernels of other devices demand their own."""
    places = {formal.name: index for index, formal in enumerate(func._schema.arguments)}

    def call(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        for name in names:
            if places[name] < len(given) and given[places[name]] is not None:
                given[places[name]] = _wide(given[places[name]])
            elif kwargs.get(name) is not None:
                kwargs[name] = _wide(kwargs[name])
        return func(*given, **kwargs)

    return call


_LAYER_NORM, _BATCH_NORM = _aten.native_layer_norm_backward.default, _aten.native_batch_norm_backward.default
_BATCH_NORM_UPDATED = _aten.batch_norm_backward.default

_WRITTEN_OUT: dict[Any, Callable[..., Any]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    _LAYER_NORM: _with_wide(_LAYER_NORM, ("mean", "rstd")),
    _BATCH_NORM: _with_wide(_BATCH_NORM, ("save_mean", "save_invstd")),
    _BATCH_NORM_UPDATED: _with_wide(_BATCH_NORM_UPDATED, ("save_mean", "save_var")),
}

_ON_HOST = {
    _aten._embedding_bag.default,
    _aten._embedding_bag_forward_only.default,
    _aten._embedding_bag_backward.default,
    _aten._embedding_bag_dense_backward.default,
    _aten._embedding_bag_per_sample_weights_backward.default,
    _aten.linalg_lstsq.default,
}
