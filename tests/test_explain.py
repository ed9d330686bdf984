"""``marid.explain()``: what was waited for, built again, run at once and is held, each by its line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch

import marid
from marid.frontend.engines import local_engine as engine
from marid.report import builds as builds_module
from marid.report.differences import Recompile
from tests.helpers import DEVICE


@pytest.fixture(autouse=True)
def _no_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs and what is remembered of them are the process's: other tests have built some. Everything is one."""
    monkeypatch.setattr(marid.settings, "immediate_bytes", 0)
    engine.programs.clear()  # pyright: ignore[reportAttributeAccessIssue]
    builds_module.builds.__init__()


def ready(*shape: int) -> torch.Tensor:
    """A tensor that has run, so that what is recorded on it is the same from the first time on."""
    x = torch.ones(*shape, device=DEVICE)
    marid.materialize(x)
    return x


def line(marker: str) -> str:
    """``file:line`` of the line in this file that ends in ``# marker``."""
    lines = Path(__file__).read_text().splitlines()
    (found,) = [number for number, text in enumerate(lines, 1) if text.endswith(f"# {marker}")]
    return f"{__file__}:{found}"


def last() -> Recompile:
    return marid.explain().recompiles[-1]


def test_a_boolean_that_changed_is_named_with_its_line() -> None:
    x = ready(3, 4)
    for step in range(4):
        y = x.mul(2.0).sum(0, keepdim=step == 2)  # sum
        y.tolist()  # read
    assert len(marid.explain().recompiles) == 1
    one = last()
    assert (one.source, one.source_before) == (line("read"), line("read"))
    (difference,) = one.differences
    assert difference.kind == "constant"
    assert difference.text == "`keepdim` False -> True in aten::sum"
    assert (difference.source_before, difference.source) == (line("sum"), line("sum"))
    assert str(difference) == f"`keepdim` False -> True in aten::sum, {line('sum')}"


def test_numbers_and_sizes_are_no_recompiles() -> None:
    for step in range(6):
        x = torch.ones(3 + step, device=DEVICE)
        x.mul(0.1 * step).add(step).sum().item()
    explanation = marid.explain()
    assert explanation.programs_built == 1
    assert explanation.recompiles == []


def test_an_operator_that_changed_has_both_lines() -> None:
    x = ready(3)
    for step in range(2):
        y = x * 3
        if step:
            y = y.tanh()  # tanh
        else:
            y = y.sigmoid()  # sigmoid
        (y + 1).sum().item()
    (difference,) = last().differences
    assert (difference.kind, difference.text) == ("operator", "aten::sigmoid -> aten::tanh")
    assert (difference.source_before, difference.source) == (line("sigmoid"), line("tanh"))
    assert str(difference).endswith(f"{line('sigmoid')} -> {line('tanh')}")


def test_more_and_fewer_operations_are_counted_by_line() -> None:
    x = ready(3)
    for count in (2, 5, 2, 1):
        y = x + 1
        for _ in range(count):
            y = y.exp().neg()  # loop
        y.sum().item()
    more, fewer = marid.explain().recompiles
    (difference,) = more.differences
    assert (difference.kind, difference.source, difference.source_before) == ("added", line("loop"), None)
    assert difference.text in (
        "6 more operations: aten::exp x3, aten::neg x3",
        "6 more operations: aten::neg x3, aten::exp x3",
    )
    assert (more.operations, more.operations_before) == (12, 6)
    (difference,) = fewer.differences
    assert (difference.kind, difference.source_before) == ("removed", line("loop"))
    assert difference.text.startswith("2 fewer operations: ")


def test_a_result_that_somebody_holds_now() -> None:
    x = ready(3)
    kept = []
    for step in range(3):
        y = x * 2  # held
        if step == 2:
            kept.append(y)
        total = (y + 1).sum()
        del y
        total.item()
    (difference,) = last().differences
    assert (difference.kind, difference.source) == ("result", line("held"))
    assert difference.text.startswith("result of aten::mul is held now, and was not")


def test_other_tensors_that_meet() -> None:
    x, y = ready(3), ready(3)
    for a, b in ((x, y), (x, x)):
        a.sub(b).sum().item()  # subtraction
    (difference,) = last().differences
    assert difference.kind == "input"
    assert difference.text.startswith("`other` of aten::sub is")
    assert difference.source == line("subtraction")
    for swap in (False, True):
        a, b = x.sin(), y.cos()
        (b - a if swap else a - b).sum().item()
    (difference,) = last().differences
    assert difference.kind == "input"
    assert "is the result of aten::cos" in difference.text
    assert "was the result of aten::sin" in difference.text


