"""PyTorch's own operator database, run on the lazy device and on eager CPU, and compared.

Each check runs the same samples on both and demands equal values (bitwise), shapes, dtypes, strides and conjugate
bits; for samples that raise, the same type of exception.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo import core
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_flatten, tree_map

import marid
from marid.frontend.materialize import read_value

# For each batch of samples the database looks through the whole stack for a ``unittest.TestCase``, which is not there:
# that was more than half of the time of these tests.
core.extract_test_fn = common_utils.extract_test_fn = lambda: None

DEVICE = "remote_accelerator"
DTYPES = (torch.float32, torch.float64, torch.int64, torch.bool, torch.bfloat16, torch.complex64)
MODES = ("forward", "grad", "inplace", "out", "vmap", "repeated", "errors")
SAMPLES = 6


def seed(number: int) -> None:
    """``torch.manual_seed`` of the CPU and the device. For each kind of accelerator that is not there PyTorch's own
    writes the whole stack down, which takes longer than most operators."""
    torch.default_generator.manual_seed(number)
    torch.remote_accelerator.manual_seed_all(number)


class Mismatch(AssertionError):
    """The device and eager CPU disagree; ``close`` when only the values do, and within torch.testing's tolerances."""

    close = False
    only_strides = False
    different: tuple[torch.Tensor, torch.Tensor] | None = None
    """The values, where only they differ."""


def operators() -> list[OpInfo]:
    """Every entry of the database, with unique names."""
    return list(op_db)


def name_of(op: OpInfo) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def to_device(tensor: Any, memo: dict[int, torch.Tensor] | None = None) -> Any:
    """A copy on the device with the same strides, offset, aliasing (by ``memo``), conjugate bit, ``requires_grad``."""
    if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu":
        return tensor
    if tensor.layout is not torch.strided:
        raise SparseSample
    plain = tensor.detach()
    conj, neg = plain.is_conj(), plain.is_neg()
    if conj:
        plain = plain.conj()
    if neg:
        plain = torch._neg_view(plain)
    memo = {} if memo is None else memo
    storage = plain.untyped_storage()
    key = hash((storage._cdata, plain.dtype))
    if key not in memo:
        length = storage.nbytes() // plain.dtype.itemsize
        memo[key] = marid.LazyTensor.lift(plain.as_strided((length,), (1,), 0))
    moved = memo[key].as_strided(plain.shape, plain.stride(), plain.storage_offset())
    if conj:
        moved = moved.conj()
    if neg:
        moved = torch._neg_view(moved)
    moved = moved.detach() if moved._is_view() else moved
    return moved.requires_grad_(tensor.requires_grad)


class SparseSample(Exception):
    """The sample holds a tensor of another layout."""


# Arguments that PyTorch demands on the CPU, whatever the device.
_CPU_ARGUMENTS = {"tensor_split"}


def moved(sample: SampleInput, op: OpInfo | None = None) -> SampleInput:
    memo: dict[int, torch.Tensor] = {}

    objects: dict[int, Any] = {}

    def device_of(thing: Any) -> Any:
        if isinstance(thing, torch.Tensor):
            if id(thing) not in objects:
                objects[id(thing)] = to_device(thing, memo)
            return objects[id(thing)]
        if isinstance(thing, torch.device):
            return torch.device(DEVICE)
        if isinstance(thing, str) and thing == "cpu":
            return DEVICE
        return thing

    on_cpu = op is not None and op.name in _CPU_ARGUMENTS
    return SampleInput(  # with the function that makes gauge-dependent results comparable
        tree_map(device_of, sample.input),
        args=sample.args if on_cpu else tree_map(device_of, tuple(sample.args)),
        kwargs=tree_map(device_of, dict(sample.kwargs)),
        output_process_fn_grad=sample.output_process_fn_grad,
    )


