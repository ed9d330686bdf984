"""Small workloads, written for every peer: tiny operations, a pointwise expression, a training step of an MLP."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np

DEVICES = {"marid": "remote_accelerator", "marid.compile": "remote_accelerator"}


def prepare(lab: Any) -> None:
    framework = lab.peer.split()[0]
    if framework == "JAX":
        import jax  # noqa: F401  # pyright: ignore[reportMissingImports]
    elif framework == "MLX":
        import mlx.core  # noqa: F401  # pyright: ignore[reportMissingImports]
    elif framework == "tinygrad":
        import tinygrad  # noqa: F401  # pyright: ignore[reportMissingImports]
    else:
        import torch  # noqa: F401
    if lab.peer in DEVICES:
        marid = lab.marid()
        if lab.peer == "marid.compile" and not hasattr(marid, "compile"):
            raise ModuleNotFoundError("this version of Marid has no marid.compile")


def build(lab: Any) -> Callable[[], Any]:
    makers = {"tiny": tiny, "pointwise": pointwise, "mlp": mlp}
    return makers[lab.options["task"]](lab)


# --- tiny operations -------------------------------------------------------------------------------------------------


def tiny(lab: Any) -> Callable[[], Any]:
    """A chain of small operations, then a read; the time is that of one operation. With ``record_only`` the clock stops
    before the read."""
    count, alone = lab.options["operations"] // 4, lab.options["record_only"]
    name = lab.peer.split()[0]
    start = np.arange(16, dtype=np.float32).reshape(4, 4) / 16
    read: Callable[[Any], list[float]] = lambda y: [float(v) for v in np.asarray(y).ravel()]  # noqa: E731
    if name == "JAX":
        import jax.numpy as jnp  # pyright: ignore[reportMissingImports]

        x, half = jnp.asarray(start), jnp.asarray(np.float32(0.5))
    elif name == "MLX":
        import mlx.core as mx  # pyright: ignore[reportMissingImports]

        x, half = mx.array(start), mx.array(np.float32(0.5))
        mx.eval(x, half)
    elif name == "tinygrad":
        from tinygrad import Tensor  # pyright: ignore[reportMissingImports]

        x, half = Tensor(start).realize(), Tensor([0.5]).realize()
        read = lambda y: [float(v) for v in y.numpy().ravel()]  # noqa: E731
    else:
        import torch

        torch.set_grad_enabled(False)
        device = DEVICES.get(lab.peer, "cpu")
        x, half = torch.from_numpy(start).to(device), torch.tensor(0.5).to(device)
        read = lambda y: y.flatten().tolist()  # noqa: E731

    def chain() -> Any:
        y: Any = x
        for _ in range(count):
            y = y + x
            y = y * half
            y = y - x
            y = -y
        return y

    if lab.peer == "marid.compile":
        chain = _compiled(chain)

    def call() -> Any:
        started = time.perf_counter()
        y = chain()
        recorded = time.perf_counter()
        output = read(y)
        ended = recorded if alone else time.perf_counter()
        return lab.timed(output, (ended - started) / (4 * count))

    return call


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    import marid

    return marid.compile(function)


# --- a pointwise expression ------------------------------------------------------------------------------------------


def pointwise(lab: Any) -> Callable[[], Any]:
    """``tanh(a * b + c) * sigmoid(a) - c`` on large arrays; the result is whole when the call returns."""
    size, name = lab.options["size"], lab.peer.split()[0]
    generator = np.random.default_rng(0)
    arrays = [generator.standard_normal(size, dtype=np.float32) for _ in range(3)]
    if name == "JAX":
        import jax  # pyright: ignore[reportMissingImports]
        import jax.numpy as jnp  # pyright: ignore[reportMissingImports]

        a, b, c = (jnp.asarray(array) for array in arrays)
        jitted = jax.jit(lambda a, b, c: jnp.tanh(a * b + c) * jax.nn.sigmoid(a) - c)
        return lambda: jitted(a, b, c).block_until_ready()
    if name == "MLX":
        import mlx.core as mx  # pyright: ignore[reportMissingImports]

        a, b, c = (mx.array(array) for array in arrays)
        fused = mx.compile(lambda a, b, c: mx.tanh(a * b + c) * mx.sigmoid(a) - c)

        def call() -> Any:
            y = fused(a, b, c)
            mx.eval(y)
            return y

        return call
    if name == "tinygrad":
        from tinygrad import Tensor, TinyJit  # pyright: ignore[reportMissingImports]

        a, b, c = (Tensor(array).realize() for array in arrays)
        jit = TinyJit(lambda a, b, c: ((a * b + c).tanh() * a.sigmoid() - c).realize())

        def call() -> Any:
            y = jit(a, b, c)
            _finished()
            return _Downloaded(y)

        return call
    import torch

    torch.set_grad_enabled(False)
    device = DEVICES.get(lab.peer, "cpu")
    a, b, c = (torch.from_numpy(array).to(device) for array in arrays)
    if lab.peer == "copy":
        return a.clone

    def expression(a: Any, b: Any, c: Any) -> Any:
        return torch.tanh(a * b + c) * torch.sigmoid(a) - c

    if lab.peer == "torch.compile":
        expression = torch.compile(expression)
    elif lab.peer == "marid.compile":
        expression = _compiled(expression)
    if lab.peer not in DEVICES:
        return lambda: expression(a, b, c)
    import marid

    def call() -> Any:
        y = expression(a, b, c)
        marid.materialize(y)
        return y

    return call


class _Downloaded:
    """A tinygrad tensor that NumPy can read."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.tensor.numpy()


