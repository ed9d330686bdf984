"""Every operator that a worker admits, called with what no client of ours sends, between guard pages."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from marid.errors import WireError
from marid.remote.launch.command import _import
from marid.remote.worker import operators
from marid.remote.worker.checks import CHECKS
from marid.remote.worker.operators import operator_named
from tests.attacks.forge import Calls, Forger, outside

HERE = Path(__file__).parent
ENDS_ITSELF = -signal.SIGFPE
"""A division that the processor refuses ends the process that does it, and reads nothing."""


def admitted() -> list[str]:
    """The names of all operators that a client may name."""
    found = []
    for qualified in sorted(torch._C._dispatch_get_all_op_names()):
        namespace, _, rest = qualified.partition("::")
        if namespace in ("aten", "marid"):
            base, _, overload = rest.partition(".")
            try:
                operator_named(name := f"{namespace}.{base}.{overload or 'default'}")
            except WireError:
                continue
            found.append(name)
    return found


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("guard pages need a C compiler, and Linux")
    library = str(tmp_path_factory.mktemp("guard") / "guard.so")
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, str(HERE / "guard.c"), "-ldl"], check=True)
    return library


def attacked(guard: str, names: list[str], count: int, seed: int) -> dict[str, Any]:
    """What became of each operator: how many calls were not refused, what ended the process, and at which call."""
    environment = {**os.environ, "LD_PRELOAD": guard, "OMP_NUM_THREADS": "1", "MARID_COMPILE": "0"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-m", "tests.attacks.forge", str(count), str(seed)]
    done = subprocess.run(
        command,
        input="\n".join(names),
        capture_output=True,
        text=True,
        env=environment,
        cwd=HERE.parents[1],
        check=True,
    )
    return {line[0]: line[1:] for line in map(json.loads, done.stdout.splitlines())}


def crashed(found: dict[str, Any]) -> list[Any]:
    return [(name, *rest) for name, rest in found.items() if rest[1] not in (None, "stuck", -ENDS_ITSELF)]


def test_the_guard_notices(guard: str) -> None:
    """What PyTorch itself takes on trust is seen to go wrong: a view that does not lie in its memory."""
    code = (
        "import torch\n"
        "x = torch.ones(15)\n"
        "print(torch.ops.aten._reshape_alias(x, [15], [1]).clone().sum().item(), flush=True)\n"
        "torch.ops.aten._reshape_alias(x, [30], [1]).clone()\n"
    )
    environment = {**os.environ, "LD_PRELOAD": guard, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGSEGV
    assert done.stdout == "15.0\n"


def test_no_operator_leaves_its_memory(guard: str) -> None:
    names = admitted()
    found = attacked(guard, names, 8, 0)
    assert set(found) == set(names)
    assert not crashed(found)


@pytest.mark.conformance
@pytest.mark.parametrize("seed", range(5))
def test_no_operator_leaves_its_memory_in_many_calls(guard: str, seed: int) -> None:
    found = attacked(guard, admitted(), 300, seed)
    assert not crashed(found)
    assert sum(worked > 0 for worked, *_ in found.values()) > 0.8 * len(found)  # the attacks are near what is valid


def test_a_view_outside_of_its_memory_is_refused() -> None:
    x = torch.ones(15)
    for name, args in (
        ("aten._reshape_alias.default", ([16], [1])),
        ("aten._reshape_alias.default", ([2], [1 << 62])),
        ("aten._reshape_alias.default", ([2, 2], [-1, 1])),
        ("aten.as_strided_.default", ([2], [1 << 62])),
        ("aten.as_strided_.default", ([1], [1], -1)),
        ("aten.as_strided.default", ([16], [1])),
        ("aten.as_strided.default", ([2, 2], [1, (1 << 63) - 1])),
    ):
        with pytest.raises((RuntimeError, ValueError)):
            operator_named(name).call(x, *args)
        assert not outside(x)
    assert operator_named("aten._reshape_alias.default").call(x, [3, 5], [5, 1]).shape == (3, 5)


@pytest.mark.parametrize(
    "name",
    [
        *("_convert_indices_from_coo_to_csr.default", "_cummax_helper.default", "set_.source_Tensor_storage_offset"),
        *("from_file.default", "_print.default", "record_stream.default"),
        *("_sparse_mm.default", "_cudnn_rnn.default", "_foobar.default", "quantized_lstm_cell.default"),
        *("max_pool2d_with_indices_backward.grad_input", "_fused_adam.default"),
    ],
)
def test_what_is_not_in_the_list_is_refused(name: str) -> None:
    with pytest.raises(WireError):
        operator_named(f"aten.{name}")


@pytest.mark.parametrize("name", ["marid.compiled.default", "marid.product.default", "prims.add.default"])
def test_what_a_worker_puts_in_place_of_operators_cannot_be_named(name: str) -> None:
    with pytest.raises(WireError):
        operator_named(name)


def test_checks_let_pass_what_pytorch_itself_calls() -> None:
    """Of each checked operator of which PyTorch's samples have calls, one at least is let through."""
    calls, forger = Calls(), Forger(random.Random(0))
    refused = []
    for name in admitted():
        base = name.split(".")[1]
        if base not in CHECKS or name not in calls.recorded:
            continue
        reasons = []
        for args, kwargs in calls.recorded[name]:
            try:
                operator_named(name).call(
                    *[forger.build(arg) for arg in args], **{key: forger.build(arg) for key, arg in kwargs.items()}
                )
            except (RuntimeError, ValueError, IndexError) as error:
                reasons.append(str(error))
        if any("do not belong together" in reason for reason in reasons):
            refused.append((name, reasons))
    assert not refused


