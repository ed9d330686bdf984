"""``marid.compile`` of functions that decide by numbers: a replay goes another way where a test comes out otherwise."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import marid
from marid import policy
from marid.errors import SyncForbiddenError
from marid.report.stats import FunctionStats
from tests.test_compile_steps import DEVICE, flat, same

pytestmark = pytest.mark.in_process("tests of numbers are replayed where what runs is in this process")


def both(
    make: Callable[[str], Callable[..., Any]], inputs: list[Tensor], state: Callable[[Any], Any] = lambda _: ()
) -> FunctionStats:
    """The function of the device under ``marid.compile`` gives what that of the CPU does, and leaves such state."""
    torch.manual_seed(0)
    eager = make("cpu")
    torch.manual_seed(0)
    lazy = make(DEVICE)
    compiled = marid.compile(lazy)
    for turn, x in enumerate(inputs):
        torch.manual_seed(turn)
        expected = flat([eager(x.clone()), state(eager)])
        torch.manual_seed(turn)
        found = flat([compiled(x.to(DEVICE)), state(lazy)])
        assert len(found) == len(expected)
        assert all(map(same, found, expected)), (turn, found, expected, compiled.stats())
    return compiled.stats()


def numbers(count: int, choices: list[float], size: int = 3) -> list[Tensor]:
    """Tensors that mostly hold the first of these."""
    chosen = random.Random(0)
    return [torch.full((size,), chosen.choice(choices) if chosen.random() < 0.2 else choices[0]) for _ in range(count)]


def test_a_loop_that_stops_when_it_is_done() -> None:
    def make(device: str) -> Callable[..., Any]:
        matrix = torch.diag(torch.tensor([0.5, 0.25, 0.1])).to(device)

        def solve(x: Tensor) -> Any:
            for turn in range(40):
                x = matrix @ x
                if x.norm() < 1e-3:
                    return x, turn
            return x, -1

        return solve

    stats = both(make, numbers(80, [1.0, 2.0, 100.0, 1e-4]))
    assert stats.replays > 50
    assert stats.guard_failures > 3


def one_test(x: Tensor) -> Any:
    if x.sum().item() < 4:
        return x + 1
    return x * 2


def truth(x: Tensor) -> Any:
    return x + 1 if (x - 1).sum() else x * 2


def truth_of_an_item(x: Tensor) -> Any:
    return x + 1 if not (x - 1).sum().item() else x * 2


def between(x: Tensor) -> Any:
    return x + 1 if 0 < x.sum().item() < 4 else x * 2


class Limit:
    most = 4.0


def by_an_attribute(x: Tensor) -> Any:
    return x + 1 if x.sum().item() <= Limit.most else x * 2


def improved(x: Tensor) -> Any:
    """As a solver that stops when it gets nowhere, whose numbers are Python's."""
    before = math.inf
    for turn in range(30):
        x = x * 0.5
        now = x.sum().item()
        if abs(before - now) < 1e-3:
            return x, turn, now
        before = now
    return x, -1, before


def averaged(x: Tensor) -> Any:
    total = 0.0
    for row in x.unbind():
        total += row.item()
    if total / len(x) > 1.5 or -total < -100:
        return x - 1, total
    return x, total


def of_two(x: Tensor) -> Any:
    low, high = x.min().item(), x.max().item()
    return x + 1 if high - low < 0.5 and low * 2 < high + 3 else x * 2


def of_whole_numbers(x: Tensor) -> Any:
    some, all_of_them = (x > 1).sum().item(), x.numel()
    return x + 1 if some / all_of_them > 0.5 or 2 * some - 1 == 3 else x * 2


def whole_numbers(x: Tensor) -> Any:
    count = (x > 1).sum().item()
    return x + 1 if count == 0 else x * 2


def asserted(x: Tensor) -> Any:
    assert torch.isfinite(x).all()
    assert (x > 0).all().item(), "not positive"
    return x.log()


def repeated(x: Tensor) -> Any:
    turns = 0
    while (x < 10).any():
        x = x * 2
        turns += 1
    return x, turns


def by_library(x: Tensor) -> Any:
    weight = x.clone().requires_grad_()
    weight.square().sum().backward()
    norm = nn.utils.clip_grad_norm_([weight], 1.0, error_if_nonfinite=True)
    return norm, weight.grad


def returned_too(x: Tensor) -> Any:
    total = x.sum().item()
    found = [total]
    if total < 4:
        found.append(x.mean().item())
    return found


@pytest.mark.parametrize(
    "function",
    [
        one_test,
        truth,
        truth_of_an_item,
        between,
        by_an_attribute,
        improved,
        averaged,
        of_two,
        of_whole_numbers,
        whole_numbers,
        asserted,
        repeated,
        by_library,
        returned_too,
    ],
)
def test_tests_of_numbers(function: Callable[..., Any]) -> None:
    stats = both(lambda _: function, numbers(60, [1.0, 2.0, 5.0]))
    assert stats.replays > 35, stats


