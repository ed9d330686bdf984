"""Errors: PyTorch's own where PyTorch would raise, Marid's where only a lazy device can fail; at the user's line."""

from __future__ import annotations

import contextlib
import gc
import inspect
import io
import logging
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import marid
import tests.operators  # noqa: F401  (defines marid_tests::opaque and others)
from marid.errors import (
    AuthenticationError,
    LazyTensorError,
    MaterializationError,
    SyncForbiddenError,
    UnsupportedOperationError,
    WireError,
    WorkerLostError,
)
from marid.semantics.tracebacks import folded
from tests.helpers import DEVICE, assert_same, interrupted

WRONG: dict[str, Callable[[str], Any]] = {
    "add shapes": lambda d: torch.ones(2, device=d) + torch.ones(3, device=d),
    "matmul shapes": lambda d: torch.ones(2, 3, device=d) @ torch.ones(2, 3, device=d),
    "mm rank": lambda d: torch.mm(torch.ones(3, device=d), torch.ones(3, device=d)),
    "bmm shapes": lambda d: torch.bmm(torch.ones(2, 2, 3, device=d), torch.ones(2, 2, 3, device=d)),
    "linear": lambda d: nn.Linear(3, 2).to(d)(torch.ones(2, 4, device=d)),
    "conv2d channels": lambda d: nn.Conv2d(3, 1, 1).to(d)(torch.ones(1, 2, 4, 4, device=d)),
    "conv2d rank": lambda d: nn.Conv2d(3, 1, 1).to(d)(torch.ones(4, device=d)),
    "cat shapes": lambda d: torch.cat([torch.ones(2, 2, device=d), torch.ones(3, 3, device=d)]),
    "stack shapes": lambda d: torch.stack([torch.ones(2, device=d), torch.ones(3, device=d)]),
    "view": lambda d: torch.ones(6, device=d).view(4, 2),
    "view of transposed": lambda d: torch.ones(2, 3, device=d).t().view(6),
    "reshape": lambda d: torch.ones(6, device=d).reshape(5),
    "expand": lambda d: torch.ones(2, 3, device=d).expand(2, 4),
    "dim": lambda d: torch.ones(2, device=d).sum(3),
    "transpose": lambda d: torch.ones(2, device=d).transpose(0, 2),
    "permute": lambda d: torch.ones(2, 2, device=d).permute(0, 0),
    "index": lambda d: torch.ones(2, device=d)[5],
    "too many indices": lambda d: torch.ones(2, device=d)[0, 0],
    "select": lambda d: torch.ones(2, device=d).select(0, 7),
    "narrow": lambda d: torch.ones(3, device=d).narrow(0, 2, 5),
    "split": lambda d: torch.ones(3, device=d).split([1, 1]),
    "bool of several": lambda d: bool(torch.ones(2, device=d)),
    "bool of none": lambda d: bool(torch.ones(0, device=d)),
    "item of several": lambda d: torch.ones(2, device=d).item(),
    "int of several": lambda d: int(torch.ones(2, device=d)),
    "float to index": lambda d: [1, 2][torch.tensor(1.0, device=d)],  # type: ignore[call-overload]
    "iterate a scalar": lambda d: list(torch.tensor(1.0, device=d)),
    "len of a scalar": lambda d: len(torch.tensor(1.0, device=d)),
    "bitwise on floats": lambda d: torch.ones(2, device=d) & 1,
    "float result into integers": lambda d: torch.ones(2, dtype=torch.int64, device=d).add_(1.5),
    "mean of integers": lambda d: torch.ones(2, dtype=torch.int64, device=d).mean(),
    "matmul dtypes": lambda d: torch.ones(2, 2, device=d) @ torch.ones(2, 2, dtype=torch.float64, device=d),
    "negative booleans": lambda d: -torch.ones(2, dtype=torch.bool, device=d),
    "subtract booleans": lambda d: torch.ones(2, device=d).bool() - torch.ones(2, device=d).bool(),
    "in-place shape": lambda d: torch.ones(2, device=d).add_(torch.ones(3, 2, device=d)),
    "copy_ shape": lambda d: torch.ones(2, device=d).copy_(torch.ones(3, device=d)),
    "set item shape": lambda d: torch.ones(4, device=d).__setitem__(slice(0, 2), torch.ones(3, device=d)),
    "write to expanded": lambda d: torch.ones(1, device=d).expand(3).add_(1),
    "out dtype": lambda d: torch.add(torch.ones(2, device=d), 1, out=torch.ones(2, dtype=torch.int64, device=d)),
    "gather rank": lambda d: torch.ones(2, device=d).gather(0, torch.zeros(1, 1, dtype=torch.int64, device=d)),
    "gather index dtype": lambda d: torch.ones(2, device=d).gather(0, torch.zeros(1, device=d)),
    "float as index": lambda d: torch.ones(2, device=d)[torch.ones(2, device=d)],
    "embedding of floats": lambda d: F.embedding(torch.ones(2, device=d), torch.ones(3, 3, device=d)),
    "cross entropy shapes": lambda d: F.cross_entropy(torch.ones(2, 3, device=d), torch.zeros(4, device=d).long()),
    "layer norm shape": lambda d: F.layer_norm(torch.ones(2, 3, device=d), (4,)),
    "softmax dim": lambda d: F.softmax(torch.ones(2, device=d), 3),
    "cholesky of a vector": lambda d: torch.linalg.cholesky(torch.ones(2, device=d)),
    "cholesky of an indefinite matrix": lambda d: torch.linalg.cholesky(-torch.eye(2, device=d)),
    "inverse of a rectangle": lambda d: torch.linalg.inv(torch.ones(2, 3, device=d)),
    "inverse of a singular matrix": lambda d: torch.linalg.inv(torch.zeros(2, 2, device=d)),
    "normal with a negative deviation": lambda d: torch.empty(2, device=d).normal_(0, -1),
    "uniform upside down": lambda d: torch.empty(2, device=d).uniform_(2, 1),
    "randint empty range": lambda d: torch.randint(3, 3, (2,), device=d),
    "arange step": lambda d: torch.arange(0, 5, -1, device=d),
    "linspace steps": lambda d: torch.linspace(0, 1, -1, device=d),
    "negative size": lambda d: torch.empty(-2, device=d),
    "unknown keyword": lambda d: torch.ones(2, device=d).sum(nonsense=1),  # type: ignore[call-overload]
    "wrong argument type": lambda d: torch.add(torch.ones(2, device=d), "a"),  # type: ignore[call-overload]
    "unknown attribute": lambda d: torch.ones(2, device=d).nonsense,
    "einsum": lambda d: torch.einsum("ij,jk->ik", torch.ones(2, 3, device=d), torch.ones(2, 3, device=d)),
    "topk": lambda d: torch.ones(3, device=d).topk(5),
    "kthvalue": lambda d: torch.ones(3, device=d).kthvalue(5),
    "unfold": lambda d: torch.ones(3, device=d).unfold(0, 5, 1),
    "as_strided": lambda d: torch.ones(3, device=d).as_strided((10,), (1,)),
    "multinomial": lambda d: torch.multinomial(torch.ones(2, device=d), 5),
    "max of nothing": lambda d: torch.ones(0, device=d).max(),
    "complex order": lambda d: torch.ones(2, dtype=torch.complex64, device=d) < 1,
    "max_pool": lambda d: F.max_pool2d(torch.ones(1, 1, 2, 2, device=d), 5),
    "batch norm": lambda d: nn.BatchNorm1d(3).to(d)(torch.ones(1, 3, device=d)),
    "attention shapes": lambda d: F.scaled_dot_product_attention(
        torch.ones(1, 2, 4, device=d), torch.ones(1, 2, 5, device=d), torch.ones(1, 2, 4, device=d)
    ),
    "load_state_dict": lambda d: nn.Linear(2, 2).to(d).load_state_dict({"weight": torch.ones(3, 3)}),
    "requires_grad of integers": lambda d: torch.ones(2, dtype=torch.int64, device=d).requires_grad_(),
}


