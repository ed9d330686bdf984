"""Every wait, recompile, fallback and byte, by the line that caused it: what ``marid.explain()`` gives."""

from __future__ import annotations

import contextlib
import io
import linecache
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from marid.graph.html import pre_html
from marid.report.differences import Recompile
from marid.report.stats import Counters, Misprediction, Sync
from marid.report.units import bytes_text, seconds_text
from marid.semantics.scopes import BESIDE, text_of_site

if TYPE_CHECKING:  # rich takes as long to import as much of Marid, so only who prints waits for it
    from rich.console import RenderableType
    from rich.text import Text

_LINES = 20  # of each kind that are printed
_DIFFERENCES = 6
_WIDTH = 160


@dataclass(frozen=True)
class Fallback:
    """An operator that ran at once, where, how often and why."""

    operator: str
    source: str
    reason: str
    count: int


@dataclass(frozen=True)
class Cut:
    """How often the tape was run because it had grown too large when ``source`` recorded an operation."""

    source: str
    count: int


@dataclass(frozen=True)
class Resident:
    """Memory that values hold now, by the line that made it: ``tensors`` counts blocks, not views of them."""

    source: str
    nbytes: int
    tensors: int


def fallbacks_of(counters: Counters) -> list[Fallback]:
    """Operators that ran at once, most often first."""
    merged: dict[tuple[str, str, str], int] = {}
    for (name, reason, site), count in list(counters.eager.items()):
        key = name, text_of_site(site), reason
        merged[key] = merged.get(key, 0) + count
    return sorted((Fallback(*key, count) for key, count in merged.items()), key=lambda one: -one.count)


def cuts_of(counters: Counters) -> list[Cut]:
    """Automatic cuts, most often first."""
    merged: dict[str, int] = {}
    for site, count in list(counters.cuts.items()):
        merged[text_of_site(site)] = merged.get(text_of_site(site), 0) + count
    return sorted((Cut(source, count) for source, count in merged.items()), key=lambda one: -one.count)


@dataclass(frozen=True, repr=False)
class Explanation:
    """What the device did since the import or ``marid.reset_stats()``, and why; prints as a report.

    ``syncs`` slowest first; ``recompiles`` oldest first, of the programs that are remembered (the last 256 at most);
    ``fallbacks`` operators that ran at once; ``mispredictions`` results that were not recorded as they were computed;
    ``automatic_cuts``; ``resident`` what holds memory now, largest first.
    ``programs_built`` counts all programs: those that are no recompiles were new work.
    """

    syncs: list[Sync]
    recompiles: list[Recompile]
    fallbacks: list[Fallback]
    mispredictions: list[Misprediction]
    automatic_cuts: list[Cut]
    resident: list[Resident]
    programs_built: int
    programs_reused: int

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.padding import Padding
        from rich.rule import Rule
        from rich.text import Text

        waited = sum(sync.seconds for sync in self.syncs)
        held = sum(one.nbytes for one in self.resident)
        eager = sum(one.count for one in self.fallbacks)
        cut = sum(one.count for one in self.automatic_cuts)
        parts: list[RenderableType] = [Rule("marid", align="left", style="dim")]
        parts += _section(
            f"waits: {sum(sync.count for sync in self.syncs):,}, {seconds_text(waited)}",
            ("waited", "times", "for", "at"),
            [(seconds_text(s.seconds), f"{s.count:,}", s.reason, s.source) for s in self.syncs],
        )
        parts += [
            Text(
                f"programs: {self.programs_built:,} built, {self.programs_reused:,} reused; "
                f"{len(self.recompiles):,} of those built are like an earlier one",
                style="bold",
            ),
            *(Padding(_recompile(one), (0, 0, 0, 2)) for one in self.recompiles[-_LINES:]),
        ]
        parts += _section(
            f"operators that ran at once: {eager:,}",
            ("times", "operator", "because", "at"),
            [(f"{f.count:,}", f.operator, f.reason, f.source) for f in self.fallbacks],
        )
        if self.mispredictions:
            parts += _section(
                f"results that were not recorded as they were computed: {len(self.mispredictions):,}",
                ("times", "operator", "what", "at"),
                [(f"{m.count:,}", m.operator, m.what, m.source) for m in self.mispredictions],
            )
        parts += _section(
            f"automatic cuts: {cut:,}", ("times", "at"), [(f"{c.count:,}", c.source) for c in self.automatic_cuts]
        )
        parts += _section(
            f"memory held: {bytes_text(held)}",
            ("bytes", "tensors", "made at"),
            [(bytes_text(r.nbytes), f"{r.tensors:,}", r.source) for r in self.resident],
        )
        return Group(*parts)

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=_WIDTH, highlight=False, color_system=None, force_jupyter=False).print(self.__rich__())
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return pre_html(str(self).partition("\n")[2])  # without the rule, which is as wide as a file


def _section(title: str, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[RenderableType]:
    """A title and a table, whose last column is a line and is shown with its text."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    rows = list(rows)
    heading = Text(title, style="bold")
    if not rows:
        return [heading]
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name, justify="right" if name in ("waited", "times", "bytes", "tensors") else "left")
    for row in rows[:_LINES]:
        table.add_row(*map(Text, row[:-1]), Text(_with_code(row[-1])))
    if len(rows) > _LINES:
        table.add_row(*[""] * (len(columns) - 1), Text(f"and {len(rows) - _LINES:,} more", style="dim"))
    return [heading, Padding(table, (0, 0, 0, 2))]


def _recompile(one: Recompile) -> Text:
    from rich.text import Text

    earlier = "" if one.source_before == one.source else f" (compared with what {short(one.source_before)} read)"
    sizes = f"{one.operations:,} operation{'s' if one.operations != 1 else ''}"
    text = Text(f"read at {_with_code(one.source)}: {sizes}, {one.operations_before:,} before{earlier}")
    for difference in one.differences[:_DIFFERENCES]:
        text.append(f"\n  {difference.text}")
        for source in dict.fromkeys(s for s in (difference.source_before, difference.source) if s is not None):
            text.append(f"\n    {_with_code(source)}")
    if len(one.differences) > _DIFFERENCES:
        text.append(f"\n  and {len(one.differences) - _DIFFERENCES:,} more")
    if not one.differences:
        text.append("\n  no difference was found")
    return text


def _with_code(source: str) -> str:
    """The line of a site, and what is written there."""
    return f"{short(source)}  {code_at(source)[:80]}".rstrip()


def code_at(source: str) -> str:
    """What is written at ``file:line``; nothing where that cannot be read."""
    file, _, line = source.partition(BESIDE)[0].rpartition(":")
    return linecache.getline(file, int(line)).strip() if line.isdecimal() else ""


def short(source: str) -> str:
    """A path below the current folder without that folder."""
    with contextlib.suppress(OSError):
        return source.removeprefix(os.getcwd() + os.sep)
    return source