def test_another_order_of_the_same_operations() -> None:
    x = ready(3)
    for swap in (False, True):
        if swap:
            b = x.cos()  # now
            a = x.sin()
        else:
            a = x.sin()
            b = x.cos()  # then
        (a * b).exp().sum().item()
    (difference,) = last().differences
    assert difference.kind == "order"
    assert difference.text.endswith(("aten::sin moved", "aten::cos moved"))


def test_a_moved_line_alone_is_not_blamed() -> None:
    """The same operator on another line is the same program's; what differs is said."""
    x = ready(2, 3)
    for step in range(2):
        if step:
            y = x.exp()
        else:
            y = x.exp()
        y.sum(1, keepdim=bool(step)).tolist()  # differs
    (difference,) = last().differences
    assert difference.text == "`keepdim` False -> True in aten::sum"
    assert difference.source == line("differs")


def test_an_overload_that_changed() -> None:
    x = ready(3)
    for exponent in (2, x):
        x.exp().pow(exponent).sum().item()
    kinds = {difference.kind for difference in last().differences}
    assert kinds == {"operator"}
    assert "aten.pow.Tensor_Scalar -> aten.pow.Tensor_Tensor" in last().differences[0].text


def test_the_same_difference_in_many_layers_is_said_once() -> None:
    x = ready(2, 2)
    for keep in (False, True):
        y = x
        for _ in range(5):
            y = y + x.sum(0, keepdim=keep)  # layer
        y.sum().item()
    (difference,) = last().differences
    assert difference.text == "`keepdim` False -> True in aten::sum (5 times)"


def test_a_number_that_is_given_for_the_next_argument_is_not_blamed() -> None:
    """PyTorch leaves out the dropout probability where ``is_causal`` has its default too."""
    q = ready(1, 2, 4, 8)
    for causal in (False, True):
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=causal).sum().item()
    (difference,) = last().differences
    assert difference.text.startswith("`is_causal` False -> True in ")
    x = ready(3)
    for alpha in (1, 2):
        torch.add(x.exp(), x, alpha=alpha).sum().item()
    (difference,) = last().differences
    assert difference.text == "`alpha` 1 -> a number in aten::add"


def test_a_program_that_was_dropped_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marid.settings, "cache_programs", 1)
    x = ready(3)
    for step in range(3):
        (x.erf() if step % 2 else x.erfc().neg()).sum().item()
    (difference,) = last().differences
    assert difference.kind == "evicted"


def test_new_work_is_no_recompile() -> None:
    x = ready(30)
    for _ in range(10):
        x = x.exp().neg()
    x.sum().item()
    for _ in range(10):
        x = x.sin().cos()
    x.sum().item()
    explanation = marid.explain()
    assert explanation.programs_built == 3
    assert explanation.recompiles == []


def test_reset_forgets_recompiles_but_compares_with_what_was() -> None:
    x = ready(3, 2)

    def work(keep: bool) -> None:
        x.exp().sum(0, keepdim=keep).tolist()

    work(False)
    work(True)
    assert len(marid.explain().recompiles) == 1
    marid.reset_stats()
    assert marid.explain().recompiles == []
    x.exp().log().sum(0, keepdim=True).tolist()  # another line, not much in common
    assert marid.explain().recompiles == []
    marid.reset_stats()

    def more() -> Any:
        return x.exp().sin().sum(0, keepdim=False)

    for _ in range(2):
        more().tolist()
    work(True)
    assert marid.explain().recompiles == []


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builds_module, "_PROGRAMS", 3)
    monkeypatch.setattr(builds_module, "_INSTRUCTIONS", 40)
    x = ready(3)
    for count in range(1, 20):
        y = x
        for _ in range(count):
            y = y.cosh()
        y.sum().item()
        kept = builds_module.builds.kept()
        assert len(kept) <= 3
        assert len(kept) == 1 or sum(len(build.program.instructions) for build in kept) <= 40
    assert len(marid.explain().recompiles) <= 3


