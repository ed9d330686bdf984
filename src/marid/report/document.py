"""``marid.report``: what ran, as one HTML file that needs nothing else.

The page is a template (``page/report.html.j2``) with its data as JSON in it; folding, sorting, searching and drawing
are done by ``page/report.js``, which has the graph laid out by dagre (``page/dagre.min.js``).
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from marid.api import explain, stats
from marid.frontend.meaning import understand
from marid.report.explain import code_at, short
from marid.report.operator_times import operator_times
from marid.report.programs import Alive, ShownProgram, held_by, shown
from marid.report.units import bytes_text, seconds_text
from marid.semantics.regions import Region
from marid.semantics.roofline import machine
from marid.semantics.tracebacks import folded

_GRAPHS = 8  # programs that are shown as graphs, those that took most
_NODES = 4000  # operations of one that is
_ALIVE = 60
_LINES = 500


@folded
def report(path: str | os.PathLike[str] = "report.html", *, title: str | None = None) -> Path:
    """Write what was done since the import or ``marid.reset_stats()`` as one HTML file, and return its path: time,
    FLOPs, bytes and memory by module and phase, programs as graphs, waits, recompiles and fallbacks with their lines.

    Times by operator, graphs and FLOPs are of what ran in this process under ``marid.settings.profile_operators``; the
    rest is always there. Runs nothing of what is pending. Measures the machine's peaks the first time, which takes some
    tenths of a second. Raises ``OSError`` where the file cannot be written.
    """
    import jinja2

    page = resources.files("marid.report") / "page"
    texts = {
        name: (page / name).read_text("utf-8") for name in ("report.html.j2", "report.css", "report.js", "dagre.min.js")
    }
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters |= {"bytes": bytes_text, "seconds": seconds_text, "count": "{:,}".format, "flops": _flops_text}
    data = data_of()
    text = environment.from_string(texts["report.html.j2"]).render(
        title=title or Path(sys.argv[0] or "python").name,
        css=texts["report.css"],
        script=texts["report.js"],
        dagre=texts["dagre.min.js"],
        # No text of the data can end the element that it stands in.
        json=json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
        data=data,
    )
    path = Path(path)
    path.write_text(text, "utf-8")
    return path


def _flops_text(count: float) -> str:
    for unit in ("", " k", " M", " G", " T"):
        if count < 1000:
            return f"{count:.1f}{unit}" if unit else f"{count:.0f}"
        count /= 1000
    return f"{count:.1f} P"


def data_of() -> dict[str, Any]:
    """What the page shows, as plain data; sizes in bytes, times in seconds."""
    counted, explained, peaks = stats(), explain(), machine()
    with_time = sorted(operator_times.profiles(), key=lambda profile: -int(profile.sums[::2].sum()))
    programs = [shown(profile, understand) for profile in with_time]
    rows = _rows(programs)
    return {
        "made": datetime.datetime.now().astimezone().isoformat(" ", "seconds"),
        "torch": torch.__version__,
        "machine": {**asdict(peaks), "ridge": peaks.ridge},
        "totals": {
            "seconds": sum(row["seconds"] for row in rows),
            "flops": sum(row["flops"] for row in rows),
            "bytes": sum(row["bytes"] for row in rows),
            "waited": sum(sync.seconds for sync in explained.syncs),
            "waits": sum(sync.count for sync in explained.syncs),
            "operations": counted.ops_executed,
            "built": explained.programs_built,
            "reused": explained.programs_reused,
            "peak": counted.peak_memory,
            "compiled_runs": counted.compiled_runs,
        },
        "rows": rows,
        "programs": [_program(one) for one in programs[:_GRAPHS]],
        "patterns": _patterns(programs),
        "waits": [{**asdict(sync), **_line(sync.source)} for sync in explained.syncs[:_LINES]],
        "recompiles": [
            {
                **_line(one.source),
                "operations": one.operations,
                "before": one.operations_before,
                "differences": [
                    {"text": difference.text, **_line(difference.source or "")} for difference in one.differences
                ],
            }
            for one in explained.recompiles[-_LINES:]
        ],
        "fallbacks": [{**asdict(one), **_line(one.source)} for one in explained.fallbacks[:_LINES]],
        "mispredictions": [{**asdict(one), **_line(one.source)} for one in explained.mispredictions[:_LINES]],
        "cuts": [{**asdict(one), **_line(one.source)} for one in explained.automatic_cuts[:_LINES]],
        "resident": [{**asdict(one), **_line(one.source)} for one in explained.resident[:_LINES]],
        "passes": counted.passes,
        "remote": _remote(counted.remote),
    }


def _line(source: str) -> dict[str, str]:
    """A line, below the current folder where it is there, and what is written there."""
    return {"source": short(source), "code": code_at(source)[:160]}


def _rows(programs: list[ShownProgram]) -> list[dict[str, Any]]:
    """Operators by module, phase and line: what they took, and how much work that was."""
    sums: dict[tuple[Any, ...], dict[str, Any]] = {}
    for one in programs:
        for index, (node, graph_node) in enumerate(zip(one.nodes, _operations(one), strict=True)):
            count = one.counts[index]
            if not count:
                continue
            known = graph_node.metadata
            modules = tuple(known.modules) if known.modules else ()
            source = str(node.site) if node.site is not None else ""
            key = (graph_node.operation, modules, known.execution_phase, known.pattern, source)
            row = sums.get(key)
            if row is None:
                row = sums[key] = {
                    "operator": graph_node.operation,
                    "modules": [list(module) for module in modules],
                    "phase": known.execution_phase or "forward",
                    "pattern": known.pattern,
                    "half": "16" in str(known.dtype),
                    **_line(source),
                    **dict.fromkeys(("count", "seconds", "flops", "bytes", "made", "compiled"), 0),
                }
            row["count"] += count
            row["seconds"] += one.seconds[index]
            row["flops"] += known.flops * count
            row["bytes"] += known.bytes * count
            row["made"] += _made(node)
            row["compiled"] += index in one.compiled
    return sorted(sums.values(), key=lambda row: -row["seconds"])


def _made(node: Any) -> int:
    """The bytes of the memory that a node makes."""
    outs = [node] if node.outs is None else [out for ref in node.outs if (out := ref()) is not None]
    return sum(out.spec.nbytes for out in outs if out.spec is not None and out.root is None)


def _operations(one: ShownProgram) -> list[Any]:
    nodes = one.graph.nodes
    return nodes[len(nodes) - len(one.nodes) :]


def _program(one: ShownProgram) -> dict[str, Any]:
    """A program: its graph, and its memory over time."""
    held = held_by(one)
    operations = _operations(one)
    places = {node.id: index for index, node in enumerate(operations)}
    groups, chains = _chains(one.graph.regions, len(operations), places)
    found = {
        "title": _title(one),
        "runs": max(one.counts, default=0),
        "seconds": sum(one.seconds),
        "count": len(operations),
        "timeline": held.timeline,
        "peak": held.peak,
        "alive": [_alive(block, operations) for block in held.alive[:_ALIVE]],
        "more": sum(block.nbytes for block in held.alive[_ALIVE:]),
        "groups": groups,
        "nodes": [],
        "edges": [],
    }
    if len(operations) > _NODES:
        return found
    for index, node in enumerate(operations):
        found["nodes"].append({
            "operator": node.operation,
            "chain": chains[index],
            "shape": list(node.spec.shape) if node.spec is not None else None,
            "source": short(str(node.site)) if node.site is not None else "",
            "seconds": one.seconds[index],
            "compiled": one.compiled.get(index, 0),
        })  # fmt: skip
    found["edges"] = [[places[a.id], places[b.id]] for a, b in one.graph.edges if a.id in places]
    return found


def _alive(block: Alive, operations: list[Any]) -> dict[str, Any]:
    node = operations[block.instruction]
    known = node.metadata
    return {
        "bytes": block.nbytes,
        "operator": node.operation,
        "module": known.module_path,
        "phase": known.execution_phase,
        "role": known.role,
        **_line(str(node.site) if node.site is not None else ""),
    }


def _title(one: ShownProgram) -> str:
    phases = dict.fromkeys(node.scope.phase for node in one.nodes if node.scope is not None)
    return f"{len(one.nodes):,} operations ({', '.join(phases) or 'no phase'})"


def _chains(root: Region, count: int, places: dict[int, int]) -> tuple[list[list[str]], list[list[int]]]:
    """The groups that there are (kind, name, variant or class), and for each operation those that it is in, from the
    outside in."""
    groups: list[list[str]] = []
    chains: list[list[int]] = [[] for _ in range(count)]

    def enter(region: Region) -> None:
        if region.kind != "graph":
            own: dict[tuple[int, ...], int] = {}  # what lies across phases is a group in each
            for node in region.nodes:
                chain = chains[places[node]]
                group = own.setdefault(tuple(chain), len(groups))
                if group == len(groups):
                    groups.append([region.kind, region.name, region.type or ""])
                chain.append(group)
        # A pattern before modules: of what it lies across, the modules are then inside of it.
        order = ("phase", "pattern", "module")
        for child in sorted(region.children, key=lambda child: order.index(child.kind)):
            enter(child)

    enter(root)
    return groups, chains


def _patterns(programs: list[ShownProgram]) -> list[dict[str, Any]]:
    """How often each pattern was found, and what its operations took."""
    sums: dict[tuple[str, str], dict[str, Any]] = {}
    for one in programs:
        places = {node.seq: index for index, node in enumerate(one.nodes)}
        for region in one.graph.regions.find("pattern"):
            key = region.name, region.type or ""
            row = sums.setdefault(key, {"name": key[0], "variant": key[1], "found": 0, "seconds": 0.0, "modules": []})
            row["found"] += 1
            row["seconds"] += sum(one.seconds[places[node]] for node in region.nodes if node in places)
            scope = one.nodes[places[region.nodes[0]]].scope
            if scope is not None and scope.module_path and scope.module_path not in row["modules"]:
                row["modules"].append(scope.module_path)
    return sorted(sums.values(), key=lambda row: -row["seconds"])


def _remote(remote: Any) -> dict[str, Any] | None:
    """What workers were sent, by line."""
    if remote is None:
        return None
    names = ("bytes_up", "bytes_down", "messages_up", "messages_down", "round_trips", "deduplicated", "copied_bytes")
    moved = [{**asdict(one), **_line(one.source)} for one in remote.moved[:_LINES]]
    workers = [{"device": index, "bytes": said.get("bytes", 0)} for index, said in remote.workers.items()]
    return {"totals": {name: getattr(remote, name) for name in names}, "moved": moved, "workers": workers}
