"""The operators of ATen that a worker runs, and what makes each of them safe.

It is a positive list: what is not in it is refused, a new operator of a new PyTorch too. Each was called by
``tests/attacks`` with sizes, strides, offsets, dimensions and index tensors that no client sends, between guard pages:
none has read or written outside of what it was given. Names stand for all overloads, but for those that take the place
of a result where PyTorch means that for itself (``is_admitted``).
"""

from __future__ import annotations

from typing import Any

import torch

from marid.remote.worker.checks import CHECKS

VIEWS = set(
    "_conj _neg_view _unsafe_view alias as_strided detach diagonal expand lift_fresh permute select slice "
    "slice_inverse split split_with_sizes squeeze t transpose unbind unfold unsafe_split unsafe_split_with_sizes "
    "unsqueeze view view_as_complex view_as_real".split()
)
"""They give a view of memory that is there: PyTorch checks that it lies in it."""

FACTORIES = set(
    "_assert_scalar _efficientzerotensor arange bartlett_window blackman_window empty empty_permuted empty_strided "
    "eye fft_fftfreq fft_rfftfreq full hamming_window hann_window kaiser_window ones range scalar_tensor "
    "tril_indices triu_indices zeros".split()
)
"""They make a tensor of sizes and numbers: PyTorch checks that its memory can be had."""

RANDOM = set(
    "_fused_sdp_choice _sample_dirichlet _standard_gamma bernoulli bernoulli_ binomial cauchy cauchy_ exponential "
    "exponential_ geometric geometric_ log_normal log_normal_ multinomial native_dropout normal normal_ "
    "normal_functional poisson rand rand_like randint randint_like randn randn_like random random_ randperm uniform "
    "uniform_".split()
)
"""They draw numbers, into tensors whose sizes PyTorch checks."""

WHOLE = {"linear", "max_pool1d"}
"""Operators that PyTorch writes out in others, and that clients record as they are. All else of that kind is taken
apart before it is recorded, and refused here: what it is made of would run behind no check."""

