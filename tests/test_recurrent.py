"""Recurrent modules and cells equal eager CPU bit for bit: outputs, hidden states, gradients, errors, laziness."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.testing._internal.common_utils import set_default_dtype

import marid

from .helpers import DEVICE, assert_same, on_both, train_step

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
MODULES: dict[str, Callable[..., Any]] = {
    "lstm": torch.nn.LSTM,
    "gru": torch.nn.GRU,
    "tanh": torch.nn.RNN,
    "relu": lambda *args, **kwargs: torch.nn.RNN(*args, nonlinearity="relu", **kwargs),
    "projected": lambda *args, **kwargs: torch.nn.LSTM(*args, proj_size=3, **kwargs),
}
CELLS: dict[str, Callable[..., Any]] = {
    "lstm": torch.nn.LSTMCell,
    "gru": torch.nn.GRUCell,
    "tanh": torch.nn.RNNCell,
    "relu": lambda *args, **kwargs: torch.nn.RNNCell(*args, nonlinearity="relu", **kwargs),
}
LENGTHS = [5, 4, 2, 2]  # of the sequences in a packed batch
GRAD_MODES: dict[str, Any] = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])


def states(kind: str, layers: int, batch: int, dtype: torch.dtype) -> Any:
    """A hidden state to start from: leaves that require gradients."""
    h = torch.randn(layers, batch, 3 if kind == "projected" else 6, dtype=dtype)
    if kind not in ("lstm", "projected"):
        return h
    return h, torch.randn(layers, batch, 6, dtype=dtype)


def leaf(thing: Any, device: str) -> Any:
    if isinstance(thing, tuple):
        return tuple(leaf(item, device) for item in thing)
    return thing.to(device, copy=True).requires_grad_(torch.is_grad_enabled())


def flat(thing: Any) -> list[torch.Tensor]:
    if isinstance(thing, PackedSequence):
        return [thing.data]
    return [tensor for item in thing for tensor in flat(item)] if isinstance(thing, (tuple, list)) else [thing]


def outcome(module: torch.nn.Module, inputs: list[Any], outputs: Any) -> Any:
    """Outputs and, where there are any, the gradients of an uneven loss."""
    tensors = flat(outputs)
    found: list[Any] = [[t.detach() for t in tensors]]
    if torch.is_grad_enabled():
        loss = sum((t * torch.linspace(-1, 2, t.numel()).to(t).view(t.shape)).sum() for t in tensors)
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        found.append([t.grad for t in [*flat(inputs), *module.parameters()]])
    return found


def check(
    kind: str, dtype: torch.dtype, packed: bool = False, given: bool = True, train: bool = True, **kwargs: Any
) -> None:
    torch.manual_seed(1)
    made = MODULES[kind](5, 6, **kwargs).to(dtype).train(train)
    batch_first = bool(kwargs.get("batch_first"))
    x = torch.randn(4, 5, 5, dtype=dtype)  # a batch of four, five steps
    layers = kwargs.get("num_layers", 1) * (2 if kwargs.get("bidirectional") else 1)
    hidden = states(kind, layers, 4, dtype)

    def run(device: str) -> Any:
        module = MODULES[kind](5, 6, **kwargs).to(dtype).train(train)
        module.load_state_dict(made.state_dict())
        module = module.to(device)
        for parameter in module.parameters():
            parameter.requires_grad_(torch.is_grad_enabled())
        inputs = [leaf(x if batch_first else x.transpose(0, 1), device)]
        start = [leaf(hidden, device)] if given else []
        torch.manual_seed(7)
        first = pack_padded_sequence(inputs[0], LENGTHS, batch_first) if packed else inputs[0]
        return outcome(module, [*inputs, *start], module(first, *start))

    on_both(run)


@dtypes
@pytest.mark.parametrize("packed", [False, True], ids=["full", "packed"])
@pytest.mark.parametrize("kind", MODULES)
def test_modules(kind: str, packed: bool, dtype: torch.dtype) -> None:
    for layers, bidirectional, bias in ((1, False, True), (1, True, False), (2, False, False), (2, True, True)):
        check(kind, dtype, packed, num_layers=layers, bidirectional=bidirectional, bias=bias)


@dtypes
@pytest.mark.parametrize("packed", [False, True], ids=["full", "packed"])
@pytest.mark.parametrize("kind", MODULES)
def test_batch_first_and_no_initial_state(kind: str, packed: bool, dtype: torch.dtype) -> None:
    check(kind, dtype, packed, given=False, batch_first=True, bidirectional=True)


@dtypes
@pytest.mark.parametrize("packed", [False, True], ids=["full", "packed"])
@pytest.mark.parametrize("kind", MODULES)
def test_dropout(kind: str, packed: bool, dtype: torch.dtype) -> None:
    for p in (0.3, 1.0):
        check(kind, dtype, packed, num_layers=3, dropout=p)
    check(kind, dtype, packed, num_layers=2, dropout=0.3, train=False)


@dtypes
@pytest.mark.parametrize("mode", ["no_grad", "inference"])
@pytest.mark.parametrize("kind", MODULES)
def test_without_gradients(kind: str, mode: str, dtype: torch.dtype) -> None:
    for packed, train in ((False, True), (True, False)):
        with GRAD_MODES[mode]():
            check(kind, dtype, packed, train=train, num_layers=2, bidirectional=True, dropout=0.2)


@dtypes
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", MODULES)
def test_weights_that_require_gradients_without_any(kind: str, batch_first: bool, dtype: torch.dtype) -> None:
    """What requires gradients decides how rows fold, in inference mode too: views of weights are views there."""
    torch.manual_seed(1)
    made = MODULES[kind](5, 6, 2, batch_first=batch_first, bidirectional=True).to(dtype)
    x = torch.randn(3, 4, 5, dtype=dtype)

    def run(device: str) -> Any:
        module, given = copy.deepcopy(made).to(device), x.to(device)
        with torch.inference_mode():
            return flat(module(given))

    on_both(run)


@dtypes
@pytest.mark.parametrize("mode", GRAD_MODES)
@pytest.mark.parametrize("kind", CELLS)
def test_cells(kind: str, mode: str, dtype: torch.dtype) -> None:
    for bias in (True, False):
        torch.manual_seed(1)
        made = CELLS[kind](5, 6, bias=bias).to(dtype)
        x, hidden = torch.randn(3, 4, 5, dtype=dtype), states(kind, 1, 4, dtype)

        def run(device: str, bias: bool = bias, made: Any = made, x: Any = x, hidden: Any = hidden) -> Any:
            cell = CELLS[kind](5, 6, bias=bias).to(dtype)
            cell.load_state_dict(made.state_dict())
            cell = cell.to(device)
            for parameter in cell.parameters():
                parameter.requires_grad_(torch.is_grad_enabled())
            steps, start = leaf(x, device), leaf(hidden, device)
            state = tuple(t[0] for t in start) if kind == "lstm" else start[0]
            seen = []
            for step in steps.unbind(0):
                state = cell(step, state)
                seen.append(state)
            return outcome(cell, [steps, start], seen)

        with GRAD_MODES[mode]():
            on_both(run)


@pytest.mark.parametrize("kind", MODULES)
def test_large(kind: str) -> None:
    """Beyond the sizes at which operators are tried out on stand-ins."""

    def run(device: str) -> Any:
        torch.manual_seed(2)
        module = MODULES[kind](64, 96, 2, bidirectional=True)
        x = torch.randn(12, 7, 64)
        module = module.to(device)
        x = leaf(x, device)
        return outcome(module, [x], module(x))

    on_both(run)


@pytest.mark.parametrize("kind", MODULES)
def test_few_features_of_large_inputs(kind: str) -> None:
    """With small sizes in place of the large ones such tensors do not fit together, and kernels do not notice."""

    def run(device: str) -> Any:
        torch.manual_seed(2)
        module = MODULES[kind](160, 4).to(device)
        x = leaf(torch.randn(17, 8, 160), device)
        return outcome(module, [x], module(x))

    on_both(run)


@pytest.mark.parametrize("kind", MODULES)
def test_float16(kind: str) -> None:
    check(kind, torch.float16, bidirectional=True)


@pytest.mark.parametrize("kind", MODULES)
def test_autocast(kind: str) -> None:
    def run(device: str) -> Any:
        torch.manual_seed(2)
        module, x = MODULES[kind](5, 6), torch.randn(3, 4, 5)
        module, x = module.to(device), x.to(device)
        with torch.autocast(device, torch.bfloat16), torch.no_grad():
            return flat(module(x))

    if kind != "lstm" or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        on_both(run)
        return
    for device in ("cpu", DEVICE):  # oneDNN refuses
        with pytest.raises(RuntimeError):
            run(device)[0].cpu()


@pytest.mark.parametrize("packed", [False, True], ids=["full", "packed"])
@pytest.mark.parametrize("kind", MODULES)
def test_double_backward(kind: str, packed: bool) -> None:
    def run(device: str) -> Any:
        torch.manual_seed(2)
        module, x = MODULES[kind](5, 6), torch.randn(5, 4, 5)
        module, x = module.to(device), leaf(x, device)
        output = flat(module(pack_padded_sequence(x, LENGTHS) if packed else x))[0]
        (grad,) = torch.autograd.grad((output * output).sum(), x, create_graph=True)
        return grad.detach(), torch.autograd.grad((grad * grad).sum(), [x, *module.parameters()], allow_unused=True)[:3]

    on_both(run)


def test_disabling_onednn() -> None:
    with torch.backends.mkldnn.flags(enabled=False):
        check("lstm", torch.float32, num_layers=2)


def test_grad_mode_where_written_counts() -> None:
    """Not the one in which somebody reads: the backward pass needs what the forward pass kept for it."""

    def run(device: str) -> Any:
        torch.manual_seed(2)
        module, x = torch.nn.LSTM(5, 6), torch.randn(3, 4, 5)
        module, x = module.to(device), leaf(x, device)
        output = module(x)[0]
        with torch.no_grad():
            seen = output.detach().cpu()
            later = module(x)[0]
        output.sum().backward()
        return seen, later, x.grad, [p.grad for p in module.parameters()]

    on_both(run)


def test_workspace_is_computed_again_where_it_was_copied() -> None:
    def run(device: str) -> Any:
        torch.manual_seed(2)
        module, x = torch.nn.LSTM(5, 6, bidirectional=True), torch.randn(3, 4, 5)
        module, x = module.to(device), leaf(x, device)
        with torch.autograd.graph.save_on_cpu() if device == DEVICE else contextlib.nullcontext():
            output = module(x)[0]
        output.sum().backward()
        return x.grad, [p.grad for p in module.parameters()]

    on_both(run)


@pytest.mark.parametrize("kind", MODULES)
def test_nothing_runs_before_it_is_read(kind: str) -> None:
    module = MODULES[kind](5, 6, 2, bidirectional=True).to(DEVICE)
    x = torch.randn(3, 4, 5).to(DEVICE).requires_grad_()
    marid.reset_stats()
    output = flat(module(x))[0]
    output.sum().backward()
    assert marid.stats().ops_executed == 0
    assert not marid.stats().fallbacks
    assert x.grad is not None
    x.grad.cpu()
    assert not marid.stats().fallbacks


def message(function: Callable[[str], Any], device: str) -> str:
    with pytest.raises((RuntimeError, IndexError)) as caught:
        function(device)
    return f"{type(caught.value).__name__}: {caught.value}".splitlines()[0].replace(DEVICE + ":0", "cpu")


def weights(device: str, gates: int, layers: int = 1) -> list[torch.Tensor]:
    shapes = [(gates * 5, 4), (gates * 5, 5), (gates * 5,), (gates * 5,)] * layers
    return [torch.randn(shape, device=device) for shape in shapes]


def shaped(device: str, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("shape", [(4, 4), (4, 4, 3), (4, 4, 3, 2)])
def test_packing(shape: tuple[int, ...], batch_first: bool) -> None:
    def run(device: str) -> Any:
        torch.manual_seed(2)
        x = leaf(torch.randn(shape), device)
        packed = pack_padded_sequence(x, [2, 4, 1, 2], batch_first, enforce_sorted=False)
        padded, lengths = pad_packed_sequence(packed, batch_first, padding_value=2.0, total_length=6)
        assert packed.batch_sizes.device.type == lengths.device.type == "cpu"
        (padded * padded).sum().backward()
        with torch.inference_mode():
            again = pack_padded_sequence(x.detach(), [2, 4, 1, 2], batch_first, enforce_sorted=False)
        return packed.data, packed.batch_sizes, padded, lengths, x.grad, again.data

    on_both(run)


def test_packing_refuses_what_eager_refuses() -> None:
    for shape, lengths in (((3, 2, 1), [1, 2]), ((3, 2, 1), [3]), ((3, 2, 1), [3, 0]), ((3, 2, 0), [3, 1])):

        def pack(device: str, shape: Any = shape, lengths: Any = lengths) -> None:
            pack_padded_sequence(torch.randn(shape, device=device), lengths)

        assert message(pack, DEVICE) == message(pack, "cpu")


@pytest.mark.parametrize("gates", [4, 3, 1, 0])
@pytest.mark.parametrize("wrong", ["input", "batch", "hidden", "ih", "hh", "all"])
def test_cells_refuse_what_eager_refuses(gates: int, wrong: str) -> None:
    func = {4: torch.lstm_cell, 3: torch.gru_cell, 1: torch.rnn_tanh_cell, 0: torch.rnn_relu_cell}[gates]
    gates = gates or 1

    def call(device: str) -> None:
        batch = 3 if wrong in ("batch", "all") else 2
        h = shaped(device, batch, 6 if wrong == "hidden" else 5)
        w_ih = shaped(device, gates * 5 + (wrong in ("ih", "all")), 3 if wrong == "input" else 4)
        w_hh = shaped(device, gates * 5 + (wrong == "hh"), 5)
        func(shaped(device, 2, 4), [h, h] if gates == 4 else h, w_ih, w_hh)

    assert message(call, DEVICE) == message(call, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sequences_refuse_what_eager_refuses(dtype: torch.dtype) -> None:
    def gru(x: Any, hx: Any, params: Any, layers: int = 1, bidirectional: bool = False) -> None:
        torch.gru(x, hx, params, True, layers, 0.0, True, bidirectional, False)

    def lstm(x: Any, hx: Any, params: Any) -> None:
        torch.lstm(x, hx, params, True, 1, 0.0, True, False, False)

    calls: list[Callable[[str], None]] = [
        lambda d: gru(shaped(d, 2, 3, 4), shaped(d, 2, 3, 5), weights(d, 3)),
        lambda d: gru(shaped(d, 2, 3, 4), shaped(d, 1, 3, 5), weights(d, 3), 1, True),
        lambda d: gru(shaped(d, 2, 3, 4), shaped(d, 1, 3, 5), weights(d, 3)[:3]),
        lambda d: gru(shaped(d, 2, 3, 4), shaped(d, 1, 3, 5), weights(d, 3, 2)),
        lambda d: gru(shaped(d, 0, 3, 4), shaped(d, 1, 3, 5), weights(d, 3)),
        lambda d: gru(shaped(d, 2, 3, 4), shaped("meta", 1, 3, 5), weights(d, 3)),
        lambda d: gru(shaped(d, 2, 3, 4), shaped(d, 1, 3, 5), weights("meta", 3)),
        lambda d: lstm(shaped(d, 2, 3, 4), [shaped(d, 1, 3, 5)], weights(d, 4)),
        lambda d: lstm(shaped(d, 2, 3, 4), [shaped(d, 3, 5)] * 2, weights(d, 4)),
        lambda d: lstm(shaped(d, 2, 3, 4), [shaped(d, 1, 3, 5)] * 2, weights(d, 4)[:3]),
        lambda d: lstm(shaped(d, 0, 3, 4), [shaped(d, 1, 3, 5)] * 2, weights(d, 4)),
        lambda d: lstm(shaped(d, 2, 3, 4), [shaped("meta", 1, 3, 5)] * 2, weights(d, 4)),
    ]
    with set_default_dtype(dtype):
        for call in calls:
            assert message(call, DEVICE) == message(call, "cpu")


def test_a_training_loop() -> None:
    """Several steps, where the same graph comes again and compiled programs take over."""

    def run(device: str) -> Any:
        torch.manual_seed(2)
        embed, module, head = torch.nn.Embedding(11, 5), torch.nn.LSTM(5, 6, 2, dropout=0.2), torch.nn.Linear(6, 11)
        tokens = torch.randint(0, 11, (8, 4))
        model = torch.nn.ModuleList([embed, module, head]).to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        tokens = tokens.to(device)
        torch.manual_seed(3)
        losses = []
        for _ in range(4):
            predicted = head(module(embed(tokens))[0][:-1])
            loss = torch.nn.functional.cross_entropy(predicted.flatten(0, 1), tokens[1:].flatten())
            losses.append(train_step(optimizer, loss).item())
        return losses, [p.detach() for p in model.parameters()]

    on_both(run)


@pytest.mark.parametrize("lengths", [[1, 1, 1], [4, 4], [3], [4, 2]])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"proj_size": 2}, {"bias": False}])
def test_packed_sequences_of_one_length(lengths: list[int], options: dict[str, Any]) -> None:
    """Go to oneDNN as sequences that are not packed do, those of several lengths do not."""

    def run(device: str) -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        module = nn.LSTM(4, 5, **options)
        x = torch.randn(len(lengths), max(lengths), 4)
        module.to(device)
        packed = nn.utils.rnn.pack_padded_sequence(x.to(device).requires_grad_(), lengths, batch_first=True)
        output, (hidden, state) = module(packed)
        (output.data.sin().sum() + hidden.sum()).backward()
        return [output.data, hidden, state, *[parameter.grad for parameter in module.parameters()]]

    for found, expected in zip(run(DEVICE), run("cpu"), strict=True):
        assert_same(found, expected)
