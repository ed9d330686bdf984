"""Devices that are workers: what is sent, what comes back, what it costs, and what fails where."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import marid
from marid.errors import BudgetError, LazyTensorError, MaterializationError
from marid.frontend import handles
from marid.frontend.engines import engine_of
from marid.frontend.materialize import run_pending
from marid.remote.client.runs import RunStep
from marid.remote.launch import connect as connecting
from marid.remote.wire import kernel_settings
from tests.helpers import assert_same

FIRST, SECOND = "remote_accelerator:6", "remote_accelerator:7"


@pytest.fixture(scope="module", autouse=True)
def _workers() -> Iterator[None]:
    marid.connect(workers=2, first=6)
    yield
    connecting.disconnect(6, 7, force=True)


def remote() -> marid.RemoteStats:
    found = marid.stats().remote
    assert found is not None
    return found


def engine(index: int = 6) -> Any:
    return engine_of(index)


# --- messages --------------------------------------------------------------------------------------------------------


def test_a_step_is_one_message_there_and_one_back() -> None:
    """However many operations and pending uploads: work and the value that is read travel together."""
    x = torch.randn(8, 8, device=FIRST)
    with marid.budget(round_trips=0):
        y = (x @ x + torch.ones(8, device="cpu").to(FIRST)).relu()
        z = y.sum()
    traffic = engine().delivery.link.counts
    before = traffic.messages_up, traffic.messages_down
    z.item()
    assert (traffic.messages_up - before[0], traffic.messages_down - before[1]) == (1, 1)


def test_a_default_device_is_for_the_user_alone() -> None:
    """What Marid makes of what comes back lies on the host, also where no dispatch has begun."""
    with torch.device(FIRST):
        x = torch.arange(6.0).reshape(2, 3)
        assert x.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
        assert x.numpy(force=True).sum() == 15
        assert torch.arange(40.0).tolist() == list(range(40))
        assert torch.nonzero(x).device == torch.device(FIRST)
        assert torch.randn(3, generator=torch.Generator(device=FIRST)).cpu().device.type == "cpu"


def test_what_repeats_is_not_sent_again() -> None:
    """A step that is known takes a digest, handles and numbers."""
    w, traffic = torch.randn(16, 16, device=FIRST), engine().delivery.link.counts
    sizes = []
    for _ in range(5):
        before = traffic.bytes_up
        (torch.tanh(w @ w) * 0.5).sum().item()
        sizes.append(traffic.bytes_up - before)
    assert max(sizes[2:]) < 200 < 400 < sizes[0]


def test_nothing_is_sent_when_nothing_is_read() -> None:
    x = torch.ones(4, device=FIRST)
    x.sum().item()
    before = engine().delivery.link.counts.messages_up
    for _ in range(50):
        x = x * 1.5
    assert engine().delivery.link.counts.messages_up == before


def test_a_loop_that_never_reads_goes_out_while_it_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the tape's cuts, without a wait; neither what is unanswered nor what the client keeps grows with the loop."""
    monkeypatch.setattr(marid.settings, "max_pending_nodes", 500)
    x, delivery = torch.zeros(4, device=FIRST), engine().delivery
    x.sum().item()
    before, most = delivery.link.counts.messages_up, 0
    with marid.budget(round_trips=6):
        for _ in range(10_000):
            x = x + 1
            most = max(most, sum(isinstance(step, RunStep) for step in delivery.queue.steps()))
        sent = delivery.link.counts.messages_up - before
    assert 19 <= sent <= 60
    assert most <= 10
    assert x.tolist() == [10_000.0] * 4


def test_reading_a_piece_moves_that_piece() -> None:
    """Of a tensor of 8 MB, by index, by slice, by an element of a tuple."""
    big = torch.arange(2_000_000.0, device=FIRST)
    marid.materialize(big)
    traffic = engine().delivery.link.counts
    before = traffic.bytes_down
    assert big[123456].item() == 123456.0
    assert big[1000:1010].tolist() == [float(i) for i in range(1000, 1010)]
    assert torch.equal(big.split(1000)[7].cpu(), torch.arange(7000.0, 8000.0))
    assert torch.equal(big.view(2000, 1000)[:, 3].cpu(), torch.arange(3.0, 2_000_000, 1000))
    assert traffic.bytes_down - before < 16 << 10


