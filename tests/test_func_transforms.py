"""``torch.func`` on the device: every transform of a table over every operation of a table, recorded without a wait.

Each entry runs on the CPU and on the device, as recorded and under ``marid.compile``; values are the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils import _pytree

import marid
from tests.helpers import DEVICE

Function = Callable[[torch.Tensor], torch.Tensor]

ROWS, COLUMNS = 3, 4


def _weight(x: torch.Tensor, rows: int = COLUMNS, columns: int = COLUMNS) -> torch.Tensor:
    """A fixed matrix on the device of ``x``."""
    return torch.linspace(-1, 1, rows * columns, device=x.device).view(rows, columns)


def _written(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[1:] = y[1:] + x[:-1]
    y.mul_(x.sigmoid())
    return y


def _conv(x: torch.Tensor) -> torch.Tensor:
    return F.conv1d(x.unsqueeze(0), _weight(x, ROWS, 6).view(2, ROWS, 3), padding=1)


def _attention(x: torch.Tensor) -> torch.Tensor:
    q = x.view(1, 1, ROWS, COLUMNS)
    return F.scaled_dot_product_attention(q, q * 0.5, q + 1)


# Each takes a matrix of ROWS x COLUMNS.
OPS: dict[str, Function] = {
    "add": lambda x: x + x.t().reshape(ROWS, COLUMNS),
    "mul": lambda x: x * x * 0.5,
    "div": lambda x: x / (x.abs() + 1),
    "pow": lambda x: x**3,
    "exp": lambda x: x.exp(),
    "sin": lambda x: torch.sin(x),
    "tanh": lambda x: x.tanh(),
    "sigmoid": lambda x: x.sigmoid(),
    "relu": lambda x: F.relu(x),
    "gelu": lambda x: F.gelu(x),
    "softplus": lambda x: F.softplus(x),
    "where": lambda x: torch.where(x > 0, x * 2, x.square()),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "sum": lambda x: x.sum(0),
    "mean": lambda x: x.mean(1, keepdim=True),
    "amax": lambda x: x.amax(1),
    "logsumexp": lambda x: x.logsumexp(1),
    "cumsum": lambda x: x.cumsum(1),
    "norm": lambda x: x.norm(dim=1),
    "var": lambda x: x.var(1),
    "matmul": lambda x: x @ _weight(x),
    "bmm": lambda x: torch.bmm(x.unsqueeze(0), _weight(x).unsqueeze(0)),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, _weight(x)),
    "linear": lambda x: F.linear(x, _weight(x), _weight(x)[0]),
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(1),
    "layer_norm": lambda x: F.layer_norm(x, (COLUMNS,)),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(ROWS, device=x.device)),
    "transpose": lambda x: x.t() * 2,
    "reshape": lambda x: x.reshape(2, -1),
    "cat": lambda x: torch.cat([x, x * 2], 1),
    "stack": lambda x: torch.stack([x, x.sin()]),
    "split": lambda x: torch.split(x, 2, 1)[1] * 3,
    "index": lambda x: x[torch.tensor([2, 0], device=x.device)],
    "gather": lambda x: x.gather(1, torch.tensor([[1], [0], [3]], device=x.device)),
    "slice": lambda x: x[1:, ::2],
    "pad": lambda x: F.pad(x, (1, 2)),
    "expand": lambda x: x.unsqueeze(0).expand(2, ROWS, COLUMNS) * 2,
    "written in place": _written,
    "conv1d": _conv,
    "attention": _attention,
}

Transform = Callable[[Function], Callable[[torch.Tensor], Any]]


def _scalar(f: Function) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: f(x).sum()


def _vjp(f: Function) -> Callable[[torch.Tensor], Any]:
    def run(x: torch.Tensor) -> Any:
        out, back = vjp(f, x)[:2]
        return out, back(torch.ones_like(out) * 0.5)

    return run


def _jvp(f: Function) -> Callable[[torch.Tensor], Any]:
    return lambda x: jvp(f, (x,), (x.cos(),))


def _batched(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, x * 0.5 - 1])


TRANSFORMS: dict[str, Transform] = {
    "grad": lambda f: grad(_scalar(f)),
    "grad_and_value": lambda f: grad_and_value(_scalar(f)),
    "vjp": _vjp,
    "jvp": _jvp,
    "vmap": lambda f: lambda x: vmap(f)(_batched(x)),
    "jacrev": lambda f: jacrev(f),
    "jacfwd": lambda f: jacfwd(f),
    "hessian": lambda f: hessian(_scalar(f)),
    "vmap of grad": lambda f: lambda x: vmap(grad(_scalar(f)))(_batched(x)),
    "grad of vmap": lambda f: grad(lambda x: vmap(f)(_batched(x)).sum()),
    "grad of grad": lambda f: grad(lambda x: grad(_scalar(f))(x).square().sum()),
    "vmap of vmap": lambda f: lambda x: vmap(vmap(f))(torch.stack([_batched(x), _batched(x.sin())])),
    "vmap of jvp": lambda f: lambda x: vmap(_jvp(f))(_batched(x)),
}

_x = torch.linspace(-1.5, 1.25, ROWS * COLUMNS).view(ROWS, COLUMNS)

# What eager PyTorch itself cannot do, by (operation, transform): the device raises the same.
REFUSED = {("attention", transform) for transform in ("jvp", "jacfwd", "hessian", "grad of grad", "vmap of jvp")}


def _run(operation: str, transform: str, x: torch.Tensor) -> Any:
    try:
        return TRANSFORMS[transform](OPS[operation])(x)
    except RuntimeError as error:
        return str(error).splitlines()[0]


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("operation", OPS)
def test_table(operation: str, transform: str) -> None:
    """Values as eager PyTorch's, or its error; recorded in one go, run as one program."""
    expected = _run(operation, transform, _x.clone())
    assert isinstance(expected, str) == ((operation, transform) in REFUSED)
    x = _x.to(DEVICE)
    before = marid.epoch()
    with marid.no_sync():
        lazy = _run(operation, transform, x)
    assert marid.epoch() == before
    assert marid.stats().fallbacks == {}
    if not isinstance(expected, str):
        marid.materialize(*_pytree.tree_leaves(lazy))
        assert marid.epoch() == before + 1
    _assert_equal(lazy, expected)


