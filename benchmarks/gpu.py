"""What ``make gpu`` runs on a machine with a CUDA device: the tests that are for one, PyTorch's operator database, and
models trained and sampled by eager PyTorch, ``torch.compile`` and Marid; one report of it all.

    python -m benchmarks.gpu --report build/gpu/report.md
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn

_ROOT = Path(__file__).parents[1]
_REPORT = Path("build/gpu/report.md")
_TEST_SECONDS = 600
_WARM_UP = 10  # turns
_LARGEST = 5e-2  # relative difference of a loss, bfloat16 and some training later

Turn = Callable[[], Tensor]


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.joint, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, cache: tuple[Tensor, Tensor] | None, at: Tensor | None) -> Tensor:
        batch, length, width = x.shape
        parts = self.joint(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = parts[0], parts[1], parts[2]
        if cache is None or at is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            cache[0].index_copy_(2, at, k)
            cache[1].index_copy_(2, at, v)
            seen = torch.arange(cache[0].shape[2], device=x.device) <= at
            y = F.scaled_dot_product_attention(q, cache[0], cache[1], attn_mask=seen.view(1, 1, 1, -1))
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


def _wide(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class _Gpt(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, length: int, tokens: int = 512) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2 * layers + 1)])
        self.mixers = nn.ModuleList([_Attention(width, heads) for _ in range(layers)])
        self.wide, self.head = nn.ModuleList([_wide(width) for _ in range(layers)]), nn.Linear(width, tokens)

    def forward(self, words: Tensor, caches: list[Any] | None = None, at: Tensor | None = None) -> Tensor:
        places = torch.arange(words.shape[1], device=words.device) if at is None else at
        x = self.words(words) + self.places(places)
        for index, (mixer, wide) in enumerate(zip(self.mixers, self.wide, strict=True)):
            x = x + mixer(self.norms[2 * index](x), None if caches is None else caches[index], at)
            x = x + wide(self.norms[2 * index + 1](x))
        return self.head(self.norms[-1](x))


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.one, self.two = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.two(self.second(F.relu(self.one(self.first(x))))))


def _trained(model: nn.Module, loss_of: Callable[[], Tensor], rate: float = 3e-4) -> Turn:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)

    def turn() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return turn


def _mlp(device: str, compiled: Callable[..., Any]) -> Turn:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    x, y = torch.randn(128, 64).to(device), torch.randint(10, (128,)).to(device)
    run = compiled(model)
    return _trained(model, lambda: F.cross_entropy(run(x), y))


def _gpt(device: str, compiled: Callable[..., Any], half: bool) -> Turn:
    model = _Gpt(6, 384, 6, 256).to(device)
    words = torch.randint(512, (16, 257)).to(device)
    run, kind = compiled(model), torch.device(device).type

    def loss() -> Tensor:
        with torch.autocast(kind, torch.bfloat16, enabled=half):
            return F.cross_entropy(run(words[:, :-1]).flatten(0, 1).float(), words[:, 1:].flatten())

    return _trained(model, loss)


def _residual(device: str, compiled: Callable[..., Any]) -> Turn:
    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), *[_Block(64) for _ in range(8)], nn.AdaptiveAvgPool2d(1))
    model = nn.Sequential(model, nn.Flatten(), nn.Linear(64, 10)).to(device)
    x, y = torch.randn(64, 3, 64, 64).to(device), torch.randint(10, (64,)).to(device)
    run = compiled(model)
    return _trained(model, lambda: F.cross_entropy(run(x), y))


def _decode(device: str, compiled: Callable[..., Any]) -> Turn:
    model = _Gpt(12, 768, 12, 256).to(device).eval()
    caches = [tuple(torch.zeros(1, 12, 256, 64).to(device) for _ in range(2)) for _ in model.mixers]
    run = compiled(model)

    @torch.no_grad()
    def turn() -> Tensor:
        word, logits = torch.zeros(1, 1, dtype=torch.long, device=device), None
        for step in range(32):
            logits = run(word, caches, torch.tensor([step], device=device))
            word = logits[:, -1].argmax(-1, keepdim=True)
            word.item()
        assert logits is not None
        return logits.square().mean()

    return turn


_WORKLOADS: dict[str, tuple[str, Callable[[str, Callable[..., Any]], Turn]]] = {
    "mlp": ("MLP, batch 128, trained with AdamW: small kernels", _mlp),
    "gpt": ("GPT, 6 layers of 384, 16 x 256 tokens, float32, AdamW", lambda d, c: _gpt(d, c, False)),
    "gpt-bf16": ("the same under bfloat16 autocast", lambda d, c: _gpt(d, c, True)),
    "residual": ("8 residual blocks of 64 channels, 64 images of 64 x 64, AdamW", _residual),
    "decode": ("GPT, 12 layers of 768, float32, 32 greedy tokens, each read, static cache", _decode),
}


class _Contestant:
    """A process that takes turns when it is told to: PyTorch cannot train on CUDA in a process with another device
    registered (pytorch/pytorch#161129)."""

    def __init__(self, name: str, workload: str) -> None:
        self.name = name
        self.failure = ""
        self.seconds: list[float] = []
        self.values: list[float] = []
        environment = {**os.environ, "MARID_ENGINE": "cuda:0" if name == "marid" else "cpu", "MARID_AUTOLOAD": "0"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu", "--take-turns", name, "--only", workload],
            cwd=_ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def go(self) -> None:
        """One turn."""
        if self.failure:
            return
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
            seconds, value = self._process.stdout.readline().split()
        except (OSError, ValueError):  # no answer: it says why on standard error
            self.failure = f"ended with status {self._process.wait()}"
            return
        self.seconds.append(float(seconds))
        self.values.append(float(value))

    def end(self) -> None:
        """No more turns."""
        self._process.kill()
        self._process.wait()


def _take_turns(name: str, workload: str) -> None:
    """What the process of a contestant does."""
    device = "cuda:0"
    if name in ("marid", "worker"):
        import marid

        device = "remote_accelerator"
        if name == "worker":
            marid.connect(workers=1, device="cuda:0")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.manual_seed(0)
    turn = _WORKLOADS[workload][1](device, torch.compile if name == "compile" else lambda model: model)
    for _ in sys.stdin:
        began = time.perf_counter()
        value = turn().item()
        print(time.perf_counter() - began, value, file=answers, flush=True)


def _measured(workload: str, names: Sequence[str], turns: int) -> str:
    """A row of the table; every loss has been compared with eager PyTorch's."""
    found = [_Contestant(name, workload) for name in names]
    try:
        for one in found:
            for _ in range(_WARM_UP):
                one.go()
        for index in range(turns):
            for one in found if index % 2 else reversed(found):
                one.go()
    finally:
        for one in found:
            one.end()
    eager = found[0]
    if eager.failure:
        return f"| {_WORKLOADS[workload][0]} | {eager.failure} |"
    cells = [f"{1e3 * statistics.median(eager.seconds[_WARM_UP:]):.2f} ms", *[_cell(one, eager) for one in found[1:]]]
    return f"| {_WORKLOADS[workload][0]} | {' | '.join(cells)} |"


def _cell(one: _Contestant, eager: _Contestant) -> str:
    if one.failure:
        return one.failure
    off = max(_off(a, b) for a, b in zip(eager.values, one.values, strict=True))
    ratio = statistics.median(one.seconds[_WARM_UP:]) / statistics.median(eager.seconds[_WARM_UP:])
    wrong = "" if off <= _LARGEST else " **wrong**"
    return f"{ratio:.2f} (first {one.seconds[0]:.1f} s, off {off:.0e}){wrong}"


def _off(expected: float, found: float) -> float:
    return abs(found - expected) / (abs(expected) + 0.1) if found == found else float("inf")


def _tests(arguments: list[str], seconds: int) -> str:
    """The last lines of a run of tests."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line", *arguments]
    try:
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=seconds, check=False)
        lines = done.stdout.splitlines()
    except subprocess.TimeoutExpired as error:
        lines = (error.stdout or b"").decode().splitlines() + [f"stopped after {seconds} s"]
    kept = [line for line in lines if line.startswith(("FAILED", "ERROR", "E  ", "/"))][:200]
    return "\n".join(["    " + line[:220] for line in [*kept, *lines[-1:]]])


@click.command()
@click.option(
    "--report",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("build/gpu/report.md"),
    show_default=True,
    help="The file to write.",
)
@click.option("--only", multiple=True, type=click.Choice([*_WORKLOADS]), help="These workloads.")
@click.option("--turns", type=click.IntRange(min=2), default=30, show_default=True, help="Timed turns of each.")
@click.option("--tests/--no-tests", default=True, help="Whether to run the tests.")
@click.option("--operators/--no-operators", default=True, help="Whether to run the operator database.")
@click.option("--contestants", default="eager,compile,marid,worker", show_default=True, help="Eager PyTorch is first.")
@click.option("--take-turns", hidden=True, help="Be the process of this contestant.")
def gpu(
    report: Path,
    only: tuple[str, ...],
    turns: int,
    tests: bool,
    operators: bool,
    contestants: str,
    take_turns: str | None,
) -> None:
    """Test and measure Marid on the CUDA device of this machine; write one report."""
    if take_turns is not None:
        _take_turns(take_turns, only[0])
        return
    if not torch.cuda.is_available():
        raise click.ClickException(f"PyTorch {torch.__version__} sees no CUDA device")
    report.parent.mkdir(parents=True, exist_ok=True)
    text = [f"# {torch.cuda.get_device_name(0)}, torch {torch.__version__}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC\n"]

    def say(part: str) -> None:
        text.append(part)
        report.write_text("\n".join(text) + "\n", encoding="utf-8")  # each time: what is long is not lost
        print(part, flush=True)

    if tests:
        say("## Tests\n")
        say(_tests(["tests/test_cuda.py"], _TEST_SECONDS))
    if operators:
        say("\n## Operator database, against the CPU\n")
        workers = str(min(8, os.cpu_count() or 1))
        say(_tests(["tests/test_cuda.py", "-m", "conformance", "-n", workers], _TEST_SECONDS))
    names = tuple(contestants.split(","))
    say(f"\n## Speed: medians of {turns} turns, processes in turn, beside eager PyTorch on the device\n")
    say(f"| workload | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    for name in only or _WORKLOADS:
        say(_measured(name, names, turns))


if __name__ == "__main__":
    gpu(prog_name="python -m benchmarks.gpu")