def test_printing_moves_what_is_shown() -> None:
    """The summary of 8 MB, in one round trip; ``repr`` nothing at all."""
    big = torch.arange(2_000_000.0, device=FIRST).reshape(2000, 1000)
    marid.materialize(big)
    traffic = engine().delivery.link.counts
    before = traffic.bytes_down
    assert "remote_accelerator" in repr(big)
    assert traffic.bytes_down == before
    with marid.budget(round_trips=1, bytes_down=4 << 10):
        assert "1.9990e+06" in str(big)


def test_reading_several_values_is_one_round_trip() -> None:
    x = torch.randn(100, device=FIRST)
    pieces = (x * 2).split(10)
    with marid.budget(round_trips=1):
        values = pieces.materialize()  # type: ignore[attr-defined]
    assert torch.equal(torch.cat(values), (x * 2).cpu())


def test_equal_content_is_uploaded_once() -> None:
    data = torch.randn(600_000)
    data.to(FIRST).sum().item()
    before = engine().delivery.link.counts.bytes_up
    assert data.clone().to(FIRST).sum().item() == data.sum().item()
    assert engine().delivery.link.counts.bytes_up - before < 0.01 * data.numel() * 4


def test_dropped_tensors_are_freed() -> None:
    gc.collect()
    start = engine().worker_stats()["tensors"]
    kept = [torch.full((10,), float(i), device=FIRST) for i in range(20)]
    marid.materialize(*kept)
    assert engine().worker_stats()["tensors"] == start + 20
    del kept
    gc.collect()
    assert engine().worker_stats()["tensors"] <= start


# --- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64]
)
def test_dtypes_and_strides_come_back(dtype: torch.dtype) -> None:
    data = (torch.arange(24).reshape(4, 6) % 5).to(dtype)
    for view in (lambda t: t, lambda t: t.t(), lambda t: t[1:3, ::2], lambda t: t[0].expand(3, 6)):
        assert_same(view(data.to(FIRST)), view(data))
        assert_same(view(data).to(FIRST), view(data).to("cpu", copy=True))


def test_numbers_come_back_as_tensors_of_their_own() -> None:
    """What has no dimensions travels in the header: elements within a tensor, conjugates, negated parts."""
    for dtype in (torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float64, torch.complex64, torch.uint64):
        x = torch.tensor([0, 1, 2]).to(dtype)
        assert_same(x.to(FIRST)[1].cpu(), x[1])
        assert x.to(FIRST)[1].item() == x[1].item()
    z = torch.tensor([1 + 2j, 3 - 4j])
    assert z.to(FIRST)[1].conj().item() == 3 + 4j
    assert z.to(FIRST).conj()[1].imag.item() == 4
    mine = torch.ones(2, device=FIRST).sum().cpu()
    mine.resize_(3).fill_(1)  # as any other tensor
    assert mine.tolist() == [1, 1, 1]


def test_data_dependent_operations_run_on_the_worker() -> None:
    x = torch.tensor([3.0, 0.0, 5.0, 0.0], device=FIRST)
    kept = x[x > 0]
    kept.mul_(2)
    assert_same((x.nonzero(), kept, x.unique()), tuple(f(torch.tensor([3.0, 0.0, 5.0, 0.0])) for f in _DYNAMIC))


_DYNAMIC = (torch.nonzero, lambda t: t[t > 0] * 2, torch.unique)


@pytest.mark.parametrize("how", ["rows", "rows and columns", "mask", "negative", "several dimensions"])
def test_what_was_indexed_has_the_gradient_of_the_cpu(how: str) -> None:
    """Autograd calls an operator for it that nobody else calls."""

    def results(device: str) -> list[torch.Tensor]:
        x = torch.arange(24.0).view(4, 3, 2).to(device).requires_grad_()
        rows, columns = torch.tensor([0, 2, 2], device=device), torch.tensor([1, 0, 1], device=device)
        y = {
            "rows": lambda: x[rows],
            "rows and columns": lambda: x[rows, columns],
            "mask": lambda: x[x.detach() > 5],
            "negative": lambda: x[:, -columns],
            "several dimensions": lambda: x[rows[:, None], :, columns[None] * 0],
        }[how]()
        (y * y).sum().backward()
        assert x.grad is not None
        return [y, x.grad]

    assert_same(results(FIRST), results("cpu"))


