"""Autograd: the same gradients, hooks, errors and laziness as eager PyTorch."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import marid
from tests.helpers import DEVICE, assert_same, on_both, seeded, train_step


def _leaf(device: str, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=device).requires_grad_()


def test_backward_and_accumulation() -> None:
    """Gradients add up over calls until they are cleared."""

    def run(device: str) -> list[Any]:
        x, w = _leaf(device, 3, 4), _leaf(device, 4, 2)
        (x @ w).sum().backward()
        first = w.grad.clone()  # type: ignore[union-attr]
        (x @ w).square().mean().backward()
        second = [x.grad, w.grad.clone()]  # type: ignore[union-attr]
        w.grad = None
        (w * 2).sum().backward()
        return [first, *second, w.grad]

    on_both(run)


def test_autograd_grad() -> None:
    """With unused inputs, given output gradients, and several outputs."""

    def run(device: str) -> list[Any]:
        x, y, unused = _leaf(device, 3), _leaf(device, 3), _leaf(device, 1)
        z = x * y.exp()
        gx, gy, none = torch.autograd.grad(z, [x, y, unused], torch.ones_like(z) * 2, allow_unused=True)
        assert none is None
        return [gx, gy, *torch.autograd.grad([(x * 2).sum(), (x * x).sum()], [x]), x.grad]

    on_both(run)


def test_double_backward() -> None:
    """Gradients of gradients, and a gradient penalty."""

    def run(device: str) -> list[Any]:
        x = _leaf(device, 4)
        (g,) = torch.autograd.grad((x**3).sum(), [x], create_graph=True)
        (h,) = torch.autograd.grad(g.sum(), [x], create_graph=True)
        (h.sum() + g.norm()).backward()
        return [g, h, x.grad]

    on_both(run)


def test_retain_graph() -> None:
    """A second backward needs it, and says so."""

    def run(device: str) -> Any:
        x = _leaf(device, 3)
        loss = (x * x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
        return x.grad

    on_both(run)


def test_tensor_hooks_see_and_change_gradients() -> None:
    """In order of registration, on leaves and on intermediates; removed hooks are not called."""

    def run(device: str) -> list[Any]:
        seen: list[torch.Tensor] = []
        x = _leaf(device, 3)
        y = x * 2
        y.register_hook(lambda grad: grad * 10)
        y.register_hook(lambda grad: seen.append(grad))
        removed = x.register_hook(lambda grad: grad * 1000)
        removed.remove()
        x.register_post_accumulate_grad_hook(lambda t: seen.append(t.grad.clone()))  # type: ignore[union-attr]
        y.retain_grad()
        y.sum().backward()
        return [x.grad, y.grad, *seen]

    lazy = on_both(run)
    assert all(type(t) is marid.LazyTensor for t in lazy)


def test_hooks_on_nodes_and_modules() -> None:
    """``grad_fn.register_hook``, ``register_full_backward_hook`` and saved-tensor hooks."""

    def run(device: str) -> list[Any]:
        seen: list[Any] = []
        layer = seeded(nn.Linear(3, 2), device)
        layer.register_full_backward_hook(lambda m, gi, go: seen.append(go[0].clone()))
        x = _leaf(device, 2, 3)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t):
            y = layer(x).tanh()
        y.grad_fn.register_hook(lambda gi, go: seen.append(gi[0]))
        y.sum().backward()
        return [x.grad, layer.weight.grad, *seen]

    on_both(run)


@pytest.mark.parametrize("where", ["tensor", "node", "module", "post"])
def test_a_raising_hook_is_caught_and_the_process_goes_on(where: str) -> None:
    """The hook's own exception arrives, and everything works afterwards."""

    def fail(*_: Any) -> None:
        raise ValueError("from the hook")

    layer = nn.Linear(3, 1).to(DEVICE)
    x = _leaf(DEVICE, 2, 3)
    y = layer(x)
    register: dict[str, Callable[[Any], Any]] = {
        "tensor": x.register_hook,
        "node": y.grad_fn.register_hook,
        "module": layer.register_full_backward_hook,
        "post": x.register_post_accumulate_grad_hook,
    }
    handle = register[where](fail)
    if where == "module":
        y = layer(x)
    with pytest.raises(ValueError, match="from the hook"):
        y.sum().backward()
    handle.remove()
    x.grad = None
    layer(x).sum().backward()
    assert_same(x.grad, layer.weight.detach().cpu().expand(2, 3).contiguous())