def _overlaps(device: str) -> list[str]:
    found = []
    for shape in ((), (3,)):
        x = torch.ones(shape, dtype=torch.complex64, device=device)
        flat = torch.view_as_real(x).flatten()
        for part in (x.real, x.imag, flat[: max(x.numel(), 1)].view(shape)):
            try:
                x.add_(part)
                found.append("added")
            except RuntimeError as error:
                found.append(str(error).split(":")[0])
    return found


def test_what_is_refused_is_no_fallback(caplog: pytest.LogCaptureFixture) -> None:
    """An operation that raises on the CPU too is neither counted nor warned about."""
    marid.reset_stats()
    with pytest.raises(NotImplementedError, match="not implemented for 'BFloat16'"):
        F.multi_margin_loss(torch.ones(2, 3, device=DEVICE).bfloat16(), torch.tensor([0, 1], device=DEVICE))
    assert marid.stats().fallbacks == {}
    assert not caplog.records


def test_writing_to_what_is_read_as_another_dtype() -> None:
    """Memory that two views of different dtypes share is refused where it is written, as eager PyTorch refuses it."""
    expected = _overlaps("cpu")
    assert "unsupported operation" in expected
    assert _overlaps(DEVICE) == expected


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16])
def test_numbers_that_do_not_fit(dtype: torch.dtype) -> None:
    """The same call has succeeded with other numbers; where eager PyTorch raises, the device does, at that line."""
    numbers = [2.0, 200.0, 300.0, 5e4, 7e4, 3e9, 5e9, 1e19, 1e39, float("inf"), float("nan")]
    for number in [*numbers, *(-number for number in numbers)]:
        for fill in (lambda x, n=number: torch.full_like(x, n), lambda x, n=number: x.new_full((2,), n)):
            try:
                expected = fill(torch.ones(2, dtype=dtype))
            except RuntimeError:
                with pytest.raises(RuntimeError):
                    fill(torch.ones(2, dtype=dtype, device=DEVICE))
            else:
                assert_same(fill(torch.ones(2, dtype=dtype, device=DEVICE)), expected)


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.filterwarnings("ignore")
def test_errors_are_pytorchs_at_the_same_line(name: str) -> None:
    """Same type and message, raised where the mistake is written; the device works afterwards."""
    with pytest.raises(Exception) as expected:
        WRONG[name]("cpu")
    with pytest.raises(Exception) as found:
        WRONG[name](DEVICE)
    assert found.type is expected.type
    if found.type is not AttributeError:
        assert str(found.value).replace(f"{DEVICE}:0", "cpu").replace("LazyTensor", "Tensor") == str(expected.value)
    assert torch.ones(2, device=DEVICE).sum().item() == 2.0


