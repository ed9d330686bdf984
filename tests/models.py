"""Tiny random configurations of well-known Hugging Face models, and inputs for them; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import nn

__all__ = ["CASES", "Case"]

_VOCAB = 96
_BATCH = 2
_LENGTH = 7


@dataclass(frozen=True)
class Case:
    """A model to try.

    ``build(dropout)`` makes it with random weights; ``inputs(labels)`` draws what its forward takes on the CPU, with
    labels if the model computes a loss from them. ``has_dropout`` says that the argument of ``build`` matters,
    ``generates`` that the model has ``generate()``, ``static_cache`` that transformers gives it a static cache.
    """

    name: str
    build: Callable[[float], nn.Module]
    inputs: Callable[[bool], dict[str, Any]]
    has_dropout: bool = True
    generates: bool = False
    static_cache: bool = True

    def loss(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        """The model's own loss, or where it has none the mean square of its first output."""
        output = model(**inputs)
        return output.loss if getattr(output, "loss", None) is not None else output[0].square().mean()


def _ids(length: int = _LENGTH) -> torch.Tensor:
    return torch.randint(3, _VOCAB, (_BATCH, length))


def _text(labels: bool) -> dict[str, Any]:
    ids = _ids()
    mask = torch.ones_like(ids)
    mask[1, :2] = 0  # the second text is shorter, padded on the left
    inputs = {"input_ids": ids, "attention_mask": mask}
    return {**inputs, "labels": ids.masked_fill(mask == 0, -100)} if labels else inputs


def _text_with_router_loss(labels: bool) -> dict[str, Any]:
    return {**_text(labels), "output_router_logits": True} if labels else _text(labels)


def _pixels(labels: bool) -> dict[str, Any]:
    pixels = torch.randn(_BATCH, 3, 16, 16)
    return {"pixel_values": pixels, "labels": torch.tensor([1, 3])} if labels else {"pixel_values": pixels}


def _text_and_pixels(labels: bool) -> dict[str, Any]:
    ids = _ids()
    ids[:, -1] = 2  # CLIP pools at the end-of-text token
    return {"input_ids": ids, **_pixels(False), "return_loss": labels}


def _text_to_text(labels: bool) -> dict[str, Any]:
    inputs: dict[str, Any] = {"input_ids": _ids(), "attention_mask": torch.ones(_BATCH, _LENGTH, dtype=torch.long)}
    inputs["attention_mask"][1, -2:] = 0
    return {**inputs, "labels": _ids(5)} if labels else {**inputs, "decoder_input_ids": _ids(5)}


def _sound_to_text(labels: bool) -> dict[str, Any]:
    sound = {"input_features": torch.randn(_BATCH, 8, 24)}
    return {**sound, "labels": _ids(5)} if labels else {**sound, "decoder_input_ids": _ids(5)}


_SMALL: dict[str, Any] = {
    "vocab_size": _VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "initializer_range": 0.3,  # random weights so large that the generated tokens differ
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS: dict[str, Any] = {"num_attention_heads": 4, "intermediate_size": 48}
_DECODER: dict[str, Any] = {**_SMALL, **_HEADS, "num_key_value_heads": 2, "max_position_embeddings": 64}


def _gpt2(dropout: float) -> nn.Module:
    small = {**_SMALL, "n_positions": 64, "n_head": 4}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**small, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout))


def _llama(dropout: float) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_DECODER, attention_dropout=dropout))


def _mistral(dropout: float) -> nn.Module:
    return hf.MistralForCausalLM(hf.MistralConfig(**_DECODER, attention_dropout=dropout, sliding_window=4))


def _qwen3(dropout: float) -> nn.Module:
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**_DECODER, head_dim=8, attention_dropout=dropout))


def _gemma3(dropout: float) -> nn.Module:
    layers = ["sliding_attention", "full_attention"]
    small = {**_DECODER, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4, "layer_types": layers}
    config = hf.Gemma3TextConfig(**small, attention_dropout=dropout, tie_word_embeddings=False)
    return hf.Gemma3ForCausalLM(config)


def _mixtral(dropout: float) -> nn.Module:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return hf.MixtralForCausalLM(hf.MixtralConfig(**_DECODER, **experts, attention_dropout=dropout))


def _mamba(_: float) -> nn.Module:
    return hf.MambaForCausalLM(hf.MambaConfig(**_SMALL, state_size=4, time_step_rank=4))


def _bert(dropout: float) -> nn.Module:
    both = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return hf.BertForMaskedLM(hf.BertConfig(**_SMALL, **_HEADS, **both, max_position_embeddings=64))


def _t5(dropout: float) -> nn.Module:
    small = {"vocab_size": _VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    config = hf.T5Config(**small, dropout_rate=dropout, decoder_start_token_id=0, initializer_factor=3.0)
    return hf.T5ForConditionalGeneration(config)


def _vit(dropout: float) -> nn.Module:
    both = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    small = {"hidden_size": 32, "num_hidden_layers": 2, "image_size": 16, "patch_size": 8, "num_labels": 5}
    return hf.ViTForImageClassification(hf.ViTConfig(**small, **_HEADS, **both))


def _clip(dropout: float) -> nn.Module:
    small = {"hidden_size": 32, "num_hidden_layers": 2, "projection_dim": 16, "attention_dropout": dropout, **_HEADS}
    text = {**small, "vocab_size": _VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    vision = {**small, "image_size": 16, "patch_size": 8}
    return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))


def _whisper(dropout: float) -> nn.Module:
    config = hf.WhisperConfig(
        vocab_size=_VOCAB,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_source_positions=12,
        max_target_positions=32,
        init_std=0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        begin_suppress_tokens=[2, 5],
        dropout=dropout,
        attention_dropout=dropout,
        activation_dropout=dropout,
    )
    return hf.WhisperForConditionalGeneration(config)


def _resnet(_: float) -> nn.Module:
    small = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 5}
    return hf.ResNetForImageClassification(hf.ResNetConfig(**small))


CASES = [
    Case("gpt2", _gpt2, _text, generates=True),
    Case("llama", _llama, _text, generates=True),
    Case("mistral", _mistral, _text, generates=True),
    Case("qwen3", _qwen3, _text, generates=True),
    Case("gemma3", _gemma3, _text, generates=True),
    Case("mixtral", _mixtral, _text_with_router_loss, generates=True),
    Case("mamba", _mamba, _text, has_dropout=False, generates=True, static_cache=False),
    Case("bert", _bert, _text),
    Case("t5", _t5, _text_to_text, generates=True),
    Case("vit", _vit, _pixels),
    Case("clip", _clip, _text_and_pixels),
    Case("whisper", _whisper, _sound_to_text, generates=True),
    Case("resnet", _resnet, _pixels, has_dropout=False),
]
