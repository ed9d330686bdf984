"""What schemas and tags leave out, by operator: a row for each operator that is an exception.

``ROWS`` is keyed by name, of all overloads (``aten::index``) or of one (``aten::multinomial.out``). The fields are
those of ``Facts`` in ``facts.py``, which says what each means. In ``row`` the namespace is ATen's unless it is named.
"""

from __future__ import annotations

from typing import Any

ROWS: dict[str, dict[str, Any]] = {}


def row(names: str, **facts: Any) -> None:
    """Note facts of each of these operators. Raises ``ValueError`` for a fact that is there already."""
    for name in names.split():
        known = ROWS.setdefault(name if "::" in name else f"aten::{name}", {})
        if known.keys() & facts.keys():
            raise ValueError(f"{name} has {sorted(known.keys() & facts.keys())} already")
        known.update(facts)


# --- memory ----------------------------------------------------------------------------------------------------------

row("native_batch_norm", writes=("running_mean", "running_var"))
row("native_batch_norm.default _native_batch_norm_legit.default", only_updates=("running_mean", "running_var"))
row("_unsafe_view", views_as="aten::view")
row("unsafe_split", views_as="aten::split")
row("unsafe_split_with_sizes", views_as="aten::split_with_sizes")
row("unsafe_chunk", views_as="aten::chunk")
row("resize_ resize_as_ _resize_output_", resizes=True)
row("_fused_moving_avg_obs_fq_helper", resizes=True)  # where it observes each channel for the first time
row("detach.default lift_fresh.default lift.default", same_value=True)
row("t_.default", in_place_of="t")
row("transpose_.default swapaxes_.default swapdims_.default", in_place_of="transpose.int")
row("squeeze_.default", in_place_of="squeeze")
row("squeeze_.dim", in_place_of="squeeze.dim")
row("squeeze_.dims", in_place_of="squeeze.dims")
row("unsqueeze_.default", in_place_of="unsqueeze")
row("as_strided_.default", in_place_of="as_strided")
row("empty empty_strided empty_like new_empty", uninitialized=True)

# --- values ----------------------------------------------------------------------------------------------------------

row("_scaled_dot_product_flash_attention_for_cpu", draws_nothing=True, made_by_passes=True)
row("rand.default randn.default randint.default randperm.default", with_generator="generator")
row("randint.low", with_generator="low_generator")
row("rand_like.default randn_like.default randint_like.default", with_generator="generator")
row("randint_like.low_dtype", with_generator="low_generator_dtype")
row("randint_like.Tensor", with_generator="Tensor_generator")
row("index _unsafe_index", mask="read", cpu_arguments=(1,))
row("index_put index_put_ _unsafe_index_put _index_put_impl_", mask="written", cpu_arguments=(1,))
row("_foreach_addcdiv _foreach_addcdiv_ _foreach_addcmul _foreach_addcmul_", cpu_arguments=(3,))
row("_ctc_loss.Tensor", cpu_arguments=(2, 3))  # lengths, which come as tensors where a mode watches or takes part
row("_ctc_loss_backward.Tensor", cpu_arguments=(3, 4))

# --- metadata --------------------------------------------------------------------------------------------------------

row(
    "_ctc_loss_backward.default _ctc_loss_backward.Tensor _embedding_bag.default _embedding_bag_forward_only.default "
    "_grouped_mm.default geqrf.default fractional_max_pool3d_backward.default multi_margin_loss_backward.default "
    "histogram.bin_ct histogram.bins_tensor _histogramdd_bin_edges.default _histogramdd_from_bin_cts.default "
    "_histogramdd_from_bin_tensors.default multilabel_margin_loss_backward.default "
    "glu_jvp.default glu_backward_jvp.default _aminmax.default _aminmax.dim _dirichlet_grad.default "
    "_standard_gamma_grad.default _masked_softmax.default _masked_softmax_backward.default "
    "batch_norm_update_stats.default "
    "fake_quantize_per_tensor_affine_cachemask.default fake_quantize_per_channel_affine_cachemask.default "
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default "
    "_fake_quantize_learnable_per_tensor_affine.default _fake_quantize_learnable_per_tensor_affine_backward.default "
    "_fake_quantize_learnable_per_channel_affine.default _fake_quantize_learnable_per_channel_affine_backward.default "
    "_native_multi_head_attention.default",  # which gives weights or not, by the kernel that it takes
    shaped_by_sizes=True,
)
row("native_batch_norm.default _native_batch_norm_legit.default", saves_nothing=True)
row("multinomial.default multinomial.out", limited_in_size=True)
row(
    "as_strided.default as_strided_.default _convolution.default convolution_overrideable.default "
    "fractional_max_pool2d.default fractional_max_pool3d.default index_put.default index_put_.default",
    asks_for_more=True,
)
row(
    "empty.memory_format empty_strided.default zeros.default ones.default full.default scalar_tensor.default "
    "eye.default eye.m arange.default arange.start arange.start_step range.default range.step "
    "linspace.default linspace.Tensor_Tensor linspace.Tensor_Scalar linspace.Scalar_Tensor "
    "logspace.default logspace.Tensor_Tensor logspace.Tensor_Scalar logspace.Scalar_Tensor "
    "rand.default rand.generator randn.default randn.generator "
    "randint.default randint.generator randint.low randint.low_generator randperm.default randperm.generator "
    "tril_indices.default triu_indices.default _efficientzerotensor.default "
    "hann_window.default hann_window.periodic hamming_window.default hamming_window.periodic "
    "hamming_window.periodic_alpha hamming_window.periodic_alpha_beta blackman_window.default "
    "blackman_window.periodic bartlett_window.default bartlett_window.periodic kaiser_window.default "
    "kaiser_window.periodic kaiser_window.beta fft_fftfreq.default fft_rfftfreq.default",
    factory=True,
)
row(
    "empty.memory_format empty_strided.default zeros.default ones.default rand.default rand.generator "
    "randn.default randn.generator eye.default eye.m fft_fftfreq.default fft_rfftfreq.default",
    default_dtype=True,
)
row(
    "empty_like zeros_like ones_like full_like new_empty new_empty_strided new_full new_zeros new_ones "
    "rand_like randn_like randint_like",
    like=True,
)

