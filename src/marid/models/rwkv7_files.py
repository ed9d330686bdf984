"""Reading RWKV-7 from files: BlinkDL's ``.pth`` and safetensors, by his names, and GGUF by those of llama.cpp."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import marid
from marid.models.rwkv7 import RWKV7, Config

_MIXES = ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g")
_LOW_RANK = (("w", "decay"), ("a", "rate"), ("v", "values"), ("g", "gate"))
_MODEL = {
    "emb.weight": "embedding.weight",
    "blocks.0.ln0.weight": "first_norm.weight",
    "blocks.0.ln0.bias": "first_norm.bias",
    "ln_out.weight": "norm.weight",
    "ln_out.bias": "norm.bias",
    "head.weight": "head.weight",
}
_LAYER = {
    **{
        f"ln{n}.{part}": f"{half}_norm.{part}"
        for n, half in ((1, "time"), (2, "channel"))
        for part in ("weight", "bias")
    },
    **{f"att.{name}.weight": f"time.{name}" for name in ("receptance", "key", "value", "output")},
    **{f"att.ln_x.{part}": f"time.norm.{part}" for part in ("weight", "bias")},
    **{f"att.{name}": f"time.{name}" for name in ("k_k", "k_a", "r_k")},
    **{f"att.{letter}0": f"time.{name}.bias" for letter, name in _LOW_RANK[:3]},
    **{f"att.{letter}1": f"time.{name}.down" for letter, name in _LOW_RANK},
    **{f"att.{letter}2": f"time.{name}.up" for letter, name in _LOW_RANK},
    "ffn.x_k": "channel.mix",
    "ffn.key.weight": "channel.key",
    "ffn.value.weight": "channel.value",
}
_TRANSPOSED = re.compile(r"att\.[wavg][12]")


_GGUF_MODEL = {
    "token_embd.weight": "embedding.weight",
    **{f"token_embd_norm.{part}": f"first_norm.{part}" for part in ("weight", "bias")},
    **{f"output_norm.{part}": f"norm.{part}" for part in ("weight", "bias")},
    "output.weight": "head.weight",
}
_GGUF_LAYER = {
    **{f"attn_norm.{part}": f"time_norm.{part}" for part in ("weight", "bias")},
    **{f"attn_norm_2.{part}": f"channel_norm.{part}" for part in ("weight", "bias")},
    **{f"time_mix_ln.{part}": f"time.norm.{part}" for part in ("weight", "bias")},
    "time_mix_lerp_fused.weight": "time.mix",
    **{f"time_mix_{name}.weight": f"time.{name}" for name in ("receptance", "key", "value", "output")},
    **{f"time_mix_{name}.weight": f"time.{name}" for name in ("k_k", "k_a", "r_k")},
    **{f"time_mix_{letter}0.weight": f"time.{name}.bias" for letter, name in _LOW_RANK[:3]},
    **{f"time_mix_{letter}1.weight": f"time.{name}.down" for letter, name in _LOW_RANK},
    **{f"time_mix_{letter}2.weight": f"time.{name}.up" for letter, name in _LOW_RANK},
    "channel_mix_lerp_k.weight": "channel.mix",
    "channel_mix_key.weight": "channel.key",
    "channel_mix_value.weight": "channel.value",
}


def gguf_names(layers: int) -> dict[str, str]:
    """Each of our names by llama.cpp's."""
    names = dict(_GGUF_MODEL)
    for layer in range(layers):
        for theirs, ours in _GGUF_LAYER.items():
            if layer or not ours.startswith("time.values."):
                names[f"blk.{layer}.{theirs}"] = f"layers.{layer}.{ours}"
    return names


def _names(layers: int) -> dict[str, str]:
    """Each of our names by BlinkDL's; those of the six mixes are not among them."""
    names = dict(_MODEL)
    for layer in range(layers):
        for theirs, ours in _LAYER.items():
            if layer or not re.fullmatch(r"att\.v[012]", theirs):  # which the first layer has and does not use
                names[f"blocks.{layer}.{theirs}"] = f"layers.{layer}.{ours}"
    return names


