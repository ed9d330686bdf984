"""The operators of RWKV-7, ``torch.ops.marid.*``: what each of them is, in plain PyTorch.

On the CPU ``native/rwkv7.cpp`` and ``native/gemm/fast_linear.cpp`` compute the same (``ops/own_operators.py``).

The model is BlinkDL's (https://github.com/BlinkDL/RWKV-LM, RWKV-v7); the operators' names and parts are those of
web-rwkv. Shapes are written for ``B`` sequences of ``T`` tokens, width ``C`` and ``H`` heads of size ``N``. Tensors of
any floating-point types can be given together: they are promoted to one, and sums in half precision are taken in
float32. Where there is an argument ``lengths`` (``[B]``, integers), sequence ``b`` has that many tokens; what is behind
them changes no state. Under autocast the operators take their operands as they are.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from marid.ops.own_operators import ACTIVATIONS, define, of_function

CHUNK = 16
"""Tokens whose part of the recurrence is computed as products of matrices. A state loses at most ``exp(-0.61)`` of
itself at a token, so 16 of them stay far inside of float32."""


def _common(*tensors: Tensor) -> torch.dtype:
    """The type of the result: the one to which all are promoted."""
    if not all(tensor.is_floating_point() and tensor.dim() >= 1 for tensor in tensors):
        raise RuntimeError("RWKV-7's operators take tensors of floating-point numbers with a dimension at least")
    return functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors])


def _of_sums(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype is torch.float64 else torch.float32


def _need(holds: bool, what: str) -> None:
    if not holds:
        raise RuntimeError(what)


# --- element by element ----------------------------------------------------------------------------------------------


def lerp(a: Tensor, b: Tensor, factor: Tensor, reversed: bool = False) -> Tensor:
    """``a + (b - a) * factor``, of shapes that go together; ``reversed`` exchanges ``a`` and ``b``.

    In RWKV-7: the values of a layer on the way to those of the first (``v + (v_first - v) * sigmoid(...)``).
    """
    dtype = _common(a, b, factor)
    first, second, share = (tensor.to(_of_sums(dtype)) for tensor in ((b, a, factor) if reversed else (a, b, factor)))
    return (first + (second - first) * share).to(dtype)


def blend(lhs: Tensor, rhs: Tensor, factor: Tensor) -> Tensor:
    """``lhs * factor + rhs * (1 - factor)``, of shapes that go together. From web-rwkv (``blend_tensor``)."""
    dtype = _common(lhs, rhs, factor)
    first, second, share = (tensor.to(_of_sums(dtype)) for tensor in (lhs, rhs, factor))
    return (first * share + second * (1 - share)).to(dtype)


def l2_norm(x: Tensor, groups: int = 1, eps: float = 1e-12) -> Tensor:
    """Each row, or each of ``groups`` parts of a row, divided by its length, which counts as ``eps`` at least.

    In RWKV-7: ``F.normalize((k * k_k).view(..., H, N), dim=-1)``, with ``H`` groups.
    """
    dtype = _common(x)
    _need(groups > 0 and x.shape[-1] % groups == 0, f"l2_norm(): the last dimension does not have {groups} groups")
    parts = x.to(_of_sums(dtype)).unflatten(-1, (groups, -1)) if x.shape[-1] else x.to(_of_sums(dtype)).unsqueeze(-1)
    return torch.nn.functional.normalize(parts, dim=-1, eps=eps).reshape(x.shape).to(dtype)


def squared_relu(x: Tensor) -> Tensor:
    """``relu(x) ** 2``: the activation of RWKV's channel mixing."""
    dtype = _common(x)
    return torch.relu(x.to(_of_sums(dtype))).square().to(dtype)


def add_activate(a: Tensor, b: Tensor, of_a: str = "none", of_b: str = "none", of_sum: str = "none") -> Tensor:
    """``of_sum(of_a(a) + of_b(b))``, of shapes that go together; activations by the names in ``ACTIVATIONS``.

    In RWKV-7: ``sigmoid(a0 + x)``. Raises ``ValueError`` for an unknown activation.
    """
    dtype = _common(a, b)
    for name in (of_a, of_b, of_sum):
        if name not in ACTIVATIONS:
            raise ValueError(f"add_activate() does not know the activation '{name}'")
    total = ACTIVATIONS[of_a](a.to(_of_sums(dtype))) + ACTIVATIONS[of_b](b.to(_of_sums(dtype)))
    return ACTIVATIONS[of_sum](total).to(dtype)


def control_k(k: Tensor, a: Tensor, k_a: Tensor) -> Tensor:
    """``k * (1 + (a - 1) * k_a)``: keys ``[..., C]`` by the rates ``a`` (``[..., C]``) at which they are learned.

    ``k_a`` is ``[C]``. In BlinkDL's code a line of ``TMix``; in web-rwkv ``control_k_v7``.
    """
    dtype = _common(k, a, k_a)
    keys, rates, share = (tensor.to(_of_sums(dtype)) for tensor in (k, a, k_a))
    return (keys * (1 + (rates - 1) * share)).to(dtype)