def test_what_a_test_refuses_is_refused_as_ever() -> None:
    compiled = marid.compile(asserted)
    for turn in range(40):
        x = torch.ones(2)
        if turn % 10 == 9:
            x[0] = -1
            with pytest.raises(AssertionError, match="not positive"):
                compiled(x.to(DEVICE))
        else:
            assert compiled(x.to(DEVICE)).tolist() == [0.0, 0.0]
    assert compiled.stats().replays > 25


class Trained:
    """A step of training that is left out where the loss is large: what was written by then stays, and no more."""

    def __init__(self, device: str) -> None:
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 1)).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.seen = torch.zeros(()).to(device)
        self.worst = torch.zeros(1).to(device)

    def __call__(self, x: Tensor) -> Any:
        self.seen.add_(1)
        self.optimizer.zero_grad()
        loss = self.model(x.expand(4, 3)).square().mean()
        loss.backward()
        self.worst[0] = torch.maximum(self.worst[0], loss.detach())
        if loss.detach() + x.abs().mean() > 9:
            return loss.item(), False
        self.optimizer.step()
        if self.worst.max() > 3:
            self.worst = torch.zeros_like(self.worst)
        return loss.item(), True

    def state(self) -> Any:
        moments = [one for kept in self.optimizer.state.values() for one in kept.values()]
        grads = [one.grad for one in self.model.parameters()]
        return [*self.model.parameters(), *self.model.buffers(), *moments, *grads, self.seen, self.worst]


def test_what_was_written_before_a_test_is_undone() -> None:
    stats = both(Trained, numbers(120, [1.0, -1.0, 40.0]), Trained.state)
    assert stats.replays > 40, stats
    assert stats.guard_failures > 5, stats


def test_memory_seen_in_several_ways_before_a_test() -> None:
    def make(device: str) -> Callable[..., Any]:
        kept = torch.zeros(2, 3).to(device)
        row = kept[0]

        def step(x: Tensor) -> Any:
            row.add_(x)
            kept[1] = kept[1] * 0.5 + kept[0]
            turned = kept.t()
            turned[0].mul_(0.5)
            if kept.sum() > 20:
                kept.zero_()
                return row.clone(), True
            turned.add_(1)
            return turned.clone(), bool((row > 3).any())

        return step

    stats = both(make, numbers(80, [1.0, 3.0]))
    assert stats.replays + stats.guard_failures > 20


def test_random_numbers_are_taken_once() -> None:
    def make(device: str) -> Callable[..., Any]:
        def draw(x: Tensor) -> Any:
            noise = torch.randn(3, device=device)
            if (noise + x).sum() > 3:
                noise = torch.rand(3, device=device)
            return noise, torch.rand(2, device=device)

        return draw

    stats = both(make, numbers(60, [-1.0, 9.0]))
    assert stats.replays > 20


