"""What is stamped on every operation at capture: module path, phase, source line."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import marid
from marid.semantics import scopes
from tests.helpers import DEVICE


def _line_above() -> int:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno - 1


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        z = y * 2
        self.seen = [y, z]
        return z


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_module_path_is_the_name_from_named_modules() -> None:
    """Also for operations written in the forward of a container; the outermost module is the empty path."""
    model = Model().to(DEVICE)
    y = model(torch.ones(1, 2, device=DEVICE))
    names = dict(model.named_modules())
    for index, block in enumerate(model.blocks):
        inner, own = block.seen  # type: ignore[misc]
        assert inner.metadata.module_path == f"blocks.{index}.inner"
        assert inner.metadata.module_type == "Linear"
        assert own.metadata.module_path == f"blocks.{index}"
        assert own.metadata.module_type == "Block"
        assert inner.metadata.module_path in names
    assert y.metadata.module_path == "head"
    assert (y + 1).metadata.module_path is None


def test_the_outermost_module_has_the_empty_path() -> None:
    """As ``named_modules`` calls it."""
    layer = nn.Linear(2, 2).to(DEVICE)
    assert layer(torch.ones(1, 2, device=DEVICE)).metadata.module_path == ""


def test_a_shared_module_has_the_path_of_its_caller() -> None:
    """One module under two parents is told apart by who calls it."""
    shared = nn.Linear(2, 2)

    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = shared

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    parent = nn.ModuleDict({"first": Caller(), "second": Caller()}).to(DEVICE)
    parent.forward = lambda x: (parent["first"](x), parent["second"](x))
    first, second = parent(torch.ones(1, 2, device=DEVICE))
    assert first.metadata.module_path == "first.layer"
    assert second.metadata.module_path == "second.layer"


def test_a_module_used_twice_by_one_parent_has_its_first_name() -> None:
    """``named_modules`` lists a shared child once."""
    layer = nn.Linear(2, 2)
    tied = nn.Sequential(layer, nn.ReLU(), layer).to(DEVICE)
    assert tied(torch.ones(1, 2, device=DEVICE)).metadata.module_path == "0"


def test_a_module_replaced_later_is_found() -> None:
    """Names are not remembered beyond a change of the module tree."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU()).to(DEVICE)
    x = torch.ones(1, 2, device=DEVICE)
    assert model(x).metadata.module_path == "1"
    model[1] = nn.Linear(2, 2).to(DEVICE)
    model.append(nn.Tanh())
    assert model(x).metadata.module_path == "2"
    assert model[:2](x).metadata.module_path == "1"