def fast_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "none") -> Tensor:
    """``activation(F.linear(x, weight, bias))``, with sums in an order of its own.

    ``x`` is ``[..., K]``, the weight ``[N, K]``, the bias ``[N]``, all of one type; activations have the names in
    ``ACTIVATIONS``. The CPU multiplies a few rows, as in decoding, at the speed at which memory gives the weight. (The
    bits of ``F.linear`` are those of ``linear_activation``.) Raises ``ValueError`` for an unknown activation.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"fast_linear() does not know the activation '{activation}'")
    _need(x.dim() >= 1 and weight.dim() == 2, "fast_linear() takes x of a dimension at least and a weight of two")
    return ACTIVATIONS[activation](torch.nn.functional.linear(x, weight, bias))


# --- along tokens ----------------------------------------------------------------------------------------------------


def token_shift(x: Tensor, shift: Tensor, mix: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Each token on the way to the one before it, in several ways, and the last one for the next call.

    ``x`` is ``[B, T, C]``, ``shift`` (``[B, C]``) the token before the first, ``mix`` ``[M, C]``. Returns
    ``x + (before - x) * mix[m]`` for each ``m``, ``[M, B, T, C]``, and ``[B, C]``. From BlinkDL's ``time_shift``; in
    web-rwkv ``token_shift``, which has a cursor in place of ``lengths``.
    """
    dtype = _common(x, shift, mix)
    _need(x.dim() == 3 and mix.dim() == 2, "token_shift() takes x of [batch, tokens, width] and mix of [count, width]")
    batch, _, width = x.shape
    _need(shift.shape == (batch, width) and mix.shape[1] == width, "token_shift(): the sizes do not go together")
    all_of_them = torch.cat([shift.to(dtype).unsqueeze(1), x.to(dtype)], 1)
    now, before = all_of_them[:, 1:].to(_of_sums(dtype)), all_of_them[:, :-1].to(_of_sums(dtype))
    mixed = now + (before - now) * mix.to(_of_sums(dtype))[:, None, None]
    if lengths is None:
        return mixed.to(dtype), all_of_them[:, -1].clone()
    index = _counts(lengths, batch).clamp(0, x.shape[1])[:, None, None].expand(batch, 1, width)
    return mixed.to(dtype), all_of_them.gather(1, index).squeeze(1)


def _counts(lengths: Tensor, batch: int) -> Tensor:
    _need(not lengths.is_floating_point() and lengths.dtype is not torch.bool, "lengths must be integers")
    _need(lengths.shape == (batch,), f"lengths must have the shape [{batch}], but has {list(lengths.shape)}")
    return lengths.long()


