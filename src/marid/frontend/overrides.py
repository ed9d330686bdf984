"""Composite operators whose C++ code takes another road for foreign devices than on the CPU.

Each is replaced for the device by the steps that the CPU takes, so that results are bitwise equal. They must also be
taken apart when they arrive whole (in inference mode, when autograd is off).
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from marid import policy
from marid.frontend import autocast, handles
from marid.frontend.observe import observer
from marid.frontend.record import Recorder, special
from marid.native import module
from marid.ops.facts import named
from marid.semantics.tracebacks import folded

aten = torch.ops.aten

_replacements: dict[Any, Callable[..., Any]] = {}


def _replaces(*funcs: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(replacement: Callable[..., Any]) -> Callable[..., Any]:
        for func in funcs:
            _replacements[func] = replacement
            special(func)(lambda _recorder, args, kwargs: replacement(*args, **kwargs))
        return replacement

    return register


def register() -> None:
    """Have composite operators replaced above autograd, or run as a whole where they run at once."""
    for func, replacement in _replacements.items():
        module.replace(func._schema.name, func._schema.overload_name, folded(replacement))
    for full_name, whole in named("whole").items():
        name, _, overload = full_name.partition(".")
        module.compose(name, overload.removeprefix("default"), whole == "in_rows")


# Recorded whole: where nobody differentiates them the CPU has a kernel for one, and takes the other apart when it runs
# (native/composites.cpp says when).
special(aten.linear.default, aten.max_pool1d.default, by_key=True)(Recorder.record)


# Fused attention multiplies by views of weights. In inference mode these require gradients where the weights do, and
# rows are folded then whatever their strides. The values that weights have when a program runs require none, so such
# rows are laid out for folding before.


@special(aten._native_multi_head_attention.default)
def _native_attention(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    weights = [one for one in (*args[3:], *kwargs.values()) if isinstance(one, torch.Tensor)]
    if torch.is_inference_mode_enabled() and any(weight.requires_grad for weight in weights):
        laid_out = {one: one.contiguous() for one in args[:3]}  # two that are the same tensor are multiplied together
        args = (*(laid_out[one] for one in args[:3]), *args[3:])
    return recorder.record(args, kwargs)


# Results are written to through C++ storages, which handles do not have.


def _matmul_to_write(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    # Where the result is given, what has a gradient is folded no other way than what has none.
    if self.dim() == other.dim() == 3 and other.shape[0] == 1 != self.shape[0] and other.requires_grad:
        other = other.squeeze(0)
    with autocast.without():  # the CPU calls operators that are given their result, and those are on no list
        return aten.matmul.default(self.detach(), other.detach())


def _out_by_copy(written: Any, out_of_place: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    fits = operator.is_ if written is aten.matmul.out else torch.can_cast  # the types of a result and of ``out``

    def replacement(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if torch.is_grad_enabled() and any(t.requires_grad for t in (*args, out) if isinstance(t, torch.Tensor)):
            raise RuntimeError(
                f"{written._schema.name.removeprefix('aten::')}(): functions with out=... arguments don't support "
                "automatic differentiation, but one of the arguments requires grad."
            )
        result = out_of_place(*args, **kwargs)
        if not fits(result.dtype, out.dtype):
            raise RuntimeError(f"Expected out tensor to have dtype {result.dtype}, but got {out.dtype} instead")
        if out.shape != result.shape:
            out.resize_(result.shape)
        return out.copy_(result)

    return replacement


for _written, _plain in (
    (aten.matmul.out, _matmul_to_write),
    (aten.linalg_matrix_rank.out, aten.linalg_matrix_rank.default),
    (aten.linalg_matrix_rank.out_tol_tensor, aten.linalg_matrix_rank.tol_tensor),
    (aten.linalg_matrix_rank.atol_rtol_tensor_out, aten.linalg_matrix_rank.atol_rtol_tensor),
    (aten.linalg_matrix_rank.atol_rtol_float_out, aten.linalg_matrix_rank.atol_rtol_float),
):
    _replaces(_written)(_out_by_copy(_written, _plain))


# Fused dropout takes no generator. ``torch.func`` calls it for ``dropout`` on foreign devices; on the CPU it draws the
# noise by an operator that is out of place, in the order of the elements and not of their memory.


@_replaces(aten.native_dropout.default)
def _native_dropout(input: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    if input.numel() == 0:
        return input, aten.empty_like.default(input)
    if train is False:
        return aten.clone.default(input), aten.ones_like.default(input, dtype=torch.bool)
    keep = 1.0 - p
    if torch._C._functorch.peek_interpreter_stack() is not None:
        one = aten.empty.memory_format([], dtype=input.dtype, device=input.device)
        noise = aten.bernoulli.p(aten.expand.default(one, input.shape), keep)
        mask = aten.ne.Scalar(noise, 0)
        return aten.mul.Tensor(input, aten.div_.Scalar(noise, keep)), mask
    mask = aten.bernoulli_.float(aten.empty_like.default(input, dtype=torch.bool), keep)
    return aten.mul_.Tensor(aten.mul.Tensor(input, mask), 0.0 if keep == 0 else 1.0 / keep), mask


# PyTorch asks for a storage in C++, and handles have theirs in Python.


@_replaces(aten.set_.source_Tensor_storage_offset)
def _set_within(
    self: torch.Tensor, source: torch.Tensor, storage_offset: int, size: Sequence[int], stride: Sequence[int] = ()
) -> torch.Tensor:
    if not handles.is_lazy(source):
        raise RuntimeError(
            f"set_() expects a tensor on {handles.DEVICE_TYPE}, but got one on {source.device}; move it first"
        )
    return self.set_(source.untyped_storage(), storage_offset, size, stride)


# Chunk sizes and accumulation dtypes are looked up in Python, by the name of the device type.


def adjusting_as_on_the_cpu(adjust: Callable[..., Any]) -> Callable[..., Any]:
    """``LinearCrossEntropyOptions._adjust``, for which the device is the CPU."""

    @functools.wraps(adjust)
    def wrapper(self: Any, *args: Any, device: torch.device | None = None, **kwargs: Any) -> Any:
        if device is not None and device.type == handles.DEVICE_TYPE:
            device = torch.device("cpu")
        return adjust(self, *args, device=device, **kwargs)

    return wrapper


# Under deterministic algorithms ``interpolate`` takes steps whose backward is deterministic on CUDA, as that of the
# CPU's operators is already.

_INTERPOLATIONS = {4: torch._C._nn.upsample_bilinear2d, 5: torch._C._nn.upsample_trilinear3d}


def interpolating_as_on_the_cpu(decompose: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``_upsample_linear_vec``, with the CPU's operator for tensors of the device: (N, C, H, W) or (N, C, D, H, W)."""

    @functools.wraps(decompose)
    def wrapper(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        interpolate = _INTERPOLATIONS.get(input.dim()) if handles.is_lazy(input) else None
        return (interpolate or decompose)(input, *args, **kwargs)

    return wrapper


# Averaged models take another formula where the device has foreach kernels.


def without_the_device(supported: Callable[[], list[str]]) -> Callable[[], list[str]]:
    """The device types that have foreach kernels, for them."""
    return lambda: [name for name in supported() if name != handles.DEVICE_TYPE]


# Where nobody chooses, optimizers take one parameter after the other on the CPU, and foreach operators on the device
# unless few are quicker one by one.
# Those give the same bits for parameters of float32 and float64, but three optimizers calculate in another order with
# them.
_ANOTHER_ORDER = ("asgd", "nadam", "radam")


OPTIMIZERS = "adadelta adagrad adam adamax asgd nadam radam rmsprop rprop sgd".split()


def chosen_as_on_the_cpu(name: str) -> Callable[[Callable[..., Any]], Callable[..., tuple[bool, bool]]]:
    """For ``_default_to_fused_or_foreach``, as the optimizer ``name`` calls it."""
    never = name in _ANOTHER_ORDER
    few = policy.FEW_PARAMETERS_OF_SGD if name == "sgd" else policy.FEW_PARAMETERS
    adds_to_gradients = _adds_to_gradients if name == "sgd" else bool

    def replacement(choose: Callable[..., tuple[bool, bool]]) -> Callable[..., tuple[bool, bool]]:
        def wrapper(
            params: list[torch.Tensor], differentiable: bool, use_fused: bool = False
        ) -> tuple[bool, bool]:  # no wider signature: parameters on the CPU pass through here too
            count, device, all_equal = module.parameters_on_device(params)
            singly = count and (
                never or not all_equal or (count <= few and _runs_at_once(device)) or adds_to_gradients()
            )
            return (False, False) if singly else choose(params, differentiable, use_fused)

        return functools.update_wrapper(wrapper, choose)

    return replacement


def _runs_at_once(device: int) -> bool:
    """Whether operations do; a function under ``marid.compile`` is recorded, with the same operations each time."""
    return handles.tapes[device].immediate and observer() is None


def _adds_to_gradients() -> bool:
    """Whether foreach operators would add Nesterov's momentum to the gradients themselves: only the caller of what
    chooses, ``torch.optim.sgd.sgd``, knows of it."""
    return bool(sys._getframe(2).f_locals.get("nesterov"))


def leaving_composed(impl: Callable[..., None]) -> Callable[..., None]:
    """``Library.impl``, which says of an operator defined a moment ago, and so given a kernel of the device, that it is
    composed of others: they have gradients, and autocast, of their own."""

    @functools.wraps(impl)
    def implement(self: Any, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> None:
        impl(self, op_name, fn, dispatch_key, **options)
        if (dispatch_key or self.dispatch_key) in ("", "CompositeImplicitAutograd"):
            name = op_name if isinstance(op_name, str) else op_name.name()
            name, _, overload = (name if "::" in name else f"{self.ns}::{name}").partition(".")
            module.leave_composed(name, overload)

    return implement
