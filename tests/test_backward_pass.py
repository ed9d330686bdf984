"""Backwards run as one function of autograd's engine: the same bits, errors, hooks and order."""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import marid
from tests.helpers import DEVICE, assert_same, on_both

pytestmark = [
    pytest.mark.in_process("operations run at once in this process alone"),
    pytest.mark.usefixtures("either_way"),
]

GRAPHS = 80


def _written(x: Tensor, write: Callable[[Tensor], object]) -> Tensor:
    y = x * 1.0
    write(y)
    return y


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


class _Cubed(torch.autograd.Function):
    """Saves what it is given, has a result without a gradient, and can be differentiated twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, other)
        signs = x.sign()
        ctx.mark_non_differentiable(signs)
        return x**3 + other, signs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, _ = ctx.saved_tensors
        assert type(grads[0]) is type(grads[1]) is type(x)  # of one class, also what nothing has come for
        first, second = ctx.needs_input_grad
        return (grads[0] * 3 * x * x if first else None), (grads[0] if second else None)


class _Unread(torch.autograd.Function):
    """Takes gradients that have not come as None, and hands another one on as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x.clone(), x.exp()

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor | None) -> Tensor | None:
        first, second = grads
        return second if first is None else first


def _applied(function: Any, *arguments: Any) -> Any:
    return function.apply(*arguments)


_UNARY: list[Callable[[Tensor], Tensor]] = [
    lambda x: _applied(_Twice, x),
    lambda x: _applied(_Unread, x)[0],
    lambda x: _applied(_Unread, x)[1],
    lambda x: _written(x, lambda y: y[1:].copy_(_applied(_Twice, y[1:]))),
    torch.tanh,
    torch.sigmoid,
    lambda x: x * 1.5,
    lambda x: x.t().contiguous().t(),
    lambda x: x.flip(0),
    lambda x: x + x.mean(),
    lambda x: x.sum(0) + torch.zeros_like(x),
    lambda x: x.double().float(),
    lambda x: x.clone().mul_(0.5),
    lambda x: _written(x, lambda y: y[1:3].mul_(0.5)),
    lambda x: _written(x, lambda y: y[:, 1].copy_(x[0])),
    lambda x: _written(x, lambda y: y.t()[2].fill_(1.0)),
    lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    lambda x: torch.stack(x.unbind(0)),
    lambda x: x.topk(4, dim=1).values,
    lambda x: x[torch.tensor([0, 1, 1, 2])[: x.shape[0]].to(x.device)],
    lambda x: nn.functional.layer_norm(x, (4,)),
    lambda x: x.detach() + x,
    lambda x: torch.where(x > 0, x, x * 0.1),
]
_BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, y: _applied(_Cubed, x * 0.5, y)[0],
    torch.add,
    torch.mul,
    torch.sub,
    torch.maximum,
    lambda x, y: x @ y,
    lambda x, y: torch.lerp(x, y, 0.3),
    lambda x, y: x + y[0],
    lambda x, y: nn.functional.mse_loss(x, y) + x,
]


def _graph(seed: int, device: str) -> tuple[list[Tensor], list[Tensor]]:
    """Leaves, and tensors that were made of them; some are used many times, some never."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    leaves = [torch.randn(4, 4).to(device).requires_grad_() for _ in range(choose.randint(1, 4))]
    made = list(leaves)
    for _ in range(choose.randint(3, 25)):
        recent = made[-6:] if choose.random() < 0.7 else made
        if choose.random() < 0.5:
            made.append(choose.choice(_UNARY)(choose.choice(recent)))
        else:
            made.append(choose.choice(_BINARY)(choose.choice(recent), choose.choice(recent)))
    return leaves, made


def _node() -> str:
    node = torch._C._current_autograd_node()  # pyright: ignore[reportAttributeAccessIssue]
    return "" if node is None else node.name()


def _functions(run: Callable[[], object]) -> set[str]:
    """The functions that autograd's engine has called where saved tensors were read."""
    seen: set[str] = set()

    def read(tensor: Tensor) -> Tensor:
        seen.add(_node())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, read):
        run()
    return seen - {""}


