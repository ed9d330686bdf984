"""Composite operators whose C++ code takes another road for tensor subclasses or foreign devices than on the CPU.

Each is replaced for the device by the steps that the CPU takes, so that results are bitwise equal. They must also be
taken apart when they arrive whole (in inference mode, when autograd is off).
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from marid.engine.inprocess import concretely
from marid.frontend import autocast, handles
from marid.frontend.cells import dropout
from marid.frontend.composites import taken_apart
from marid.frontend.record import Recorder, special
from marid.frontend.rules import attends, has_plain_rows
from marid.ops.facts import facts_of
from marid.semantics.tracebacks import folded

aten = torch.ops.aten

# Not ``.decompose``, which prefers PyTorch's decomposition in Python.
_whole_matmul = functools.partial(aten.matmul.default._op_dk, torch._C.DispatchKey.CompositeImplicitAutograd)
_replacements: dict[Any, Callable[..., Any]] = {}


def _replaces(*funcs: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(replacement: Callable[..., Any]) -> Callable[..., Any]:
        for func in funcs:
            _replacements[func] = replacement
            special(func)(lambda _recorder, args, kwargs: replacement(*args, **kwargs))
        return replacement

    return register


def register() -> Callable[[], None]:
    """Install the replacements above autograd. Returns what takes them away."""
    library = torch.library.Library("aten", "IMPL")
    for func, replacement in _replacements.items():
        if not facts_of(func).replaced_in_cpp:  # by native/kernels.cpp and native/cells.cpp
            library.impl(func, folded(replacement), "AutogradPrivateUse1")
    always, before = torch.is_warn_always_enabled(), "__warningregistry__" in vars(torch.library)
    torch.set_warn_always(True)  # or what PyTorch says once in a process of who overrides kernels would be used up here
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the kernel that this one goes on to call for other devices is overridden
            library.impl(aten.scaled_dot_product_attention.default, _attention_in_vmap, "FuncTorchVmapMode")
    finally:
        torch.set_warn_always(always)
        if not before:  # Python's list of what was said there
            vars(torch.library).pop("__warningregistry__", None)
    return library._destroy


# Subclasses always compute the vectors too, by another LAPACK routine, in case somebody differentiates.


@_replaces(aten.linalg_svdvals.default)
def _svdvals(A: torch.Tensor, *, driver: str | None = None) -> torch.Tensor:
    vectors = torch.is_grad_enabled() and A.requires_grad
    return aten._linalg_svd.default(A, False, vectors, driver=driver)[1]


@_replaces(aten.linalg_eigvalsh.default)
def _eigvalsh(self: torch.Tensor, UPLO: str = "L") -> torch.Tensor:
    vectors = torch.is_grad_enabled() and self.requires_grad
    return aten._linalg_eigh.default(self, UPLO, vectors)[0]


# Recorded whole where it gives the bits of its steps whatever requires gradients: that decides how the CPU folds inputs
# whose rows do not lie behind each other. Above autograd ``native/kernels.cpp`` has the same rule for what nobody
# differentiates.


@special(aten.linear.default, by_key=True)
def _linear(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    input, *others = (tensor for tensor in (*args, *kwargs.values()) if tensor is not None)
    is_simple = input.dim() == 2 or has_plain_rows(input.shape, input.stride())
    if is_simple and all(handles.is_lazy(one) and one.device == input.device for one in (input, *others)):
        return recorder.record(args, kwargs)
    return taken_apart(aten.linear.default, args, kwargs)


# Recorded whole too: where nobody differentiates it the CPU has a kernel for it. It arrives so from
# ``native/kernels.cpp`` and in inference mode.
special(aten.max_pool1d.default, by_key=True)(Recorder.record)


# Inside, too, products with a weight that requires gradients fold whatever rows they are given. The values that weights
# have when a program runs require none, so the rows are laid out for folding before.


@special(aten._native_multi_head_attention.default)
def _native_attention(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    weights = [one for one in (*args[3:], *kwargs.values()) if isinstance(one, torch.Tensor)]
    if any(weight.requires_grad for weight in weights):
        laid_out = {one: one.contiguous() for one in args[:3]}  # two that are the same tensor are multiplied together
        args = (*(laid_out[one] for one in args[:3]), *args[3:])
    return recorder.record(args, kwargs)


# Subclasses never broadcast a single matrix against a batch: another kernel multiplies them.


@_replaces(aten.matmul.default)
def _matmul(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if self.dim() == other.dim() == 3 and self.shape[0] != other.shape[0]:
        alone = self if self.shape[0] == 1 else other
        if alone.shape[0] == 1 and not alone.requires_grad:
            count = self.shape[0] * other.shape[0]
            return aten.bmm.default(self.expand(count, -1, -1), other.expand(count, -1, -1))
    return _whole_matmul(self, other)


def _matmul_to_write(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    # Where the result is given, what has a gradient is folded no other way than what has none.
    if self.dim() == other.dim() == 3 and other.shape[0] == 1 != self.shape[0] and other.requires_grad:
        other = other.squeeze(0)
    with autocast.without():  # the CPU calls operators that are given their result, and those are on no list
        return _matmul(self.detach(), other.detach())


# Subclasses are not written to, or are written through C++ storages, which handles do not have.


def _out_by_copy(written: Any, out_of_place: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def replacement(*args: Any, out: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if torch.is_grad_enabled() and any(t.requires_grad for t in (*args, out) if isinstance(t, torch.Tensor)):
            raise RuntimeError(
                f"{written._schema.name.removeprefix('aten::')}(): functions with out=... arguments don't support "
                "automatic differentiation, but one of the arguments requires grad."
            )
        result = out_of_place(*args, **kwargs)
        if not torch.can_cast(result.dtype, out.dtype):
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


# Dropout: foreign devices get the fused operator, whose arithmetic differs in the last bit.


@_replaces(aten.dropout.default)
def _dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if not 0 <= p <= 1:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")
    return dropout(input, p) if train and p > 0 else input


# Attention: the choice of kernel is made by a C++ stub that foreign devices cannot fill.


@_replaces(aten.scaled_dot_product_attention.default)
def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if 0 in (*query.shape[:-1], *key.shape[-2:-1], *value.shape[-1:]):  # nothing to attend: no kernel is chosen
        attention = aten.scaled_dot_product_attention.default.decompose
        return attention(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    differentiable = tuple(torch.is_grad_enabled() and t.requires_grad for t in tensors)
    specs = tuple(handles.spec_of(t, 0) for t in tensors)
    backends = (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled())
    flash = _takes_flash(specs, differentiable, dropout_p, is_causal, scale, enable_gqa, backends)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        kept, blocked = (torch.scalar_tensor(x, dtype=query.dtype, device=query.device) for x in (0.0, float("-inf")))
        attn_mask = torch.where(attn_mask, kept, blocked)
    if not flash:
        return aten._scaled_dot_product_attention_math.default(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
    return aten._scaled_dot_product_flash_attention_for_cpu.default(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]


# CTC loss: lengths may be on the CPU, as they mostly are, but for subclasses they must not.


@_replaces(aten.ctc_loss.Tensor)
def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    *options: Any,
    **named_options: Any,
) -> torch.Tensor:
    if handles.is_lazy(input_lengths) or handles.is_lazy(target_lengths):
        loss = aten.ctc_loss.Tensor.decompose
        return loss(log_probs, targets, input_lengths, target_lengths, *options, **named_options)
    lengths = input_lengths.tolist(), target_lengths.tolist()
    return aten.ctc_loss.IntList(log_probs, targets, *lengths, *options, **named_options)


_VMAP = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchVmapMode)


def _attention_in_vmap(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    # vmap takes attention apart before the device's kernels see it.
    if query.device.type == handles.DEVICE_TYPE:
        return _attention(query, *args, **kwargs)
    with torch._C._ExcludeDispatchKeyGuard(_VMAP):
        return aten.scaled_dot_product_attention.default(query, *args, **kwargs)


# Chunk sizes and accumulation dtypes are looked up in Python, by the name of the device type.


def adjusting_as_on_the_cpu(adjust: Callable[..., Any]) -> Callable[..., Any]:
    """``LinearCrossEntropyOptions._adjust``, for which the device is the CPU."""

    @functools.wraps(adjust)
    def wrapper(self: Any, *args: Any, device: torch.device | None = None, **kwargs: Any) -> Any:
        if device is not None and device.type == handles.DEVICE_TYPE:
            device = torch.device("cpu")
        return adjust(self, *args, device=device, **kwargs)

    return wrapper


# Averaged models take another formula where the device has foreach kernels.


def without_the_device(supported: Callable[[], list[str]]) -> Callable[[], list[str]]:
    """The device types that have foreach kernels, for them."""
    return lambda: [name for name in supported() if name != handles.DEVICE_TYPE]


# Where nobody chooses, optimizers take one parameter after the other on the CPU, and foreach operators on the device.
# Those give the same bits for parameters of these types, but three optimizers calculate in another order with them.
_EQUAL_WITH_FOREACH = (torch.float32, torch.float64)
_ANOTHER_ORDER = ("asgd", "nadam", "radam")


OPTIMIZERS = "adadelta adagrad adam adamax asgd nadam radam rmsprop rprop sgd".split()


def chosen_as_on_the_cpu(name: str) -> Callable[[Callable[..., Any]], Callable[..., tuple[bool, bool]]]:
    """For ``_default_to_fused_or_foreach``, as the optimizer ``name`` calls it."""
    never = name in _ANOTHER_ORDER

    def replacement(choose: Callable[..., tuple[bool, bool]]) -> Callable[..., tuple[bool, bool]]:
        def wrapper(
            params: list[torch.Tensor], differentiable: bool, use_fused: bool = False
        ) -> tuple[bool, bool]:  # no wider signature: parameters on the CPU pass through here too
            fused, foreach = choose(params, differentiable, use_fused)
            if fused or foreach:  # parameters on the CPU need not be looked at
                lazy = [p for p in params if p is not None and p.device.type == handles.DEVICE_TYPE]
                if lazy and (never or any(p.dtype not in _EQUAL_WITH_FOREACH for p in lazy) or _adds_to_gradients()):
                    return False, False
            return fused, foreach

        return functools.update_wrapper(wrapper, choose)

    return replacement


def _adds_to_gradients() -> bool:
    """Whether foreach operators would add Nesterov's momentum to the gradients themselves: only the caller of what
    chooses, ``torch.optim.sgd.sgd``, knows of it."""
    return bool(sys._getframe(2).f_locals.get("nesterov"))


@functools.lru_cache(maxsize=4096)
def _takes_flash(
    specs: tuple[Any, ...],
    differentiable: tuple[bool, ...],
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    _backends: tuple[bool, bool],
) -> bool:
    """Whether the CPU takes its flash kernel, asked on empty tensors. Raises what eager attention raises."""
    options = {"scale": scale, "enable_gqa": enable_gqa}
    with temporarily_clear_interpreter_stack(), concretely():
        if len(specs) > 3 or enable_gqa or not attends(*specs):  # it may raise
            metas = [torch.empty_strided(s.shape, s.stride, dtype=s.dtype, device="meta") for s in specs]
            mask = metas[3] if len(metas) > 3 else None
            aten.scaled_dot_product_attention.default(*metas[:3], mask, dropout_p, is_causal, **options)
        stand_ins = [torch.empty_strided(s.shape, s.stride, dtype=s.dtype, device="cpu") for s in specs]
        for tensor, grad in zip(stand_ins, differentiable, strict=True):
            tensor.requires_grad_(grad)
        mask = stand_ins[3] if len(stand_ins) > 3 else None
        with torch.set_grad_enabled(any(differentiable)):
            choice = aten._fused_sdp_choice.default(*stand_ins[:3], mask, dropout_p, is_causal, **options)
    return choice == int(torch.nn.attention.SDPBackend.FLASH_ATTENTION.value)