def cloned(sample: SampleInput) -> SampleInput:
    """A copy of the sample, tensor by tensor, with the same strides, aliasing and ``requires_grad``."""
    memo: dict[int, torch.Tensor] = {}
    objects: dict[int, Any] = {}

    def copy(thing: Any) -> Any:
        if not isinstance(thing, torch.Tensor) or thing.device.type != "cpu":
            return thing
        if id(thing) not in objects:
            objects[id(thing)] = plain_copy(thing).requires_grad_(thing.requires_grad)
        return objects[id(thing)]

    def plain_copy(thing: torch.Tensor) -> torch.Tensor:
        if thing.layout is not torch.strided:
            raise SparseSample
        if thing.is_conj():  # a copy would be resolved, and some BLAS round a product with a conjugate view elsewhere
            return plain_copy(thing.detach().conj()).conj()
        if thing.is_neg():
            return torch._neg_view(plain_copy(torch._neg_view(thing.detach())))
        plain, storage = thing.detach(), thing.untyped_storage()
        key = hash((storage._cdata, thing.dtype))
        if key not in memo:
            memo[key] = plain.as_strided((storage.nbytes() // thing.dtype.itemsize,), (1,), 0).clone()
        return memo[key].as_strided(thing.shape, thing.stride(), thing.storage_offset()).detach()

    return SampleInput(
        tree_map(copy, sample.input),
        args=tree_map(copy, tuple(sample.args)),
        kwargs=tree_map(copy, dict(sample.kwargs)),
        output_process_fn_grad=sample.output_process_fn_grad,
    )


Outcome = tuple[str, Any]


def outcome_of(function: Callable[[], Any]) -> Outcome:
    seed(11)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return "value", function()
        except SparseSample:
            raise
        except Exception as error:  # whatever eager raises is the expectation
            return "error", error


def compare(expected: Outcome, actual: Outcome) -> None:
    """Raise ``Mismatch`` unless both are equal values or the same type of error."""
    if expected[0] == "error":
        if actual[0] == "value":
            actual = outcome_of(lambda: tree_map(_read, actual[1]))
            if actual[0] == "value":
                raise Mismatch(f"eager raises {type(expected[1]).__name__}: {expected[1]}; the device does not")
            if isinstance(actual[1], type(expected[1])) and _about_values(expected[1]):
                return
            raise Mismatch(
                f"eager raises {type(expected[1]).__name__}: {expected[1]} at the call; the device at the read"
            )
        if type(expected[1]) is not type(actual[1]):
            raise Mismatch(
                f"eager raises {type(expected[1]).__name__}: {expected[1]}; the device "
                f"{type(actual[1]).__name__}: {actual[1]}"
            )
        return
    if any(isinstance(t, torch.Tensor) and t.layout is not torch.strided for t in tree_flatten(expected[1])[0]):
        raise SparseSample
    if actual[0] == "error":
        raise Mismatch(f"only the device raises {type(actual[1]).__name__}: {actual[1]}") from actual[1]
    mine, theirs = tree_flatten(expected[1])[0], tree_flatten(actual[1])[0]
    if len(mine) != len(theirs):
        raise Mismatch(f"{len(mine)} results became {len(theirs)}")
    for a, b in zip(mine, theirs, strict=True):
        if not isinstance(a, torch.Tensor):
            if a != b and not (a != a and b != b):
                raise Mismatch(f"{a!r} became {b!r}")
            continue
        if a.layout is not torch.strided:
            raise SparseSample
        if not isinstance(b, marid.LazyTensor) and b.device.type != "cpu":
            raise Mismatch(f"result is {type(b)} on {b.device}")
        for what in ("shape", "dtype", "requires_grad"):
            if getattr(a, what) != getattr(b, what):
                raise Mismatch(f"{what} {getattr(a, what)} became {getattr(b, what)}")
        for what in ("is_conj", "is_neg"):
            if getattr(a, what)() != getattr(b, what)():
                raise Mismatch(f"{what} {getattr(a, what)()} became {getattr(b, what)()}")
        if a.stride() != b.stride() or a.storage_offset() != b.storage_offset():
            mismatch = Mismatch(f"stride {a.stride()}+{a.storage_offset()} became {b.stride()}+{b.storage_offset()}")
            mismatch.only_strides = _are_close(a.detach(), _read(b).detach())
            raise mismatch
        values = _read(b)
        if values.stride() != a.stride():
            raise Mismatch(f"predicted stride {a.stride()}, ran as {values.stride()}")
        a = a.detach().resolve_conj().resolve_neg()
        values = values.detach().resolve_conj().resolve_neg()
        if not torch.equal(_bits(a), _bits(values)):
            difference = ""
            if a.dtype.is_floating_point or a.dtype.is_complex:
                difference = f", largest difference {(a - values).abs().nan_to_num(0).max().item():.3g}"
            mismatch = Mismatch(f"values differ{difference}: {a.flatten()[:4]} became {values.flatten()[:4]}")
            mismatch.different = a, values
            mismatch.close = _are_close(a, values)
            raise mismatch


# Errors about values cannot come before the values do: the device raises them, with the same type, at the read.
_VALUE_ERRORS = (
    "out of bounds",
    "out of range",
    "element < 0",
    "sum of probabilities",
    "probability entry",
    "Cholesky",
    "singular",
    "could not be completed",
    "is zero, the inv",
)


def _about_values(error: Exception) -> bool:
    return any(text in str(error) for text in _VALUE_ERRORS)


def _are_close(a: torch.Tensor, b: torch.Tensor) -> bool:
    try:
        torch.testing.assert_close(a, b, equal_nan=True)
    except AssertionError:
        return False
    return True


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor)
    return tensor.nan_to_num(nan=12345.678) if tensor.dtype.is_floating_point else tensor


def _read(thing: Any) -> Any:
    if isinstance(thing, marid.LazyTensor):
        value = thing._value
        marid.materialize(thing)
        return read_value(value)
    return thing


# --- modes ---------------------------------------------------------------------------------------------------------


def samples_of(op: OpInfo, dtype: torch.dtype, grad: bool) -> Iterator[SampleInput]:
    seed(7)
    return iter(op.sample_inputs("cpu", dtype, requires_grad=grad))


def call(op: Any, sample: SampleInput) -> Any:
    return op(sample.input, *sample.args, **sample.kwargs)


def check_forward(op: OpInfo, sample: SampleInput) -> None:
    there = moved(sample, op)
    compare(outcome_of(lambda: call(op, sample)), outcome_of(lambda: call(op, there)))


def check_grad(op: OpInfo, sample: SampleInput) -> None:
    there = moved(sample, op)
    # A sample may hold views of one leaf, which are leaves only when copied, as they are by a move.
    here = cloned(sample)
    compare(outcome_of(lambda: _gradients(op, here)), outcome_of(lambda: _gradients(op, there)))


def _gradients(op: OpInfo, sample: SampleInput) -> Any:
    leaves = [
        t
        for t in tree_flatten((sample.input, sample.args, sample.kwargs))[0]
        if isinstance(t, torch.Tensor) and t.requires_grad
    ]
    result = call(op, sample)
    if sample.output_process_fn_grad is not None:
        result = sample.output_process_fn_grad(result)
    outputs = [
        t
        for t in tree_flatten(result)[0]
        if isinstance(t, torch.Tensor) and t.requires_grad and t.layout is torch.strided
    ]
    if not outputs or not leaves:
        return ()
    total = sum((o.abs() if o.is_complex() else o).sum() for o in outputs)
    return torch.autograd.grad(total, leaves, allow_unused=True)


def check_inplace(op: OpInfo, sample: SampleInput) -> None:
    variant = op.inplace_variant
    if variant is None or getattr(sample, "broadcasts_input", False) or not isinstance(sample.input, torch.Tensor):
        return
    here, there = cloned(sample), moved(cloned(sample), op)

    def run(s: SampleInput) -> Any:
        with torch.no_grad():
            result = call(variant, s)
        return result, s.input, s.input._version

    compare(outcome_of(lambda: run(here)), outcome_of(lambda: run(there)))


def check_out(op: OpInfo, sample: SampleInput) -> None:
    if not op.supports_out:
        return
    with torch.no_grad():
        expected = outcome_of(lambda: call(op, cloned(sample)))
    if expected[0] == "error":
        return
    flat = tree_flatten(expected[1])[0]
    if not all(isinstance(t, torch.Tensor) and t.layout is torch.strided for t in flat):
        return
    tuple_out = not isinstance(expected[1], torch.Tensor)
    for shape_of in (lambda t: tuple(t.shape), lambda t: (0,), lambda t: (*t.shape, 2)):
        outs = [torch.empty(shape_of(t), dtype=t.dtype).fill_(1) for t in flat]
        outs_there = [to_device(o) for o in outs]
        here, there = cloned(sample), moved(cloned(sample), op)

        def run(s: SampleInput, o: list[torch.Tensor]) -> Any:
            with torch.no_grad():
                result = op(s.input, *s.args, **s.kwargs, out=tuple(o) if tuple_out else o[0])
            return result, o

        compare(outcome_of(lambda s=here, o=outs: run(s, o)), outcome_of(lambda s=there, o=outs_there: run(s, o)))


def check_vmap(op: OpInfo, sample: SampleInput) -> None:
    if not isinstance(sample.input, torch.Tensor) or sample.input.layout is not torch.strided:
        return
    batched = torch.stack(
        [sample.input.detach(), sample.input.detach().flip(0) if sample.input.dim() else sample.input]
    )
    there = moved(sample, op)
    batched_there = to_device(batched)

    def run(s: SampleInput, batch: torch.Tensor) -> Any:
        return torch.vmap(lambda x: op(x, *s.args, **s.kwargs), randomness="same")(batch)

    with torch.no_grad():
        compare(outcome_of(lambda: run(sample, batched)), outcome_of(lambda: run(there, batched_there)))


REPETITIONS = 5  # the first runs in a loop, the second as a table, one is watched, the rest follow a memory plan


def check_repeated(op: OpInfo, sample: SampleInput) -> None:
    """The same call again and again, on copies that die in it: results may take over their memory."""

    def run(s: SampleInput) -> Any:
        with torch.no_grad():
            copied = tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, (s.input, s.args, s.kwargs))
            return op(copied[0], *copied[1], **copied[2])

    expected = outcome_of(lambda: run(sample))
    if expected[0] == "error":
        return
    there = moved(sample, op)
    planned, marid.settings.plan_bytes = marid.settings.plan_bytes, 0
    try:
        results = [outcome_of(lambda: run(there)) for _ in range(REPETITIONS)]
        for result in results:  # each is a program of its own until it is read
            compare(expected, result)
        for _ in range(REPETITIONS):
            compare(expected, outcome_of(lambda: run(there)))
    finally:
        marid.settings.plan_bytes = planned


