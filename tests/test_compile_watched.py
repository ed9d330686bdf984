"""``marid.compile``: more of what Python and autograd can see of a call, found by programs written against it."""

from __future__ import annotations

import collections
import enum
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.autograd.forward_ad as forward
from torch import Tensor
from torch.nn import Parameter

import marid
from tests.helpers import DEVICE, assert_same

Program = Callable[[str, Callable[[Any], Any]], Any]


def _ones(count: int, device: str, **options: Any) -> Any:
    return torch.ones(count, device=device, **options)


def _outcome(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except RuntimeError:
        return "an error"


def _weight_seen_through_a_view(device: str, compiled: Any) -> list[Any]:
    """`linear` saves the weight transposed."""
    layer, found = torch.nn.Linear(2, 1, bias=False).to(device), []
    torch.nn.init.ones_(layer.weight)
    run = compiled(layer)
    for _ in range(6):
        x = _ones(2, device, requires_grad=True)[None]
        y = run(x)
        with torch.no_grad():
            layer.weight.add_(10)
        found.append(_outcome(lambda y=y: y.sum().backward()))
    return found


def _weights_of_separate_results(device: str, compiled: Any) -> list[Any]:
    layers = torch.nn.ModuleList([torch.nn.Linear(2, 1, bias=False) for _ in range(2)]).to(device)
    run, found = compiled(lambda x, y: (layers[0](x).sum(), layers[1](y).sum())), []
    for call in range(8):
        results = run(*(_ones(2, device, requires_grad=True)[None] for _ in range(2)))
        with torch.no_grad():
            layers[call % 2].get_parameter("weight").add_(10)
        found += [_outcome(result.backward) for result in results]
    return found


def _gradients_given(device: str, compiled: Any) -> list[Any]:
    """With ``create_graph``, a gradient that goes through as it is stays what it is."""
    weight, run = _ones(2, device, requires_grad=True), compiled(lambda x: x + 1)
    found = []
    for _ in range(4):
        given = _ones(2, device)
        run(weight).backward(given, create_graph=True)
        found += [given.requires_grad, given.is_leaf]
        weight.grad = None
    return found


def _results_that_share_memory(device: str, compiled: Any) -> list[Any]:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, y[1:]

    run, found = compiled(function), []
    for _ in range(4):
        x = _ones(3, device, requires_grad=True)
        y, view = run(x)
        view.mul_(3)
        y.sum().backward()
        found += [y.detach(), x.grad]
    return found


def _views_among_results(device: str, compiled: Any) -> list[Any]:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        h = x * 2
        return h, h[0], h.detach()

    run, found = compiled(function), []
    for _ in range(4):
        h, view, same = run(torch.ones(2, 2, device=device))
        weight = torch.ones(2, 2, device=device, requires_grad=True)
        loss = (h * weight).sum()
        view.add_(1)
        found += [_outcome(loss.backward), h._version, view._version, same._version, view._is_view(), h]
    return found


def _a_view_of_what_is_saved(device: str, compiled: Any) -> list[Any]:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        h = x.exp()
        return h.sum(), h.detach()[0]

    run, found = compiled(function), []
    for _ in range(4):
        loss, part = run(_ones(2, device, requires_grad=True))
        part.mul_(9)
        found.append(_outcome(loss.backward))
    return found


def _versions(device: str, compiled: Any) -> list[Any]:
    def function(x: Tensor) -> list[Tensor]:
        h = (x * 2).add_(1).mul_(3)
        return [x.detach(), x[1:], h, h.detach(), h[0], x]

    run, found = compiled(function), []
    x = _ones(3, device)
    for _ in range(5):
        x.add_(1)
        y = x * torch.ones(3, device=device, requires_grad=True)
        results = run(x)
        y.sum().backward()  # which has saved x: it was not written
        found += [[one._version, one._is_view()] for one in (*results, x)]
    return found


def _separate_losses(device: str, compiled: Any) -> list[Any]:
    a, b = (_ones(2, device, requires_grad=True) for _ in range(2))
    run, found = compiled(lambda x: ((a * x).exp().sum(), (b * x).exp().sum())), []
    for _ in range(4):
        first, second = run(_ones(2, device))
        found += [_outcome(first.backward), _outcome(second.backward), a.grad.clone(), b.grad.clone()]
    return found


def _inputs_of_each_other(device: str, compiled: Any) -> list[Any]:
    run, found = compiled(lambda x, h: (x * h).sum()), []
    for _ in range(4):
        x = torch.full((1,), 3.0, device=device).requires_grad_()
        run(x, x * 2).backward()
        found.append(x.grad)
    return found


def _a_block_called_twice(device: str, compiled: Any) -> list[Any]:
    torch.manual_seed(0)
    cell = torch.nn.GRUCell(3, 3).to(device)
    run, found = compiled(cell), []
    for _ in range(4):
        cell.zero_grad()
        x = h = _ones(3, device)[None]
        for _ in range(3):
            h = run(x, h)
        h.sum().backward()
        found += [parameter.grad.clone() for parameter in cell.parameters()]
    return found


def _equal_gradients(device: str, compiled: Any) -> list[Any]:
    a, b = (Parameter(_ones(2, device)) for _ in range(2))
    run, found = compiled(lambda x: (a + b) * x), []
    for _ in range(4):
        a.grad = b.grad = None
        run(_ones(2, device) * 3).sum().backward()
        a.grad.mul_(2)
        found += [a.grad.clone(), b.grad.clone()]
    return found


def _forward_derivatives(device: str, compiled: Any) -> list[Any]:
    run, x = compiled(lambda x: x * x), torch.full((2,), 3.0, device=device)
    found = [run(x) for _ in range(3)]
    with forward.dual_level():
        found += forward.unpack_dual(run(forward.make_dual(x, torch.ones_like(x))))[:2]
    return found


def _hooks_between_calls(device: str, compiled: Any) -> list[Any]:
    weight, found = Parameter(_ones(2, device)), []

    def function(x: Tensor) -> None:
        weight.grad = None
        (weight * x).sum().backward()

    run = compiled(function)
    for call in range(8):
        x = _ones(2, device, requires_grad=True)
        if call >= 4:
            x.register_hook(lambda grad: grad * 10)
        if call == 6:
            weight.register_post_accumulate_grad_hook(lambda own: (own.grad.mul_(7), None)[1])
        run(x)
        found += [x.grad, weight.grad.clone()]
    return found


def _hooks_that_it_registers(device: str, compiled: Any) -> list[Any]:
    def function(x: Tensor) -> Tensor:
        x.register_hook(lambda grad: grad * 5)
        y = (x * 2).detach().requires_grad_()
        y.register_hook(lambda grad: grad * 5)
        return y

    run, found = compiled(function), []
    for _ in range(4):
        x = _ones(1, device, requires_grad=True)
        y = run(x)
        (x * 3 + y * 3).sum().backward()
        found += [x.grad, y.grad]
    return found


def _hooks_that_write(device: str, compiled: Any) -> list[Any]:
    weight, count = _ones(3, device, requires_grad=True), torch.zeros((), device=device)

    def function(x: Tensor) -> Tensor:
        y = weight * x
        y.register_hook(lambda _: (count.add_(1), None)[1])
        return y.sum()

    run, found = compiled(function), []
    for _ in range(4):
        loss = run(_ones(3, device))
        found.append(count.clone())
    loss.backward()
    return [*found, count]


def _gradients_switched(device: str, compiled: Any) -> list[Any]:
    weight, other = (Parameter(_ones(2, device)) for _ in range(2))

    def freeze(x: Tensor) -> Tensor:
        factor = 2.0 if other.requires_grad else 3.0
        other.requires_grad_(False)
        return (other * x * factor).detach()

    switch, frozen = compiled(lambda x: (weight.requires_grad_(not weight.requires_grad), x * 2)[1]), compiled(freeze)
    found: list[Any] = []
    for call in range(9):
        switch(_ones(2, device))
        other.requires_grad_(other.requires_grad or call % 4 == 0)
        found += [weight.requires_grad, frozen(_ones(2, device))]
    return found


def _whole_numbers(device: str, compiled: Any) -> list[Any]:
    run = compiled(lambda mask: mask * 10 if int(mask.sum().item() / 2) > 0.2 else mask * 1000)
    return [run(torch.tensor([1] * count + [0] * (3 - count), device=device)) for count in (2, 2, 2, 1, 1)]


def _the_same_tensor(device: str, compiled: Any) -> list[Any]:
    kept = [_ones(1, device), _ones(1, device)]
    run = compiled(lambda x: x if x is kept[0] else x.exp())
    return [run(kept[index]).clone() for index in (0, 0, 0, 0, 1, 1, 1, 0)]


def _order_of_keywords(device: str, compiled: Any) -> list[Any]:
    def function(**named: Tensor) -> Tensor:
        first, second = named.values()
        return first * 10 + second

    run, a, b = compiled(function), _ones(1, device), _ones(1, device) * 2
    return [run(a=a, b=b) for _ in range(3)] + [run(b=b, a=a) for _ in range(3)]


def _swapped_in_a_list(device: str, compiled: Any) -> list[Any]:
    def function(pair: list[Tensor]) -> None:
        pair[0], pair[1] = pair[1], pair[0]

    run, found = compiled(function), []
    for _ in range(4):
        pair = [_ones(1, device), _ones(1, device) * 5]
        run(pair)
        found += pair
    return found


def _containers_that_are_there(device: str, compiled: Any) -> list[Any]:
    state = {"x": _ones(1, device)}
    given = [_ones(1, device)]
    whole, own = compiled(lambda _: state), compiled(lambda of: of)
    return [[whole(given) is state, own(given) is given] for _ in range(4)]


def _sizes(device: str, compiled: Any) -> list[Any]:
    run = compiled(lambda x: (x.shape, x * 2))
    return [type(run(_ones(2, device))[0]).__name__ for _ in range(4)]


def _tensors_of_the_host(device: str, compiled: Any) -> list[Any]:
    host = torch.full((2,), 2.0)
    run = compiled(
        lambda x: x * (3 if host.requires_grad else 1) + (0 if host.grad is None else host.grad.to(x.device))
    )
    found = [run(_ones(2, device)) for _ in range(3)]
    host.requires_grad_()
    found += [run(_ones(2, device)) for _ in range(3)]
    for value in (5.0, 6.0):
        host.grad = torch.full((2,), value)
        found += [run(_ones(2, device)) for _ in range(3)]
    return [one.detach() for one in found]


class _Own(Tensor):
    def twice(self) -> Tensor:
        return self * 2


def _classes_of_tensors(device: str, compiled: Any) -> list[Any]:
    run = compiled(lambda x: x * 7 if isinstance(x, _Own) else x * 2)
    own = compiled(lambda x: x.as_subclass(_Own))
    plain = _ones(1, device)
    given = [plain, plain, plain, plain.as_subclass(_Own), plain.as_subclass(_Own), plain]
    return [run(x).as_subclass(Tensor) for x in given] + [isinstance(own(plain), _Own) for _ in range(4)]


_PROGRAMS: list[Program] = [
    *(_weight_seen_through_a_view, _weights_of_separate_results, _gradients_given),
    *(_results_that_share_memory, _views_among_results, _a_view_of_what_is_saved),
    *(
        _versions,
        _separate_losses,
        _inputs_of_each_other,
        _a_block_called_twice,
        _equal_gradients,
        _forward_derivatives,
    ),
    *(_hooks_between_calls, _hooks_that_it_registers, _hooks_that_write, _gradients_switched, _whole_numbers),
    *(_the_same_tensor, _order_of_keywords, _swapped_in_a_list, _containers_that_are_there, _sizes),
    *(_tensors_of_the_host, _classes_of_tensors),
]


@pytest.mark.parametrize("program", _PROGRAMS, ids=lambda program: program.__name__)
def test_programs(either_way: None, program: Program) -> None:
    """They give what they give on the CPU without ``marid.compile``."""
    assert_same(program(DEVICE, marid.compile), program("cpu", lambda function: function))


def test_a_block_called_twice_is_replayed() -> None:
    cell = torch.nn.GRUCell(3, 3).to(DEVICE)
    compiled: Any = marid.compile(cell)
    for _ in range(12):
        h = torch.ones(1, 3, device=DEVICE)
        for _ in range(3):
            h = compiled(torch.ones(1, 3, device=DEVICE), h)
        h.sum().backward()
    assert compiled.stats().replays > 12


def test_a_second_derivative_raises() -> None:
    weight = torch.ones(3, device=DEVICE, requires_grad=True)
    compiled = marid.compile(lambda x: (weight * x).pow(3).sum())
    for _ in range(4):
        x = torch.ones(3, device=DEVICE, requires_grad=True)
        loss = compiled(x)
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    assert grad.requires_grad
    with pytest.raises(RuntimeError, match="a second derivative"):
        grad.square().sum().backward()


def test_attributes_of_the_compiled_function() -> None:
    """They are those of the function."""
    step: Any = None

    def function(x: Tensor) -> Tensor:
        step.calls += 1
        return x * step.scale

    step = marid.compile(function)
    step.calls, step.scale = 0, 2.0
    x = torch.ones(1, device=DEVICE)
    assert [step(x).item() for _ in range(4)] == [2.0] * 4
    step.scale = 7.0
    assert [step(x).item(), step.calls, function.scale] == [7.0, 5, 7.0]  # pyright: ignore[reportFunctionMemberAccess]
    del step.scale
    assert not hasattr(function, "scale")
    net = marid.compile(torch.nn.Linear(2, 2))
    net.tag = "one"  # pyright: ignore[reportAttributeAccessIssue]
    assert net._function.tag == "one"  # pyright: ignore


class _Sequence:
    def __init__(self) -> None:
        self.values = [2.0]

    def __getitem__(self, index: int) -> float:
        return self.values[index] * FACTOR

    def __len__(self) -> int:
        return len(self.values)


class _Private:
    __slots__ = ("__k",)

    def __init__(self) -> None:
        self.__k = 2.0

    def get(self) -> float:
        return self.__k

    def set(self, value: float) -> None:
        self.__k = value


class _Color(enum.Enum):
    RED = 1


class _Pair(NamedTuple):
    x: Any

    def scaled(self) -> Any:
        return self.x * FACTOR * 2


class _Key:
    k = 2.0


FACTOR = 1.0


def _set_factor() -> None:
    global FACTOR
    FACTOR = 3.5


def _states() -> dict[str, tuple[Callable[[Tensor], Tensor], Callable[[], Any]]]:
    """Functions that give 2, and what has them give 7."""
    values, private, key = _Sequence(), _Private(), _Key()
    module: Any = types.ModuleType("marid_tests_watched")
    module.k = 2.0
    ordered = collections.OrderedDict(a=2.0, b=7.0)
    by_key = {key: 1}
    color: Any = _Color.RED
    color.k = 2.0
    order: Any = torch.nn.modules.module

    def hooked(x: Tensor) -> Tensor:
        return torch.nn.Identity()(x) * 2

    def hook() -> None:
        handle = order.register_module_forward_hook(lambda _module, _args, result: result * 3.5)
        _handles.append(handle)

    return {
        "a special method": (lambda x: x * values[0], _set_factor),
        "a private slot": (lambda x: x * private.get(), lambda: private.set(7.0)),
        "a module in a closure": (lambda x: x * module.k, lambda: setattr(module, "k", 7.0)),
        "an order": (lambda x: x * next(iter(ordered.values())), lambda: ordered.move_to_end("a")),
        "a key of a dict": (lambda x: x * next(iter(by_key)).k, lambda: setattr(key, "k", 7.0)),
        "a member of an enumeration": (lambda x: x * color.k, lambda: setattr(color, "k", 7.0)),
        "hooks of all modules": (hooked, hook),
    }


_handles: list[Any] = []


@pytest.mark.parametrize("name", _states())
def test_state(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 1.0)
    function, change = _states()[name]
    compiled, x = marid.compile(function), torch.ones(1, device=DEVICE)
    try:
        found = [compiled(x).item() for _ in range(4)]
        change()
        found += [compiled(x).item() for _ in range(4)]
    finally:
        while _handles:
            _handles.pop().remove()
    assert found == [2.0] * 4 + [7.0] * 4
    assert compiled.stats().replays >= 2


def test_methods_of_named_tuples(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, x = marid.compile(lambda pair: pair.scaled()), torch.ones(1, device=DEVICE)
    assert [compiled(_Pair(x)).item() for _ in range(4)] == [2.0] * 4
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 3.5)
    assert [compiled(_Pair(x)).item() for _ in range(4)] == [7.0] * 4


def test_arguments_that_lead_to_themselves() -> None:
    node: dict[str, Any] = {"x": torch.ones(1, device=DEVICE)}
    node["children"] = [{"parent": node}]
    compiled = marid.compile(lambda node: node["x"] * 2)
    assert [compiled(node).item() for _ in range(4)] == [2.0] * 4


def test_objects_that_cannot_be_looked_at() -> None:
    class Record:
        __slots__ = ("data",)

        def __init__(self) -> None:
            self.data = {"k": 2.0}

        def __getattr__(self, name: str) -> Any:
            return self.data[name]

    record = Record()
    compiled = marid.compile(lambda x: x * record.k)
    assert [compiled(torch.ones(1, device=DEVICE)).item() for _ in range(4)] == [2.0] * 4
    [reason] = compiled.stats().fallbacks
    assert "cannot be looked at" in reason
