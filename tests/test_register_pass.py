"""Passes of users: registration, what they see and may do, and that a bad one breaks nothing."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import marid
from marid.execute import forms
from marid.frontend.engines import local_engine as engine
from marid.optimize.passes import registry
from marid.optimize.passes.registry import _registered
from tests.helpers import DEVICE, assert_same

pytestmark = pytest.mark.in_process("passes of the user run in this process")

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _every_program(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    engine.programs.clear()
    monkeypatch.setattr(marid.settings, "pass_instructions", 1)
    forms._complaints.clear()
    yield
    for name in list(_registered):
        marid.unregister_pass(name)
    engine.programs.clear()


X = torch.linspace(-1, 1, 12).view(3, 4)


def _work(x: torch.Tensor) -> torch.Tensor:
    y = x.exp() + 1
    y[0].fill_(2)
    return y.log() * 3


def _run(times: int = 4, work: Any = _work) -> list[str]:
    """The operators of the program after the passes; results are the CPU's."""
    x = X.to(DEVICE)
    marid.materialize(x)
    for _ in range(times):
        assert_same(work(x), work(X))
    largest = max(engine.programs._programs.values(), key=lambda program: len(program.program.instructions))
    improved = [form.improved for form in largest.forms if form.improved is not None]
    program = improved[-1].program if improved else largest.program
    return [instruction.op.name.removeprefix("aten::") for instruction in program.instructions]


def test_a_pass_rewrites_the_graph() -> None:
    """With plain FX: no node has to be described, and what is not read any more goes."""

    @marid.register_pass
    def expm1(rewriter: Any) -> None:
        for node in rewriter.graph.find_nodes(op="call_function", target=aten.sin.default):
            with rewriter.graph.inserting_before(node):
                new = rewriter.graph.call_function(aten.cos.default, (node.args[0],))
                new = rewriter.graph.call_function(aten.neg.default, (new,))
            node.replace_all_uses_with(new)

    def work(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).exp().tanh()

    assert _run(work=work) == ["mul", "exp", "tanh"]
    x = X.to(DEVICE)
    found = [(x.exp().sin() * 2).cpu() for _ in range(4)]
    assert torch.equal(found[0], X.exp().sin() * 2)
    assert torch.equal(found[3], -X.exp().cos() * 2)
    assert marid.stats().passes == {"expm1": 1}


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

    assert _run() == ["exp", "add", "select", "fill_", "log", "mul"]
    assert (aten.exp.default, (3, 4), "meta") in seen
    assert 1 in seen
    marid.unregister_pass("looks")
    count = len(seen)
    _run()
    assert len(seen) == count


def test_a_pass_may_rewrite_and_replace() -> None:
    """By the rewriter's own means."""

    @marid.register_pass
    def tidy(rewriter: Any) -> int:
        changed = 0
        for node in rewriter.calls():
            if node.target is aten.mul.Tensor and rewriter.is_number(node.args[1], 2):
                rewriter.rewrite(node, aten.add.Tensor, (node.args[0], node.args[0]))
                changed += 1
        return changed

    def work(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).exp() * 2

    assert _run(work=work) == ["add", "exp", "add"]
    assert marid.stats().passes["tidy"] == 2


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


def _breaks_order(rewriter: Any) -> None:
    next(rewriter.calls()).meta["index"] = 5


def _returns_nonsense(rewriter: Any) -> Any:
    return "three"


def _reads_too_late(rewriter: Any) -> None:
    # the exponential is computed after the write that it must not see
    calls = list(rewriter.calls())
    write = next(node for node in calls if node.target is aten.add_.Tensor)
    exponential = next(node for node in calls if node.target is aten.exp.default)
    with rewriter.graph.inserting_after(write):
        late = rewriter.graph.call_function(aten.exp.default, exponential.args)
    exponential.replace_all_uses_with(late)


@pytest.mark.parametrize(
    "change",
    [
        _raises,
        _removes_a_write,
        _adds_a_write,
        _uses_before,
        _loses_the_output,
        _gives_an_input_out,
        _calls_python,
        _breaks_order,
        _returns_nonsense,
    ],
)
@pytest.mark.parametrize("verify", [True, False])
def test_a_bad_pass_breaks_nothing(change: Any, verify: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program runs as it was recorded; the pass is named in one warning, at the user's line."""
    monkeypatch.setattr(marid.settings, "verify_passes", verify)
    marid.register_pass(change, name="mine")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert _run() == ["exp", "add", "select", "fill_", "log", "mul"]
        assert _run() == ["exp", "add", "select", "fill_", "log", "mul"]
    (warning,) = [w for w in caught if "mine" in str(w.message)]
    assert "runs as it was recorded" in str(warning.message)
    assert "test_register_pass" in warning.filename or "helpers" in warning.filename


def test_a_value_that_could_not_be_computed_again_is_refused() -> None:
    """A pass that moves a read behind a write would give another value: what is recorded says so."""
    marid.register_pass(_reads_too_late)

    def work(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        z = y.exp()
        y.add_(1)
        return z + y

    with pytest.warns(UserWarning, match="_reads_too_late.*cannot be computed again"):
        assert _run(work=work) == ["mul", "exp", "add_", "add"]


@pytest.mark.parametrize("where", ["change", "lower"])
def test_a_bug_in_a_pass_of_marid_costs_no_result(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of tests; in tests it is raised."""
    if where == "lower":
        monkeypatch.setattr(registry, "lower", lambda *_: 1 / 0)
    else:
        monkeypatch.setattr(registry, "_OWN", (registry.Pass("broken", lambda _: 1 // 0),))

    def work(x: torch.Tensor) -> torch.Tensor:
        return x.t().t().exp()

    monkeypatch.setattr(marid.settings, "verify_passes", False)
    with pytest.warns(UserWarning, match="division.*runs as it was recorded"):
        assert _run(work=work) == ["t", "t", "exp"]
    monkeypatch.setattr(marid.settings, "verify_passes", True)
    with pytest.raises(registry.PassFailed):
        _run(work=work)


def test_a_warning_that_is_an_error_leaves_the_results() -> None:
    """As with warnings of kernels."""
    marid.register_pass(_raises)
    x = X.to(DEVICE)
    marid.materialize(x)
    raised = 0
    for _ in range(4):
        y = x.exp() * 2
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                marid.materialize(y)
            except UserWarning:
                raised += 1
        assert_same(y, X.exp() * 2)
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
    with pytest.raises(ValueError, match="'dead code' already"):
        marid.register_pass(lambda rewriter: 0, name="dead code")
    with pytest.raises(ValueError, match="no registered pass named 'y'"):
        marid.unregister_pass("y")
    assert _raises is marid.register_pass(_raises)
    assert _removes_a_write is marid.register_pass(name="named")(_removes_a_write)