def test_tests_that_come_out_in_ever_other_ways_run_as_python(caplog: pytest.LogCaptureFixture) -> None:
    def make(_device: str) -> Callable[..., Any]:
        def count(x: Tensor) -> Any:
            bits = [bool(bit) for bit in torch.stack([(x[0] // 2**n) % 2 > 0 for n in range(5)]).unbind()]
            return x + sum(bits)

        return count

    chosen = random.Random(1)
    stats = both(make, [torch.full((1,), float(chosen.randrange(32))) for _ in range(200)])
    assert stats.plain > 50, stats
    assert stats.guard_failures < policy.REPLAY_LOST + stats.replays
    assert "comes out now so, now otherwise" in caplog.text
    assert "test_compile_guards.py" in caplog.text


def test_both_ways_that_a_test_comes_out_are_replayed() -> None:
    def make(_device: str) -> Callable[..., Any]:
        return lambda x: x + 1 if x.sum() > 0 else x * 2

    stats = both(make, [torch.full((1,), 1.0 if turn % 2 else -1.0) for turn in range(200)])
    assert stats.replays > 180
    assert stats.guard_failures < 20


@pytest.mark.parametrize("function", [one_test, truth, asserted])
def test_with_fullgraph_a_test_is_an_error(function: Callable[..., Any]) -> None:
    with pytest.raises(SyncForbiddenError, match=r"test_compile_guards\.py"):
        marid.compile(function, fullgraph=True)(torch.ones(3, device=DEVICE))


def test_under_a_limit_on_memory_tests_are_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marid.settings, "memory_limit", 1 << 30)
    stats = both(lambda _: one_test, numbers(12, [1.0, 5.0]))
    assert stats.replays == 0
    assert any("reads a value" in reason for reason in stats.fallbacks)


def test_no_sync_forbids_tests() -> None:
    def function(x: Tensor) -> Any:
        with marid.no_sync():
            return x + 1 if x.sum() > 0 else x

    with pytest.raises(SyncForbiddenError, match=r"test_compile_guards\.py"):
        marid.compile(function)(torch.ones(3, device=DEVICE))


def test_an_operation_that_fails_before_a_test_raises_at_the_test() -> None:
    def pick(x: Tensor, places: Tensor) -> Any:
        return x + 1 if x[places].sum() > 0 else x

    compiled = marid.compile(pick)
    x = torch.ones(3, device=DEVICE)
    for turn in range(12):
        if turn in (1, 8):
            with pytest.raises(IndexError, match="out of bounds"):
                compiled(x, torch.tensor([7], device=DEVICE))
        else:
            assert compiled(x, torch.tensor([1], device=DEVICE)).tolist() == [2.0] * 3
    assert compiled.stats().replays > 5


LinAlgError: Any = torch.linalg.LinAlgError  # pyright: ignore[reportPrivateImportUsage]
_FACTORISATIONS: dict[str, Callable[[Tensor], Any]] = {
    "inv": torch.linalg.inv,
    "solve": lambda matrix: torch.linalg.solve(matrix, matrix.sum(0)),
    "cholesky": torch.linalg.cholesky,
    "batch": lambda matrix: torch.linalg.inv(torch.stack([matrix, matrix + torch.eye(3, device=matrix.device)])),
    "eigh": torch.linalg.eigh,
}


@pytest.mark.parametrize("name", _FACTORISATIONS)
@pytest.mark.parametrize("caught", [False, True], ids=["raised", "caught"])
def test_factorisations_are_replayed_until_one_fails(name: str, caught: bool) -> None:
    """What fails raises PyTorch's error at its line, where the function may handle it; what it wrote before stays."""
    factorise = _FACTORISATIONS[name]

    def make(device: str) -> Callable[..., Any]:
        total = torch.zeros(3, 3).to(device)

        def step(x: Tensor) -> Any:
            matrix = torch.diag(x)
            total.add_(matrix)
            try:
                return factorise(matrix), total.clone()
            except LinAlgError:
                if not caught:
                    raise
                return total + 1

        return step

    eager, lazy = make("cpu"), make(DEVICE)
    compiled = marid.compile(lazy)

    def outcome(step: Callable[..., Any], x: Tensor) -> list[Any]:
        try:
            return flat(step(x))
        except LinAlgError as error:
            return [str(error)]

    for turn in range(24):
        x = torch.full((3,), 0.0 if turn == 16 else 1.0 + turn)
        if turn == 15:
            assert compiled.stats().replays > 10
        expected, found = outcome(eager, x), outcome(compiled, x.to(DEVICE))
        assert len(found) == len(expected) == (1 if turn == 16 and name != "eigh" else len(expected))
        assert all(a == b if isinstance(a, str) else same(a, b) for a, b in zip(found, expected, strict=True)), turn


def test_operators_of_others_run_once_a_call() -> None:
    """They may do anything, which nobody could undo."""
    calls: list[str] = []

    @torch.library.custom_op("marid_tests_guards::noted", mutates_args=())
    def noted(x: Tensor) -> Tensor:
        calls.append(x.device.type)
        return x.clone()

    @noted.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def needed(x: Tensor) -> Any:
        return x + 1 if noted(x).sum() > 0 else x * 2

    def beside(x: Tensor) -> Any:
        y = noted(x)
        return x + y if x.sum() > 0 else y

    noted(torch.ones(2, device=DEVICE)).cpu()  # the first call is tried on the CPU, to see what it returns
    for function in (needed, beside):
        compiled = marid.compile(function)
        for turn in range(20):
            x = torch.full((2,), 1.0 if turn % 5 else -1.0)
            calls.clear()
            expected = function(x)
            assert calls == ["cpu"]
            assert torch.equal(compiled(x.to(DEVICE)).cpu(), expected)
            assert calls == ["cpu", "cpu"]


def test_other_numbers_than_those_of_python_are_compared_at_once() -> None:
    def function(x: Tensor) -> Any:
        return x + 1 if x.sum().item() < torch.tensor(4.0) else x * 2

    compiled = marid.compile(function)
    for number in (1.0, 2.0, 1.0):
        assert compiled(torch.full((3,), number, device=DEVICE)).tolist() == function(torch.full((3,), number)).tolist()
    assert compiled.stats().replays == 0


@pytest.mark.parametrize(
    ("words", "values", "numbers", "passes"),
    [
        ("v n lt", [1.0], [2.0], True),
        ("v v sub abs n ge", [1.0, 4.0], [3.0], True),
        ("n v div n gt", [0.0], [1.0, 2.0], None),
        ("v w mul n gt", [1 << 40], [float(1 << 30), 1.0], None),
        ("v w eq", [1 << 53], [0.0], None),
        ("v neg v add w ne", [3, 3], [0.0], False),
        ("v n eq", [math.nan], [math.nan], False),
        ("v n mod", [1.0], [1.0], ValueError),
        ("v lt", [1.0], [], ValueError),
        ("v v lt", [1.0], [], ValueError),
        ("v", [1.0], [], ValueError),
    ],
)
def test_the_operator_of_guards(words: str, values: list[Any], numbers: list[float], passes: Any) -> None:
    marid.stats()
    tensors = [torch.tensor(value) for value in values]
    for outcome in (True, False):
        if passes is outcome:
            assert torch.ops.marid.guard(tensors, numbers, words, outcome).numel() == 0
        else:
            with pytest.raises(RuntimeError if passes is not ValueError else ValueError):
                torch.ops.marid.guard(tensors, numbers, words, outcome)


def test_comparisons_are_those_of_python() -> None:
    """Not those of the tensor's type: 0.1 in single precision is more than 0.1."""

    def function(x: Tensor) -> Any:
        return [x.item() > 0.1, x.item() == 0.1, x.item() >= math.nan, x.item() < math.inf, x.item() != 1 << 52]  # noqa: PLW0177

    compiled = marid.compile(function)
    for _ in range(5):
        assert compiled(torch.tensor(0.1, device=DEVICE)) == function(torch.tensor(0.1))
    assert compiled.stats().replays == 3

    def large(x: Tensor) -> Any:
        return [x.item() > 2.0**53, x.item() == (1 << 53) + 1, x.item() < 1 << 80]

    compiled = marid.compile(large)
    for _ in range(5):
        assert compiled(torch.tensor((1 << 53) + 1, device=DEVICE)) == large(torch.tensor((1 << 53) + 1))


# --- random functions -------------------------------------------------------------------------------------------------


class Chosen:
    """A random function of tests, loops, state and random numbers, on a device."""

    def __init__(self, seed: int, device: str) -> None:
        self.seed, self.device = seed, device
        self.kept = [torch.zeros(3).to(device), torch.ones(2, 3).to(device)]
        self.moved = {"mean": torch.zeros(3).to(device)}

    def __call__(self, x: Tensor) -> Any:
        chosen = random.Random(self.seed)
        found: list[Any] = []
        values = [x, *self.kept, self.moved["mean"]]
        for _ in range(chosen.randint(2, 6)):
            kind = chosen.choice(
                ["test", "item", "loop", "write", "view", "draw", "replace", "value", "branch", "zero"]
            )
            one, other = chosen.choice(values), chosen.choice(values)
            bound = chosen.choice([-1.0, 0.5, 2, 6.0])
            if kind == "test":
                if one.sum() > bound:
                    values.append(other * 0.5)
            elif kind == "item":
                if one.mean().item() <= bound:
                    values.append(one - other)
            elif kind == "loop":
                value, turns = one.abs() + 1, 0
                while value.max() > 1.5 and turns < 6:
                    value, turns = value * 0.7, turns + 1
                values.append(value)
                found.append(turns)
            elif kind == "write":
                self.kept[0].mul_(0.5).add_(one.sum(0) if one.dim() > 1 else one)
            elif kind == "view":
                self.kept[1][chosen.randrange(2)].lerp_(one.mean(0) if one.dim() > 1 else one, 0.25)
            elif kind == "draw":
                values.append(F.dropout(one, 0.5) + torch.rand(3, device=self.device))
            elif kind == "replace":
                self.moved["mean"] = 0.5 * self.moved["mean"] + (other.mean(0) if other.dim() > 1 else other)
            elif kind == "value":
                found.append(one.sum().item())
            elif kind == "branch":
                found.append(bool((one > bound).any()))
            elif (one.abs() > 1e4).any():
                self.kept[0].zero_()
        return found, values[-1]


def compare(seed: int) -> int:
    """Compare a random function with the CPU's; how many calls were replays."""
    inputs = numbers(40, [random.Random(seed).choice([0.0, 1.0, 2.0]), 3.0, -2.0])
    stats = both(lambda device: Chosen(seed, device), inputs, lambda function: [function.kept, function.moved])
    return stats.replays


@pytest.mark.parametrize("first", range(0, 60, 15))
def test_random_functions(first: int) -> None:
    assert sum(map(compare, range(first, first + 15))) > 60


@pytest.mark.conformance
@pytest.mark.parametrize("first", range(100, 2100, 100))
def test_many_random_functions(first: int) -> None:
    assert sum(map(compare, range(first, first + 100))) > 400
