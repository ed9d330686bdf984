"""Composite operators that run at once as a whole: what the CPU composes, in one operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import marid
from marid.ops.facts import named, overload_named
from tests.helpers import DEVICE, on_both

pytestmark = [
    pytest.mark.in_process("operations run at once in this process alone"),
    pytest.mark.usefixtures("at_once"),
]

F = nn.functional

CALLS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "attention": lambda x, y: F.scaled_dot_product_attention(x[None], y[None], x[None], is_causal=True),
    "attention with a mask": lambda x, y: F.scaled_dot_product_attention(x, y, x, attn_mask=x @ y.mT > 0),
    "einsum": lambda x, y: torch.einsum("bij,bkj->bik", x, y),
    "tensordot": lambda x, y: torch.tensordot(x, y.movedim(0, -1), dims=1),
    "quantile": lambda x, _: torch.quantile(x, 0.3, dim=1),
    "quantiles": lambda x, y: torch.nanquantile(x, y[0, 0].sigmoid(), dim=0),
    "corrcoef": lambda x, _: torch.corrcoef(x[0]),
    "diff": lambda x, _: torch.diff(x, n=2),
    "gradient": lambda x, _: torch.gradient(x, spacing=0.5),
    "vstack": lambda x, y: torch.vstack([x, y[:2]]),
    "dstack": lambda x, y: torch.dstack([x[0], y[0]]),
    "combinations": lambda x, _: torch.combinations(x[0, 0], 3),
    "take_along_dim": lambda x, y: torch.take_along_dim(x, y.argsort(1), 1),
    "avg_pool1d": lambda x, _: F.avg_pool1d(x, 2),
    "isfinite": lambda x, y: torch.isfinite(x / (y > 0)),
    "isclose": lambda x, y: torch.isclose(x, y, atol=0.5),
    "cross_entropy": lambda x, _: F.cross_entropy(
        x[0], torch.tensor([1, 0, 2, 3], device=x.device), label_smoothing=0.1
    ),
    "kl_div": lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
    "inv": lambda x, _: torch.linalg.inv(x),
    "solve": lambda x, y: torch.linalg.solve(x, y),
    "pinv": lambda x, _: torch.linalg.pinv(x),
    "cond": lambda x, _: torch.linalg.cond(x),
    "matrix_power": lambda x, _: torch.linalg.matrix_power(x, 5),
    "svd": lambda x, _: torch.linalg.svdvals(x),
    "slogdet": lambda x, _: torch.linalg.slogdet(x),
    "fft2": lambda x, _: torch.fft.fft2(x),
    "irfftn": lambda x, _: torch.fft.irfftn(x.to(torch.complex64)),
    "cdist": lambda x, y: torch.cdist(x, y),
    "cosine_similarity": lambda x, y: F.cosine_similarity(x, y, dim=-1),
    "repeat_interleave": lambda x, _: x.repeat_interleave(3, dim=1),
    "one_hot": lambda x, _: F.one_hot((x > 0).long()),
    "stft": lambda x, _: torch.stft(x.reshape(4, -1), 8, window=torch.ones(8, device=x.device), return_complex=True),
}


def _numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _ran(work: Callable[[], object]) -> int:
    """How many operations some work ran at once."""
    work()
    before = marid.stats().ops_immediate
    work()
    return marid.stats().ops_immediate - before


def test_every_operator_of_the_list_is_a_composite() -> None:
    """PyTorch has it, composes it on every device, and it writes nothing."""
    for name in named("whole"):
        func = overload_named(name)
        assert func is not None, name
        assert torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"), name
        assert not func._schema.is_mutable, name


@pytest.mark.parametrize("how", ["no_grad", "inference_mode", "recorded", "with gradients"])
@pytest.mark.parametrize("name", CALLS)
def test_equal_to_the_cpu(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "recorded":
        monkeypatch.setattr(marid.settings, "immediate_bytes", 0)
    contexts = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}

    def run(device: str) -> Any:
        x, y = _numbers(3, 4, 4).to(device), _numbers(3, 4, 4, seed=1).to(device)
        with contexts.get(how, torch.enable_grad)():
            x.requires_grad_(how == "with gradients")
            return CALLS[name](x, y)

    on_both(run)


def test_one_operation_in_place_of_many() -> None:
    x = _numbers(4, 4).to(DEVICE)
    assert _ran(lambda: torch.linalg.pinv(x)) == 1
    cell, rnn = nn.GRUCell(4, 8).to(DEVICE), nn.LSTM(4, 8, 2).to(DEVICE)
    with torch.no_grad():
        h = torch.zeros(4, 8, device=DEVICE)
        assert _ran(lambda: cell(x, h)) == 1
        whole = _ran(lambda: rnn(x[:, None]))
    assert whole < 6 < _ran(lambda: rnn(x[:, None]))
    assert _ran(lambda: cell(x, h)) > 6


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("bias", [False, True])
def test_layers(kind: Any, batch_first: bool, bias: bool) -> None:
    """Whatever rows ``linear`` folds where parameters require gradients, and whether states are given."""

    def run(device: str) -> Any:
        torch.manual_seed(0)
        rnn = kind(5, 6, 2, bias=bias, batch_first=batch_first, bidirectional=True, dropout=0.3).to(device).eval()
        results = []
        for shape in ((3, 4, 5), (1, 4, 5), (4, 1, 5), (4, 5)):
            x = _numbers(*shape).to(device)
            with torch.no_grad():
                output, state = rnn(x)
                results += [output, *rnn(x.transpose(0, -2), None)[:1]]
            with torch.inference_mode():
                results.append(rnn(x, state)[0])
        return results

    on_both(run)


@pytest.mark.parametrize("inside", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_packed_sequences(kind: Any, bidirectional: bool, inside: Any) -> None:
    """Sequences of several lengths and of one; the sizes of their batches are the host's."""

    def run(device: str) -> Any:
        torch.manual_seed(0)
        rnn = kind(5, 6, 2, batch_first=True, bidirectional=bidirectional).to(device)
        x, results = _numbers(4, 7, 5).to(device), []
        for lengths in ([7, 4, 4, 1], [3, 3, 3, 3]):
            packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor(lengths), batch_first=True)
            with inside():
                output, state = rnn(packed)
                results += [output.data, *(state if isinstance(state, tuple) else (state,))]
        return results

    on_both(run)
    x, rnn = _numbers(4, 7, 5).to(DEVICE), kind(5, 6, 2, batch_first=True, bidirectional=bidirectional).to(DEVICE)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([7, 4, 4, 1]), batch_first=True)
    with inside():
        assert _ran(lambda: rnn(packed)) < 5


