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
from torch.nn import functional as F

import marid
from marid.errors import WireError
from marid.remote.launch.command import _import
from marid.remote.worker import operators
from marid.remote.worker.checks import CHECKS
from marid.remote.worker.operators import check_call, operator_named
from tests.attacks.forge import Calls, Forger, outside
from tests.helpers import DEVICE

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
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]  # (LAPACK prints too)
    return {line[0]: line[1:] for line in lines}


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


@pytest.mark.conformance
@pytest.mark.parametrize("seed", range(2))
def test_no_single_change_of_a_call_leaves_its_memory(guard: str, seed: int) -> None:
    """Every argument, size, type, layout and number of some calls of each operator, one after the other."""
    assert not crashed(attacked(guard, admitted(), 0, seed))


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


def _numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


_NINE = torch.ones(1, 1, 3, 3)
_NAN = torch.full((1, 3, 3, 2), torch.nan)
_EMPTY = (torch.empty(0), torch.empty(0), torch.empty(0), torch.empty(0, dtype=torch.int32))
_HALVES = torch.ones(1, 1, 4, dtype=torch.bfloat16)
_FORGED: dict[str, tuple[Any, ...]] = {
    "aten.convolution.default": (_HALVES, _HALVES, None, [1000], [1], [2], True, [1], 1),
    "aten._embedding_bag.default": (
        *(torch.ones(10, 5), torch.arange(5), torch.arange(0), False, 0, False),
        torch.ones(5),
    ),
    "aten._pdist_forward.default": (torch.ones(2, 3, 0), 2.0),
    "aten.upsample_nearest1d.default": (torch.ones(1, 1, 5, dtype=torch.uint8), [7], 1e-30),
    "aten._upsample_nearest_exact3d.default": (torch.ones(1, 1, 3, 3, 3), [4, 4, 4], 1e-25, 1.0, 1.0),
    "aten._upsample_bilinear2d_aa.default": (torch.ones(1, 2, 5, 5), [7, 7], False, 1e-18, 1e-18),
    "aten._upsample_lanczos2d_aa_backward.default": (torch.ones(1, 2, 7, 7), [7, 7], [1, 2, 5, 5], False, 1e-18, None),
    "aten.grid_sampler_2d_backward.default": (
        torch.ones(1, 1, 3, 3),
        torch.ones(1, 1, 4, 4),
        _NAN,
        0,
        1,
        False,
        [1, 1],
    ),
    "aten.convolution_backward.default": (
        *(torch.ones(1, 4, 5, 5).double(), torch.ones(2, 4, 5, 5).double(), torch.ones(4, 4, 3, 3).double(), [4]),
        *([1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True]),
    ),
    "aten._scaled_dot_product_flash_attention_for_cpu.default": (
        *(torch.ones(1, 2, 40, 1).expand(1, 2, 40, 16), torch.ones(1, 2, 40, 16), torch.ones(1, 2, 40, 16)),
    ),
    "aten._linalg_eigvals.default": (torch.full((6, 6), torch.nan),),
    "aten._fused_moving_avg_obs_fq_helper.default": (
        *(torch.ones(2, 4), _numbers(1), _numbers(1), *_EMPTY, 0.1, 0, 255, 0, False, False),
    ),
}


@pytest.mark.parametrize("name", _FORGED)
def test_what_an_attack_has_found_is_refused(name: str) -> None:
    """Few of these came up by chance: scales beside sizes, types of all tensors, and floats that become an index."""
    with pytest.raises(ValueError, match="do not belong together"):
        operator_named(name).call(*_FORGED[name])


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("aten.copy.default", (None, torch.ones(2))),
        ("aten.cat.default", ([torch.ones(2), None],)),
        ("aten.cat.default", (None,)),
        ("aten.view.dtype", (torch.ones(2), 7000)),
    ],
)
def test_nothing_and_numbers_stand_for_nothing_else(name: str, args: Any) -> None:
    with pytest.raises(WireError, match="is given no"):
        check_call(operator_named(name), args, ())
    check_call(operator_named("aten.index.Tensor"), (torch.ones(2), [None, torch.ones(1)]), ())
    check_call(operator_named("aten.clamp.default"), (torch.ones(2), None, 1), (("max", None),))


def test_a_scale_that_fits_is_let_through() -> None:
    x = torch.rand(1, 2, 5, 5)
    for scale in (None, 2.0, 1.9, 0.5):
        found = operator_named("aten.upsample_bilinear2d.default").call(x, [10, 10], False, scale, scale)
        assert torch.equal(found, torch.ops.aten.upsample_bilinear2d.default(x, [10, 10], False, scale, scale))


@pytest.mark.parametrize(
    "name",
    ["ctc_loss.IntList", "embedding_bag.default", "embedding_backward.default", "_pad_packed_sequence.default"]
    + ["upsample_nearest2d.vec", "cross_entropy_loss.default"],
)
def test_what_pytorch_writes_out_in_other_operators_is_refused(name: str) -> None:
    """What those are made of would run behind no check; a client takes them apart itself."""
    with pytest.raises(WireError, match="not admitted"):
        operator_named(f"aten.{name}")


@pytest.mark.parametrize("inference", [False, True])
def test_a_client_names_none_of_them(inference: bool) -> None:
    """In inference mode, where they come whole to a tensor's class, either."""
    with torch.inference_mode(inference):
        x = torch.rand(4, 4, device=DEVICE)
        scores, targets = torch.rand(5, 2, 5, device=DEVICE).log_softmax(-1), torch.ones(2, 3, dtype=torch.int64)
        found = [
            F.ctc_loss(scores, targets.to(DEVICE), _numbers(5, 5), _numbers(3, 3)),
            F.embedding_bag(_numbers(0, 1, 2).to(DEVICE), x, _numbers(0, 1).to(DEVICE)),
            F.cross_entropy(x, _numbers(0, 1, 2, 3).to(DEVICE)),
            F.interpolate(x[None, None], scale_factor=2.0),
            torch.quantile(x, 0.5),
            torch.einsum("ij,jk->ik", x, x),
            F.max_pool1d(x, 2),
            F.linear(x, x),
            torch.where(x > 0.5, x, 0.0),
            torch.linalg.pinv(x),
            F.conv2d(x[None, None], x[None, None, :2, :2]),
        ]
        nodes: Any = marid.graph(*found).nodes
        named = {str(node.op.func) for node in nodes if node.op is not None}
    assert len(named) > 8
    for name in named:
        operator_named(name)


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
