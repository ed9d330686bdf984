"""What Marid finds in graphs: patterns in their spellings, and families of models against what their modules say."""
# ruff: noqa: PLC3002 -- a lambda that is called names what its expression takes twice

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import marid
from marid.settings import settings
from tests.helpers import DEVICE


@pytest.fixture(autouse=True)
def _everything_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing runs before it is looked at."""
    for name, value in (("asynchronous", False), ("immediate_bytes", 0), ("max_pending_nodes", 100_000)):
        monkeypatch.setattr(settings, name, value)


def _some(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE)


def _weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, device=DEVICE))


def _found(*tensors: Tensor) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for region in marid.graph(*tensors).regions.find("pattern"):
        found.setdefault(region.name, []).append(region)
    return found


def _attention_of(tensor: Tensor) -> dict[str, Any]:
    """What the graph says of the only attention in it."""
    graph = marid.graph(tensor)
    (region,) = graph.regions.find("pattern", "attention")
    nodes = {node.id: node for node in graph.nodes}
    hints = [nodes[index].metadata.workload_hints for index in region.nodes]
    return next(hint["attention"] for hint in hints if "attention" in hint)


_Q, _K, _V = (2, 4, 6, 8), (2, 4, 6, 8), (2, 4, 6, 8)


def _masked(scores: Tensor) -> Tensor:
    return scores.masked_fill(torch.ones(6, 6, device=DEVICE).triu(1).bool(), -math.inf)


_SPELLINGS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "fused": F.scaled_dot_product_attention,
    "plain": lambda q, k, v: (q @ k.mT / math.sqrt(8)).softmax(-1) @ v,
    "scaled before": lambda q, k, v: torch.matmul(q * 0.3, k.transpose(-2, -1)).softmax(-1) @ v,
    "masked": lambda q, k, v: _masked(q @ k.mT * 0.3).softmax(-1) @ v,
    "added": lambda q, k, v: ((q @ k.mT) + torch.zeros(6, 6, device=DEVICE)).softmax(-1) @ v,
    "where": lambda q, k, v: torch.where(torch.ones(6, 6, device=DEVICE) > 0, q @ k.mT, -1e9).softmax(-1) @ v,
    "einsum": lambda q, k, v: torch.einsum("bhij,bhjd->bhid", torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1), v),
    "capped": lambda q, k, v: (torch.tanh(q @ k.mT / 50) * 50).softmax(-1) @ v,
    "dropped": lambda q, k, v: F.dropout((q @ k.mT).softmax(-1), 0.1, True) @ v,
    "in halves": lambda q, k, v: ((q.half() @ k.half().mT).float().softmax(-1).half() @ v.half()).float(),
    "softmax by hand": lambda q, k, v: _softmax(q @ k.mT) @ v,
    "to itself": lambda q, _k, _v: (q @ q.mT).softmax(-1) @ q,
    "keys are values": lambda q, k, _v: (q @ k.mT).softmax(-1) @ k,
    "grouped": lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True),
}


def _softmax(x: Tensor) -> Tensor:
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


@pytest.mark.parametrize("spelling", _SPELLINGS)
def test_attention_in_its_spellings(spelling: str) -> None:
    """One is found in each, and nothing else is taken for one."""
    found = _found(_SPELLINGS[spelling](_some(*_Q), _some(*_K), _some(*_V)))
    assert len(found["attention"]) == 1
    assert "mamba" not in found


@pytest.mark.parametrize("work", ["softmax alone", "product of products", "softmax of a linear layer"])
def test_what_is_not_attention(work: str) -> None:
    q, k, v = _some(*_Q), _some(*_K), _some(*_V)
    made = {
        "softmax alone": lambda: q.softmax(-1) * v,
        "product of products": lambda: (q @ k.mT).relu() @ v,
        "softmax of a linear layer": lambda: F.linear(q, _weight(8, 8)).softmax(-1),
    }[work]()
    assert "attention" not in _found(made)


def test_what_is_said_of_attention() -> None:
    """Heads, lengths and masks, however they were written."""
    q, k, v = _some(2, 4, 6, 8), _some(2, 2, 6, 8), _some(2, 2, 6, 8)
    grouped = _SPELLINGS["plain"](q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
    assert _attention_of(grouped)["queries"] == 6
    causal = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert _attention_of(causal) == {
        "keys": 6, "queries": 6, "heads": 4, "causal": True, "sliding window": False, "bias": False,
    }  # fmt: skip
    rows, columns = torch.arange(6, device=DEVICE)[:, None], torch.arange(6, device=DEVICE)
    window = (columns <= rows) & (columns > rows - 3)
    assert _attention_of(F.scaled_dot_product_attention(q, q, q, window))["sliding window"]
    biased = F.scaled_dot_product_attention(q, q, q, _some(4, 6, 6))
    assert _attention_of(biased)["bias"]
    assert not _attention_of(biased)["causal"]


_X = (2, 4, 8)
_OTHERS: dict[str, tuple[str, Callable[[], Tensor]]] = {
    "gated": ("gated mlp", lambda: (lambda x: F.linear(F.silu(F.linear(x, _W)) * F.linear(x, _W2), _W3))(_x())),
    "gated the other way": (
        "gated mlp",
        lambda: (lambda x: F.linear(x @ _W2.t() * F.gelu(x @ _W.t(), approximate="tanh"), _W3))(_x()),
    ),
    "gated in one": (
        "gated mlp",
        lambda: (lambda two: F.linear(F.silu(two[0]) * two[1], _W3))(F.linear(_x(), _WIDE).chunk(2, -1)),
    ),
    "gated by halves": (
        "gated mlp",
        lambda: (lambda y: F.linear(y[..., :8].sigmoid() * y[..., :8] * y[..., 8:], _W3))(F.linear(_x(), _WIDE)),
    ),
    "glu": ("gated mlp", lambda: F.linear(F.glu(F.linear(_x(), _WIDE)), _W3)),
    "plain": ("mlp", lambda: F.linear(F.relu(F.linear(_x(), _W)), _W2)),
    "gelu by hand": ("mlp", lambda: F.linear(_gelu(F.linear(_x(), _W)), _W2)),
    "gelu by erf": ("mlp", lambda: F.linear((lambda y: y * 0.5 * (1 + (y / 1.4).erf()))(_x() @ _W), _W2)),
    "squared relu": ("mlp", lambda: F.linear(F.relu(_x() @ _W).square(), _W2)),
    "layer norm by hand": ("norm", lambda: _layer_norm(_x()) * _SCALE + _SCALE),
    "layer norm by moments": ("norm", lambda: (lambda x: (x - _m(x)) / (_m(x * x) - _m(x) ** 2 + 1e-5).sqrt())(_x())),
    "layer norm by std": ("norm", lambda: (lambda x: _SCALE * (x - _m(x)) / (x.std(-1, keepdim=True) + 1e-6))(_x())),
    "layer norm": ("norm", lambda: F.layer_norm(_x(), (8,), _SCALE)),
    "rms norm": ("norm", lambda: (lambda x: x * torch.rsqrt(_m(x.pow(2)) + 1e-6) * (1 + _SCALE))(_x())),
    "rms norm in halves": ("norm", lambda: (lambda x: (x * torch.rsqrt(_m(x.float() ** 2))).half())(_x().half())),
    "rms norm of PyTorch": ("norm", lambda: F.rms_norm(_x(), (8,), _SCALE)),
    "group norm by hand": ("norm", lambda: _layer_norm(_x().view(2, 2, 16)).view(2, 4, 8)),
    "group norm": ("norm", lambda: F.group_norm(_some(2, 4, 8), 2)),
    "batch norm": ("norm", lambda: F.batch_norm(_some(2, 4, 8), None, None, training=True)),
    "convolution": ("convolution", lambda: F.relu(F.batch_norm(_conv(), None, None, training=True))),
    "residual": ("residual", lambda: (lambda x: x + F.relu(F.linear(x, _W)))(_x())),
    "cross entropy": ("cross entropy", lambda: F.cross_entropy(_some(4, 8), torch.arange(4, device=DEVICE))),
    "cross entropy by hand": (
        "cross entropy",
        lambda: -_some(4, 8).log_softmax(-1).gather(1, torch.arange(4, device=DEVICE)[:, None]).mean(),
    ),
    "embedding": ("embedding", lambda: F.embedding(torch.arange(4, device=DEVICE), _W)),
    "lstm by hand": ("recurrent cell", lambda: _lstm(_some(2, 16), _some(2, 4))),
    "gru by hand": ("recurrent cell", lambda: _gru(*[_some(2, 4) for _ in range(5)])),
    "rnn by hand": ("recurrent cell", lambda: torch.tanh(F.linear(_x(), _W) + F.linear(_some(*_X), _W2))),
    "low rank": ("lora", lambda: (lambda x: F.linear(x, _W) + F.linear(F.linear(x, _WIDE), _W_BACK) * 0.5)(_x())),
    "router": ("mixture of experts", lambda: F.linear(_x(), _W).softmax(-1).topk(2)[0]),
    "late router": ("mixture of experts", lambda: F.linear(_x(), _W).topk(2)[0].softmax(-1)),
    "sampling": ("sampling", lambda: torch.multinomial(_some(2, 8).softmax(-1), 1)),
    "rwkv": ("rwkv", lambda: _rwkv(*[_some(2, 4) for _ in range(6)])),
    "mamba": ("mamba", lambda: _scan()),
}
_W, _W2, _W3, _WIDE, _W_BACK, _SCALE = (torch.empty(0) for _ in range(6))


@pytest.fixture(scope="module", autouse=True)
def _weights() -> None:
    shapes = {"_W": (8, 8), "_W2": (8, 8), "_W3": (8, 8), "_WIDE": (16, 8), "_W_BACK": (8, 16), "_SCALE": (8,)}
    made = {name: _weight(*shape) for name, shape in shapes.items()}
    marid.materialize(*made.values())
    globals().update(made)


def _x() -> Tensor:
    return _some(*_X)


def _m(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


def _layer_norm(x: Tensor) -> Tensor:
    return (x - _m(x)) / torch.sqrt(((x - _m(x)) ** 2).mean(-1, keepdim=True) + 1e-5)


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.044715 * x.pow(3))))


def _conv() -> Tensor:
    return F.conv2d(_some(2, 3, 8, 8), _weight(4, 3, 3, 3))


def _lstm(gates: Tensor, cell: Tensor) -> Tensor:
    i, f, g, o = gates.chunk(4, -1)
    return o.sigmoid() * torch.tanh(cell * f.sigmoid() + g.tanh() * i.sigmoid())


def _gru(r: Tensor, z: Tensor, new: Tensor, hidden: Tensor, state: Tensor) -> Tensor:
    n = (new + r.sigmoid() * hidden).tanh()
    return z.sigmoid() * state + (1 - z.sigmoid()) * n


def _rwkv(top: Tensor, other: Tensor, high: Tensor, num: Tensor, value: Tensor, den: Tensor) -> Tensor:
    past, now = (top - high).exp(), (other - high).exp()
    return (past * num + now * value) / (past * den + now)


def _scan() -> Tensor:
    decay, fed, c = _some(2, 3, 4, 5).exp(), _some(2, 3, 4, 5), _some(2, 3, 5)
    state, made = torch.zeros(2, 4, 5, device=DEVICE), []
    for step in range(3):
        state = decay[:, step] * state + fed[:, step]
        made.append((state @ c[:, step].unsqueeze(-1))[..., 0])
    return torch.stack(made)


@pytest.mark.parametrize("case", _OTHERS)
def test_patterns_in_their_spellings(case: str) -> None:
    name, work = _OTHERS[case]
    assert name in _found(work())


def test_optimizers_clipping_and_averages() -> None:
    """Steps are named by their optimizer; what comes between backward and step, and after it, is found too."""
    model = nn.Linear(4, 4).to(DEVICE)
    average = [parameter.detach().clone() for parameter in model.parameters()]
    marid.materialize(*average, *model.parameters())
    optimizer = torch.optim.RMSprop(model.parameters())
    model(_some(2, 4)).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    with torch.no_grad():
        for mean, parameter in zip(average, model.parameters(), strict=True):
            mean.lerp_(parameter, 0.01)
    found = _found(*average, *model.parameters())
    assert [region.type for region in found["optimizer step"]] == ["RMSprop"]
    assert len(found["gradient clipping"]) == 1
    assert len(found["moving average"]) == 2


def test_an_adam_written_by_hand_is_found() -> None:
    p, g, m, v = (_some(4) for _ in range(4))
    m.mul_(0.9).add_(g, alpha=0.1)
    m.lerp_(g, 0.1)
    v.mul_(0.99).addcmul_(g, g, value=0.01)
    p.addcdiv_(m, v.sqrt() + 1e-8, value=-0.1)
    assert [region.type for region in _found(p)["optimizer step"]] == ["Adam"]


def test_patterns_of_users() -> None:
    """A function in plain PyTorch, found in other spellings and named on its nodes; taken out again."""

    def swish(x: Tensor, w: Tensor) -> Tensor:
        return torch.sin(F.linear(x, w)) * torch.cos(x)

    marid.register_pattern("waves", swish, [torch.ones(2, 3), nn.Parameter(torch.ones(3, 3))])
    try:
        with pytest.raises(ValueError, match="waves"):
            marid.register_pattern("waves", swish, [])
        x = _some(5, 8)
        graph = marid.graph(x.cos().contiguous() * torch.sin(x @ _W + 1).view(5, 8))
        assert len(graph.regions.find("pattern", "waves")) == 1
        assert {"waves"} == {
            node.metadata.pattern for node in graph.nodes if node.operation in ("aten::sin", "aten::cos")
        }
    finally:
        marid.unregister_pattern("waves")
    assert not marid.graph(_some(2).sin()).regions.find("pattern")
    with pytest.raises(ValueError, match="nothing is left"):
        marid.register_pattern("nothing", lambda x: x.view(-1), [torch.ones(2, 2)])


# --- families of models ----------------------------------------------------------------------------------------------

_QUICK = ["gpt2", "llama", "bert", "t5", "phi3", "bloom"]
_LEAST = 0.95


def _check(names: list[str]) -> None:
    pytest.importorskip("transformers")
    from tests.families import FAMILIES, KINDS, Score, compared

    totals = {kind: Score() for kind in KINDS}
    for name in names:
        for train in (False, True):
            scores, _ = compared(FAMILIES[name], train)
            for kind, score in scores.items():
                total = totals[kind]
                total.there, total.found = total.there + score.there, total.found + score.found
                total.right += score.right
                total.wrong += [f"{name}{' training' if train else ''}: {wrong}" for wrong in score.wrong]
    rows = [f"{kind:15}{t.there:6}{t.found:6}{t.precision:8.3f}{t.recall:8.3f}" for kind, t in totals.items()]
    print("\n".join([f"{'':15}{'there':>6}{'found':>6}{'precise':>8}{'recall':>8}", *rows]))
    for kind, total in totals.items():
        assert total.there > 0, kind
        assert min(total.precision, total.recall) >= _LEAST, (kind, total.wrong)


def test_what_is_found_in_models_is_what_their_modules_say() -> None:
    """Forward and training step of six families."""
    _check(_QUICK)


@pytest.mark.conformance
def test_what_is_found_in_all_families_is_what_their_modules_say() -> None:
    from tests.families import FAMILIES

    assert len(FAMILIES) >= 25
    _check(list(FAMILIES))