def check_error(op: OpInfo, error: Any) -> None:
    sample = error.sample_input
    there = moved(sample, op)
    compare(outcome_of(lambda: call(op, sample)), outcome_of(lambda: call(op, there)))


CHECKS: dict[str, Callable[[OpInfo, SampleInput], None]] = {
    "forward": check_forward,
    "grad": check_grad,
    "inplace": check_inplace,
    "out": check_out,
    "vmap": check_vmap,
    "repeated": check_repeated,
}


def dtypes_of(op: OpInfo, mode: str) -> list[torch.dtype]:
    """The dtypes that a mode is checked with."""
    supported = op.supported_dtypes("cpu")
    if mode == "forward":
        return [d for d in DTYPES if d in supported]
    if mode == "grad":
        if not op.supports_autograd:
            return []
        differentiable = op.supported_backward_dtypes("cpu")
        return [d for d in (torch.float64, torch.complex64) if d in supported and d in differentiable]
    if mode == "repeated":
        return [d for d in (torch.float32, torch.int64, torch.complex64) if d in supported][:2]
    preferred = [d for d in (torch.float32, torch.int64, torch.bool, torch.complex64) if d in supported]
    return preferred[:1] if mode == "vmap" else preferred[:2]


def failures(op: OpInfo, mode: str, count: int | None = SAMPLES) -> list[str]:
    """Run one mode of one operator on ``count`` samples a dtype (None: all); a line for each that disagrees."""
    found: list[str] = []
    names = (name_of(op), op.name)
    allowed = next(
        (exceptions()[key] for name in names for key in ((name, mode), (name, "*")) if key in exceptions()), ""
    )

    def _collect(found: list[str], label: str, check: Callable[[], None]) -> None:
        try:
            check()
        except SparseSample:
            return
        except Mismatch as error:
            kinds = {
                "close": error.close,
                "values": error.different is not None,
                "strides": error.only_strides,
                "skip": True,
            }
            if not any(kinds.get(kind, False) for kind in allowed.split(",")):
                found.append(f"{label}: {error}")

    if mode == "errors":
        if op.error_inputs_func is None:
            return found
        for index, error in enumerate(op.error_inputs("cpu")):
            _collect(found, f"error {index}", lambda error=error: check_error(op, error))
        return found
    for dtype in dtypes_of(op, mode):
        samples = samples_of(op, dtype, mode == "grad")
        if mode == "repeated" and count is not None:
            count = min(count, 2)
        for index, sample in enumerate(itertools.islice(samples, count)):
            _collect(found, f"{dtype} sample {index}", lambda sample=sample: CHECKS[mode](op, sample))
    return found


@functools.cache
def exceptions() -> dict[tuple[str, str], str]:
    """What ``exceptions.txt`` allows: (operator, module or optimizer; mode or ``*``) to the allowance."""
    lines = Path(__file__).with_name("exceptions.txt").read_text().splitlines()
    rows = [line.split(maxsplit=3) for line in lines if line.strip() and not line.startswith("#")]
    return {(name, mode): allowance for name, mode, allowance, _reason in rows}