@pytest.mark.parametrize("depth", ["inner", "outer"])
def test_a_raising_forward_is_left_like_one_that_returns(depth: str) -> None:
    """After an exception, caught outside or inside of a parent, paths are right again."""

    class Raises(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("no")

    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bad = Raises()
            self.good = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if depth == "outer":
                return self.good(self.bad(x))
            try:
                self.bad(x)
            except ValueError:
                own = x + 1
                assert own.metadata.module_path == ""
            return self.good(x)

    model = Tries().to(DEVICE)
    x = torch.ones(1, 2, device=DEVICE)
    if depth == "outer":
        with pytest.raises(ValueError, match="no"):
            model(x)
    else:
        assert model(x).metadata.module_path == "good"
    assert (x + 1).metadata.module_path is None
    assert model.good(x).metadata.module_path == ""


def test_an_interrupted_forward_leaves_no_path_behind() -> None:
    """``KeyboardInterrupt`` runs no hooks; the next outermost call starts afresh."""

    class Interrupted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyboardInterrupt

    x = torch.ones(1, 2, device=DEVICE)
    with pytest.raises(KeyboardInterrupt):
        nn.Sequential(nn.Linear(2, 2), Interrupted()).to(DEVICE)(x)
    model = Model().to(DEVICE)
    assert model(x).metadata.module_path == "head"
    assert (x + 1).metadata.module_path is None


def test_phases_of_a_training_step() -> None:
    """Forward, backward and optimizer step, each with its own name; backward keeps no forward path of others."""
    model = Model().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss = model(torch.ones(1, 2, device=DEVICE)).sum()
    assert loss.metadata.execution_phase == "forward"
    loss.backward()
    grad = model.head.weight.grad
    assert grad is not None
    assert grad.metadata.execution_phase == "backward"
    optimizer.step()
    assert model.head.weight.metadata.execution_phase == "optimizer"
    assert (loss + 1).metadata.execution_phase == "forward"
    phases = {node.scope.phase for node in marid.graph(*model.parameters()).operations}  # of what is pending: all of it
    assert phases == {"forward", "backward", "optimizer"}


def test_phase_after_a_backward_that_raised() -> None:
    """An error in a hook leaves the phase as it was before."""
    x = torch.ones(2, device=DEVICE, requires_grad=True)

    def fail(grad: torch.Tensor) -> None:
        raise ValueError("hook")

    x.register_hook(fail)
    with pytest.raises(ValueError, match="hook"):
        (x * 2).sum().backward()
    assert (x.detach() + 1).metadata.execution_phase == "forward"


def test_phase_after_an_optimizer_step_that_raised() -> None:
    """A step that raises runs no post-hook; the next module call and the next step are right."""
    model = nn.Linear(2, 1).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(1, 2, device=DEVICE)

    def closure() -> torch.Tensor:
        raise ValueError("closure")

    with pytest.raises(ValueError, match="closure"):
        optimizer.step(closure)
    y = model(x)
    assert y.metadata.execution_phase == "forward"
    y.sum().backward()
    optimizer.step()
    assert model.weight.metadata.execution_phase == "optimizer"
    assert (x + 1).metadata.execution_phase == "forward"


def test_modules_called_inside_a_closure_are_forward() -> None:
    """The forward that an optimizer's closure runs is no optimizer work."""
    model = nn.Linear(2, 1).to(DEVICE)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
    x = torch.ones(1, 2, device=DEVICE)
    seen = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).sum()
        seen.append(loss)
        loss.backward()
        return loss

    optimizer.step(closure)
    inputs = [node for node in marid.graph(seen[0]).nodes if node.op is not None and node.scope.module_path == ""]
    assert all(node.scope.phase == "forward" for node in inputs)


def test_recomputed_forward_belongs_to_backward() -> None:
    """What a checkpoint computes again is work of the backward pass."""
    model = nn.Linear(2, 2).to(DEVICE)
    recomputed: list[str | None] = []

    def body(x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        recomputed.append(y.metadata.execution_phase)
        return y.tanh()

    x = torch.ones(1, 2, device=DEVICE, requires_grad=True)
    y = checkpoint(body, x, use_reentrant=False)
    assert isinstance(y, torch.Tensor)
    y.sum().backward()
    assert recomputed == ["forward", "backward"]


def test_source_line_is_the_users() -> None:
    """The innermost line outside of PyTorch and marid."""
    x = torch.ones(2, device=DEVICE)
    line = _line_above()
    assert x.metadata.source == f"{__file__}:{line}"
    y = nn.functional.gelu(x)
    line = _line_above()
    assert y.metadata.source == f"{__file__}:{line}"
    z = (
        x.mul(2)
        .add(1)
    )  # fmt: skip
    assert z.metadata.source is not None
    assert z.metadata.source.startswith(f"{__file__}:")
    assert int(z.metadata.source.rpartition(":")[2]) in range(line + 2, line + 8)


def test_the_line_that_runs_is_found_the_same_way_in_both_languages() -> None:
    """Also through a library's frames, from a thread, and where nothing was recorded before."""
    found: list[Any] = []

    def ask() -> None:
        found.extend([scopes.current_site(), scopes.capture_site(sys._getframe())])

    class Asks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ask()
            return x

    Asks()(torch.ones(1))
    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert len(found) == 4
    for one, other in zip(found[::2], found[1::2], strict=True):
        assert str(one) == str(other) == f"{__file__}:{ask.__code__.co_firstlineno + 1}"


def test_source_line_of_backward_and_step_is_their_call() -> None:
    """Backward is written where ``backward()`` is called."""
    model = nn.Linear(2, 1).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters())
    loss = model(torch.ones(1, 2, device=DEVICE)).sum()
    loss.backward()
    backward_line = _line_above()
    optimizer.step()
    step_line = _line_above()
    assert model.weight.grad is not None
    assert model.weight.grad.metadata.source == f"{__file__}:{backward_line}"
    assert model.weight.metadata.source == f"{__file__}:{step_line}"


