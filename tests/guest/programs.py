"""Functions of tensors that PyTorch traces, compiles, exports or transforms."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F

from tests.guest.common import Small, data, use


def several(x: torch.Tensor) -> torch.Tensor:
    values, indices = torch.topk(x, 2)
    first, second = torch.chunk(x, 2)
    ordered = torch.sort(x)[0]
    return values.sum() + indices.sum() + (first * second).sum() + ordered[0].sum()


@use
def script() -> Any:
    scripted = torch.jit.script(several)
    return scripted(data(4, 4)), scripted.code


@use
def script_module() -> Any:
    return torch.jit.script(Small())(data(2, 4))


@use
def trace() -> Any:
    return torch.jit.trace(several, (data(4, 4),))(data(4, 4) + 1)


@use
def scripted_file() -> Any:
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(Small()), file)
    file.seek(0)
    return torch.jit.load(file)(data(2, 4))


@use
def export_strict() -> Any:
    return str(torch.export.export(Small(), (data(2, 4),), strict=True).graph)


@use
def export_not_strict() -> Any:
    program = torch.export.export(Small(), (data(2, 4),), strict=False)
    return str(program.graph), program.module()(data(2, 4))


@use
def fx() -> Any:
    traced = torch.fx.symbolic_trace(Small())
    return traced.code, traced(data(2, 4)), str(torch.fx.symbolic_trace(several).graph)


@use
def compile_eager() -> Any:
    compiled = torch.compile(Small(), backend="eager", fullgraph=True)
    return compiled(data(2, 4)), torch.compile(several, backend="eager")(data(4, 4))


@use
def compile_aot_eager() -> Any:
    model = Small()
    torch.compile(model, backend="aot_eager")(data(2, 4)).sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@use
def make_fx() -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx

    return str(make_fx(several)(data(4, 4)).graph), str(make_fx(several, tracing_mode="fake")(data(4, 4)).graph)


@use
def fake_tensors() -> Any:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        x = Small()(torch.empty(2, 4))
        return type(x).__name__, list(x.shape), str(x.device)


@use
def functorch() -> Any:
    model = Small()
    parameters = dict(model.named_parameters())

    def loss(given: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, given, (x,)).sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, data(3, 1, 4))
    forward = torch.func.jvp(torch.sin, (data(3),), (torch.ones(3),))
    q = data(2, 1, 3, 4)
    attention = torch.func.vmap(lambda x: F.scaled_dot_product_attention(x, x, x))(q[None].expand(2, -1, -1, -1, -1))
    return per_sample, forward, torch.func.hessian(lambda x: (x**3).sum())(data(2)), attention


@use
def attention_under_vmap() -> Any:
    q = torch.randn(2, 2, 3, 8, requires_grad=True)
    out = torch.func.vmap(lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True))(q)
    out.sum().backward()
    return out, q.grad


@use
def encoders_as_programs() -> Any:
    """Whose ``forward`` has another one around it where the device is used."""
    x, model = data(1, 2, 4), nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, batch_first=True), 1).eval()
    scripted = torch.jit.script(model)
    exported = torch.export.export(model, (x,), strict=True).module()
    return scripted(x), exported(x), torch.compile(model, backend="eager", fullgraph=True)(x)


@use
def compiled_optimizers() -> Any:
    """How many graphs and operations Dynamo finds in a step, and where it breaks."""
    found: list[Any] = []
    for name in ("SGD", "Adam", "Rprop", "RAdam", "ASGD", "NAdam"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        counter = CompileCounter()
        model = nn.Linear(2, 2)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        step = torch.compile(optimizer.step, backend=counter)
        step()
        step()
        breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
        found.append((name, counter.frame_count, counter.op_count, breaks, list(model.parameters())))
    return found
