"""``make demo``: what it compares, and that it fails where losses are not what the mode promises."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import demo

PRINTS = "for i, loss in enumerate({losses}): print(f'step {{i + 1}}/3  loss {{loss}}')"


def _run(losses: list[float]) -> demo.Run:
    return demo.Run(losses, first=2.0, last=4.0, total=5.0, processor=6.0, memory=700.0)


@pytest.mark.parametrize(
    ("losses", "difference"),
    [
        ([2.0, 1.0], 0.0),
        ([2.0, 1.5], 0.5),
        ([2.0, float("nan")], float("inf")),
        ([2.0], float("inf")),
    ],
    ids=["the same", "another", "no number", "a step is missing"],
)
def test_the_largest_difference(losses: list[float], difference: float) -> None:
    assert demo.largest_difference([_run([2.0, 1.0]), _run(losses)], [2.0, 1.0]) == difference


@pytest.mark.parametrize("width", [40, 80])
def test_nothing_of_the_table_is_cut(width: int) -> None:
    console = Console(width=width)
    with console.capture() as shown:
        console.print(demo.table([_run([0.3, 0.0149793318])], [_run([0.3, 0.0149793319])]))
    assert "…" not in shown.get()
    for text in ("0.0149793318", "0.0149793319", "6.7e-09", "largest diff.", "5.0", "0.50", "700"):
        assert text in shown.get()


@pytest.mark.parametrize("losses", [[0.5, 0.25, 0.125], [0.5, 0.25, 0.1250001]], ids=["same", "other"])
def test_it_fails_where_losses_differ(
    losses: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    eager = [sys.executable, "-c", PRINTS.format(losses=[0.5, 0.25, 0.125])]
    monkeypatch.setattr(demo, "COMMANDS", {"eager": eager, "Marid": [*eager[:2], PRINTS.format(losses=losses)]})
    monkeypatch.setattr(demo, "REPORTING", [sys.executable, "-c", "import sys; open(sys.argv[2], 'w').close()"])
    monkeypatch.setattr(demo, "REPORT", tmp_path / "report.html")
    monkeypatch.setattr(sys, "argv", ["demo"])
    if losses[2] == 0.125:
        demo.main()
        assert "report.html" in capsys.readouterr().out
    else:
        with pytest.raises(SystemExit, match="the losses differ by 8"):
            demo.main()
