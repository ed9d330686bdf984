"""The table of all requests in the documentation, made of their declarations."""

from __future__ import annotations

import re

from marid.remote.wire import requests


def documented() -> str:
    """A table of all requests for the documentation."""
    lines = ["| request | what it does | fields | answer |", "|---|---|---|---|"]
    for cls, record in sorted(requests.RECORDS.items(), key=lambda one: one[0].__name__):
        fields = [name if name == kind.says else f"{name} ({kind.says})" for name, kind in record.fields.items()]
        does = re.sub(
            r"``(\w+)``", lambda m: f"`{m[1].lower() if m[1] in vars(requests) else m[1]}`", cls.__doc__ or ""
        )
        cells = f"`{cls.__name__.lower()}`", " ".join(does.split()), "; ".join(fields), requests.ANSWERS[cls]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
