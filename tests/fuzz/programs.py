"""Random PyTorch programs, run by one interpreter on two devices, and compared.

A program is a tuple of statements, and a statement is Python text over these names: tensors ``t0``, ``t1``, …;
``device``; ``torch``, ``F``, ``copy``, ``pickle``; ``read(value)``, which records a value that Python sees; and
``materialize(...)``, which makes a lazy device run now and does nothing elsewhere. Because a statement is text, what
fails is printed as the very code that ran.

Statements are written by ``programs(profile)`` with a running CPU copy at hand, so that shapes mostly fit; those that
do not fit are wanted too: an error must be the same error on both devices, and leave the same state behind.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import pickle
import re
import textwrap
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

import marid
from marid.errors import MaterializationError

__all__ = ["DEVICE", "PROFILES", "Interpreter", "Mismatch", "check", "minimised", "programs", "same", "script"]

DEVICE = "remote_accelerator"

Program = tuple[str, ...]


# --- running a program -----------------------------------------------------------------------------------------------


@dataclass
class Step:
    """What one statement did: the type of its error, what was read, and what all tensors look like after it."""

    error: type[BaseException] | None
    reads: list[Any]
    tensors: dict[str, tuple[Any, ...]]
    message: str = ""


class Interpreter:
    """Runs statements on one device and records what can be seen from Python."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.steps: list[Step] = []
        self._reads: list[Any] = []
        self._exact = True
        self._versions: dict[str, tuple[int, int]] = {}
        torch.manual_seed(0)
        self.names: dict[str, Any] = {
            "torch": torch,
            "F": F,
            "copy": copy,
            "pickle": pickle,
            "device": device,
            "read": self._read,
            "materialize": marid.materialize if device != "cpu" else lambda *_: None,
        }

    def close(self) -> None:
        """Drop all tensors. Hooks hold their globals, which are these names, where no collector sees the cycle."""
        self.names.clear()

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The living tensors of the program, oldest name first."""
        found = {name: value for name, value in self.names.items() if isinstance(value, torch.Tensor)}
        return dict(sorted(found.items(), key=lambda item: int(item[0][1:])))

    def run(self, statement: str) -> Step:
        """Run one statement. Errors are recorded, not raised."""
        error, message = None, ""
        self._reads = []
        try:
            exec(_compiled(statement), self.names)
        except Exception as raised:  # whatever it is, the other device must raise the same
            error, message = type(raised), str(raised)
        self._exact &= "grad" not in statement
        seen = {
            name: (*_looks(tensor, self._exact), self._is_written(name, tensor))
            for name, tensor in self.tensors.items()
        }
        self.steps.append(Step(error, self._reads, seen, message))
        return self.steps[-1]

    def _is_written(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether autograd has been told, since the last statement, that a tensor was written in place."""
        identity, version = self._versions.get(name, (0, 0))
        self._versions[name] = id(tensor), tensor._version
        return identity == id(tensor) and tensor._version > version

    def values(self, backwards: bool) -> dict[str, Any]:
        """The values of all tensors and of their gradients, read one by one."""
        tensors = list(self.tensors.items())
        found: dict[str, Any] = {}
        for name, tensor in reversed(tensors) if backwards else tensors:
            found[name] = _seen(tensor)
            if tensor.requires_grad and _autograd_looks(tensor) not in ((True, None), (False, None), _BROKEN):
                found[f"{name}.grad"] = _seen(tensor.grad)
        return found

    def aliases(self) -> dict[str, str]:
        """For each tensor with memory, the first tensor that lies in the same memory."""
        first: dict[int, str] = {}
        found = {}
        for name, tensor in self.tensors.items():
            if tensor.numel() and not tensor._is_zerotensor():  # autograd's zeros have no memory
                found[name] = first.setdefault(tensor.untyped_storage().data_ptr(), name)
        return found

    def _read(self, value: Any) -> Any:
        self._reads.append(_seen(value))
        return value


@functools.lru_cache(maxsize=4096)
def _compiled(statement: str) -> CodeType:
    return compile(statement, "<statement>", "exec")


def _looks(tensor: torch.Tensor, exact: bool) -> tuple[Any, ...]:
    """Everything about a tensor that is known without its values.

    Not ``exact`` leaves out strides where they mean nothing: gradients of tensor subclasses are added up out of place.
    """
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return (
        tuple(tensor.shape),
        tensor.dtype,
        tuple(0 if size == 1 and not exact else stride for size, stride in strides),
        tensor.storage_offset(),
        tensor.requires_grad,
        tensor.is_conj(),
        *_autograd_looks(tensor),
    )


_BROKEN = ("RuntimeError", "RuntimeError")
_ZERO_GRADIENT = "ZeroTensors are immutable"


def _autograd_looks(tensor: torch.Tensor) -> tuple[Any, Any]:
    # Looking at a view that was written against autograd's rules raises.
    try:
        grad = tensor.grad if tensor.is_leaf and tensor.requires_grad else None
        return tensor.is_leaf, grad if grad is None else _looks(grad, False)[:-2]
    except RuntimeError:
        return _BROKEN


def _is_leaf(tensor: torch.Tensor) -> bool:
    return _autograd_looks(tensor)[0] is True


