"""Programs that do not fit into ``marid.settings.memory_limit`` as recorded: what is computed again has the same bits,
and the limit is kept.
"""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import marid
from marid.engine import memory_limit
from marid.errors import MaterializationError, MemoryLimitError
from marid.execute.fitted import Variants, fitted
from marid.execute.interrupted import Interrupted
from marid.execute.specialisation import Frame
from marid.frontend.engines import engine_of
from marid.graph.analysis import forecast
from marid.graph.prepared import Prepared, Replay
from marid.remote.launch.connect import disconnect
from tests.fuzz.networks import TIERS, check, network
from tests.fuzz.tight import tight
from tests.helpers import DEVICE
from tests.remote_helpers import worker_process

pytestmark = pytest.mark.in_process("the limit of this process's own engine")


@pytest.fixture(autouse=True)
def _flat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are bits; every program is watched."""
    monkeypatch.setattr(marid.settings, "compile", False)
    monkeypatch.setattr(marid.settings, "plan_bytes", 0)


class Seen:
    """What runs took that were given a share of what their programs take as recorded."""

    def __init__(self) -> None:
        self.runs: list[tuple[int, int]] = []
        """The room that each had, and what was forecast as recorded."""
        self.variants: list[Variants] = []

    @property
    def tightest(self) -> float:
        """The smallest share."""
        return min(room / expected for room, expected in self.runs)

    def held(self) -> list[tuple[int, int]]:
        """For each program that was watched while it ran: what its results take, and what was allocated at once."""
        return [(one.rewritten.nbytes, one.nbytes) for variants in self.variants for one in variants.known]


@contextlib.contextmanager
def share(part: float) -> Iterator[Seen]:
    """Inside, runs that can have this part of what their programs take; others run as recorded."""
    seen = Seen()

    def given(flat: Any, task: Any, room: int, expected: int) -> Any:
        found = fitted(flat, task, int(part * expected), expected)
        if found is None or not expected:
            return fitted(flat, task, room, expected)
        seen.runs.append((int(part * expected), expected))
        seen.variants = list({id(one): one for one in [*seen.variants, *flat.fitted.values()]}.values())
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(marid.settings, "memory_limit", 1 << 60)
        patch.setattr(memory_limit, "fitted", given)
        yield seen


# --- training --------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention_in, self.attention_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (-1, 16)).transpose(1, 2) for part in self.attention_in(self.norm(x)).chunk(3, 2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.attention_out(mixed), 0.1, self.training)
        return x + self.feed(self.feed_norm(x))


def _transformer() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 64), *[Block(64) for _ in range(4)], nn.Linear(64, 12))


def _convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for number in range(4):
        channels = 3 if number == 0 else 16
        layers += [nn.Conv2d(channels, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Dropout2d(0.2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 12))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "transformer": (_transformer, (8, 32, 12)),
    "convolutions": (_convolutions, (8, 3, 24, 24)),
}


def _trained(name: str, device: str, steps: int = 4) -> list[Tensor]:
    """Losses, parameters, buffers and optimizer state."""
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    batches = [torch.randn(shape).to(device) for _ in range(steps)]
    torch.manual_seed(1)  # the device's generator is another one
    for x in batches:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(torch.tensor(loss.item()))
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [*losses, *[value.cpu().clone() for value in [*model.state_dict().values(), *states]]]


def _equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("part", [0.8, 0.6, 0.45])
def test_a_training_step_fits_and_has_the_same_bits(name: str, part: float) -> None:
    """With attention, dropout, running statistics and what is written in place; and nothing is held beyond the limit,
    kernels' own memory included, once it is known."""
    expected = _trained(name, "cpu")
    with share(part) as seen:
        assert _equal(_trained(name, DEVICE), expected)
    whole = max(expected for _, expected in seen.runs)
    steps = [recorded for _, recorded in seen.runs if recorded > 0.99 * whole]  # one may run what was pending before
    assert len(steps) >= 3
    held = [held for results, held in seen.held() if results > whole // 4]
    assert held
    assert min(held) <= part * whole


def test_a_limit_is_kept_by_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user sets it: the step runs whole, is counted, and gives the same bits."""
    expected = _trained("transformer", "cpu")
    assert _equal(_trained("transformer", DEVICE), expected)
    with share(0.9) as seen:
        _trained("transformer", DEVICE, 2)
    most = max(recorded for _, recorded in seen.runs)
    before = marid.stats().programs_fitted
    state = 3 * sum(p.numel() * p.element_size() for p in _transformer().parameters())  # two of them AdamW's
    monkeypatch.setattr(marid.settings, "memory_limit", marid.stats().memory_allocated + state + int(0.75 * most))
    assert _equal(_trained("transformer", DEVICE), expected)
    assert marid.stats().programs_fitted > before


# --- random programs -------------------------------------------------------------------------------------------------


_KINDS = [*range(16), *[0, 1, 4, 8, 9, 10, 11, 12, 13, 14, 15] * 3]
"""Of a step of a random program: those that write come less often."""


def _random_program(seed: int) -> Callable[[str], list[Tensor]]:
    """A program of many operations of which a few results are read: views, writes, random numbers, several results."""

    def run(device: str) -> list[Tensor]:
        choices = random.Random(seed)
        torch.manual_seed(seed)
        inputs = [torch.randn(16, 16).to(device) for _ in range(3)]
        inputs.append(inputs[0][2:])  # the same memory
        torch.manual_seed(seed)  # the device's generator is another one
        values = [inputs[0] + 0, inputs[1] * 2]
        for _ in range(choices.randint(15, 60)):
            a, b = choices.choice(values[-6:]), choices.choice(values)
            kind = choices.choice(_KINDS)
            if kind == 0:
                values.append(torch.mm(a, b))
            elif kind == 1:
                values.append(F.dropout(a, 0.3))
            elif kind == 2:
                a.mul_(0.9).add_(b.t() * 1)
            elif kind == 3:
                a[choices.randrange(15) :].copy_(torch.rand(16, device=device))
            elif kind == 4:
                left, right = torch.cat([a, b]).tanh().split(16)
                values += [left, right + 1]
            elif kind == 5:
                values += torch.ops.aten._foreach_add([a, b], 0.5)
            elif kind == 6:
                torch.ops.aten._foreach_mul_([values[-1], values[-2]], 0.5)
            elif kind == 7:
                choices.choice(inputs).mul_(0.99)
            elif kind == 8:
                values.append(choices.choice(inputs[:3]) * a)
            elif kind == 9:
                values.append(torch.cat([inputs[3], inputs[1][:2]]) + b)
            elif kind == 10:
                most, _ = torch.sort(a, 1)
                values.append(most)
            elif kind == 11:
                values.append(F.layer_norm(a, (16,)))
            elif kind == 12:
                values.append(torch.rand_like(a).bernoulli_(0.5) * b)
            elif kind == 13:
                values.append(a.reshape(-1)[::2].repeat(2).view(16, 16))
            else:
                values.append(torch.sin(a) + b.sigmoid())
        read = [sum(v.mean() for v in values[::3]), values[-1]]
        del values, a, b
        return [value.cpu().clone() for value in [*read, *inputs]]

    return run


@pytest.mark.parametrize("seeds", [range(start, start + 75) for start in (0, 75)], ids=str)
def test_random_programs_have_the_same_bits(seeds: range) -> None:
    """Each three times, so that it runs by its memory plan; most of them fit into less than they take as recorded."""
    shares = []
    for seed in seeds:
        program = _random_program(seed)
        expected = program("cpu")
        with tight() as taken:
            for _ in range(3):
                assert _equal(program(DEVICE), expected), f"seed {seed}"
        shares += taken
    assert len(shares) > len(seeds)
    assert min(shares) <= 0.5


@pytest.mark.parametrize("part", range(2))
def test_random_networks_have_the_same_bits(part: int) -> None:
    """The networks of the fuzzer."""
    before = marid.stats().programs_fitted
    for seed in range(part * 30, part * 30 + 30):
        found = check(network(seed), TIERS["tight"])
        assert not found, f"seed {seed}: {'; '.join(map(str, found))}"
    assert marid.stats().programs_fitted > before


# --- what must not be repeated ---------------------------------------------------------------------------------------


def _large(device: str) -> Tensor:
    return torch.linspace(0, 1, 1 << 14).to(device)


def _program_of(written: Callable[[Tensor, Tensor, Tensor], object]) -> Callable[[str], list[Tensor]]:
    """One whose first result could only be computed again after what it was made of has been ``written``."""

    def run(device: str) -> list[Tensor]:
        x = _large(device)
        view = x[:]
        y = view.sin()  # 64 KB that are read at the end
        z = y + 1
        written(x, y, z)
        for _ in range(6):
            z = (z * 1.5).cos() + z
        return [(z + y).cpu().clone(), x.cpu().clone()]

    return run


WRITES: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
    "an input": lambda x, _y, _z: x.mul_(2),
    "through a view": lambda x, _y, _z: x[5:].zero_(),
    "by foreach": lambda x, _y, _z: torch.ops.aten._foreach_mul_([x, x[:0]], 3.0),
    "the result": lambda _x, y, z: y.add_(z),
    "the result with itself": lambda _x, y, _z: y.mul_(y),
    "at random": lambda _x, y, _z: y.uniform_(),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("part", [0.5, 0.7, 0.8])
def test_what_was_written_since_is_not_read_again(name: str, part: float) -> None:
    """Values are those of eager PyTorch, whether or not the program fits."""
    program = _program_of(WRITES[name])
    torch.manual_seed(3)
    expected = program("cpu")
    with share(part):
        for _ in range(3):
            torch.manual_seed(3)
            assert _equal(program(DEVICE), expected)


def test_running_statistics_are_updated_once() -> None:
    """Batch norm is computed again without them."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(64)
    x = torch.randn(256, 64)

    def run(device: str) -> list[Tensor]:
        layer = nn.BatchNorm1d(64).to(device)
        layer.load_state_dict(norm.state_dict())
        y = layer(x.to(device) + 1)
        z = y
        for _ in range(6):
            z = z.sin() + z.cos() * z.tanh()
        result = (z * y).mean()
        del y, z
        result.backward()
        torch.optim.SGD(layer.parameters(), lr=0.1).step()  # so all of it runs with the first read
        states = layer.state_dict().values()
        return [value.cpu().clone() for value in [result.detach(), *states]]

    expected = run("cpu")
    with share(0.8) as seen:
        for _ in range(3):
            assert _equal(run(DEVICE), expected)
    assert seen.runs


# --- errors ----------------------------------------------------------------------------------------------------------


def _failing(device: str, wrong: int) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """A result, one that cannot be had, one that needs what was dropped before the failure, and inputs."""
    x = _large(device)
    counted = torch.zeros(3).to(device)
    first = x.sin()
    second = first.cos()
    y = second
    for _ in range(5):
        y = (y * 1.5).tanh() + y
    counted.add_(1)
    table = torch.ones(4, 2).to(device)
    broken = F.embedding(torch.tensor([wrong]).to(device), table).sum() + y.sum()
    after = (first * 2).sum() + (second * 3).sum()
    return y.sum(), broken + after, after, [counted, x]


@pytest.mark.parametrize("part", [0.7, 0.8])
@pytest.mark.parametrize("runs", [1, 3])
def test_a_failure_names_its_line_and_loses_nothing(part: float, runs: int) -> None:
    """What ran before is kept, what was dropped by then is made again where it is needed, writes happen once."""
    fine, whole, after, inputs = _failing("cpu", 1)
    expected = [fine, after, *inputs]
    with share(part) as seen:
        for _ in range(runs):
            assert torch.equal(_failing(DEVICE, 1)[1].cpu(), whole)
        fine, whole, after, inputs = _failing(DEVICE, 9)
        with pytest.raises(MaterializationError, match=r"aten::embedding failed when it ran.*\n.*test_fitted\.py"):
            whole.cpu()
        assert _equal([value.cpu() for value in [fine, after, *inputs]], expected)
    assert seen.runs


def _branches(device: str, wrong: int) -> tuple[Tensor, Tensor, Tensor]:
    """A sum of what was all made before, what cannot be had and is needed last, and a count."""
    x = _large(device)
    table, counted = torch.ones(4, 1 << 14).to(device), torch.zeros(3).to(device)
    branches = [x * number for number in range(8)]
    broken = F.embedding(torch.tensor([wrong]).to(device), table)
    counted.add_(1)
    total = branches[0]
    for branch in branches[1:]:
        total = total + branch
    return total.sum(), broken.sum() + total.sum() + counted.sum(), counted


@pytest.mark.parametrize("runs", [1, 3])
def test_calls_are_put_off_rather_than_repeated(runs: int) -> None:
    """Branches are made where they are added up. What fails then has not taken back what came before it."""
    fine, whole, counted = _branches("cpu", 1)
    with share(0.45) as seen:
        for _ in range(runs):
            assert torch.equal(_branches(DEVICE, 1)[1].cpu(), whole)
        made = [one.rewritten for variants in seen.variants for one in variants.known]
        assert made
        assert all(len(one.origins) <= len(set(one.origins)) + 1 for one in made)
        assert any(one.origins != sorted(one.origins) for one in made)
        total, whole, count = _branches(DEVICE, 9)
        with pytest.raises(MaterializationError, match=r"aten::embedding failed when it ran.*\n.*test_fitted\.py"):
            whole.cpu()
        assert _equal([total.cpu(), count.cpu()], [fine, counted])


@pytest.mark.parametrize("name", MODELS)
def test_a_run_that_stops_anywhere_goes_on_as_recorded(name: str) -> None:
    """Ctrl-C comes between any two calls, also between those that make a block again."""
    stopped = 0

    def stop_everywhere(flat: Any, task: Any, room: int, expected: int) -> Any:
        nonlocal stopped
        found: Any = fitted(flat, task, expected // 2, expected, in_order=True)
        if found is None or expected < 1 << 20:
            return fitted(flat, task, room, expected)
        generator, outputs = engine_of(0)._twisters.at, frozenset(flat.program.output_slots)  # pyright: ignore[reportAttributeAccessIssue]

        def run(stop: int) -> list[Tensor]:
            inputs = [tensor.clone() for tensor in task.inputs]
            prepared = Prepared(flat.program, task.specs, task.nodes, expected)
            replay, start, tensors = Replay(prepared, inputs, task.params), 0, None
            if stop:
                again = Replay(found._replay._prepared, inputs, task.params)
                frame = Frame.of(again, task.params, generator)
                executable.steps(frame, 0, stop, frozenset(executable.program.output_slots))
                recorded = found._recorded(
                    Interrupted(stop, False, frame.tensors, KeyboardInterrupt()), replay, generator
                )
                start, tensors = recorded.index, recorded.tensors
            frame = Frame.of(replay, task.params, generator)
            frame.tensors = frame.tensors if tensors is None else tensors
            flat.steps(frame, start, len(flat.program.instructions), outputs)
            return [*[frame.tensors[slot] for slot in flat.program.output_slots], *inputs]

        executable = found._specialisation._owner
        whole = run(0)
        for stop in range(1, len(executable.program.instructions), 5):
            assert _equal(run(stop), whole), stop
            stopped += 1
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(marid.settings, "memory_limit", 1 << 60)
        patch.setattr(memory_limit, "fitted", stop_everywhere)
        _trained(name, DEVICE, 2)
    assert stopped > 10


def test_what_does_not_fit_is_refused_and_names_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has run, and it runs when there is room."""
    model = _transformer().to(DEVICE)
    x = torch.randn(8, 32, 12).to(DEVICE)
    marid.materialize(x, *model.parameters())
    loss = model(x).square().mean()
    loss.backward()
    executed = marid.stats().ops_executed
    monkeypatch.setattr(marid.settings, "memory_limit", marid.stats().memory_allocated + (100 << 10))
    with pytest.raises(
        MemoryLimitError, match=r"aten::\w+ written at .*test_fitted\.py.* in module '\d\.feed"
    ) as caught:
        loss.item()
    assert "KiB" in str(caught.value)
    assert marid.stats().ops_executed == executed
    monkeypatch.setattr(marid.settings, "memory_limit", 0)
    assert loss.item() > 0


def test_the_forecast_is_that_of_what_runs() -> None:
    """A rewritten program is held to the same analysis as any other."""
    with share(0.5) as seen:
        _trained("transformer", DEVICE, 2)
    made = [one for variants in seen.variants for one in variants.known]
    assert made
    for one in made:
        assert forecast(one.rewritten.program, one.rewritten.specs).nbytes == one.rewritten.nbytes
        assert len(one.rewritten.following) == len(one.rewritten.program.instructions) + 1


# --- on a worker -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spill", [(), ("--spill", "64m")])
def test_a_worker_fits_steps_into_its_limit(spill: tuple[str, ...]) -> None:
    """With the same bits; without a word of the client's."""
    expected = _trained("transformer", "cpu")
    with worker_process("--memory-limit", "6m", *spill) as worker:
        marid.connect(worker.address, first=3)
        try:
            assert _equal(_trained("transformer", "remote_accelerator:3"), expected)
        finally:
            gc.collect()
            disconnect(3, force=True)
