"""Recurrent operators on the CPU's road: oneDNN's LSTM where the CPU takes it, and else the CPU's own steps.

PyTorch's recurrent operators are composites in C++ that look at the device: on the CPU the projections of all inputs
are one matrix product, and float32 LSTMs are calls of oneDNN; on foreign devices they want fused CUDA kernels. What
follows ``aten/src/ATen/native/RNN.cpp`` and ``aten/src/ATen/native/mkldnn/RNN.cpp`` of PyTorch 2.13 operation by
operation, in their order, so that results and gradients are bitwise equal to eager CPU.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from marid.engine.inprocess import concretely
from marid.frontend import cells, onednn
from marid.frontend.cells import Cell, Hidden, Params, check
from marid.frontend.overrides import _replaces
from marid.frontend.record import Recorder, special

__all__: list[str] = []

aten = torch.ops.aten

Tensor = torch.Tensor


def _check_devices(input: Tensor, hidden: Sequence[Tensor], params: Sequence[Tensor]) -> None:
    for name, tensors in (("hidden", hidden), ("parameter", params)):
        for t in tensors:
            check(
                t.device == input.device,
                f"Input and {name} tensors are not at the same device, found input tensor at {input.device} and "
                f"{name} tensor at {t.device}",
            )


def _gather(params: Sequence[Tensor], has_biases: bool, projects: bool = False) -> list[Params]:
    stride = (4 if has_biases else 2) + projects
    check(len(params) % stride == 0, "got an incorrect number of RNN parameters")
    gathered: list[Params] = []
    for start in range(0, len(params), stride):
        part = list(params[start : start + stride])
        w_hr = part.pop() if projects else None
        b_ih, b_hh = part[2:] if has_biases else (None, None)
        gathered.append(Params(part[0], part[1], b_ih, b_hh, w_hr))
    return gathered


def _stacked(
    layers: tuple[Any, Any],
    cell: Cell,
    input: Tensor,
    hiddens: list[Hidden],
    params: list[Params],
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[Tensor, list[Tensor]]:
    """The output of the last layer, and the final hidden states (or hidden and cell states) of all, stacked."""
    directions = 2 if bidirectional else 1
    for items, name in ((hiddens, "hidden states"), (params, "weights")):
        check(len(items) % directions == 0, "Odd number of params or hiddens given to a bidirectional RNN")
        check(num_layers == len(items) // directions, f"Expected more {name} in stacked_rnn")
    final: list[Hidden] = []
    for index in range(num_layers):
        outputs: list[Tensor] = []
        for layer, at in zip(layers, range(index * directions, (index + 1) * directions), strict=False):
            output, last = layer(cell, input, hiddens[at], params[at])
            outputs.append(output)
            final.append(last)
        input = aten.cat.default(outputs, outputs[0].dim() - 1) if bidirectional else outputs[0]
        if dropout != 0 and train and index < num_layers - 1:
            input = cells.dropout(input, dropout)
    return input, [aten.stack.default(list(states), 0) for states in zip(*final, strict=True)]


# --- the operators ---------------------------------------------------------------------------------------------------


def _replace_rnn(packet: Any, cell: Cell) -> None:
    @_replaces(packet.input)
    def full(
        input: Tensor, hx: Tensor, params: Sequence[Tensor], has_biases: bool, *options: Any
    ) -> tuple[Tensor, Tensor]:
        *rest, batch_first = options
        _check_devices(input, [hx], params)
        input = aten.transpose.int(input, 0, 1) if batch_first else input
        gathered = _gather(params, has_biases)
        hiddens = [(h,) for h in aten.unbind.int(hx, 0)]
        output, (hy,) = _stacked((cells.forwards, cells.backwards), cell, input, hiddens, gathered, *rest)
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
    return functools.partial(cells.packed_forwards, sizes), functools.partial(cells.packed_backwards, sizes)


@_replaces(aten.lstm.input)
def _lstm(
    input: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], has_biases: bool, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    check(len(hx) == 2, "lstm expects two hidden states")
    *rest, batch_first = options
    projects = hx[0].size(2) != hx[1].size(2)
    by_onednn = onednn.takes_onednn(input, [*params, *hx])
    if by_onednn and projects:
        _warn_of_projections()
    if by_onednn and not projects:
        layers, input, hiddens, gathered = _onednn(input, hx, params, has_biases, *options)
    else:
        _check_devices(input, hx, params)
        input = aten.transpose.int(input, 0, 1) if batch_first else input
        gathered = _gather(params, has_biases, projects)
        layers, hiddens = (cells.forwards, cells.backwards), _states(hx)
    output, (hy, cy) = _stacked(layers, cells.lstm_cell, input, hiddens, gathered, *rest)
    return aten.transpose.int(output, 0, 1) if batch_first else output, hy, cy


@functools.cache
def _warn_of_projections() -> None:
    warnings.warn("LSTM with projections is not supported with oneDNN. Using default implementation.", stacklevel=4)


def _onednn(
    input: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    _dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Any, Tensor, list[Hidden], list[Params]]:
    """What ``_stacked`` needs to let oneDNN compute the layers."""
    input = aten.contiguous.default(aten.transpose.int(input, 0, 1) if batch_first else input)
    h, c = aten.contiguous.default(hx[0]), aten.contiguous.default(hx[1])
    stride, count = 4 if has_biases else 2, num_layers * (2 if bidirectional else 1)
    check(len(params) % stride == 0, f"MatrixRef: ArrayRef size {len(params)} not divisible by stride {stride}")
    slices = f"ArrayRef: invalid slice, N = {len(params)}; M = {stride}; size = {len(params)}"
    check(len(params) >= count * stride, slices)
    size = h.shape[2]

    def layer(reverse: bool, _cell: Cell, input: Tensor, hidden: Hidden, weights: Params) -> tuple[Tensor, Hidden]:
        w_ih, w_hh, b_ih, b_hh, _ = weights
        # oneDNN reads whatever memory is there.
        shapes = [(4 * size, input.shape[2]), (4 * size, size), *[(input.shape[1], size)] * 2]
        check([t.shape for t in (w_ih, w_hh, *hidden)] == shapes, "lstm: the sizes of its tensors do not match")
        if b_ih is None or b_hh is None:
            b_ih, b_hh = [aten.zeros.default(w.shape, dtype=w.dtype, device=w.device) for w in (w_ih, w_hh)]
        tensors = (input, w_ih, w_hh, b_ih, b_hh, *hidden)
        output, hy, cy, _ = aten.mkldnn_rnn_layer.default(
            *(*tensors, reverse, [], onednn.LSTM, size, num_layers, has_biases, bidirectional, batch_first, train)
        )
        return output, (hy, cy)

    hiddens: list[Hidden] = [(aten.select.int(h, 0, at), aten.select.int(c, 0, at)) for at in range(count)]
    layers = (functools.partial(layer, False), functools.partial(layer, True))
    return layers, input, hiddens, _gather(params[: count * stride], has_biases)


@_replaces(aten.lstm.data)
def _packed_lstm(
    data: Tensor, batch_sizes: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], has_biases: bool, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    check(len(hx) == 2, "lstm expects two hidden states")
    projects = hx[0].size(2) != hx[1].size(2)
    sizes: list[int] = batch_sizes.tolist()
    if sizes and sizes[0] == sizes[-1] and not projects and _packs_equal_lengths():
        whole = aten.reshape.default(data, [len(sizes), sizes[0], data.size(-1)])
        if onednn.takes_onednn(whole, [*params, *hx]):
            output, hy, cy = _lstm(whole, hx, params, has_biases, *options, False)
            return aten.reshape.default(output, [data.size(0), output.size(-1)]), hy, cy
    gathered = _gather(params, has_biases, projects)
    output, (hy, cy) = _stacked(_packed(batch_sizes), cells.lstm_cell, data, _states(hx), gathered, *options)
    return output, hy, cy


@functools.cache
def _packs_equal_lengths() -> bool:
    """Whether this PyTorch gives packed sequences of one length to oneDNN, as it does sequences that are not packed.

    The graph of such a call tells; it is made in a thread of its own, where no mode or transform of the user's is on.
    """
    found: list[str] = []

    def call() -> None:
        x, h = torch.ones(1, 1, device="cpu", requires_grad=True), torch.ones(1, 1, 1, device="cpu")
        sizes, weights = torch.ones(1, dtype=torch.int64, device="cpu"), [torch.ones(4, 1, device="cpu")] * 2
        pending: list[Any] = [torch._VF.lstm(x, sizes, (h, h), weights, False, 1, 0.0, True, False)[0].grad_fn]
        while pending:
            function = pending.pop()
            found.append(function.name())
            pending += [following for following, _ in function.next_functions if following is not None]

    thread = threading.Thread(target=call, name="marid-lstm")
    thread.start()
    thread.join()
    return any(name.startswith("MkldnnRnnLayer") for name in found)


def _states(hx: Sequence[Tensor]) -> list[Hidden]:
    h, c = aten.unbind.int(hx[0], 0), aten.unbind.int(hx[1], 0)
    check(len(h) == len(c), f"Expected c_0 size(0) to be {len(h)}, but got {len(c)}")
    return list(zip(h, c, strict=True))


def _replace_cell(func: Any, cell: Cell, gates: int) -> None:
    @_replaces(func)
    def replacement(
        input: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
    ) -> Any:
        hidden = tuple(hx) if gates == 4 else (hx,)
        check(gates != 4 or len(hidden) == 2, "lstm_cell expects two hidden states")
        size = w_hh.size(1)
        got, wanted = input.size(1), w_ih.size(1)
        check(got == wanted, f"input has inconsistent input_size: got {got} expected {wanted}")

        def check_weights() -> None:
            for name, w in (("weight_ih", w_ih), ("weight_hh", w_hh)):
                rule = f"{name} first dim must be {gates} * hidden_size = {gates * size}, but got {w.size(0)}"
                check(w.size(0) == gates * size, rule)

        def check_hidden() -> None:
            batch = input.size(0)
            for label, h in enumerate(hidden):
                rule = f"Input batch size {batch} doesn't match hidden{label} batch size {h.size(0)}"
                check(batch == h.size(0), rule)
                rule = f"hidden{label} has inconsistent hidden_size: got {h.size(1)}, expected {size}"
                check(h.size(1) == size, rule)

        for run in (check_weights, check_hidden) if gates != 3 else (check_hidden, check_weights):
            run()
        result = cell(input, hidden, Params(w_ih, w_hh, b_ih, b_hh), False)
        return result if gates == 4 else result[0]


_tanh_cell, _relu_cell = cells.simple_cell(aten.tanh.default), cells.simple_cell(aten.relu.default)
_replace_rnn(aten.gru, cells.gru_cell)
_replace_rnn(aten.rnn_tanh, _tanh_cell)
_replace_rnn(aten.rnn_relu, _relu_cell)
_replace_cell(aten.lstm_cell.default, cells.lstm_cell, 4)
_replace_cell(aten.gru_cell.default, cells.gru_cell, 3)
_replace_cell(aten.rnn_tanh_cell.default, _tanh_cell, 1)
_replace_cell(aten.rnn_relu_cell.default, _relu_cell, 1)


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
