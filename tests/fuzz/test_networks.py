"""Differential fuzzing of networks: what is trained on the lazy device is what eager PyTorch trains on the CPU.

``MARID_FUZZ_NETWORKS`` sets how many networks the conformance run takes (20,000 unless it is set).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import marid
from marid.execute.compiled import workers

from .networks import TIERS, Network, Tier, check, network, source
from .shrinking import minimised, script
from .training import Training
from .writer import Block

pytestmark = [pytest.mark.filterwarnings("ignore")]

NETWORKS = 160
CONFORMANCE_NETWORKS = int(os.environ.get("MARID_FUZZ_NETWORKS", "20000"))
BATCH = 500
# Of a hundred networks of the conformance run: most cost a tenth of a second, and compiling takes a minute.
REPLAYED, COMPILED = 20, 0.1

FLAT = TIERS["flat"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Kernels of networks so small are quickest with one thread, and tests may run beside each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _fuzz(seeds: range, tier: Tier) -> None:
    for seed in seeds:
        found = check(network(seed), tier)
        if found:
            smallest = minimised(network(seed), found[0], tier)
            text = "\n".join(map(str, check(smallest, tier) or found))
            raise AssertionError(f"seed {seed}, {tier.name}: {text}\n\n{script(smallest, tier)}")


def test_networks_are_light() -> None:
    """A block whose matrices are as wide as its activation is long does not fit: 9704 had two of 18,720 by 18,720."""
    for seed in (*range(20), 9704):
        names = {"torch": torch, "nn": torch.nn, "self": torch.nn.Module()}
        for statement in [line for block in network(seed).blocks for line in block.init]:
            exec(statement, names)
        assert sum(parameter.numel() for parameter in names["self"].parameters()) < 1 << 23


def _batches(count: float) -> list[range]:
    """Seeds that are not those of the ordinary run, in batches."""
    first, stop = NETWORKS, NETWORKS + int(count)
    return [range(start, min(start + BATCH, stop)) for start in range(first, stop, BATCH)]


@pytest.mark.parametrize("part", range(4))
def test_random_networks(part: int) -> None:
    """Outputs, gradients, parameters, buffers and optimizer state are equal, with strides, and so are errors."""
    _fuzz(range(part * NETWORKS // 4, (part + 1) * NETWORKS // 4), FLAT)


@pytest.mark.in_process("operations run at once in this process alone")
@pytest.mark.parametrize("part", range(2))
def test_random_networks_at_once(part: int) -> None:
    """The same with operations that run as they are written."""
    _fuzz(range(part * NETWORKS // 2, (part + 1) * NETWORKS // 2), TIERS["immediate"])
    assert marid.stats().ops_immediate > 0


@pytest.mark.in_process("replays of devices that are workers have tests of their own")
def test_random_networks_replayed() -> None:
    """The same with the step under ``marid.compile``."""
    _fuzz(range(NETWORKS // 10), TIERS["replayed"])


@pytest.mark.conformance
@pytest.mark.parametrize("seeds", _batches(CONFORMANCE_NETWORKS * (1 - (REPLAYED + COMPILED) / 100)), ids=str)
def test_many_random_networks(seeds: range) -> None:
    """The same over a number of networks that takes long."""
    _fuzz(seeds, FLAT)


@pytest.mark.conformance
@pytest.mark.parametrize("seeds", _batches(CONFORMANCE_NETWORKS * REPLAYED / 100), ids=str)
def test_many_random_networks_replayed(seeds: range) -> None:
    """The same with the step under ``marid.compile``."""
    _fuzz(seeds, TIERS["replayed"])


@pytest.mark.conformance
@pytest.mark.in_process("only the in-process engine compiles")
@pytest.mark.parametrize("seeds", _batches(CONFORMANCE_NETWORKS * COMPILED / 100), ids=str)
def test_many_random_networks_compiled(seeds: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values agree within tolerances where everything that runs twice is compiled."""
    monkeypatch.setattr(marid.settings, "cache_dir", tmp_path)
    try:
        _fuzz(seeds, TIERS["compiled"])
        assert marid.stats().compiled_runs
    finally:
        workers.compiler.close()


# --- the fuzzer itself -----------------------------------------------------------------------------------------------