def _own_frames(error: BaseException) -> list[str]:
    """Where Marid stands in the traceback that is shown of an error and of its reasons."""
    here = str(Path(marid.__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    reason = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return [str(frame) for frame in frames if frame.filename.startswith(here)] + (_own_frames(reason) if reason else [])


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.filterwarnings("ignore")
def test_tracebacks_end_at_the_users_line(name: str) -> None:
    """Or in PyTorch, where eager PyTorch's do; Marid is not in them."""
    for _ in range(2):  # the second call is like one that is known to be wrong
        with pytest.raises(Exception) as found:
            WRONG[name](DEVICE)
        assert _own_frames(found.value) == []
        files = [frame.filename for frame in traceback.extract_tb(found.value.__traceback__)]
        assert files[0] == __file__


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x.tolist(),
        str,
        lambda x: x.item(),
        lambda x: marid.materialize(x),
        lambda x: x.numpy(),
        lambda x: x.cpu(),
        lambda x: bool(x > 0),
        lambda x: x.split(1).materialize(),
        lambda x: torch.remote_accelerator.synchronize(),
        lambda x: torch.save(x, io.BytesIO()),
        lambda x: marid.compile(lambda: x.item())(),
    ],
)
def test_tracebacks_of_reads_end_at_the_users_line(use: Callable[[Any], Any]) -> None:
    """Of what fails when it runs: the message has both lines, the traceback the one that reads."""
    x = torch.zeros(1, device=DEVICE)[torch.tensor([5], device=DEVICE)]
    with pytest.raises(IndexError) as found:
        use(x)
    assert _own_frames(found.value) == []


