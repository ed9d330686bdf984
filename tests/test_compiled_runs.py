"""Programs with compiled parts as they run: taking them into use, and what happens when one is wrong or fails.

The parts are made by hand, in C++, with the interface of AOTInductor's: that takes a second, and they can be wrong.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import marid
from marid.execute.compiled import workers
from marid.execute.compiled.execution import Checked
from marid.execute.compiled.tier import Tier
from marid.execute.compiled.workers import Job
from marid.execute.interrupted import Interrupted
from marid.frontend import handles
from marid.frontend.engines import local_engine as engine

from .helpers import DEVICE, interrupted

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler"),
    pytest.mark.in_process("reads what the in-process engine has compiled"),
]

# Computes y = exp(tanh(a * first + second)), and a += third where it is given a third number; with TWO, adds b to y.
_SOURCE = r"""
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <unistd.h>
extern "C" {
int aoti_torch_empty_strided(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, void**);
int aoti_torch_get_data_ptr(void*, void**);
int aoti_torch_get_numel(void*, int64_t*);
int aoti_torch_delete_tensor_object(void*);
static int calls = 0;
int AOTInductorModelContainerCreateWithDevice(void** made, size_t, const char*, const char*) {
  *made = &calls;
  return 0;
}
int AOTInductorModelContainerDelete(void*) { return 0; }
int AOTInductorModelContainerGetNumOutputs(void*, size_t* count) { *count = 1; return 0; }
int AOTInductorModelContainerRun(void*, void** in, size_t count, void** out, size_t, void*, void*) {
  calls++;
  float* data[8];
  int64_t size;
  for (size_t i = 0; i < count; i++) aoti_torch_get_data_ptr(in[i], (void**)&data[i]);
  aoti_torch_get_numel(in[0], &size);
  int64_t stride = 1;
  aoti_torch_empty_strided(1, &size, &stride, 6, 0, 0, &out[0]);
  float* y;
  aoti_torch_get_data_ptr(out[0], (void**)&y);
  for (int64_t i = 0; i < size; i++) {
    y[i] = std::exp(std::tanh(data[0][i] * *data[1 + TWO] + *data[2 + TWO])) + (TWO ? data[1][i] : 0);
    if (count > 3 + TWO) data[0][i] += *data[3 + TWO];
  }
  if (SLOW && calls > 1) usleep(300000);
  if (SLEEP) usleep(SLEEP);
  if (WRONG) y[size - 1] += 0.01f;
  for (size_t i = 0; i < count; i++) aoti_torch_delete_tensor_object(in[i]);
  return FAILS && calls >= FAILS;
}
}
"""


_compare = Tier._compare


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("parts")
    (folder / "part.cpp").write_text(_SOURCE)
    lib = Path(torch.__file__).parent / "lib"

    def make(option: str) -> Path:
        path = folder / f"{option}.so"
        if not path.exists():
            options = {"WRONG": "0", "FAILS": "0", "SLOW": "0", "SLEEP": "0", "TWO": "0"} | dict(
                [option.split("=")] if "=" in option else []
            )
            defined = [f"-D{name}={value}" for name, value in options.items()]
            command = ["g++", "-shared", "-fPIC", "-O1", *defined, str(folder / "part.cpp"), "-o", str(path)]
            subprocess.run([*command, f"-L{lib}", "-ltorch_cpu"], check=True)
        return path

    return make


@pytest.fixture
def answer(
    build: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[[str], None]]:
    """Have every part compiled to the one of this kind, at once, and used also where it is slower."""
    monkeypatch.setattr(Tier, "_compare", lambda *_args: None)
    names = ("compile", "compile_after", "compile_ms", "immediate_bytes", "cache_dir")
    before = {name: getattr(marid.settings, name) for name in names}
    marid.settings.compile, marid.settings.compile_after, marid.settings.compile_ms = True, 2, 0
    marid.settings.immediate_bytes, marid.settings.cache_dir = 0, tmp_path
    engine.programs.clear()  # pyright: ignore[reportAttributeAccessIssue]

    def use(option: str) -> None:
        # A copy: a shared object that is loaded twice is one, with one count of calls.
        path = shutil.copy(build(option), tmp_path / f"{time.monotonic_ns()}.so")

        def submit(request: dict[str, Any]) -> Job:
            return Job(request, answer={"path": str(path), "conditions": []})

        monkeypatch.setattr(workers.compiler, "submit", submit)

    yield use
    engine.programs.clear()  # pyright: ignore[reportAttributeAccessIssue]
    for name, value in before.items():
        setattr(marid.settings, name, value)


def _chain(a: torch.Tensor, first: float = 1.5, second: float = 0.25) -> torch.Tensor:
    return torch.exp(torch.tanh(a * first + second))


def test_it_is_checked_swapped_in_and_takes_numbers(answer: Callable[[str], None]) -> None:
    answer("right")
    a = torch.randn(40_000)
    lazy, kept = a.to(DEVICE), []
    for step in range(40):
        kept.append(_chain(lazy, 1.0 + step, step / 7))
        marid.materialize(kept[-1])
    for step, got in enumerate(kept):
        torch.testing.assert_close(got.cpu(), _chain(a, 1.0 + step, step / 7))
    stats = marid.stats()
    assert stats.compiled_runs >= 16
    assert (stats.programs_compiled, stats.compile_failures, stats.compile_mismatches) == (1, 0, 0)


def test_it_is_one_operation_where_operations_are_timed(
    answer: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the line of its first one, beside those that are not compiled; the run that compares counts each."""
    answer("right")
    monkeypatch.setattr(marid.settings, "profile_operators", True)
    lazy = torch.randn(40_000).to(DEVICE)
    for _ in range(40):
        _chain(lazy).cumsum(0).sum().item()
    found = marid.stats()
    counts = {row.operator: row.count for row in found.operators}
    assert counts["marid::compiled"] == found.compiled_runs >= 16
    assert counts["aten::cumsum"] == counts["aten::sum"] == 40
    assert counts["aten::tanh"] == 40 - found.compiled_runs
    (part,) = [row for row in found.operators if row.operator == "marid::compiled"]
    line = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "return torch.exp" in text)
    assert part.source == f"{__file__}:{line}"