def _seen(value: Any) -> Any:
    """A value as recorded: tensors and arrays copied, Python objects with their exact type."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, (list, tuple)):
        return [_seen(item) for item in value]
    return (type(value).__name__, repr(value))


# --- comparing -------------------------------------------------------------------------------------------------------


class Mismatch(AssertionError):
    """A program does not do on the device what it does on the CPU."""

    def __init__(self, program: Program, what: str, raising: frozenset[int]) -> None:
        super().__init__(what)
        self.program = program
        self.raising = raising


def check(program: Program, device: str = DEVICE, runs: int = 2) -> None:
    """Run a program on the CPU and ``runs`` times on ``device`` and compare all that can be seen. Raises ``Mismatch``.

    The second run meets the programs that the first one built, later ones the memory plans of the earlier. The runs
    differ in the order of the final reads. When all tensors are gone, no pending nodes and no memory are left, unless
    the CPU is left with something too: autograd keeps itself alive after an error in backward, or ``x.mul_(x)``.
    """
    if marid.stats().pending_nodes:  # that such a program has left, which would run at some time in this one
        with contextlib.suppress(MaterializationError):
            torch.remote_accelerator.synchronize()
    before = _living()
    program = _compare(program, device, runs)
    if _has_more_than(before):
        gc.collect()
        if _has_more_than(before) and not _leaks_on_the_cpu(program):
            raise Mismatch(
                program, f"it leaves (pending nodes, bytes) {_living()} where {before} were before", frozenset()
            )


def _living() -> tuple[int, int]:
    stats = marid.stats()
    return stats.pending_nodes, stats.memory_allocated


def _has_more_than(before: tuple[int, int]) -> bool:
    # There may also be less: what an earlier failure left in its traceback goes some time.
    return any(now > then for now, then in zip(_living(), before, strict=True))


_ASSIGNMENT = re.compile(r"(t\d+)\[.*\] = (t\d+)$", re.MULTILINE)

_STRIDED = re.compile(r"(t\d+)\.as_strided\(")


def _is_number_in(tensors: dict[str, torch.Tensor], target: str, source: str) -> bool:
    if target not in tensors or source not in tensors or tensors[source].dim():
        return False
    if (tensors[source].requires_grad or tensors[source].is_floating_point()) and not tensors[
        target
    ].is_floating_point():
        return True
    return tensors[target].untyped_storage().data_ptr() == tensors[source].untyped_storage().data_ptr()


def _has_memory_to_spare(tensors: dict[str, torch.Tensor], name: str) -> bool:
    """Whether a kernel has left a tensor with a storage that is larger than itself."""
    if name not in tensors:
        return False
    whole = tensors[name]._base if tensors[name]._base is not None else tensors[name]
    return whole.untyped_storage().nbytes() > whole.numel() * whole.element_size()


def _has_integers_with_grad(tensors: dict[str, torch.Tensor]) -> bool:
    return any(t.requires_grad and not (t.is_floating_point() or t.is_complex()) for t in tensors.values())


def _on_the_cpu(program: Program) -> tuple[Program, Interpreter]:
    """Run a program, or as much of it as has one meaning on all devices.

    It has none after a statement that

    * raises when its work is half done: eager PyTorch has resized its ``out=`` by then, the device has done nothing;
    * makes integers require gradients, or assigns a number to a tensor that lies in the same memory, or a floating one
      to integers: on the CPU ``t[0] = number`` is ``fill_`` and not ``copy_``, which checks the value;
    * pickles a conjugate view, which the device writes as what it is the conjugate of, resolved;
    * strides over what a kernel has left behind its result (that of ``mse_loss`` lies in the memory of the squares);
    * adds to a gradient that is one of autograd's zeros without memory, which eager PyTorch refuses.
    """
    while True:
        cpu = Interpreter("cpu")
        looks: dict[str, tuple[Any, ...]] = {}
        for statement in program:
            groups = cpu.aliases() if "out=" in statement else {}
            assigns = any(_is_number_in(cpu.tensors, *names) for names in _ASSIGNMENT.findall(statement))
            pickles = "pickle" in statement and any(t.is_conj() for t in cpu.tensors.values())
            spare = any(_has_memory_to_spare(cpu.tensors, name) for name in _STRIDED.findall(statement))
            if assigns or pickles or spare:
                cpu.steps.append(Step(None, [], {}))
                break
            step = cpu.run(statement)
            resized = [name for name, old in looks.items() if name in step.tensors and step.tensors[name][0] != old[0]]
            if "out=" in statement and resized:
                shared = [name for name in resized if list(groups.values()).count(groups.get(name)) > 1]
                if step.error is not None or shared:
                    break
            if _has_integers_with_grad(cpu.tensors) or _ZERO_GRADIENT in step.message:
                break
            looks = step.tensors
        else:
            return program, cpu
        cpu.close()
        program = program[: len(cpu.steps) - 1]


def _leaks_on_the_cpu(program: Program) -> bool:
    cpu = Interpreter("cpu")
    made: list[weakref.ref[torch.Tensor]] = []
    for statement in program:
        cpu.run(statement)
        made += [weakref.ref(tensor) for tensor in cpu.tensors.values()]
    cpu.close()
    gc.collect()
    return any(tensor() is not None for tensor in made)


def _compare(program: Program, device: str, runs: int = 2) -> Program:
    with contextlib.ExitStack() as at_end:
        program, cpu = _on_the_cpu(program)
        at_end.callback(cpu.close)
        expected, groups = cpu.values(backwards=False), cpu.aliases()
        raising = frozenset(index for index, step in enumerate(cpu.steps) if step.error is not None)
        for attempt in range(runs):
            run = Interpreter(device)
            at_end.callback(run.close)
            for index, statement in enumerate(program):
                step = run.run(statement)
                difference = _difference(cpu.steps[index], step)
                if difference:
                    where = f"run {attempt + 1}, statement {index}: {statement!r}\n{difference}"
                    raise Mismatch(program[: index + 1], where, raising)
            try:
                found, found_groups = run.values(backwards=attempt % 2 == 1), run.aliases()
            except Exception as error:
                what = f"run {attempt + 1}, final reads: {type(error).__name__}: {error}"
                raise Mismatch(program, what, raising) from error
            for name, value in expected.items():
                if not same(value, found[name]):
                    what = f"run {attempt + 1}, value of {name}:\n  cpu    {value}\n  device {found[name]}"
                    raise Mismatch(program, what, raising)
            found_groups = {name: first for name, first in found_groups.items() if name in groups}
            if groups != found_groups:
                what = f"run {attempt + 1}, tensors share other memory:\n  cpu    {groups}\n  device {found_groups}"
                raise Mismatch(program, what, raising)
    return program


_LOOKS = ("shape", "dtype", "stride", "storage_offset", "requires_grad", "is_conj", "is_leaf", "grad", "written")


def _difference(cpu: Step, device: Step) -> str | None:
    if cpu.error is not device.error:
        return f"  cpu raises    {_error(cpu)}\n  device raises {_error(device)}"
    if len(cpu.reads) != len(device.reads) or not all(map(same, cpu.reads, device.reads)):
        return f"  cpu reads    {cpu.reads}\n  device reads {device.reads}"
    if cpu.tensors.keys() != device.tensors.keys():
        return f"  cpu has {sorted(cpu.tensors)}, device has {sorted(device.tensors)}"
    for name, looks in cpu.tensors.items():
        for what, a, b in zip(_LOOKS, looks, device.tensors[name], strict=True):
            if a != b:
                return f"  {name}.{what}: cpu {a}, device {b}"
    return None


def _error(step: Step) -> str:
    return "nothing" if step.error is None else f"{step.error.__name__}: {step.message}"


def same(a: Any, b: Any) -> bool:
    """Bitwise equality, except that one NaN is as good as another."""
    if isinstance(a, torch.Tensor):
        if not isinstance(b, torch.Tensor) or a.shape != b.shape or a.dtype != b.dtype or a.stride() != b.stride():
            return False
        a, b = a.reshape(-1), b.reshape(-1)
        if a.numel() == 0 or torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            return True
        if a.is_complex():
            a, b = torch.view_as_real(a), torch.view_as_real(b)
        if not a.is_floating_point():
            return False
        return bool((((a == b) & (a.signbit() == b.signbit())) | (a.isnan() & b.isnan())).all())
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return a == b


# --- reporting -------------------------------------------------------------------------------------------------------


def minimised(failure: Mismatch, device: str = DEVICE) -> Mismatch:
    """The same failure without the statements that it does not need."""
    changed = True
    while changed:
        changed = False
        for index in reversed(range(len(failure.program))):
            shorter = failure.program[:index] + failure.program[index + 1 :]
            try:
                check(shorter, device)
            except Mismatch as smaller:
                failure, changed = smaller, True
    return failure


_SCRIPT = """\
import contextlib
import copy
import pickle