def test_tracebacks_of_backward_have_the_users_frames_only() -> None:
    """Hooks and functions of the user's run between Marid's frames, and stay in it."""

    def hook(_: torch.Tensor) -> None:
        raise ValueError("in a hook")

    x = torch.ones(2, device=DEVICE, requires_grad=True)
    y = (x * 2).sum()
    y.register_hook(hook)
    with pytest.raises(ValueError, match="in a hook") as found:
        y.backward()
    names = [frame.name for frame in traceback.extract_tb(found.value.__traceback__)]
    assert names[0].startswith("test_tracebacks_of_backward")
    assert names[-1] == "hook"
    assert _own_frames(found.value) == []


def test_full_tracebacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The setting for those who look for a fault in Marid."""
    monkeypatch.setattr(marid.settings, "full_traceback", True)
    with pytest.raises(RuntimeError) as found:
        torch.ones(2, device=DEVICE) + torch.ones(3, device=DEVICE)
    assert _own_frames(found.value)


def test_a_failed_statement_leaves_its_operands_alone() -> None:
    """Also when it writes in place."""
    x = torch.arange(3.0, device=DEVICE)
    for wrong in (lambda: x.add_(torch.ones(4, device=DEVICE)), lambda: x.view(2), lambda: x.copy_(torch.ones(5))):
        with pytest.raises(RuntimeError):
            wrong()
    assert_same(x, torch.arange(3.0))


# --- failures at run time --------------------------------------------------------------------------------------------


def _out_of_range() -> tuple[torch.Tensor, int]:
    index = torch.tensor([0, 7], device=DEVICE)
    return torch.arange(3.0, device=DEVICE).index_select(0, index), inspect.currentframe().f_lineno  # type: ignore[union-attr]


def test_a_run_time_failure_names_both_lines() -> None:
    """Where the operation was written and where it was read; the cause is the operation's own error."""
    bad, written = _out_of_range()
    line = inspect.currentframe().f_lineno + 2  # type: ignore[union-attr]
    with pytest.raises(MaterializationError) as caught:
        (bad * 2).tolist()
    text = str(caught.value)
    assert "aten::index_select" in text
    assert f"{__file__}:{written}" in text
    assert f"{__file__}:{line}" in text
    assert isinstance(caught.value.__cause__, (IndexError, RuntimeError))
    assert str(caught.value.__cause__) in text


def test_a_run_time_failure_names_the_module() -> None:
    """So that it is found in a model of many layers."""
    model = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 1)).to(DEVICE)
    with pytest.raises(MaterializationError, match=r"'0'"):
        model(torch.tensor([99], device=DEVICE)).sum().item()


def test_a_run_time_failure_is_raised_again_at_each_read() -> None:
    """What ran before it keeps its results and is not run twice; what does not need it is untouched."""
    good = torch.arange(3.0, device=DEVICE) * 2
    bad, _ = _out_of_range()
    both = good.sum() + bad.sum()
    for _ in range(3):
        with pytest.raises(MaterializationError):
            both.item()
    executed = marid.stats().ops_executed
    assert_same(good, torch.arange(3.0) * 2)
    assert marid.stats().ops_executed <= executed + 2
    del both, bad
    assert (good + 1).sum().item() == 9.0


