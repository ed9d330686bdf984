"""``torch.autocast("remote_accelerator")``: which operators run in lower precision, with CPU autocast's lists.

Sources: ``aten/src/ATen/autocast_mode.cpp`` (the CPU lists) and ``autocast_mode.h`` (the CUDA lists, used by
``marid run --as-cuda``) of PyTorch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from marid.frontend import handles
from marid.native import module

__all__ = ["calls_listed", "is_on", "may_call_listed", "register", "taken_apart", "use_cuda_lists", "without"]

_CPU_LOWER = """
    conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding bmm mm linalg_vecdot baddbmm addmm addbmm linear
    _addmm_activation _convolution.deprecated matmul conv_tbc mkldnn_rnn_layer conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input prelu scaled_dot_product_attention _native_multi_head_attention
""".split()
_CPU_FULL = """
    avg_pool3d binary_cross_entropy grid_sampler polar prod prod.dim_int prod.dim_Dimname quantile quantile.scalar
    nanquantile nanquantile.scalar stft stft.center cdist grid_sampler_2d _grid_sampler_2d_cpu_fallback grid_sampler_3d
    trace view_as_complex cholesky cholesky_inverse cholesky_solve inverse lu_solve orgqr ormqr pinverse max_pool3d
    max_unpool2d max_unpool3d adaptive_avg_pool3d reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d
    replication_pad3d mse_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss poisson_nll_loss
    smooth_l1_loss cross_entropy_loss l1_loss huber_loss margin_ranking_loss soft_margin_loss triplet_margin_loss
    multi_margin_loss ctc_loss.IntList ctc_loss.Tensor kl_div multilabel_margin_loss binary_cross_entropy_with_logits
    fft_fft fft_ifft fft_fft2 fft_ifft2 fft_fftn fft_ifftn fft_rfft fft_irfft fft_rfft2 fft_irfft2 fft_rfftn fft_irfftn
    fft_hfft fft_ihfft linalg_cond linalg_cond.p_str linalg_matrix_rank linalg_matrix_rank.tol_tensor
    linalg_matrix_rank.atol_rtol_tensor linalg_matrix_rank.atol_rtol_float linalg_solve linalg_cholesky linalg_svdvals
    linalg_eigvals linalg_eigvalsh linalg_inv linalg_householder_product linalg_tensorinv linalg_tensorsolve
    fake_quantize_per_tensor_affine geqrf _lu_with_info qr svd triangular_solve fractional_max_pool2d
    fractional_max_pool3d adaptive_max_pool3d multilabel_margin_loss_forward linalg_qr linalg_cholesky_ex linalg_svd
    linalg_eig linalg_eigh linalg_lstsq linalg_inv_ex
""".split()
_CPU_PROMOTE = "stack cat index_copy index_copy.dimname".split()

_CUDA_LOWER = """
    _convolution.deprecated _convolution conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding conv_tbc
    conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm
    mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell
    lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention
""".split()
_CUDA_FULL = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor
    pow.Scalar softplus layer_norm native_layer_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim
    cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss
    smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss
    multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d
    _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d
    upsample_bicubic2d _upsample_bicubic2d_aa
""".split()
_CUDA_FULL_UNLESS_DTYPE = """
    prod prod.dim_int prod.dim_Dimname softmax.int softmax.Dimname log_softmax.int log_softmax.Dimname cumprod
    cumprod.dimname cumsum cumsum.dimname linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord sum
    sum.dim_IntList sum.dim_DimnameList
""".split()
_CUDA_PROMOTE = """
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
""".split()

_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
_libraries: list[torch.library.Library] = []
_listed: set[str] = set()


def register() -> Callable[[], None]:
    """Register CPU autocast's lists for the device. Returns what takes them away."""
    _register({"lower": _CPU_LOWER, "full": _CPU_FULL, "promote": _CPU_PROMOTE})
    return _unregister


def use_cuda_lists() -> None:
    """Replace the lists by CUDA autocast's, for scripts written for GPUs."""
    for library in _libraries:
        library._destroy()
    _libraries.clear()
    _register(
        {
            "lower": _CUDA_LOWER,
            "full": _CUDA_FULL,
            "full unless dtype": _CUDA_FULL_UNLESS_DTYPE,
            "promote": _CUDA_PROMOTE,
        }
    )


def without() -> Any:
    """Context manager: inside, autocast is off for the device, whatever the user says."""
    return torch._C._ExcludeDispatchKeyGuard(_KEY)


def _unregister() -> None:
    module.autocasts({})
    while _libraries:
        _libraries.pop()._destroy()


def _register(lists: Mapping[str, Sequence[str]]) -> None:
    _unregister()
    fallthrough = torch.library.Library("_", "IMPL")
    fallthrough.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    _libraries.append(fallthrough)
    exists = torch._C._dispatch_has_kernel
    existing = {policy: [name for name in names if exists(f"aten::{name}")] for policy, names in lists.items()}
    _listed.clear()
    _listed.update(f"aten::{name}" for names in existing.values() for name in names)
    _known.clear()
    module.autocasts(existing)


# --- what is composed of operators on the lists ----------------------------------------------------------------------

_COMPOSITES = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
# Operators whose CPU kernels do nothing but call other operators.
_COMPOSED_BY_THE_CPU = {torch.ops.aten._transformer_encoder_layer_fwd.default}
_known: dict[Any, bool] = {}


def is_on() -> bool:
    """Whether autocast is on where this is called: below the kernels of listed operators it is not."""
    return torch.is_autocast_enabled(handles.DEVICE_TYPE)


def may_call_listed(func: Any) -> bool:
    """Whether the CPU composes this operator of others below autograd, and perhaps of some on the lists."""
    return _composite_key(func) is not None and _known.get(func, True)


def calls_listed(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether what the operator is composed of is on the lists, so that autocast changes it.

    Tried once for each operator, with tensors that are not empty: for those most do nothing.
    """
    found = _known.get(func)
    if found is None:
        found = _try(func, args, kwargs)
        if found or all(item.numel() for item in tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)):
            _known[func] = found
    return found


def taken_apart(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What the operator returns, by the operators that it is composed of."""
    return func._op_dk(_composite_key(func), *args, **kwargs)


def _composite_key(func: Any) -> torch._C.DispatchKey | None:
    """Where the CPU finds the kernel that composes the operator of others; None where it calculates by itself."""
    if func in _COMPOSED_BY_THE_CPU:
        return torch._C.DispatchKey.CPU
    has_kernel, name = torch._C._dispatch_has_kernel_for_dispatch_key, func.name()
    if has_kernel(name, "CPU"):
        return None
    return next((getattr(torch._C.DispatchKey, key) for key in _COMPOSITES if has_kernel(name, key)), None)


class _Watch(TorchDispatchMode):
    """Notes whether operators on the lists are called."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.listed = self.listed or func.name() in _listed
        if self.listed or _composite_key(func) is None:
            return func(*args, **(kwargs or {}))
        with self:
            return taken_apart(func, args, kwargs or {})


def _try(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    def stand_in(thing: Any) -> Any:
        if isinstance(thing, torch.device):
            return torch.device("meta")
        return torch.empty_strided(thing.shape, thing.stride(), dtype=thing.dtype, device="meta")

    args, kwargs = tree_map_only((torch.Tensor, torch.device), stand_in, (args, dict(kwargs)))
    watch = _Watch()
    try:
        with watch:
            taken_apart(func, args, kwargs)
    except (RuntimeError, ValueError, TypeError, IndexError):
        pass  # wrong arguments, or values are needed: what was called until then tells
    return watch.listed
