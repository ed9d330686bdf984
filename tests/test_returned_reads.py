"""Reads whose values a function under ``marid.compile`` only returns: they are made behind the replay."""

from __future__ import annotations

import builtins
import dis
import itertools
import operator
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import marid
from marid.frontend.tensor import LazyTensor
from marid.replay.returned_reads import METHODS
from marid.replay.value_flow import BUILTINS, Use, use_of

DEVICE = "remote_accelerator"


def both(make: Callable[[str], Callable[..., Any]], calls: int = 40, **options: Any) -> Any:
    """The function of the device under ``marid.compile``, after each call returned what that of the CPU does."""
    eager, compiled = make("cpu"), marid.compile(make(DEVICE), **options)
    for turn in range(calls):
        torch.manual_seed(turn)
        x, y = torch.randn(8, 4), torch.randint(3, (8,))
        expected, found = eager(x.clone(), y), compiled(x.to(DEVICE), y.to(DEVICE))
        assert repr(found) == repr(expected), turn
        assert same_types(found, expected)
    return compiled.stats()


def same_types(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and all(map(same_types, one, other))
    if isinstance(one, dict):
        return type(one) is type(other) and all(same_types(one[key], other[key]) for key in other)
    return type(one) is type(other)


def trained(device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_step_that_returns_its_loss_as_a_number_is_replayed() -> None:
    def make(device: str) -> Callable[..., Any]:
        model, optimizer = trained(device)

        def step(x: torch.Tensor, y: torch.Tensor) -> float:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.item()

        return step

    stats = both(make)
    assert stats.replays > 30
    assert not any("reads a value" in reason for reason in stats.fallbacks)


def test_values_come_in_tuples_lists_and_dicts_and_by_variables() -> None:
    def make(device: str) -> Callable[..., Any]:
        model, optimizer = trained(device)

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            with torch.enable_grad():
                out = model(x)
                loss = F.cross_entropy(out, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            value = loss.item()
            right = (out.argmax(1) == y).sum()
            return value, {"right": right.item(), "each": [out.detach().sum(1).tolist()]}, out.detach().cpu()

        return step

    assert both(make).replays > 30


def test_a_value_is_that_of_the_read_although_the_function_goes_on_to_write() -> None:
    def make(_device: str) -> Callable[..., Any]:
        def step(x: torch.Tensor, _y: torch.Tensor) -> Any:
            total = x.sum()
            return total.item(), total.mul_(0.0).item(), x.add_(1.0).sum().item()

        return step

    assert both(make).replays > 30


def test_with_fullgraph_such_a_read_is_no_error() -> None:
    def make(_device: str) -> Callable[..., Any]:
        @torch.no_grad()
        def step(x: torch.Tensor, _y: torch.Tensor) -> list[float]:
            return [x.mean().item(), x.std().item()]

        return step

    assert both(make, fullgraph=True).replays > 30


def test_arithmetic_on_values_is_done_behind_the_replay() -> None:
    def make(device: str) -> Callable[..., Any]:
        model, optimizer = trained(device)

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y, reduction="sum")
            loss.backward()
            optimizer.step()
            mean = loss.item() / len(x)
            mean += 1
            count = (model(x).argmax(1) == y).sum()
            return {"loss": mean, "right": 100.0 * count.item() / len(y), "both": 2 - (mean - count.item()) * 3}

        return step

    assert both(make).replays > 30


@pytest.mark.parametrize("other", [torch.ones(2), np.ones(2), np.float32(2.0), True, 2 + 1j], ids=repr)
def test_arithmetic_with_other_things_than_numbers_reads_at_once(other: Any) -> None:
    on_device = other.to(DEVICE) if isinstance(other, torch.Tensor) else other

    def after(x: torch.Tensor) -> Any:
        return x.sum().item() * other

    def before(x: torch.Tensor) -> Any:
        return other - x.sum().item()

    for function in (after, before):
        expected = function(torch.ones(3))
        code = function.__code__
        assert "other" in code.co_freevars
        compiled = marid.compile(
            types.FunctionType(code, {"__builtins__": builtins}, closure=(types.CellType(on_device),))
        )
        for _ in range(3):
            found = compiled(torch.ones(3, device=DEVICE))
            assert type(found) is (type(on_device) if on_device is not other else type(expected))
            assert str(found.cpu() if on_device is not other else found) == str(expected)
        assert compiled.stats().replays == 0


def test_a_number_that_changes_beside_a_read_is_noticed() -> None:
    counts = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    given: list[int] = []

    def mean(x: torch.Tensor) -> float:
        return x.sum().item() / given[-1]

    compiled = marid.compile(mean)
    for count in counts:
        given.append(count)
        assert compiled(torch.ones(3, device=DEVICE)) == 3.0 / count


def returned(x: torch.Tensor) -> Any:
    return x.item()


def returned_beside_calls(x: torch.Tensor) -> Any:
    return [x.item(), x.sum(dim=0), abs(-3)]


def returned_later(x: torch.Tensor) -> Any:
    value = x.item()
    again = value
    return {"value": again}


def in_arithmetic(x: torch.Tensor) -> Any:
    return x.item() / 3


def divided_by_a_call(x: torch.Tensor) -> Any:
    return [x.item() / len(str(x.dim()))]


def listed_and_added(x: torch.Tensor) -> Any:
    return [x.item()] + [1]


def gathered_in_a_loop(x: torch.Tensor) -> Any:
    values: list[Any] = []
    for number in range(3):
        x = x + number
        values += [x.item(), number]
    more = [*values] + [x.sum().item()]
    more += values
    return values, more, [one.item() for one in x.expand(2)] + [3]


MODEL = torch.nn.Identity()


def beside_an_attribute(x: torch.Tensor) -> Any:
    MODEL.eval()
    value = MODEL(x).item()
    MODEL.train()
    return value


def in_a_dict_of_numbers(x: torch.Tensor) -> Any:
    found = {"loss": 0.0, "count": 0}
    for number in range(3):
        x = x + number
        found["loss"] += x.item() / 2
        found["count"] += 1
    return found


def summed(x: torch.Tensor) -> Any:
    values: list[Any] = []
    for number in range(3):
        x = x + number
        values.append(x.item())
    return sum(values) / len(values), sum(values)


def by_way_of_the_host(x: torch.Tensor) -> Any:
    return x.expand(2).cpu().tolist(), x.cpu().item(), x.detach().cpu().numpy(), x.cpu()


def by_way_of_numpy(x: torch.Tensor) -> Any:
    return x.cpu().numpy().tolist()


def summed_rows(x: torch.Tensor) -> Any:
    rows: list[Any] = []
    rows.append(x.expand(2).tolist())
    return sum(rows, [])  # noqa: RUF017


def by_names(x: torch.Tensor) -> Any:
    history: dict[str, list[Any]] = {"loss": [], "rows": []}
    more = {}
    for number in range(3):
        x = x + number
        history["loss"].append(x.item())
        history["rows"].append(x.expand(2).tolist())
    more["last"] = [x.item() / 3]
    return history, more, [*history["loss"]]


def in_one_of_two(x: torch.Tensor) -> Any:
    even: list[Any] = []
    odd: list[Any] = []
    for number in range(4):
        x = x + number
        chosen = odd if number % 2 else even
        chosen.append(x.item())
    return even, odd


def kept_by_its_holder(x: torch.Tensor) -> Any:
    history: dict[str, list[Any]] = {"loss": []}
    losses = history["loss"]
    in_a_text.history = history  # type: ignore[attr-defined]
    losses.append(x.item())
    return 1


def kept_by_an_item(x: torch.Tensor) -> Any:
    rows: list[list[Any]] = [[]]
    more = [*rows]
    more[0].append(x.item())
    in_a_text.row = rows[0]  # type: ignore[attr-defined]
    return 1


def kept_by_an_item_of_a_sum(x: torch.Tensor) -> Any:
    rows: list[list[Any]] = [[]]
    more = [*rows] + [[]]
    more[0].append(x.item())
    in_a_text.row = rows[0]  # type: ignore[attr-defined]
    return 1


def unpacked_rows(x: torch.Tensor) -> Any:
    rows: list[list[Any]] = [[], []]
    more = [*rows, []]
    more += rows
    more[0].append(x.item())
    rows[1].append(x.item())
    return rows, more, [*more[0]] + rows[1]


def mixed(x: torch.Tensor) -> Any:
    history = {"loss": [], "others": sorted([])}
    history["loss" if x.dim() else "others"].append(x.item())
    return history


def evaluated(x: torch.Tensor) -> Any:
    value = x.item()
    return eval("value + 1"), value


def gathered_in_an_argument(x: torch.Tensor, values: list[Any] | None = None) -> Any:
    found = [] if values is None else values
    found += [x.item()]
    return found


def gathered_in_two_places(x: torch.Tensor) -> Any:
    values: list[Any] = []
    more = values
    more += [x.item()]
    in_a_text.values = values  # type: ignore[attr-defined]
    return more


def repeated(x: torch.Tensor) -> Any:
    return [x.item()] * 2


def rounded(x: torch.Tensor) -> Any:
    return x.item() // 1


def given_to_a_method(x: torch.Tensor) -> Any:
    return [].append(x.item())


def given_to_a_call(x: torch.Tensor) -> Any:
    return float(x.item())


def converted(x: torch.Tensor) -> Any:
    values: list[Any] = []
    for number in range(3):
        x = x + number
        values.append(float(x))
        values.append(int(x.long()))
        if values[-1] == -1:
            break
    return [float(one) for one in x.expand(2)], values, float(values[0] + 1), len(values)


def rounded_to_a_whole_number(x: torch.Tensor) -> Any:
    return int(x)


def in_a_text(x: torch.Tensor) -> Any:
    return f"{x.item()}"


def as_a_key(x: torch.Tensor) -> Any:
    return {x.item(): 1}


def inside_try(x: torch.Tensor) -> Any:
    try:
        return x.item()
    except RuntimeError:
        return 0


def before_try(x: torch.Tensor) -> Any:
    value = x.item()
    try:
        abs(2)
    except RuntimeError:
        print(value)
    return value


def inside_with(x: torch.Tensor) -> Any:
    with torch.no_grad():
        return x.item()


def kept_by_an_object(x: torch.Tensor) -> Any:
    in_a_text.value = x.item()  # type: ignore[attr-defined]
    return 1


def kept_by_a_closure(x: torch.Tensor) -> Any:
    value = x.item()
    return lambda: value


def in_a_loop(x: torch.Tensor) -> Any:
    value = 0
    for _ in range(3):
        value = x.item()
    return value


def listed_in_a_loop(x: torch.Tensor) -> Any:
    values: list[Any] = []
    total = 0.0
    for number in range(4):
        x = x + 1
        total += x.item()
        if number % 2:
            values.append(x.item())
    return [*values, x.item()], total


def in_rows(x: torch.Tensor) -> Any:
    rows: list[Any] = []
    for _ in range(2):
        row: list[Any] = []
        row.append(x.item())
        rows.append(row)
    return {"rows": rows}


def in_a_dict(x: torch.Tensor) -> Any:
    found = {}
    found["value"] = x.item()
    return found


def in_a_comprehension(x: torch.Tensor) -> Any:
    return [one.item() for one in x.expand(3).unbind()]


def in_a_dict_comprehension(x: torch.Tensor) -> Any:
    return {key: one.item() for key, one in zip("ab", x.expand(2).unbind(), strict=True)}


def by_a_condition(x: torch.Tensor) -> Any:
    return x.item() if x.dim() == 0 else 0.0


def compared(x: torch.Tensor) -> Any:
    if x.item() > 3:
        return 1
    return 2


def compared_and_returned(x: torch.Tensor) -> Any:
    value = x.item()
    return value if 0 < value < 3 else 0.0


def compared_later(x: torch.Tensor) -> Any:
    value = x.item()
    x.add_(1)
    return 1 if value < 3 else 2


def counted(x: torch.Tensor) -> Any:
    values = [x.item()]
    return len(values), values


def taken_out(x: torch.Tensor) -> Any:
    values: list[Any] = []
    values.append(x.item())
    return values[0]


def in_a_list_of_lists(x: torch.Tensor) -> Any:
    rows: list[Any] = [[]]
    rows[0].append(x.item())
    return rows


def added_to_another(x: torch.Tensor, values: list[Any] | None = None) -> Any:
    found = [] if values is None else values
    found.append(x.item())
    return found


def compared_to_nothing(x: torch.Tensor) -> Any:
    value = x.item()
    return 0 if value is None else value


def by_a_method_of_c(x: torch.Tensor) -> Any:
    return list(map(operator.methodcaller("item"), [x]))


def looked_at_from_aside(x: torch.Tensor) -> Any:
    value = x.item()
    return locals()["value"]


def unpacked(x: torch.Tensor) -> Any:
    return [*x.expand(2).tolist(), 3]


def unpacked_by_a_call(x: torch.Tensor) -> Any:
    return max(*x.expand(2).tolist())


def unpacked_to_variables(x: torch.Tensor) -> Any:
    one, other = x.expand(2).tolist()
    return [one, other]


def unpacked_from_a_list(x: torch.Tensor) -> Any:
    values = [one.item() for one in x.expand(2).unbind()]
    return [*values, x.item()]


def divided_by_nothing(x: torch.Tensor) -> Any:
    found = {"none": x.item() / 0}
    return len(found)


def divided_by_another(x: torch.Tensor) -> Any:
    return x.item() / (x - 3).item()


def printed(x: torch.Tensor) -> Any:
    value = x.item()
    print(value)
    return value


LOOKED_AT = [
    *(gathered_in_an_argument, repeated, rounded, rounded_to_a_whole_number, in_a_text, as_a_key, inside_try),
    *(kept_by_an_item, kept_by_an_item_of_a_sum),
    *(before_try, printed, unpacked_by_a_call, added_to_another, kept_by_its_holder, mixed, compared_to_nothing),
    *(by_a_method_of_c, looked_at_from_aside, inside_with, summed_rows, evaluated, by_way_of_numpy),
]
KEPT = [kept_by_an_object, kept_by_a_closure, gathered_in_two_places]
RETURNED = [
    *(returned, returned_later, in_arithmetic, returned_beside_calls, divided_by_a_call, in_a_loop, listed_in_a_loop),
    *(in_a_dict_of_numbers, summed, listed_and_added, gathered_in_a_loop, unpacked_from_a_list, counted, taken_out),
    *(
        unpacked_rows,
        by_names,
        in_one_of_two,
        in_a_list_of_lists,
        beside_an_attribute,
        by_way_of_the_host,
        given_to_a_call,
        in_rows,
    ),
    *(in_a_dict, in_a_comprehension, in_a_dict_comprehension, by_a_condition),
]
OTHERWISE = (unpacked_by_a_call, rounded_to_a_whole_number, summed_rows, by_way_of_numpy)  # read in another way
USES = [
    *[(one, None) for one in [*LOOKED_AT, *KEPT, given_to_a_call] if one not in OTHERWISE],
    *[(listed_and_added, Use(True, False)), (counted, Use(True, False)), (taken_out, Use(True, True))],
    *[(in_a_list_of_lists, Use(True, True))],
    *[(returned, Use(True, False)), (returned_later, Use(True, False)), (in_arithmetic, Use(True, False))],
    *[(returned_beside_calls, Use(True, True)), (divided_by_a_call, Use(True, True)), (in_a_loop, Use(True, True))],
    *[(in_a_dict, Use(True, True)), (by_a_condition, Use(True, False)), (compared_and_returned, Use(True, False))],
    *[(compared, Use(False, False)), (compared_later, Use(False, True)), (given_to_a_method, Use(False, False))],
]


@pytest.mark.parametrize(("function", "expected"), USES)
def test_where_a_value_goes(function: Callable[..., Any], expected: Use | None) -> None:
    instructions = [one for one in dis.get_instructions(function) if one.opname not in ("CACHE", "PRECALL")]
    [call] = [
        after.offset
        for load, after in itertools.pairwise(instructions)
        if load.argval == "item" and after.opname == "CALL"
    ]
    assert use_of(function.__code__, call, "item", BUILTINS) == expected


TESTED = pytest.mark.in_process("tests of numbers are replayed where what runs is in this process")


@pytest.mark.parametrize(
    "function", [*RETURNED, *[pytest.param(one, marks=TESTED) for one in (compared_and_returned, converted)]]
)
def test_what_is_only_returned_is_read_behind_the_replay(function: Callable[..., Any]) -> None:
    compiled = marid.compile(function)
    for number in range(6):
        expected = function(torch.tensor(float(number)))
        found = compiled(torch.tensor(float(number), device=DEVICE))
        if function is returned_beside_calls:
            expected[1], found[1] = expected[1].item(), found[1].item()
        assert repr(found) == repr(expected)
    assert compiled.stats().replays > 0


@pytest.mark.parametrize("function", [*LOOKED_AT, unpacked, unpacked_to_variables])
def test_any_other_read_runs_as_python(function: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    compiled = marid.compile(function)
    for number in range(4):
        assert compiled(torch.tensor(float(number), device=DEVICE)) == function(torch.tensor(float(number)))
    stats = compiled.stats()
    assert stats.replays == 0
    assert any("reads a value" in reason for reason in stats.fallbacks)


def test_a_division_by_zero_is_raised_where_it_is_written() -> None:
    compiled = marid.compile(divided_by_nothing)
    for _ in range(4):
        with pytest.raises(ZeroDivisionError):
            compiled(torch.tensor(1.0, device=DEVICE))
    compiled = marid.compile(divided_by_another)
    for number in (1.0, 2.0, 3.0, 4.0, 5.0, 3.0, 6.0):
        if number == 3:
            with pytest.raises(ZeroDivisionError):
                compiled(torch.tensor(number, device=DEVICE))
        else:
            assert compiled(torch.tensor(number, device=DEVICE)) == divided_by_another(torch.tensor(number))


def test_a_read_by_a_function_that_is_called_runs_as_python() -> None:
    @marid.compile
    def outer(x: torch.Tensor) -> Any:
        return [returned(x), x]

    for number in range(4):
        value, tensor = outer(torch.tensor(float(number), device=DEVICE))
        assert type(value) is float
        assert value == number == tensor.item()
    assert outer.stats().replays == 0


def test_methods_are_what_they_were_and_other_threads_read_meanwhile() -> None:
    before = {name: LazyTensor.__dict__.get(name) for name in METHODS}
    recording, read = threading.Event(), threading.Event()
    found: list[Any] = []

    def elsewhere() -> None:
        assert recording.wait(30)
        found.append(returned(torch.tensor(2.0, device=DEVICE)))
        read.set()

    def function(x: torch.Tensor) -> float:
        recording.set()
        assert read.wait(30)
        return (x + 1).item()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    assert marid.compile(function)(torch.tensor(1.0, device=DEVICE)) == 2.0
    thread.join()
    assert found == [2.0]
    assert {name: LazyTensor.__dict__.get(name) for name in METHODS} == before


def test_what_a_read_refuses_is_refused_at_once() -> None:
    compiled = marid.compile(returned)
    with pytest.raises(RuntimeError, match="cannot be converted to Scalar"):
        compiled(torch.ones(3, device=DEVICE))