def test_every_node_of_a_training_step_is_stamped() -> None:
    """No operation without line, phase and operation name."""
    model = Model().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2, device=DEVICE)).sum().backward()
    optimizer.step()
    operations = marid.graph(*model.parameters()).operations
    assert len(operations) > 20
    for node in operations:
        assert node.op is not None
        assert str(node.site).startswith(__file__), node.op.name
        assert node.scope.phase in {"forward", "backward", "optimizer"}


def test_threads_have_their_own_module_stacks() -> None:
    """Two threads inside of different modules do not see each other's path."""
    barrier = threading.Barrier(2, timeout=30)

    class Waits(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            barrier.wait()
            y = x + 1
            barrier.wait()
            return y

    found: dict[str, Any] = {}

    def work(name: str) -> None:
        parent = nn.ModuleDict({name: Waits()})
        parent.forward = lambda x: parent[name](x)
        found[name] = parent(torch.ones(1, device=DEVICE)).metadata.module_path

    threads = [threading.Thread(target=work, args=(name,)) for name in ("left", "right")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"left": "left", "right": "right"}


# --- lines of packages -----------------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An installed package, whose functions call others and the user."""
    folder = tmp_path / "site-packages" / "some_package"
    folder.mkdir(parents=True)
    folder.joinpath("__init__.py").write_text(
        "from typing_extensions import deprecated\n"
        "def double(x):\n    return x * 2\n"
        "def deep(x, depth=60):\n    return deep(x, depth - 1) if depth else double(x)\n"
        "def call(function):\n    return function()\n"
        "@deprecated('long ago', category=None)\ndef old(x):\n    return x * 3\n"
    )
    monkeypatch.syspath_prepend(str(folder.parent))
    yield importlib.import_module("some_package")
    del sys.modules["some_package"]


def test_a_line_of_a_package_stands_beside_the_users(package: Any) -> None:
    """However much lies between the two, and the same in both languages."""

    def ask(_: Any = None) -> None:
        found.extend([scopes.current_site(), scopes.capture_site(sys._getframe())])

    for call in (package.deep, package.double):
        recorded = call(torch.ones(2, device=DEVICE))._value.node.site
        assert str(recorded) == f"{__file__}:{_line_above()} (in some_package/__init__.py:3)"
        assert recorded.package.file == package.__file__
    found: list[Any] = []
    for _ in range(2):
        package.call(ask)  # the user's own, whoever calls it
        found.extend(package.deep(_Asks()))
    for one, other in zip(found[::2], found[1::2], strict=True):
        assert str(one) == str(other)
    assert [site.package is None for site in found] == [True, True, False, False] * 2


class _Asks:
    """In the place of a tensor: where it is multiplied."""

    __mul__ = functools.partialmethod(
        eval(  # code of nobody's file would be the user's, so it is given one of the standard library's
            compile("lambda self, _: (site(), capture(frame()))", scopes.__file__, "eval"),
            {"site": scopes.current_site, "capture": scopes.capture_site, "frame": sys._getframe},
        )
    )


def test_texts_have_both_lines(package: Any) -> None:
    """Metadata, errors, counters; a decorator of a backport is no line of anybody's."""
    x = torch.ones(2, device=DEVICE)
    assert package.old(x).metadata.source == f"{__file__}:{_line_above() + 1} (in some_package/__init__.py:10)"
    failed = package.double(torch.zeros(1, device=DEVICE)[torch.tensor([5], device=DEVICE)])
    line = _line_above()
    with pytest.raises(IndexError, match=rf"test_semantics.py:{line}\n  read at"):
        failed.tolist()
    package.call((x + 1).sum().item)
    line = _line_above()
    assert [sync.source for sync in marid.stats().syncs if sync.source.startswith(f"{__file__}:{line}")]
    assert "package.call((x + 1).sum().item)" in str(marid.explain())


def test_a_program_that_is_a_package_has_its_own_lines(package: Any) -> None:
    """There is no user's line beside it."""
    folder = Path(package.__file__).parent
    folder.joinpath("__main__.py").write_text(
        "import torch\nprint(torch.ones(2, device='remote_accelerator').metadata.source)\n"
    )
    command = [sys.executable, "-m", "some_package"]
    path = os.pathsep.join([str(folder.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": path}, timeout=120
    )
    assert done.stdout == f"{folder / '__main__.py'}:2\n"