def _ahead(lazy: torch.Tensor, first: float, second: float) -> torch.Tensor:
    """The chain, handed over before anybody reads it."""
    tape, y = handles.tape(0), _chain(lazy, first, second)
    value: Any = y
    engine.run(tape.cut([value._value.node]), tape.take_back, ahead=True)
    return y


def test_it_is_checked_where_work_runs_ahead(answer: Callable[[str], None]) -> None:
    """The run that compares is not for the device's own thread; those behind it are."""
    answer("right")
    a = torch.randn(40_000)
    lazy, lanes = a.to(DEVICE), list[str]()
    with marid.on_run(lambda run: lanes.append(run.lane) if run.compiled else None):
        for step in range(40):
            y = _ahead(lazy, 1.0 + step, step / 7)
            torch.testing.assert_close(y.cpu(), _chain(a, 1.0 + step, step / 7))
    assert marid.stats().programs_compiled == 1
    assert len(lanes) == marid.stats().compiled_runs >= 16
    assert set(lanes) == {"device"}


def test_one_that_fails_on_the_devices_thread_is_left(answer: Callable[[str], None]) -> None:
    answer("FAILS=6")
    a = torch.randn(40_000)
    lazy = a.to(DEVICE)
    kept = [_ahead(lazy, 1.0 + step, step / 7) for step in range(40)]
    for step, y in enumerate(kept):
        torch.testing.assert_close(y.cpu(), _chain(a, 1.0 + step, step / 7))
    assert marid.stats().compiled_runs > 0