def test_keyboard_interrupt_in_backward_leaves_autograd_usable() -> None:
    """As Ctrl-C during a hook would."""

    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    x = _leaf(DEVICE, 3)
    handle = x.register_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        (x * 2).sum().backward()
    handle.remove()
    (x * 2).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    """Recomputed segments, with dropout inside, give the gradients of the first computation."""

    def run(device: str) -> list[Any]:
        model = seeded(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Tanh()), device)
        x = _leaf(device, 4, 3)
        y = checkpoint(model, x, use_reentrant=reentrant)
        assert isinstance(y, torch.Tensor)
        y.square().sum().backward()
        return [y.detach(), x.grad, *(p.grad for p in model.parameters()), torch.rand(2, device=device)]

    on_both(run)


class _Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x)
        ctx.scale = scale
        double = x * 2
        ctx.mark_non_differentiable(double)
        return x**3 * scale, double

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        assert ctx.needs_input_grad == (True, False)
        return 3 * x**2 * ctx.scale * grad, None


def test_custom_function() -> None:
    """Saved tensors, non-tensor arguments, outputs without gradient, double backward."""

    def run(device: str) -> list[Any]:
        x = _leaf(device, 4)
        y, double = _Cubed.apply(x, 0.5)  # type: ignore[misc]
        assert not double.requires_grad
        (g,) = torch.autograd.grad(y.sum(), [x], create_graph=True)
        g.sum().backward()
        return [y, double, g, x.grad]

    on_both(run)


def test_custom_function_that_writes_in_place() -> None:
    """``mark_dirty`` returns the written tensor itself."""

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.mark_dirty(x)
            return x.mul_(3)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return grad * 3

    def run(device: str) -> list[Any]:
        x = _leaf(device, 3)
        y = x.clone()
        z = Scale.apply(y)
        assert z is y
        z.sum().backward()
        return [x.grad, z]

    on_both(run)


def test_in_place_operations_and_views_in_a_graph() -> None:
    """Writes to views, and through views to bases, are differentiated."""

    def run(device: str) -> list[Any]:
        x = _leaf(device, 4, 3)
        y = x * 1
        y[1:3].mul_(2)
        y.t()[0].add_(y[:, 1])
        y.unbind(1)  # pieces that are not written
        y.relu_()
        (y * torch.arange(3.0, device=device)).sum().backward()
        return [x.grad, y]

    on_both(run)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda y: y.add_(1),
        lambda y: y[0].zero_(),
        lambda y: y.detach().mul_(2),
        lambda y: torch._foreach_mul_([y], 2.0),
        lambda y: torch.add(y.detach(), 1, out=y.detach()),
        lambda y: y.copy_(torch.zeros(3)),
    ],
)
def test_writing_what_backward_needs_is_an_error(spoil: Callable[[torch.Tensor], Any]) -> None:
    """Version counters work: a wrong gradient is never computed silently."""
    for device in ("cpu", DEVICE):
        x = torch.ones(3, device=device, requires_grad=True)
        y = x.exp()
        spoil(y) if y.grad_fn is None else torch.no_grad()(spoil)(y)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def _write_below_a_leaf(base: torch.Tensor) -> list[torch.Tensor]:
    leaf = base[:4].requires_grad_()
    view = leaf[1:3]
    base.mul_(2)
    return [leaf, view]


