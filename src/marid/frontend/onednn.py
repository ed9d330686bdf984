"""oneDNN's LSTM layer as operators of our own, which take grad mode from where they were written.

``aten::mkldnn_rnn_layer`` looks at grad mode when it runs: with gradients it computes for training and returns a
workspace for the backward pass, whose size only oneDNN knows. ``marid::lstm_layer`` has that as its argument ``keep``;
its kernels are in ``native/lstm_layer.cpp``. The workspace it returns has one element, in front of memory that holds
all of it; where only that one element arrives (because somebody copied it), or less than a layer of these sizes was
seen to write, the backward pass computes the workspace again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from marid.frontend.record import Recorder, special
from marid.ops.own_operators import OwnOperator, define

aten = torch.ops.aten
LSTM = 2  # oneDNN's number for it

Tensor = torch.Tensor

# The kernels read as much memory as the hidden size says, whatever there is: see ``_checked``.
_TENSORS = "Tensor input, Tensor w_ih, Tensor w_hh, Tensor b_ih, Tensor b_hh, Tensor hx, Tensor cx"
_GRADS = "Tensor output, Tensor hy, Tensor cy, Tensor? grad_output, Tensor? grad_hy, Tensor? grad_cy, Tensor workspace"
_FLAGS = "bool reverse, int[] hidden_size, bool has_biases"
_LAYER = f"lstm_layer({_TENSORS}, {_FLAGS}, bool keep) -> (Tensor, Tensor, Tensor, Tensor)"
_BACKWARD = f"lstm_layer_backward({_TENSORS}, {_GRADS}, {_FLAGS}) -> ({', '.join(['Tensor'] * 7)})"


def _checked(input: Tensor, w_ih: Tensor, w_hh: Tensor, hx: Tensor, cx: Tensor, hidden_size: int) -> None:
    """Raise for tensors that do not fit together, as those of a call with smaller sizes (``frontend/smaller.py``)
    mostly do not: meta kernels are all that keeps such a call from being tried."""
    gates, state = 4 * hidden_size, (input.shape[1], hidden_size)
    fits = w_ih.shape == (gates, input.shape[2]) and w_hh.shape == (gates, hidden_size)
    if not fits or hx.shape[-2:] != state or cx.shape[-2:] != state:
        raise RuntimeError(f"tensors that are not those of an LSTM layer with {hidden_size} hidden features")


def _layer_on_meta(*args: Any) -> Any:
    (input, w_ih, w_hh, _, _, hx, cx), (_, hidden_size, _, keep) = args[:7], args[7:]
    _checked(input, w_ih, w_hh, hx, cx, hidden_size[0])
    output = aten.new_empty.default(input, [input.shape[0], input.shape[1], hidden_size[0]])
    workspace = aten.new_empty.default(input, [1], dtype=torch.uint8) if keep else None
    return output, aten.new_empty.default(hx, hx.shape), aten.new_empty.default(cx, cx.shape), workspace


def _backward_on_meta(*args: Any) -> Any:
    input, w_ih, w_hh, _, _, hx, cx = args[:7]
    _checked(input, w_ih, w_hh, hx, cx, args[15][0])
    bias = aten.new_empty.default(w_ih, w_ih.shape[:1], dtype=torch.float32)
    found = [aten.new_empty.default(t, t.shape, dtype=torch.float32) for t in (input, w_ih, w_hh, hx, cx)]
    return (*found[:3], bias, torch.empty_like(bias), *found[3:])


define(
    OwnOperator(_LAYER, {"Meta": _layer_on_meta}),
    OwnOperator(_BACKWARD, {"Meta": _backward_on_meta}),
)


@special(aten.mkldnn_rnn_layer.default)
def _record_layer(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args = _in_order(recorder, args, kwargs)
    reverse, _, _, hidden_size, _, has_biases = args[7:13]
    return torch.ops.marid.lstm_layer.default(*args[:7], reverse, [hidden_size], has_biases, torch.is_grad_enabled())


@special(aten.mkldnn_rnn_layer_backward.default)
def _record_backward(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args = _in_order(recorder, args, kwargs)
    reverse, _, hidden_size, _, has_biases = args[13:18]
    if all(grad is None for grad in args[10:13]):
        return (None,) * 7
    backward = torch.ops.marid.lstm_layer_backward.default
    return backward(*args[:13], args[22], reverse, [hidden_size], has_biases)


def _in_order(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    return (*args, *(kwargs[name] for name in list(recorder.position)[len(args) :]))


def takes_onednn(input: Tensor, others: Sequence[Tensor]) -> bool:
    """Whether the CPU gives an LSTM on such tensors to oneDNN."""
    if not (torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()) or input.numel() == 0:
        return False
    if any(t.device != input.device for t in others):
        return False
    if input.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if input.dtype == torch.float16:
        return not torch.is_grad_enabled() and torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return input.dtype == torch.float32
