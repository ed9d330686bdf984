"""What a worker costs: a training step and greedy decoding in this process, on a worker operation by operation, with
weights there and values moved, and as Marid does it.

    python benchmarks/remote.py [--steps 40] [--layers 12 --width 768 --vocabulary 50257] [--json FILE]

A relay between client and worker counts all bytes on the connection, from the second step on, and holds them back for
``--round-trip`` milliseconds in the last mode. The modes take turns, a few steps each; times are medians. The worker is
a process on this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from relay import Relay, relay_to
from torch.overrides import TorchFunctionMode

import marid
from marid.remote.launch.local import start_workers

LOCAL, WORKER = "remote_accelerator:0", "remote_accelerator:1"
MOVED = "values moved"
_TURN = 5  # steps of one case, before it is another's turn


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


def placed(model: torch.nn.Module, device: str) -> tuple[Any, str]:
    """The model on a device, and where its data belongs. As ``MOVED``, the weights are on the worker, and what goes
    into and comes out of each layer that has some is brought here."""
    if device != MOVED:
        return model.to(device), device
    for layer in model.modules():
        if not list(layer.children()):
            layer.to(WORKER)
            layer.register_forward_pre_hook(lambda _, args: tuple([arg.to(WORKER) for arg in args]))
            layer.register_forward_hook(lambda _layer, _args, result: result.cpu())
    return model, "cpu"


def training(device: str, _options: argparse.Namespace) -> Callable[[], Any]:
    """A step of a GPT of 4 layers (d 128, T 64, batch 8, vocabulary 1000) with AdamW; gives the loss."""
    torch.manual_seed(0)
    model, place = placed(Model(4, 128, 4, 1000, 64), device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(1)

    def step() -> float:
        tokens = torch.randint(0, 1000, (8, 65), generator=data, device="cpu").to(place)
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def decoding(device: str, options: argparse.Namespace) -> Callable[[], Any]:
    """A token of a model of GPT-2's shape, greedily, after a prompt of 72; gives the token."""
    torch.manual_seed(0)
    layers, width, vocabulary = options.layers, options.width, options.vocabulary
    model, place = placed(Model(layers, width, 12, vocabulary, 1024).eval(), device)
    caches = [[torch.zeros(1, 12, 1024, width // 12, device=place) for _ in range(2)] for _ in range(layers)]
    prompt = torch.randint(0, vocabulary, (1, 72), device="cpu").to(place)
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


@dataclass
class Case:
    """One way to do steps, and what came of it."""

    step: Callable[[], Any]
    steps: int
    round_trip: float = 0.0
    mode: Any = field(default_factory=contextlib.nullcontext)
    given: list[Any] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    moved: list[tuple[int, int]] = field(default_factory=list)
    round_trips: int = 0

    def run(self, relay: Relay, steps: int) -> None:
        """So many more steps. Not the first, which sends programs and weights, all are counted."""
        before = _round_trips()  # which asks the worker, so not in between
        relay.hold(self.round_trip / 2)
        with self.mode:
            for _ in range(min(steps, self.steps - len(self.given))):
                up, down = relay.counts
                start = time.perf_counter()
                given = self.step()
                seconds, after = time.perf_counter() - start, relay.counts
                if self.given:
                    self.times.append(seconds)
                    self.moved.append((after[0] - up, after[1] - down))
                self.given.append(given)
        relay.hold(0.0)
        self.round_trips += _round_trips() - before

    def row(self) -> dict[str, float]:
        """Medians, and the most."""
        late = self.times[min(10, self.steps // 2) :]  # programs are planned, improved and compiled in the first ones
        row: dict[str, float] = {"ms": 1000 * statistics.median(late), "steps": self.steps}
        row["round_trips"] = self.round_trips / len(self.given)
        row["bytes_up"], row["bytes_down"] = (statistics.median(one[way] for one in self.moved) for way in (0, 1))
        row["most_up"], row["most_down"] = (max(one[way] for one in self.moved) for way in (0, 1))
        return row


def _round_trips() -> int:
    remote = marid.stats().remote
    return 0 if remote is None else remote.round_trips


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768, help="a multiple of 12, for 12 heads")
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--round-trip", type=float, default=10.0, help="milliseconds")
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    (worker,) = start_workers(1, transport="tcp")
    try:
        with relay_to(worker.address) as relay:
            marid.connect(relay.address, first=1)
            rows = _rows(options, relay)
    finally:
        worker.stop()
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


def _rows(options: argparse.Namespace, relay: Relay) -> dict[str, dict[str, float]]:
    rows: dict[str, dict[str, float]] = {}
    print(f"{'':52}{'ms':>9}{'round trips':>13}{'bytes up':>11}{'most':>11}{'bytes down':>12}{'most':>11}")
    for name, make in (("training step", training), ("decoded token", decoding)):
        few, many, far = max(options.steps // 10, 3), options.steps, options.round_trip / 1000
        cases = {
            "in process": Case(make(LOCAL, options), many),
            "worker, op by op": Case(make(WORKER, options), few, mode=OperationByOperation()),
            "worker, weights there, values moved": Case(make(MOVED, options), few),
            "worker, Marid": Case(make(WORKER, options), many),
            f"worker, Marid, {options.round_trip:g} ms away": Case(make(WORKER, options), many, far),
        }
        for _ in range(0, many, _TURN):
            for case in cases.values():
                case.run(relay, _TURN)
        for key, case in cases.items():
            row = rows[f"{name}: {key}"] = case.row()
            columns = {"round_trips": 13, "bytes_up": 11, "most_up": 11, "bytes_down": 12, "most_down": 11}
            traffic = "".join(f"{row[column]:>{size},.0f}" for column, size in columns.items())
            print(f"{name + ': ' + key:52}{row['ms']:9.2f}{traffic}", flush=True)
        first, *others = [case.given for key, case in cases.items() if "values moved" not in key]
        assert all(other == first[: len(other)] for other in others), "results differ"
    return rows


if __name__ == "__main__":
    main()