def test_fused_optimizers_take_layouts_that_only_look_different() -> None:
    """Kernels go through memory whatever the strides: those of the gradient of a matrix of one row need not be its own.
    What would lead out of its memory is refused."""
    step = operator_named("aten._fused_sgd_.default").call
    options = {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.5, "dampening": 0.0, "nesterov": False}
    options |= {"maximize": False, "is_first_step": True}
    weight, grad = torch.zeros(1, 2), torch.ones(2, 1).t()
    assert weight.stride() != grad.stride()
    step([weight], [grad], [], **options)
    assert weight.tolist() == [[-0.5, -0.5]]
    for params, grads in (([torch.zeros(4)], [torch.ones(1).expand(4)]), ([torch.zeros(1).expand(4)], [torch.ones(4)])):
        with pytest.raises(ValueError, match="do not belong together"):
            step(params, grads, [], **options)


def test_noise_is_taken_in_any_layout() -> None:
    """The kernel goes through the memory of the noise, and lays its input out anew."""
    x, noise = torch.linspace(-1, 1, 6).view(2, 3).t(), torch.zeros(2, 3).t()
    operator_named("aten.rrelu_with_noise.default").call(x, noise, 0.1, 0.3, True)
    assert 0 < int((noise < 1).sum()) < 6
    with pytest.raises(ValueError, match="do not belong together"):
        operator_named("aten.rrelu_with_noise.default").call(x, torch.zeros(1).expand(3, 2), 0.1, 0.3, True)


def test_layer_norm_takes_a_weight_in_any_layout() -> None:
    """Its kernel lays that out anew, but not the statistics."""
    x, weight, mean = torch.rand(2, 3, 3), torch.rand(3, 3).t(), torch.rand(2, 1, 1)
    call = operator_named("aten.native_layer_norm_backward.default").call
    mask = [True, True, True]
    found = call(x, x, [3, 3], mean, mean, weight, weight, mask)
    expected = call(x, x, [3, 3], mean, mean, weight.contiguous(), weight.contiguous(), mask)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    with pytest.raises(ValueError, match="do not belong together"):
        call(x, x, [3, 3], mean[:1].expand(2, 1, 1), mean, weight, weight, mask)


def test_medians_are_refused_along_a_repeated_dimension_only() -> None:
    x = torch.rand(1, 3).expand(2, 3)
    for name in ("median", "nanmedian"):
        assert torch.equal(operator_named(f"aten.{name}.dim").call(x, 1)[0], x.contiguous().median(1)[0])
        assert operator_named(f"aten.{name}.default").call(x) == x.contiguous().median()
        with pytest.raises(ValueError, match="do not belong together"):
            operator_named(f"aten.{name}.dim").call(x, -2)


def test_every_check_is_of_an_operator_that_is_admitted() -> None:
    names = admitted()
    assert set(CHECKS) <= {name.split(".")[1] for name in names}
    assert len([name for name in names if name.startswith("marid.")]) == 18


def test_an_import_that_defines_no_operators_admits_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "_namespaces", set(operators._namespaces))
    before = set(operators._namespaces)
    _import("colorsys")
    assert operators._namespaces == before
    operators.operator_named.cache_clear()
    for name in ("c10d.barrier.default", "symm_mem.empty_strided_p2p.default", "quantized.add.default"):
        with pytest.raises(WireError):
            operator_named(name)
