"""``torch.autocast`` and ``GradScaler`` on the device, against the CPU's, one by one."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import marid
from marid.frontend import autocast
from tests.helpers import DEVICE, assert_same, on_both, seeded

OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "matmul": lambda x, w: x @ w,
    "mm": torch.mm,
    "linear": lambda x, w: F.linear(x, w),
    "linear bias": lambda x, w: F.linear(x, w, x[0]),
    "addmm": lambda x, w: torch.addmm(x, x, w),
    "bmm": lambda x, w: torch.bmm(x[None], w[None]),
    "baddbmm": lambda x, w: torch.baddbmm(x[None], x[None], w[None]),
    "einsum": lambda x, w: torch.einsum("ij,jk->ik", x, w),
    "conv1d": lambda x, w: F.conv1d(x[None], w[:, :, None]),
    "conv2d": lambda x, w: F.conv2d(x[None, None], w[None, None]),
    "conv_transpose2d": lambda x, w: F.conv_transpose2d(x[None, None], w[None, None]),
    "attention": lambda x, w: F.scaled_dot_product_attention(x[None, None], w[None, None], x[None, None]),
    "prelu": lambda x, w: F.prelu(x, w[0]),
    "softmax": lambda x, w: F.softmax(x @ w, -1),
    "log_softmax": lambda x, w: F.log_softmax(x @ w, -1),
    "layer_norm": lambda x, w: F.layer_norm(x @ w, (4,)),
    "gelu": lambda x, w: F.gelu(x @ w),
    "sum": lambda x, w: (x @ w).sum(),
    "prod": lambda x, w: (x @ w).prod(),
    "cumsum": lambda x, w: (x @ w).cumsum(0),
    "mse_loss": lambda x, w: F.mse_loss(x @ w, x),
    "l1_loss": lambda x, w: F.l1_loss(x @ w, x),
    "cross_entropy": lambda x, w: F.cross_entropy(x @ w, x.softmax(-1)),
    "bce_with_logits": lambda x, w: F.binary_cross_entropy_with_logits(x @ w, x.sigmoid()),
    "norm": lambda x, w: (x @ w).norm(),
    "cat": lambda x, w: torch.cat([x @ w, x]),
    "stack": lambda x, w: torch.stack([x @ w, x]),
    "cat of three types": lambda x, w: torch.cat([x @ w, x, x.half(), x.double()]),
    "cat of another type": lambda x, w: torch.cat([(x @ w).to(torch.float16), (x @ w).bfloat16()]),
    "index_copy": lambda x, w: torch.index_copy(x, 0, torch.tensor([1], device=x.device), (x @ w)[:1]),
    "addmm_activation": lambda x, w: torch.ops.aten._addmm_activation(x, x, w),
    "add": lambda x, w: (x @ w) + x,
    "pow": lambda x, w: (x @ w) ** 2,
    "exp": lambda x, w: (x @ w).exp(),
    "inverse": lambda x, w: torch.linalg.inv((x @ w).float() + 5 * torch.eye(4, device=x.device)),
    "cdist": lambda x, w: torch.cdist(x @ w, x @ w),
    "trace": lambda x, w: (x @ w).trace(),
    "quantile": lambda x, w: (x @ w).quantile(0.5),
    "avg_pool3d": lambda x, w: F.avg_pool3d((x @ w)[None, None, None], (1, 2, 2)),
    "rms_norm": lambda x, w: F.rms_norm(x @ w, (4,)),
    "float64": lambda x, w: x.double() @ w.double(),
    "integers": lambda x, w: x.long() * w.long(),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_have_the_dtypes_of_cpu_autocast(name: str, dtype: torch.dtype) -> None:
    """Value and dtype of each operation, or its error."""

    def run(device: str) -> Any:
        x, w = torch.randn(4, 4, device=device), torch.randn(4, 4, device=device)
        with torch.autocast(torch.device(device).type, dtype=dtype):
            try:
                return OPERATIONS[name](x, w)
            except RuntimeError as error:
                return type(error).__name__

    on_both(run)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_training_under_autocast(dtype: torch.dtype) -> None:
    """Gradients arrive in the parameters' own dtype, equal to the CPU's."""

    def run(device: str) -> list[Any]:
        model = seeded(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 2)), device)
        with torch.autocast(torch.device(device).type, dtype=dtype):
            out = model(torch.randn(6, 4, device=device))
            loss = F.cross_entropy(out, torch.tensor([0, 1, 0, 1, 0, 1], device=device))
        loss.backward()
        return [out, loss, *(p.grad for p in model.parameters())]

    on_both(run)
    assert marid.stats().fallbacks == {}


def test_autocast_state() -> None:
    """Off outside, off when disabled, nestable, and back after an exception."""
    x = torch.ones(2, 2, device=DEVICE)
    assert (x @ x).dtype is torch.float32
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert torch.is_autocast_enabled(DEVICE)
        assert (x @ x).dtype is torch.bfloat16
        with torch.autocast(DEVICE, enabled=False):
            assert (x @ x).dtype is torch.float32
        with torch.autocast(DEVICE, dtype=torch.float16):
            assert (x @ x).dtype is torch.float16
        assert (x @ x).dtype is torch.bfloat16
    with pytest.raises(ZeroDivisionError), torch.autocast(DEVICE, dtype=torch.bfloat16):
        1 / 0
    assert (x @ x).dtype is torch.float32
    assert not torch.is_autocast_enabled(DEVICE)


def test_an_unsupported_dtype_warns_and_disables() -> None:
    """As on other devices."""
    with pytest.warns(UserWarning, match=r"(?i)autocast"), torch.autocast(DEVICE, dtype=torch.float64):
        assert (torch.ones(2, 2, device=DEVICE) @ torch.ones(2, 2, device=DEVICE)).dtype is torch.float32


def test_autocast_of_the_cpu_leaves_the_device_alone() -> None:
    """And the other way round."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (torch.ones(2, 2, device=DEVICE) @ torch.ones(2, 2, device=DEVICE)).dtype is torch.float32
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32


