"""Random networks, trained by the same source on two devices, and compared.

A network is text: blocks of a ``Module`` and statements of its training, drawn from a seed (``network(seed)``), so that
what fails is printed as the very code that ran. ``check`` trains it on the CPU, eagerly, and on the device, and says
how what can be seen of the two differs; ``shrinking.minimised`` takes out what a difference does not need.
``python -m tests.fuzz`` does that for a range of seeds.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import math
import random
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import marid

from .indexing import INDEXING
from .layers import LAYERS
from .mixers import MIXERS
from .observed import Difference, Observer, differences
from .tight import tight
from .training import Training, input_shape, training
from .writer import Block, Writer

__all__ = ["DEVICE", "TIERS", "Network", "Tier", "check", "network", "source"]

DEVICE = "remote_accelerator"
COMPILING_SECONDS = 120


@dataclass(frozen=True)
class Network:
    """A network and its training. ``each_step`` says that all values are read after each step, not at the end."""

    blocks: tuple[Block, ...]
    training: Training
    each_step: bool


# --- writing ---------------------------------------------------------------------------------------------------------

_KINDS = [kind for kind, weight in LAYERS + MIXERS + INDEXING for _ in range(weight)]


def network(seed: int) -> Network:
    """The network of a seed."""
    choices = random.Random(seed)
    dtype = choices.choice(["float32"] * 7 + ["float64", "bfloat16"])
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        w = Writer(choices, (1,), getattr(torch, dtype))
        shape = input_shape(w)
        w = Writer(choices, shape, getattr(torch, dtype))
        wanted = w.number(2, 8)
        for _ in range(6 * wanted):
            if len(w.blocks) == wanted and any(block.init for block in w.blocks):
                break
            w.write(w.one(*_KINDS))
        return Network(tuple(w.blocks), training(w, shape, f"torch.{dtype}"), w.chance(60))


_SOURCE = """\
class Network(nn.Module):
    def __init__(self):
        super().__init__()
{init}

    def forward(self, x):
{forward}
        return x


def train(device, compiled, see):
    torch.manual_seed(0)
    data = torch.Generator().manual_seed(1)
    dtype = {dtype}
    net = Network().to(device, dtype)
    torch.manual_seed(2)
{setup}

    def step(x):
{step}
        return loss.detach(), out.detach()

    step = compiled(step)
    batches = {batches}
    for number, batch in enumerate(batches):
{before}
{inputs}
        loss, out = step(x)
{after}
        see(number, number == len(batches) - 1, locals())
