"""Passes: what each does, what each must leave alone, and that results, errors and interrupts stay what they were."""
# ruff: noqa: PLC3002

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import marid
from marid.execute import flat
from marid.frontend.engines import local_engine as engine
from tests.helpers import DEVICE, assert_same, on_both

pytestmark = pytest.mark.in_process("reads the programs of the in-process engine")

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _every_program(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Passes look at the smallest program, and every program follows a memory plan."""
    engine.programs.clear()
    monkeypatch.setattr(marid.settings, "pass_instructions", 1)
    monkeypatch.setattr(marid.settings, "plan_bytes", 0)
    yield
    engine.programs.clear()


def _improved() -> list[Any]:
    programs = list(engine.programs._programs.values())
    return [form.improved for program in programs for form in program.forms if form.improved is not None]


def _operators(work: Callable[..., Any], *tensors: torch.Tensor, times: int = 4) -> list[str]:
    """What runs of ``work`` when it has come several times, having compared each run with the CPU's."""
    expected = work(*[t.clone() for t in tensors])
    for _ in range(times):
        engine_only = [t.to(DEVICE) for t in tensors]
        marid.materialize(*engine_only)
        results = work(*engine_only)
        marid.materialize(*(results if isinstance(results, (tuple, list)) else [results]))
        assert_same(results, expected)
        assert_same(engine_only, _after(work, tensors))
    largest = max(engine.programs._programs.values(), key=lambda program: len(program.program.instructions))
    forms = [form.improved for form in largest.forms if form.improved is not None]
    program = forms[-1].program if forms else largest.program
    return [str(instruction.op.func).removeprefix("aten.") for instruction in program.instructions]


def _after(work: Callable[..., Any], tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    copies = [t.clone() for t in tensors]
    work(*copies)
    return copies


X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
W = torch.randn(6, 5, generator=torch.Generator().manual_seed(2))
B = torch.randn(5, generator=torch.Generator().manual_seed(3))
N = torch.arange(-3, 3)


# --- what each pass does ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("work", "tensors", "left"),
    [
        (lambda x: x.t().t().exp(), [X], ["exp.default"]),
        (lambda x: x.view(24).view(2, 12).exp(), [X], ["view.default", "exp.default"]),
        (lambda x: x.unsqueeze(0).transpose(0, 1).exp(), [X], ["as_strided.default", "exp.default"]),
        (lambda x: x.permute(1, 0).unsqueeze(0).permute(0, 2, 1).squeeze(0).exp(), [X], ["exp.default"]),
        (lambda x: x[1:][:, 2:].exp(), [X], ["as_strided.default", "exp.default"]),
        (lambda x: x[0].expand(3, 6).expand(2, 3, 6).exp(), [X], ["as_strided.default", "exp.default"]),
        (lambda x: (x * 1).exp(), [X], ["exp.default"]),
        (lambda x: (x / 1.0).exp(), [X], ["exp.default"]),
        (lambda x: (x**1).exp(), [X], ["exp.default"]),
        (lambda x: (x - 0).exp(), [X], ["exp.default"]),
        (lambda n: (n + 0) // 1 * 2, [N], ["mul.Tensor"]),
        (lambda n: ((n | 0) ^ 0) & -1, [N + 1], ["bitwise_and.Scalar"]),
        (lambda x: x.neg().neg().exp(), [X], ["exp.default"]),
        (lambda x: x.relu().relu().exp(), [X], ["relu.default", "exp.default"]),
        (lambda x: x.clone().exp(), [X], ["exp.default"]),
        (lambda x: x.exp().clone(), [X], ["exp.default"]),
        (lambda x: x.to(torch.float32, copy=True).exp(), [X], ["exp.default"]),
        (lambda x: x.exp() * x.exp(), [X], ["exp.default", "mul.Tensor"]),
        (lambda x: (x + 2.5) * (x + 2.5), [X], ["add.Tensor", "mul.Tensor"]),
        (lambda x: x.t().exp() + x.t().sin(), [X], ["t.default", "exp.default", "sin.default", "add.Tensor"]),
        (lambda x: x * torch.arange(6, device=x.device), [X], ["mul.Tensor"]),
        (lambda x: x * (torch.full((6,), 2.0, device=x.device) + 1), [X], ["mul.Tensor"]),
        (lambda x, w, b: torch.addmm(b, x, w).relu(), [X, W, B], ["_addmm_activation.default"]),
        (lambda x, w, b: F.gelu(torch.addmm(b, x, w)), [X, W, B], ["_addmm_activation.default"]),
        (
            lambda x, w, b: torch.addmm(b, x, w).view(2, 2, 5).relu(),
            [X, W, B],
            ["_addmm_activation.default", "view.default"],
        ),
        (
            lambda x, w, b: F.linear(x, w.t(), b).relu(),
            [X, W, B],
            ["t.default", "t.default", "_addmm_activation.default"],
        ),
    ],
)
def test_what_is_left_of_a_program(work: Any, tensors: list[torch.Tensor], left: list[str]) -> None:
    """After the passes, by operator. Results are those of the CPU, bit for bit, in every run."""
    assert _operators(work, *tensors) == left
    assert sum(marid.stats().passes.values())


def _written_view(x: torch.Tensor) -> Any:
    first = x.exp()
    x.add_(1)
    return first * x.exp()


def _written_through_a_view(x: torch.Tensor) -> Any:
    first = x.exp()
    x[0].add_(1)
    return first * x.exp()


def _copy_that_is_written(x: torch.Tensor) -> Any:
    y = x.clone()
    y.add_(1)
    return y * x


def _copy_of_what_is_written(x: torch.Tensor) -> Any:
    y = x * 1
    x.add_(1)
    return y * x


def _negation_of_what_is_written(x: torch.Tensor) -> Any:
    y = -x
    x.add_(1)
    return -y * x


def _constant_that_is_written(x: torch.Tensor) -> Any:
    y = torch.zeros(6, device=x.device)
    y += 1
    return x + y


def _aliased_inputs(x: torch.Tensor, y: torch.Tensor) -> Any:
    first = y.exp()
    x.add_(1)
    return first + y.exp()


@pytest.mark.parametrize(
    ("work", "tensors", "kept"),
    [
        (lambda x: x + 0.0, [X * 0 - 0.0], ["add.Tensor"]),
        (lambda x: (x + 0) * 2, [X], ["add.Tensor", "mul.Tensor"]),
        (lambda x: x * 1, [X], ["mul.Tensor"]),
        (lambda x: x.clone(), [X], ["clone.default"]),
        (lambda x: x.t().contiguous().exp(), [X], ["t.default", "clone.default", "exp.default"]),
        (lambda n: n * 1.0 + n / 1, [N], ["mul.Tensor", "div.Tensor", "add.Tensor"]),
        (lambda x: (x.exp(), x.exp()), [X], ["exp.default", "exp.default"]),
        (lambda x: (x.t(), x.t()), [X], ["t.default", "t.default"]),
        (lambda x: torch.arange(6.0, device=x.device), [X], ["arange.default"]),
        (lambda x: x + torch.arange(600.0, device=x.device).view(100, 6).sum(0), [X], None),
        (_written_view, [X], ["exp.default", "add_.Tensor", "exp.default", "mul.Tensor"]),
        (
            _written_through_a_view,
            [X],
            ["exp.default", "select.int", "add_.Tensor", "exp.default", "mul.Tensor"],
        ),
        (_copy_that_is_written, [X], ["clone.default", "add_.Tensor", "mul.Tensor"]),
        (_copy_of_what_is_written, [X], ["mul.Tensor", "add_.Tensor", "mul.Tensor"]),
        (_negation_of_what_is_written, [X], ["neg.default", "add_.Tensor", "neg.default", "mul.Tensor"]),
        (_constant_that_is_written, [X], ["zeros.default", "add_.Tensor", "add.Tensor"]),
        (
            lambda x, w, b: (lambda z: z.relu() + z)(torch.addmm(b, x, w)),
            [X, W, B],
            ["addmm.default", "relu.default", "add.Tensor"],
        ),
        (
            lambda x, w, b: F.gelu(torch.addmm(b, x, w), approximate="tanh"),
            [X, W, B],
            ["addmm.default", "gelu.default"],
        ),
        (
            lambda x, w, b: (x @ w + b).relu(),  # rounds elsewhere
            [X, W, B],
            ["mm.default", "add.Tensor", "relu.default"],
        ),
    ],
)
def test_what_is_left_alone(work: Any, tensors: list[torch.Tensor], kept: list[str] | None) -> None:
    """Where a pass would change a bit, share an output, or see a write too early or too late."""
    found = _operators(work, *tensors)
    assert kept is None or found == kept


def test_inputs_that_share_memory() -> None:
    """The program does not say so; a write to one is a write to all."""
    for _ in range(4):
        both = []
        for device in ("cpu", DEVICE):
            x = X.clone().to(device)
            y = x[1:]
            marid.materialize(*(t for t in (x, y) if device != "cpu"))
            both.append((_aliased_inputs(x, y), x, y))
        assert_same(both[1], both[0])


def test_random_operations_are_never_merged() -> None:
    """Also where they look the same; each draws its own numbers."""

    def work(device: str) -> Any:
        x = torch.rand(5, device=device) + torch.rand(5, device=device)
        return F.dropout(x, 0.5) + F.dropout(x, 0.5)

    for _ in range(4):
        on_both(work)
    instructions = [i for program in engine.programs._programs.values() for i in program.program.instructions]
    assert [i.op.name for i in instructions].count("aten::rand") == 2
    assert "common" not in marid.stats().passes


def test_outputs_are_never_one_tensor() -> None:
    """A user writes one of them; the other, and what was held as a constant, stays."""
    x = X.to(DEVICE)
    for _ in range(4):
        a, b, c = x.exp(), x.exp(), x.exp().clone()
        d, e = torch.ones(3, device=DEVICE), torch.ones(3, device=DEVICE)
        f = (x * 1) * 1
        marid.materialize(a, b, c, d, e, f)
        for t in (a, d, f):
            t.zero_()
        assert_same([b, c, e, x], [X.exp(), X.exp(), torch.ones(3), X])


def test_what_is_computed_twice_to_save_memory_stays_so() -> None:
    """A value that the program lets go before it is computed again is not kept (checkpointing)."""
    big = torch.randn(64, 64)

    def work(x: torch.Tensor) -> torch.Tensor:
        first = x.exp().sum()
        other = (x.sin() * x.cos()).sum()
        return first + other + x.exp().mean()

    assert _operators(work, big).count("exp.default") == 2
    assert _operators(work, X).count("exp.default") == 1  # so small that it does not matter


def test_checkpointing_keeps_its_peak() -> None:
    """The forecast of a checkpointed training step is what it was, and so are its gradients."""

    def step(device: str) -> Any:
        layers = [torch.nn.Linear(32, 32, device=device) for _ in range(3)]
        x = torch.randn(64, 32, device=device, requires_grad=True)
        y = x
        for layer in layers:
            y = torch.utils.checkpoint.checkpoint(lambda v, layer=layer: layer(v).tanh().sin(), y, use_reentrant=False)
        y.sum().backward()
        return [x.grad, *(p.grad for layer in layers for p in layer.parameters())]

    for _ in range(4):
        on_both(step)
    for improved in _improved():
        names = [i.op.name for i in improved.recorded.instructions], [i.op.name for i in improved.program.instructions]
        assert names[0].count("aten::tanh") == names[1].count("aten::tanh")


# --- numbers and sizes -----------------------------------------------------------------------------------------------


def test_numbers_and_sizes_may_change() -> None:
    """What was concluded from a number or a size is not used where that is another."""
    x = X.to(DEVICE)
    for scale in (1, 1, 1, 2, 2.5, 1, 1, 1.0, 3, 4, 5, 6, -0.0, 0, 1):
        for rows in (4, 2, 4):
            part, other = x[:rows], X[:rows]
            found = [
                (part * scale).exp() * torch.full((6,), scale, device=DEVICE),
                (part + scale) * (part + 1),
                (part - scale).view(-1).view(rows, 6).sin(),
                1 / (part * 0 - scale),
            ]
            expected = [
                (other * scale).exp() * torch.full((6,), scale),
                (other + scale) * (other + 1),
                (other - scale).view(-1).view(rows, 6).sin(),
                1 / (other * 0 - scale),
            ]
            assert_same(found, expected)


def test_a_learning_rate_that_changes_is_no_guard() -> None:
    """A number that was another one in the run before is not concluded from: no program is improved again and again."""
    x = X.to(DEVICE)
    marid.materialize(x)
    for step in range(12):
        assert_same((x * (1 + step) * 1).exp(), (X * (1 + step) * 1).exp())
    improved = _improved()
    assert len(improved) == 1
    assert len(improved[0].guards.values) == 1


def test_large_programs_are_improved_in_pieces() -> None:
    """A run does a piece at most; numbers that change meanwhile are those of the run that uses the result."""
    x = X.to(DEVICE)
    marid.materialize(x)

    def work(x: torch.Tensor, scale: float) -> torch.Tensor:
        for _ in range(80):
            x = (x * 0.5).t().t() * scale
        return x

    for scale in (1, 1, 1, 3, 2, 1, 1, 3, 1, 1, 1, 1, 3, 3):
        assert_same(work(x, scale), work(X, scale))
    (improved, *_) = _improved()
    assert improved.changes["views"] == 80
    assert len(improved.program.instructions) < len(improved.recorded.instructions) - 160


def test_passes_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """At any time, and small programs are left alone."""
    work = lambda x: x.t().t().exp()  # noqa: E731
    monkeypatch.setattr(marid.settings, "passes", False)
    assert _operators(work, X) == ["t.default", "t.default", "exp.default"]
    monkeypatch.setattr(marid.settings, "passes", True)
    assert _operators(work, X) == ["exp.default"]
    monkeypatch.setattr(marid.settings, "pass_instructions", 4)
    assert _operators(work, X) == ["t.default", "t.default", "exp.default"]


# --- errors and interrupts -------------------------------------------------------------------------------------------

_armed: list[BaseException] = []


@torch.library.custom_op("marid_tests::bomb", mutates_args=())
def bomb(x: torch.Tensor) -> torch.Tensor:
    """A copy of ``x``, unless it is to raise."""
    if _armed:
        raise _armed.pop()
    return x.clone()


@bomb.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class _Writer:
    """Random programs with much for passes to do, run eagerly or on the device with a bomb at one place."""

    def __init__(self, seed: int, device: str, bomb_at: int = -1) -> None:
        self.random = random.Random(seed)
        self.values: list[torch.Tensor] = [t.clone().to(device) for t in (X, X.t().contiguous().t(), X.abs() + 1)]
        self.device = device
        self.bomb_at = bomb_at
        self.bombs: list[torch.Tensor] = []

    def run(self, length: int) -> list[torch.Tensor]:
        """Every tensor of the program, or half of them, so that many are only intermediate."""
        for step in range(length):
            if step == self.bomb_at:
                self.bombs.append(torch.ops.marid_tests.bomb(self._any()))
            self._step()
        kept = [value for value in self.values if self.random.random() < 0.3]
        self.values = []
        return kept

    def _any(self) -> torch.Tensor:
        values = self.values
        return values[-1 - min(int(self.random.expovariate(0.4)), len(values) - 1)]

    def _step(self) -> None:
        x = self._any()
        same = [v for v in self.values if v.shape == x.shape]
        other = self.random.choice(same)
        steps: list[Callable[[], torch.Tensor]] = [
            lambda: x * 1,
            lambda: -x,
            lambda: x.neg().neg(),
            lambda: x - 0,
            lambda: x.clone(),
            lambda: x.t(),
            lambda: x.t().t(),
            lambda: x.reshape(-1).view(x.shape),
            lambda: x.unsqueeze(0).squeeze(0),
            lambda: x + other,
            lambda: x.relu(),
            lambda: x.tanh(),
            lambda: x + torch.full(x.shape[-1:], 0.5, device=self.device),
            lambda: x * torch.ones(x.shape[-1:], device=self.device),
            lambda: torch.addmm(torch.ones(4, device=self.device), x, x.t()[:, :4]).relu().mean() + x,
            lambda: x.t().contiguous().t(),
        ]
        choice = self.random.randrange(len(steps) + 4)
        if choice < len(steps):
            self.values.append(steps[choice]())
        elif choice == len(steps):
            x.mul_(0.5)
        elif choice == len(steps) + 1:
            x[0].add_(1)
        elif choice == len(steps) + 2:
            x.copy_(other)
        else:
            x.t()[1:].clamp_(-2, 2)


@pytest.mark.parametrize("batch", range(4))
def test_random_programs_are_the_same(batch: int) -> None:
    """Writes and views included; bit for bit, in every run."""
    fired = 0
    for seed in range(batch * 12, batch * 12 + 12):
        expected = _Writer(seed, "cpu").run(40)
        for _ in range(4):
            found = _Writer(seed, DEVICE).run(40)
            marid.materialize(*found)
            assert_same(found, expected)
            del found
        fired += sum(sum(improved.changes.values()) for improved in _improved())
        engine.programs.clear()
    assert fired > 100


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_errors_and_interrupts_in_improved_programs(error: type[BaseException]) -> None:
    """At any place of a random program: what came before is done, once; what comes after is not, and can be."""
    stopped = 0
    for seed in range(30):
        place = random.Random(seed).randrange(40)
        expected = _Writer(seed, "cpu", place).run(40)
        for attempt in range(5):
            writer = _Writer(seed, DEVICE, place)
            found = writer.run(40)
            marid.materialize(*writer.values)
            if attempt > 2:
                _armed.extend([error("armed"), error("armed")])
            try:
                marid.materialize(*found, *writer.bombs)
            except error:
                stopped += 1
                assert attempt > 2
            _armed.clear()
            assert_same(found, expected)
            if error is KeyboardInterrupt or attempt <= 2:
                marid.materialize(*writer.bombs)
            elif stopped:
                with pytest.raises(error):
                    writer.bombs[0].cpu()
            del found, writer
        engine.programs.clear()
    assert stopped == 60


def test_an_error_in_a_fused_operation_is_that_of_the_recorded_one() -> None:
    """Type, message and what exists afterwards; the recorded program is what users know."""
    index = torch.tensor([0, 9], device=DEVICE)
    x = X.to(DEVICE)
    messages = set()
    for _ in range(4):
        before = (x * 1).exp()
        bad = torch.index_select(before.t().t(), 0, index)
        after = x.exp().sin()
        with pytest.raises(IndexError) as caught:
            marid.materialize(before, bad, after)
        messages.add(str(caught.value).splitlines()[0])
        assert_same([before, after], [X.exp(), X.exp().sin()])
    assert len(messages) == 1


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_was_optimised_away_exists_after_a_stop(error: type[BaseException]) -> None:
    """Stopped between the parts of a fused operation: the first part is there for the second, which runs later."""
    bomb = torch.ops.marid_tests.bomb
    for attempt in range(6):
        x, w, b = (t.to(DEVICE) for t in (X, W, B))
        marid.materialize(x, w, b)
        product, flat_view, negative, ones = torch.addmm(b, x, w), x.view(24), -x, torch.ones(6, device=DEVICE)
        twice = ones + 1
        fuse = bomb(x)
        results = [product.relu(), flat_view.view(2, 12).exp(), -negative * 2, x * twice]
        x.add_(1)
        del product, flat_view, negative, twice
        if attempt > 2:
            _armed.extend([error("armed"), error("armed")])
            with pytest.raises(error):
                marid.materialize(*results, fuse, x)
            _armed.clear()
        marid.materialize(*results, x)
        expected = [torch.addmm(B, X, W).relu(), X.view(2, 12).exp(), X * 2, X * 2]
        assert_same([*results, x], [*expected, X + 1])
        del results, x, fuse
    (improved,) = [improved for improved in _improved() if "linear" in improved.changes]
    lost = {improved.recorded.instructions[recipe].op.name for recipe in improved.recipes.values() if recipe >= 0}
    assert lost >= {"aten::addmm", "aten::view"}


def test_a_program_is_improved_once_its_runs_took_as_long_as_that_will(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that hardly come again are not worth it."""
    engine.programs.clear()  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr(marid.settings, "pass_cost", 10_000_000)
    x = torch.ones(64, device=DEVICE)

    def run() -> None:
        y = x
        for _ in range(20):
            y = (y * 1 + x).tanh()
        y.sum().item()

    for _ in range(6):
        run()
    assert not marid.stats().passes
    monkeypatch.setattr(marid.settings, "pass_cost", 0)
    for _ in range(3):
        run()
    assert marid.stats().passes


def test_further_sizes_are_improved_only_as_far_as_runs_take_much_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """With runs that are said to take three times as long as their passes, one size in seven or so."""
    engine.programs.clear()  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr(marid.settings, "pass_cost", 100)
    note = flat.FlatProgram.note
    monkeypatch.setattr(flat.FlatProgram, "note", lambda self, _seconds: note(self, 3 * self.pass_cost))

    def run(size: int) -> None:
        x = torch.ones(size, device=DEVICE)
        y = x
        for _ in range(20):
            y = (y * 1 + x).tanh()
        y.sum().item()

    for _ in range(4):
        for size in range(64, 74):
            run(size)
    (program,) = [p for p in engine.programs._programs.values() if len(p.program.instructions) > 20]  # pyright: ignore
    improved = sum(form.improved is not None for form in program.forms)
    cost, runs = program.pass_cost, 40 * 3 * program.pass_cost
    assert 1 < improved <= runs / cost / 20
