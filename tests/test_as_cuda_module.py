"""The public names of ``torch.cuda`` under ``--as-cuda``: each works, stands in, or is refused with a reason."""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap
from pathlib import Path

import torch

from marid.as_cuda.module import Entry, table

PAGE = Path(__file__).parent.parent / "docs" / "as_cuda.md"

# How each function that is not refused is called; whatever needs no argument is not listed.
CALLS = {
    "can_device_access_peer": "0, 0",
    "check_error": "0",
    "device": "'cuda:0'",
    "device_of": "torch.ones(1, device='cuda')",
    "make_graphed_callables": "len, ()",
    "manual_seed": "1",
    "manual_seed_all": "1",
    "nccl.is_available": "[]",
    "nvtx.mark": "'a'",
    "nvtx.range_end": "0",
    "nvtx.range_push": "'a'",
    "nvtx.range_start": "'a'",
    "set_device": "0",
    "set_per_process_memory_fraction": "0.5, 0",
    "set_rng_state": "torch.cuda.get_rng_state()",
    "set_rng_state_all": "torch.cuda.get_rng_state_all()",
    "set_stream": "torch.cuda.Stream()",
    "set_sync_debug_mode": "'warn'",
    "stream": "torch.cuda.Stream()",
    "StreamContext": "torch.cuda.Stream()",
    "CudaError": "1",
    "DeferredCudaCallError": "",
    "cudaStatus": "",
}


def _rows(entries: dict[str, Entry]) -> list[str]:
    """The table as the page shows it: a line for all names of a kind and a note."""
    order = ["works", "stand-in", "refused"]
    shown = {name: entry for name, entry in entries.items() if not name.rpartition(".")[2].startswith("_")}
    names = sorted(shown, key=lambda name: (order.index(shown[name].kind), shown[name].note, name.lower()))
    lines = []
    for (kind, note), group in itertools.groupby(names, key=lambda name: (shown[name].kind, shown[name].note)):
        lines.append(f"| {kind} | {', '.join(f'`{name}`' for name in group)} | {note} |")
    return lines


def test_every_public_name_is_in_the_table() -> None:
    """Of the module, and of those of its submodules that need CUDA."""
    entries = table()
    missing = [name for name in torch.cuda.__all__ if name not in entries]
    for module in (torch.cuda.random, torch.cuda.memory, torch.cuda.graphs, torch.cuda.tunable, torch.cuda.nccl):
        short = module.__name__.rpartition(".")[2]
        missing += [name for name in module.__all__ if name not in entries and f"{short}.{name}" not in entries]
    assert missing == []
    assert all(entry.note for entry in entries.values() if entry.kind == "refused")


def test_the_page_shows_the_table() -> None:
    """Line by line."""
    page = PAGE.read_text(encoding="utf-8").splitlines()
    assert [line for line in page if line.startswith(("| works", "| stand-in", "| refused"))] == _rows(table())


def test_every_name_does_what_the_table_says(tmp_path: Path) -> None:
    """Called in a process of its own; those of one name are the same in every submodule."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import inspect, warnings, torch
            from marid.as_cuda.module import table
            from marid.errors import UnsupportedOperationError

            warnings.simplefilter("ignore")
            calls = {CALLS!r}
            for name, entry in table().items():
                found = eval("torch.cuda." + name)
                if name.rpartition(".")[2].startswith("_") and entry.kind != "refused" or inspect.ismodule(found):
                    continue
                if not callable(found):
                    assert entry.kind == "works", name
                    continue
                try:
                    eval(f"torch.cuda.{{name}}({{calls.get(name, '')}})")
                except UnsupportedOperationError as error:
                    assert entry.kind == "refused", (name, error)
                    assert entry.note in str(error)
                else:
                    assert entry.kind != "refused", name
            assert torch.cuda.random.get_rng_state is torch.cuda.get_rng_state
            assert torch.cuda.memory.memory_allocated is torch.cuda.memory_allocated
            assert torch.cuda.streams.Stream is torch.cuda.Stream
            x = torch.ones(1000, device="cuda") + 1
            torch.cuda.synchronize()
            assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == torch.cuda.memory_allocated() >= 4000
            assert "Allocated memory" in torch.cuda.memory_summary("cuda:0")
            assert torch.cuda.get_per_process_memory_fraction() == 0.5 and torch.cuda.get_sync_debug_mode() == 1
            assert len(torch.cuda.get_rng_state_all()) == len(torch.cuda.default_generators) == 1
            with torch.cuda.profiler.profile(), torch.cuda.device_of(x), torch.cuda.amp.autocast():
                assert (x.view(10, 100) @ x.view(100, 10)).dtype is torch.float16
            assert isinstance(torch.cuda.current_stream(), torch.cuda.Stream)
            assert not isinstance(x, torch.cuda.CUDAGraph)
            """
        ),
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "marid", "run", "--as-cuda", "--no-summary", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
