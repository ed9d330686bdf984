"""The compiled tier: what is compiled, when it is used, and that nothing goes wrong when compiling does.

Programs are really compiled in few tests, since that takes long: two quick ones, and those marked ``conformance``.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import marid
from marid import policy
from marid.built import the_compiler
from marid.execute.compiled import disk, lower, worker, workers
from marid.execute.compiled.describe import describe, generalize, solve
from marid.execute.compiled.disk import DiskCache
from marid.execute.compiled.partition import choose
from marid.execute.compiled.variant import _evaluate
from marid.native import gemm

from .helpers import DEVICE
from .partitions import bound, names_of, parts_of

pytestmark = pytest.mark.in_process("reads what the in-process engine has compiled")


def lazy(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes).to(DEVICE)


# --- choosing ------------------------------------------------------------------------------------------------------


def test_a_chain_is_one_part_and_its_ends_are_what_can_be_fused() -> None:
    a, b = lazy(4, 4), lazy(4, 4)
    [(program, part)] = parts_of(lambda: ((a @ b).tanh() * 2 + 1).t().sum().item())
    assert names_of(program, part) == ["tanh", "mul", "add", "t", "sum"]
    assert len(part.outputs) == 1
    assert len(part.numbers) == 2


def test_too_little_is_no_part() -> None:
    a = lazy(4)
    assert not parts_of(lambda: (a * 2 + 1).cpu())


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i: x[i] * 1,
        lambda x, i: torch.gather(x, 0, i),
        lambda x, i: torch.nn.functional.embedding(i, x.view(2, 2)),
        lambda x, i: torch.rand_like(x),
        lambda x, i: torch.complex(x, x).real,
        lambda x, i: (i // 2).float(),
        lambda x, i: (i**2).float(),
        lambda x, i: x.to(torch.float16).fill_(2).float(),
    ],
)
def test_what_raises_by_value_or_draws_stays_out(function: Callable[..., torch.Tensor]) -> None:
    """Compiled code would not raise, or not draw, what eager PyTorch does."""
    x, i = lazy(4), torch.tensor([0, 1, 1, 0]).to(DEVICE)
    inside = {name for program, part in parts_of(lambda: function(x, i).cpu()) for name in names_of(program, part)}
    assert not inside & {"index", "gather", "embedding", "rand_like", "complex", "floor_divide", "pow", "fill_"}


def test_a_view_that_escapes_is_made_again_behind_the_part() -> None:
    a = lazy(3, 4)
    kept = []

    def run() -> None:
        y = (a * 2 + 1).tanh()
        kept.append((y.t()[1:], y.sin().cos()))
        marid.materialize(*kept[-1])

    [(_, part)] = parts_of(run)
    assert [i.op.name for i in part.again] == ["aten::t", "aten::slice"]
    assert len(part.outputs) == 2


def test_memory_that_is_written_is_given_once() -> None:
    """What else lies in it becomes a view inside of the part, or ends it."""
    w = lazy(4, 4)
    w.cpu()
    t = w.t()
    t.cpu()

    def run() -> None:
        y = (t * 2).tanh().exp()
        w.add_(1)
        w.mul_(2)
        marid.materialize(y, w)

    [(_, part)] = parts_of(run)
    assert sorted(part.bases)[:1] == [-1]
    assert max(part.bases) >= 0
    assert sum(part.written) == 1


def test_an_overlapping_input_is_not_written_in_a_part() -> None:
    base = lazy(4)
    wide = base.expand(3, 4)
    wide.cpu()

    def run() -> None:
        y = (wide * 2).tanh().exp()
        base.add_(1)
        marid.materialize(y, base)

    for _, part in parts_of(run):
        assert not (any(part.written) and any(base >= 0 for base in part.bases))


def test_numbers_are_inputs_and_changing_ones_are_never_part_of_the_code() -> None:
    a = lazy(8)
    [(program, specs, params, shared, _)] = bound(lambda: (torch.clamp(a * 0.5, min=0.25) + 0.125).exp().cpu())
    [part] = choose(program, specs, params, set(), shared)
    assert [params[number.param] for number in part.numbers] == [0.5, 0.125]
    assert [params[index] for index in part.baked] == [0.25]
    assert not choose(program, specs, params, set(part.baked), shared)


def test_products_of_one_row_are_sums_that_can_be_fused() -> None:
    """Of more rows, transposed, or with another type, they are left to BLAS."""
    x, w = lazy(1, 64), lazy(32, 64)

    def found(function: Callable[[], torch.Tensor]) -> list[list[str]]:
        return [names_of(program, part) for program, part in parts_of(lambda: function().cpu())]

    steps = ["mul", "add", "tanh"]
    assert found(lambda: torch.nn.functional.linear((x * 2 + 1).tanh(), w)) == [[*steps, "linear"]]
    assert found(lambda: torch.nn.functional.linear((x * 2 + 1).tanh().view(1, 1, 64), w)) == [
        [*steps, "view", "linear"]
    ]
    assert found(lambda: (x * 2 + 1).tanh().mm(w.t())) == [[*steps, "t", "mm"]]
    assert found(lambda: torch.nn.functional.linear((lazy(2, 64) * 2 + 1).tanh(), w)) == [steps]
    assert found(lambda: (x * 2 + 1).tanh().mm(lazy(64, 32))) == [steps]
    assert found(lambda: torch.nn.functional.linear((x.double() * 2 + 1).tanh(), w.double())) != [[*steps, "linear"]]


@pytest.mark.parametrize("kind", [torch.nn.LSTMCell, torch.nn.GRUCell])
def test_pieces_of_one_tensor_that_are_written_are_one_memory(kind: Any) -> None:
    """What a recurrent cell writes are views, though the operator that makes them does not say so: they are made
    inside of the part that writes them, and are none of its inputs."""
    cell, x, state = kind(8, 16).to(DEVICE), lazy(3, 8), (lazy(3, 16), lazy(3, 16))

    def run() -> None:
        with torch.no_grad():
            out = cell(x, state if kind is torch.nn.LSTMCell else state[0])
        marid.materialize(*(out if isinstance(out, tuple) else (out,)))

    parts = parts_of(run)
    [(program, *_)] = bound(run)
    made = [(index, i) for index, i in enumerate(program.instructions) if i.op.name.startswith("aten::unsafe_")]
    pieces = {result.slot for _, i in made for result in i.results}
    assert pieces
    assert not any(pieces & set(part.inputs) for _, part in parts)
    if kind is torch.nn.LSTMCell:  # what comes out of the other one is written itself, which parts do not take
        [(_, part)] = parts
        last_write = max(index for index, i in enumerate(program.instructions) if i.op.mutates)
        assert part.start <= made[0][0] < last_write < part.stop


# --- shapes --------------------------------------------------------------------------------------------------------


def _described(batch: int, width: int = 6) -> tuple[dict[str, Any], Any]:
    x = lazy(batch, 4, width)
    [(program, specs, params, shared, _)] = bound(lambda: (x.view(batch * 4, width) * 2 + 1).tanh().cpu())
    # the view leads, so it is not in the part: take it in by hand
    [part] = choose(program, specs, params, set(), shared)
    return describe(part, program, specs, params), part


def test_what_is_handed_to_inductor_computes_what_was_recorded() -> None:
    """Operators on lists, element by element, also where those have no form in place."""
    a, b = [lazy(3), lazy(2, 2)], [lazy(3), lazy(2, 2)]
    inputs = [t.cpu() for t in (*a, *b)]

    def step() -> None:
        torch._foreach_lerp_(a, b, 0.25)
        torch._foreach_maximum_(a, b)
        torch._foreach_addcmul_(a, b, b, [2.0, 3.0])
        marid.materialize(*a)

    [(program, specs, params, shared, _)] = bound(step)
    [part] = choose(program, specs, params, set(), shared)
    given = dict(zip(program.input_slots, inputs, strict=True))
    numbers = [params[n.param] if n.element is None else params[n.param][n.element] for n in part.numbers]
    module = lower._Builder(describe(part, program, specs, params), 0).module()
    module(*[given[slot] for slot in part.inputs], *map(torch.tensor, numbers))
    for one, expected in zip(a, inputs[:2], strict=True):
        torch.testing.assert_close(one.cpu(), expected)


def test_a_size_that_changes_becomes_a_symbol_and_its_multiples_follow() -> None:
    found = generalize([_described(3)[0], _described(5)[0]])
    assert found is not None
    general, count = found
    assert count == 1
    assert solve(general, _described(7)[0], count) == (28,)
    assert solve(general, _described(7, width=8)[0], count) is None


def test_two_sizes_and_their_product() -> None:
    one = {"a": [2, 3, 6, 1]}, {"a": [5, 7, 35, 1]}, {"a": [4, 9, 36, 1]}
    found = generalize(list(one))
    assert found == ({"a": [{"e": [1, [0], 0]}, {"e": [1, [1], 0]}, {"e": [1, [0, 1], 0]}, 1]}, 2)
    assert solve(found[0], {"a": [8, 5, 40, 1]}, 2) == (8, 5)
    assert solve(found[0], {"a": [8, 5, 41, 1]}, 2) is None
    assert solve(found[0], {"a": [8, 5, 40, 2]}, 2) is None


def test_anything_but_an_integer_that_differs_is_another_program() -> None:
    assert generalize([{"a": "x"}, {"a": "y"}]) is None
    assert generalize([{"a": [1]}, {"a": [1, 2]}]) is None
    assert generalize([{"a": True}, {"a": 2}]) is None


def test_conditions_are_data() -> None:
    condition = [
        "and",
        [">=", ["symbol", 0], 2],
        ["==", ["%", ["symbol", 0], 4], 0],
        ["<", ["*", ["symbol", 0], 2], 99],
    ]
    assert [n for n in (1, 2, 4, 8, 48, 52) if _evaluate(condition, (n,))] == [4, 8, 48]
    assert not _evaluate(["import os", 1], (4,))
    assert not _evaluate(["%", 4, 0], (4,))


# --- the worker ----------------------------------------------------------------------------------------------------


def _run_until(function: Callable[[], Any], reached: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        function()
        if reached():
            return True
        time.sleep(0.05)
    return False


def _chain(a: torch.Tensor) -> torch.Tensor:
    return ((a * 2 + 1).tanh() * a).exp()


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Put something else in the place of the worker."""

    def replace(text: str) -> None:
        path = tmp_path / "worker.py"
        path.write_text(textwrap.dedent(text))
        monkeypatch.setattr(workers, "_WORKER", path)

    return replace


