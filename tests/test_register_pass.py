"""Passes of users: registration, what they see and may do, and that a bad one breaks nothing."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import marid
from marid.built import the_compiler
from marid.execute.compiled import compile_request, workers
from marid.execute.compiled.compile_request import CompileRequest, request_for
from marid.execute.compiled.passes import registry
from marid.execute.compiled.passes.registry import _registered
from marid.execute.compiled.workers import Job
from tests.helpers import DEVICE, assert_same
from tests.partitions import bound, change, compute, operators

pytestmark = pytest.mark.in_process("passes of the user run in this process")

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _no_passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(marid.settings, "immediate_bytes", 0)
    compile_request._complaints.clear()
    yield
    for name in list(_registered):
        marid.unregister_pass(name)


X = torch.linspace(-1, 1, 12).view(3, 4)
PLAIN = ["exp", "add", "select", "fill_", "log", "mul"]


def _work(x: torch.Tensor) -> torch.Tensor:
    y = x.exp() + 1
    y[0].fill_(2)
    return y.log() * 3


def _asked(work: Any = _work) -> tuple[CompileRequest, list[torch.Tensor]]:
    """What would be compiled, and what it computes."""
    x = X.to(DEVICE)
    marid.materialize(x)
    [one] = bound(lambda: work(x).cpu())
    [part] = one.parts()
    inputs = one.inputs_of(part)
    asks = change(one, part)
    marid.materialize(x + 1)  # says what there was to say
    return asks, compute(asks, one, inputs)


def _run(work: Any = _work) -> list[str]:
    """The operators that would be compiled."""
    return operators(_asked(work)[0].code)


def test_a_pass_rewrites_the_graph() -> None:
    """With plain FX: no node has to be described."""

    @marid.register_pass
    def turn(rewriter: Any) -> None:
        for node in rewriter.graph.find_nodes(op="call_function", target=aten.sin.default):
            with rewriter.graph.inserting_before(node):
                new = rewriter.graph.call_function(aten.cos.default, (node.args[0],))
                new = rewriter.graph.call_function(aten.neg.default, (new,))
            node.replace_all_uses_with(new)
            rewriter.graph.erase_node(node)

    assert _run(lambda x: (x * 2).exp().tanh()) == ["mul", "exp", "tanh"]
    assert not marid.stats().passes
    asks, [found] = _asked(lambda x: x.exp().sin() * 2)
    assert operators(asks.code) == ["exp", "cos", "neg", "mul"]
    assert operators(asks.fits) == ["exp", "sin", "mul"]
    assert torch.equal(found, -X.exp().cos() * 2)
    assert marid.stats().passes == {"turn": 1}


def test_what_a_pass_sees() -> None:
    """Meta tensors with this run's shapes, ATen operators in program order, writes as they are; numbers on demand."""
    seen: list[Any] = []

    @marid.register_pass(name="looks")
    def look(rewriter: Any) -> int:
        for node in rewriter.calls():
            if "val" in node.meta:
                seen.append((node.target, tuple(node.meta["val"].shape), node.meta["val"].device.type))
            if node.target is aten.add.Tensor:
                seen.append(rewriter.number(node.args[1]))
        return 0

    assert _run() == PLAIN
    assert (aten.exp.default, (3, 4), "meta") in seen
    assert 1 in seen
    marid.unregister_pass("looks")
    count = len(seen)
    _run()
    assert len(seen) == count


def test_a_pass_may_rewrite_and_replace() -> None:
    """By the rewriter's own means; a number that it asked for is part of the code."""

    @marid.register_pass
    def tidy(rewriter: Any) -> int:
        changed = 0
        for node in rewriter.calls():
            if node.target is aten.mul.Tensor and rewriter.is_number(node.args[1], 2):
                rewriter.rewrite(node, aten.add.Tensor, (node.args[0], node.args[0]))
                changed += 1
        return changed

    asks, [found] = _asked(lambda x: (x * 2).exp() * 2 * 3)
    assert operators(asks.code) == ["add", "exp", "add", "mul"]
    assert torch.equal(found, (X * 2).exp() * 2 * 3)
    assert len(asks.part.baked) == 2
    assert len(asks.part.numbers) == 1
    assert marid.stats().passes["tidy"] == 2