def test_draws_are_those_of_the_cpu() -> None:
    torch.manual_seed(7)
    expected = [torch.randn(5), torch.rand(3), torch.randperm(6), torch.poisson(torch.full((4,), 3.0))]
    torch.manual_seed(7)
    drawn = [torch.randn(5, device=FIRST), torch.rand(3, device=FIRST), torch.randperm(6, device=FIRST)]
    drawn.append(torch.poisson(torch.full((4,), 3.0, device=FIRST)))
    assert_same(drawn[::-1], expected[::-1])


def test_switches_hold_on_the_worker() -> None:
    """And are asked in one call, which must know each of them."""
    assert kernel_settings.current() == kernel_settings._asked()
    try:
        for deterministic, warn_only, precision, dtype in (
            *((True, False, "high", torch.float64), (True, True, "medium", torch.bfloat16)),
            (False, False, "highest", torch.float32),
        ):
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
            torch.set_float32_matmul_precision(precision)
            torch.set_default_dtype(dtype)
            with torch.backends.mkldnn.flags(enabled=not warn_only):
                assert kernel_settings.current() == kernel_settings._asked()
                # PyTorch fills what is not set with NaN while it is to be deterministic.
                filled = torch.full((1000,), 3.0, device=FIRST).sum() + torch.empty(5, device=FIRST).sum()
                assert not deterministic or filled.isnan().item()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
        torch.set_default_dtype(torch.float32)


def test_two_devices_in_one_script() -> None:
    a = torch.arange(6.0, device=FIRST)
    b = (a * 2).to(SECOND)
    a.add_(1)
    c = (b + a.to(SECOND)).to(FIRST)
    assert (b.device.index, c.device.index) == (7, 6)
    assert c.tolist() == [1.0, 4.0, 7.0, 10.0, 13.0, 16.0]
    with pytest.raises(RuntimeError, match="same device"):
        a + b


def test_compiled_functions_replay_on_the_worker() -> None:
    model = torch.nn.Linear(8, 1)
    reference = torch.nn.Linear(8, 1)
    reference.load_state_dict(model.state_dict())
    model.to(FIRST)
    batches = [torch.randn(4, 8) for _ in range(6)]
    losses = []
    for module, device in ((reference, "cpu"), (model, FIRST)):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)

        def step(x: torch.Tensor, module: Any = module, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = module(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = marid.compile(step) if device != "cpu" else step
        losses.append([run(batch.to(device)).cpu() for batch in batches])
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True))
    assert marid.stats().functions[0].replays >= 3


def test_tensors_that_share_memory_are_saved_sharing_it(tmp_path: Any) -> None:
    base = torch.arange(12.0, device=FIRST)
    torch.save({"base": base, "view": base[3:6]}, tmp_path / "t.pt")
    loaded = torch.load(tmp_path / "t.pt", map_location="cpu")
    loaded["base"][3] = -1
    assert loaded["view"].tolist() == [-1.0, 4.0, 5.0]


# --- failures --------------------------------------------------------------------------------------------------------


def test_a_failure_names_both_lines_and_poisons_only_what_needs_it() -> None:
    x = torch.ones(3, device=FIRST)
    fine = x + 1
    bad = x[torch.tensor([9], device=FIRST)]
    late = fine * 2
    with pytest.raises(IndexError, match=r"written at .*test_remote_engine.py:\d+\n  read at") as caught:
        (bad + late).sum().item()
    assert isinstance(caught.value, MaterializationError)
    assert late.tolist() == [4.0, 4.0, 4.0]
    x.add_(1)
    assert x.tolist() == [2.0, 2.0, 2.0]


def test_a_failure_takes_back_what_was_sent_behind_it() -> None:
    """Several runs in one message: the one that fails keeps what it made, those behind it are pending, then run."""
    x = torch.zeros(3, device=FIRST)
    bad = x[torch.tensor([9], device=FIRST)]

    tape = handles.tape(6)
    run_pending(tape, tape.cut([bad._value]))  # type: ignore[attr-defined]
    x.add_(1)
    y = x * 3
    run_pending(tape, tape.cut([y._value, x._storage.last_write]))  # type: ignore[attr-defined]
    assert y.tolist() == [3.0, 3.0, 3.0]
    assert x.tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(IndexError):
        bad.cpu()


