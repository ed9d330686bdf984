"""The first operations of a process: what they import, how long they take, and Ctrl-C while they do it."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from tests.helpers import DEVICE


def run_alone(script: str, *args: object) -> list[str]:
    """The lines that a script prints in a process of its own."""
    source = "import sys, torch, marid\n"
    source += f"DEVICE = {DEVICE!r}\n" + textwrap.dedent(script)
    done = subprocess.run(
        [sys.executable, "-c", source, *map(str, args)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "first",
    [
        "torch.randn(4, 4, device=DEVICE)",
        "torch.zeros(4, 4, device=DEVICE)",
        "torch.tensor([1.0, 2.0], device=DEVICE)",
        "torch.arange(0, 8, 2, device=DEVICE)",
        "(torch.randn(4, 4, device=DEVICE) + 1).sum().item()",
        "torch.nn.Linear(4, 4, device=DEVICE)",
    ],
)
def test_the_first_operation_is_quick(first: str) -> None:
    """It imports nothing, so it takes milliseconds (below 20 on a quiet machine): little of what the imports of PyTorch
    and Marid took, however fast the machine is at the moment."""
    imports, seconds, *imported = run_alone(
        f"""
        import time
        before, started = set(sys.modules), time.process_time()
        {first}
        print(started, time.process_time() - started, *set(sys.modules) - before, sep="\\n")
        """
    )
    assert imported == []
    assert float(seconds) < float(imports) / 4


_FIRST_STEPS = {
    "linear": "nn.Linear(8, 4).to(DEVICE)(x).square().mean()",
    "mlp": "nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.1), nn.ReLU()).to(DEVICE)(x).sum()",
    "conv": "nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)).to(DEVICE)(image).mean()",
    "classes": "F.cross_entropy(nn.Linear(8, 4).to(DEVICE)(x), torch.tensor([0, 1], device=DEVICE))",
    "distance": "F.mse_loss(nn.Linear(8, 8).to(DEVICE)(x).tanh(), x)",
    "logits": "F.binary_cross_entropy_with_logits(nn.Linear(8, 8).to(DEVICE)(x), torch.ones_like(x))",
    "attention": "nn.MultiheadAttention(8, 2).to(DEVICE)(*[x.view(2, 1, 8)] * 3)[0].mean()",
    "transformer": "nn.TransformerEncoderLayer(8, 2, 16).to(DEVICE)(x.view(2, 1, 8)).std()",
    "recurrent": "torch.stack(list(nn.RNN(8, 4).to(DEVICE)(x.view(1, 2, 8))[0].unbind())).sum()",
    "choice": "torch.where(x > 0, x.add_(1), x // 2).flip(0)[torch.tensor([1], device=DEVICE)].requires_grad_().var()",
    "words": "nn.Embedding(5, 4).to(DEVICE)(torch.tensor([1, 2], device=DEVICE)).softmax(-1).log().mean()",
}


@pytest.mark.parametrize("step", _FIRST_STEPS)
def test_a_first_step_imports_no_large_packages(step: str) -> None:
    """Neither forward nor backward, nor what is read of them."""
    imported = run_alone(
        f"""
        from torch import nn
        from torch.nn import functional as F
        before = set(sys.modules)
        x, image = torch.randn(2, 8, device=DEVICE), torch.randn(2, 1, 8, 8).to(DEVICE)
        loss = {_FIRST_STEPS[step]}
        loss.backward()
        loss.item()
        print(*set(sys.modules) - before, sep="\\n")
        """
    )
    large = "sympy", "torch.distributed", "torch._dynamo", "torch._inductor", "torch.fx.experimental"
    assert [name for name in imported if name.startswith(large)] == []


def test_the_first_use_moves_a_module_that_a_graph_holds() -> None:
    """Where PyTorch's move is under way when the device is first used, a parameter that something else refers to stays
    itself, as in every later move."""
    script = """
import torch
import marid
from torch import nn

torch.manual_seed(0)
conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(2, 3, 2))
old = nn.utils.weight_norm(nn.Conv1d(3, 2, 2))  # its weight is computed from the parameters when it is made
model = nn.Sequential(conv, old)
x = torch.randn(1, 2, 8)
expected = model(x)
before = list(model.parameters())
model.to("remote_accelerator")
assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
y = model(x.to("remote_accelerator"))
y.sum().backward()
print(torch.equal(y.cpu(), expected), all(p.grad is not None for p in model.parameters()))
"""
    assert run_alone(script) == ["True True"]


_INTERRUPTED = """
import random, signal, time

def work(device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.to(device).parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        loss = model(torch.arange(12.0, device=device).view(3, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [loss.item() for loss in losses] + [(torch.ones(3, device=device) + 1).std().item()]

choose, interrupted = random.Random(int(sys.argv[1])), 0
signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
for _ in range(12):
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, choose.choice([0.003, 0.03, 0.3]) * choose.random())
            work(DEVICE)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)  # where this is interrupted, nothing is left to turn off
    except KeyboardInterrupt:
        interrupted += 1
    torch.set_grad_enabled(True)  # torch.no_grad() itself, interrupted as it begins or ends, leaves it off
import sympy, torch._dynamo
print(sympy.core.Symbol("x") + 1, interrupted > 0, work(DEVICE) == work("cpu"))
"""


@pytest.mark.parametrize("seed", range(3))
def test_ctrl_c_in_the_first_operations(seed: int) -> None:
    """At random moments, until nothing is imported any more: afterwards everything works."""
    assert run_alone(_INTERRUPTED, seed) == ["x + 1 True True"]


_IN_THE_IMPORT = """
import importlib, random, signal

torch.remote_accelerator.init()
choose, name, interrupted = random.Random(0), sys.argv[1], 0
signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
while name not in sys.modules:
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05 * choose.random())
        importlib.import_module(name)
    except KeyboardInterrupt:
        interrupted += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
module = importlib.import_module(name)
spec = module.__spec__
print(interrupted > 0, spec.name == name, type(spec.loader).__name__, spec.loader is module.__loader__)
"""


@pytest.mark.parametrize("name", ["sympy", "torch._dynamo", "networkx"])
def test_an_interrupted_import_is_complete(name: str) -> None:
    """Ctrl-C is raised when the module is there; and that looks like any other."""
    assert run_alone(_IN_THE_IMPORT, name) == ["True True SourceFileLoader True"]


def test_what_is_not_installed_is_not_found() -> None:
    """And errors of an import are what they are without Marid."""
    values = run_alone(
        """
        import importlib.util
        from marid.frontend import late

        late._WHOLE.add("no_such_package")
        print(importlib.util.find_spec("no_such_package"))
        try:
            import no_such_package
        except ModuleNotFoundError as error:
            print(error)
        """
    )
    assert values == ["None", "No module named 'no_such_package'"]
