"""``marid report`` and ``marid.report``: the HTML file, and what a person sees of it in a browser."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import marid
from marid.frontend.engines import local_engine as engine
from marid.report.document import data_of
from tests.browser import Browser, browser, is_there
from tests.helpers import DEVICE
from tests.remote_helpers import connected

pytestmark = pytest.mark.in_process("operations on a worker are not timed one by one")

SCRIPT = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)
    def forward(self, x):
        return x + self.second(torch.relu(self.first(x)))

model = nn.Sequential(Block(), Block())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(8, 16)
for step in range(4):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    print(loss.item())  # </script><b id=injected>
x.nonzero()
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a script that trains a little."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "<b>&train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "marid", "report", "-o", "out.html", "<b>&train.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) >= 4
    assert "report written to" in done.stderr
    return folder / "out.html"


def data(page: Path) -> dict[str, Any]:
    """What is in the page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.S)
    assert found is not None
    return json.loads(found[1])


def test_it_is_one_file_that_needs_no_other(page: Path) -> None:
    text = page.read_text()
    assert len(text) < 1 << 20
    assert re.findall(r"""<(?:script|link|img|iframe)\b[^>]*(?:src|href)=["']?([^"'>]*)""", text) == ["data:,"]
    assert not re.search(r"@import|url\((?!#)|fetch\(|XMLHttpRequest", text)
    assert "<b id=injected>" not in text
    assert "<title>&lt;b&gt;&amp;train.py" in text


def test_time_work_and_memory_are_those_of_the_script(page: Path) -> None:
    found = data(page)
    linear = [row for row in found["rows"] if row["operator"] == "aten::addmm"]
    assert {row["modules"][-1][0] for row in linear} == {"0.first", "0.second", "1.first", "1.second"}
    assert sum(row["count"] for row in linear) == 16
    assert all(row["flops"] == row["count"] * 2 * 8 * 16 * 32 for row in linear)
    assert all(row["seconds"] > 0 and row["phase"] == "forward" for row in linear)
    assert {"forward", "backward", "optimizer"} <= {row["phase"] for row in found["rows"]}
    assert sum(row["count"] for row in found["rows"]) <= found["totals"]["operations"]
    (wait,) = [one for one in found["waits"] if one["reason"] == "item()"]
    assert wait["code"].startswith("print(loss.item())")
    assert [one["operator"] for one in found["fallbacks"]] == ["aten::nonzero"]
    for program in found["programs"]:
        assert program["timeline"][program["peak"]] == max(program["timeline"])
        alive = sum(block["bytes"] for block in program["alive"]) + program["more"]
        assert alive == program["timeline"][program["peak"]]
        assert all(0 <= a < len(program["nodes"]) and 0 <= b < len(program["nodes"]) for a, b in program["edges"])