def _planted(*forward: str, after: tuple[str, ...] = ()) -> Network:
    """A network of three layers of which the last looks at its device, as a device with a bug would do."""
    shape = (3, 4)
    layers = [
        Block((f"self.{name} = nn.Linear(4, 4)",), (f"x = torch.tanh(self.{name}(x))",), shape, shape)
        for name in ("first", "second")
    ]
    buffer = "self.register_buffer('counted', torch.zeros(2))"
    training = Training(
        dtype="torch.float32",
        batches=(2, 1, 2),
        setup=("optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)",),
        before=("net.train(number != 1)",),
        inputs=("x = torch.randn(batch, 3, 4, generator=data).to(device, dtype)", "x.requires_grad_()"),
        step=(
            "optimizer.zero_grad()",
            "out = net(x)",
            "loss = out.square().mean()",
            "loss.backward()",
            "optimizer.step()",
        ),
        after=after,
    )
    return Network((*layers, Block((buffer,), forward, shape, shape)), training, each_step=True)


_ON_DEVICE = "x.device.type != 'cpu'"
_WRONG = {
    "values": _planted(f"x = x + ({_ON_DEVICE})"),
    "strides": _planted(f"x = x.mT.contiguous().mT if {_ON_DEVICE} else x"),
    "shape": _planted(f"x = x.repeat(1, 2, 1) if {_ON_DEVICE} else x"),
    "dtype": _planted(f"x = x.double() if {_ON_DEVICE} else x"),
    "requires_grad": _planted("x = x * 1", after=("net.first.bias.requires_grad_(device == 'cpu')",)),
    "raises": _planted(f"if {_ON_DEVICE}: raise KeyError(3)"),
}


@pytest.mark.parametrize("kind", _WRONG)
@pytest.mark.parametrize("each_step", [True, False])
def test_every_kind_of_difference_is_found(kind: str, each_step: bool) -> None:
    """A network that looks at its device is a device with a bug."""
    assert kind in [one.kind for one in check(replace(_WRONG[kind], each_step=each_step), FLAT)]


@pytest.mark.parametrize(
    ("statement", "name"),
    [
        ("net.first.weight.data.add_(device != 'cpu')", "first.weight"),
        ("net.first.weight.grad.add_(device != 'cpu')", "first.weight.grad"),
        ("net.zero_grad(set_to_none=device != 'cpu')", "first.weight.grad"),
        ("net.counted.add_(device != 'cpu')", "counted"),
        ("x.grad.add_(device != 'cpu')", "x.grad"),
        (
            "for state in optimizer.state.values():\n    state['momentum_buffer'].add_(device != 'cpu')",
            "optimizer.first.weight.momentum_buffer[0]",
        ),
    ],
)
def test_all_that_a_training_holds_is_compared(statement: str, name: str) -> None:
    """Also where it does not show in the outputs, at each step."""
    values = [one for one in check(_planted("x = x * 1", after=(statement,)), FLAT) if one.kind == "values"]
    assert [one.name for one in values] == [f"{name} at step 0"]


def test_a_network_that_is_right_has_no_difference() -> None:
    """Also when a replay or a compiled program runs it."""
    right = _planted("x = x * 2")
    assert check(right, FLAT) == []
    assert check(right, TIERS["replayed"]) == []


def test_a_seed_gives_the_same_network() -> None:
    """So that a failure can be run again."""
    assert [source(network(seed)) for seed in range(20)] == [source(network(seed)) for seed in range(20)]


@pytest.mark.parametrize("kind", ["values", "strides", "raises"])
def test_a_failure_is_reduced_to_what_it_needs(kind: str) -> None:
    """Layers, options and statements that a failure does not need are taken out, and it stays what it was."""
    found = check(_WRONG[kind], FLAT)
    smallest = minimised(_WRONG[kind], found[0], FLAT)
    assert check(smallest, FLAT)[0].is_like(found[0])
    text = source(smallest)
    assert len(smallest.blocks) == 1
    assert len(smallest.training.batches) == 1
    assert "device.type" in text
    assert not any(word in text for word in ("Linear", "optimizer", "backward", "requires_grad_"))


@pytest.mark.parametrize(
    ("forward", "tier", "verdict"),
    [(f"x = x + ({_ON_DEVICE})", "flat", "different"), ("x = x + 1", "replayed", "equal")],
)
def test_a_printed_script_runs_and_shows_the_difference(forward: str, tier: str, verdict: str, tmp_path: Path) -> None:
    """What a failure prints is a complete Python script."""
    path = tmp_path / "failure.py"
    path.write_text(script(_planted(forward), TIERS[tier]))
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == verdict
