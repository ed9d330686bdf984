"""Runs the examples of pages of documentation, each page from its first to its last block, in one namespace.

    python -m tests.pages docs/tutorial.md

A block of ``python`` is run; a block of ``text`` behind one is what it has to print, in which ``...`` stands for
anything. Lines of the page are the lines that tracebacks and counters show.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import io
import re
import sys
from pathlib import Path
from typing import Any

from marid.frontend.handles import record_again

_BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run(page: Path) -> int:
    """How many blocks were run. Raises what they raise, and ``AssertionError`` for other output."""
    record_again()  # as in a fresh process
    text = page.read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "__main__"}
    printed, line, count = "", 0, 0
    for block in _BLOCK.finditer(text):
        language, content = block.groups()
        if language == "text":
            flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            fits = doctest.OutputChecker().check_output(content, printed, flags)
            assert fits, f"{page}:{line} prints\n{printed}\nand not\n{content}"
            printed = ""
            continue
        assert not printed, f"{page}:{line} prints what the page does not show:\n{printed}"
        line = text.count("\n", 0, block.start()) + 2
        code = ast.increment_lineno(ast.parse(content), line - 1)
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(code, str(page), "exec"), names)
        printed, count = output.getvalue(), count + 1
    assert not printed, f"{page}:{line} prints what the page does not show:\n{printed}"
    return count


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(f"{name}: {run(Path(name))} examples")
