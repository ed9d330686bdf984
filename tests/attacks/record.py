"""Calls of ATen operators as PyTorch's own samples make them, written to ``calls.json.gz``: what the attacks alter.

``python -m tests.attacks.record`` writes the file again, for another version of PyTorch.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["FILE", "Unfit", "described"]

FILE = Path(__file__).with_name("calls.json.gz")
_KEPT = 4  # calls of one operator
_SAMPLES = 6  # of one entry in PyTorch's list
_NUMEL = 600


class Unfit(Exception):
    """A call with something in it that a client cannot send."""


def described(item: Any) -> Any:
    """An argument as plain data. Raises ``Unfit``."""
    if item is None or type(item) in (bool, int, str):
        return item
    if type(item) is float:
        return {"f": item.hex()}
    if type(item) is complex:
        return {"c": [item.real.hex(), item.imag.hex()]}
    if isinstance(item, torch.Tensor):
        if item.layout is not torch.strided or item.numel() > _NUMEL or item.is_quantized or item.device.type != "cpu":
            raise Unfit
        entry: dict[str, Any] = {"T": str(item.dtype).removeprefix("torch."), "s": list(item.shape)}
        entry["d"] = list(item.stride())
        if not item.is_floating_point() and not item.is_complex():
            entry["v"] = item.detach().flatten().tolist()
        return entry
    if isinstance(item, (list, tuple)):
        return [described(part) for part in item]
    if isinstance(item, torch.dtype):
        return {"t": str(item).removeprefix("torch.")}
    if isinstance(item, torch.memory_format):
        return {"m": str(item).removeprefix("torch.")}
    if item is torch.strided or isinstance(item, torch.device):
        return None
    raise Unfit


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, dict[str, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kept = self.calls.setdefault(str(func), {}) if func.namespace == "aten" else None
        if kept is not None and len(kept) < _KEPT:
            with contextlib.suppress(Unfit):
                call = [described(list(args)), {name: described(arg) for name, arg in kwargs.items()}]
                kept.setdefault(json.dumps(call, sort_keys=True), call)
        return func(*args, **kwargs)


def _samples() -> Iterator[tuple[str, Any]]:
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db
    from torch.testing._internal.opinfo.definitions import signal as _  # noqa: F401

    for info in op_db:
        for dtype in (torch.float32, torch.int64, torch.bool, torch.complex64):
            if dtype not in info.dtypes:
                continue
            gradients = info.supports_autograd and dtype.is_floating_point
            samples = info.sample_inputs("cpu", dtype, requires_grad=gradients)
            for _number, sample in zip(range(_SAMPLES), samples, strict=False):
                variants = [info.get_op(), info.get_inplace() if not gradients else None, info.get_method()]
                for variant in variants:
                    if variant is not None:
                        yield info.name, (lambda f=variant, s=sample: f(s.input, *s.args, **s.kwargs))
            if dtype is torch.float32:
                continue
            if dtype is torch.int64:
                break
    for info in module_db:
        for one in info.module_inputs_func(info, "cpu", torch.float32, True, training=True)[:_SAMPLES]:

            def run(info: Any = info, one: Any = one) -> Any:
                made = one.constructor_input
                module = info.module_cls(*made.args, **made.kwargs)
                return module(*one.forward_input.args, **one.forward_input.kwargs)

            yield info.name, run


def _optimizers() -> Iterator[tuple[str, Any]]:
    from torch.testing._internal.common_optimizers import optim_db

    for info in optim_db:
        for options in ({}, {"foreach": True}, {"fused": True}):

            def run(info: Any = info, options: Any = options) -> Any:
                params = [torch.randn(2, 3, requires_grad=True), torch.randn(4, requires_grad=True)]
                optimizer = info.optim_cls(params, **options)
                for _ in range(2):
                    sum(p.square().sum() for p in params).backward()
                    optimizer.step(lambda: torch.zeros(())) if info.step_requires_closure else optimizer.step()

            yield info.optim_cls.__name__, run


class _TooLong(Exception):
    pass


def _main() -> None:
    def ended(_number: int, _frame: Any) -> None:
        raise _TooLong

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    signal.signal(signal.SIGALRM, ended)
    recorder = _Recorder()
    for samples in (_samples, _optimizers):
        for _name, run in samples():
            signal.alarm(5)
            try:
                with recorder:
                    found = run()
                    outputs = [one for one in torch.utils._pytree.tree_leaves(found) if isinstance(one, torch.Tensor)]
                    outputs = [one for one in outputs if one.requires_grad and one.is_floating_point()]
                    if outputs:
                        torch.autograd.backward(outputs, [torch.randn_like(one) for one in outputs])
            except (
                RuntimeError,
                TypeError,
                ValueError,
                LookupError,
                AttributeError,
                AssertionError,
                ArithmeticError,
                _TooLong,
            ):
                continue
            finally:
                signal.alarm(0)
    calls = {name: list(kept.values()) for name, kept in sorted(recorder.calls.items()) if kept}
    with gzip.GzipFile(FILE, "wb", mtime=0) as file:
        file.write(json.dumps(calls, separators=(",", ":")).encode())
    print(len(calls), "operators", FILE.stat().st_size, "bytes")


if __name__ == "__main__":
    _main()
