"""``marid.place``: layers over devices, with the values of one device, the fewest bytes between them, within limits."""

from __future__ import annotations

import contextlib
import copy
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import marid
from marid.errors import MemoryLimitError, UnsupportedOperationError
from marid.placement.plan import Device, Needs, chosen, cost_of
from marid.remote.launch import connect as connecting
from tests.helpers import DEVICE, assert_same
from tests.remote_helpers import worker_process

WIDTH, VOCABULARY, LAYERS = 64, 50, 6


class Block(nn.Module):
    """Attention with a cache that grows, and a feed-forward network."""

    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.norm, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def _mixed(self, x: torch.Tensor, bias: torch.Tensor, cache: list[torch.Tensor] | None) -> torch.Tensor:
        q, k, v = self.project(self.norm(x)).chunk(3, dim=-1)
        if cache is not None:
            cache[:] = [torch.cat([cache[0], k], 1), torch.cat([cache[1], v], 1)] if cache else [k, v]
            k, v = cache
        scores = q @ k.transpose(1, 2) / WIDTH**0.5 + bias[: q.shape[1], : k.shape[1]]
        x = x + self.out(scores.softmax(-1) @ v)
        return x + self.feed(self.after(x))

    def forward(self, x: torch.Tensor, bias: torch.Tensor, cache: list[torch.Tensor] | None = None) -> torch.Tensor:
        if self.checkpoints:
            return checkpoint(self._mixed, x, bias, cache, use_reentrant=False)
        return self._mixed(x, bias, cache)


class Decoder(nn.Module):
    """A decoder whose head is its embedding, with a bias on attention that all blocks share."""

    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("bias", torch.zeros(16, 16).triu(1).fill_(-0.5).triu(1))
        self.blocks = nn.ModuleList(Block(checkpoints) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor, caches: list[list[torch.Tensor]] | None = None) -> torch.Tensor:
        x = self.tokens(tokens)
        for index, block in enumerate(self.blocks):
            x = block(x, self.bias, None if caches is None else caches[index])
        return self.norm(x) @ self.tokens.weight.T


def _model(**options: Any) -> Decoder:
    torch.manual_seed(3)
    return Decoder(**options)


def _bytes(model: nn.Module) -> int:
    return sum(one.numel() * one.itemsize for one in (*model.parameters(), *model.buffers()))


def _trained(model: nn.Module, inputs: str | torch.device, outputs: str | torch.device) -> list[Any]:
    """Losses and weights after some steps of AdamW."""
    drawn = torch.Generator().manual_seed(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: list[Any] = []
    for _ in range(3):
        tokens = torch.randint(VOCABULARY, (4, 9), generator=drawn)
        logits = model(tokens[:, :-1].to(inputs))
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten().to(outputs))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return [*found, *(one.detach().cpu() for one in model.parameters())]


@torch.no_grad()
def _generated(model: Decoder, inputs: str | torch.device) -> list[int]:
    """Tokens, with a cache for each block."""
    tokens = torch.arange(5).view(1, 5).to(inputs)
    caches: list[list[torch.Tensor]] = [[] for _ in range(LAYERS)]
    said = []
    for _ in range(8):
        tokens = model(tokens, caches)[:, -1:].argmax(-1).to(inputs)
        said.append(int(tokens))
    assert {one.device for cache in caches for one in cache} == {next(b.parameters()).device for b in model.blocks}
    return said


