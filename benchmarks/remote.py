"""What a worker costs: a training step and greedy decoding in this process, on a worker operation by operation, and on
a worker as Marid does it.

    python benchmarks/remote.py [--steps 30] [--json FILE]

Bytes are counted at the socket of the client, after the first steps; times are medians. The worker is a process on this
machine, so the difference to "in process" is the cost of the wire and of the second process, not of a network.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import marid

LOCAL, WORKER = "remote_accelerator:0", "remote_accelerator:1"


class OperationByOperation(TorchFunctionMode):
    """Every result is waited for before the next operation begins: remoting without a graph."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        marid.materialize(*[one for one in _flat(result) if isinstance(one, torch.Tensor)])
        return result


def _flat(value: Any) -> list[Any]:
    return [item for part in value for item in _flat(part)] if isinstance(value, (list, tuple)) else [value]


class Block(torch.nn.Module):
    """A transformer block with a cache of keys and values that is written in place."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, cache: Any = None, at: int = 0) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if cache is not None:
            cache[0][:, :, at : at + length] = k
            cache[1][:, :, at : at + length] = v
            k, v = cache[0][:, :, : at + length], cache[1][:, :, : at + length]
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=length > 1)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm2(x))))


class Model(torch.nn.Module):
    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, longest: int) -> None:
        super().__init__()
        self.tokens, self.places = torch.nn.Embedding(vocabulary, width), torch.nn.Embedding(longest, width)
        self.blocks = torch.nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.head = torch.nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, caches: Any = None, at: int = 0) -> torch.Tensor:
        places = torch.arange(at, at + tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.places(places)
        for index, block in enumerate(self.blocks):
            x = block(x, None if caches is None else caches[index], at)
        return self.head(x)


def training(device: str) -> Callable[[], Any]:
    """A step of a GPT of 4 layers (d 128, T 64, batch 8, vocabulary 1000) with AdamW; gives the loss."""
    torch.manual_seed(0)
    model = Model(4, 128, 4, 1000, 64).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(1)

    def step() -> float:
        tokens = torch.randint(0, 1000, (8, 65), generator=data, device="cpu").to(device)
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def decoding(device: str) -> Callable[[], Any]:
    """A token of a GPT of 6 layers (d 256), greedily, after a prompt of 72; gives the token."""
    torch.manual_seed(0)
    model = Model(6, 256, 8, 1000, 1024).to(device).eval()
    caches = [[torch.zeros(1, 8, 1024, 32, device=device) for _ in range(2)] for _ in range(6)]
    prompt = torch.randint(0, 1000, (1, 72), device="cpu").to(device)
    with torch.no_grad():
        token = model(prompt, caches)[:, -1:].argmax(-1)
    at = 72

    def step() -> int:
        nonlocal token, at
        with torch.no_grad():
            token = model(token, caches, at)[:, -1:].argmax(-1)
        at += 1
        return int(token.item())

    return step


def measure(make: Callable[[str], Callable[[], Any]], device: str, steps: int, mode: Any) -> dict[str, Any]:
    """Median time and bytes of a step behind the first ones, and what the steps gave."""
    step = make(device)
    given, times = [], []
    warm = min(10, steps)
    with mode:
        given += [step() for _ in range(warm)]
        before = marid.stats().remote
        for _ in range(steps):
            start = time.perf_counter()
            given.append(step())
            times.append(time.perf_counter() - start)
    after = marid.stats().remote
    found: dict[str, Any] = {"ms": 1000 * statistics.median(times), "given": given}
    if before is not None and after is not None:
        for name in ("round_trips", "bytes_up", "bytes_down"):
            found[name] = (getattr(after, name) - getattr(before, name)) / steps
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    marid.connect(workers=1, first=1)
    rows: dict[str, dict[str, Any]] = {}
    print(f"{'':36}{'ms':>9}{'round trips':>13}{'bytes up':>13}{'bytes down':>13}")
    for name, make in (("training step", training), ("decoded token", decoding)):
        few = max(options.steps // 10, 2)
        cases = {
            "in process": (LOCAL, options.steps, contextlib.nullcontext()),
            "worker, op by op": (WORKER, few, OperationByOperation()),
            "worker, Marid": (WORKER, options.steps, contextlib.nullcontext()),
        }
        for case, (device, steps, mode) in cases.items():
            row = rows[f"{name}: {case}"] = measure(make, device, steps, mode)
            traffic = [f"{row[key]:,.0f}" for key in ("round_trips", "bytes_up", "bytes_down")]
            print(f"{name + ': ' + case:36}{row['ms']:9.2f}" + "".join(f"{text:>13}" for text in traffic))
        first, *others = [row["given"] for key, row in rows.items() if key.startswith(name)]
        assert all(other == first[: len(other)] or first == other[: len(first)] for other in others), "results differ"
    if options.json:
        with open(options.json, "w") as file:
            json.dump(
                {key: {k: v for k, v in row.items() if k != "given"} for key, row in rows.items()}, file, indent=1
            )


if __name__ == "__main__":
    main()