def test_a_worker_that_dies_is_replaced_once(compiling: Path, script: Callable[[str], None]) -> None:
    script("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    a = lazy(64)
    expected = _chain(a.cpu())
    assert _run_until(lambda: marid.materialize(_chain(a)), lambda: marid.stats().compile_failures == 1)
    assert (marid.stats().compile_workers, marid.stats().compile_workers_lost) == (2, 2)
    for _ in range(10):
        assert torch.equal(_chain(a).cpu(), expected)
    assert marid.stats().compile_workers == 2
    assert marid.stats().compiled_runs == 0


@pytest.mark.parametrize("answer", ["nonsense", '{"id": 0}', '["id"]', '{"id": null, "path": "/etc/passwd"}'])
def test_a_worker_that_answers_nonsense_is_not_believed(
    compiling: Path, script: Callable[[str], None], answer: str
) -> None:
    script(f"import time; input(); print({answer!r}, flush=True); time.sleep(0.2)")
    a = lazy(64)
    expected = _chain(a.cpu())
    assert _run_until(lambda: marid.materialize(_chain(a)), lambda: marid.stats().compile_failures == 1)
    assert torch.equal(_chain(a).cpu(), expected)
    assert marid.stats().compiled_runs == 0


def test_an_answer_that_is_no_code_is_a_failure(compiling: Path, script: Callable[[str], None]) -> None:
    (compiling / "bad.so").write_bytes(b"no code")
    script(
        f"""
        import json, time
        job = json.loads(input())
        print(json.dumps({{"id": job["id"], "path": {str(compiling / "bad.so")!r}, "conditions": []}}), flush=True)
        time.sleep(5)
        """
    )
    a = lazy(64)
    assert _run_until(lambda: marid.materialize(_chain(a)), lambda: marid.stats().compile_failures == 1)
    assert torch.equal(_chain(a).cpu(), _chain(a.cpu()))


def test_nobody_waits_for_a_worker(compiling: Path, script: Callable[[str], None]) -> None:
    script("import time; time.sleep(60)")
    a = lazy(64)
    marid.materialize(_chain(a))
    start = time.monotonic()
    for _ in range(50):
        marid.materialize(_chain(a))
    assert time.monotonic() - start < 20
    assert marid.stats().compile_workers == 1
    process = workers.compiler.process
    assert process is not None
    workers.compiler.close()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.skipif(the_compiler() is None, reason="there is no C++ compiler")
def test_a_worker_gives_way_to_the_script(compiling: Path) -> None:
    """Its niceness counts only within the session: Linux gives each session an equal share (sched_autogroup)."""
    marid.settings.compile_niceness = 7
    a = lazy(64)
    assert _run_until(lambda: marid.materialize(_chain(a)), lambda: marid.stats().programs_compiled >= 1, 180)
    process = workers.compiler.process
    assert process is not None
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == marid.settings.compile_niceness == 7
    assert os.getsid(process.pid) == os.getsid(0)
    assert os.getpgid(process.pid) == process.pid  # Ctrl-C does not reach it


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the system does not say what a process got")
@pytest.mark.skipif(the_compiler() is None, reason="there is no C++ compiler")
def test_a_worker_that_gets_no_processor_gives_way_less(compiling: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that keeps every processor busy is compiled in the end; here the worker is stopped instead."""
    monkeypatch.setattr(policy, "COMPILER_STARVED", 1.0)
    monkeypatch.setattr(workers.compiler, "_niceness", 19)
    marid.settings.compile_niceness = 19
    a = lazy(64)
    assert _run_until(lambda: marid.materialize(_chain(a)), lambda: workers.compiler.process is not None, 60)
    first = workers.compiler.process
    assert first is not None
    os.kill(first.pid, signal.SIGSTOP)
    assert _run_until(lambda: marid.materialize(_chain(a)), lambda: workers.compiler.process is not first, 60)
    monkeypatch.setattr(policy, "COMPILER_STARVED", 1e9)
    assert _run_until(lambda: marid.materialize(_chain(a)), lambda: marid.stats().programs_compiled >= 1, 180)
    second = workers.compiler.process
    assert second is not None
    assert os.getpriority(os.PRIO_PROCESS, second.pid) == policy.COMPILER_NICENESS
    assert os.sched_getscheduler(second.pid) == os.SCHED_OTHER
    assert marid.stats().compile_workers_lost == 0


def test_a_worker_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    """The real worker: it must notice by itself."""
    text = """
    import os, signal, time, torch, marid
    from marid.execute.compiled import workers
    a = torch.randn(64).to("remote_accelerator")
    while workers.compiler.process is None:
        marid.materialize(((a * 2 + 1).tanh() * a).exp())
    time.sleep(1)
    print(workers.compiler.process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    environment = {
        **os.environ,
        "MARID_COMPILE": "1",
        "MARID_COMPILE_AFTER": "2",
        "MARID_COMPILE_MS": "0",
        "MARID_IMMEDIATE_BYTES": "0",
    }
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)], env=environment, capture_output=True, text=True, check=False
    )
    worker = int(ran.stdout)
    for _ in range(100):
        try:
            os.kill(worker, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{worker}/stat").read_text().split()[2] == "Z":  # nobody has collected it yet
            return
        time.sleep(0.1)
    raise AssertionError("the worker lives on")


def test_switched_off_nothing_is_compiled() -> None:
    a = lazy(64)
    for _ in range(30):
        marid.materialize(_chain(a))
    assert marid.stats().compile_workers == 0


@pytest.mark.parametrize("folder", ["file/below", "missing"])
def test_what_cannot_be_kept_on_disk_is_used_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    """In the worker: a cache that is read only, or a full disk."""
    built = tmp_path / "work" / "built.so"
    built.parent.mkdir()
    built.write_bytes(b"code")
    (tmp_path / "file").write_text("")
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(lower, "compile_part", lambda *_: (built, [True]))
    monkeypatch.setattr(worker.tempfile, "tempdir", str(tmp_path / "scratch"))
    if folder == "missing":

        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(DiskCache, "_write", full)
    job = {"structure": {"part": {}, "threads": 1}, "hints": [], "folder": str(tmp_path / folder), "limit": 1 << 20}
    answer = worker._compile(job)
    assert Path(answer["path"]).read_bytes() == b"code"
    assert answer["conditions"] == [True]
    assert "unstored" in answer


# --- real compiles -------------------------------------------------------------------------------------------------


def _wait_for(function: Callable[[], Any], runs: int = 3, seconds: float = 300.0) -> None:
    """Until ``function`` has run ``runs`` more times with compiled parts."""
    wanted = marid.stats().compiled_runs + runs
    assert _run_until(function, lambda: marid.stats().compiled_runs >= wanted, seconds), marid.stats()


@pytest.mark.conformance
@pytest.mark.usefixtures("compiling")
def test_document_002_only_what_has_changed_of_a_program_is_compiled_again() -> None:
    """Incremental recompilation: its other parts are found on disk, and programs without a difference share them."""
    a, turned = lazy(40, 40), torch.arange(39, -1, -1).to(DEVICE)

    def function(last: Callable[[torch.Tensor], torch.Tensor]) -> None:
        x = (a.exp() + a).tanh() * 2 + 1
        y = x[turned]  # which is in no part
        z = (y.sigmoid() * y - 1).abs() + y
        marid.materialize(last(z[turned]))

    def counts() -> tuple[int, int]:
        stats = marid.stats()
        assert stats.compile_failures == 0
        return stats.parts_compiled, stats.compile_cache_hits

    _wait_for(lambda: function(lambda z: (z.exp() + 3).sqrt() * z))
    assert counts() == (3, 0)
    _wait_for(lambda: function(lambda z: (z.exp() + 3).sqrt() * z.sin()))
    assert counts() == (4, 2)


@pytest.mark.conformance
@pytest.mark.usefixtures("compiling")
def test_compiled_products_of_one_row_are_right() -> None:
    """In all the forms in which they come, with a gate between them that must not be computed once for each sum."""
    x, up, gate, down = (t / 8 for t in (lazy(1, 64), lazy(96, 64), lazy(96, 64), lazy(64, 96)))
    linear, silu = torch.nn.functional.linear, torch.nn.functional.silu

    def function(x: torch.Tensor, up: torch.Tensor, gate: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        y = x + linear((silu(y @ gate.t()) * linear(y.view(1, 1, 64), up)).sum(0), down)
        return (y.tanh() @ up.t()).exp()

    expected = function(*(t.cpu() for t in (x, up, gate, down)))
    _wait_for(lambda: torch.testing.assert_close(function(x, up, gate, down).cpu(), expected))
    assert marid.stats().compile_failures == 0


@pytest.mark.usefixtures("compiling")
@pytest.mark.skipif(the_compiler() is None, reason="there is no C++ compiler")
def test_products_in_parts_are_run_by_the_faster_kernel() -> None:
    """In all the forms in which they come; and with few rows, which are ATen's affair there too."""
    gemm.configure(also_slower=True, share=1.0, uses=0, work=0.0)
    x, batch, few, bias = lazy(64, 48), lazy(3, 32, 64), lazy(4, 48), lazy(64)

    def function(x: torch.Tensor, batch: torch.Tensor, few: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        y = (x.tanh() @ x.t()).sigmoid() * 2 + 1
        y = torch.addmm(bias, y.exp(), y.t()).tanh() - 1
        y = torch.bmm(batch.sin(), y.expand(3, -1, -1)).cos() + torch.nn.functional.linear(batch.abs(), y, bias)
        return y.sum() + (few.exp() @ x.t()).cos().sum() / 7

    try:
        expected = function(*(t.cpu() for t in (x, batch, few, bias)))
        _wait_for(lambda: torch.testing.assert_close(function(x, batch, few, bias).cpu(), expected))
        assert marid.stats().compile_failures == 0
        before = gemm.count()
        _wait_for(lambda: function(x, batch, few, bias).cpu(), runs=3)
        assert gemm.count() >= before + 3 * 4 or gemm.count() == 0  # where BLAS adds up in another order
    finally:
        gemm.configure()


@pytest.mark.skipif(the_compiler() is None, reason="there is no C++ compiler")
def test_a_compiled_chain_is_right_for_other_numbers_and_its_results_are_the_users(compiling: Path) -> None:
    a, b = lazy(70, 30), lazy(70, 30)
    ca, cb = a.cpu(), b.cpu()
    scale, kept = 1.5, []

    def function(a: torch.Tensor, b: torch.Tensor, scale: float) -> tuple[torch.Tensor, ...]:
        y = torch.tanh(a * b + scale) * torch.sigmoid(a)
        return y, (y - b).sum(0), y.t()

    def run() -> None:
        nonlocal scale
        scale += 0.25
        kept.append((scale, function(a, b, scale)))
        del kept[:-5]
        marid.materialize(*kept[-1][1])

    _wait_for(run, runs=6)
    for then, results in kept:
        for got, expected in zip(results, function(ca, cb, then), strict=True):
            torch.testing.assert_close(got.cpu(), expected)
            assert got.stride() == expected.stride()
    stats = marid.stats()
    assert (stats.programs_compiled, stats.compile_workers, stats.compile_failures) == (1, 1, 0)
    assert stats.compile_mismatches == 0
    [entry] = DiskCache(disk.folder(), 1 << 30).entries()
    assert entry[1] > 0
    # A second process, which shares the cache, loads what the first has made.
    text = """
    import torch, marid
    a, b = (torch.randn(70, 30).to("remote_accelerator") for _ in range(2))
    for step in range(8):
        y = torch.tanh(a * b + step * 0.5) * torch.sigmoid(a)
        results = y, (y - b).sum(0), y.t()
        marid.materialize(*results)
    print(marid.stats().compile_cache_hits, marid.stats().compiled_runs > 0, marid.stats().compile_workers)
    """
    environment = {
        **os.environ,
        "MARID_COMPILE": "1",
        "MARID_COMPILE_AFTER": "2",
        "MARID_COMPILE_MS": "0",
        "MARID_IMMEDIATE_BYTES": "0",
        "MARID_CACHE_DIR": str(compiling),
    }
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.stdout.split() == ["1", "True", "0"], ran.stderr


@pytest.mark.conformance
def test_one_more_compile_serves_every_size(compiling: Path) -> None:
    """Sizes from the second on share a form; so do written inputs and their views."""
    weight = torch.nn.Linear(12, 20)
    lazy_weight = torch.nn.Linear(12, 20).to(DEVICE)
    lazy_weight.load_state_dict(weight.state_dict())
    data = torch.randn(16, 12)
    batches = iter(range(10**9))

    def step(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = (module(x).tanh() * 2 - 1).square().sum()
        module.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(0.99).sub_(parameter.grad, alpha=1e-3)
        return loss.detach()

    def run() -> None:
        size = 3 + next(batches) % 11
        expected = step(weight, data[:size])
        got = step(lazy_weight, data[:size].to(DEVICE))
        torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-4)

    run()
    _wait_for(run, runs=25)
    assert marid.stats().programs_compiled <= 2
    assert marid.stats().compile_mismatches == 0
    for parameter, expected in zip(lazy_weight.parameters(), weight.parameters(), strict=True):
        torch.testing.assert_close(parameter.detach().cpu(), expected.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.conformance
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_a_training_step_with_a_changing_learning_rate(compiling: Path, optimizer: str) -> None:
    def make(device: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        layers = torch.nn.Linear(32, 64), torch.nn.LayerNorm(64), torch.nn.GELU(), torch.nn.Linear(64, 16)
        module = torch.nn.Sequential(*layers).to(device)
        return module, getattr(torch.optim, optimizer)(module.parameters(), lr=1e-2)

    eager, compiled = make("cpu"), make(DEVICE)
    data, steps = torch.randn(40, 16, 32), iter(range(10**9))

    def step(module: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, number: int) -> float:
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + number % 50)
        loss = (module(x) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def run() -> None:
        number = next(steps)
        x = data[number % 40]
        expected = step(*eager, x, number)
        assert step(*compiled, x.to(DEVICE), number) == pytest.approx(expected, rel=1e-3)

    _wait_for(run, runs=12, seconds=600)
    assert marid.stats().compile_mismatches == 0
    for parameter, expected in zip(compiled[0].parameters(), eager[0].parameters(), strict=True):
        torch.testing.assert_close(parameter.detach().cpu(), expected.detach(), rtol=1e-2, atol=1e-3)


@pytest.mark.conformance
def test_a_recurrent_cell(compiling: Path) -> None:
    """Its part is used, and not declined when it runs."""
    eager, cell = torch.nn.LSTMCell(8, 16), torch.nn.LSTMCell(8, 16).to(DEVICE)
    cell.load_state_dict(eager.state_dict())
    x, state = torch.randn(3, 8), (torch.randn(3, 16), torch.randn(3, 16))
    given = torch.utils._pytree.tree_map(lambda t: t.to(DEVICE), (x, state))

    def run() -> None:
        with torch.no_grad():
            torch.testing.assert_close(torch.utils._pytree.tree_map(lambda t: t.cpu(), cell(*given)), eager(x, state))

    _wait_for(run)
    stats = marid.stats()
    assert (stats.compile_mismatches, stats.compile_failures) == (0, 0), stats


@pytest.mark.conformance
def test_a_transformer_forward(compiling: Path) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, activation="gelu", batch_first=True, norm_first=True)
    layer.train()
    layer.dropout.p = layer.dropout1.p = layer.dropout2.p = layer.self_attn.dropout = 0.0
    lazy_layer = torch.nn.TransformerEncoderLayer(32, 4, 64, activation="gelu", batch_first=True, norm_first=True)
    lazy_layer.load_state_dict(layer.state_dict())
    lazy_layer = lazy_layer.to(DEVICE)
    lazy_layer.dropout.p = lazy_layer.dropout1.p = lazy_layer.dropout2.p = lazy_layer.self_attn.dropout = 0.0
    x = torch.randn(2, 10, 32)
    expected = layer(x)

    def run() -> None:
        torch.testing.assert_close(lazy_layer(x.to(DEVICE)).cpu(), expected)

    _wait_for(run, seconds=600)
    assert marid.stats().compile_mismatches == 0


def test_inductor_is_told_which_vector_unit_there_is() -> None:
    """It takes the one of PyTorch's own kernels, without building programs to find out."""
    from torch._inductor import config, cpu_vec_isa

    if lower._has_vector_unit() is None:
        pytest.skip("neither AVX2 nor AVX-512, or no compiler that knows them")
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    try:
        with config.patch({"cpp.vec_isa_ok": True}):
            width = cpu_vec_isa.pick_vec_isa().bit_width()
    finally:
        cpu_vec_isa.valid_vec_isa_list.cache_clear()
    assert width == {"AVX2": 256, "AVX512": 512}[torch.backends.cpu.get_cpu_capability()]