def test_a_program_that_has_run_before_may_fail() -> None:
    """What is sent of it is only the index that is wrong; the session goes on."""
    x = torch.arange(5.0, device=FIRST)
    for index in (1, 2, 9, 3):
        found = x.clone().index_select(0, torch.tensor([index], device="cpu").to(FIRST))
        if index == 9:
            with pytest.raises(IndexError):
                found.item()
        else:
            assert found.item() == float(index)


def test_eager_errors_have_their_own_type() -> None:
    with pytest.raises(RuntimeError, match="probability"):
        torch.multinomial(torch.tensor([-1.0, 2.0], device=FIRST), 1).cpu()


def test_numbers_are_sent_again_when_they_are_not_the_same() -> None:
    """Only what differs from the last run of a program is sent: 0.0 and -0.0 do, and 1 and 1.0 are other programs."""
    x = torch.ones(2, device=FIRST)
    results = [(x * number).tolist() for number in (0.0, -0.0, 2.0, float("nan"), 2.0, 1, 1.0)]
    assert repr(results) == repr([(torch.ones(2) * n).tolist() for n in (0.0, -0.0, 2.0, float("nan"), 2.0, 1, 1.0)])
    torch.manual_seed(3)
    drawn = [torch.randn(3, device=FIRST).tolist() for _ in range(4)]
    torch.manual_seed(3)
    assert drawn == [torch.randn(3).tolist() for _ in range(4)]


def test_sizes_that_change_at_each_run() -> None:
    """A cache that grows: results are right, and a step stays small."""
    grown, expected, sizes = torch.zeros(0, 8, device=FIRST), torch.zeros(0, 8), []
    traffic = engine().delivery.link.counts
    for step in range(12):
        before = traffic.bytes_up
        grown = torch.cat([grown, torch.full((1, 8), float(step), device=FIRST)])
        expected = torch.cat([expected, torch.full((1, 8), float(step))])
        assert (grown @ grown.t()).sum().item() == (expected @ expected.t()).sum().item()
        sizes.append(traffic.bytes_up - before)
    assert max(sizes[4:]) < 600


