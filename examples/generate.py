"""Generate text with a Hugging Face model, here or on a worker: weights and cache stay there, tokens come here.

    python examples/generate.py                                              # on PyTorch's default device
    python examples/generate.py --worker tcp://gpu:7070 --key laptop.json    # on a worker

The model is a small Llama with random weights, so that nothing has to be fetched; ``--model NAME`` takes one from the
Hugging Face hub, or from a folder, with its tokenizer.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch


def a_model(name: str | None) -> tuple[Any, Any]:
    """A model, and its tokenizer if it has one."""
    import transformers

    if name is not None:
        return (
            transformers.AutoModelForCausalLM.from_pretrained(name),
            transformers.AutoTokenizer.from_pretrained(name),
        )
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4
    )
    return transformers.LlamaForCausalLM(config), None


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate text with a Hugging Face model.")
    parser.add_argument("--model", help="a name on the Hugging Face hub, or a folder")
    parser.add_argument("--prompt", default="The sea is")
    parser.add_argument("--tokens", type=int, default=32, help="how many to generate")
    parser.add_argument("--worker", metavar="ADDRESS", help="where the model is to run")
    parser.add_argument("--key", help="the client's key file")
    options = parser.parse_args()

    device = torch.get_default_device()
    if options.worker:
        import marid

        marid.connect(options.worker, key=options.key)
        device = torch.device("remote_accelerator")
    torch.manual_seed(1)
    with torch.device("cpu"):
        model, tokenizer = a_model(options.model)
    model = model.eval().to(device)
    if tokenizer is None:
        prompt = torch.tensor([list(options.prompt.encode())], device=device)
    else:
        prompt = tokenizer(options.prompt, return_tensors="pt").input_ids.to(device)
    made = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=options.tokens,
        do_sample=False,
        pad_token_id=model.config.eos_token_id,
    )
    tokens = made[0].tolist()
    print(tokens if tokenizer is None else tokenizer.decode(tokens))


if __name__ == "__main__":
    main()