KERNELS = set(
    "_convolution linalg_pinv mish_backward native_channel_shuffle silu_backward where "
    "__ilshift__ __irshift__ __lshift__ __rshift__ _add_relu _add_relu_ _addmm_activation _aminmax "
    "_amp_foreach_non_finite_check_and_unscale _amp_foreach_non_finite_check_and_unscale_ _amp_update_scale_ "
    "_assert_async _assert_tensor_metadata _cdist_forward _chunk_cat _conj_copy _conj_physical _dirichlet_grad "
    "_euclidean_dist _fake_quantize_learnable_per_channel_affine _fake_quantize_learnable_per_channel_affine_backward "
    "_fake_quantize_learnable_per_tensor_affine _fake_quantize_learnable_per_tensor_affine_backward "
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams _foreach_abs _foreach_abs_ _foreach_acos "
    "_foreach_acos_ _foreach_add _foreach_add_ _foreach_addcdiv _foreach_addcdiv_ _foreach_addcmul _foreach_addcmul_ "
    "_foreach_asin _foreach_asin_ _foreach_atan _foreach_atan_ _foreach_ceil _foreach_ceil_ _foreach_clamp_max "
    "_foreach_clamp_max_ _foreach_clamp_min _foreach_clamp_min_ _foreach_clone _foreach_copy_ _foreach_cos "
    "_foreach_cos_ _foreach_cosh _foreach_cosh_ _foreach_div _foreach_div_ _foreach_erf _foreach_erf_ _foreach_erfc "
    "_foreach_erfc_ _foreach_exp _foreach_exp_ _foreach_expm1 _foreach_expm1_ _foreach_floor _foreach_floor_ "
    "_foreach_frac _foreach_frac_ _foreach_lerp _foreach_lerp_ _foreach_lgamma _foreach_lgamma_ _foreach_log "
    "_foreach_log10 _foreach_log10_ _foreach_log1p _foreach_log1p_ _foreach_log2 _foreach_log2_ _foreach_log_ "
    "_foreach_max _foreach_maximum _foreach_maximum_ _foreach_minimum _foreach_minimum_ _foreach_mm _foreach_mul "
    "_foreach_mul_ _foreach_neg _foreach_neg_ _foreach_norm _foreach_pow _foreach_pow_ _foreach_powsum "
    "_foreach_reciprocal _foreach_reciprocal_ _foreach_round _foreach_round_ _foreach_rsqrt _foreach_rsqrt_ "
    "_foreach_sigmoid _foreach_sigmoid_ _foreach_sign _foreach_sign_ _foreach_sin _foreach_sin_ _foreach_sinh "
    "_foreach_sinh_ _foreach_sqrt _foreach_sqrt_ _foreach_sub _foreach_sub_ _foreach_tan _foreach_tan_ _foreach_tanh "
    "_foreach_tanh_ _foreach_trunc _foreach_trunc_ _foreach_zero _foreach_zero_ _functional_assert_async "
    "_functional_assert_scalar _fused_rms_norm_backward _histogramdd_bin_edges "
    "_histogramdd_from_bin_cts _histogramdd_from_bin_tensors _int_mm _is_all_true _is_any_true "
    "_jagged_to_padded_dense_forward _linalg_det _linalg_eigh _linalg_slogdet _linalg_solve_ex "
    "_linalg_svd _local_scalar_dense _log_softmax _masked_softmax_backward "
    "_native_multi_head_attention _neg_view_copy _pack_padded_sequence _padded_dense_to_jagged_forward "
    "_prelu_kernel _prelu_kernel_backward _reshape_copy _safe_softmax _scaled_mm _softmax _standard_gamma_grad "
    "_to_copy _transformer_encoder_layer_fwd _trilinear _unique _unique2 _unsafe_index _unsafe_index_put "
    "_unsafe_masked_index _unsafe_masked_index_put_accumulate "
    "abs abs_ acos "
    "acos_ acosh acosh_ adaptive_max_pool2d adaptive_max_pool3d add add_ addbmm addbmm_ addcdiv addcdiv_ addcmul "
    "addcmul_ addmm addmm_ addmv addmv_ addr addr_ affine_grid_generator alias_copy all allclose amax amin aminmax "
    "angle any argmax argmin as_strided_copy as_strided_scatter asin asin_ asinh asinh_ atan atan2 atan2_ atan_ atanh "
    "atanh_ avg_pool2d avg_pool3d baddbmm baddbmm_ binary_cross_entropy binary_cross_entropy_backward "
    "binary_cross_entropy_with_logits bincount bitwise_and bitwise_and_ bitwise_left_shift bitwise_left_shift_ "
    "bitwise_not bitwise_not_ bitwise_or bitwise_or_ bitwise_right_shift bitwise_right_shift_ bitwise_xor "
    "bitwise_xor_ block_diag bmm bucketize cat ceil ceil_ celu celu_ channel_shuffle cholesky cholesky_inverse "
    "cholesky_solve clamp clamp_ clamp_max clamp_max_ clamp_min clamp_min_ clone col2im complex conj_physical_ "
    "constant_pad_nd conv_tbc convolution convolution_backward_overrideable "
    "convolution_overrideable copy copy_ copysign copysign_ cos cos_ cosh cosh_ count_nonzero cummax cummin cumprod "
    "cumprod_ cumsum cumsum_ deg2rad deg2rad_ detach_ detach_copy diag_embed diagonal_backward diagonal_copy "
    "diagonal_scatter digamma digamma_ dist div div_ dot elu elu_ elu_backward embedding embedding_renorm "
    "embedding_renorm_ empty_like eq eq_ equal erf erf_ erfc erfc_ erfinv erfinv_ exp exp2 exp2_ exp_ expand_copy "
    "expm1 expm1_ fake_quantize_per_channel_affine_cachemask fake_quantize_per_tensor_affine_cachemask fill fill_ "
    "flip floor floor_ floor_divide floor_divide_ fmax fmin fmod fmod_ frac frac_ fractional_max_pool2d "
    "fractional_max_pool3d frexp full_like gather gcd gcd_ ge ge_ gelu gelu_ geqrf glu glu_backward "
    "glu_backward_jvp glu_jvp grid_sampler_2d grid_sampler_3d gt gt_ hardshrink hardshrink_backward hardsigmoid "
    "hardsigmoid_ hardsigmoid_backward hardswish hardswish_ hardswish_backward hardtanh hardtanh_ hardtanh_backward "
    "hash_tensor heaviside heaviside_ histc histogram huber_loss huber_loss_backward hypot hypot_ i0 i0_ igamma "
    "igamma_ igammac igammac_ im2col index index_add index_add_ index_copy index_copy_ index_fill index_fill_ "
    "index_put index_put_ index_reduce index_reduce_ index_select is_same_size isin isinf isnan isneginf isposinf "
    "kthvalue lcm lcm_ ldexp ldexp_ le le_ leaky_relu leaky_relu_ leaky_relu_backward lerp lerp_ lgamma lgamma_ lift "
    "lift_fresh_copy linalg__powsum linalg_cholesky_ex linalg_cross linalg_eig linalg_householder_product "
    "linalg_inv_ex linalg_ldl_factor_ex linalg_lstsq linalg_lu linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp "
    "linalg_qr linalg_solve_triangular linalg_vector_norm linspace log log10 log10_ log1p log1p_ log2 log2_ log_ "
    "log_sigmoid_backward log_sigmoid_forward logaddexp logaddexp2 logcumsumexp logical_and logical_and_ logical_not "
    "logical_not_ logical_or logical_or_ logical_xor logical_xor_ logit logit_ logit_backward logspace logsumexp lt "
    "lt_ masked_fill masked_fill_ masked_scatter masked_scatter_ masked_scatter_backward masked_select max "
    "max_pool2d_with_indices max_pool3d_with_indices max_unpool2d max_unpool3d maximum mean median min minimum mish "
    "mish_ mm mode mse_loss mse_loss_backward mul mul_ multi_margin_loss multilabel_margin_loss_forward mv mvlgamma "
    "mvlgamma_ nan_to_num nan_to_num_ nanmedian nansum narrow_copy native_dropout_backward native_layer_norm ne ne_ "
    "neg neg_ new_empty new_empty_strided new_full new_ones new_zeros nextafter nextafter_ nll_loss2d_forward "
    "nll_loss_forward nonzero nonzero_static norm ones_like ormqr permute_copy pixel_shuffle pixel_unshuffle polar "
    "polygamma polygamma_ pow pow_ prod put put_ rad2deg rad2deg_ reciprocal reciprocal_ reflection_pad1d "
    "reflection_pad2d reflection_pad3d relu relu_ remainder remainder_ renorm renorm_ repeat repeat_interleave "
    "replication_pad1d replication_pad2d replication_pad3d resize_ resize_as_ roll rot90 round round_ "
    "rrelu_with_noise_backward rsqrt rsqrt_ rsub scatter scatter_ scatter_add scatter_add_ scatter_reduce "
    "scatter_reduce_ searchsorted select_backward select_copy select_scatter sgn sgn_ sigmoid sigmoid_ "
    "sigmoid_backward sign sign_ signbit silu silu_ sin sin_ sinc sinc_ sinh sinh_ slice_backward slice_copy "
    "slice_scatter smooth_l1_loss smooth_l1_loss_backward soft_margin_loss soft_margin_loss_backward softplus "
    "softplus_backward softshrink softshrink_backward sort special_airy_ai special_bessel_j0 special_bessel_j1 "
    "special_bessel_y0 special_bessel_y1 special_chebyshev_polynomial_t special_chebyshev_polynomial_u "
    "special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_entr special_erfcx "
    "special_hermite_polynomial_h special_hermite_polynomial_he special_i0e special_i1 special_i1e "
    "special_laguerre_polynomial_l special_legendre_polynomial_p special_log_ndtr special_modified_bessel_i0 "
    "special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri "
    "special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t "
    "special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v "
    "special_shifted_chebyshev_polynomial_w special_spherical_bessel_j0 special_xlog1py special_zeta split_copy "
    "split_with_sizes_copy sqrt sqrt_ squeeze_ squeeze_copy stack std std_mean sub sub_ sum t_ t_copy take tan tan_ "
    "tanh tanh_ tanh_backward threshold threshold_ threshold_backward topk trace transpose_ transpose_copy "
    "triangular_solve tril tril_ triu triu_ trunc trunc_ unbind_copy unfold_copy unique_consecutive unique_dim "
    "unique_dim_consecutive unsqueeze_ unsqueeze_copy "
    "var var_mean vdot "
    "view_as_complex_copy view_as_real_copy view_copy xlogy xlogy_ zero zero_ zeros_like".split()
)
"""Their kernels, or what PyTorch does in front of those, check sizes, dimensions and indices."""

