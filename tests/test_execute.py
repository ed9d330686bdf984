"""How programs run: in a loop the first time, and where there is no C++ half; else as a table. Both are the same."""

from __future__ import annotations

import math
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import marid
from marid.execute import executable
from marid.execute.table import Table
from marid.frontend.engines import local_engine as engine
from tests.helpers import DEVICE, assert_same, interrupted, on_both, seeded, train_step
from tests.random_work import Writer, armed

pytestmark = pytest.mark.in_process("reads the programs of the in-process engine")

WAYS = ["table", "loop"]


@pytest.fixture(params=WAYS, autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """How every program runs from the second time on."""
    engine.programs.clear()  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr(marid.settings, "plan_bytes", 0)
    monkeypatch.setattr(marid.settings, "immediate_bytes", 0)
    if request.param == "loop":
        monkeypatch.setattr(executable.Executable, "prepared", lambda _: None)
    yield request.param
    engine.programs.clear()  # pyright: ignore[reportAttributeAccessIssue]


def _programs() -> list[executable.Executable]:
    return list(engine.programs.values())  # pyright: ignore[reportAttributeAccessIssue]


def _numbers(device: str) -> Any:
    x, n = torch.arange(-3.0, 3.0, device=device), torch.arange(6, device=device)
    return [
        *(x + number for number in (1, 2.5, math.inf, -0.0, 7)),
        *(n + number for number in (1, 2.5, True)),
        x * 1j,
        x / -0.0,
        torch.full((2,), 2**63 - 1, device=device),
        x.clamp(min=-1),
        x.clamp(-1, 2.0),
        torch.addcmul(x, x, x, value=0.5),
        torch.full((2,), math.nan, device=device),
    ]


def _lists_of_numbers(device: str) -> Any:
    x = torch.rand(2, 3, 8, 8, device=device)
    return [
        x.sum(1),
        x.sum((0, 2), keepdim=True),
        x.permute(3, 1, 0, 2).contiguous(),
        x.view(6, 64)[:, ::2] + 1,
        nn.functional.interpolate(x, scale_factor=(0.5, 2.0)),
        nn.functional.avg_pool2d(x, 3, stride=2, padding=1),
        nn.functional.conv2d(x, torch.ones(4, 3, 3, 3, device=device), padding=1),
        x.roll((1, 2), (2, 3)),
        torch._foreach_add([x, x + 1], [1.0, 2.0]),
        torch.zeros([], device=device) + x.mean(),
    ]


def _lists_of_tensors(device: str) -> Any:
    x, index = torch.rand(4, 5, device=device), torch.tensor([3, 0], device=device)
    values, indices = x.topk(2)
    return [
        torch.cat([x, x + 1]),
        torch.stack([x, x], -1),
        x[index],
        x[:, index],
        x[index, index],
        list(x.split([1, 3])),
        list(x.unbind(1)),
        values,
        indices,
        *torch.meshgrid(x[0], x[1], indexing="ij"),
        *torch.linalg.qr(x),
        torch.einsum("ij,kj->ik", x, x),
    ]


def _constants(device: str) -> Any:
    x = torch.rand(2, 3, 4, 4, device=device)
    index = torch.tensor([0, 1, 1], device=device)
    return [
        x.to(torch.float64),
        x.to(memory_format=torch.channels_last) * 2,
        x.sum(dtype=torch.float64),
        torch.zeros(3, dtype=torch.int16, device=device),
        torch.ones(5, device=device).scatter_reduce(0, index, x.view(-1)[:3], "amax", include_self=False),
        nn.functional.gelu(x, approximate="tanh"),
        torch.linalg.norm(x[0, 0], "fro"),
        torch.searchsorted(x.view(-1).sort()[0], x[0, 0, 0], right=True),
        torch.empty_like(x).zero_(),
    ]


def _random(device: str) -> Any:
    x = torch.randn(40, device=device)
    layer = nn.functional.dropout(x, 0.4) + torch.rand_like(x)
    return [
        layer,
        torch.randperm(10, device=device),
        torch.bernoulli(x.sigmoid()),
        x.normal_(),
        x.clone().uniform_(2, 3),
    ]


def _writes(device: str) -> Any:
    x = torch.zeros(4, 4, device=device)
    y = x[1:3]
    y.add_(1).mul_(torch.arange(4.0, device=device))
    x[0] = 7
    torch.add(x, x, out=x)
    x.view(-1)[::5].fill_(-1)
    return [x, y, x.t()]


def _training(device: str) -> Any:
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)]
    model = seeded(nn.Sequential(*layers), device)
    x, y = torch.rand(2, 1, 6, 6, device=device), torch.tensor([0, 2], device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True)
    losses = []
    for _ in range(6):
        losses.append(train_step(optimizer, nn.functional.cross_entropy(model(x), y)))
        if len(losses) % 2:
            losses[-1].item()
    return losses, list(model.state_dict().values())


