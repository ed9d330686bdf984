"""What recurrent layers need in Python: oneDNN's LSTM layer as operators of our own, and the packing of sequences.

The layers themselves are composites in C++ (``native/recurrent_layers.cpp``).

``aten::mkldnn_rnn_layer`` looks at grad mode when it runs: with gradients it computes for training and returns a
workspace for the backward pass, whose size only oneDNN knows. ``marid::lstm_layer`` has that as its argument ``keep``;
its kernels are in ``native/lstm_layer.cpp``. The workspace it returns has one element, in front of memory that holds
all of it; where only that one element arrives (because somebody copied it), or less than a layer of these sizes was
seen to write, the backward pass computes the workspace again.
"""

from __future__ import annotations

from typing import Any

import torch

from marid.frontend.record import Recorder, special
from marid.graph.dispatch_state import concretely
from marid.ops.own_operators import OwnOperator, define

aten = torch.ops.aten

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


@special(aten._pack_padded_sequence.default)
def _pack(_recorder: Recorder, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Only the data lies on the device: lengths and batch sizes are CPU tensors on every device."""
    input, lengths, batch_first = args
    if lengths.device.type != "cpu":
        raise RuntimeError(
            f"'lengths' argument should be a 1D CPU int64 tensor, but got {lengths.dim()}D {lengths.device} tensor"
        )
    input = aten.transpose.int(input, 0, 1) if batch_first else input
    steps, batch = input.shape[:2]
    with concretely():  # packing their numbers says where the elements go
        numbers = torch.arange(steps * batch * min(1, input.numel()), device="cpu").reshape(steps, -1)
        order, batch_sizes = aten._pack_padded_sequence.default(numbers, lengths, False)
        indices = [order // batch, order % batch]
    return aten.contiguous.default(aten.index.Tensor(input, indices)), batch_sizes
