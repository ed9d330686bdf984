"""A Llama of Hugging Face's with random weights: greedy generation, with the growing and with the static cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

LAZY = {"marid"}


def prepare(lab: Any) -> None:
    import transformers  # noqa: F401

    if lab.peer.split(",")[0] in LAZY:
        lab.marid()


def build(lab: Any) -> Callable[[], Any]:
    """The time is that of one new token; the output are the tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    size = lab.options
    framework, _, cache = lab.peer.partition(", ")
    device = "remote_accelerator" if framework in LAZY else "cpu"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size["vocabulary"],
        hidden_size=size["width"],
        intermediate_size=4 * size["width"],
        num_hidden_layers=size["layers"],
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=512,
    )
    model: Any = LlamaForCausalLM(config).eval()
    model.to(device)
    prompt = torch.randint(3, size["vocabulary"], (1, size["prompt"])).to(device)
    tokens = size["tokens"]
    options: dict[str, Any] = {
        "min_new_tokens": tokens,
        "max_new_tokens": tokens,
        "do_sample": False,
        "pad_token_id": 0,
    }
    if cache == "static cache":
        options |= {"cache_implementation": "static", "disable_compile": True}
    if framework == "torch.compile":
        model.forward = torch.compile(model.forward)

    def call() -> Any:
        with torch.no_grad():
            started = time.perf_counter()
            output = model.generate(prompt, **options)
            found = output[0].tolist()
            return lab.timed(found, (time.perf_counter() - started) / tokens)

    return call