def test_what_a_pass_changed_is_for_the_sizes_that_it_saw() -> None:
    """What it concluded from them nobody knows; what it left alone is for others too."""

    def examples(work: Any) -> tuple[Any, Any, list[Any]]:
        found = []
        for rows in (3, 5):
            x = torch.rand(rows, 4).to(DEVICE)
            marid.materialize(x)
            found += bound(lambda x=x: work(x).cpu())
        [part] = found[0].parts()
        return part, found[0].program, [(one.specs, one.params) for one in found]

    @marid.register_pass
    def to_cos(rewriter: Any) -> None:
        for node in rewriter.graph.find_nodes(op="call_function", target=aten.sin.default):
            node.target = aten.cos.default

    asks = request_for(*examples(lambda x: x.exp().sin() * 2), set())
    assert asks is not None
    assert (asks.for_any_size, asks.symbols) == (False, 0)
    asks = request_for(*examples(lambda x: x.exp().tanh() * 2), set())
    assert asks is not None
    assert (asks.for_any_size, asks.symbols) == (True, 1)


def test_what_is_compiled_follows_the_passes(compiling: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was asked for before is asked for again when a pass comes or goes."""
    requests: list[list[str]] = []

    def submit(request: dict[str, Any]) -> Job:
        requests.append(operators(request["structure"]["part"]))
        return Job(request)

    monkeypatch.setattr(workers.compiler, "submit", submit)
    x = X.to(DEVICE)

    def run() -> None:
        for _ in range(6):
            assert torch.equal((x.exp().sin() * 2).cpu(), X.exp().sin() * 2)

    run()

    @marid.register_pass
    def to_cos(rewriter: Any) -> None:
        for node in rewriter.graph.find_nodes(op="call_function", target=aten.sin.default):
            node.target = aten.cos.default

    run()
    marid.unregister_pass("to_cos")
    run()
    assert requests == [["exp", "sin", "mul"], ["exp", "cos", "mul"], ["exp", "sin", "mul"]]


@pytest.mark.skipif(the_compiler() is None, reason="there is no C++ compiler")
def test_a_pass_that_computes_something_else_is_found_out(compiling: Any) -> None:
    """Before anything of it is used: what is compiled is compared with what was recorded."""

    @marid.register_pass
    def to_cos(rewriter: Any) -> None:
        for node in rewriter.graph.find_nodes(op="call_function", target=aten.sin.default):
            node.target = aten.cos.default

    x, end = X.to(DEVICE), time.monotonic() + 200
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        while not marid.stats().compile_mismatches and time.monotonic() < end:
            assert torch.equal((x.exp().sin() * 2).cpu(), X.exp().sin() * 2)
            time.sleep(0.05)
    assert any("differs from the flat tier" in str(warning.message) for warning in caught)
    assert marid.stats().compiled_runs == 0


def _raises(rewriter: Any) -> None:
    raise ZeroDivisionError("no")


def _removes_a_write(rewriter: Any) -> None:
    for node in rewriter.graph.find_nodes(op="call_function", target=aten.fill_.Tensor):
        rewriter.graph.erase_node(node)
    for node in rewriter.graph.find_nodes(op="call_function", target=aten.fill_.Scalar):
        rewriter.graph.erase_node(node)
    for node in rewriter.graph.find_nodes(op="call_function", target=aten.copy_.default):
        rewriter.graph.erase_node(node)


def _adds_a_write(rewriter: Any) -> None:
    node = next(rewriter.calls())
    with rewriter.graph.inserting_after(node):
        rewriter.graph.call_function(aten.zero_.default, (node,))


def _uses_before(rewriter: Any) -> None:
    first, *_, last = list(rewriter.calls())
    first.args = (last,)


def _loses_the_output(rewriter: Any) -> None:
    rewriter.graph.output_node().args = ((),)


def _gives_an_input_out(rewriter: Any) -> None:
    first = next(iter(rewriter.graph.nodes))
    rewriter.graph.output_node().args = ((first,),)


def _calls_python(rewriter: Any) -> None:
    node = next(rewriter.calls())
    node.target = torch.exp


def _reads_no_tensor(rewriter: Any) -> None:
    next(rewriter.calls()).args = (None,)


def _changes_the_layout(rewriter: Any) -> None:
    *_, last = rewriter.calls()
    with rewriter.graph.inserting_after(last):
        turned = rewriter.graph.call_function(aten.t.default, (last,))
    last.replace_all_uses_with(turned, delete_user_cb=lambda user: user is not turned)


def _gives_a_view_of_an_input_out(rewriter: Any) -> None:
    first = next(iter(rewriter.graph.nodes))
    *_, last = rewriter.calls()
    with rewriter.graph.inserting_after(last):
        shown = rewriter.graph.call_function(aten.view.default, (first, [3, 4]))
    rewriter.graph.output_node().args = ((shown,),)


def _brings_in_what_is_not_compiled(rewriter: Any) -> None:
    next(rewriter.calls()).target = aten.erfinv.default


def _returns_nonsense(rewriter: Any) -> Any:
    return "three"


@pytest.mark.parametrize(
    "change",
    [
        _raises,
        _removes_a_write,
        _adds_a_write,
        _uses_before,
        _loses_the_output,
        _gives_an_input_out,
        _gives_a_view_of_an_input_out,
        _calls_python,
        _reads_no_tensor,
        _changes_the_layout,
        _brings_in_what_is_not_compiled,
        _returns_nonsense,
    ],
)
def test_a_bad_pass_breaks_nothing(change: Callable[[Any], Any]) -> None:
    """What was recorded is compiled; the pass is named in one warning, at the user's line."""
    marid.register_pass(change, name="mine")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert _run() == PLAIN
        assert _run() == PLAIN
    (warning,) = [w for w in caught if "mine" in str(w.message)]
    assert "compiled as it was recorded" in str(warning.message)
    assert "test_register_pass" in warning.filename


def test_a_bug_in_a_pass_of_marid_costs_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor the compiled code of what was recorded."""
    monkeypatch.setattr(marid.settings, "fast_math", True)
    monkeypatch.setattr(registry, "_OWN", (registry.Pass("broken", lambda _: 1 // 0),))
    with pytest.warns(UserWarning, match="'broken' failed: ZeroDivisionError.*compiled as it was recorded"):
        assert _run() == PLAIN


def test_a_warning_that_is_an_error_leaves_the_results(compiling: Any) -> None:
    """As with warnings of kernels."""
    marid.register_pass(_raises)
    x = X.to(DEVICE)
    marid.materialize(x)
    raised = 0
    for _ in range(8):
        y = x.exp().sin() * 2
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                marid.materialize(y)
            except UserWarning:
                raised += 1
        assert_same(y, X.exp().sin() * 2)
    assert raised == 1


def test_conditions_are_checked() -> None:
    """What a pass requires before it, what it promises after it."""
    marid.register_pass(lambda rewriter: 0, name="needs", requires=(lambda rewriter: "not today",))
    with pytest.warns(UserWarning, match="'needs' failed: before it, .*not today"):
        _run()
    marid.unregister_pass("needs")
    marid.register_pass(lambda rewriter: 0, name="promises", ensures=(lambda rewriter: str(1 / 0),))
    with pytest.warns(UserWarning, match="'promises' failed: after it, ZeroDivisionError"):
        _run()


def test_misuse() -> None:
    """Is said where it happens."""
    with pytest.raises(TypeError, match="takes a function of one Rewriter, but got int"):
        marid.register_pass(3)  # pyright: ignore
    with pytest.raises(TypeError, match="is not called so"):
        marid.register_pass(lambda: 0)  # pyright: ignore
    with pytest.raises(TypeError, match="a condition is a function"):
        marid.register_pass(lambda rewriter: 0, name="x", requires=("a",))  # pyright: ignore
    marid.register_pass(lambda rewriter: 0, name="x")
    with pytest.raises(ValueError, match="'x' already"):
        marid.register_pass(lambda rewriter: 0, name="x")
    with pytest.raises(ValueError, match="'attention' already"):
        marid.register_pass(lambda rewriter: 0, name="attention")
    with pytest.raises(ValueError, match="no registered pass named 'y'"):
        marid.unregister_pass("y")
    assert _raises is marid.register_pass(_raises)
    assert _removes_a_write is marid.register_pass(name="named")(_removes_a_write)
