"""What the documentation shows is so: its examples run, its files exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from marid.remote.wire.requests_table import documented

ROOT = Path(__file__).parents[1]
EXECUTED = ["tutorial", "howto/operator", "howto/pass", "howto/engine", "howto/counter", "semantics", "programs"]


@pytest.mark.in_process("starts a process of its own")
def test_the_examples_of_the_pages_run() -> None:
    """In a process of their own: they define operators, and change engines."""
    command = [sys.executable, "-m", "tests.pages", *(f"docs/{name}.md" for name in EXECUTED)]
    env = {**os.environ, "MARID_COMPILE": "0"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == len(EXECUTED)
    assert " 0 examples" not in done.stdout


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    assert not [page for page in pages if f": {page}\n" not in navigation]


def test_the_table_of_requests_is_what_they_declare() -> None:
    assert f"\n{documented()}\n" in (ROOT / "docs" / "remote.md").read_text(), documented()


def test_lines_of_pages_fit_a_screen() -> None:
    """Of 120 characters, but for tables and code."""
    for page in (ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")):
        in_code = False
        for number, line in enumerate(page.read_text().splitlines(), 1):
            in_code ^= line.lstrip().startswith("```")
            if not in_code and not line.lstrip().startswith("|"):
                assert len(line) <= 120, f"{page.name}:{number}"


_FILE = re.compile(r"`((?:[a-z_0-9]+/)+[a-z_0-9*]+\.(?:py|cpp|h|md))`")


def test_files_that_pages_name_exist() -> None:
    """Paths below the repository, ``src/marid``, ``docs`` or ``tests``. Decisions may speak of what is gone."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    named = [
        (page.name, name) for page in pages if page.stem != "decisions" for name in _FILE.findall(page.read_text())
    ]
    assert not [f"{page}: {name}" for page, name in named if not _is_there(name)]


def _is_there(name: str) -> bool:
    return any(list((ROOT / base).glob(name)) for base in ("", "src/marid", "docs", "tests"))