@pytest.mark.parametrize(
    "work", [_numbers, _lists_of_numbers, _lists_of_tensors, _constants, _random, _writes, _training]
)
def test_every_way_computes_the_same(work: Callable[[str], Any], way: str) -> None:
    """Numbers, lists, texts, dtypes, generators and results of every form get through, bit for bit."""
    for _ in range(5):
        on_both(work)
    made = {type(program._prepared) for program in _programs() if program.runs > 1}
    assert made - {type(None)} == ({Table} if way == "table" else set())


def test_numbers_may_change_between_runs() -> None:
    """Values, types and lengths: they are no part of the program."""
    x = torch.rand(2, 3, 4)
    lazy = x.to(DEVICE)
    for number in (1, 2.5, -3, 1e300, 0.5, 2**40):
        for shape in ((6, 4), (24,), (4, 3, 2), (1, 24)):
            assert_same((lazy * number).view(shape), (x * number).view(shape))
    big = [torch.full((2,), n, dtype=torch.uint64, device=DEVICE).tolist() for n in (1, 2, 3, 2**64 - 1, 5)]
    assert big == [[n, n] for n in (1, 2, 3, 2**64 - 1, 5)]


@pytest.mark.parametrize("way", WAYS[:1], indirect=True)
def test_a_boolean_in_the_place_of_a_tensor_is_a_tensor(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no Python runs: the table does not stop there."""
    x = torch.rand(2, 3)
    lazy = x.to(DEVICE)

    def run() -> None:
        assert_same((lazy * True).sum(), (x * True).sum())
        assert_same((lazy.bool() ^ True).to(torch.int8) + False, (x.bool() ^ True).to(torch.int8) + False)

    run()
    monkeypatch.setattr(executable.Executable, "interpret", None)
    run()


def test_an_operation_that_fails_says_the_same_every_time() -> None:
    """Type and message are those of the first run, in whichever way it ran; later reads work."""
    x = torch.rand(5, 3, device=DEVICE)
    marid.materialize(x)
    messages = []
    for _ in range(5):
        for index in (1, 9):
            y = torch.index_select(x + 1, 0, torch.tensor([index], device=DEVICE)).exp()
            if index == 1:
                assert torch.equal(y.cpu(), (x.cpu() + 1)[1:2].exp())
                continue
            with pytest.raises(IndexError) as caught:
                y.cpu()
            messages.append(str(caught.value).splitlines()[0])
    assert len(set(messages)) == 1


def test_what_kernels_warn_of_is_a_warning_at_the_line_that_waits(capfd: pytest.CaptureFixture[str]) -> None:
    """In every way to run; by default once for each line, as Python does it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(4):
            y = torch.rand(1, device=DEVICE).var()
            marid.materialize(y)
        line = sys._getframe().f_lineno - 1
    waited = [w for w in caught if (w.filename, w.lineno) == (__file__, line)]
    assert len(waited) == 1
    assert "degrees of freedom" in str(waited[0].message)
    assert capfd.readouterr().err == ""


def test_a_warning_that_is_an_error_costs_no_result() -> None:
    """The read raises the warning, as it would eagerly; what was computed is kept, and nothing runs twice."""
    for _ in range(5):
        y = torch.rand(1, device=DEVICE).var()
        total = torch.zeros((), device=DEVICE)
        total += 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning, match="degrees of freedom"):
                marid.materialize(y, total)
            assert math.isnan(y.item())
        assert total.item() == 1


