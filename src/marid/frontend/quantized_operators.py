"""Operators on packed matrices: ``torch.ops.marid.dequantize`` and ``torch.ops.marid.quantized_linear``.

A matrix of ``[N, K]`` elements is packed as in GGUF files (https://github.com/ggml-org/ggml, ``ggml-quants.c``):
``uint8`` of ``[N, K / elements * bytes]``, row by row in blocks. ``PACKINGS`` says how many elements a block has, and
bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from marid.ops.own_operators import ACTIVATIONS, define, of_function

PACKINGS = {"Q4_0": (32, 18), "Q8_0": (32, 34), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210)}


def dequantize(packed: Tensor, packing: str) -> Tensor:
    """The elements of packed rows: float32, ``[..., K]`` of ``uint8`` ``[..., bytes]``.

    Raises ``ValueError`` for an unknown packing, ``RuntimeError`` for rows that are not whole blocks.
    """
    if packing not in PACKINGS:
        raise ValueError(f"dequantize() does not know the packing '{packing}'")
    elements, size = PACKINGS[packing]
    if packed.dim() < 1 or packed.dtype is not torch.uint8 or packed.shape[-1] % size:
        raise RuntimeError(f"dequantize() takes rows of whole blocks of {size} bytes, but got {list(packed.shape)}")
    shape = (*packed.shape[:-1], packed.shape[-1] // size * elements)
    if packed.is_meta:
        return packed.new_empty(shape, dtype=torch.float32)
    return _UNPACK[packing](packed.reshape(-1, size)).reshape(shape)


def quantized_linear(x: Tensor, packed: Tensor, bias: Tensor | None, packing: str, activation: str = "none") -> Tensor:
    """``activation(F.linear(x, dequantize(packed, packing), bias))``, of the type of ``x``, with sums in float32.

    ``x`` is ``[..., K]``, ``packed`` a matrix of ``[N, K]`` elements, the bias ``[N]``; activations by the names in
    ``ACTIVATIONS``. Up to 12 rows of float32 or less the CPU rounds to 16 bits, with a scale for each 32 elements, and
    multiplies the packed numbers. The packed matrix has no gradient.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"quantized_linear() does not know the activation '{activation}'")
    if packed.dim() != 2 or x.dim() < 1 or not x.is_floating_point():
        raise RuntimeError("quantized_linear() takes floating-point numbers and a packed matrix")
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    added = None if bias is None else bias.to(wide)
    y = torch.nn.functional.linear(x.to(wide), dequantize(packed, packing).to(wide), added)
    return ACTIVATIONS[activation](y).to(x.dtype)


# --- the packings ----------------------------------------------------------------------------------------------------


def _half(pair: Tensor) -> Tensor:
    return pair.contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """The low halves of ``[blocks, parts, bytes]``, and behind them the high ones: ``[blocks, 2 * parts, bytes]``."""
    return torch.stack([packed & 15, packed >> 4], 2).flatten(1, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return _half(blocks[:, :2]) * blocks[:, 2:].contiguous().view(torch.int8).float()


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks[:, :2]) * (_nibbles(blocks[:, None, 2:]).flatten(1).float() - 8)


def _scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and the minimum of each of eight parts: six bits each, in twelve bytes."""
    low, minimum, rest = blocks[:, 4:16].unflatten(1, (3, 4)).unbind(1)
    scales = torch.cat([low & 63, (rest & 15) | ((low >> 6) << 4)], 1).float()
    minima = torch.cat([minimum & 63, (rest >> 4) | ((minimum >> 6) << 4)], 1).float()
    return (_half(blocks[:, :2]) * scales)[..., None], (_half(blocks[:, 2:4]) * minima)[..., None]


def _q4_k(blocks: Tensor) -> Tensor:
    scales, minima = _scales(blocks)
    return scales * _nibbles(blocks[:, 16:].unflatten(1, (4, 32))).float() - minima


def _q5_k(blocks: Tensor) -> Tensor:
    scales, minima = _scales(blocks)
    fifth = torch.stack([(blocks[:, 16:48] >> bit) & 1 for bit in range(8)], 1)
    return scales * (_nibbles(blocks[:, 48:].unflatten(1, (4, 32))) | (fifth << 4)).float() - minima


def _q6_k(blocks: Tensor) -> Tensor:
    low, high = blocks[:, :128].unflatten(1, (2, 64)), blocks[:, 128:192].unflatten(1, (2, 32))
    scales = _half(blocks[:, 208:]) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    nibbles = torch.cat([low & 15, low >> 4], 2).unflatten(2, (4, 32))
    upper = torch.stack([(high >> shift) & 3 for shift in (0, 2, 4, 6)], 2)
    numbers = (nibbles | (upper << 4)).float() - 32
    return numbers.reshape(-1, 16, 16) * scales[..., None]


_UNPACK: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


# --- packing ---------------------------------------------------------------------------------------------------------


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, torch.zeros_like(scale), 1 / scale)


def _bytes(scale: Tensor, numbers: Tensor) -> Tensor:
    return torch.cat([scale.half().view(torch.uint8), numbers], 1)


def _packed_q8_0(blocks: Tensor) -> Tensor:
    scale = blocks.abs().amax(1, keepdim=True) / 127
    scaled = blocks * _inverse(scale)
    numbers = scaled.sign() * (scaled.abs() + 0.5).floor()  # halves away from zero
    return _bytes(scale, numbers.to(torch.int8).view(torch.uint8))


def _packed_q4_0(blocks: Tensor) -> Tensor:
    largest = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    scale = largest / -8
    shifted = blocks.double() * _inverse(scale).double() + 8.5
    low, high = shifted.trunc().clamp(0, 15).to(torch.uint8).chunk(2, 1)
    return _bytes(scale, low | (high << 4))


_PACK: dict[str, Callable[[Tensor], Tensor]] = {"Q8_0": _packed_q8_0, "Q4_0": _packed_q4_0}
PACKED_HERE = tuple(_PACK)
"""The packings that tensors can be given; matrices of the others come from files."""


def pack(matrix: Tensor, packing: str) -> Tensor:
    """Rows of elements ``[..., K]`` as ggml packs them: ``uint8`` of ``[..., bytes]``. ``K`` is a multiple of 32."""
    elements, _ = PACKINGS[packing]
    blocks = matrix.detach().float().reshape(-1, elements)
    return _PACK[packing](blocks).reshape(*matrix.shape[:-1], -1)


NAMES = define(of_function(dequantize), of_function(quantized_linear))
