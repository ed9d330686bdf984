"""Recurrent cells and layers as the CPU computes them, operation by operation in the order of PyTorch's ``RNN.cpp``.

The usual steps of LSTM and GRU layers are composites in C++ (``native/cells.cpp``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

aten = torch.ops.aten

Tensor = torch.Tensor
Hidden = tuple[Tensor, ...]  # (h,) or (h, c)


class Params(NamedTuple):
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
Cell = Callable[[Tensor, Hidden, Params, bool], Hidden]


def simple_cell(nonlinearity: Any) -> Cell:
    def cell(input: Tensor, hidden: Hidden, params: Params, computed: bool) -> Hidden:
        gates = params.linear_hh(hidden[0])
        return (nonlinearity(aten.add_.Tensor(gates, input if computed else params.linear_ih(input))),)

    return cell


def lstm_cell(input: Tensor, hidden: Hidden, params: Params, computed: bool) -> Hidden:
    hx, cx = hidden
    if computed and params.w_hr is None:
        return torch.ops.marid.lstm_step.default(input, hx, cx, params.w_hh, params.b_hh)
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


def gru_cell(input: Tensor, hidden: Hidden, params: Params, computed: bool) -> Hidden:
    from_input = input if computed else params.linear_ih(input)
    return (torch.ops.marid.gru_step.default(from_input, hidden[0], params.w_hh, params.b_hh),)


# --- layers: cells along a sequence. Each returns the outputs and the last hidden state. -----------------------------


def forwards(cell: Cell, input: Tensor, hidden: Hidden, params: Params, reverse: bool = False) -> Any:
    steps = list(aten.unbind.int(params.linear_ih(input), 0))
    check(bool(steps), "Expected sequence length to be larger than 0 in RNN")
    outputs: list[Tensor] = []
    for step in reversed(steps) if reverse else steps:
        hidden = cell(step, hidden, params, True)
        outputs.append(hidden[0])
    return aten.stack.default(outputs[::-1] if reverse else outputs, 0), hidden


def backwards(cell: Cell, input: Tensor, hidden: Hidden, params: Params) -> Any:
    return forwards(cell, input, hidden, params, True)


def packed_forwards(sizes: list[int], cell: Cell, data: Tensor, hidden: Hidden, params: Params) -> Any:
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


def packed_backwards(sizes: list[int], cell: Cell, data: Tensor, first: Hidden, params: Params) -> Any:
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


def dropout(input: Tensor, p: float) -> Tensor:
    if input.numel() == 0:
        return input
    if p == 1:
        zero = aten.zeros.default([], dtype=input.dtype, device=input.device)
        return aten.mul.Tensor(input, zero)
    noise = aten.bernoulli_.float(aten.empty_like.default(input), 1 - p)
    return aten.mul.Tensor(input, aten.div_.Scalar(noise, 1 - p))


def check(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)
