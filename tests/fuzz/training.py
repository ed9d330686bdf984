"""How a random network is trained: its inputs, loss, optimizer and what else happens in a step, as statements."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .writer import Writer

__all__ = ["Training", "input_shape", "training"]


@dataclass(frozen=True)
class Training:
    """Statements of a training, over the names ``net``, ``device``, ``data`` (a generator of the CPU), ``batch``.

    ``setup`` runs once, ``inputs`` gives ``x`` for each batch, ``step`` is the body of ``step(x)``, which leaves
    ``out`` and ``loss``; ``before`` and ``after`` run around each step.
    """

    dtype: str
    batches: tuple[int, ...]
    setup: tuple[str, ...]
    before: tuple[str, ...]
    inputs: tuple[str, ...]
    step: tuple[str, ...]
    after: tuple[str, ...]


def input_shape(w: Writer) -> tuple[int, ...]:
    """A random shape of a sample: mostly small, sometimes of more than 16,384 elements with its batch."""
    large = w.chance(12)
    channels = w.one(1, 2, 3, 4, 6, 8, 8, 16)
    dims = w.one(0, 1, 1, 1, 2, 2, 2, 2, 2, 3)
    top = {0: 1, 1: 1500, 2: 48, 3: 14} if large else {0: 1, 1: 12, 2: 9, 3: 5}
    if dims == 0:
        return (w.number(1, 2048 if large else 32),)
    if dims == 1 and w.chance(60):
        return (w.number(1, 64 if large else 9), w.one(4, 6, 8, 12, 16))
    return (
        max(channels, 8) if large else channels,
        *(w.number(top[dims] // 2 if large else 1, top[dims]) for _ in range(dims)),
    )


# --- inputs ----------------------------------------------------------------------------------------------------------


def _inputs(w: Writer, shape: tuple[int, ...]) -> tuple[str, ...]:
    rank = len(shape) + 1
    made = w.one(*["plain"] * 4, "transposed", "sliced", "expanded", "last")
    sizes = list(shape)
    if made == "transposed" and rank > 2:
        a, b = w.number(0, rank - 2), w.number(0, rank - 2)
        sizes[a], sizes[b] = sizes[b], sizes[a]
        then = f".transpose({a + 1}, {b + 1})"
    elif made == "sliced":
        sizes[-1] *= 2
        then = w.one("[..., ::2]", f"[..., :{shape[-1]}]", f"[..., {shape[-1]}:]")
    elif made == "expanded":
        sizes[0] = 1
        then = f".expand(batch, {', '.join(map(str, shape))})"
    elif made == "last" and rank in (4, 5):
        last = "channels_last" if rank == 4 else "channels_last_3d"
        then = f".to(memory_format=torch.{last})"
    elif made == "last" and rank == 3:
        sizes = [sizes[1], sizes[0]]
        then = ".mT"
    else:
        then = ""
    drawn = f"x = torch.randn(batch, {', '.join(map(str, sizes))}, generator=data).to(device, dtype){then}"
    return (drawn, "x.requires_grad_()") if w.chance(40) else (drawn,)


# --- losses ----------------------------------------------------------------------------------------------------------

_NUMBERS = "torch.arange(out.numel(), device=device).view(out.shape)"
_ROWS = "torch.arange(out[:, 0].numel(), device=device).view(out[:, 0].shape)"


def _loss(w: Writer) -> tuple[str, ...]:
    floats = f"y = ({_NUMBERS} % 7 / 3 - 1).to(out.dtype)"
    zero_or_one = f"y = ({_NUMBERS} % 3 == 0).to(out.dtype)"
    signs = f"y = ({_NUMBERS} % 2 * 2 - 1).to(out.dtype)"
    classes = f"y = {_ROWS} % out.shape[1]"
    reduction = w.options(20, reduction=("sum",))
    kind = w.number(0, 5)
    if kind == 0:
        return (f"loss = out{w.one('.square().mean()', '.sum()', '.float().mean()', '.abs().sum()', '.norm()')}",)
    if kind == 1:
        name = w.one("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
        return floats, f"loss = F.{name}(out, y{reduction})"
    if kind == 2:
        name = w.one(
            f"binary_cross_entropy_with_logits(out, y{reduction})",
            f"binary_cross_entropy(out.sigmoid(), y{reduction})",
            f"poisson_nll_loss(out, y{reduction})",
            "kl_div(out.flatten(1).log_softmax(1), y.flatten(1).softmax(1), reduction='batchmean')",
            "gaussian_nll_loss(out, y, out.square() + 1)",
            "multilabel_soft_margin_loss(out.flatten(1), y.flatten(1))",
        )
        return zero_or_one, f"loss = F.{name}"
    if kind == 3:
        name = w.one(
            f"soft_margin_loss(out, y{reduction})",
            f"hinge_embedding_loss(out, y{reduction})",
            "cosine_embedding_loss(out.flatten(1), y.flatten(1), y.flatten(1)[:, 0])",
            "margin_ranking_loss(out, out.flip(0).tanh(), y)",
            "triplet_margin_loss(out.flatten(1), y.flatten(1), out.flatten(1).flip(1))",
        )
        return signs, f"loss = F.{name}"
    given = w.options(25, label_smoothing=(0.1,), reduction=("sum",), ignore_index=(0,))
    name = w.one(
        f"cross_entropy(out, y{given})",
        f"cross_entropy(out, y{given})",
        "nll_loss(out.log_softmax(1), y)",
        "multi_margin_loss(out.flatten(2).mean(2) if out.dim() > 2 else out, y.flatten(1)[:, 0] if y.dim() > 1 else y)",
        "cross_entropy(out, out.detach().softmax(1))",
    )
    return classes, f"loss = F.{name}"


# --- optimizers ------------------------------------------------------------------------------------------------------

_OPTIMIZERS: dict[str, dict[str, tuple[object, ...]]] = {
    "SGD": {"momentum": (0.9,), "weight_decay": (0.01,), "maximize": (True,), "fused": (True,)},
    "Adam": {"amsgrad": (True,), "weight_decay": (0.01,), "maximize": (True,), "fused": (True,)},
    "AdamW": {"amsgrad": (True,), "weight_decay": (0.1,), "fused": (True,), "betas": ((0.8, 0.9),)},
    "RMSprop": {"momentum": (0.9,), "centered": (True,), "weight_decay": (0.01,)},
    "Adagrad": {"lr_decay": (0.1,), "weight_decay": (0.01,), "fused": (True,)},
    "Adadelta": {"weight_decay": (0.01,)},
    "Adamax": {"weight_decay": (0.01,)},
    "NAdam": {"decoupled_weight_decay": (True,), "weight_decay": (0.01,)},
    "RAdam": {"weight_decay": (0.01,)},
    "ASGD": {"t0": (2,), "weight_decay": (0.01,)},
    "Rprop": {"etas": ((0.4, 1.3),)},
}
_SCHEDULERS = (
    "StepLR(optimizer, 2)",
    "CosineAnnealingLR(optimizer, 4)",
    "ExponentialLR(optimizer, 0.9)",
    "LinearLR(optimizer, total_iters=3)",
    "OneCycleLR(optimizer, 0.1, total_steps=40, cycle_momentum=False)",
    "LambdaLR(optimizer, lambda epoch: 1 / (epoch + 1))",
)


def _optimizer(w: Writer) -> str:
    name = w.one("SGD", "SGD", "SGD", "Adam", "Adam", "AdamW", "AdamW", *_OPTIMIZERS)
    given = w.options(25, **_OPTIMIZERS[name])
    if name == "SGD" and w.dtype == torch.bfloat16:
        given = given.replace(", fused=True", "")  # with momentum, PyTorch's kernel leaves a part of it uninitialised
    if "momentum=0.9" in given and name == "SGD" and w.chance(40):
        given += ", nesterov=True"
    if "fused" not in given:
        given += w.options(20, foreach=(True, False), differentiable=(False,))
    groups = "net.parameters()"
    if w.chance(10):
        groups = "[{'params': [p]} for p in net.parameters()]"
    return f"optimizer = torch.optim.{name}({groups}, lr={w.one(0.01, 0.1, 0.003)}{given})"


# --- the whole -------------------------------------------------------------------------------------------------------


def _forward(w: Writer, autocast: bool) -> str:
    call = "out = net(x)"
    if w.chance(5):
        call = "out = torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False)"
    return f"with torch.autocast(device, torch.bfloat16):\n    {call}" if autocast else call


def training(w: Writer, shape: tuple[int, ...], dtype: str) -> Training:
    """A training for inputs of a shape."""
    setup, before, after = [], [], []
    rank = len(shape) + 1
    if rank in (4, 5) and w.chance(20):
        setup.append(f"net.to(memory_format=torch.channels_last{'' if rank == 4 else '_3d'})")
    if w.chance(5):
        setup.append("next(net.parameters()).requires_grad_(False)")
    if w.chance(3):
        setup.append("optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)")
        lbfgs = True
    else:
        setup.append(_optimizer(w))
        lbfgs = False
    zero = f"optimizer.zero_grad({w.one('', 'set_to_none=False')})"
    forward = (_forward(w, dtype == "torch.float32" and w.chance(12)), *_loss(w))
    if lbfgs:
        body = "\n".join((zero, *forward, "loss.backward()", "return loss"))
        closure = "def closure():\n    nonlocal out\n" + "\n".join(f"    {line}" for line in body.splitlines())
        step = ["out = None", closure, "loss = optimizer.step(closure)"]
    else:
        step = [*forward, "loss.backward()"] if w.chance(92) else [*forward, "(loss * 0.5).backward()"]
        if w.chance(4):
            step[-1:-1] = [
                "slope, = torch.autograd.grad(out.sum(), x, create_graph=True)",
                "loss = loss + slope.square().mean()",
            ]
        elif w.chance(6):
            step += ["(net(x.flip(0)).square().mean() * 0.5).backward()"]
        if w.chance(15):
            clip = w.one("clip_grad_norm_(net.parameters(), 0.5)", "clip_grad_value_(net.parameters(), 0.01)")
            step.append(f"nn.utils.{clip}")
        step.append("optimizer.step()")
        step.insert(w.one(0, len(forward), len(step)), zero)
        if w.chance(15):
            setup.append(f"scheduler = torch.optim.lr_scheduler.{w.one(*_SCHEDULERS)}")
            after.append("scheduler.step()")
    if w.chance(5):
        setup.append("average = torch.optim.swa_utils.AveragedModel(net)")
        after.append("average.update_parameters(net)")
    batch = w.one(1, 2, 3, 3, 4, 5)
    batches = [batch] * w.one(3, 4, 5)
    if w.chance(40):
        batches[w.number(0, len(batches) - 1)] = w.number(1, 6)
    if w.chance(25):
        before.append(f"net.train(number % {w.number(2, 3)} != 1)")
    if w.chance(10):
        after.append("net.eval()\nwith torch.no_grad():\n    out = net(x)\nnet.train()")
    return Training(dtype, tuple(batches), tuple(setup), tuple(before), _inputs(w, shape), tuple(step), tuple(after))