# --- the CPU's road --------------------------------------------------------------------------------------------------

row("_transformer_encoder_layer_fwd.default", composed_on_cpu=True)
row(
    "gru_cell.default lstm_cell.default rnn_tanh_cell.default rnn_relu_cell.default "
    "gru.input lstm.input rnn_tanh.input rnn_relu.input gru.data lstm.data rnn_tanh.data rnn_relu.data",
    whole="in_rows",
)
row(
    "gather_backward.default index_select_backward.default value_selecting_reduction_backward.default "
    "masked_select_backward.default trace_backward.default cumprod_backward.default cummaxmin_backward.default "
    "scaled_dot_product_attention.default einsum.default tensordot.default bilinear.default chain_matmul.default "
    "kron.default inner.default cdist.default pairwise_distance.default cosine_similarity.default cross.default "
    "quantile.default quantile.scalar nanquantile.default nanquantile.scalar nanmean.default "
    "cov.default corrcoef.default diff.default trapezoid.x trapezoid.dx trapz.x trapz.dx "
    "cumulative_trapezoid.x cumulative_trapezoid.dx isfinite.default isclose.default one_hot.default "
    "repeat_interleave.self_int tile.default stft.default stft.center istft.default "
    "cross_entropy_loss.default nll_loss_nd.default l1_loss.default kl_div.default poisson_nll_loss.default "
    "dstack.default hstack.default vstack.default row_stack.default column_stack.default cartesian_prod.default "
    "combinations.default diagflat.default take_along_dim.default gradient.scalarint gradient.scalararray "
    "gradient.array gradient.scalarrayint gradient.scalarrayarray gradient.tensorarrayint gradient.tensorarray "
    "pad_sequence.default vander.default linalg_vecdot.default "
    "adaptive_avg_pool1d.default adaptive_max_pool1d.default avg_pool1d.default "
    "cosine_embedding_loss.default hinge_embedding_loss.default margin_ranking_loss.default "
    "triplet_margin_loss.default norm_except_dim.default pinverse.default "
    "linalg_inv.default inverse.default linalg_solve.default linalg_cholesky.default linalg_ldl_factor.default "
    "linalg_lu_factor.default linalg_pinv.default linalg_pinv.atol_rtol_float linalg_pinv.rcond_tensor "
    "linalg_matrix_rank.default linalg_matrix_rank.atol_rtol_tensor linalg_matrix_rank.atol_rtol_float "
    "linalg_matrix_rank.tol_tensor linalg_tensorsolve.default linalg_tensorinv.default linalg_vander.default "
    "linalg_cond.default linalg_cond.p_str linalg_multi_dot.default linalg_matrix_power.default matrix_power.default "
    "linalg_norm.default linalg_norm.ord_str linalg_matrix_norm.default linalg_matrix_norm.str_ord "
    "linalg_det.default det.default logdet.default slogdet.default linalg_slogdet.default nuclear_norm.default "
    "nuclear_norm.dim frobenius_norm.dim svd.default linalg_svd.default qr.default "
    "special_ndtr.default special_sinc.default float_power.Tensor_Tensor float_power.Tensor_Scalar "
    "fft_fft.default fft_ifft.default fft_rfft.default fft_irfft.default fft_hfft.default fft_ihfft.default "
    "fft_fft2.default fft_ifft2.default fft_rfft2.default fft_irfft2.default fft_hfft2.default fft_ihfft2.default "
    "fft_fftn.default fft_ifftn.default fft_rfftn.default fft_irfftn.default fft_hfftn.default fft_ihfftn.default",
    whole="always",
)
row("mm.default", kernel="marid::mm", factors=(0, 1))
row("bmm.default", kernel="marid::bmm", factors=(0, 1))
row("addmm.default", kernel="marid::product_add", factors=(1, 2))
row("linear.default", kernel="marid::linear")
row("matmul.default mv.default", kernel="marid::matmul")