def test_one_that_is_slower_is_given_up(answer: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the flat tier was slow before it came, beside the compiler's process, and is not any more."""
    answer("SLEEP=2000")
    monkeypatch.setattr(Tier, "_compare", _compare)
    ran = Tier._ran

    def beside_others(tier: Tier, variant: Any, specs: Any, seconds: float) -> None:
        ran(tier, variant, specs, seconds if tier._variants else seconds + 0.01)

    monkeypatch.setattr(Tier, "_ran", beside_others)
    a = torch.randn(40_000)
    lazy = a.to(DEVICE)
    for step in range(60):
        torch.testing.assert_close(_chain(lazy, 1.0 + step).cpu(), _chain(a, 1.0 + step))
    assert marid.stats().compiled_dropped == 1
    assert 0 < marid.stats().compiled_runs < 20


def test_its_memory_is_planned_too(answer: Callable[[str], None]) -> None:
    answer("right")
    lazy = torch.randn(40_000).to(DEVICE)
    for _ in range(12):
        y = _chain(lazy)
        total = y.sum()
        del y
        marid.materialize(total)
    assert marid.stats().planned_peak > 0


def test_a_wrong_one_is_reported_by_operation_and_line_and_not_used(answer: Callable[[str], None]) -> None:
    answer("WRONG=1")
    a = torch.randn(64)
    lazy = a.to(DEVICE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(10):
            torch.testing.assert_close(_chain(lazy).cpu(), _chain(a), rtol=0, atol=0)
    [warning] = [w for w in caught if "flat tier" in str(w.message)]
    assert "aten::exp" in str(warning.message)
    assert warning.filename == __file__
    assert "return torch.exp" in Path(__file__).read_text().splitlines()[warning.lineno - 1]
    assert (marid.stats().compile_mismatches, marid.stats().compiled_runs) == (1, 0)


@pytest.mark.parametrize("wrong", [None, 0, 1, 2])
def test_no_run_takes_long_because_of_compiling(
    build: Callable[[str], Path],
    answer: Callable[[str], None],
    wrong: int | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Parts are asked for, and compared, one in a run; those that are right are used when all were."""
    answer("right")
    monkeypatch.setattr(Tier, "_patience", lambda self, specs: 1e-9)
    seen: list[tuple[int, int]] = []
    asked = 0

    def submit(request: dict[str, Any]) -> Job:
        nonlocal asked
        path = shutil.copy(build("WRONG=1" if asked == wrong else "right"), tmp_path / f"part-{asked}.so")
        asked += 1
        return Job(request, answer={"path": str(path), "conditions": []})

    monkeypatch.setattr(workers.compiler, "submit", submit)

    def step(a: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            a = _chain(a).sort().values
        return a

    a = torch.randn(64)
    lazy = a.to(DEVICE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(24):
            torch.testing.assert_close(step(lazy).cpu(), step(a))
            programs: Any = engine.programs  # pyright: ignore[reportAttributeAccessIssue]
            variants = next((p.tier._variants for p in programs.values() if p.tier is not None), [])
            seen.append((asked, variants[0][0].checked if variants else 0))
    assert {count for count, _ in seen} >= {0, 1, 2, 3}
    checked = [count for _, count in seen]
    assert [count for count in dict.fromkeys(checked) if count in (1, 2)] == [1, 2]
    assert marid.stats().compile_mismatches == (wrong is not None)
    assert marid.stats().compiled_runs > 5
    assert len(variants[0][0].parts) == (3 if wrong is None else 2)
    assert variants[0][0].is_checked


def test_a_program_that_comes_in_another_dtype_is_asked_for_again(
    build: Callable[[str], Path], answer: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the same program: sizes and dtypes are no part of one."""
    answer("right")
    asked: list[str] = []

    def submit(request: dict[str, Any]) -> Job:
        asked.append(request["structure"]["part"]["inputs"][0]["dtype"])
        return Job(request, answer={"path": str(build("right")), "conditions": []})

    monkeypatch.setattr(workers.compiler, "submit", submit)
    a = torch.randn(64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the part that is built here is right for float32 alone
        for dtype in (torch.float32, torch.float64):
            lazy = a.to(DEVICE, dtype)
            for _ in range(10):
                _chain(lazy).cpu()
    assert asked == ["float32", "float64"]


@pytest.mark.parametrize("in_a_trial", [False, True])
def test_ctrl_c_while_results_are_compared_loses_and_repeats_nothing(
    answer: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, in_a_trial: bool
) -> None:
    """What was written by then is not written again."""
    answer("WRONG=1")

    def step(a: torch.Tensor) -> torch.Tensor:
        a.copy_(a.cumsum(0).roll(1) % 7)
        return _chain(a.cumsum(0))

    pressed = []

    def press(*_: Any) -> list[torch.Tensor]:
        pressed.append(True)
        error = KeyboardInterrupt()
        raise Interrupted(0, False, {}, error) if in_a_trial else error

    monkeypatch.setattr(Checked, "_again", press)
    a = torch.randn(64)
    lazy = a.to(DEVICE)
    for _ in range(20):
        a[0] += 1
        lazy[0] += 1
        y, expected = step(lazy), step(a)
        try:
            found = y.cpu()
        except KeyboardInterrupt:
            found = y.cpu()
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        torch.testing.assert_close(lazy.cpu(), a, rtol=0, atol=0)
    assert pressed


@pytest.mark.parametrize("in_a_trial", [False, True])
def test_one_that_cannot_be_judged_is_not_used(
    answer: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, in_a_trial: bool
) -> None:
    """Nor is it said to be wrong."""
    answer("WRONG=1" if in_a_trial else "right")

    failed = []

    def fail(*_: Any) -> Any:
        failed.append(True)
        raise Interrupted(0, False, {}, RuntimeError("singular")) if in_a_trial else MemoryError

    if in_a_trial:
        monkeypatch.setattr(Checked, "_again", fail)
    else:
        monkeypatch.setattr("marid.execute.compiled.execution.is_close", fail)
    a = torch.randn(64)
    lazy = a.to(DEVICE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(10):
            torch.testing.assert_close(_chain(lazy).cpu(), _chain(a), rtol=0, atol=0)
    assert failed == [True]
    assert (marid.stats().compile_mismatches, marid.stats().compiled_runs) == (0, 0)


@pytest.mark.parametrize("call", [1, 4])
def test_one_that_fails_is_left_and_the_flat_tier_goes_on(answer: Callable[[str], None], call: int) -> None:
    answer(f"FAILS={call}")
    a = torch.randn(64)
    lazy = a.to(DEVICE)
    for _ in range(12):
        assert torch.equal(_chain(lazy).cpu(), _chain(a)) or marid.stats().compiled_runs
        torch.testing.assert_close(_chain(lazy).cpu(), _chain(a))
    assert marid.stats().compiled_runs == (0 if call == 1 else 3)


def _writing(a: torch.Tensor) -> torch.Tensor:
    y = _chain(a)
    a.add_(0.5)
    return y


def test_written_inputs_are_written_once_also_in_the_check(answer: Callable[[str], None]) -> None:
    answer("right")
    a = torch.randn(64)
    lazy = a.to(DEVICE)
    for _ in range(12):
        torch.testing.assert_close(_writing(lazy).cpu(), _writing(a))
        torch.testing.assert_close(lazy.cpu(), a)
    assert marid.stats().compiled_runs > 3


def test_what_only_a_view_behind_the_part_needs(answer: Callable[[str], None]) -> None:
    """It dies in the part where that runs flat, also where the two are compared."""
    answer("right")
    a, w = torch.randn(4000), torch.randn(1000)
    lazy, lazy_w = a.to(DEVICE), w.to(DEVICE)

    def step(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        rows = _chain(a).view(4, 1000)
        a.add_(0.5)
        return torch.mv(rows, w)

    for _ in range(10):
        got = step(lazy, lazy_w)
        marid.materialize(got, lazy)
        torch.testing.assert_close(got.cpu(), step(a, w), rtol=1e-4, atol=1e-4)
    assert (marid.stats().programs_compiled, marid.stats().compile_mismatches) == (1, 0)
    assert marid.stats().compiled_runs > 0


def test_one_that_fails_while_it_writes_raises_and_writes_no_second_time(answer: Callable[[str], None]) -> None:
    answer("FAILS=4")
    lazy = torch.randn(64).to(DEVICE)

    def run() -> None:
        for _ in range(12):
            y = _writing(lazy)
            marid.materialize(y, lazy)

    with pytest.raises(marid.errors.MaterializationError, match="may have written"):
        run()
    lazy.cpu()
    other = torch.ones(64).to(DEVICE)  # the process goes on, without the part
    assert torch.equal(_writing(other).cpu(), _chain(torch.ones(64)))
    assert torch.equal(other.cpu(), torch.full((64,), 1.5))


def test_inputs_that_share_written_memory_run_flat(answer: Callable[[str], None]) -> None:
    """The part was compiled for tensors that do not."""
    answer("TWO=1")

    def step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = _chain(a) + b
        a.add_(0.5)
        return y

    a, b = torch.randn(64), torch.randn(64)
    la, lb = a.to(DEVICE), b.to(DEVICE)
    for _ in range(6):
        torch.testing.assert_close(step(la, lb).cpu(), step(a, b))
        la.cpu()
    assert marid.stats().compile_mismatches == 0
    assert marid.stats().compiled_runs
    for _ in range(3):
        torch.testing.assert_close(step(la, la).cpu(), step(a, a))
        torch.testing.assert_close(step(la, la[:]).cpu(), step(a, a[:]))
    torch.testing.assert_close(la.cpu(), a)


def test_another_number_of_threads_runs_flat(answer: Callable[[str], None]) -> None:
    answer("right")
    lazy = torch.randn(64).to(DEVICE)
    for _ in range(8):
        marid.materialize(_chain(lazy))
    before, threads = marid.stats().compiled_runs, torch.get_num_threads()
    assert before
    torch.set_num_threads(threads + 1)
    try:
        marid.materialize(_chain(lazy))
    finally:
        torch.set_num_threads(threads)
    assert marid.stats().compiled_runs == before


def test_a_number_that_does_not_fit_its_type_runs_flat(answer: Callable[[str], None]) -> None:
    answer("right")
    a = torch.randn(64)
    lazy = a.to(DEVICE)
    for _ in range(8):
        marid.materialize(_chain(lazy))
    assert torch.equal(_chain(lazy, 1e39).cpu(), _chain(a, 1e39))
    assert torch.equal(_chain(lazy, float("nan")).isnan().cpu(), _chain(a, float("nan")).isnan())


def test_ctrl_c_while_a_part_runs_loses_and_repeats_nothing(answer: Callable[[str], None]) -> None:
    answer("SLOW=1")
    a = torch.randn(64)
    lazy = a.to(DEVICE)
    for _ in range(4):
        _writing(a)
        marid.materialize(_writing(lazy), lazy)
    assert (marid.stats().programs_compiled, marid.stats().compiled_runs) == (1, 0)
    y, expected = _writing(lazy), _writing(a)

    def run() -> None:
        marid.materialize(y, lazy)
        time.sleep(1)

    with pytest.raises(KeyboardInterrupt), interrupted(0.1):
        run()
    assert marid.stats().compiled_runs == 1
    torch.testing.assert_close(y.cpu(), expected)
    torch.testing.assert_close(lazy.cpu(), a)


def test_the_check_keeps_to_the_memory_limit(answer: Callable[[str], None]) -> None:
    answer("right")
    lazy = torch.randn(1 << 20).to(DEVICE)
    marid.settings.memory_limit = torch.remote_accelerator.memory_allocated() + (9 << 20)
    try:
        for _ in range(8):
            marid.materialize(_chain(lazy))
        assert marid.stats().compiled_runs == 0
        marid.settings.memory_limit = 0
        for _ in range(8):
            marid.materialize(_chain(lazy))
        assert marid.stats().compiled_runs > 0
    finally:
        marid.settings.memory_limit = 0


def test_a_fork_starts_without_its_parents_worker(answer: Callable[[str], None]) -> None:
    answer("right")
    compiler = workers.Compiler()
    compiler.jobs.append(Job({}))
    compiler._owner = os.getpid() + 1
    compiler.poll()
    assert not compiler.jobs
    assert compiler.process is None
