"""What plain PyTorch on the CPU costs beside Marid: without it, with the import, and with a tensor of the device made.

    python benchmarks/guest.py [--rounds N] [--processes N]

Several processes for each, which take turns: a round times every piece of work once in each of them. Two processes of
the same kind differ by some percent, by where their memory lies. So printed are means over processes of their medians
over rounds, in microseconds, and ratios of these to those of plain PyTorch. Then what ``import marid`` takes beyond
``import torch``, in fresh processes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

STATES = ("plain", "imported", "used")


def _work() -> dict[str, tuple[int, Callable[[], Any]]]:
    import torch
    from torch import nn

    small = nn.Linear(4, 4)
    x = torch.ones(2, 4)
    deep = nn.Sequential(*[nn.Linear(8, 8) for _ in range(10)])
    y = torch.ones(2, 8)
    optimizers = [kind(nn.Linear(8, 8).parameters()) for kind in (torch.optim.SGD, torch.optim.AdamW)]
    for optimizer in optimizers:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)

    def train() -> None:
        deep(y).sum().backward()

    return {
        "nn.Linear(4, 4)": (2000, lambda: small(x)),
        "ten layers": (200, lambda: deep(y)),
        "ten layers, with backward": (60, train),
        "torch.add": (5000, lambda: torch.add(x, x)),
        "torch.topk": (3000, lambda: torch.topk(x, 2)),
        "torch.empty": (5000, lambda: torch.empty(2, 4)),
        "nn.Parameter": (3000, lambda: nn.Parameter(x)),
        "SGD.step": (300, optimizers[0].step),
        "AdamW.step": (200, optimizers[1].step),
    }


def _serve(state: str) -> None:
    import torch

    torch.set_num_threads(1)
    if state != "plain":
        import marid  # noqa: F401
    if state == "used":
        torch.ones(2, device="remote_accelerator").add(1).tolist()
    work = _work()
    for count, function in work.values():
        for _ in range(count):
            function()
    for line in sys.stdin:
        count, function = work[line.strip()]
        started = time.perf_counter()
        for _ in range(count):
            function()
        print((time.perf_counter() - started) / count * 1e6, flush=True)


def _ask(process: subprocess.Popen[str], name: str) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(name + "\n")
    process.stdin.flush()
    return float(process.stdout.readline())


_IMPORT = """
import time, torch
started = time.perf_counter()
import marid
print(time.perf_counter() - started)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--processes", type=int, default=5, help="of each kind")
    parser.add_argument("--json", action="store_true", help="print the ratios as JSON")
    parser.add_argument("--serve", choices=STATES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        _serve(options.serve)
        return
    command = [sys.executable, __file__, "--serve"]
    pipe = subprocess.PIPE
    turns = [state for _ in range(options.processes) for state in STATES]
    processes = [subprocess.Popen([*command, state], stdin=pipe, stdout=pipe, text=True) for state in turns]
    names = list(_work())
    samples: dict[str, list[list[float]]] = {name: [[] for _ in turns] for name in names}
    for round_ in range(options.rounds):
        for name in names:
            for turn in range(len(turns)):  # in another order each time
                index = (round_ + turn) % len(turns)
                samples[name][index].append(_ask(processes[index], name))
    for process in processes:
        process.kill()
    times = {
        name: {
            state: statistics.mean(statistics.median(one) for one, of in zip(each, turns, strict=True) if of == state)
            for state in STATES
        }
        for name, each in samples.items()
    }
    ratios = {name: {state: of[state] / of["plain"] for state in STATES[1:]} for name, of in times.items()}
    if options.json:
        print(json.dumps(ratios))
        return
    for name, of in times.items():
        shown = "  ".join(f"{state} {of[state]:8.2f}" for state in STATES)
        print(f"{name:28} {shown}  imported {ratios[name]['imported']:.3f}  used {ratios[name]['used']:.3f}")
    loading = [float(subprocess.check_output([sys.executable, "-c", _IMPORT], text=True)) for _ in range(7)]
    print(f"import marid: {statistics.median(loading) * 1000:.1f} ms beyond import torch")


if __name__ == "__main__":
    main()