def _read_badly(bad: torch.Tensor, how: Callable[[torch.Tensor], Any]) -> tuple[weakref.ref[Any], str]:
    """Read what fails in a frame that holds something; that, and what the error said."""
    held = torch.ones(3, device=DEVICE)
    try:
        how(bad)
    except MaterializationError as error:
        return weakref.ref(held), str(error)
    pytest.fail("it does not fail")


@pytest.mark.in_process("what a worker's client raises it raises elsewhere")
@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize(
    "how",
    [
        lambda bad: bad.tolist(),
        lambda bad: (bad + 1).sum().item(),
        torch.Tensor.nonzero,
        marid.materialize,
        lambda bad: (bad + 1).to(f"{DEVICE}:1"),
    ],
)
def test_an_error_that_was_dropped_keeps_nothing_alive(how: Callable[[torch.Tensor], Any], ran: bool) -> None:
    """The frames of those that read a failed value are free at once, also while somebody has the value; the same
    goes for who is told again. Lines are still named."""
    bad, written = _out_of_range()
    if ran:
        _read_badly(bad, how)
    gc.collect()
    gc.disable()
    try:
        held, text = _read_badly(bad, how)
        assert held() is None
    finally:
        gc.enable()
    assert f"written at {__file__}:{written}" in text
    assert f"read at {__file__}:" in text


def test_what_is_recorded_on_a_failed_value_fails_likewise() -> None:
    """Also where nobody asks for it: everything that is pending runs, or what it reads is overwritten."""
    bad, _ = _out_of_range()
    with pytest.raises(MaterializationError):
        bad.tolist()
    double, x, y = bad * 2, torch.zeros(2, device=DEVICE), torch.zeros(2, device=DEVICE)
    both = x + y + bad
    torch.remote_accelerator.synchronize()  # pyright: ignore[reportAttributeAccessIssue]
    more = x + bad, y + bad
    assert x.add_(1).tolist() == [1, 1]
    torch.ops.marid_tests.scale_(y.add_(1), 3.0)
    assert y.tolist() == [3, 3]
    for lost in (double, both, *more):
        with pytest.raises(MaterializationError, match="index_select"):
            lost.tolist()


@pytest.mark.parametrize("view", [False, True])
def test_who_reads_what_a_failed_write_left_is_told_once(monkeypatch: pytest.MonkeyPatch, view: bool) -> None:
    """An error that came up where nobody asked for anything is not lost with the write that it prevented."""
    monkeypatch.setattr(marid.settings, "max_pending_nodes", 1000)
    x, y = torch.zeros(2, device=DEVICE), torch.zeros(2, device=DEVICE)
    x.add_(1).materialize()  # type: ignore[attr-defined]
    (x[:1] if view else x).add_(_out_of_range()[0].sum())
    x.mul_(2)
    for _ in range(3000):
        y = y + 1
    assert marid.stats().automatic_cuts
    later = x * 3
    with pytest.raises(MaterializationError, match="index_select"):
        (x[1:] if view else x).tolist()
    assert x.tolist() == [1, 1]
    with pytest.raises(MaterializationError, match="index_select"):
        later.tolist()
    assert x.add_(1).tolist() == [2, 2]


def test_synchronize_tells_of_failed_writes() -> None:
    """Once is enough."""
    x = torch.zeros(2, device=DEVICE)
    x.add_(_out_of_range()[0].sum())
    with pytest.raises(MaterializationError, match="index_select"):
        torch.remote_accelerator.synchronize()  # pyright: ignore[reportAttributeAccessIssue]
    assert x.tolist() == [0, 0]


