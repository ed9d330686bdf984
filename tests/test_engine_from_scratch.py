"""``examples/engine_from_scratch.py`` computes what eager PyTorch computes, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples import engine_from_scratch as engine
from examples.engine_from_scratch import lazy, lazy_module, read


def same(made: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(read(made), expected.detach(), rtol=0, atol=0, equal_nan=True)


def built(function: Callable[[], Any]) -> int:
    """How many programs it makes necessary."""
    before = engine.statistics["built"]
    function()
    return engine.statistics["built"] - before


# --- recording, aliasing, cut ----------------------------------------------------------------------------------------


def test_nothing_runs_before_a_read() -> None:
    x = lazy(torch.randn(3, 4))
    y = (x @ x.t()).relu().sum()
    assert "Geometry" in repr(y)
    assert built(lambda: read(y)) == 1
    assert "tensor" in repr(y)
    assert built(lambda: read(y)) == 0


def test_shapes_are_checked_where_they_are_wrong() -> None:
    with pytest.raises(RuntimeError, match="3, 4"):
        lazy(torch.randn(3, 4)) @ lazy(torch.randn(3, 4))


def test_views_see_writes_through_any_alias_in_program_order() -> None:
    def program(x: Tensor) -> list[Tensor]:
        row, turned = x[1], x.t()
        before = row * 2
        row.add_(1)
        between = turned + 0
        x.mul_(3)
        turned[0].zero_()
        return [x, row, turned, before, between]

    start = torch.arange(6.0).view(2, 3)
    for mine, expected in zip(program(lazy(start)), program(start.clone()), strict=True):
        same(mine, expected)


def test_a_value_that_is_read_late_is_not_too_new() -> None:
    """The write runs first if it is asked for first, unless the cut brings the older reader along."""
    x = lazy(torch.ones(3))
    before = x + 1
    x.zero_()
    same(x, torch.zeros(3))
    same(before, torch.full((3,), 2.0))


def test_dead_code_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    run = engine.run
    monkeypatch.setattr(engine, "run", lambda step, *rest: (ran.append(step.instruction.func), run(step, *rest)))
    x = lazy(torch.ones(3))
    unused = x.exp()
    del unused
    read(x.sin())
    assert ran == [torch.ops.aten.sin.default]


def test_eager_tensors_are_taken_as_they_are_now_and_never_written() -> None:
    eager = torch.ones(3)
    y = lazy(torch.ones(3)) + eager
    eager.zero_()
    same(y, torch.full((3,), 2.0))
    with pytest.raises(TypeError, match="read"):
        eager.add_(y)


def test_values_decide_the_way_of_the_program() -> None:
    x = lazy(torch.tensor([1.0, -2.0, 3.0]))
    assert (x.sum() > 0).item()
    same(x[x > 0], torch.tensor([1.0, 3.0]))
    assert read((x > 0).nonzero()).flatten().tolist() == [0, 2]


def test_random_numbers_are_those_of_eager_pytorch() -> None:
    def program(x: Tensor) -> Tensor:
        torch.manual_seed(3)
        y = F.dropout(x * 2, 0.5)
        return y + torch.rand_like(y).normal_()

    same(program(lazy(torch.ones(50))), program(torch.ones(50)))


# --- programs and plans ----------------------------------------------------------------------------------------------


def test_the_same_work_is_one_program_and_numbers_are_its_inputs() -> None:
    x = lazy(torch.randn(4))

    def work(number: float) -> None:
        same(x * number + 1.5, read(x) * number + 1.5)

    assert built(lambda: [work(number) for number in (2.0, 3.0, -0.0)]) == 1
    assert built(lambda: read(x * 2 + 1.5)) == 1  # an integer is a part of the program


def test_a_result_takes_the_memory_of_an_argument_that_dies() -> None:
    def over(make: Callable[[Tensor], list[Tensor]]) -> list[bool]:
        x = lazy(torch.randn(4))
        made = make(x)
        key = engine.bind(engine.cut([tensor.value.node for tensor in made])).key  # pyright: ignore
        return [step.over is not None for step in engine.plan(key)]

    assert over(lambda x: [x.exp().sin().cos()]) == [False, True, True]  # never over what the user holds
    assert over(lambda x: [y := x.exp(), y.sin()]) == [False, False]
    assert over(lambda x: [(y := x.exp()).view(2, 2).sin() + y.view(2, 2)]) == [False, False, False, False, True]


def test_an_error_is_raised_where_its_value_is_read() -> None:
    table, index = lazy(torch.randn(3, 2)), lazy(torch.tensor([0, 5]))
    x = lazy(torch.ones(2))
    x.add_(1)
    wrong = F.embedding(index, table) + x
    for _ in range(2):
        with pytest.raises(IndexError):
            read(wrong)
    same(x, torch.full((2,), 2.0))
    same(table * 2, read(table) * 2)


# --- random programs -------------------------------------------------------------------------------------------------


def statement(chooser: random.Random, count: int) -> str:
    """The text of a statement on ``t[0]`` to ``t[count - 1]``, all of shape 4 by 4."""
    a, b = (f"t[{chooser.randrange(count)}]" for _ in range(2))
    return chooser.choice(
        [
            f"t.append({a} * {b})",
            f"t.append({a} @ {b})",
            f"t.append({a}.t())",
            f"t.append({a}.flip(0).tanh())",
            f"t.append(torch.where({a} > 0, {a}, {b}))",
            f"{a}[{chooser.randrange(4)}].add_({b}[0].clone())",
            f"{a}.t()[1:3].copy_({b}[:2].clone())",
            f"{a}.mul_(0.5)",
            f"{a}.sub_({b}.clone()).sin_()",
            f"{a}.diagonal().fill_({chooser.randrange(3)})",
            f"t[{chooser.randrange(count)}] = {a}.clone()",
            f"seen.append({a}.sum().item())",
        ]
    )


@pytest.mark.parametrize("seed", range(40))
def test_random_programs(seed: int) -> None:
    chooser = random.Random(seed)
    starts = [torch.randn(4, 4) for _ in range(3)]
    mine: dict[str, Any] = {"torch": torch, "t": [lazy(start) for start in starts], "seen": []}
    eager: dict[str, Any] = {"torch": torch, "t": [start.clone() for start in starts], "seen": []}
    for _ in range(30):
        text = statement(chooser, len(mine["t"]))
        for names in (mine, eager):
            exec(text, names)
    assert str(mine["seen"]) == str(eager["seen"])
    order = [*range(len(mine["t"]))]
    chooser.shuffle(order)
    for index in order:
        same(mine["t"][index], eager["t"][index])


# --- autograd, modules, optimizers -----------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(11, 8), nn.Linear(8, 24), nn.Linear(8, 11)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        q, k, v = (part.view(2, 5, 2, 4).transpose(1, 2) for part in self.mix(F.layer_norm(x, (8,))).chunk(3, -1))
        mask = torch.ones(5, 5).tril() == 0
        scores = (q @ k.transpose(-1, -2) / 2).masked_fill(mask, -torch.inf)
        mixed = scores.softmax(-1) @ v
        return self.head(x + mixed.transpose(1, 2).reshape(2, 5, 8)).flatten(0, 1)


def network() -> nn.Module:
    norm = nn.BatchNorm2d(4)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), norm, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 3)
    )


@pytest.mark.parametrize(
    ("make", "data", "classes"),
    [
        (lambda: nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 5)), lambda: torch.randn(10, 8), 5),
        (network, lambda: torch.randn(10, 1, 8, 8), 3),
        (Attention, lambda: torch.randint(11, (2, 5)), 11),
    ],
    ids=["mlp", "convolutions", "attention"],
)
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_training(make: Callable[[], nn.Module], data: Callable[[], Tensor], classes: int, optimizer: str) -> None:
    def train(
        place: Callable[[Any], Any], to_module: Callable[[nn.Module], nn.Module]
    ) -> tuple[list[float], nn.Module]:
        torch.manual_seed(0)
        model = to_module(make())
        x, labels = place(data()), place(torch.randint(classes, (10,)))
        options = {"momentum": 0.9} if optimizer == "SGD" else {}
        stepper = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01, **options)
        schedule = torch.optim.lr_scheduler.ExponentialLR(stepper, 0.9)
        losses = []
        for _ in range(8):
            loss = F.cross_entropy(model(x), labels)
            stepper.zero_grad()
            loss.backward()
            stepper.step()
            schedule.step()
            losses.append(loss.item())
        return losses, model

    expected, eager = train(lambda tensor: tensor, lambda module: module)
    before = engine.statistics["built"]
    losses, model = train(lazy, lazy_module)
    assert losses == expected
    assert engine.statistics["built"] - before <= 3  # the first step, the second, and all others
    for mine, theirs in zip(model.state_dict().values(), eager.state_dict().values(), strict=True):
        same(mine, theirs)


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    engine.main()
    assert len(capsys.readouterr().out.splitlines()) == 10


def test_it_can_be_read_in_one_go() -> None:
    lines = Path(engine.__file__).read_text().splitlines()
    assert len([line for line in lines if line.strip() and not line.startswith("#")]) < 450