def test_nothing_recorded_is_kept_alive(nothing_alive: None) -> None:
    """A record of a node would hold its value, and make it a result."""
    x = ready(1000)
    x.exp().neg().sum().item()
    assert {type(site).__name__ for build in builds_module.builds.kept() for site in build.sites} <= {
        "Site",
        "NoneType",
    }
    before = torch.remote_accelerator.memory_allocated()  # pyright: ignore[reportAttributeAccessIssue]
    x.exp().neg().sum().item()
    marid.explain()
    assert torch.remote_accelerator.memory_allocated() <= before  # pyright: ignore[reportAttributeAccessIssue]


def test_fallbacks_have_line_and_reason() -> None:
    x = torch.tensor([1.0, 0.0, 2.0], device=DEVICE)
    for _ in range(3):
        x.nonzero()  # nonzero
    (one,) = [f for f in marid.explain().fallbacks if f.operator == "aten::nonzero"]
    assert (one.count, one.source) == (3, line("nonzero"))
    assert "depends on data" in one.reason


def test_automatic_cuts_have_their_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marid.settings, "max_pending_nodes", 100)
    x = ready(3)
    kept = [x]
    for _ in range(300):
        kept += [x + 1]  # cut
    explanation = marid.explain()
    assert sum(cut.count for cut in explanation.automatic_cuts) == marid.stats().automatic_cuts > 0
    assert [cut.source for cut in explanation.automatic_cuts] == [line("cut")]


def test_every_byte_has_a_line(nothing_alive: None) -> None:
    before = {one.source: one.nbytes for one in marid.explain().resident}
    big = torch.ones(1000, 10, device=DEVICE)  # big
    view = big[5:]
    small = [torch.full((10,), 3.0, device=DEVICE) for _ in range(3)]  # small
    marid.materialize(big, view, *small)
    big.add_(1)
    big.sum().item()
    explanation = marid.explain()
    held = {one.source: one for one in explanation.resident}
    assert held[line("big")].nbytes == 40_000
    assert held[line("big")].tensors == 1
    assert (held[line("small")].nbytes, held[line("small")].tensors) == (120, 3)
    allocated = torch.remote_accelerator.memory_allocated()  # pyright: ignore[reportAttributeAccessIssue]
    assert sum(one.nbytes for one in explanation.resident) == allocated
    assert line("big") not in before
    del big, view
    assert line("big") not in {one.source for one in marid.explain().resident}


def test_it_prints_with_the_text_of_the_lines() -> None:
    x = ready(3, 4)
    for step in range(3):
        y = x.mul(2.0).sum(0, keepdim=step == 2)
        y.tolist()
    x.nonzero()
    text = str(marid.explain())
    assert "y = x.mul(2.0).sum(0, keepdim=step == 2)" in text
    assert "`keepdim` False -> True in aten::sum" in text
    assert "y.tolist()" in text
    assert "memory held: " in text
    assert "aten::nonzero" in text
    assert repr(marid.explain()).startswith("marid")
    assert marid.explain()._repr_html_().startswith("<pre style=")
    assert "keepdim=step == 2" in marid.explain()._repr_html_()
    assert "->" not in marid.explain()._repr_html_()  # escaped


def test_an_empty_explanation_prints() -> None:
    marid.reset_stats()
    explanation = marid.explain()
    assert (explanation.syncs, explanation.fallbacks, explanation.automatic_cuts) == ([], [], [])
    assert "waits: 0" in str(explanation)


def test_lines_without_a_file() -> None:
    """Code of a notebook, or of ``exec``: a name that is no path, and text that is gone."""
    code = "import marid, torch\nx = torch.ones(3, device='remote_accelerator')\nmarid.materialize(x)\n"
    code += "for k in (0, 1):\n    x.sum(0, bool(k)).tolist()\n"
    compiled: CodeType = compile(code, "<cell [1]>", "exec")
    exec(compiled, {})
    assert last().differences[0].source == "<cell [1]>:5"
    assert "<cell [1]>:5" in str(marid.explain())


def test_a_script_is_explained_at_its_end(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\nx = torch.ones(3)\nx.tolist()\nfor k in (0, 1):\n    print((x * 2).sum(0, bool(k)).tolist())\n"
    )
    got = subprocess.run(
        [sys.executable, "-m", "marid", "run", "--explain", str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (got.returncode, got.stdout) == (0, "6.0\n[6.0]\n")
    assert "`keepdim` False -> True in aten::sum" in got.stderr
    assert "memory held" in got.stderr
    assert "peak memory" not in got.stderr