_MARID = {
    f"marid::{name}"
    for name in (
        "linear_activation _linear_activation lstm_layer lstm_layer_backward lerp blend l2_norm squared_relu "
        "add_activate control_k fast_linear token_shift pack_kvakk time_first_v7 time_mix_v7 channel_mix_v7 "
        "dequantize quantized_linear"
    ).split()
}
"""Marid's own that a client records; those of RWKV-7 and of packed matrices check sizes, and cut lengths to what is
there. Others are what a worker puts in the place of ATen's."""
_NAMES = VIEWS | FACTORIES | RANDOM | WHOLE | KERNELS


def is_admitted(func: Any) -> bool:
    """Whether an operator overload of ATen or Marid may be named by a client. Those of which ``CHECKS`` has the name
    run behind that check."""
    namespace, _, base = func._schema.name.partition("::")
    if namespace != "aten":
        return func._schema.name in _MARID
    for_itself = base.startswith("_") or "_backward" in base or base in CHECKS or base == "range"
    if for_itself and any(formal.is_out for formal in func._schema.arguments):
        return False
    if base not in WHOLE | FACTORIES | RANDOM and _is_written_in_others(func):
        return False
    return base in _NAMES or base in CHECKS


def _is_written_in_others(func: Any) -> bool:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(func.name(), "CompositeImplicitAutograd") and not has_kernel(func.name(), "CPU")
