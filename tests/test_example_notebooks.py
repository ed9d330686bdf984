"""The notebooks in ``examples/notebooks``, executed as Jupyter does; they check what they say with ``assert``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

nbclient: Any = pytest.importorskip("nbclient")
nbformat: Any = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

_NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples" / "notebooks").glob("*.ipynb"))


@pytest.fixture(autouse=True)
def _defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MARID_COMPILE", "MARID_COMPILE_NICENESS"):  # which tests set for themselves
        monkeypatch.delenv(name, raising=False)


def _outputs(cell: Any) -> list[str]:
    found: list[str] = []
    for output in cell.outputs:
        found += [output.text] if "text" in output else []
        found += [str(text) for text in output.get("data", {}).values()]
    return found


@pytest.mark.in_process("starts workers of its own")
@pytest.mark.parametrize("path", _NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_do_what_they_say(path: Path, tmp_path: Path) -> None:
    kept = nbformat.read(path, as_version=4)
    run = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(run, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    for cell, before in zip(run.cells, kept.cells, strict=True):
        if cell.cell_type != "code":
            continue
        texts = _outputs(cell)
        assert bool(texts) == bool(_outputs(before)), f"what the file has of this cell is old: {cell.source}"
        assert not any("ipykernel" in text for text in texts), "lines are of cells, which have numbers"


def test_there_are_notebooks() -> None:
    assert len(_NOTEBOOKS) == 3
