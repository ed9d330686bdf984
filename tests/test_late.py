"""The first operations of a process: what they import, how long they take, and Ctrl-C while they do it."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from marid import native
from tests.helpers import DEVICE

NEEDS_MODULE = pytest.mark.skipif(native.module is None, reason="needs the C++ half and Python's headers")


def _run(script: str, *args: object) -> list[str]:
    """The lines that a script prints in a process of its own."""
    source = "import sys, torch, marid\ntorch.remote_accelerator.init()  # what the first use loads is there\n"
    source += f"DEVICE = {DEVICE!r}\n" + textwrap.dedent(script)
    done = subprocess.run(
        [sys.executable, "-c", source, *map(str, args)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@NEEDS_MODULE
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
    """It imports nothing, so it takes milliseconds; the bound is for loaded machines."""
    seconds, *imported = _run(
        f"""
        import time
        before, started = set(sys.modules), time.process_time()
        {first}
        print(time.process_time() - started, *set(sys.modules) - before, sep="\\n")
        """
    )
    assert imported == []
    assert float(seconds) < 0.2


@NEEDS_MODULE
def test_convolutions_without_gradients_do_not_import_sympy() -> None:
    imported = _run(
        """
        from torch import nn
        before = set(sys.modules)
        layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1)
        model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(4, 3)).to(DEVICE).eval()
        with torch.no_grad():
            model(torch.randn(5, 1, 12, 12, device=DEVICE)).softmax(-1).argmax(-1).tolist()
        print(*set(sys.modules) - before, sep="\\n")
        """
    )
    assert [name for name in imported if name.split(".")[0] == "sympy"] == []


@NEEDS_MODULE
def test_a_step_without_an_optimizer_does_not_import_dynamo() -> None:
    """Meta kernels may import sympy; Dynamo, and what it brings, is for ``torch.compile`` and optimizers."""
    imported = _run(
        """
        before = set(sys.modules)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.GELU()).to(DEVICE)
        loss = model(torch.randn(2, 4, device=DEVICE)).square().mean()
        loss.backward()
        torch.std(loss.detach() * torch.ones(3, device=DEVICE)).item()
        print(*set(sys.modules) - before, sep="\\n")
        """
    )
    assert [name for name in imported if name.startswith(("torch._dynamo", "torch.distributed"))] == []


def test_dynamo_disables_what_it_would_have_disabled() -> None:
    """Once it is imported, PyTorch's reference implementations ask it again."""
    values = _run(
        """
        from marid.frontend import late

        def kept():
            return [f.__dynamo_disable for f in late._disabling() if hasattr(f, "__dynamo_disable")]

        x = torch.randn(4, 4, device=DEVICE)
        print(len(kept()) > 100)
        import torch._dynamo
        print(len(kept()))
        torch._refs.where(torch.ones(2) > 0, 1.0, 2.0)
        print(all(hasattr(f, "_torchdynamo_disable") for f in kept()), len(kept()) > 0)
        """
    )
    assert values == ["True", "0", "True True"]


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
        signal.setitimer(signal.ITIMER_REAL, choose.choice([0.003, 0.03, 0.3]) * choose.random())
        work(DEVICE)
    except KeyboardInterrupt:
        interrupted += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        torch.set_grad_enabled(True)  # torch.no_grad() itself, interrupted as it begins or ends, leaves it off
import sympy, torch._dynamo
print(sympy.core.Symbol("x") + 1, interrupted > 0, work(DEVICE) == work("cpu"))
"""


@pytest.mark.parametrize("seed", range(3))
def test_ctrl_c_in_the_first_operations(seed: int) -> None:
    """At random moments, until nothing is imported any more: afterwards everything works."""
    assert _run(_INTERRUPTED, seed) == ["x + 1 True True"]


_IN_THE_IMPORT = """
import importlib, random, signal

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
    assert _run(_IN_THE_IMPORT, name) == ["True True SourceFileLoader True"]


def test_what_is_not_installed_is_not_found() -> None:
    """And errors of an import are what they are without Marid."""
    values = _run(
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
