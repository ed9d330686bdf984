"""GGUF files for tests: tensors of random blocks, and an RWKV-7 as llama.cpp has it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy
import torch

from marid.frontend.quantized_operators import PACKINGS
from marid.models.rwkv7 import RWKV7

__all__ = ["random_blocks", "write_model"]

_SCALES = {"Q4_0": (0,), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where the half-precision numbers of a block are."""


def random_blocks(rows: int, depth: int, packing: str, seed: int = 0) -> torch.Tensor:
    """A packed matrix of random bits, with scales that are ordinary numbers."""
    elements, size = PACKINGS[packing]
    source = numpy.random.default_rng(seed)
    blocks = source.integers(0, 256, (rows * depth // elements, size), dtype=numpy.uint8)
    for place in _SCALES[packing]:
        scale = source.uniform(0.001, 0.02, len(blocks)).astype(numpy.float16)
        blocks[:, place : place + 2] = scale[:, None].view(numpy.uint8)
    return torch.from_numpy(blocks.reshape(rows, -1))


def write_model(path: Path, model: RWKV7, packing: str | None = None, words: list[bytes] | None = None) -> None:
    """The model as ``convert_hf_to_gguf.py`` of llama.cpp writes it; matrices quantised by the ``gguf`` package."""
    import gguf

    of = model.config
    writer = gguf.GGUFWriter(path, "rwkv7")
    writer.add_context_length(1048576)
    writer.add_embedding_length(of.width)
    writer.add_block_count(of.layers)
    writer.add_feed_forward_length(of.hidden)
    writer.add_layer_norm_eps(of.norm_eps)
    writer.add_head_count(0)
    writer.add_wkv_head_size(of.head_size)
    writer.add_decay_lora_rank(of.ranks[0])
    writer.add_iclr_lora_rank(of.ranks[1])
    writer.add_value_residual_mix_lora_rank(of.ranks[2])
    writer.add_gate_lora_rank(of.ranks[3])
    writer.add_token_shift_count(2)
    if words is not None:
        writer.add_tokenizer_model("rwkv")
        writer.add_token_list(words)
        writer.add_token_types([gguf.TokenType.NORMAL] * len(words))
    for name, tensor in named(model).items():
        data: Any = tensor.detach().float().numpy()
        if packing is not None and tensor.dim() == 2 and not re.search(r"time_mix_([wavg]\d|r_k)", name):
            kind = gguf.GGMLQuantizationType[packing]
            writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def named(model: RWKV7) -> dict[str, torch.Tensor]:
    """The tensors by llama.cpp's names."""
    from marid.models.rwkv7_files import gguf_names

    own = dict(model.named_parameters())
    tensors = {theirs: own[ours] for theirs, ours in gguf_names(model.config.layers).items()}
    for layer in range(model.config.layers):
        mix = f"blk.{layer}.time_mix_lerp_fused.weight"
        tensors[mix] = tensors[mix].reshape(6, 1, 1, -1)
        tensors[f"blk.{layer}.time_mix_r_k.weight"] = tensors[f"blk.{layer}.time_mix_r_k.weight"].flatten()
    rank, width = model.config.ranks[1], model.config.width
    tensors["blk.0.time_mix_v0.weight"] = torch.zeros(width)
    tensors["blk.0.time_mix_v1.weight"] = torch.zeros(rank, width)
    tensors["blk.0.time_mix_v2.weight"] = torch.zeros(width, rank)
    return tensors