@pytest.mark.parametrize("seed", range(GRAPHS))
def test_random_graphs(seed: int) -> None:
    """Gradients that meet are added in autograd's order, whatever the graph: of all leaves, of some, of what lies
    between, and gradients of gradients."""

    def run(device: str) -> list[Any]:
        choose = random.Random(seed)
        leaves, made = _graph(seed, device)
        last = made[-1]
        found: list[Any] = []
        ends = [last, choose.choice(made)] if choose.random() < 0.4 else [last]
        ends = [end for end in ends if end.requires_grad]
        torch.autograd.backward(ends, [torch.ones_like(end) for end in ends], retain_graph=True)
        found += [leaf.grad for leaf in leaves]
        asked = choose.sample(made, min(len(made), 4))
        asked = [tensor for tensor in asked if tensor.requires_grad] or leaves
        found += torch.autograd.grad(last.sum(), asked, retain_graph=True, allow_unused=True)
        gradients = torch.autograd.grad(last.square().sum(), leaves, create_graph=True, allow_unused=True)
        found += gradients
        total = [gradient.square().sum() for gradient in gradients if gradient is not None and gradient.requires_grad]
        if total:
            torch.stack(total).sum().backward()
        return [*found, *[leaf.grad for leaf in leaves]]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_both(run)


def _hook(choose: random.Random, name: str, tensor: Tensor, others: list[Tensor], seen: list[Any]) -> None:
    """A hook that notes what it is given, and may change it: on a tensor, on the function that made it, on several."""

    def note(*gradients: Any) -> Any:
        seen.extend([name, *(one if one is None else one.detach().clone() for one in gradients)])

    def scale(gradient: Tensor) -> Tensor:
        note(gradient)
        return gradient * 0.5

    def register(_: Tensor) -> None:
        if choose.random() < 0.3:
            tensor.register_hook(scale)

    def scale_all(*lists: tuple[Tensor | None, ...]) -> Any:
        for gradients in lists:
            note(*gradients)
        return tuple(None if one is None else one * 1.5 for one in lists[0])

    function = tensor.grad_fn
    on_tensors = [
        lambda: tensor.register_hook(note),
        lambda: tensor.register_hook(scale),
        lambda: others[0].register_hook(register),
        lambda: torch.autograd.graph.register_multi_grad_hook(others, lambda all_of: note(*all_of)),
        lambda: torch.autograd.graph.register_multi_grad_hook(others, note, mode="any"),
    ]
    on_leaves = [*on_tensors, lambda: tensor.register_post_accumulate_grad_hook(lambda leaf: note(leaf.grad))]
    if function is None:
        choose.choice(on_leaves)()
        return
    on_functions = [lambda: function.register_prehook(scale_all), lambda: function.register_hook(scale_all)]
    choose.choice([*on_tensors, tensor.retain_grad, *on_functions])()


@pytest.mark.parametrize("seed", range(GRAPHS))
def test_hooks_in_random_graphs(seed: int) -> None:
    """Hooks see and change what they do in autograd's engine, in its order: with all gradients added to ``.grad``, and
    with some asked for."""

    def run(device: str) -> list[Any]:
        choose = random.Random(seed)
        leaves, made = _graph(seed, device)
        able = [tensor for tensor in made if tensor.requires_grad]
        seen: list[Any] = []
        for i in range(choose.randint(1, 6)):
            _hook(choose, f"hook {i}", choose.choice(able), choose.sample(able, min(len(able), 3)), seen)
        made[-1].sum().backward(retain_graph=True)
        seen += ["backward", *[tensor.grad for tensor in able if tensor.is_leaf or tensor.retains_grad]]
        asked = [tensor for tensor in choose.sample(made, min(len(made), 4)) if tensor.requires_grad] or leaves
        try:
            seen += ["grad", *torch.autograd.grad(made[-1].sum(), asked, retain_graph=True, allow_unused=True)]
        except RuntimeError as error:  # a hook of several tensors cannot have leaves that are asked for
            seen.append(str(error))
        made[-1].square().mean().backward(create_graph=choose.random() < 0.3)
        return [*seen, *[leaf.grad for leaf in leaves]]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of `create_graph`
        on_both(run)


