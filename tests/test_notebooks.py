"""What notebooks show: HTML in which everything is escaped, and for which nothing runs."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
import torch

import marid
from tests.helpers import DEVICE

_VOID = {"br", "hr"}


class _Checked(HTMLParser):
    """That every element is closed, in order; and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.seen: set[str] = set()
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.add(tag)
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_nothing_runs_for_being_shown() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(3, 2)).to(DEVICE)
    y = layer(torch.ones(4, 3, device=DEVICE))
    before = marid.epoch(), marid.stats().pending_nodes
    shown = _Checked(y._repr_html_())
    assert {"LazyTensor", "not computed", "[4, 2]", "float32", "aten::addmm", "0"} <= set(shown.texts)
    assert any(text.startswith(f"{__file__}:") for text in shown.texts)
    graph = _Checked(marid.graph(y)._repr_html_())
    assert {"aten::addmm", "aten::ones", "forward"} <= set(graph.texts)
    _Checked(marid.stats()._repr_html_())
    _Checked(marid.explain()._repr_html_())
    assert (marid.epoch(), marid.stats().pending_nodes) == before
    with marid.no_sync():
        y._repr_html_()


def test_values_are_shown_where_they_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marid.settings, "print_materialize", True)  # of texts: it makes no difference here
    x = torch.full((2,), 0.125, device=DEVICE)
    assert "0.1250" not in x._repr_html_()
    marid.materialize(x)
    assert any("[0.1250, 0.1250]" in text for text in _Checked(x._repr_html_()).texts)
    parameter = torch.nn.Parameter(x)
    assert "Parameter" in _Checked(parameter._repr_html_()).texts


@pytest.mark.in_process("operators are timed on the processor")
def test_stats_are_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the operators' times, where they are asked for; names of a user's are text."""
    monkeypatch.setattr(marid.settings, "profile_operators", True)
    monkeypatch.setattr(marid.settings, "immediate_bytes", 0)
    marid.reset_stats()
    layer = torch.nn.Module()
    layer.add_module("<b>", torch.nn.Linear(2, 2))
    layer.forward = lambda x: layer.get_submodule("<b>")(x)
    layer.to(DEVICE)
    layer(torch.ones(3, 2, device=DEVICE)).sum().item()
    shown = _Checked(marid.stats()._repr_html_())
    assert {"ops_executed", "aten::addmm", "<b>", "item()"} <= set(shown.texts)
    assert "b" not in shown.seen
    marid.reset_stats()