def test_an_operation_that_the_worker_does_not_admit_is_said() -> None:
    with torch.library._scoped_library("marid_remote_tests", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        x = torch.ones(2, device=FIRST)
        with pytest.raises(RuntimeError, match="marid_remote_tests"):
            torch.ops.marid_remote_tests.twice(x).cpu()
    assert (x + 1).tolist() == [2.0, 2.0]


# --- connecting, roles, accounting -----------------------------------------------------------------------------------


def test_devices_with_living_tensors_are_neither_connected_nor_left() -> None:
    kept = torch.ones(2, device=FIRST)
    for act in (lambda: marid.connect(workers=1, first=6), lambda: marid.disconnect(6)):
        with pytest.raises(LazyTensorError, match=r"value\(s\) live on remote_accelerator:6 .*test_remote_engine.py"):
            act()
    assert kept.tolist() == [1.0, 1.0]


def test_arguments_of_connect_are_checked() -> None:
    with pytest.raises(ValueError, match="one of the two"):
        marid.connect()
    with pytest.raises(ValueError, match="MARID_DEVICES"):
        marid.connect(workers=1, first=8)


def test_budgets_name_the_line_that_exceeds_them() -> None:
    x = torch.ones(1000, device=FIRST)

    def twice() -> None:
        with marid.budget(round_trips=1):
            x.sum().item()
            (x * 2).sum().item()

    with pytest.raises(BudgetError, match=r"test_remote_engine.py:\d+ exceeds marid.budget\(round_trips=...\) by 1"):
        twice()
    with pytest.raises(BudgetError, match=r"bytes_down"), marid.budget(bytes_down=1000):
        x.cpu()
    with marid.budget(round_trips=1, bytes_down=8000, bytes_up=4000):
        assert (x * 3).sum().item() == 3000.0


def test_bytes_are_accounted_by_line_and_role() -> None:
    model = torch.nn.Linear(64, 64).to(FIRST)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        loss = model(torch.randn(8, 64).to(FIRST)).square().mean()
        loss.backward()
        optimizer.step()
        loss.item()
    grads, weights = model.weight.grad.cpu(), model.weight.detach().cpu()  # type: ignore[union-attr]
    state = optimizer.state[model.weight]["exp_avg"].cpu()
    down = {one.role: one.down for one in remote().moved if one.down >= weights.numel() * 4}
    assert down == dict.fromkeys(("gradient", "weight", "optimizer state"), grads.numel() * 4)
    assert state.shape == weights.shape
    said = remote().workers
    assert said[6]["bytes"] > 3 * weights.numel() * 4


def test_marks_change_accounts_and_no_values() -> None:
    x = marid.mark(torch.arange(1000.0, device=FIRST) * 2, role="kv cache")
    with marid.phase("decode"):
        y = x + 1
    assert y.metadata.execution_phase == "decode"  # type: ignore[attr-defined]
    assert torch.equal(x.cpu(), torch.arange(1000.0) * 2)
    assert [one.role for one in remote().moved if one.down >= 4000] == ["kv cache"]


def test_a_fork_that_ends_leaves_the_workers_and_what_is_kept_for_them(tmp_path: Any) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, torch, marid\n"
        "from marid.remote.launch.connect import connection_of\n"
        "marid.settings.journal_memory = 0\n"
        "marid.connect(workers=1)\n"
        "x = torch.ones(1 << 20, device='cpu').to('remote_accelerator')\n"
        "print(x.sum().item(), flush=True)\n"
        "before = connection_of(0).worker.process.pid\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    del x\n"
        "    sys.exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert connection_of(0).worker.is_alive\n"
        "connection_of(0).worker.process.kill()\n"
        "print((x * 2).sum().item())\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines() == ["1048576.0", "2097152.0"], done.stderr


def test_the_summary_of_a_script_shows_what_was_moved(tmp_path: Any) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import marid, torch\n"
        "marid.connect(workers=1)\n"
        "x = torch.ones(1000, device='cpu').to('remote_accelerator')\n"
        "print((x * 2).sum().item())\n"
    )
    command = [sys.executable, "-m", "marid", "run", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "2000.0\n", done.stderr
    assert "1 round trips" in done.stderr
    assert "script.py:3 (input)" in done.stderr


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (6, 3), (2, 1)])
def test_attention_with_fewer_heads_of_keys(heads: tuple[int, int]) -> None:
    def run(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        query, key, value = (torch.randn(1, n, 8, 16).to(device).requires_grad_() for n in (heads[0], *heads[1:] * 2))
        attend = torch.nn.functional.scaled_dot_product_attention
        attend(query, key, value, is_causal=True, enable_gqa=True).square().sum().backward()
        return [one.grad for one in (query, key, value) if one.grad is not None]

    assert_same(run("remote_accelerator:6"), run("cpu"))


def test_a_number_is_unfolded() -> None:
    def run(device: str) -> torch.Tensor | None:
        x = torch.zeros((), device=device).requires_grad_()
        x.unfold(0, 1, 1).sum().backward()
        return x.grad

    assert_same(run(FIRST), run("cpu"))


@pytest.mark.parametrize("shapes", [((2, 1, 3, 4), (5, 6, 4)), ((1, 3, 4), (5, 6, 4)), ((3, 4), (6, 4))])
def test_gradients_of_distances_of_broadcast_batches(shapes: tuple[tuple[int, ...], ...]) -> None:
    def run(device: str) -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        one, other = (torch.randn(shape).to(device).requires_grad_() for shape in shapes)
        torch.cdist(one, other).square().sum().backward()
        return [one.grad, other.grad]

    assert_same(run(FIRST), run("cpu"))


def test_what_is_done_along_nothing() -> None:
    def run(device: str) -> list[torch.Tensor | None]:
        rows = torch.ones(4, 0).to(device).requires_grad_()
        torch.nn.functional.pdist(rows).sum().backward()
        return [rows.grad, torch.fft.fftn(torch.arange(6.0).to(device), dim=())]

    assert_same(run(FIRST), run("cpu"))