def test_gradients_of_one_tensor_from_several_roots() -> None:
    """Their sum can be differentiated."""

    def run(device: str) -> list[Any]:
        x = torch.linspace(-1, 1, 4).to(device).requires_grad_()
        y, z = x.exp(), x.sin()
        weights = [torch.linspace(i, 1, 4).to(device).requires_grad_() for i in range(3)]
        (gradient,) = torch.autograd.grad([y, z, y], x, weights, create_graph=True)
        return [gradient, *torch.autograd.grad(gradient.square().sum(), [*weights, x])]

    on_both(run)


def test_the_engine_calls_one_function() -> None:
    """Also where some of the graph's functions are Python, or have hooks."""

    def step(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], None]:
        def run() -> None:
            x = torch.randn(3, device=DEVICE, requires_grad=True)
            change(x, x.exp()).tanh().sum().backward()

        return run

    def with_hook(of: Callable[[Tensor, Tensor], object]) -> Callable[[Tensor, Tensor], Tensor]:
        def change(x: Tensor, y: Tensor) -> Tensor:
            of(x, y)
            return y

        return change

    assert _functions(step(lambda _, y: y)) == {"MaridBackward"}
    hooks: list[Callable[[Tensor, Tensor], object]] = [
        lambda _, y: y.register_hook(lambda grad: grad),
        lambda x, _: x.register_hook(lambda grad: grad),
        lambda x, _: x.register_post_accumulate_grad_hook(lambda _: None),
        lambda _, y: y.retain_grad(),
        lambda _, y: y.grad_fn.register_hook(lambda *_: None),  # type: ignore[union-attr]
        lambda _, y: y.grad_fn.register_prehook(lambda *_: None),  # type: ignore[union-attr]
    ]
    for of in hooks:
        assert _functions(step(with_hook(of))) == {"MaridBackward"}
    for write in (lambda _, y: y[1:].mul_(2), lambda x, y: y[0].copy_(x[0])):
        assert _functions(step(with_hook(write))) == {"MaridBackward"}
    assert _functions(step(lambda _, y: _applied(_Twice, y))) == {"MaridBackward"}
    assert _functions(step(with_hook(lambda _, y: y[1:].copy_(_applied(_Twice, y[1:]))))) == {"MaridBackward"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            assert "MaridBackward" not in _functions(step(lambda _, y: y))


def test_errors_are_those_of_autograd() -> None:
    """Of a graph that is gone, of a saved tensor that was written to, of inputs that nothing depends on, and of
    gradients that do not fit; what was added up before stays."""

    def message(run: Callable[[], object]) -> str:
        with pytest.raises(RuntimeError) as caught:
            run()
        return str(caught.value).split("\n")[0].split(" or directly access")[0]

    def run(device: str) -> list[Any]:
        found: list[Any] = []
        x = torch.ones(3, device=device, requires_grad=True)
        y = x.exp().tanh().sum()
        y.backward()
        found += [message(y.backward), x.grad]
        z = x.exp()
        total = (z * 2).sum() + z.square().sum()
        with torch.no_grad():
            z.add_(1)
        found += [message(total.backward).replace("torch.FloatTensor", "").split(" [")[-1][:20], x.grad]
        other = torch.ones(3, device=device, requires_grad=True)
        found.append(message(lambda: torch.autograd.grad(x.exp().sum(), [x, other])))
        found.append(message(lambda: torch.autograd.grad(x.exp().sum(), [x, other * 1])))
        found += torch.autograd.grad(x.exp().sum(), [other, x], allow_unused=True)
        found += torch.autograd.grad(x.exp().sum(), [other], allow_unused=True)
        found.append(message(lambda: x.exp().backward(torch.ones(2, device=device))))
        found.append(message(lambda: torch.ones(3, device=device).sum().backward()))
        written = x * 1
        first = written.unbind(0)[0]
        written.add_(1)
        found.append(message(first.backward))
        found.append(message(lambda: torch.autograd.grad(x.exp().sum(), [first], allow_unused=True)))
        return found

    on_both(run)


def test_a_backward_inside_of_another() -> None:
    """Recomputed parts, whose saved tensors call Python while the outer one is under way."""

    def run(device: str) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).to(device)
        x = torch.randn(3, 4).to(device).requires_grad_()
        for reentrant in (False, True):
            y = checkpoint(model, x.exp(), use_reentrant=reentrant)
            assert isinstance(y, Tensor)
            (y.square().sum() + x.sum()).backward()
        return [x.grad, *[p.grad for p in model.parameters()]]

    on_both(run)