def _layer_count(tensors: Mapping[str, Any]) -> int:
    found = [int(match[1]) for name in tensors if (match := re.match(r"blocks\.(\d{1,6})\.", name))]
    return max(found, default=-1) + 1


def from_blinkdl(tensors: Mapping[str, Tensor], **options: Any) -> RWKV7:
    """The model of BlinkDL's tensors, by his names, on their device and with their types; ``options`` are fields of
    ``Config`` that no tensor tells. Raises ``ValueError`` where they are not those of an RWKV-7."""
    layers = _layer_count(tensors)

    def take(name: str) -> Tensor:
        if name not in tensors:
            raise ValueError(f"this is no RWKV-7: it has no tensor {name!r}")
        return tensors[name]

    vocabulary, width = _sizes(take("emb.weight"), "emb.weight", 2)
    heads, size = _sizes(take("blocks.0.att.r_k"), "blocks.0.att.r_k", 2)
    first = min(layers - 1, 1)
    ranks = (
        _sizes(take(f"blocks.{first}.att.w1"), "w1", 2)[1],
        _sizes(take(f"blocks.{first}.att.a1"), "a1", 2)[1],
        _sizes(take("blocks.1.att.v1"), "v1", 2)[1] if layers > 1 else 1,
        _sizes(take("blocks.0.att.g1"), "g1", 2)[1],
    )
    hidden = _sizes(take("blocks.0.ffn.key.weight"), "blocks.0.ffn.key.weight", 2)[0]
    if heads * size != width:
        raise ValueError(f"this is no RWKV-7: {heads} heads of {size} are not {width} elements")
    config = Config(layers, width, vocabulary, hidden, size, ranks, **options)
    found: dict[str, Tensor] = {}
    for theirs, ours in _names(layers).items():
        tensor = take(theirs)
        if _TRANSPOSED.fullmatch(theirs.split(".", 2)[-1]):
            tensor = tensor.t()
        found[ours] = tensor
    for layer in range(layers):
        mixes = [take(f"blocks.{layer}.att.{name}").reshape(-1) for name in _MIXES]
        found[f"layers.{layer}.time.mix"] = torch.stack(mixes)
    return filled(config, found)