def test_programs_recorded_under_autocast_run_outside_of_it() -> None:
    """When a value is read decides nothing."""
    x = torch.randn(3, 3, device=DEVICE)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        low = x @ x
    high = x @ x
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert_same(high, x.cpu() @ x.cpu())
    assert_same(low, x.cpu().bfloat16() @ x.cpu().bfloat16())


def _scaled_training(device: str, poison: int | None) -> list[Any]:
    model = seeded(nn.Linear(4, 2), device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(torch.device(device).type, init_scale=1024.0, growth_interval=2)
    seen: list[Any] = []
    for step in range(5):
        optimizer.zero_grad()
        loss = model(torch.randn(3, 4, device=device)).square().mean()
        if step == poison:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        seen.append(scaler.get_scale())
    state = {k: v for k, v in scaler.state_dict().items() if k != "_growth_tracker"}
    return [seen, state, *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize("poison", [None, 0, 2])
def test_grad_scaler(poison: int | None) -> None:
    """Scaling, unscaling, skipping a step with infinities, and growing again: as on the CPU."""
    on_both(lambda device: _scaled_training(device, poison))


def test_the_lists_are_those_of_the_cpu() -> None:
    """Every operator that PyTorch registers for autocast on the CPU, and no other, is registered for the device."""

    def registered(key: str) -> set[str]:
        names = torch._C._dispatch_get_all_op_names()
        return {name for name in names if torch._C._dispatch_has_kernel_for_dispatch_key(name, key)}

    assert registered("AutocastPrivateUse1") - {"marid::linear_activation"} == registered("AutocastCPU")


def test_threads_that_are_the_first_to_use_it_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lists are registered once, and nobody goes on before they are."""
    register, calls = autocast._register, []

    def slowly(policies: Any) -> None:
        calls.append(policies)
        time.sleep(0.2)
        register(policies)

    autocast._unregister()
    monkeypatch.setattr(autocast, "_register", slowly)
    with ThreadPoolExecutor(4) as threads:
        found = [threads.submit(_product_under_autocast) for _ in range(4)]
    assert [one.result() for one in found] == [torch.bfloat16] * 4
    assert len(calls) == 1


def _product_under_autocast() -> torch.dtype:
    x = torch.ones(2, 2, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        return (x @ x).dtype


@pytest.mark.parametrize("spelt", ["an index", "the switch"])
def test_autocast_that_does_not_ask_for_dtypes(spelt: str) -> None:
    """``torch.autocast`` asks where it is given the name of the device type alone."""
    autocast._unregister()
    x = torch.ones(2, 2, device=DEVICE)
    if spelt == "an index":
        with torch.autocast(str(x.device), torch.bfloat16):
            made = x @ x
    else:
        before = torch.get_autocast_dtype(DEVICE)
        torch.set_autocast_dtype(DEVICE, torch.bfloat16)
        torch.set_autocast_enabled(DEVICE, True)
        try:
            made = x @ x
        finally:
            torch.set_autocast_enabled(DEVICE, False)
            torch.set_autocast_dtype(DEVICE, before)
    assert made.dtype is torch.bfloat16
    assert (x @ x).dtype is torch.float32