FLAGGED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "einsum of rows with gaps": lambda x, y: torch.einsum("bij,kj->bik", x.transpose(0, 1), y),
    "tensordot of rows with gaps": lambda x, y: torch.tensordot(x.transpose(0, 1), y.t(), 1),
    "inner": lambda x, y: torch.inner(x.transpose(0, 1), y),
    "attention": lambda x, y: F.scaled_dot_product_attention(x, y.expand(5, 3, 4), x @ x.mT @ x),
    "attention with a mask": lambda x, y: F.scaled_dot_product_attention(x, x, x, attn_mask=x @ x.mT),
    "multi_dot": lambda x, y: torch.linalg.multi_dot([x[0], y.t(), x[1]]),
    "pinv": lambda x, _: torch.linalg.pinv(x),
    "cdist": lambda x, y: torch.cdist(x, y),
}


@pytest.mark.parametrize("inside", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", FLAGGED)
def test_composed_as_for_tensors_that_require_gradients(name: str, inside: Any) -> None:
    """What they are composed of, and so their last bits, may depend on that, though nobody differentiates."""

    def run(device: str) -> Any:
        x, y = (_numbers(*shape).to(device).requires_grad_() for shape in ((5, 3, 4), (3, 4)))
        with inside():
            return FLAGGED[name](x, y)

    on_both(run)


def test_results_in_the_memory_of_an_argument() -> None:
    """They are views to autograd, or the very argument."""

    def run(device: str) -> Any:
        x = _numbers(3, 4).to(device).requires_grad_()
        with torch.no_grad():
            turned, row = torch.einsum("ij->ji", x), x[0]
            turned.mul_(2)
            assert torch.cartesian_prod(row) is row
        return x, x._version, turned._is_view(), turned.requires_grad

    on_both(run)


def test_parameters_from_inference_mode() -> None:
    def run(device: str) -> Any:
        with torch.inference_mode():
            x = nn.Parameter(_numbers(2, 3, 4).to(device))
        with torch.no_grad():
            return F.scaled_dot_product_attention(x, x, x), torch.linalg.pinv(x)

    on_both(run)


def test_dropout_is_drawn_from_the_generator_of_the_device() -> None:
    def run(device: str) -> Any:
        x = _numbers(2, 4, 4).to(device)
        rnn = nn.GRU(4, 4, 2, dropout=0.5).to(device)
        torch.manual_seed(3)
        with torch.no_grad():
            return [F.scaled_dot_product_attention(x, x, x, dropout_p=0.5), rnn(x)[0], torch.rand(3, device=device)]

    on_both(run)


def test_a_mode_sees_what_it_is_composed_of() -> None:
    class Names(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(func.name())
            return func(*args, **(kwargs or {}))

    def run(device: str) -> list[str]:
        x = _numbers(4, 4).to(device)
        with Names() as mode:
            torch.linalg.inv(x)
        return mode.names

    assert run(DEVICE) == run("cpu")


def test_results_that_share_the_memory_of_arguments() -> None:
    def run(device: str) -> Any:
        x = torch.zeros(2, 3).to(device)
        for view in (torch.tile(x, (1, 1)), torch.kron(x, torch.ones(1, 1).to(device)), torch.diff(x, n=0)):
            view += 1
        return x

    on_both(run)


def test_autocast_and_derivatives_see_the_parts() -> None:
    def run(device: str) -> Any:
        x, y = _numbers(2, 4, 4).to(device), _numbers(2, 4, 4, seed=1).to(device)
        with torch.no_grad(), torch.autocast(device.partition(":")[0], dtype=torch.bfloat16):
            product = torch.einsum("bij,bkj->bik", x, y)
        tangent = torch.func.jvp(torch.linalg.inv, (x,), (y,))
        each = torch.vmap(torch.linalg.inv)(x)
        return [product, *tangent, each]

    on_both(run)


def test_errors_are_those_of_the_cpu() -> None:
    def run(device: str) -> str:
        with pytest.raises(RuntimeError) as error:
            torch.linalg.inv(torch.zeros(2, 2, device=device))
        return str(error.value)

    assert run(DEVICE) == run("cpu")