"""


def source(net: Network) -> str:
    """A network as Python: a class ``Network`` and a function ``train(device, compiled, see)``."""

    def lines(statements: tuple[str, ...], depth: int) -> str:
        return textwrap.indent("\n".join(statements), "    " * depth)

    t = net.training
    text = _SOURCE.format(
        init=lines(tuple(line for block in net.blocks for line in block.init), 2),
        forward=lines(tuple(line for block in net.blocks for line in block.forward), 2),
        setup=lines(t.setup, 1),
        step=lines(t.step, 2),
        before=lines(t.before, 2),
        inputs=lines(t.inputs, 2),
        after=lines(t.after, 2),
        batches=list(t.batches),
        dtype=t.dtype,
    )
    kept = [line for line in text.splitlines() if line.strip()]
    return "\n".join("\n\n" + line if line.startswith("def ") else line for line in kept) + "\n"


# --- running ---------------------------------------------------------------------------------------------------------


def _as_it_is(thing: Any) -> Any:
    return thing


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Tier:
    """A way to run networks on the device.

    ``changes`` is applied to the network before, ``compiled`` to the function of a step; ``after_step`` is called after
    each step on the device. Where it is ``tight``, programs run with less memory than they take as recorded.
    """

    name: str
    tolerance: float = 0.0
    compiled: Callable[[Any], Any] = _as_it_is
    changes: Callable[[Network], Network] = _as_it_is
    after_step: Callable[[], None] = _nothing
    settings: tuple[tuple[str, Any], ...] = ()
    tight: bool = False


def _repeated(net: Network) -> Network:
    """Two recordings, or three where an optimizer makes its state, come before the first replay of each kind."""
    return replace(net, training=replace(net.training, batches=net.training.batches * 3))


def _steady(net: Network) -> Network:
    """Steps of one size, by an optimizer that does not make rounding large, as those do that divide by gradients."""
    setup = tuple(
        "optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)" if "optimizer = " in line else line
        for line in net.training.setup
    )
    changed = replace(net.training, setup=setup, batches=(max(net.training.batches),) * 8)
    return replace(net, training=changed)


def _wait_for_compilers() -> None:
    end = time.monotonic() + COMPILING_SECONDS
    while marid.stats().programs_compiling and time.monotonic() < end:
        time.sleep(0.05)


TIERS = {
    tier.name: tier
    for tier in (
        Tier("flat", settings=(("compile", False),)),
        Tier("tight", settings=(("compile", False),), tight=True),
        Tier("immediate", settings=(("compile", False), ("immediate_after", 0), ("immediate_bytes", 1 << 40))),
        Tier("replayed", compiled=marid.compile, changes=_repeated, settings=(("compile", False),)),
        Tier(
            "compiled",
            tolerance=1e-3,
            changes=_steady,
            after_step=_wait_for_compilers,
            settings=(("compile", True), ("compile_after", 1), ("compile_ms", 0), ("compile_niceness", 0)),
        ),
    )
}


@contextlib.contextmanager
def tier_settings(tier: Tier) -> Iterator[None]:
    """Marid's settings as a tier needs them, with every program planned that comes again; nothing runs at once unless
    the tier says so."""
    wanted = {"plan_bytes": 0, "immediate_bytes": 0} | dict(tier.settings)
    before = {name: getattr(marid.settings, name) for name in wanted}
    for name, value in wanted.items():
        setattr(marid.settings, name, value)
    try:
        with tight() if tier.tight else contextlib.nullcontext():
            yield
    finally:
        for name, value in before.items():
            setattr(marid.settings, name, value)


@contextlib.contextmanager
def _without_a_crash() -> Iterator[None]:
    """Raise where PyTorch's CPU kernels for gradients end the process or write behind their memory.

    That of group norm does where the input is laid out as channels-last and needs no gradient, but the weight does;
    that of a convolution with stride where the kernel is a single point and the input is channels-last; and
    convolutions where padding "same" means one more on one side (PyTorch 2.13).
    """
    group_norm, convolutions = F.group_norm, {name: getattr(F, name) for name in ("conv2d", "conv3d")}
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}

    def guarded(x: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        last = formats.get(x.dim())
        if last and not x.requires_grad and torch.is_grad_enabled() and x.is_contiguous(memory_format=last):
            raise NotImplementedError("group norm of a channels-last input without gradient")
        return group_norm(x, *arguments, **options)

    def pointwise(name: str, x: torch.Tensor, weight: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        def given(option: str, place: int, otherwise: Any) -> Any:
            return options.get(option, arguments[place] if len(arguments) > place else otherwise)

        def of_each_dimension(number: Any) -> tuple[int, ...]:
            return number if isinstance(number, tuple) else (number,) * (weight.dim() - 2)

        strided = any(step != 1 for step in of_each_dimension(given("stride", 1, 1)))
        last = formats.get(x.dim())
        if last and strided and set(weight.shape[2:]) == {1} and x.is_contiguous(memory_format=last):
            raise NotImplementedError("a convolution of single points with stride in channels-last")
        reaches = zip(of_each_dimension(given("dilation", 3, 1)), weight.shape[2:], strict=True)
        if given("padding", 2, 0) == "same" and any(step * (size - 1) % 2 for step, size in reaches):
            raise NotImplementedError('a convolution that "same" pads on one side more')
        return convolutions[name](x, weight, *arguments, **options)

    F.group_norm = guarded
    for name in convolutions:
        setattr(F, name, functools.partial(pointwise, name))
    try:
        yield
    finally:
        F.group_norm = group_norm
        for name, function in convolutions.items():
            setattr(F, name, function)


def _nudged(step: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    """A step that changes the last bits of its inputs first."""

    def nudged(x: torch.Tensor) -> Any:
        with torch.no_grad():
            written = x[:1] if x.stride(0) == 0 else x  # memory that an expanded batch shares is written once
            signs = torch.arange(written.numel()).view(written.shape) % 2 * 2 - 1
            written.mul_(1 + 8 * torch.finfo(x.dtype).eps * signs)
        return step(x)

    return nudged


def train(net: Network, device: str, tier: Tier, compiled: Callable[[Any], Any] = _as_it_is) -> Observer:
    """Train a network on a device, its step given to ``compiled``. Its error is noted, not raised."""
    observer = Observer(net.each_step)
    on_cpu = device == "cpu"

    def see(number: int, last: bool, names: dict[str, Any]) -> None:
        if not on_cpu:
            tier.after_step()
        observer(number, last, names)

    text = source(net)
    name = f"<network {hash(text)}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    names: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "math": math, "__name__": "network"}
    try:
        exec(compile(text, name, "exec"), names)
        with _without_a_crash():
            names["train"](device, compiled, see)
    except Exception as error:  # whatever it is, the other device must raise the same
        observer.error = error.with_traceback(None)
    finally:
        names.clear()
        del linecache.cache[name]
    return observer


def check(net: Network, tier: Tier, device: str = DEVICE) -> list[Difference]:
    """How a network's training on the device differs from eager training on the CPU: one difference of each kind.

    Nothing where PyTorch gives something else at each run; nor, where there is a tolerance, if the last bits of the
    inputs matter as much, as they do where the sum of normalised values is the loss.
    """
    net = tier.changes(net)
    with warnings.catch_warnings(), tier_settings(tier):
        warnings.simplefilter("ignore")
        cpu = train(net, "cpu", tier)
        mismatches = marid.stats().compile_mismatches
        found = differences(cpu, train(net, device, tier, tier.compiled), tier.tolerance)
        if marid.stats().compile_mismatches > mismatches:
            found.append(Difference("values", "a compiled part", "its first results are not those of the flat tier"))
        # Several times: memory that PyTorch forgets to write may by chance hold the same twice.
        if found and any(differences(cpu, train(net, "cpu", tier), tier.tolerance) for _ in range(4)):
            return []
        if tier.tolerance and {one.kind for one in found} == {"values"}:
            nudged = differences(cpu, train(net, "cpu", tier, _nudged), tier.tolerance)
            return [] if "values" in [one.kind for one in nudged] else found
        return found