def from_gguf(tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> RWKV7:
    """The model of a GGUF file's tensors, by llama.cpp's names, with packed matrices as they are. Raises ``ValueError``
    where it is no RWKV-7."""
    architecture = metadata.get("general.architecture")
    if architecture != "rwkv7":
        raise ValueError(f"this is no RWKV-7, but {str(architecture)[:40]!r}")

    def number(name: str, least: int = 1) -> int:
        value = metadata.get(f"rwkv7.{name}")
        if type(value) is not int or not least <= value < 1 << 24:
            raise ValueError(f"this is no RWKV-7: its rwkv7.{name} is {str(value)[:40]}")
        return value

    layers, width = number("block_count"), number("embedding_length")
    names = gguf_names(layers) if layers <= len(tensors) else {}
    missing = [name for name in names if name not in tensors]
    if missing or not names:
        raise ValueError(f"this is no RWKV-7: it has no tensor {(missing or ['of every layer'])[0]!r}")
    ranks = [tensors[f"blk.{layers - 1}.time_mix_{letter}1.weight"].shape[0] for letter, _ in _LOW_RANK]
    config = Config(
        layers,
        width,
        tensors["token_embd.weight"].shape[0],
        number("feed_forward_length"),
        number("wkv.head_size"),
        (ranks[0], ranks[1], ranks[2] if layers > 1 else 1, ranks[3]),
        float(metadata.get("rwkv7.attention.layer_norm_epsilon", 1e-5)),
    )
    if width % config.head_size:
        raise ValueError(f"this is no RWKV-7: heads of {config.head_size} are no parts of {width}")
    return filled(config, {ours: tensors[theirs] for theirs, ours in names.items()})


def _sizes(tensor: Tensor, name: str, rank: int) -> tuple[int, ...]:
    if tensor.dim() != rank:
        raise ValueError(f"this is no RWKV-7: {name!r} has {tensor.dim()} dimensions in place of {rank}")
    return tuple(tensor.shape)


def filled(config: Config, tensors: Mapping[str, Tensor]) -> RWKV7:
    """A model of these sizes whose parameters are these tensors, by our names. Raises ``ValueError`` where a tensor has
    another number of elements than the parameter, or is another matrix."""
    with torch.device("meta"):
        model = RWKV7(config)
    for name, parameter in list(model.named_parameters()):
        owner, _, last = name.rpartition(".")
        tensor = tensors[name]
        if tensor.shape != parameter.shape:
            sizes, wanted = ([size for size in one.shape if size != 1] for one in (tensor, parameter))
            is_another = len(sizes) > 1 and len(wanted) > 1 and sizes != wanted
            if tensor.numel() != parameter.numel() or is_another:
                raise ValueError(f"{name} has the shape {list(tensor.shape)} in place of {list(parameter.shape)}")
            tensor = tensor.reshape(parameter.shape)
        packed = type(tensor) is not Tensor and hasattr(tensor, "packing")  # which has no gradient
        if not packed and not tensor.is_floating_point():
            raise ValueError(f"{name} has numbers of type {tensor.dtype}, which are no weights")
        made = nn.Parameter(tensor.contiguous(), requires_grad=not packed)
        setattr(model.get_submodule(owner), last, made)
    return model


def to_blinkdl(model: RWKV7) -> dict[str, Tensor]:
    """The tensors of a model by BlinkDL's names and in his shapes, for ``torch.save``."""
    own = {name: parameter.detach() for name, parameter in model.named_parameters()}
    tensors: dict[str, Tensor] = {}
    for theirs, ours in _names(model.config.layers).items():
        tensor, rest = own[ours], theirs.split(".", 2)[-1]
        if _TRANSPOSED.fullmatch(rest):
            tensor = tensor.t().contiguous()
        if re.fullmatch(r"att\.(k_k|k_a|[wav]0)|ffn\.x_k", rest):
            tensor = tensor.reshape(1, 1, -1)
        tensors[theirs] = tensor
    for layer in range(model.config.layers):
        for name, row in zip(_MIXES, own[f"layers.{layer}.time.mix"], strict=True):
            tensors[f"blocks.{layer}.att.{name}"] = row.reshape(1, 1, -1)
    return tensors


def load(
    path: str | os.PathLike[str],
    device: torch.device | str | int = "cpu",
    dtype: torch.dtype | None = None,
    seen: Callable[[int, int], None] | None = None,
) -> RWKV7:
    """The model of a ``.pth``, ``.safetensors`` or ``.gguf`` file, on a device; weights of a type of their own, if one
    is named. ``seen(done, all)`` is told how many tensors were read. Raises ``ValueError`` for other files."""
    kind = Path(path).suffix
    if kind == ".pth":
        return from_blinkdl(_moved(_in_pth(path), device, dtype, seen))
    if kind == ".safetensors":
        return from_blinkdl(_moved(_in_safetensors(path), device, dtype, seen))
    if kind == ".gguf":
        found = marid.load_file(path, device)
        moved = {name: tensor if dtype is None else _typed(tensor, dtype) for name, tensor in found.items()}
        if seen is not None:
            seen(len(moved), len(moved))
        return from_gguf(moved, found.metadata)
    raise ValueError(f"{path} is neither a .pth, nor a .safetensors, nor a .gguf file")


def _in_pth(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    try:
        tensors = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} is no file of torch.save, or not all of it: {error}") from None
    named = type(tensors) is dict and all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in tensors.items()
    )
    if not named:
        raise ValueError(f"{path} holds no tensors by names")
    return tensors


def _in_safetensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file, or not all of it: {error}") from None


def _typed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _moved(
    tensors: Mapping[str, Tensor], device: Any, dtype: torch.dtype | None, seen: Callable[[int, int], None] | None
) -> dict[str, Tensor]:
    moved: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        moved[name] = tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)
        if seen is not None:
            seen(len(moved), len(tensors))
    return moved