def test_what_is_written_with_a_value_that_is_known_to_have_failed() -> None:
    """It was told of the value, not of the write."""
    bad, _ = _out_of_range()
    x = torch.zeros(2, device=DEVICE)
    x.add_(bad)
    with pytest.raises(MaterializationError):
        bad.tolist()
    assert x.tolist() == [0, 0]
    x.add_(bad)
    with pytest.raises(MaterializationError):
        x.tolist()
    assert x.tolist() == [0, 0]


class _Coded(RuntimeError):
    """An error that cannot be made from a text alone."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class _Picky(RuntimeError):
    def __new__(cls, _code: int, text: str) -> Self:
        return super().__new__(cls, text)


@torch.library.custom_op("marid_tests::raise_if_two", mutates_args=())
def _raise_if_two(x: torch.Tensor, which: int) -> torch.Tensor:
    if 2.0 in x.flatten()[:1].tolist():
        raise _errors[which]
    return x.clone()


_raise_if_two.register_fake(lambda x, which: torch.empty_like(x))

_errors = [
    _Coded(3, "coded"),
    _Picky(3, "picky"),
    ValueError("value"),
    KeyError("key"),
    OSError(2, "no file"),
    UnicodeDecodeError("utf-8", b"a", 0, 1, "reason"),
    AssertionError(),
]


@pytest.mark.in_process("the operator is not imported by workers")
@pytest.mark.parametrize("which", range(len(_errors)))
def test_an_operation_may_raise_any_class_of_errors(which: int) -> None:
    """However it is made; whoever catches that class catches it, as far as the class allows that."""
    torch.ops.marid_tests.raise_if_two(torch.ones(1, device=DEVICE), which)  # is tried
    bad = torch.ops.marid_tests.raise_if_two(torch.full((1 << 16,), 2.0, device=DEVICE), which)  # is too large for that
    for _ in range(2):
        with pytest.raises(MaterializationError) as caught:
            bad.sum().item()
        assert str(caught.value).startswith(
            f"marid_tests::raise_if_two failed when it ran: {_errors[which]}\n  written"
        )
        assert isinstance(caught.value, type(_errors[which])) or isinstance(_errors[which], _Picky)


def test_writes_before_a_failure_happen_once() -> None:
    """A program that fails half-way does not repeat its in-place writes when it is run again."""
    x = torch.zeros(3, device=DEVICE)
    x.materialize()  # type: ignore[attr-defined]
    x.add_(1)
    bad = x.index_select(0, torch.tensor([9], device=DEVICE))
    x.add_(10)
    for _ in range(3):
        with pytest.raises(MaterializationError):
            bad.tolist()
    assert x.tolist() == [11.0, 11.0, 11.0]


def test_a_compiled_program_fails_like_the_first_run() -> None:
    """The generated code of a program that ran before reports a failure with the same lines."""

    def look_up(position: int) -> torch.Tensor:
        return torch.arange(3.0, device=DEVICE).index_select(0, torch.full((1,), position, device=DEVICE)) * 2

    for position in (0, 1, 2):
        assert look_up(position).tolist() == [2.0 * position]
    for _ in range(2):
        with pytest.raises(MaterializationError, match=r"index_select") as caught:
            look_up(9).tolist()
        assert __file__ in str(caught.value)
    assert look_up(1).tolist() == [2.0]


def test_keyboard_interrupt_in_the_middle_of_a_run() -> None:
    """Ctrl-C arrives as itself, and what was pending can be read afterwards, each write done once."""
    x = torch.zeros(512, 512, device=DEVICE)
    expected = torch.zeros(512, 512)
    for step in range(200):
        x = x @ x
        x.add_(step % 3)
        expected = expected @ expected
        expected.add_(step % 3)
        x, expected = x.clamp(-1, 1), expected.clamp(-1, 1)
    with pytest.raises(KeyboardInterrupt), interrupted(0.02):
        x.tolist()
    assert_same(x, expected)
    assert torch.ones(2, device=DEVICE).sum().item() == 2.0


def test_errors_that_lie_on_no_line_are_folded() -> None:
    """Instructions that the compiler adds have none, and an interrupt may fall there."""

    def without_lines() -> None:
        raise KeyboardInterrupt

    without_lines.__code__ = without_lines.__code__.replace(co_linetable=b"")
    with pytest.raises(KeyboardInterrupt) as caught:
        folded(without_lines)()
    trace = caught.value.__traceback__
    assert trace is not None
    assert trace.tb_next is not None
    assert trace.tb_next.tb_lineno is None  # type: ignore[comparison-overlap]


@pytest.mark.parametrize("delay", [0.0002, 0.001, 0.003, 0.01])
def test_keyboard_interrupt_while_recording_and_running(delay: float) -> None:
    """Wherever the interrupt falls, the device goes on and values are right."""

    class Stop(BaseException):
        pass

    counter = torch.zeros(8, device=DEVICE)
    done = 0
    with contextlib.suppress(Stop), interrupted(delay, Stop):
        for _ in range(1_000_000):
            counter = counter + 1
            done += 1
            if done % 50 == 0:
                counter.sum().item()
    assert counter.tolist()[0] in (done, done + 1)
    y = torch.arange(4.0, device=DEVICE)
    y[1:].mul_(3)
    assert y.tolist() == [0.0, 3.0, 6.0, 9.0]


# --- Marid's own errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        MaterializationError,
        UnsupportedOperationError,
        SyncForbiddenError,
        WorkerLostError,
        AuthenticationError,
        WireError,
    ],
)
def test_every_error_of_marid_is_a_lazy_tensor_error(error: type[Exception]) -> None:
    """One class catches them all, and code that catches PyTorch's ``RuntimeError`` catches them too."""
    assert issubclass(error, LazyTensorError)
    assert issubclass(LazyTensorError, RuntimeError)
    assert getattr(marid.errors, error.__name__) is error


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x.to_sparse(),
        lambda x: x.to_sparse_csr(),
        lambda x: torch.sparse_coo_tensor(x.long(), x[0], (3, 3)),
        lambda x: torch.zeros(2, 2, layout=torch.sparse_coo, device=DEVICE),
        lambda x: torch.ones(2, 2).to_sparse().to(DEVICE),
        lambda x: x.to_mkldnn(),
        lambda x: torch.sparse_csr_tensor(torch.tensor([0, 1, 2]), torch.tensor([0, 1]), x[0].cpu(), device=DEVICE),
        lambda x: torch.empty(2, dtype=torch.qint8, device=DEVICE),
        lambda x: torch.nested.nested_tensor([x, x[:1]]),
    ],
)
def test_other_layouts_name_operation_and_line(use: Callable[[torch.Tensor], Any]) -> None:
    """``UnsupportedOperationError``, never a made-up dense result."""
    x = torch.ones(2, 2, device=DEVICE)
    with pytest.raises(UnsupportedOperationError) as caught:
        use(x)
    assert "aten::" in str(caught.value)
    assert f"{__file__}:" in str(caught.value)
    assert x.sum().item() == 4.0


