"""Recurrent operators on the CPU's road: oneDNN's LSTM where the CPU takes it, and else the CPU's own steps.

PyTorch's recurrent operators are composites in C++ that look at the device: on the CPU the projections of all inputs
are one matrix product, and float32 LSTMs are calls of oneDNN; on foreign devices they want fused CUDA kernels. What
follows ``aten/src/ATen/native/RNN.cpp`` and ``aten/src/ATen/native/mkldnn/RNN.cpp`` of PyTorch 2.13 operation by
operation, in their order, so that results and gradients are bitwise equal to eager CPU.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from marid.frontend.overrides import _replaces
from marid.frontend.record import Recorder, recorder_of, special

aten = torch.ops.aten

Tensor = torch.Tensor
Hidden = tuple[Tensor, ...]  # (h,) or (h, c)

# --- oneDNN's LSTM layer as operators of our own ---------------------------------------------------------------------

# ``aten::mkldnn_rnn_layer`` looks at grad mode when it runs: with gradients it computes for training and returns a
# workspace for the backward pass, whose size only oneDNN knows. A recorded layer must take grad mode from where it was
# written, so it is an operator with that as its argument ``keep``. The workspace it returns has one element, in front
# of memory that holds it all; where only that one element arrives, the backward pass computes the workspace again.
# The hidden size is a list because that keeps ``infer`` from trying the operator on smaller tensors.
_TENSORS = "Tensor input, Tensor w_ih, Tensor w_hh, Tensor b_ih, Tensor b_hh, Tensor hx, Tensor cx"
_GRADS = "Tensor output, Tensor hy, Tensor cy, Tensor? grad_output, Tensor? grad_hy, Tensor? grad_cy, Tensor workspace"
_FLAGS = "bool reverse, int[] hidden_size, bool has_biases"
_library = torch.library.Library("marid", "FRAGMENT")
_library.define(f"lstm_layer({_TENSORS}, {_FLAGS}, bool keep) -> (Tensor, Tensor, Tensor, Tensor)")
_library.define(f"lstm_layer_backward({_TENSORS}, {_GRADS}, {_FLAGS}) -> ({', '.join(['Tensor'] * 7)})")

_LSTM = 2  # oneDNN's number for it


def _run_layer(tensors: Sequence[Tensor], reverse: bool, hidden_size: int, has_biases: bool, keep: bool) -> Any:
    with torch.set_grad_enabled(keep):
        return aten.mkldnn_rnn_layer.default(
            *tensors, reverse, [], _LSTM, hidden_size, 1, has_biases, False, False, keep
        )


def _layer_on_cpu(*args: Any) -> Any:
    tensors, (reverse, hidden_size, has_biases, keep) = args[:7], args[7:]
    output, hy, cy, workspace = _run_layer(tensors, reverse, hidden_size[0], has_biases, keep)
    return output, hy, cy, aten.slice.Tensor(workspace, 0, 0, 1) if keep else None


def _layer_on_meta(*args: Any) -> Any:
    (input, *_, hx, cx), (_, hidden_size, _, keep) = args[:7], args[7:]
    output = aten.new_empty.default(input, [input.shape[0], input.shape[1], hidden_size[0]])
    workspace = aten.new_empty.default(input, [1], dtype=torch.uint8) if keep else None
    return output, aten.new_empty.default(hx, hx.shape), aten.new_empty.default(cx, cx.shape), workspace


def _backward_on_cpu(*args: Any) -> Any:
    tensors, grads, workspace, (reverse, hidden_size, has_biases) = args[:7], args[7:13], args[13], args[14:]
    if workspace.untyped_storage().nbytes() == workspace.nbytes:
        workspace = _run_layer(tensors, reverse, hidden_size[0], has_biases, True)[3]
    return aten.mkldnn_rnn_layer_backward.default(
        *tensors, *grads, reverse, _LSTM, hidden_size[0], 1, has_biases, True, False, [], False, workspace
    )


def _backward_on_meta(*args: Any) -> Any:
    input, w_ih, w_hh, _, _, hx, cx = args[:7]
    bias = aten.new_empty.default(w_ih, w_ih.shape[:1], dtype=torch.float32)
    found = [aten.new_empty.default(t, t.shape, dtype=torch.float32) for t in (input, w_ih, w_hh, hx, cx)]
    return (*found[:3], bias, torch.empty_like(bias), *found[3:])


_library.impl("lstm_layer", _layer_on_cpu, "CPU")
_library.impl("lstm_layer", _layer_on_meta, "Meta")
_library.impl("lstm_layer_backward", _backward_on_cpu, "CPU")
_library.impl("lstm_layer_backward", _backward_on_meta, "Meta")


@special(aten.mkldnn_rnn_layer.default)
def _record_layer(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args = _in_order(recorder, args, kwargs)
    reverse, _, _, hidden_size, _, has_biases = args[7:13]
    flags = (reverse, [hidden_size], has_biases, torch.is_grad_enabled())
    return recorder_of(torch.ops.marid.lstm_layer.default).record((*args[:7], *flags), {})


@special(aten.mkldnn_rnn_layer_backward.default)
def _record_backward(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args = _in_order(recorder, args, kwargs)
    reverse, _, hidden_size, _, has_biases = args[13:18]
    if all(grad is None for grad in args[10:13]):
        return (None,) * 7
    flags = (reverse, [hidden_size], has_biases)
    return recorder_of(torch.ops.marid.lstm_layer_backward.default).record((*args[:13], args[22], *flags), {})


def _in_order(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    return (*args, *(kwargs[argument.name] for argument in recorder.func._schema.arguments[len(args) :]))


# --- cells -----------------------------------------------------------------------------------------------------------


class _Params(NamedTuple):
    w_ih: Tensor
    w_hh: Tensor
    b_ih: Tensor | None = None
    b_hh: Tensor | None = None
    w_hr: Tensor | None = None  # projects the hidden state of an LSTM

    def linear_ih(self, input: Tensor) -> Tensor:
        return aten.linear.default(input, self.w_ih, self.b_ih)

    def linear_hh(self, hidden: Tensor) -> Tensor:
        return aten.linear.default(hidden, self.w_hh, self.b_hh)


# A cell takes the input of one step, or that input after ``linear_ih`` (``computed``), and the hidden state.
_Cell = Callable[[Tensor, Hidden, _Params, bool], Hidden]


def _simple_cell(nonlinearity: Any) -> _Cell:
    def cell(input: Tensor, hidden: Hidden, params: _Params, computed: bool) -> Hidden:
        gates = params.linear_hh(hidden[0])
        return (nonlinearity(aten.add_.Tensor(gates, input if computed else params.linear_ih(input))),)

    return cell


def _lstm_cell(input: Tensor, hidden: Hidden, params: _Params, computed: bool) -> Hidden:
    hx, cx = hidden
    gates = params.linear_hh(hx)
    gates = aten.add_.Tensor(gates, input if computed else params.linear_ih(input))
    i, f, g, o = aten.unsafe_chunk.default(gates, 4, 1)
    i, f = aten.sigmoid_.default(i), aten.sigmoid_.default(f)
    g, o = aten.tanh_.default(g), aten.sigmoid_.default(o)
    cy = aten.mul.Tensor(f, cx)
    cy = aten.add_.Tensor(cy, aten.mul.Tensor(i, g))
    hy = aten.mul.Tensor(o, aten.tanh.default(cy))
    if params.w_hr is not None:
        hy = aten.matmul.default(hy, aten.t.default(params.w_hr))
    return hy, cy


def _gru_cell(input: Tensor, hidden: Hidden, params: _Params, computed: bool) -> Hidden:
    inputs = aten.unsafe_chunk.default(input if computed else params.linear_ih(input), 3, 1)
    hiddens = aten.unsafe_chunk.default(params.linear_hh(hidden[0]), 3, 1)
    reset = aten.sigmoid_.default(aten.add_.Tensor(hiddens[0], inputs[0]))
    update = aten.sigmoid_.default(aten.add_.Tensor(hiddens[1], inputs[1]))
    new = aten.tanh_.default(aten.add.Tensor(inputs[2], aten.mul_.Tensor(hiddens[2], reset)))
    return (aten.add_.Tensor(aten.mul_.Tensor(aten.sub.Tensor(hidden[0], new), update), new),)


# --- layers: cells along a sequence. Each returns the outputs and the last hidden state. -----------------------------


def _forwards(cell: _Cell, input: Tensor, hidden: Hidden, params: _Params, backwards: bool = False) -> Any:
    steps = list(aten.unbind.int(params.linear_ih(input), 0))
    _check(bool(steps), "Expected sequence length to be larger than 0 in RNN")
    outputs: list[Tensor] = []
    for step in reversed(steps) if backwards else steps:
        hidden = cell(step, hidden, params, True)
        outputs.append(hidden[0])
    return aten.stack.default(outputs[::-1] if backwards else outputs, 0), hidden


def _backwards(cell: _Cell, input: Tensor, hidden: Hidden, params: _Params) -> Any:
    return _forwards(cell, input, hidden, params, True)


def _packed_forwards(sizes: list[int], cell: _Cell, data: Tensor, hidden: Hidden, params: _Params) -> Any:
    # The batch shrinks as sequences end; what is cut off the hidden state is final.
    projected = params.linear_ih(data)
    outputs: list[Tensor] = []
    ended: list[Hidden] = []
    offset, last = 0, sizes[0]
    for size in sizes:
        step = aten.narrow.default(projected, 0, offset, size)
        offset += size
        if size < last:
            ended.append(_cut(hidden, size, last))
            hidden = _cut(hidden, 0, size)
        last = size
        hidden = cell(step, hidden, params, True)
        outputs.append(hidden[0])
    ended.append(hidden)
    return aten.cat.default(outputs, 0), _joined(ended[::-1])


def _packed_backwards(sizes: list[int], cell: _Cell, data: Tensor, first: Hidden, params: _Params) -> Any:
    # The batch grows as sequences begin, from their ends.
    projected = params.linear_ih(data)
    outputs: list[Tensor] = []
    offset, last = data.shape[0], sizes[-1]
    hidden = _cut(first, 0, last)
    for size in reversed(sizes):
        if size > last:
            hidden = _joined([hidden, _cut(first, last, size)])
        offset -= size
        step = aten.narrow.default(projected, 0, offset, size)
        last = size
        hidden = cell(step, hidden, params, True)
        outputs.append(hidden[0])
    return aten.cat.default(outputs[::-1], 0), hidden


def _cut(hidden: Hidden, start: int, end: int) -> Hidden:
    return tuple([aten.narrow.default(t, 0, start, end - start) for t in hidden])


def _joined(hiddens: list[Hidden]) -> Hidden:
    return tuple([aten.cat.default(list(parts), 0) for parts in zip(*hiddens, strict=True)])


def _dropout(input: Tensor, p: float) -> Tensor:
    if input.numel() == 0:
        return input
    if p == 1:
        zero = aten.zeros.default([], dtype=input.dtype, device=input.device)
        return aten.mul.Tensor(input, zero)
    noise = aten.bernoulli_.float(aten.empty_like.default(input), 1 - p)
    return aten.mul.Tensor(input, aten.div_.Scalar(noise, 1 - p))


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


def _check_devices(input: Tensor, hidden: Sequence[Tensor], params: Sequence[Tensor]) -> None:
    for name, tensors in (("hidden", hidden), ("parameter", params)):
        for t in tensors:
            _check(
                t.device == input.device,
                f"Input and {name} tensors are not at the same device, found input tensor at {input.device} and "
                f"{name} tensor at {t.device}",
            )


def _gather(params: Sequence[Tensor], has_biases: bool, projects: bool = False) -> list[_Params]:
    stride = (4 if has_biases else 2) + projects
    _check(len(params) % stride == 0, "got an incorrect number of RNN parameters")
    gathered: list[_Params] = []
    for start in range(0, len(params), stride):
        part = list(params[start : start + stride])
        w_hr = part.pop() if projects else None
        b_ih, b_hh = part[2:] if has_biases else (None, None)
        gathered.append(_Params(part[0], part[1], b_ih, b_hh, w_hr))
    return gathered


def _stacked(
    layers: tuple[Any, Any],
    cell: _Cell,
    input: Tensor,
    hiddens: list[Hidden],
    params: list[_Params],
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[Tensor, list[Tensor]]:
    """The output of the last layer, and the final hidden states (or hidden and cell states) of all, stacked."""
    directions = 2 if bidirectional else 1
    for items, name in ((hiddens, "hidden states"), (params, "weights")):
        _check(len(items) % directions == 0, "Odd number of params or hiddens given to a bidirectional RNN")
        _check(num_layers == len(items) // directions, f"Expected more {name} in stacked_rnn")
    final: list[Hidden] = []
    for index in range(num_layers):
        outputs: list[Tensor] = []
        for layer, at in zip(layers, range(index * directions, (index + 1) * directions), strict=False):
            output, last = layer(cell, input, hiddens[at], params[at])
            outputs.append(output)
            final.append(last)
        input = aten.cat.default(outputs, outputs[0].dim() - 1) if bidirectional else outputs[0]
        if dropout != 0 and train and index < num_layers - 1:
            input = _dropout(input, dropout)
    return input, [aten.stack.default(list(states), 0) for states in zip(*final, strict=True)]


# --- the operators ---------------------------------------------------------------------------------------------------


def _replace_rnn(packet: Any, cell: _Cell) -> None:
    @_replaces(packet.input)
    def full(
        input: Tensor, hx: Tensor, params: Sequence[Tensor], has_biases: bool, *options: Any
    ) -> tuple[Tensor, Tensor]:
        *options, batch_first = options
        _check_devices(input, [hx], params)
        input = aten.transpose.int(input, 0, 1) if batch_first else input
        gathered = _gather(params, has_biases)
        hiddens = [(h,) for h in aten.unbind.int(hx, 0)]
        output, (hy,) = _stacked((_forwards, _backwards), cell, input, hiddens, gathered, *options)
        return aten.transpose_.default(output, 0, 1) if batch_first else output, hy

    @_replaces(packet.data)
    def packed(
        data: Tensor, batch_sizes: Tensor, hx: Tensor, params: Sequence[Tensor], has_biases: bool, *options: Any
    ) -> tuple[Tensor, Tensor]:
        gathered = _gather(params, has_biases)
        hiddens = [(h,) for h in aten.unbind.int(hx, 0)]
        output, (hy,) = _stacked(_packed(batch_sizes), cell, data, hiddens, gathered, *options)
        return output, hy


def _packed(batch_sizes: Tensor) -> tuple[Any, Any]:
    sizes: list[int] = batch_sizes.tolist()
    return functools.partial(_packed_forwards, sizes), functools.partial(_packed_backwards, sizes)


@_replaces(aten.lstm.input)
def _lstm(
    input: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], has_biases: bool, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *rest, batch_first = options
    _check(len(hx) == 2, "lstm expects two hidden states")
    projects = hx[0].size(2) != hx[1].size(2)
    if _takes_onednn(input, [*params, *hx]):
        if not projects:
            return _lstm_by_onednn(input, hx, params, has_biases, *options)
        _warn_of_projections()
    _check_devices(input, hx, params)
    input = aten.transpose.int(input, 0, 1) if batch_first else input
    gathered = _gather(params, has_biases, projects)
    output, (hy, cy) = _stacked((_forwards, _backwards), _lstm_cell, input, _states(hx), gathered, *rest)
    return aten.transpose.int(output, 0, 1) if batch_first else output, hy, cy


@_replaces(aten.lstm.data)
def _packed_lstm(
    data: Tensor, batch_sizes: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], has_biases: bool, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    _check(len(hx) == 2, "lstm expects two hidden states")
    gathered = _gather(params, has_biases, hx[0].size(2) != hx[1].size(2))
    output, (hy, cy) = _stacked(_packed(batch_sizes), _lstm_cell, data, _states(hx), gathered, *options)
    return output, hy, cy


def _states(hx: Sequence[Tensor]) -> list[Hidden]:
    h, c = aten.unbind.int(hx[0], 0), aten.unbind.int(hx[1], 0)
    _check(len(h) == len(c), f"Expected c_0 size(0) to be {len(h)}, but got {len(c)}")
    return list(zip(h, c, strict=True))


def _takes_onednn(input: Tensor, others: Sequence[Tensor]) -> bool:
    if not (torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()) or input.numel() == 0:
        return False
    if any(t.device != input.device for t in others):
        return False
    if input.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if input.dtype == torch.float16:
        return not torch.is_grad_enabled() and torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return input.dtype == torch.float32


@functools.cache
def _warn_of_projections() -> None:
    warnings.warn("LSTM with projections is not supported with oneDNN. Using default implementation.", stacklevel=3)


def _lstm_by_onednn(
    input: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    input = aten.contiguous.default(aten.transpose.int(input, 0, 1) if batch_first else input)
    h, c = aten.contiguous.default(hx[0]), aten.contiguous.default(hx[1])
    stride, directions = 4 if has_biases else 2, 2 if bidirectional else 1
    _check(len(params) % stride == 0, f"MatrixRef: ArrayRef size {len(params)} not divisible by stride {stride}")
    states: tuple[list[Tensor], list[Tensor]] = ([], [])
    for layer in range(num_layers):
        outputs: list[Tensor] = []
        for at in range(layer * directions, (layer + 1) * directions):
            start = at * stride
            weights = list(params[start : start + stride])
            _check(
                len(weights) == stride,
                f"ArrayRef: invalid slice, N = {start}; M = {stride}; size = {len(params)}",
            )
            if not has_biases:
                weights += [aten.zeros.default(w.shape, dtype=w.dtype, device=w.device) for w in weights]
            output, hy, cy, _ = aten.mkldnn_rnn_layer.default(
                *(input, *weights, aten.select.int(h, 0, at), aten.select.int(c, 0, at), at % directions > 0, []),
                *(_LSTM, h.shape[2], num_layers, has_biases, bidirectional, batch_first, train),
            )
            outputs.append(output)
            states[0].append(hy)
            states[1].append(cy)
        input = outputs[0] if directions == 1 else aten.cat.default(outputs, -1)
        if dropout != 0 and train and layer < num_layers - 1:
            input = _dropout(input, dropout)
    hy, cy = aten.stack.default(states[0], 0), aten.stack.default(states[1], 0)
    return aten.transpose.int(input, 0, 1) if batch_first else input, hy, cy


def _replace_cell(func: Any, cell: _Cell, gates: int) -> None:
    @_replaces(func)
    def replacement(
        input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
    ) -> Any:
        hidden = tuple(hx) if gates == 4 else (hx,)
        _check(gates != 4 or len(hidden) == 2, "lstm_cell expects two hidden states")
        size = w_hh.size(1)
        got, wanted = input.size(1), w_ih.size(1)
        _check(got == wanted, f"input has inconsistent input_size: got {got} expected {wanted}")

        def check_weights() -> None:
            for name, w in (("weight_ih", w_ih), ("weight_hh", w_hh)):
                rule = f"{name} first dim must be {gates} * hidden_size = {gates * size}, but got {w.size(0)}"
                _check(w.size(0) == gates * size, rule)

        def check_hidden() -> None:
            batch = input.size(0)
            for label, h in enumerate(hidden):
                rule = f"Input batch size {batch} doesn't match hidden{label} batch size {h.size(0)}"
                _check(batch == h.size(0), rule)
                rule = f"hidden{label} has inconsistent hidden_size: got {h.size(1)}, expected {size}"
                _check(h.size(1) == size, rule)

        for check in (check_weights, check_hidden) if gates == 4 else (check_hidden, check_weights):
            check()
        result = cell(input, hidden, _Params(w_ih, w_hh, b_ih, b_hh), False)
        return result if gates == 4 else result[0]


_tanh_cell, _relu_cell = _simple_cell(aten.tanh.default), _simple_cell(aten.relu.default)
_replace_rnn(aten.gru, _gru_cell)
_replace_rnn(aten.rnn_tanh, _tanh_cell)
_replace_rnn(aten.rnn_relu, _relu_cell)
_replace_cell(aten.lstm_cell.default, _lstm_cell, 4)
_replace_cell(aten.gru_cell.default, _gru_cell, 3)
_replace_cell(aten.rnn_tanh_cell.default, _tanh_cell, 1)
_replace_cell(aten.rnn_relu_cell.default, _relu_cell, 1)