# --- collectives -----------------------------------------------------------------------------------------------------

row("c10d::send c10d::barrier c10d::monitored_barrier_ c10d::check_for_nan", collective="reads")
row(
    "c10d::_allgather_base_ c10d::_reduce_scatter_base_ c10d::allgather_ c10d::allgather_coalesced_ "
    "c10d::allgather_into_tensor_coalesced_ c10d::allreduce_ c10d::allreduce_coalesced_ c10d::alltoall_ "
    "c10d::alltoall_base_ c10d::broadcast_ c10d::gather_ c10d::recv_ c10d::reduce_ c10d::reduce_scatter_ "
    "c10d::reduce_scatter_tensor_coalesced_ c10d::scatter_",
    collective="writes",
)
row(
    "_c10d_functional::all_gather_into_tensor _c10d_functional::all_gather_into_tensor_coalesced "
    "_c10d_functional::all_gather_into_tensor_out _c10d_functional::all_reduce _c10d_functional::all_reduce_ "
    "_c10d_functional::all_reduce_coalesced _c10d_functional::all_reduce_coalesced_ "
    "_c10d_functional::all_to_all_single _c10d_functional::batch_p2p_ops _c10d_functional::broadcast "
    "_c10d_functional::broadcast_ _c10d_functional::irecv _c10d_functional::isend "
    "_c10d_functional::reduce_scatter_tensor _c10d_functional::reduce_scatter_tensor_coalesced "
    "_c10d_functional::reduce_scatter_tensor_out _dtensor::shard_dim_alltoall",
    collective="returns",
)
row("_c10d_functional::wait_tensor _c10d_functional::_wrap_tensor_autograd", collective="waits")
row("c10d::recv_any_source_", collective="refused")
row("c10d::send c10d::recv_", waited_once=True)

# --- compiling: what Inductor computes as ATen does ------------------------------------------------------------------
# Named is what is let in, never what is kept out. Not in it, because a compiled kernel would do something else than
# raise the error that ATen's raises: whatever looks at values to find memory (indexing, embeddings, gathers, losses
# over class numbers). Not in it either: shapes that depend on data, convolutions, attention.

row(
    "abs acos add addcdiv addcmul asin atan atan2 bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max "
    "clamp_min copysign cos cosh div elu elu_backward eq erf erfc exp exp2 expm1 fill floor frac ge gelu gelu_backward "
    "gt hardsigmoid hardswish hardtanh hardtanh_backward isinf isnan le leaky_relu leaky_relu_backward lerp log log10 "
    "log1p log2 logical_and logical_not logical_or logical_xor lt masked_fill maximum minimum mish mul ne neg pow "
    "reciprocal relu round rsqrt rsub sgn sigmoid sigmoid_backward sign silu silu_backward sin sinh softplus "
    "softplus_backward sqrt square sub tan tanh tanh_backward threshold threshold_backward trunc where xlogy zero "
    "_to_copy copy clone mse_loss_backward",
    fusion="pointwise",
)
row(
    "sum mean amax amin var std var_mean logsumexp linalg_vector_norm native_layer_norm native_layer_norm_backward "
    "_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data mse_loss any all",
    fusion="reduction",
)
row(
    "view t transpose permute expand squeeze unsqueeze slice select split split_with_sizes chunk unbind detach alias "
    "diagonal mm bmm addmm linear baddbmm zeros_like ones_like full_like cat stack constant_pad_nd tril triu",
    fusion="between",
)
for _name in "sqrt rsqrt neg abs reciprocal sign exp zero copy".split():
    row(f"_foreach_{_name}.default", fusion="foreach")
for _name in "add sub mul div".split():
    _second = "alpha" if _name in ("add", "sub") else ""
    row(f"_foreach_{_name}.Scalar", fusion="foreach", number="scalar")
    row(f"_foreach_{_name}.ScalarList", fusion="foreach", number="scalars")
    row(f"_foreach_{_name}.List", fusion="foreach", number=_second)
for _name in "addcmul addcdiv".split():
    row(f"_foreach_{_name}.Scalar", fusion="foreach", number="value")
    row(f"_foreach_{_name}.ScalarList", fusion="foreach", number="scalars")
row("_foreach_lerp.Scalar", fusion="foreach", number="weight")
row("_foreach_lerp.List _foreach_maximum.List", fusion="foreach")

row("div pow", float_only=True)
row("fill masked_fill full_like", fills=True)
row("mm bmm", fused_by_passes=True)
row("add.Tensor sub.Tensor", number="alpha")
row("mul.Scalar div.Scalar eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar", number="other")
row("addcmul.default addcdiv.default fill.Scalar masked_fill.Scalar", number="value")
row("lerp.Scalar", number="weight")