def test_nested_tensors_of_the_cpu_s_that_are_made_for_the_device() -> None:
    """PyTorch makes these, and asks each leaf for its sizes where nothing may be thrown."""
    nested = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(2, 4)], device=DEVICE, requires_grad=True)
    with pytest.raises(NotImplementedError, match="NestedTensor"):
        nested * 2


# --- fallback --------------------------------------------------------------------------------------------------------


def test_an_operation_without_meta_kernel_runs_eagerly_and_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    """The result is the kernel's; the warning names operation and line; later calls are silent, and counted."""
    x = torch.arange(3.0, device=DEVICE) + 1
    with caplog.at_level(logging.WARNING, logger="marid"):
        line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
        results = [torch.ops.marid_tests.opaque(x + i) for i in range(3)]
    warnings = [r for r in caplog.records if "marid_tests::opaque" in r.getMessage()]
    assert len(warnings) == 1
    assert f"{__file__}:{line}" in warnings[0].getMessage()
    assert marid.stats().fallbacks == {"marid_tests::opaque": 3}
    assert [r.tolist() for r in results] == [[2.0, 4.0, 6.0], [4.0, 6.0, 8.0], [6.0, 8.0, 10.0]]
    assert all(type(r) is marid.LazyTensor for r in results)


def test_a_fallback_sees_pending_writes_and_writes_in_place() -> None:
    """Materialised inputs are up to date, and what it writes is seen through views and by earlier readers not."""
    base = torch.arange(4.0, device=DEVICE)
    base.add_(1)
    before = base * 1
    view = base[1:3]
    assert torch.ops.marid_tests.scale_(view, 10.0) is view
    assert base.tolist() == [1.0, 20.0, 30.0, 4.0]
    assert before.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert torch.ops.marid_tests.opaque(base).tolist() == [2.0, 40.0, 60.0, 8.0]


