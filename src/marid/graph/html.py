"""Small tables for notebooks, with all text escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def table_html(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table; None is an empty cell."""
    head = "".join(f"<th>{_escaped(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def folded_html(title: str, content: str) -> str:
    """``content``, which is HTML, below a title that folds it; it scrolls where it is long."""
    box = f'<div style="max-height:30em;overflow:auto">{content}</div>'
    return f"<details open><summary>{_escaped(title)}</summary>{box}</details>"


def pre_html(text: str) -> str:
    """Lines as they are, which scroll where they are long. (JupyterLab would wrap them, in letters of its own.)"""
    return f'<pre style="font-family:monospace;white-space:pre;overflow-x:auto">{_escaped(text)}</pre>'


def _cell(value: Any) -> str:
    return f"<td>{'' if value is None else _escaped(str(value))}</td>"


def _escaped(text: str) -> str:
    import html  # which has the names of all characters: a twentieth of what Marid's import takes

    return html.escape(text)