def _assert_equal(lazy: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(lazy.cpu(), expected, rtol=0, atol=0, equal_nan=True)
        assert lazy.stride() == expected.stride()
    elif isinstance(expected, (tuple, list)):
        assert len(lazy) == len(expected)
        for a, b in zip(lazy, expected, strict=True):
            _assert_equal(a, b)
    elif isinstance(expected, dict):
        assert lazy.keys() == expected.keys()
        for name, value in expected.items():
            _assert_equal(lazy[name], value)
    else:
        assert lazy == expected


_ALL = [
    (operation, transform) for operation in OPS for transform in TRANSFORMS if (operation, transform) not in REFUSED
]
# Every operation, every transform, and some of the pairs.
_SOME = [pair for index, pair in enumerate(_ALL) if index % 7 == 0 or pair[0] == "softmax"]


@pytest.mark.parametrize(("operation", "transform"), _SOME)
def test_table_compiled(operation: str, transform: str) -> None:
    """The same under ``marid.compile``, on other values at each call."""
    _check_compiled(operation, transform)


@pytest.mark.conformance
@pytest.mark.parametrize(("operation", "transform"), [pair for pair in _ALL if pair not in _SOME])
def test_rest_of_the_table_compiled(operation: str, transform: str) -> None:
    """The pairs that take too long for every change."""
    _check_compiled(operation, transform)


def _check_compiled(operation: str, transform: str) -> None:
    function = TRANSFORMS[transform](OPS[operation])
    compiled = marid.compile(function)
    for call in range(4):
        x = _x.sin() + call
        _assert_equal(compiled(x.to(DEVICE)), function(x))
    assert (compiled.stats().recordings, compiled.stats().replays) == (2, 2)


def _model(device: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    return model.to(device)


def _losses(device: str) -> list[tuple[str, Callable[[torch.Tensor], Any]]]:
    """Functions of a batch: transforms of a model called with parameters of its own."""
    model = _model(device)
    params = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return functional_call(model, parameters, (x,)).square().sum()

    def step(x: torch.Tensor) -> dict[str, torch.Tensor]:
        grads = grad(loss)(params, x)
        return {name: params[name] - 0.1 * grads[name] for name in params}

    def ensemble(x: torch.Tensor) -> torch.Tensor:
        stacked = {name: torch.stack([value, value * 2]) for name, value in params.items()}
        return vmap(lambda p: functional_call(model, p, (x,)))(stacked)

    return [
        ("step", step),
        ("per-sample gradients", lambda x: vmap(grad(loss), in_dims=(None, 0))(params, x)),
        ("ensemble", ensemble),
        ("jacobian of the model", lambda x: vmap(jacrev(model))(x)),
        ("hessian-vector product", lambda x: jvp(grad(lambda y: loss(params, y)), (x,), (x.cos(),))),
        ("chunks", lambda x: vmap(lambda row: model(row), chunk_size=2)(x)),
        ("random, different", lambda x: vmap(lambda r: r + torch.randn_like(r), randomness="different")(x)),
        ("random, same", lambda x: vmap(lambda r: F.dropout(r, 0.5), randomness="same")(x)),
    ]


@pytest.mark.parametrize("index", range(len(_losses("cpu"))))
@pytest.mark.parametrize("compiled", [False, True])
def test_functional_call(index: int, compiled: bool) -> None:
    """Transforms over modules, with random numbers as eager PyTorch's."""
    name, expected_of = _losses("cpu")[index]
    _, lazy_of = _losses(DEVICE)[index]
    run = marid.compile(lazy_of) if compiled else lazy_of
    torch.manual_seed(3)
    x = torch.randn(5, 4)
    torch.manual_seed(4)
    expected = [expected_of(x * call) for call in range(4)]
    batches = [(x * call).to(DEVICE) for call in range(4)]
    torch.manual_seed(4)
    with marid.no_sync():
        lazy = [run(batch) for batch in batches]
    assert marid.stats().fallbacks == {}, name
    _assert_equal(lazy, expected)
    if compiled:
        assert marid.stats().functions[0].replays == 2


# --- noise -----------------------------------------------------------------------------------------------------------

DRAWN: dict[str, Callable[[Function], Callable[[torch.Tensor], Any]]] = {
    "grad": lambda f: grad(lambda x: f(x).square().sum()),
    "vjp": lambda f: lambda x: vjp(f, x)[1](x.mT),
    "jvp": _jvp,
    "grad of grad": lambda f: grad(lambda y: grad(lambda x: f(x).pow(3).sum())(y).sum()),
    "vmap of grad": lambda f: vmap(grad(lambda x: f(x).square().sum()), randomness="same"),
}


@pytest.mark.parametrize("transform", DRAWN)
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_dropout_of_what_is_not_contiguous(transform: str, p: float) -> None:
    """Transforms draw its noise in the order of the elements, and leave the generator where it is on the CPU."""
    x = torch.randn(3, 4, 5)

    def run(device: str) -> list[torch.Tensor]:
        torch.manual_seed(1)
        made = DRAWN[transform](lambda y: F.dropout(y.mT, p))(x.to(device))
        return [t.cpu() for t in (*_pytree.tree_leaves(made), torch.rand(3, device=device))]

    for got, expected in zip(run(DEVICE), run("cpu"), strict=True):
        assert torch.equal(got, expected)
        assert got.stride() == expected.stride()