def _write_below_a_leaf_with_gradient(base: torch.Tensor) -> list[torch.Tensor]:
    leaf = base[:4].requires_grad_()
    view = leaf.view(2, 2).t()[0]
    base.mul_(torch.full_like(base, 2.0).requires_grad_())
    return [leaf, view]


def _write_a_view_of_a_leaf(base: torch.Tensor) -> list[torch.Tensor]:
    leaf = base[:4].requires_grad_()
    leaf[1:3].mul_(2)
    return [leaf]


def _set_a_view(base: torch.Tensor) -> list[torch.Tensor]:
    other = base[1:5].view(2, 2)
    base.requires_grad_()
    root = base * 1
    view = root[2:]
    view.set_(other.detach())
    root.mul_(3)
    return [root, view]


def _set_a_base(base: torch.Tensor) -> list[torch.Tensor]:
    root = base.requires_grad_() * 1
    view = root[2:]
    with torch.no_grad():
        root.set_(torch.ones(2, 2, device=base.device))
    view.mul_(3)
    return [root, view]


def _transpose_a_base(base: torch.Tensor) -> list[torch.Tensor]:
    root = base.requires_grad_().view(2, 3) * 1
    view = root[0]
    root.t_()
    root.mul_(3)
    return [root, view]


def _detach_a_base(base: torch.Tensor) -> list[torch.Tensor]:
    root = base.requires_grad_() * 1
    view = root[:4]
    root.detach_()
    root.mul_(3)
    return [root, view]


def _empty_views(base: torch.Tensor) -> list[torch.Tensor]:
    root = base.requires_grad_() * 1
    view = root[:0]
    root.mul_(3)
    view.mul_(2)
    return [root, view]


_VIEWS = [
    *(_write_below_a_leaf, _write_below_a_leaf_with_gradient, _write_a_view_of_a_leaf, _set_a_view, _set_a_base),
    *(_transpose_a_base, _detach_a_base, _empty_views),
]


def _outcome(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("program", _VIEWS, ids=lambda program: program.__name__)
def test_views_whose_base_changes(program: Callable[[torch.Tensor], list[torch.Tensor]]) -> None:
    """Their history, gradients and errors are those of strided tensors on the CPU."""

    def run(device: str) -> list[Any]:
        base = torch.arange(6.0, device=device)
        tensors = _outcome(lambda: program(base))
        if isinstance(tensors, str):
            return [tensors, base]
        seen: list[Any] = []
        for tensor in (base, *tensors):
            seen += [_outcome(lambda t=tensor: type(t.grad_fn).__name__), tensor.detach(), tensor._version]
            seen.append(_outcome(lambda t=tensor: t.sum().backward(retain_graph=True)))
            seen.append(_outcome(lambda t=tensor: (t * t).sum().backward(retain_graph=True, create_graph=True)))
        for tensor in (base, *tensors):
            seen.append(_outcome(lambda t=tensor: t.grad if t.is_leaf else None))
        return seen

    on_both(run)


def test_writing_data_is_no_error() -> None:
    """``.data`` is outside of autograd's sight, as it always was."""

    def run(device: str) -> list[Any]:
        w, x = _leaf(device, 3), _leaf(device, 3)
        loss = (w * x).sum()
        w.data.mul_(2)
        loss.backward()
        return [x.grad, w.grad, w]

    on_both(run)


def test_errors_of_autograd() -> None:
    """Type and message as on the CPU."""

    def leaf_written(x: torch.Tensor) -> None:
        x.add_(1)

    def not_scalar(x: torch.Tensor) -> None:
        (x * 2).backward()

    def no_graph(x: torch.Tensor) -> None:
        x.detach().sum().backward()

    def integers(x: torch.Tensor) -> None:
        x.detach().long().requires_grad_()

    def wrong_gradient(x: torch.Tensor) -> None:
        (x * 2).backward(torch.ones(7, device=x.device))

    def unused(x: torch.Tensor) -> None:
        torch.autograd.grad((x * 2).sum(), [x.detach().requires_grad_()])

    for wrong in (leaf_written, not_scalar, no_graph, integers, wrong_gradient, unused):
        messages = []
        for device in ("cpu", DEVICE):
            with pytest.raises(RuntimeError) as caught:
                wrong(torch.ones(3, device=device, requires_grad=True))
            messages.append((caught.type, str(caught.value)))
        assert messages[0] == messages[1], wrong.__name__


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "AdamW no foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


def _train(device: str, optimizer_name: str, steps: int) -> list[Any]:
    model = seeded(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2)), device)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    x, target = torch.randn(6, 4, device=device), torch.randint(0, 2, (6,), device=device)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_stays_unexecuted_until_something_is_read(name: str) -> None:
    """Three whole steps are recorded without running one operation; what they compute is what eager computes."""
    torch.manual_seed(0)
    lazy = _train(DEVICE, name, 3)
    assert marid.stats().ops_executed == 0
    assert marid.stats().materializations == 0
    torch.manual_seed(0)
    assert_same(lazy, _train("cpu", name, 3))


