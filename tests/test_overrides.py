"""What PyTorch does differently for tensor subclasses or foreign devices, and the device must not."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import marid
from tests.helpers import DEVICE, on_both, seeded, train_step

# --- modules without shapes yet --------------------------------------------------------------------------------------


def _lazy_model() -> nn.Module:
    return nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(2))


def _made_there() -> nn.Module:
    with torch.device(DEVICE):
        return _lazy_model()


@pytest.mark.parametrize("make", [_made_there, lambda: _lazy_model().to(DEVICE)], ids=["made", "moved"])
def test_uninitialised_modules_take_their_shapes_on_the_device(make: object) -> None:
    """Parameters keep their identity, so an optimizer built before holds the right ones."""
    assert callable(make)
    model = make()
    parameters = list(model.parameters())
    assert all(p.device.type == DEVICE for p in parameters)
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    model(torch.ones(2, 3, 6, 6, device=DEVICE)).square().sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    assert all(type(p) is type(model[0].weight) and p.device.type == DEVICE for p in parameters)
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert model[1].running_mean.device.type == DEVICE


def test_uninitialised_parameters_move_and_copy() -> None:
    """There and back, with a dtype, before any shape is known."""
    layer = nn.LazyLinear(3, device=DEVICE)
    twin = copy.deepcopy(layer)
    assert twin.weight.device.type == DEVICE
    assert layer.to(torch.float64).to("cpu")(torch.ones(2, 2, dtype=torch.float64)).device.type == "cpu"
    assert twin.to(torch.float64)(torch.ones(2, 2, dtype=torch.float64, device=DEVICE)).dtype is torch.float64


def test_state_dict_gives_uninitialised_modules_their_shapes() -> None:
    """As on the CPU."""
    source = nn.BatchNorm1d(5)
    source.running_mean.fill_(3)
    layer = nn.LazyBatchNorm1d(device=DEVICE)
    layer.load_state_dict(source.state_dict())
    assert layer.running_mean.tolist() == [3.0] * 5
    assert layer.weight.device.type == DEVICE


# --- attention -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attention_in_vmap(dropout: float) -> None:
    """Under vmap PyTorch chooses the kernel before the device's own code is asked."""

    def run(device: str) -> torch.Tensor:
        torch.manual_seed(1)
        q = torch.rand(3, 2, 4, 8, 16, generator=torch.Generator().manual_seed(0)).to(device)
        attend = torch.vmap(
            lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=dropout), randomness="different"
        )
        return attend(q)

    on_both(run)


def test_gradients_of_attention_by_functional_transforms() -> None:
    """Within vmap, and around it."""
    x = torch.rand(3, 2, 4, 8, generator=torch.Generator().manual_seed(0))

    def attend(x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x).sum()

    on_both(lambda device: torch.vmap(torch.func.grad(attend))(x.to(device)))
    on_both(lambda device: torch.func.grad(lambda x: torch.vmap(attend)(x).sum())(x.to(device)))


@pytest.mark.parametrize("query", [(1, 0, 3, 4), (0, 2, 3, 4), (1, 2, 0, 4), (1, 2, 3, 4), (1, 2, 3, 0)])
@pytest.mark.parametrize("length", [0, 5])
def test_attention_to_nothing(query: tuple[int, ...], length: int) -> None:
    """Eager PyTorch gives zeros before it chooses a kernel, some of which divide by the number of heads."""

    def run(device: str) -> Any:
        of = (*query[:2], length, query[-1])
        q, k, v = (torch.ones(shape, device=device, requires_grad=True) for shape in (query, of, of))
        out = F.scaled_dot_product_attention(q, k, v)
        return out, torch.autograd.grad(out.sum(), (q, k, v))

    on_both(run)