def test_python_sees_tensors_of_the_device() -> None:
    """Saved tensors that Python gets during a backward, and what it computes there."""
    seen: list[float] = []

    def read(tensor: Tensor) -> Tensor:
        assert type(tensor) is marid.LazyTensor
        doubled = tensor * 2
        assert type(doubled) is marid.LazyTensor
        seen.append(doubled.sum().item())
        return tensor

    x = torch.ones(3, device=DEVICE, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, read):
        (x.exp() * x).sum().backward()
    assert len(seen) == 3


def test_an_error_of_python_in_between() -> None:
    """Where a saved tensor is read: it comes out as it is, and the next backward is as ever."""

    def read(_tensor: Tensor) -> Tensor:
        raise KeyError("gone")

    x = torch.ones(3, device=DEVICE, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, read):
        y = x.exp().sum()
    with pytest.raises(KeyError, match="gone"):
        y.backward()
    assert x.grad is None
    x.exp().sum().backward()
    assert_same(x.grad, torch.ones(3).exp())


def test_devices_meet() -> None:
    """A graph with functions of the CPU's tensors in it, gradients of which meet too."""

    def run(device: str) -> list[Any]:
        x = torch.linspace(0, 1, 6, requires_grad=True)
        y = x.to(device, copy=True).exp()
        back = y.to("cpu", copy=True)
        total = (back.sin() + back.cos() * x).to(device, copy=True).sum() + y.sum()
        total.backward()
        return [x.grad]

    on_both(run)


def test_gradients_have_the_cpus_strides() -> None:
    def run(device: str) -> list[Any]:
        x = torch.ones(3, 1, 4).to(device).transpose(0, 2).requires_grad_()
        y = x * 2
        (y.sum() + (y * y).sum() + y.permute(2, 1, 0).exp().sum()).backward()
        return [x.grad]

    on_both(run)


def test_hooks_after_an_error() -> None:
    """A backward that failed does not change what the next one shows to Python."""
    x = torch.ones(3, device=DEVICE, requires_grad=True)
    y = x.exp().sum()
    y.backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()
    seen: list[Tensor] = []
    z = x.exp()
    z.register_hook(seen.append)
    z.sum().backward()
    assert [type(tensor) for tensor in seen] == [marid.LazyTensor]
    assert_same(x.grad, (2 * torch.ones(3).exp()))