def test_reading_the_loss_each_step_gives_the_same_training() -> None:
    """Where the reads are makes no difference to the numbers."""

    def train(device: str, read: bool) -> list[Any]:
        torch.manual_seed(0)
        model = seeded(nn.Linear(4, 1), device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses = []
        for _ in range(4):
            loss = train_step(optimizer, model(torch.randn(8, 4, device=device)).square().mean())
            losses.append(loss.item() if read else loss)
        return [[float(loss) for loss in losses], model.weight.detach()]

    assert_same(train(DEVICE, read=True), train("cpu", read=True))
    assert_same(train(DEVICE, read=False), train("cpu", read=True))


def test_a_loop_that_reads_now_and_then_runs_one_step_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its program is that of one step, however many steps lie between two reads."""
    monkeypatch.setattr(marid.settings, "immediate_bytes", 0)  # as for a larger model

    def train(device: str) -> list[float]:
        torch.manual_seed(0)
        model = seeded(nn.Sequential(*[nn.Linear(8, 8) for _ in range(24)]), device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
        losses = []
        for step in range(1, 41):
            loss = train_step(optimizer, model(torch.randn(8, 8, device=device)).square().mean())
            if step % 10 == 0:
                losses.append(loss.item())
        return losses

    assert train(DEVICE) == train("cpu")
    stats = marid.stats()
    assert stats.automatic_cuts > 30
    assert stats.programs_built <= 4


def test_functional_transforms() -> None:
    """``grad``, ``vmap``, ``jacrev``, ``hessian``, ``functional_call``."""

    def run(device: str) -> list[Any]:
        layer = seeded(nn.Linear(3, 2), device)
        x = torch.randn(3, device=device)
        square = lambda t: (t * t * t).sum()  # noqa: E731
        state = {name: p.detach() for name, p in layer.named_parameters()}

        def loss(parameters: dict[str, torch.Tensor], sample: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(layer, parameters, (sample,)).square().sum()

        per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(state, torch.randn(5, 3, device=device))
        return [
            torch.func.grad(square)(x),
            torch.func.jacrev(torch.sin)(x),
            torch.func.jacfwd(torch.sin)(x),
            torch.func.hessian(square)(x),
            per_sample,
        ]

    on_both(run)


def test_shapes_first_seen_in_inference_mode_train_later() -> None:
    """Evaluation before training, between its steps, and what was made there and is used on."""

    def run(device: str) -> list[Any]:
        net = seeded(nn.Sequential(nn.Linear(13, 29), nn.ReLU(), nn.Dropout(0.3), nn.Linear(29, 2)), device)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        found: list[Any] = []
        for _ in range(4):
            with torch.inference_mode():
                x = torch.rand(4, 13, device=device)
                found.append(net(x).sum().item())
                made = torch.ones(29, 13, device=device) * 2
                made.view(13, 29).add_(1)
            loss = train_step(optimizer, net(x.clone()).square().mean())
            weight = torch.full((29, 13), 0.5, device=device, requires_grad=True)
            (weight * made.clone()).sum().backward()
            found += [loss, weight.grad, *(p.detach().clone() for p in net.parameters())]
        return found

    on_both(run)


def test_no_grad_inference_mode_and_detach() -> None:
    """Nothing is recorded for autograd inside."""
    x = _leaf(DEVICE, 2)
    with torch.no_grad():
        assert not (x * 2).requires_grad
    with torch.inference_mode():
        y = x * 2
        assert not y.requires_grad
    assert y.tolist() == (x * 2).tolist()
    assert not x.detach().requires_grad


def test_graph_and_gradients_are_freed_without_the_collector() -> None:
    """Dropping the loss drops the graph and what it saved."""
    gc.collect()
    gc.disable()
    try:
        x = _leaf(DEVICE, 100)
        y = x.exp()
        alive = weakref.ref(y._value)  # type: ignore[attr-defined]
        loss = (y * y).sum()
        loss.backward()
        del y, loss
        x.grad = None
        assert alive() is None
    finally:
        gc.enable()


def test_graph_is_freed_after_a_run_too() -> None:
    """The same when values were read."""
    x = _leaf(DEVICE, 1000)
    x.tolist()
    gc.collect()
    gc.disable()
    try:
        before = marid.stats().memory_allocated
        for _ in range(3):
            loss = (x.exp() * x).sum()
            loss.backward()
            loss.item()
            assert x.grad is not None
            x.grad.sum().item()
            x.grad = None
            del loss
        assert marid.stats().memory_allocated == before
    finally:
        gc.enable()


def test_two_devices_in_one_graph() -> None:
    """Gradients cross device indices, and the CPU, with the copies."""

    def run(devices: tuple[str, str]) -> list[Any]:
        torch.manual_seed(0)
        x = torch.randn(3).to(devices[0]).requires_grad_()
        y = (x * 2).to(devices[1])
        (y * y).sum().cpu().backward()
        return [x.grad, y]

    first, second = run((f"{DEVICE}:0", f"{DEVICE}:1"))
    assert_same([first, second], run(("cpu", "cpu")))
    assert first.device.index == 0
    assert second.device.index == 1


def test_attention_of_which_nobody_wants_the_gradient() -> None:
    """Autograd calls its backward with an undefined gradient."""

    class Lost(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(_ctx: Any, _grad: torch.Tensor) -> None:  # type: ignore[override]
            return None

    for _ in range(3):  # from the second time on by what is known of the first
        q = torch.randn(1, 2, 3, 4, device=DEVICE, requires_grad=True)
        Lost.apply(torch.nn.functional.scaled_dot_product_attention(q, q, q)).sum().backward()
        assert q.grad is None
    assert not marid.stats().fallbacks


@pytest.mark.parametrize(
    "index", [torch.tensor([[0, 1], [4, 4]]), torch.tensor([True, False, True, True, False])], ids=["numbers", "mask"]
)
def test_the_gradient_of_an_index_on_the_cpu(index: torch.Tensor) -> None:
    """An index may lie on the CPU, as on any accelerator; it does in the backward, too, and in the backward of that."""

    def gradients(device: str) -> list[torch.Tensor]:
        base = torch.arange(15.0).view(5, 3).to(device).requires_grad_()
        written = (base * 2).index_put((index,), base[index] * 3)
        (first,) = torch.autograd.grad(written.pow(3).sum() + base[index].pow(2).sum(), base, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), base)
        return [first.detach().cpu(), second.cpu()]

    for got, expected in zip(gradients(DEVICE), gradients("cpu"), strict=True):
        assert torch.equal(got, expected)