def test_a_fallback_that_fails_raises_its_own_error() -> None:
    """Never an invented result."""
    with pytest.raises(ValueError, match="the kernel's own error"):
        torch.ops.marid_tests.broken(torch.ones(1, device=DEVICE))


def test_log_intercepts(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """``MARID_LOG_INTERCEPTS=1``: one line for each recorded operation, fast path and slow path."""
    monkeypatch.setattr(marid.settings, "log_intercepts", True)
    with caplog.at_level(logging.INFO, logger="marid"):
        x = torch.ones(2, device=DEVICE)
        for _ in range(3):
            x = x * 2
        x.add_(1)
    lines = [record.getMessage() for record in caplog.records]
    assert sum("aten::mul" in line for line in lines) == 3
    assert sum("aten::ones" in line for line in lines) == 1
    assert sum("aten::add_" in line for line in lines) == 1
    assert all(f"{__file__}:" in line for line in lines)


@pytest.mark.parametrize("values", [(9,), (8,), (1,), ()])
def test_values_that_may_not_fit_a_mask_are_checked_at_the_line(values: tuple[int, ...]) -> None:
    """Whether they fit depends on data: the error comes where eager PyTorch raises it."""

    def assign(device: str) -> torch.Tensor:
        x = torch.arange(9, device=device)
        x[x > 0] = torch.ones(values, dtype=torch.int64, device=device)
        return x

    try:
        expected = assign("cpu")
    except RuntimeError as error:
        with pytest.raises(type(error), match="shape mismatch"):
            assign(DEVICE)
    else:
        assert torch.equal(assign(DEVICE).cpu(), expected)


def test_values_that_fit_any_mask_are_recorded() -> None:
    """No wait where the number of chosen elements does not matter."""
    x, mask = torch.zeros(4, 3, device=DEVICE), torch.arange(4, device=DEVICE) > 1
    with marid.no_sync():
        x[mask] = 1.0
        x[mask] = torch.arange(3.0, device=DEVICE)
        x[:, torch.tensor([True, False, True], device=DEVICE)] = torch.ones(4, 1, device=DEVICE)
    assert x.tolist() == [[1, 0, 1], [1, 0, 1], [1, 1, 1], [1, 1, 1]]


def test_output_padding_beyond_the_stride_is_refused_at_the_call() -> None:
    """Also where the rule for such calls is known."""
    weight = torch.randn(4, 6, 3)

    def refused(device: str) -> str:
        for length in (5, 6, 7):
            x = torch.randn(2, 4, length).to(device)
            F.conv_transpose1d(x, weight.to(device), stride=3, output_padding=2)
        with pytest.raises(RuntimeError) as caught:
            F.conv_transpose1d(x, weight.to(device), stride=3, output_padding=4)
        return str(caught.value).splitlines()[0]

    assert refused(DEVICE) == refused("cpu")