def test_functions_of_python_see_tensors_of_the_device() -> None:
    """Gradients that have come from functions of C++ and of Python, and those that are made because none has come."""
    seen: list[type] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * 1, x * 2

        @staticmethod
        def backward(_ctx: Any, *grads: Tensor) -> Tensor:
            seen.extend(type(grad) for grad in grads)
            made = grads[0] * 2
            seen.append(type(made))
            return made

    x = torch.ones(3, device=DEVICE, requires_grad=True)
    (_applied(Look, _applied(Look, x.exp())[0] + x)[0].view(3, 1) * 1).sum().backward()
    assert set(seen) == {marid.LazyTensor}
    assert len(seen) == 6
    assert type(x.grad) is marid.LazyTensor
    assert_same(x.grad, 4 * torch.ones(3).exp() + 2)


def test_functions_of_python_that_fail() -> None:
    """Their error, or autograd's of what they return, comes out; what was added up before stays."""

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, how: str) -> Tensor:
            ctx.how = how
            return x * 1

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            if ctx.how == "raise":
                raise KeyError("gone")
            results = {
                "shape": grads[0][:2],
                "more": (grads[0], None, grads[0]),
                "less": grads[0],
                "sum": grads[0][None],
            }
            found = results[ctx.how]
            return found if isinstance(found, tuple) or ctx.how == "less" else (found, None)

    def run(device: str) -> list[Any]:
        found: list[Any] = []
        for how in ("raise", "shape", "more", "less", "sum"):
            x = torch.ones(3, device=device, requires_grad=True)
            y = _applied(Wrong, x.exp(), how).sum() + x.sum()
            try:
                y.backward()
            except (KeyError, RuntimeError) as error:
                found.append(f"{type(error).__name__} {error}".split("\n")[0])
            found.append(x.grad)
        return found

    on_both(run)


def test_a_function_of_python_that_goes_backward_itself() -> None:
    """A graph of its own, in the middle of another one; and no error of the inner one is lost."""

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                copy = x.detach().requires_grad_()
                (_applied(_Twice, copy.sin()) * 0.5).backward(grads[0])
            assert copy.grad is not None
            return copy.grad

    def run(device: str) -> list[Any]:
        x = torch.linspace(0, 1, 5).to(device).requires_grad_()
        (_applied(Inner, x.exp()).tanh() + x).sum().backward()
        return [x.grad]

    on_both(run)


@pytest.mark.parametrize("count", [8, 200_000])
def test_threads_go_backward_to_the_same_leaves(count: int) -> None:
    """Each function of autograd locks a mutex, and each operation asks for the interpreter's lock: nobody waits for the
    one with the other. Gradients are small numbers that are whole, so their order is not seen."""

    def run(device: str) -> list[Any]:
        x = torch.ones(count).to(device).requires_grad_()
        shared = x * 2

        def work() -> None:
            for _ in range(20):
                (_applied(_Twice, shared) + x * 3).sum().backward(retain_graph=True)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        return [x.grad]

    on_both(run)


def test_gradients_of_a_subclass_are_seen_by_its_python() -> None:
    """Between functions of Python that wrap and unwrap tensors, as distributed ones are."""

    class Pack(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, a: Tensor, b: Tensor) -> Any:
            return TwoTensor(a, b)

        @staticmethod
        def backward(_ctx: Any, *grads: Any) -> tuple[Tensor, Tensor]:
            return grads[0].a, grads[0].b

    class Unpack(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, both: Any) -> tuple[Tensor, Tensor]:
            return both.a, both.b

        @staticmethod
        def backward(_ctx: Any, *grads: Tensor) -> Any:
            return TwoTensor(*grads)

    def run(device: str) -> list[Any]:
        x = torch.linspace(0, 1, 6).to(device).requires_grad_()
        both = _applied(Pack, x.exp(), x.sin())
        a, b = _applied(Unpack, (both * both).tanh() + both)
        ((a * 2).sum() + (b.exp() * a).sum()).backward()
        return [x.grad]

    on_both(run)