# --- padded encoders, CTC --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("mask", [[[0, 0, 0, 1], [0, 1, 1, 1]], [[1, 0, 0, 0], [0, 0, 0, 0]]], ids=["right", "left"])
def test_encoder_with_padding(mask: list[list[int]], norm: bool) -> None:
    """Eager PyTorch runs it on nested tensors where the padding is on the right, and blanks the padded positions."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8) if norm else None).eval()
    x, padding = torch.randn(2, 4, 8), torch.tensor(mask).bool()
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=padding)
        actual = encoder.to(DEVICE)(x.to(DEVICE), src_key_padding_mask=padding.to(DEVICE))
    torch.testing.assert_close(actual.cpu(), expected)


def test_ctc_loss_takes_lengths_from_the_cpu() -> None:
    """As on other accelerators."""
    scores = torch.rand(6, 2, 5, generator=torch.Generator().manual_seed(0)).log_softmax(-1)

    def run(device: str) -> list[torch.Tensor]:
        x = scores.to(device).requires_grad_()
        targets = torch.tensor([[1, 2], [1, 2]], device=device)
        loss = F.ctc_loss(x, targets, torch.tensor([6, 6]), torch.tensor([2, 1]))
        return [loss, *torch.autograd.grad(loss, x)]

    on_both(run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunked_linear_cross_entropy(dtype: torch.dtype) -> None:
    """Chunks and accumulation dtypes are those of the CPU."""
    if not hasattr(nn, "LinearCrossEntropyOptions"):
        pytest.skip("this PyTorch has no linear_cross_entropy")
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(16, 8, generator=generator).to(dtype), torch.randn(32, 8, generator=generator).to(dtype)

    def run(device: str) -> torch.Tensor:
        target = (torch.arange(16, device=device) * 3) % 32
        options = nn.LinearCrossEntropyOptions()
        return F.linear_cross_entropy(x.to(device), w.to(device), target, options=options)

    on_both(run)


# --- tracing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sizes", "mode"), [((5, 4), "bilinear"), ((5, 4, 6), "trilinear")])
def test_interpolation_under_deterministic_algorithms(sizes: tuple[int, ...], mode: str) -> None:
    """PyTorch has steps of its own for devices that are not the CPU, with another rounding."""
    given = torch.randn(2, 3, *sizes)

    def step(device: str) -> list[Any]:
        x = given.to(device).detach().requires_grad_()
        y = F.interpolate(x, scale_factor=1.7, mode=mode, align_corners=False)
        y.square().sum().backward()
        return [y, x.grad]

    torch.use_deterministic_algorithms(True)
    try:
        on_both(step)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("asked", [None, torch.preserve_format, torch.contiguous_format, torch.channels_last])
def test_resizing_as_another_one(layout: torch.memory_format, asked: torch.memory_format | None) -> None:
    template = torch.empty(2, 3, 4, 5).to(memory_format=layout)
    for before in ((0,), (2, 3, 4, 5)):
        resized = [
            torch.zeros(before, device=device).resize_as_(template.to(device), memory_format=asked)
            for device in ("cpu", DEVICE)
        ]
        assert resized[1].shape == resized[0].shape
        assert resized[1].stride() == resized[0].stride()


def test_make_fx_traces_what_it_closes_over() -> None:
    """PyTorch traces tensors of types that it knows."""
    from torch.fx.experimental.proxy_tensor import make_fx

    w = torch.full((3,), 2.0, device=DEVICE)
    traced = make_fx(lambda x: (w.sin() * x).sum())(torch.ones(3, device=DEVICE))
    x = torch.arange(3.0, device=DEVICE)
    assert torch.equal(traced(x).cpu(), (w.sin() * x).sum().cpu())


def test_linearize() -> None:
    """The linear function traced at one point."""

    def run(device: str) -> list[torch.Tensor]:
        value, linear = torch.func.linearize(lambda x: x.sin() * x, torch.linspace(0, 1, 3, device=device))
        return [value, linear(torch.ones(3, device=device)), linear(torch.arange(3.0, device=device))]

    on_both(run)


# --- averaged weights ------------------------------------------------------------------------------------------------


def test_averaged_weights() -> None:
    """Stochastic weight averaging, and moving averages: the formula of the CPU."""

    def run(device: str) -> Any:
        model = seeded(nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 1)), device)
        average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        averaged = [torch.optim.swa_utils.AveragedModel(model)]
        averaged.append(torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=average, use_buffers=True))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = [torch.rand(6, 4, device=device) for _ in range(6)]
        for x in batches:
            train_step(optimizer, model(x).square().mean())
            for one in averaged:
                one.update_parameters(model)
        torch.optim.swa_utils.update_bn(batches, averaged[0])
        return [[value.detach() for value in one.state_dict().values()] for one in averaged]

    on_both(run)


# --- products --------------------------------------------------------------------------------------------------------

_SHAPES = [(5,), (5, 5), (1, 5, 5), (5, 5, 5), (2, 1, 5, 5), (1, 5, 5, 5), (2, 5, 5, 5)]


@pytest.mark.parametrize("trains", [(False, False), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_matmul_takes_the_kernels_of_the_cpu(dtype: torch.dtype, trains: tuple[bool, bool]) -> None:
    """Values and gradients to the last bit, whatever is broadcast, folded or transposed."""

    def run(device: str) -> Any:
        found = []
        for shapes in itertools.product(_SHAPES, _SHAPES):
            for transposed in (False, True):
                tensors = [torch.randn(shape, dtype=dtype).to(device) for shape in shapes]
                if transposed:
                    tensors = [t.movedim(-1, 0).movedim(0, -1).mT if t.dim() > 1 else t for t in tensors]
                tensors = [t.detach().requires_grad_(trained) for t, trained in zip(tensors, trains, strict=True)]
                product = tensors[0] @ tensors[1]
                found.append(product.detach())
                if any(trains):
                    product.abs().sum().backward()
                    found += [t.grad for t in tensors if t.grad is not None]
                with torch.no_grad():
                    found.append(torch.matmul(*tensors, out=torch.empty(0, dtype=dtype, device=device)))
        return found

    on_both(run)


@pytest.mark.parametrize("shapes", [((2, 2), (2, 2)), ((2, 2), (2,)), ((3, 2, 2), (2, 2)), ((2,), (2,))], ids=str)
def test_matmul_takes_an_out_of_its_type_only(shapes: tuple[tuple[int, ...], ...]) -> None:
    types = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64)

    def run(device: str) -> Any:
        found: list[Any] = []
        for given, wanted in itertools.product(types, types):
            tensors = [torch.ones(shape, dtype=given, device=device) for shape in shapes]
            out = torch.empty(0, dtype=wanted, device=device)
            try:
                found.append(torch.matmul(*tensors, out=out))
            except RuntimeError:
                found.append(RuntimeError)
        return found

    on_both(run)


_INPUTS = [(4,), (3, 4), (2, 3, 4), (1, 1, 4), (2, 0, 4), (2, 2, 3, 4)]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_linear_takes_the_kernels_of_the_cpu(bias: bool, dtype: torch.dtype, mode: Any) -> None:
    """To the last bit and stride, whatever the layout, and whoever requires gradients."""

    def run(device: str) -> Any:
        found = []
        for shape, trained, layout in itertools.product(_INPUTS, (False, True), ("plain", "turned", "wide", "wt")):
            x, w, b = (torch.randn(s, dtype=dtype).to(device) for s in (shape, (5, 4), (5,)))
            if layout == "turned":
                x = x.movedim(-1, 0).contiguous().movedim(0, -1)
            elif layout == "wide":
                x = torch.cat((x, x), -1)[..., :4]
            elif layout == "wt":
                w = w.t().contiguous().t()
            w.requires_grad_(trained)
            with mode():
                found.append(F.linear(x, w, b if bias else None))
        return [y.detach() for y in found]

    if mode is torch.inference_mode:
        torch.manual_seed(0)
        expected = run("cpu")
        torch.manual_seed(0)
        for a, e in zip(run(DEVICE), expected, strict=True):
            assert a.stride() == e.stride()
            assert torch.equal(a.cpu(), e)
    else:
        on_both(run)


def test_linear_is_one_operation_where_nobody_differentiates_it() -> None:
    """And its steps where somebody does, forwards or backwards, or where a mode wants to see them."""
    x, w = torch.randn(2, 3, 4, device=DEVICE), torch.randn(5, 4, device=DEVICE)

    def operations(y: torch.Tensor) -> list[str]:
        names = [node.op.name for node in marid.graph(y).nodes if node.op is not None]
        return [name for name in names if name in ("aten::linear", "aten::mm")]

    assert operations(F.linear(x, w)) == ["aten::linear"]
    assert operations(F.linear(x.mT.contiguous().mT, w)) != ["aten::linear"]
    assert operations(F.linear(x.double(), w.double().requires_grad_())) == ["aten::mm"]
    with torch.no_grad():
        assert operations(F.linear(x, w.detach().requires_grad_())) == ["aten::linear"]
        with FlopCounterMode(display=False) as flops:
            F.linear(x, w)
    assert flops.get_total_flops() == 2 * 6 * 4 * 5
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        tangent = torch.autograd.forward_ad.unpack_dual(F.linear(dual, w)).tangent
    assert tangent is not None
    torch.testing.assert_close(tangent.cpu(), F.linear(torch.ones(2, 3, 4), w.cpu()), rtol=0, atol=0)


def test_linear_raises_what_the_cpu_raises() -> None:
    """At the line where it is written."""
    for shapes in [((2, 3), (5, 4)), ((2, 3, 4), (5, 3)), ((2, 4), (5, 4, 1))]:
        messages = []
        for device in ("cpu", DEVICE):
            x, w = (torch.randn(s).to(device) for s in shapes)
            with torch.no_grad(), pytest.raises(RuntimeError) as caught:
                F.linear(x, w)
            messages.append(str(caught.value))
        assert messages[0] == messages[1]
    with pytest.raises(RuntimeError, match="same device"):
        F.linear(torch.randn(2, 4, device=DEVICE), torch.randn(5, 4))


_OPTIMIZERS = [
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "maximize": True}),
    ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
    ("AdamW", {"lr": 0.01}),
    ("NAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("RAdam", {}),
    ("Adamax", {"weight_decay": 0.1, "maximize": True}),
    ("RMSprop", {"centered": True, "momentum": 0.9}),
    ("Rprop", {}),
    ("ASGD", {}),
    ("Adagrad", {"lr_decay": 0.1}),
    ("Adadelta", {"weight_decay": 0.1}),
    ("Adafactor", {}),
]


@pytest.mark.parametrize(("name", "options"), _OPTIMIZERS, ids=lambda value: value if isinstance(value, str) else "")
def test_optimizers_calculate_as_on_the_cpu(name: str, options: dict[str, Any]) -> None:
    """With whatever operators they choose for the device, over steps enough for a last bit to show."""

    def run(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(33, 65), torch.nn.Tanh(), torch.nn.Linear(65, 7)).to(device)
        optimizer = getattr(torch.optim, name)(model.parameters(), **options)
        x = torch.randn(16, 33).to(device)
        for _ in range(12):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    for mine, plain in zip(run(DEVICE), run("cpu"), strict=True):
        assert torch.equal(mine, plain)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("options", [(3,), (2, 1), (4, 3, 2), (3, 2, 1, 2), (2, 3, 0, 1, True)])
def test_max_pool1d_takes_the_kernels_of_the_cpu(options: tuple[Any, ...], mode: Any) -> None:
    """One lays out its result anew, the other, for gradients, as the input: whoever requires them."""

    def run(device: str) -> list[Any]:
        found = []
        for shape, trained in itertools.product([(2, 3, 8), (5, 8), (1, 8, 1), (2, 0, 8)], (False, True)):
            x = torch.randn(shape).to(device).mT.requires_grad_(trained)
            with mode():
                try:
                    y = F.max_pool1d(x, *options)
                    found.append((y.stride(), y.tolist()))
                except RuntimeError as error:
                    found.append(str(error))
        return found

    results = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        results.append(run(device))
    assert results[0] == results[1]


def test_max_pool1d_takes_the_kernels_of_the_cpu_in_a_compiled_function() -> None:
    compiled = marid.compile(lambda x: F.max_pool1d(x, 3, 2))
    for _ in range(3):
        x = torch.randn(2, 9, 6)
        expected, got = F.max_pool1d(x.mT, 3, 2), compiled(x.to(DEVICE).mT)
        assert got.stride() == expected.stride()
        assert torch.equal(got.cpu(), expected)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_linear_counts_strides_of_single_elements(bias: bool, trained: bool) -> None:
    """Which of two kernels the CPU takes is decided by them, and by what would require gradients."""
    tensors, found = [torch.randn(1, 7, 8), torch.randn(24, 8), torch.randn(24)], []
    for device in ("cpu", DEVICE):
        x, w, b = (t.to(device) for t in tensors)
        w.requires_grad_(trained)
        with torch.no_grad():
            found.append(F.linear(x.transpose(0, 1), w, b if bias else None))
    assert found[1].stride() == found[0].stride()
    assert torch.equal(found[1].cpu(), found[0])


def test_attention_without_gradients() -> None:
    """A batch of one, of which the CPU multiplies every row alone or all at once."""
    attention = torch.nn.MultiheadAttention(8, 2, bias=False, batch_first=True)
    there, x = copy.deepcopy(attention).to(DEVICE), torch.randn(1, 7, 8)
    with torch.no_grad():
        expected, found = (m(*[t] * 3, need_weights=False)[0] for m, t in ((attention, x), (there, x.to(DEVICE))))
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_in_one_operator_is_recorded(masked: bool) -> None:
    """Whether it returns weights depends on the kernel that the CPU takes; it does not run eagerly for that."""
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    there, x = copy.deepcopy(attention).to(DEVICE), torch.randn(2, 7, 8)
    mask = torch.ones(7, 7, dtype=torch.bool).triu(1) if masked else None
    marid.reset_stats()
    with torch.no_grad():
        expected, _ = attention(x, x, x, need_weights=False, attn_mask=mask)
        on = x.to(DEVICE)
        found, weights = there(on, on, on, need_weights=False, attn_mask=None if mask is None else mask.to(DEVICE))
    assert weights is None
    assert not marid.stats().fallbacks
    assert torch.equal(found.cpu(), expected)