import torch
import torch.nn.functional as F

import marid
from marid.errors import MaterializationError


def program(device, read, materialize, raises):
{body}
    return {{name: value for name, value in locals().items() if isinstance(value, torch.Tensor)}}


def run(device):
    seen = []

    @contextlib.contextmanager
    def raises():
        try:
            yield
        except Exception as error:
            seen.append(type(error).__name__)

    torch.manual_seed(0)
    materialize = marid.materialize if device != "cpu" else lambda *tensors: None
    tensors = program(device, seen.append, materialize, raises)
    for name, tensor in tensors.items():
        seen.append((name, tensor.stride(), tensor.storage_offset(), tensor.requires_grad, tensor.detach().cpu()))
        if tensor.is_leaf and tensor.grad is not None:
            seen.append((name + ".grad", tensor.grad.stride(), tensor.grad.detach().cpu()))
    return [item.detach().cpu() if isinstance(item, torch.Tensor) else item for item in seen]


cpu, lazy = run("cpu"), run("{device}")
print("equal" if repr(cpu) == repr(lazy) else "different")
for a, b in zip(cpu, lazy):
    print("   " if repr(a) == repr(b) else "!!!", "cpu:", a, "| device:", b)
"""


def script(program: Program, raising: frozenset[int] = frozenset(), device: str = DEVICE) -> str:
    """A program as a Python script that runs it on both devices and prints what differs.

    ``raising`` are the statements that raise on the CPU; their errors are caught.
    """
    lines = []
    for index, statement in enumerate(program):
        body = textwrap.indent(statement, "    ")
        lines.append(f"with raises():\n{body}" if index in raising else statement)
    return _SCRIPT.format(body=textwrap.indent("\n".join(lines), "    "), device=device)


# --- writing programs ------------------------------------------------------------------------------------------------

_SHAPES = [(3,), (2, 3), (), (3, 3), (1, 3), (4,), (2, 1), (2, 2, 3), (3, 2), (0,), (17,), (2, 0, 3), (3, 1, 2), (5, 4)]
_FLOATS = ["torch.float32", "torch.float32", "torch.float32", "torch.float64", "torch.bfloat16"]
_DTYPES = [*_FLOATS, "torch.int64", "torch.int32", "torch.uint8", "torch.bool", "torch.complex64"]
_NUMBERS = [2.0, 0.5, -1.0, 1.0, 0.0, 3, -2, 1.5, True]

_UNARY = (
    "neg abs sin cos tanh sigmoid relu square sign floor exp log1p erf reciprocal logical_not isnan sgn ceil "
    "positive atan frac trunc isfinite"
).split()
_UNARY_IN_PLACE = "neg_ abs_ sin_ tanh_ sigmoid_ relu_ square_ sign_ floor_ exp_ erf_ reciprocal_ logical_not_".split()
_BINARY = "add sub mul div maximum minimum atan2 eq lt ge logical_and logical_xor hypot".split()
_BINARY_IN_PLACE = "add_ sub_ mul_ div_ copy_ eq_ lt_ logical_and_ atan2_".split()
_REDUCTIONS = "sum mean prod amax amin argmax var std logsumexp any all cumsum softmax cumprod argsort norm".split()
_WITHOUT_KEEPDIM = {"cumsum", "softmax", "cumprod", "argsort"}


@dataclass
class Writer:
    """Writes one statement at a time, looking at a CPU run of what was written before."""

    draw: Callable[[st.SearchStrategy[Any]], Any]
    profile: list[Callable[[Writer], str]]
    cpu: Interpreter = field(default_factory=lambda: Interpreter("cpu"))
    count: int = 0

    # --- choosing ---

    def one(self, *options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def number(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, max(low, high)))

    def chance(self, percent: int) -> bool:
        # Shrinks towards False.
        return self.draw(st.integers(0, 99)) >= 100 - percent

    def new(self) -> str:
        """A name for a result: usually a new one, sometimes one that is in use."""
        if self.cpu.tensors and self.chance(10):
            return self.one(*self.cpu.tensors)
        self.count += 1
        return f"t{self.count}"

    def tensor(self, wanted: Callable[[torch.Tensor], bool] = lambda _: True) -> str:
        """The name of a tensor; raises ``Unfit`` when there is none as wanted."""
        names = [name for name, tensor in self.cpu.tensors.items() if _is_wanted(tensor, wanted)]
        if not names:
            raise Unfit
        return names[-1 - self.number(0, len(names) - 1)]

    def look(self, name: str) -> torch.Tensor:
        return self.cpu.tensors[name]

    def float_tensor(self) -> str:
        return self.tensor(lambda t: t.is_floating_point())

    def partner(self, name: str) -> str:
        """A tensor that broadcasts with another one, mostly."""
        shape = self.look(name).shape
        if self.chance(5):
            return self.tensor()
        return self.tensor(lambda t: _broadcasts(t.shape, shape))

    def writer_of(self, name: str) -> str:
        """A tensor that can be written into another one, mostly."""
        shape = self.look(name).shape
        if self.chance(5):
            return self.tensor()
        return self.tensor(lambda t: _broadcasts(t.shape, shape) and torch.broadcast_shapes(t.shape, shape) == shape)

    def dim(self, name: str) -> int:
        rank = self.look(name).dim()
        return self.number(-rank, rank - 1) if rank and not self.chance(2) else 0

    def operand(self, name: str) -> str:
        return repr(self.one(*_NUMBERS)) if self.chance(40) else self.partner(name)

    def statement(self) -> str:
        for _ in range(4):
            try:
                return self.one(*self.profile)(self)
            except Unfit:
                continue
        return factory(self)


class Unfit(Exception):
    """No tensor is fit for the statement."""


def _is_wanted(tensor: torch.Tensor, wanted: Callable[[torch.Tensor], bool]) -> bool:
    try:
        return wanted(tensor)
    except RuntimeError:  # looking at a view that was written against autograd's rules
        return False


def _broadcasts(a: torch.Size, b: torch.Size) -> bool:
    return all(x == y or x == 1 or y == 1 for x, y in zip(reversed(a), reversed(b), strict=False))


# Factories and random numbers


def factory(w: Writer) -> str:
    shape, dtype, new = w.one(*_SHAPES), w.one(*_DTYPES), w.new()
    ending = f"dtype={dtype}, device=device)"
    floats = f"dtype={w.one(*_FLOATS)}, device=device)"
    n = w.number(0, 6)
    return f"{new} = " + w.one(
        f"torch.arange({shape[0] if shape else 1} * 3, device=device)",
        f"torch.ones({shape}, {ending}",
        f"torch.full({shape}, {w.one(1, 2)}, {ending}",
        f"torch.zeros({shape}, {ending}",
        f"torch.linspace(-1, 1, {n}, {floats}",
        f"torch.eye({n}, {ending}",
        f"torch.tensor([[1.0, -2.0, 0.5], [0.0, 3.0, -1.5]], {ending}",
        f"torch.arange(6, device=device).reshape(2, 3).to({dtype})",
        f"torch.empty({shape}, {ending}.fill_(1)",
        f"torch.empty_strided((2, 3), (1, 2), {ending}.fill_(2)",
        f"torch.tensor(range({n}), {ending}",
        f"torch.logspace(0, 1, {n}, {floats}",
    )


def random_factory(w: Writer) -> str:
    shape, new, n = w.one(*_SHAPES), w.new(), w.number(0, 6)
    floats = f"dtype={w.one(*_FLOATS)}, device=device)"
    return f"{new} = " + w.one(
        f"torch.randn({shape}, {floats}",
        f"torch.rand({shape}, {floats}",
        f"torch.randint(0, 5, {shape}, device=device)",
        f"torch.randperm({n}, device=device)",
        f"torch.randn({shape}, generator=torch.Generator(device).manual_seed({n}), {floats}",
        f"torch.bernoulli(torch.full({shape}, 0.5, {floats})",
    )


def random_like(w: Writer) -> str:
    x = w.float_tensor()
    how = w.one("torch.randn_like({})", "torch.rand_like({})", "F.dropout({}, 0.5)", "{}.new_ones(3).normal_()")
    return f"{w.new()} = {how.format(x)}"


def random_write(w: Writer) -> str:
    x = w.float_tensor()
    how = w.one("normal_()", "uniform_()", "bernoulli_(0.5)", "random_(0, 10)", "exponential_()", "normal_(1.0, 2.0)")
    return f"{x}.{how}"


def seed(w: Writer) -> str:
    return f"torch.manual_seed({w.number(0, 5)})"


def like(w: Writer) -> str:
    x = w.tensor()
    how = w.one("torch.zeros_like({})", "torch.ones_like({})", "torch.full_like({}, 2)", "{}.new_zeros((2, 3))")
    return f"{w.new()} = {how.format(x)}"


# Pointwise, reductions, products


def unary(w: Writer) -> str:
    return f"{w.new()} = torch.{w.one(*_UNARY)}({w.tensor()})"


def binary(w: Writer) -> str:
    x = w.tensor()
    return f"{w.new()} = torch.{w.one(*_BINARY)}({x}, {w.partner(x)})"


def operator(w: Writer) -> str:
    x = w.tensor()
    template = w.one("{0} + {1}", "{1} - {0}", "{0} * {1}", "{0} / {1}", "{0} > {1}", "{1} * {0} + 1", "{0} ** 2")
    return f"{w.new()} = {template.format(x, w.operand(x))}"


def ternary(w: Writer) -> str:
    x = w.tensor()
    y, z = w.partner(x), w.partner(x)
    return f"{w.new()} = " + w.one(
        f"torch.where({x} > 0, {y}, {z})",
        f"torch.addcmul({x}, {y}, {z}, value=0.5)",
        f"torch.lerp({x}, {y}, 0.25)",
        f"torch.clamp({x}, -1, 1)",
        f"{x}.masked_fill({y} > 0, 0.5)",
    )


def reduction(w: Writer) -> str:
    x, name = w.tensor(), w.one(*_REDUCTIONS)
    dim = w.dim(x)
    if name == "prod":
        x += ".detach()"  # its derivative is equal within tolerances only (tests/conformance/exceptions.txt)
    if w.chance(40) and name not in _WITHOUT_KEEPDIM:
        return f"{w.new()} = {x}.{name}(dim={dim}, keepdim={w.one(False, True)})"
    if name in {"logsumexp", *_WITHOUT_KEEPDIM}:
        return f"{w.new()} = {x}.{name}(dim={dim})"
    return f"{w.new()} = {x}.{name}()"


def matrix(w: Writer) -> str:
    x = w.tensor(lambda t: 1 <= t.dim() <= 3 and t.is_floating_point())
    if w.chance(20):
        return f"{w.new()} = F.linear({x}, {w.float_tensor()})"
    inner, dtype = w.look(x).shape[-1], w.look(x).dtype
    y = w.tensor(lambda t: t.dim() in (1, 2) and t.dtype == dtype and t.shape[0] == inner)
    how = w.one("{0} @ {1}", "torch.matmul({0}, {1})", "torch.tensordot({0}, {1}, 1)", "torch.mm({0}, {1})")
    return f"{w.new()} = {how.format(x, y)}"


def joined(w: Writer) -> str:
    x = w.tensor()
    y = w.tensor(lambda t: t.shape == w.look(x).shape)
    how = w.one("torch.cat([{0}, {1}])", "torch.stack([{0}, {1}], -1)", "torch.cat([{0}, {0}, {1}], -1)")
    return f"{w.new()} = {how.format(x, y)}"


def network(w: Writer) -> str:
    x = w.tensor(lambda t: t.is_floating_point() and t.dim() >= 1)
    last = w.look(x).shape[-1]
    return f"{w.new()} = " + w.one(
        f"F.gelu({x})",
        f"F.layer_norm({x}, ({last},))",
        f"F.log_softmax({x}, -1)",
        f"F.silu({x})",
        f"F.normalize({x}, dim=-1)",
        f"F.pad({x}, (1, 0))",
        f"F.mse_loss({x}, {x} * 0.5)",
    )


def gathered(w: Writer) -> str:
    x = w.tensor(lambda t: t.dim() >= 1 and t.shape[0] > 0)
    rows = w.look(x).shape[0]
    index = [w.number(-rows, rows - 1) for _ in range(w.number(1, 3))]
    positive = [i % rows for i in index]
    at = f"torch.tensor({positive}, device=device)"
    return f"{w.new()} = " + w.one(
        f"{x}[{index}]",
        f"{x}.index_select(0, {at})",
        f"{x}[{at}]",
        f"torch.take({x}.flatten(), {at})",
        f"{x}.roll(1, 0)",
        f"{x}.flip(0)",
        f"{x}.repeat(2, *[1] * ({x}.dim() - 1))",
        f"{x}.tril() if {x}.dim() > 1 else {x}.diag()",
    )


def several(w: Writer) -> str:
    """Operations with more than one result."""
    x = w.tensor(lambda t: t.dim() >= 1)
    dim, first, second = w.dim(x), w.new(), w.new()
    return f"{first}, {second} = " + w.one(
        f"torch.sort({x}, dim={dim}, stable=True)",
        f"{x}.max(dim={dim})",
        f"{x}.topk(1, dim={dim})",
        f"torch.var_mean({x}, dim={dim})",
        f"torch.aminmax({x}, dim={dim})",
        f"{x}.cummax(dim={dim})",
        f"torch.frexp({x})",
        f"{x}.min(dim={dim}, keepdim=True)",
    )


def cast(w: Writer) -> str:
    x = w.tensor()
    how = w.one("to({})", "to({}, copy=True)", "type({})", "view({})").format(w.one(*_DTYPES))
    return f"{w.new()} = {x}.{w.one(how, 'double()', 'float()', 'long()', 'bool()', 'to(device)')}"


def duplicate(w: Writer) -> str:
    x = w.tensor()
    return f"{w.new()} = " + w.one(
        f"{x}.clone()",
        f"{x}.detach()",
        f"copy.deepcopy({x})",
        f"{x}.detach().clone()",
        f"{x}.contiguous()",
        f"pickle.loads(pickle.dumps({x}))",
        f"{x}.data",
        f"{x}.clone(memory_format=torch.contiguous_format)",
        f"{x}",
        f"{x}.cpu().clone().to(device)",
        f"copy.copy({x})",
    )


# Views


def view(w: Writer) -> str:
    x = w.tensor()
    t = w.look(x)
    a, b = w.dim(x), w.dim(x)
    length = t.shape[a] if t.dim() else 0
    start = w.number(0, max(length - 1, 0))
    step = w.one(1, 2)
    index = ", ".join([":"] * (a % max(t.dim(), 1)) + [f"{start}::{step}"])
    options = [
        f"{x}.transpose({a}, {b})",
        f"{x}[{index}]",
        f"{x}.view(-1)",
        f"{x}.unsqueeze({a})",
        f"{x}.select({a}, {start})",
        f"{x}.narrow({a}, {start}, {w.number(0, length - start)})",
        f"{x}.squeeze()",
        f"{x}.squeeze({a})",
        f"{x}.expand(2, *{x}.shape)",
        f"{x}.reshape(-1)",
        f"{x}.permute({[*range(t.dim())][::-1]})",
        f"{x}.diagonal({w.number(-1, 1)}, {a}, {b})",
        f"{x}[...]",
        f"{x}[None, ..., None]",
        f"{x}.unfold({a}, {w.number(1, 2)}, 1)",
        f"{x}.mT",
        f"{x}.view({list(t.shape)[::-1]})",
        f"{x}.flatten(0, {a})",
        f"{x}.real",
        f"{x}.conj()",
        f"{x}.movedim({a}, {b})",
        f"{x}.t()",
        f"{x}.view_as({x})",
        f"{x}[{start}]",
        f"torch.view_as_real({x})",
    ]
    return f"{w.new()} = {w.one(*options)}"


def strided(w: Writer) -> str:
    x = w.tensor(lambda t: t.untyped_storage().nbytes() > 0)
    t = w.look(x)
    room = t.untyped_storage().nbytes() // t.itemsize
    size = [w.number(0, 3) for _ in range(w.number(0, 2))]
    stride = [w.number(0, 3) for _ in size]
    span = sum((n - 1) * s for n, s in zip(size, stride, strict=True) if n) + 1
    offset = w.number(0, room - span) if room >= span else 0
    return f"{w.new()} = {x}.as_strided({size}, {stride}, {offset})"


def pieces(w: Writer) -> str:
    x = w.tensor(lambda t: t.dim() >= 1 and t.shape[0] >= 1)
    t = w.look(x)
    rows = t.shape[0]
    how = w.one("split(1)", "chunk(2)", "unbind()", "split(2)", "tensor_split(2)", "unsafe_split(2)")
    count = len(eval(f"x.{how}", {"x": torch.empty(t.shape)}))  # not of t, which may be a view that must not be used
    if not 1 <= count <= 4 or rows > 4:
        raise Unfit
    return ", ".join([w.new() for _ in range(count)]) + f", = {x}.{how}"


def view_in_place(w: Writer) -> str:
    x = w.tensor()
    a, b = w.dim(x), w.dim(x)
    how = w.one(f"transpose_({a}, {b})", "t_()", f"unsqueeze_({a})", "squeeze_()", f"squeeze_({a})", "detach_()")
    return f"{x}.{how}"


# Writes


def write(w: Writer) -> str:
    x = w.tensor()
    if w.chance(30):
        return f"{x}.{w.one(*_UNARY_IN_PLACE)}()"
    name = w.one(*_BINARY_IN_PLACE)
    if name == "copy_" or w.chance(60):
        return f"{x}.{name}({w.writer_of(x)})"
    return f"{x}.{name}({w.one(*_NUMBERS)})"


def fill(w: Writer) -> str:
    x = w.tensor()
    number = w.one(*_NUMBERS)
    return f"{x}." + w.one(
        "zero_()",
        f"fill_({number})",
        f"clamp_({x}, max=1)" if w.chance(5) else "clamp_(-1, 1)",
        f"masked_fill_({x} > 0, {number})",
        f"fill_diagonal_({number})",
        "triu_()",
        f"addcmul_({x}, {x}, value=0.5)",
        f"cumsum_({w.dim(x)})",
        f"lerp_({x}.detach().clone(), 0.5)",
    )


def set_item(w: Writer) -> str:
    x = w.tensor(lambda t: t.dim() >= 1 and t.shape[0] > 0)
    t = w.look(x)
    row = w.number(-t.shape[0], t.shape[0] - 1)
    value = w.operand(x) if w.chance(30) else w.one(*_NUMBERS)
    where = w.one(f"{row}", ":", "..., :1", f"{x} > 0", f"[{row}]", "::2", f"torch.tensor([{row}], device=device)")
    return f"{x}[{where}] = {value}" if w.chance(60) else f"{x}[{where}] {w.one('+=', '*=')} {value}"


def scattered(w: Writer) -> str:
    x = w.tensor(lambda t: t.dim() >= 1 and t.shape[0] > 0)
    t = w.look(x)
    rows = t.shape[0]
    index = [w.number(0, rows - 1) for _ in range(w.number(1, 2))]
    at = f"torch.tensor({index}, device=device)"
    spread = f"torch.zeros({list(t.shape)}, dtype=torch.int64, device=device)"
    return f"{x}." + w.one(
        f"index_fill_(0, {at}, 2)",
        f"index_put_(({at},), torch.tensor(1, device=device, dtype={t.dtype}), accumulate={w.one(False, True)})",
        f"scatter_(0, {spread}, 1)",
        f"index_add_(0, {at}, {x}[{index}])",
        f"scatter_add_(0, {spread}, {x}.detach().clone())",
        f"index_copy_(0, {at}, {x}[{index}])",
        f"masked_scatter_({x} > 0, {x}.detach().clone())",
        f"put_({at}, {x}.detach().flatten()[{index}].clone())",
    )


def out_variant(w: Writer) -> str:
    x = w.tensor()
    y, target = w.partner(x), w.tensor()
    if w.chance(30):
        empty = f"torch.empty(0, device=device, dtype={w.one(*_FLOATS)})"
        return f"{w.new()} = torch.{w.one(*_BINARY)}({x}, {y}, out={empty})"
    # Growing an output that lies in the memory of an input is undefined.
    memory = w.look(x).untyped_storage().data_ptr()
    apart = w.tensor(lambda t: t.untyped_storage().data_ptr() != memory)
    return w.one(
        f"torch.{w.one(*_BINARY)}({x}, {y}, out={target})",
        f"torch.{w.one(*_UNARY)}({x}, out={target})",
        f"torch.sum({x}, 0, out={target})",
        f"torch.cat([{x}, {x}], out={apart})",
    )


def foreach(w: Writer) -> str:
    x = w.tensor()
    # A list of which only a part can be written is written in part before eager PyTorch raises.
    y = w.tensor(lambda t: t.dtype == w.look(x).dtype and t.is_contiguous())
    u, v = w.partner(x), w.writer_of(x)
    return w.one(
        f"torch._foreach_add_([{x}, {y}], {w.one(*_NUMBERS)})",
        f"torch._foreach_mul_([{x}, {y}], [{v}, {y}])",
        f"{w.new()}, {w.new()} = torch._foreach_add([{x}, {y}], [{u}, {y}], alpha=2)",
        f"torch._foreach_copy_([{x}], [{v}])",
        f"{w.new()}, = torch._foreach_sqrt([{x}])",
        f"torch._foreach_zero_([{x}, {y}])",
        f"torch._foreach_lerp_([{x}], [{v}], 0.5)",
        f"torch._foreach_addcmul_([{x}], [{v}], [{v}], 0.5)",
    )


def identity(w: Writer) -> str:
    """Changes of what a tensor is: ``.data``, ``set_``, ``resize_``."""
    x = w.tensor()
    dtype = w.look(x).dtype
    y = w.tensor() if w.chance(5) else w.tensor(lambda t: t.dtype == dtype)
    z = w.tensor(lambda t: t.dtype == dtype)  # another dtype may need a larger storage, which set_ makes larger then
    filled = "" if w.look(x).is_contiguous() and w.look(x).numel() else ".fill_(1)"
    return w.one(
        f"{x}.data = {y}",
        f"{x}.data = {y}.data.clone()",
        f"{x}.set_({y})",
        f"{x}.data.mul_(2)",
        # What a tensor grows into is undefined, so it is filled.
        f"{x}.resize_({list(w.look(x).shape)[:-1]}){filled}",
        f"{x}.resize_(2, 4).fill_(1)",
        f"{x}.set_({z}.untyped_storage(), {z}.storage_offset(), {z}.shape, {z}.stride())",
        f"{x}.resize_as_({y}).fill_(2)",
    )


# Reads, control flow, other statements


def read(w: Writer) -> str:
    x = w.tensor()
    what = w.one(
        "{0}.tolist()",
        "{0}.sum().item()",
        "{0}",
        "bool(({0} > 0).any())",
        "{0}.cpu()",
        "{0}.clone().numpy(force=True)",  # sharing memory with an array would forbid resizing it
        "torch.equal({0}, {0}.clone())",
        "f'{{{0}.float().sum():.4f}}'",
        "{0}.item()",
        "bool({0})",
        "len({0})",
        "[row.sum() for row in {0}]",
        "int({0}.float().sum().clamp(-99, 99))",
        "{0}.shape",
        "{0}.is_contiguous()",
    )
    return f"read({what.format(x)})"


def data_dependent(w: Writer) -> str:
    x = w.tensor()
    return f"{w.new()} = " + w.one(
        f"{x}.nonzero()",
        f"{x}[{x} > 0]",
        f"torch.masked_select({x}, {x} != 0)",
        f"torch.unique({x})",
        f"{x}.argwhere()",
        f"torch.bincount({x}.flatten().abs().clamp(0, 9).long())",
        f"torch.repeat_interleave({x}, 2)",
    )


def branch(w: Writer) -> str:
    x, y = w.tensor(), w.tensor()
    condition = w.one(f"{x}.float().sum() > 0.5", f"({x} > 0).any()", f"{x}.numel() and {x}.flatten()[0] > 0")
    simple = w.one(write, set_item, fill)(w)
    return f"if {condition}:\n    {simple}\nelse:\n    {y} = {y} * 2"


def loop(w: Writer) -> str:
    x = w.float_tensor()
    y = w.writer_of(x)
    reads = f"{x} = torch.sin({x}) + {y}\n    read({x}.sum().item())"
    body = w.one(f"{x} = {x} * 0.5 + {y}", f"{x} = {x}.tanh()", reads)
    return f"for _ in range({w.number(2, 4)}):\n    {body}"


def delete(w: Writer) -> str:
    return f"del {w.tensor()}"


def run_some(w: Writer) -> str:
    return f"materialize({w.tensor()}, {w.tensor()})" if w.chance(70) else f"materialize({w.tensor()})"


def wrong(w: Writer) -> str:
    """Bad use, or mostly so."""
    x, y = w.tensor(), w.tensor()
    floats = w.float_tensor()  # wrong as indices; integers may be out of range, which only a read can see
    return w.one(
        f"t0 = {x}.view(7, 11)",
        f"t0 = torch.mm({x}, {y})",
        f"t0 = torch.cat([{x}, {y}])",
        f"t0 = {x}.sum(dim=5)",
        f"t0 = {x}[99]",
        f"t0 = {x} & 1",
        f"{x}.copy_(torch.ones(2, 3, 5, 7, device=device))",
        f"{x}.add_({y})",
        f"t0 = {x}.expand(7, 7)",
        f"t0 = torch.bmm({x}, {y})",
        f"t0 = {x}.permute(0, 0)",
        f"t0 = F.conv1d({x}, {y})",
        "t0 = torch.empty(-1, device=device)",
        f"t0 = {x}.as_strided((100, 100), (100, 1))",
        f"{x}.index_add_(0, {floats}, {x})",
        f"t0 = {x}.gather(0, {floats})",
        f"t0 = torch.linalg.inv({x})" if w.look(x).dim() < 2 else f"t0 = {x}.unfold(0, 99, 1)",
        f"t0 = {x}.undefined_method()",
        f"t0 = torch.add({x}, 'text')",
        f"t0 = F.cross_entropy({x}, {floats})",
    )


# Autograd


def wants_grad(w: Writer) -> str:
    x = w.tensor(lambda t: (t.is_floating_point() or t.is_complex()) and (not t.requires_grad or _is_leaf(t)))
    return f"{x}.requires_grad_()" if not w.chance(20) else f"{w.new()} = {x}.detach().clone().requires_grad_()"


def _requires(w: Writer) -> str:
    return w.tensor(lambda t: t.requires_grad)


def backward(w: Writer) -> str:
    x = _requires(w)
    if w.chance(10):
        return f"{x}.backward()"
    retain = w.one("", "retain_graph=True")
    loss = w.one("({0} * {0}).sum()", "{0}.sum()", "{0}.float().mean()", "({0} * 3).norm()").format(x)
    return f"{loss}.backward({retain})"


def _through_empty_view(tensor: torch.Tensor) -> bool:
    """Whether a gradient of ``tensor`` passes a view without elements that was written: see docs/decisions.md."""
    try:
        pending, seen = [tensor.grad_fn], set()
    except RuntimeError:  # a piece of a tensor split under no_grad, which was written since: whatever uses it raises
        return False
    while pending:
        function = pending.pop()
        if function is None or function in seen:
            continue
        if function.name() == "AsStridedBackward0" and 0 in function._saved_size:
            return True
        seen.add(function)
        pending += [following for following, _ in function.next_functions]
    return False


def gradient(w: Writer) -> str:
    x, y = _requires(w), _requires(w)
    options = w.one("allow_unused=True", "allow_unused=True, retain_graph=True", "allow_unused=True, create_graph=True")
    if "create_graph" in options and _through_empty_view(w.look(x)):
        raise Unfit
    new = w.new()
    return f"{new}, = torch.autograd.grad(({x} * {x}).sum(), [{y}], {options})\nif {new} is None:\n    del {new}"


def with_grad(w: Writer) -> str:
    x = w.tensor(lambda t: _is_leaf(t) and t.grad is not None)
    how = w.one(
        "read({0}.grad)",
        "{0}.grad = None",
        "{0}.grad.zero_()",
        "{0}.data.sub_({0}.grad, alpha=0.1)",
        "with torch.no_grad():\n    {0}.sub_({0}.grad, alpha=0.1)",
        "{1} = {0}.grad",
        "{1} = {0}.grad.clone()",
        "torch._foreach_add_([{0}.data], [{0}.grad], alpha=-0.1)",
        "torch.nn.utils.clip_grad_norm_([{0}], 1.0)",
        "read(torch.isfinite({0}.grad).all().item())",
    )
    return how.format(x, w.new())


def no_grad(w: Writer) -> str:
    return f"with torch.{w.one('no_grad', 'enable_grad')}():\n" + (
        textwrap.indent(w.one(write, binary, view, reduction, set_item, out_variant)(w), "    ")
    )


def hooked(w: Writer) -> str:
    x = _requires(w)
    how = w.one(
        "{0}.register_hook(lambda grad: grad * 2)",
        "{0}.register_hook(lambda grad: read(grad.sum().item()) and None)",
        "{0}.retain_grad()",
        "{1} = torch.utils.checkpoint.checkpoint(lambda a: (a * 2).tanh(), {0}, use_reentrant=False)",
    )
    return how.format(x, w.new())


def _weighted(*pairs: tuple[Callable[[Writer], str], int]) -> list[Callable[[Writer], str]]:
    return [kind for kind, weight in pairs for _ in range(weight)]


_COMMON = ((factory, 2), (operator, 2), (reduction, 1), (read, 2), (delete, 2), (run_some, 1), (wrong, 1))

PROFILES: dict[str, list[Callable[[Writer], str]]] = {
    "mixed": _weighted(
        *_COMMON,
        *[(kind, 1) for kind in (random_factory, random_like, random_write, like, unary, binary, ternary, matrix)],
        *[(kind, 1) for kind in (joined, network, gathered, several, cast, duplicate, strided, pieces, view_in_place)],
        *[(kind, 1) for kind in (fill, scattered, out_variant, foreach, identity, data_dependent, branch, loop, seed)],
        *[(kind, 1) for kind in (wants_grad, backward, gradient, with_grad, no_grad, hooked)],
        (view, 3),
        (write, 3),
        (set_item, 2),
    ),
    "memory": _weighted(
        *_COMMON,
        *[(kind, 2) for kind in (strided, pieces, out_variant, identity, duplicate, scattered, fill)],
        *[(kind, 1) for kind in (view_in_place, foreach, cast, branch, several, data_dependent, like)],
        (view, 7),
        (write, 6),
        (set_item, 4),
    ),
    "autograd": _weighted(
        *_COMMON,
        *[(kind, 1) for kind in (unary, binary, ternary, joined, gathered, several, cast, duplicate, fill, pieces)],
        *[(kind, 2) for kind in (random_factory, matrix, network, gradient, no_grad, hooked, write, set_item, loop)],
        (wants_grad, 5),
        (backward, 5),
        (with_grad, 5),
        (view, 3),
    ),
    "random": _weighted(
        *_COMMON,
        *[(kind, 1) for kind in (seed, unary, view, write, branch, loop, data_dependent, duplicate, strided)],
        (random_factory, 5),
        (random_like, 4),
        (random_write, 5),
    ),
}


def programs(profile: str) -> st.SearchStrategy[Program]:
    """Programs of 5 to 30 statements, with the kinds of statements weighted by a profile of ``PROFILES``."""
    kinds = PROFILES[profile]

    @st.composite
    def strategy(draw: Callable[[st.SearchStrategy[Any]], Any]) -> Program:
        w = Writer(draw, kinds)
        try:
            return tuple(_written(w, draw(st.integers(5, 30))))
        finally:
            w.cpu.close()

    return strategy()


def _written(w: Writer, length: int) -> Iterator[str]:
    for _ in range(length):
        statement = w.statement()
        w.cpu.run(statement)
        yield statement
        if _has_integers_with_grad(w.cpu.tensors):
            return