def test_hooks_see_saved_tensors_in_autograds_order() -> None:
    """Checkpoints count them, and may save in one way of running and compute again in another."""

    def run(device: str) -> list[Any]:
        seen: list[tuple[str, list[int]]] = []

        def look(what: str) -> Callable[[Tensor], Tensor]:
            def hook(tensor: Tensor) -> Tensor:
                seen.append((what, list(tensor.shape)))
                return tensor

            return hook

        a, b = (torch.ones(*shape).to(device).requires_grad_() for shape in ((2, 3), (3, 4)))
        bias = torch.ones(4).to(device).requires_grad_()
        batch, weight = (torch.ones(*shape).to(device).requires_grad_() for shape in ((5, 2, 3), (5, 3, 4)))
        with torch.autograd.graph.saved_tensors_hooks(look("save"), look("read")):
            for product in (
                a.mm(b),
                a.mm(b.detach()),
                a.detach().mm(b),
                torch.addmm(bias, a, b),
                torch.addmm(bias, a, b, beta=2),
                batch.bmm(weight),
                nn.functional.linear(batch, b.t(), bias),
                nn.functional.linear(batch, b.t()),
            ):
                product.sum().backward()
        return [seen]

    on_both(run)


def test_reentrant_checkpoints_refuse_to_be_asked() -> None:
    """They compute gradients for ``.grad`` alone, and ask autograd's engine whether that is what is done."""

    def run(device: str) -> list[Any]:
        x = torch.ones(3).to(device).requires_grad_()
        y = checkpoint(lambda x: x.exp() * x, x, use_reentrant=True)
        with pytest.raises(RuntimeError, match="incompatible with"):
            torch.autograd.grad(y.sum(), x, retain_graph=True)
        with pytest.raises(RuntimeError, match="incompatible with"):
            y.sum().backward(inputs=(x,), retain_graph=True)
        asked = torch.autograd.grad(_applied(_Twice, x).sum(), x)  # other functions of Python do not
        y.sum().backward()
        return [x.grad, *asked]

    on_both(run)


def test_hooks_of_a_root_that_leads_to_nothing_asked_for() -> None:
    """A single root is begun with all the same; of several, each only where it leads there."""

    def run(device: str) -> Any:
        p, q = (torch.ones(2).to(device).requires_grad_() for _ in range(2))
        needed = q * 2  # q can gather gradients from here on
        called: list[str] = []

        def ask(*roots: Tensor) -> None:
            weights = [torch.ones(2).to(device) for _ in roots]
            torch.autograd.grad(roots, (q,), weights, allow_unused=True, retain_graph=True)
            called.extend(str(weight.tolist()) for weight in weights)

        triple = p * 3
        triple.register_hook(lambda grad: (called.append("root"), grad * 7)[1])
        removed = p * 3
        handle = removed.register_hook(lambda grad: (handle.remove(), grad * 7)[1])
        p.register_hook(lambda grad: (called.append("leaf"), grad.mul_(5))[1])
        for roots in ((p,), (triple,), (removed,), (triple, needed), (needed,), (triple, p)):
            ask(*roots)
        (triple + removed).sum().backward()
        return called, p.grad

    assert run(DEVICE)[0] == run("cpu")[0]
    assert_same(run(DEVICE)[1], run("cpu")[1])


def test_hooks_that_ask_which_functions_run() -> None:
    def run(device: str) -> list[Any]:
        found: list[Any] = []
        p = torch.ones(2).to(device).requires_grad_()
        loss = (p * 2).sum()
        for tensors in ((loss, p), (p,)):
            torch.autograd.graph.register_multi_grad_hook(
                tensors, lambda grads: found.append([None if grad is None else grad.tolist() for grad in grads])
            )
        loss.backward(retain_graph=True)
        torch.autograd.grad(p, p, torch.ones(2).to(device))
        p.backward(torch.ones(2).to(device))
        torch.autograd.backward((loss, p), (None, torch.ones(2).to(device)), retain_graph=True)
        loss.register_hook(lambda _grad: found.append(torch._C._will_engine_execute_node(loss.grad_fn)))
        loss.backward()
        return found

    assert run(DEVICE) == run("cpu")