EXAMPLE = torch.zeros(4, 8, dtype=torch.long)
STEPS: list[tuple[int, Callable[[int], int]]] = [(2, lambda n: 4 * n), (3, lambda n: 13 * n // 5)]


@pytest.mark.parametrize("checkpoints", [False, True], ids=["kept", "computed again"])
@pytest.mark.parametrize(("count", "limit"), STEPS, ids=["two", "three"])
def test_a_model_over_several_devices_is_the_model(count: int, limit: Callable[[int], int], checkpoints: bool) -> None:
    """Losses, weights and tokens are those of one device, bit for bit; devices are far from each other."""
    room = limit(_bytes(_model()))
    model = _model(checkpoints=checkpoints)
    placement = marid.place(model, [*range(1, count + 1)], EXAMPLE, training=True, limits=[room] * count)
    assert len(placement.devices) > 1
    assert all(placement.cost.bytes_on(index) <= room for index in placement.devices)
    assert_same(_trained(model, placement.input_device, placement.output_device), _trained(_model(), "cpu", "cpu"))
    if not checkpoints:
        assert _generated(model, placement.input_device) == _generated(_trained_model(), "cpu")


def _trained_model() -> Decoder:
    model = _model()
    _trained(model, "cpu", "cpu")
    return model


@contextlib.contextmanager
def _limited(count: int, limit: str) -> Iterator[None]:
    """So many workers as the devices from 1 on, each with so much memory."""
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(worker_process("--memory-limit", limit)) for _ in range(count)]
        marid.connect(*[worker.address for worker in workers], first=1)
        try:
            yield
        finally:
            gc.collect()
            connecting.disconnect(*range(1, count + 1), force=True)


@pytest.mark.parametrize(("count", "limit"), [(2, "4800k"), (3, "3400k")])
def test_workers_that_are_too_small_for_the_model(count: int, limit: str) -> None:
    """It trains and generates over several, equal to one, and the bytes are those of the plan."""
    model = _model()
    with _limited(count, limit):
        with pytest.raises(MemoryLimitError, match="the largest:\n"):
            marid.place(model, [1], EXAMPLE, training=True)
        placement = marid.place(model, [*range(1, count + 1)], EXAMPLE, training=True, apply=False)
        print(placement)
        placement.apply()
        expected = _trained(_model(), "cpu", "cpu")
        marid.reset_stats()
        assert_same(_trained(model, placement.input_device, placement.output_device), expected)
        remote = marid.stats().remote
        assert remote is not None
        assert remote.relayed == 0
        predicted = 3 * (placement.forward_bytes + placement.backward_bytes)
        assert abs(remote.copied_bytes - predicted) <= 0.05 * predicted
        assert _generated(model, placement.input_device) == _generated(_trained_model(), "cpu")
        del model, placement


def test_the_fewest_bytes_travel() -> None:
    """Fewer than with layers by turns, and than with layers by their size alone."""
    limit = 4 * _bytes(_model())
    placement = marid.place(_model(), [0, 1], EXAMPLE, training=True, limits=[limit] * 2, apply=False)
    needs = Needs(True, 5)
    layers = list(placement.at)
    by_turns = {layer: place % 2 for place, layer in enumerate(layers)}
    by_size: dict[str, int] = {}
    held = {0: 0, 1: 0}
    for layer in sorted(layers, key=placement.forward.layers.__getitem__, reverse=True):
        emptier = min(held, key=held.__getitem__)
        by_size[layer] = emptier
        held[emptier] += placement.forward.layers[layer]
    others = [cost_of(placement.forward, at, [0, 1], needs) for at in (by_turns, by_size)]
    least = placement.forward_bytes + placement.backward_bytes
    assert all(least < (cost.forward_bytes + cost.backward_bytes) / 4 for cost in others)


def test_what_fits_on_the_fastest_goes_there() -> None:
    """And on as few as are needed, whichever come first."""
    forward = marid.place(_model(), [0], EXAMPLE, apply=False).forward
    needs = Needs(False, 0)
    at = chosen(forward, [Device(0, None, 1e9), Device(1, None, 4e9), Device(2, None, 1e9)], 1e8, needs)
    assert set(at.values()) == {1}
    at = chosen(forward, [Device(0, 10_000, 1e9), Device(1, None, 1e9)], 1e8, needs)
    assert set(at.values()) == {1}


def test_many_devices_of_different_kinds() -> None:
    """A plan for eight takes no longer than one for a few."""
    forward = marid.place(_model(), [0], EXAMPLE, apply=False).forward
    limit = sum(forward.layers.values()) // 4
    devices = [Device(index, limit + index, 1e9 + index) for index in range(8)]
    begun = time.perf_counter()
    at = chosen(forward, devices, 1e8, Needs(False, 0))
    assert time.perf_counter() - begun < 20
    assert len(set(at.values())) > 3


def test_operands_come_together_only_while_the_model_runs() -> None:
    """Elsewhere operands of two devices are an error, as on any accelerator; afterwards, too, when the model raises."""
    model = _model()
    placement = marid.place(model, [0, 1], EXAMPLE, limits=[_bytes(model) * 2 // 3] * 2)
    assert len(placement.devices) == 2
    one, two = torch.ones(2, device=f"{DEVICE}:0"), torch.ones(2, device=f"{DEVICE}:1")
    model(EXAMPLE.to(placement.input_device))
    with pytest.raises(IndexError):
        model(torch.full((1, 2), VOCABULARY).to(placement.input_device)).sum().item()
    with pytest.raises(TypeError):
        model(None)
    with pytest.raises(RuntimeError, match="same device"):
        torch.add(one, two)
    placement.release()
    with pytest.raises(RuntimeError, match="same device"):
        model(EXAMPLE.to(placement.input_device))


def test_batch_norms_and_in_place_writes() -> None:
    """Statistics stay where they are; a write happens where the memory is."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
            self.norm, self.final = nn.BatchNorm2d(8), nn.BatchNorm2d(8, affine=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(self.first(x))
            z = self.final(self.second(y.relu()))
            total = torch.zeros_like(y)
            total[..., :-2, :-2] = z
            total += y
            return total.mean((2, 3))

    torch.manual_seed(1)
    net = Net()
    x = torch.randn(2, 3, 9, 9)
    expected = copy.deepcopy(net)
    placement = marid.place(net, [0, 1], x, training=True, states=1, limits=[36_000, 12_000])
    assert len(placement.devices) == 2
    for _ in range(2):
        net(x.to(placement.input_device)).pow(2).sum().backward()
        expected(x).pow(2).sum().backward()
    assert_same([one.grad for one in net.parameters()], [one.grad for one in expected.parameters()])
    assert_same([*net.state_dict().values()], [*expected.state_dict().values()])


def test_parameters_of_the_model_itself() -> None:
    """They are a layer like any other, and where they meet what comes later, that is copied to them."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 32), nn.Linear(32, 4)
            self.scale = nn.Parameter(torch.full((4,), 3.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x * self.scale)) * self.scale

    torch.manual_seed(1)
    net, x = Scaled(), torch.randn(8, 4)
    expected = copy.deepcopy(net)
    placement = marid.place(net, [1, 2], x, limits=[2_300, 2_300])
    assert list(placement.at) == ["", "first", "second"]
    assert len(placement.devices) == 2
    assert placement.output_device == net.scale.device
    assert placement.forward_bytes == x.numel() // 4 * (32 + 4) * 4
    found = net(x.to(placement.input_device))
    found.sum().backward()
    expected(x).sum().backward()
    assert found.device == placement.output_device
    assert_same([one.grad for one in net.parameters()], [one.grad for one in expected.parameters()])


def test_what_cannot_be_placed() -> None:
    """Each is said at once, and nothing moves."""

    class Branching(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.sum().item() > 0 else x

    model = Branching(2, 2)
    with pytest.raises(UnsupportedOperationError, match="depends on values"):
        marid.place(model, [0], torch.ones(2))
    with pytest.raises(ValueError, match="each once"):
        marid.place(model, [0, 0], torch.ones(2))
    with pytest.raises(ValueError, match="each once"):
        marid.place(model, [], torch.ones(2))
    with pytest.raises(ValueError, match="of the type remote_accelerator, and not cpu"):
        marid.place(model, ["cpu"], torch.ones(2))
    with pytest.raises(ValueError, match="a limit for each of 2"):
        marid.place(model, [0, 1], torch.ones(2), limits=[1])
    with pytest.raises(MemoryLimitError, match=r"the layers take .* with 8 B, 8 B; the largest"):
        marid.place(nn.Linear(2, 2), [0, 1], torch.ones(2), limits=[8, 8])
    assert model.weight.device.type == "cpu"


def test_a_model_of_hugging_face_over_three() -> None:
    """It generates and has the gradients that it has on the CPU; its caches lie with its layers."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    expected = transformers.LlamaForCausalLM(config).eval()
    model = copy.deepcopy(expected)
    tokens = torch.randint(3, 99, (2, 7), generator=torch.Generator().manual_seed(1))
    placement = marid.place(model, [0, 1, 2], input_ids=tokens, limits=[_bytes(model) // 2] * 3)
    assert len(placement.devices) == 3
    there = tokens.to(placement.input_device)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert_same(model.generate(there, **options), expected.generate(tokens, **options))
    found = model(input_ids=there, labels=there).loss
    wanted = expected(input_ids=tokens, labels=tokens).loss
    found.backward()
    wanted.backward()
    assert_same(
        [found, *(one.grad for one in model.parameters())], [wanted, *(one.grad for one in expected.parameters())]
    )