def pack_kvakk(k: Tensor, v: Tensor, a: Tensor, kk: Tensor, heads: int) -> Tensor:
    """Keys, values, rates and normalised keys, ``[..., C]`` each, head by head: ``[..., H, 4, N]``.

    What ``time_mix_v7`` reads for a head and a token then lies together. In web-rwkv ``pack_kvakk``.
    """
    dtype = _common(k, v, a, kk)
    _need(heads > 0 and k.shape[-1] % heads == 0, f"pack_kvakk(): the last dimension does not have {heads} heads")
    _need(k.shape == v.shape == a.shape == kk.shape, "pack_kvakk(): the sizes do not go together")
    shape = (*k.shape[:-1], heads, k.shape[-1] // heads)
    return torch.stack([tensor.to(dtype).reshape(shape) for tensor in (k, v, a, kk)], -2)


def time_first_v7(y: Tensor, r: Tensor, packed: Tensor, bonus: Tensor) -> Tensor:
    """``y`` and what a token sees of itself: for each head ``y + sum(r * k * bonus) * v``.

    ``y`` and ``r`` are ``[..., C]``, ``packed`` is what ``pack_kvakk`` gives, ``bonus`` (BlinkDL's ``r_k``) ``[H, N]``.
    Returns ``[..., C]``.
    """
    dtype = _common(y, r, packed, bonus)
    _need(bonus.dim() == 2 and y.shape[-1] == bonus.numel(), "time_first_v7(): the sizes do not go together")
    shape = (*y.shape[:-1], *bonus.shape)
    _need(
        r.shape == y.shape and packed.shape == (*shape[:-1], 4, shape[-1]),
        "time_first_v7(): the sizes do not go together",
    )
    wide = _of_sums(dtype)
    k, v = packed[..., 0, :].to(wide), packed[..., 1, :].to(wide)
    share = (r.to(wide).reshape(shape) * k * bonus.to(wide)).sum(-1, keepdim=True)
    return (y.to(wide).reshape(shape) + share * v).reshape(y.shape).to(dtype)


def time_mix_v7(
    r: Tensor, w: Tensor, packed: Tensor, state: Tensor, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """RWKV-7's recurrence. For each head, with a state ``s`` of ``N`` keys by ``N`` values, and token by token::

        s = decay[:, None] * s - (kk * a)[:, None] * (kk @ s) + k[:, None] * v
        y = r @ s

    where ``decay = exp(-exp(-0.5) * sigmoid(w))``. ``r`` and ``w`` are ``[B, T, C]``, ``packed`` is what ``pack_kvakk``
    gives (``[B, T, H, 4, N]``), ``state`` is ``[B, H, N, N]``, keys before values (BlinkDL's, transposed). Returns
    ``y`` like ``r``, which is zero behind ``lengths``, and the new state, in float32 (float64 where all is).

    In plain PyTorch it is computed in chunks of ``CHUNK`` tokens. With ``D`` the product of the decays so far, all that
    tokens of a chunk remove solves a system of equations, ``(I + tril(A Bᵀ, -1)) U = A s + tril(A Kᵀ, -1) V``, of
    ``A = kk * D_before``, ``B = kk * a / D`` and ``K = k / D``, and the rest is products of matrices.
    """
    dtype = _common(r, w, packed)
    _common(state)
    _need(
        r.dim() == 3 and state.dim() == 4, "time_mix_v7() takes r of [batch, tokens, width] and a state of 4 dimensions"
    )
    (batch, tokens, width), (_, heads, size, _) = r.shape, state.shape
    fits = state.shape == (batch, heads, size, size) and width == heads * size and w.shape == r.shape
    _need(fits and packed.shape == (batch, tokens, heads, 4, size), "time_mix_v7(): the sizes do not go together")
    wide = _of_sums(dtype)
    counts = None if lengths is None else _counts(lengths, batch)
    if r.is_meta:
        return r.new_empty(r.shape, dtype=dtype), state.new_empty(state.shape, dtype=wide)

    def by_head(tensor: Tensor) -> Tensor:  # [B, H, T, N]
        return tensor.to(wide).reshape(batch, tokens, heads, size).transpose(1, 2)

    reads, logits = by_head(r), by_head(w)
    k, v, a, kk = packed.to(wide).permute(3, 0, 2, 1, 4).unbind()
    there = None
    if counts is not None:  # what is behind is nothing, whatever it was
        there = (torch.arange(tokens, device=r.device) < counts[:, None])[:, None, :, None]
        reads, logits, k, v, a, kk = (torch.where(there, tensor, 0) for tensor in (reads, logits, k, v, a, kk))
    decay = torch.exp(-0.60653065971263342 * torch.sigmoid(logits))
    if there is not None:
        decay = torch.where(there, decay, 1)
    state, results = state.to(wide), []
    for start in range(0, tokens, CHUNK):
        part = slice(start, min(start + CHUNK, tokens))
        y, state = _chunk([tensor[:, :, part] for tensor in (reads, decay, k, v, kk * a, kk)], state)
        results.append(y)
    y = torch.cat(results, 2) if results else reads
    return y.transpose(1, 2).reshape(r.shape).to(dtype), state if results else state.clone()


def _chunk(parts: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    r, decay, k, v, b, kk = parts
    so_far = decay.cumprod(-2)
    finds, reads = kk * (so_far / decay), r * so_far
    adds, removes = (k / so_far).transpose(-1, -2), (b / so_far).transpose(-1, -2)
    right = finds @ state + (finds @ adds).tril(-1) @ v
    removed = torch.linalg.solve_triangular((finds @ removes).tril(-1), right, upper=False, unitriangular=True)
    y = reads @ state + (reads @ adds).tril() @ v - (reads @ removes).tril() @ removed
    return y, so_far[..., -1, :, None] * (state + adds @ v - removes @ removed)


def channel_mix_v7(
    x: Tensor, shift: Tensor, mix: Tensor, key: Tensor, value: Tensor, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """RWKV-7's feed-forward part: ``squared_relu(shifted @ keyᵀ) @ valueᵀ``, and the last token for the next call.

    ``x`` is ``[B, T, C]``, ``shift`` ``[B, C]``, ``mix`` ``[C]``, ``key`` ``[F, C]``, ``value`` ``[C, F]``; tokens are
    shifted as ``token_shift`` does. Returns ``[B, T, C]`` and ``[B, C]``.
    """
    _need(mix.dim() == 1, "channel_mix_v7() takes mix of [width]")
    mixed, last = token_shift(x, shift, mix.unsqueeze(0), lengths)
    return fast_linear(fast_linear(mixed.squeeze(0), key, None, "squared_relu"), value), last


# --- registering -----------------------------------------------------------------------------------------------------

NAMES = define(
    *map(of_function, (lerp, blend, l2_norm, squared_relu, add_activate, control_k, fast_linear)),
    *map(of_function, (token_shift, pack_kvakk, time_first_v7, time_mix_v7, channel_mix_v7)),
)
