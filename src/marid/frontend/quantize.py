"""Modules whose weights are packed: ``marid.quantize``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import nn

from marid.frontend import handles
from marid.frontend.materialize import materialize
from marid.frontend.quantized import QuantizedTensor
from marid.frontend.quantized_operators import PACKED_HERE, PACKINGS, pack
from marid.semantics.tracebacks import folded

M = TypeVar("M", bound=nn.Module)


@folded
def quantize(module: M, packing: str = "q8_0") -> M:
    """Pack the weights of a module's linear layers, in place, and return the module: for inference.

    ``packing`` is ``"q8_0"`` (8.5 bits an element) or ``"q4_0"`` (4.5 bits): blocks of 32 elements of a row with one
    scale, as ggml packs them (``ggml-quants.c``). Packed are the weights of ``nn.Linear``, of the ``Conv1D`` of
    transformers and of its mixtures of experts (classes ``...Experts`` with matrices ``[experts, N, K]``), with all
    modules that share them, such as an embedding that is tied to the last layer. A weight whose rows are not whole
    blocks stays as it is, and so does everything else.

    A packed weight is a ``QuantizedTensor`` without gradient. Products by it and rows of it do not unpack it as a
    whole. It stays packed when the module moves between devices, and in its ``state_dict``. Weights on the device are
    packed there.

    Raises ``ValueError`` for another packing, and where there is no weight to be packed.
    """
    name = packing.upper()
    if name not in PACKED_HERE:
        more = " can only be read from GGUF files" if name in PACKINGS else " is not known"
        raise ValueError(f"marid.quantize() packs as {' or '.join(map(str.lower, PACKED_HERE))}: {packing!r}{more}")
    turned = {id(weight): across for weight, across in _weights(module) if _fits(weight, name, across)}
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for attribute, parameter in owner.named_parameters(recurse=False):
            if id(parameter) in turned:
                holders.setdefault(id(parameter), []).append((owner, attribute))
    if not holders:
        size = PACKINGS[name][0]
        raise ValueError(f"{type(module).__name__} has no linear layer whose weight has rows of a multiple of {size}")
    for key, held in holders.items():
        owner, attribute = held[0]
        weight = _packed(getattr(owner, attribute), name, turned[key])
        for owner, attribute in held:
            setattr(owner, attribute, weight)
    return module


def _weights(module: nn.Module) -> Iterator[tuple[torch.Tensor, bool]]:
    """The matrices that are multiplied by, and whether they are written with a row for each input."""
    for layer in module.modules():
        kind = type(layer).__name__
        if isinstance(layer, nn.Linear):
            yield layer.weight, False
        elif kind == "Conv1D" and hasattr(layer, "nf"):
            yield layer.weight, True  # pyright: ignore[reportReturnType]
        elif kind.endswith("Experts"):
            across = bool(getattr(layer, "is_transposed", False))
            yield from ((one, across) for one in layer.parameters(recurse=False) if one.dim() == 3)


def _fits(weight: torch.Tensor, packing: str, turned: bool) -> bool:
    if isinstance(weight, QuantizedTensor) or weight.is_meta or not weight.is_floating_point():
        return False
    depth = weight.shape[-2 if turned else -1]
    return depth > 0 and weight.numel() > 0 and depth % PACKINGS[packing][0] == 0


def _packed(weight: torch.Tensor, packing: str, turned: bool) -> nn.Parameter:
    packed = pack(weight.mT if turned else weight, packing)
    if handles.is_lazy(packed):
        materialize([packed], "marid.quantize")  # so that the weight's memory can go before the next one is packed
    return nn.Parameter(QuantizedTensor(packed, packing, turned), requires_grad=False)