def test_memory_of_a_program_is_counted_from_first_to_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views hold what they show; what is written in place is no new memory."""
    engine.programs.clear()  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr(marid.settings, "profile_operators", True)
    monkeypatch.setattr(marid.settings, "immediate_bytes", 0)
    x = torch.ones(256, device=DEVICE)
    marid.materialize(x)
    marid.reset_stats()
    y = x.sin()  # 1 KiB
    z = y.cos().add_(1)  # 1 KiB
    view = z[:2]
    del z, y
    total = view.sum()
    del view
    total.item()
    (program,) = data_of()["programs"]
    assert [node["operator"].removeprefix("aten::") for node in program["nodes"]] == "sin cos add_ slice sum".split()
    assert program["timeline"] == [1024, 2048, 1024, 1024, 1028]
    assert [one["operator"] for one in program["alive"]] == ["aten::sin", "aten::cos"]
    marid.reset_stats()


def test_without_times_there_is_a_report_all_the_same(tmp_path: Path) -> None:
    marid.reset_stats()
    text = marid.report(tmp_path / "report.html", title="a & b").read_text()
    assert "profile_operators" in text
    assert "a &amp; b" in text


def test_traffic_of_workers_is_shown_by_line(tmp_path: Path) -> None:
    """What ran there has no times of operators, but lines and bytes."""
    marid.reset_stats()
    device = f"{DEVICE}:6"
    with connected(6):
        x = torch.ones(1000).to(device)  # sent
        (x * 2).sum().item()
        found = data_of()
        text = marid.report(tmp_path / "report.html").read_text()
    remote = found["remote"]
    assert remote["totals"]["bytes_up"] > 4000
    assert [one["code"] for one in remote["moved"] if one["up"] >= 4000] == ["x = torch.ones(1000).to(device)  # sent"]
    assert [one["device"] for one in remote["workers"]] == [6]
    assert 'id="workers"' in text
    marid.reset_stats()


# --- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    if not is_there():
        pytest.skip("there is no Chromium with its driver")
    with browser() as found:
        yield found


@pytest.fixture
def seen(window: Browser, page: Path) -> Browser:
    """The page as it opens, at the width of a desk."""
    window.look(1280, 900, dark=False)
    window.open(page)
    return window


_ROWS = "return [...document.querySelectorAll(arguments[0] + ' tbody tr')].map(row => row.innerText)"
_TYPE = "const e = document.querySelector(arguments[0]); e.value = arguments[1]; e.dispatchEvent(new Event('input'))"


def test_it_opens_without_complaints_and_is_what_it_says(seen: Browser) -> None:
    assert seen.complaints() == []
    assert seen.run("return document.querySelector('h1').textContent") == "<b>&train.py"
    assert seen.run("return document.getElementById('injected')") is None
    assert seen.run("return performance.getEntriesByType('resource').length") == 0


def test_modules_fold_search_and_sort(seen: Browser) -> None:
    first = "return document.querySelector('#module-table td.tree').textContent"
    seen.run("document.querySelector('#module-table th[data-sort=flops]').click()")
    assert seen.run(first).strip("▸▾") in ("Sequential", "(optimizer)", "(outside of modules)")
    before = len(seen.run(_ROWS, "#module-table"))
    seen.run("document.getElementById('module-all').click()")
    assert len(seen.run(_ROWS, "#module-table")) > before
    seen.run("document.querySelector('#module-table tbody button').click()")
    assert len(seen.run(_ROWS, "#module-table")) < before + 4
    seen.run(_TYPE, "#module-search", "second")
    assert sum("second" in row for row in seen.run(_ROWS, "#module-table")) == 2
    seen.run(_TYPE, "#module-search", "")
    assert seen.complaints() == []


def test_operators_search_and_sort(seen: Browser) -> None:
    seen.run(_TYPE, "#operator-search", "addmm")
    rows = seen.run(_ROWS, "#operator-table")
    assert len(rows) >= 4
    assert all(row.startswith("addmm") for row in rows)
    column = "return [...document.querySelectorAll('#operator-table tbody tr')].map(row => row.cells[5].innerText)"
    seen.run("document.querySelector('#operator-table th[data-sort=module]').click()")
    assert seen.run(column) == sorted(seen.run(column))
    assert set(seen.run(column)) == {"0.first", "0.second", "1.first", "1.second"}
    seen.run("document.querySelector('#operator-table th[data-sort=module]').click()")
    assert seen.run(column) == sorted(seen.run(column), reverse=True)


_BOXES = "return [...document.querySelectorAll('#graph-view g.group')].map(g => g.querySelector('title').textContent)"
_CLICK = "document.querySelector(arguments[0]).dispatchEvent(new MouseEvent('click', {bubbles: true}))"


def test_the_graph_folds_and_is_searched(seen: Browser) -> None:
    seen.run("document.getElementById('graph-fold').click()")
    folded = seen.run(_BOXES)
    assert any(box.startswith("forward") for box in folded)
    seen.run(_CLICK, "#graph-view g.group.phase rect")
    assert len(seen.run(_BOXES)) > len(folded)
    seen.run(_CLICK, "#graph-view g.group.phase rect")
    assert seen.run(_BOXES) == folded
    seen.run(_TYPE, "#graph-search", "addmm")
    hits = "return [...document.querySelectorAll('#graph-view g.hit title')].map(t => t.textContent.split('\\n')[0])"
    assert "addmm" in seen.run(hits)
    assert seen.run("return document.querySelectorAll('#graph-view path.edge').length") > 3
    assert seen.complaints() == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_is_readable_at_a_desk_and_in_a_hand_by_day_and_by_night(
    window: Browser, page: Path, width: int, dark: bool
) -> None:
    """Nothing sticks out to the side, and text differs enough from what it is on (WCAG's 4.5)."""
    window.look(width, 900, dark)
    window.open(page)
    assert window.run("return document.documentElement.scrollWidth <= innerWidth")
    contrasts = window.run(
        """
        const light = (text) => {
          const [r, g, b] = text.match(/[\\d.]+/g).slice(0, 3).map((v) => v / 255)
            .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
          return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const ground = (element) => {
          for (let e = element; e; e = e.parentElement) {
            const color = getComputedStyle(e).backgroundColor;
            if (!/, 0\\)$|transparent/.test(color)) return color;
          }
        };
        return ["h1", ".sub", "nav a", ".tile .value", "th", "td", "code", ".dim", "button"].map((name) => {
          const element = document.querySelector(name);
          const [a, b] = [light(getComputedStyle(element).color), light(ground(element))].sort((x, y) => y - x);
          return [name, (a + 0.05) / (b + 0.05)];
        });
        """
    )
    assert [name for name, contrast in contrasts if contrast < 4.5] == []
    ground = window.run("return getComputedStyle(document.body).backgroundColor")
    assert dark == ("19," in ground)
    assert window.complaints() == []