def _finished() -> None:
    from tinygrad import Device  # pyright: ignore[reportMissingImports]

    Device[Device.DEFAULT].synchronize()


# --- a training step of an MLP ---------------------------------------------------------------------------------------

MOMENTUM, RATE = 0.9, 0.01


def mlp(lab: Any) -> Callable[[], Any]:
    """256-512-512-10, ReLU, cross-entropy, SGD with momentum; the loss is read at each step."""
    widths, batch = lab.options["widths"], lab.options["batch"]
    generator = np.random.default_rng(0)
    weights = [
        (generator.standard_normal((n, m), dtype=np.float32) / np.float32(m) ** 0.5, np.zeros(n, dtype=np.float32))
        for m, n in itertools.pairwise(widths)
    ]
    x = generator.standard_normal((batch, widths[0]), dtype=np.float32)
    target = generator.integers(0, widths[-1], batch)
    makers = {"JAX": _mlp_jax, "MLX": _mlp_mlx, "tinygrad": _mlp_tinygrad}
    return makers.get(lab.peer.split()[0], _mlp_torch)(lab, weights, x, target)


def _mlp_torch(lab: Any, weights: Any, x: Any, target: Any) -> Callable[[], float]:
    import torch
    from torch import nn

    device = DEVICES.get(lab.peer, "cpu")
    layers: list[nn.Module] = []
    for w, b in weights:
        layer = nn.Linear(w.shape[1], w.shape[0])
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(w))
            layer.bias.copy_(torch.from_numpy(b))
        layers += [layer, nn.ReLU()]
    model = nn.Sequential(*layers[:-1]).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
    inputs, targets = torch.from_numpy(x).to(device), torch.from_numpy(target).to(device)
    forward = torch.compile(model) if lab.peer == "torch.compile" else model

    def step() -> Any:
        loss = nn.functional.cross_entropy(forward(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    if lab.peer == "marid.compile":
        step = _compiled(step)
    return lambda: step().item()


def _mlp_jax(_lab: Any, weights: Any, x: Any, target: Any) -> Callable[[], float]:
    import jax  # pyright: ignore[reportMissingImports]
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]

    params = [(jnp.asarray(w), jnp.asarray(b)) for w, b in weights]
    inputs, targets = jnp.asarray(x), jnp.asarray(target)

    def loss_of(params: Any) -> Any:
        y = inputs
        for w, b in params[:-1]:
            y = jax.nn.relu(y @ w.T + b)
        logits = y @ params[-1][0].T + params[-1][1]
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], 1).mean()

    def update(params: Any, momenta: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params)
        momenta = jax.tree.map(lambda m, g: MOMENTUM * m + g, momenta, grads)
        return loss, jax.tree.map(lambda p, m: p - RATE * m, params, momenta), momenta

    jitted = jax.jit(update, donate_argnums=(0, 1))
    state = [params, jax.tree.map(jnp.zeros_like, params)]

    def step() -> float:
        loss, *state[:] = jitted(*state)
        return float(loss)

    return step


def _mlp_mlx(_lab: Any, weights: Any, x: Any, target: Any) -> Callable[[], float]:
    import mlx.core as mx  # pyright: ignore[reportMissingImports]

    params = [mx.array(array) for pair in weights for array in pair]
    inputs, targets = mx.array(x), mx.array(target)

    def loss_of(params: Any) -> Any:
        y = inputs
        for w, b in zip(params[:-2:2], params[1:-2:2], strict=True):
            y = mx.maximum(y @ w.T + b, 0)
        logits = y @ params[-2].T + params[-1]
        picked = mx.take_along_axis(logits, targets[:, None], 1)[:, 0]
        return (mx.logsumexp(logits, 1) - picked).mean()

    def update(params: Any, momenta: Any) -> Any:
        loss, grads = mx.value_and_grad(loss_of)(params)
        momenta = [MOMENTUM * m + g for m, g in zip(momenta, grads, strict=True)]
        return loss, [p - RATE * m for p, m in zip(params, momenta, strict=True)], momenta

    compiled = mx.compile(update)
    state = [params, [mx.zeros_like(p) for p in params]]

    def step() -> float:
        loss, *state[:] = compiled(*state)
        mx.eval(loss, state)
        return loss.item()

    return step


def _mlp_tinygrad(_lab: Any, weights: Any, x: Any, target: Any) -> Callable[[], float]:
    from tinygrad import Tensor, TinyJit  # pyright: ignore[reportMissingImports]

    params = [Tensor(array).realize() for pair in weights for array in pair]
    momenta = [Tensor.zeros(*p.shape).contiguous().realize() for p in params]
    inputs, targets = Tensor(x).realize(), Tensor(target.astype(np.int32)).realize()

    def update() -> Any:
        y = inputs
        for w, b in zip(params[:-2:2], params[1:-2:2], strict=True):
            y = (y @ w.transpose() + b).relu()
        loss = (y @ params[-2].transpose() + params[-1]).sparse_categorical_crossentropy(targets)
        moved = [m.assign(MOMENTUM * m + g) for m, g in zip(momenta, loss.gradient(*params), strict=True)]
        changed = [p.assign(p - RATE * m) for p, m in zip(params, moved, strict=True)]
        Tensor.realize(loss, *moved, *changed)
        return loss

    jit = TinyJit(update)
    return lambda: jit().item()