@pytest.mark.parametrize("way", WAYS[:1], indirect=True)
def test_an_interrupt_while_a_program_is_prepared(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run prepares it again."""
    x = torch.rand(5, device=DEVICE)
    expected = (x.cpu() * 2).tanh()

    def run() -> torch.Tensor:
        return (x * 2).tanh().cpu()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    results = [run()]
    with monkeypatch.context() as patched:
        patched.setattr(executable, "translate", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run()
    results += [run() for _ in range(2)]
    assert_same(results, [expected] * 3)
    assert [program.runs for program in _programs() if program._prepared is not None] == [3]


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_an_interrupt_in_a_run_loses_nothing() -> None:
    """Ctrl-C is heard within a moment; what has run is kept, the rest runs when it is asked for."""
    x = torch.rand(200, 200) / 20
    lazy = x.to(DEVICE)

    def chain(start: torch.Tensor) -> torch.Tensor:
        y = start
        for _ in range(400):
            y = (y @ start).tanh()
        return y

    expected = chain(x)
    for _ in range(3):
        assert torch.equal(chain(lazy).cpu(), expected)
    interrupts = 0
    for delay in (0.01, 0.02, 0.05, 0.08):
        y = chain(lazy)
        try:
            with interrupted(delay):
                y.cpu()
        except KeyboardInterrupt:
            interrupts += 1
        assert torch.equal(y.cpu(), expected)
        assert torch.equal(chain(lazy).cpu(), expected)
    assert interrupts


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_errors_and_interrupts_in_random_programs(error: type[BaseException]) -> None:
    """At any place of a random program: what came before is done, once; what comes after is not, and can be."""
    stopped = 0
    for seed in range(30):
        place = random.Random(seed).randrange(40)
        expected = Writer(seed, "cpu", place).run(40)
        for attempt in range(5):
            writer = Writer(seed, DEVICE, place)
            found = writer.run(40)
            marid.materialize(*writer.values)
            if attempt > 2:
                armed.extend([error("armed"), error("armed")])
            try:
                marid.materialize(*found, *writer.bombs)
            except error:
                stopped += 1
                assert attempt > 2
            armed.clear()
            assert_same(found, expected)
            if error is KeyboardInterrupt or attempt <= 2:
                marid.materialize(*writer.bombs)
            elif stopped:
                with pytest.raises(error):
                    writer.bombs[0].cpu()
            del found, writer
        engine.programs.clear()
    assert stopped == 60


MAY_BE_SMALL: dict[str, Callable[[torch.Tensor, torch.Tensor, float], Any]] = {
    "add": lambda x, y, number: torch.add(x, y, alpha=number),
    "subtract in place": lambda x, y, number: (x * 1).sub_(y, alpha=number),
    "number - x": lambda x, y, number: number - x,
    "power": lambda x, y, number: x.abs() ** number,
    "lerp": lambda x, y, number: torch.lerp(x, y, number),
    "addcmul": lambda x, y, number: torch.addcmul(x, x, y, value=number),
    "compare": lambda x, y, number: (x < number) & (y >= 0),
    "clone": lambda x, y, number: x[None, None].clone(memory_format=torch.channels_last),
    "copies": lambda x, y, number: x.t().clone(memory_format=torch.contiguous_format),
    "views": lambda x, y, number: (
        x.t().reshape(-1).view(2, -1)[None, :, ::2].permute(2, 0, 1).expand(-1, 3, 2) * number
    ),
    "lists": lambda x, y, number: torch._foreach_add([x, y], [y, x], alpha=number),
    "lists and numbers": lambda x, y, number: torch._foreach_mul([x, y], [number, 2.0]),
}


@pytest.mark.parametrize("size", [4, 300])
@pytest.mark.parametrize("name", MAY_BE_SMALL)
def test_small_tensors_have_their_kernels_in_programs_too(name: str, size: int) -> None:
    """A kernel that leaves an operation to ATen leaves it its arguments; which one it is may depend on numbers."""
    of, generator = MAY_BE_SMALL[name], torch.Generator().manual_seed(0)
    for number in (1, 2, 0.5, 1, 1.0, 2, -0.5):
        x, y = (torch.randn(size, size, generator=generator) for _ in range(2))
        expected = of(x, y, number)
        found = of(x.to(DEVICE), y.to(DEVICE), number)
        for one, other in zip(
            *[made if isinstance(made, list | tuple) else [made] for made in (found, expected)], strict=True
        ):
            assert one.stride() == other.stride()
            assert torch.equal(one.cpu(), other)
