"""What a graph says of its nodes: metadata, regions, modules of backwards, phases, roles and costs."""

from __future__ import annotations

import bisect
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import marid
from marid.semantics import roofline
from marid.settings import settings
from tests.backward_modules import backward_of
from tests.helpers import DEVICE


@pytest.fixture(autouse=True)
def _everything_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing runs before it is looked at."""
    for name, value in (("asynchronous", False), ("immediate_bytes", 0), ("max_pending_nodes", 100_000)):
        monkeypatch.setattr(settings, name, value)


class Attention(nn.Module):
    """Causal, with a cache that grows if it is given one."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, cache: list[torch.Tensor] | None = None) -> torch.Tensor:
        q, k, v = (
            part.view(*x.shape[:2], self.heads, -1).transpose(1, 2) for part in self.qkv(x).split(x.shape[-1], -1)
        )
        if cache is not None:
            k, v = (torch.cat([old, new], -2) for old, new in zip(cache, (k, v), strict=True))
            cache[:] = [k, v]
        made = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[-2] > 1)
        return self.out(made.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(16), Attention()
        self.norm2, self.mlp = nn.LayerNorm(16), nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: torch.Tensor, cache: list[torch.Tensor] | None = None) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), cache)
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(29, 16), nn.ModuleList(Block() for _ in range(2))
        self.head, self.again = nn.Linear(16, 29), again

    def forward(self, ids: torch.Tensor, caches: list[list[torch.Tensor]] | None = None) -> torch.Tensor:
        x = self.embed(ids)
        for index, block in enumerate(self.blocks):
            if self.again:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x, caches[index] if caches is not None else None)
        return self.head(x)


def _model(again: bool = False) -> tuple[Model, torch.Tensor]:
    torch.manual_seed(0)
    model, ids = Model(again).to(DEVICE), torch.randint(0, 29, (2, 6)).to(DEVICE)
    marid.materialize(*model.parameters(), ids)
    return model, ids


def _loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def _step() -> tuple[Model, marid.ComputationGraph]:
    model, ids = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    _loss(model, ids).backward()
    optimizer.step()
    return model, marid.graph(*model.parameters())


# --- nodes and regions -----------------------------------------------------------------------------------------------


def test_nodes_have_ids_operations_inputs_and_one_metadata_object() -> None:
    model, ids = _model()
    graph = marid.graph(model(ids))
    assert [node.id for node in graph.nodes] == sorted(node.id for node in graph.nodes)
    node = graph.nodes[-1]
    assert node.metadata is graph.nodes[-1].metadata
    assert node.operation == node.metadata.operation_type
    (product,) = [node for node in graph.nodes if node.metadata.pattern == "head" and node.metadata.flops > 1000]
    assert product.inputs[1].metadata.module_path == "blocks.1"
    assert product.metadata.written_as == "nn.Linear"
    assert product.metadata.modules == (("", "Model"), ("head", "Linear"))
    assert product.metadata.workload_hints["mode"] == "evaluation"


def test_what_stands_in_the_source_is_named() -> None:
    x = torch.ones(2, 2, device=DEVICE)
    y = torch.matmul(x, x)
    z = (y
         @ x)  # fmt: skip
    z += x
    w = z.softmax(-1)[0]
    written = {node.operation: node.metadata.written_as for node in marid.graph(w).nodes}
    assert written["aten::mm"] in ("torch.matmul", "@")
    assert {node.metadata.written_as for node in marid.graph(w).nodes if node.operation == "aten::mm"} == {
        "torch.matmul", "@",
    }  # fmt: skip
    assert written["aten::add_"] == "+="
    assert written["aten::_softmax"] == "z.softmax"
    assert x.metadata.written_as == "torch.ones"  # type: ignore[attr-defined]


def test_regions_are_a_tree_of_phases_modules_and_patterns() -> None:
    """Every operation is in one phase; a module's region has those of the modules in it, and its patterns."""
    _, graph = _step()
    root = graph.regions
    assert [region.name for region in root.children] == ["forward", "backward", "optimizer"]
    assert sum(len(region.nodes) for region in root.children) == len(graph.operations) == len(root.nodes)
    (attention,) = root.children[0].find("module", "blocks.0.attention")
    assert attention.type == "Attention"
    assert {region.name for region in attention.find("module")} >= {"blocks.0.attention.qkv", "blocks.0.attention.out"}
    assert [region.name for region in attention.find("pattern")] == ["attention"]
    (mlp,) = root.children[0].find("module", "blocks.0.mlp")
    assert [region.name for region in mlp.children if region.kind == "pattern"] == ["mlp"]
    assert [region.type for region in root.find("pattern", "optimizer step")] == ["AdamW"]
    for region in root.walk():
        assert region.kind == "pattern" or all(
            set(child.nodes) <= set(region.nodes) or child.kind == "pattern" for child in region.children
        )


def test_fx_nodes_carry_the_same() -> None:
    """The stack of modules also on operations of the backward."""
    _, graph = _step()
    nodes = [node for node in graph.to_fx().graph.nodes if "marid" in node.meta]
    backward = [n for n in nodes if n.meta["marid"].execution_phase == "backward" and n.meta["marid"].module_path]
    assert any("blocks.0.attention" in node.meta["nn_module_stack"] for node in backward)
    shown = {id(node.metadata) for node in graph.nodes}
    assert {id(node.meta["marid"]) for node in nodes} <= shown


def test_programs_can_be_looked_at_after_they_ran() -> None:
    """With modules, patterns, phases and costs; roles are told by use."""
    marid.reset_stats()
    model, ids = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = _loss(model, ids)
    loss.backward()
    optimizer.step()
    marid.materialize(loss.detach(), *model.parameters())
    graph = max(marid.programs(), key=len)
    assert len(graph.regions.find("pattern", "attention")) >= 2
    assert {region.name for region in graph.regions.children} >= {"forward", "backward", "optimizer"}
    assert graph.costs("phase")["backward"].flops > graph.costs("phase")["forward"].flops
    assert "parameter" in {node.metadata.role for node in graph.nodes}


# --- backwards -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", [False, True], ids=["kept", "checkpointed"])
def test_operations_of_a_backward_have_the_module_of_their_forward(again: bool) -> None:
    """That of which autograd says that it made the node that ran them."""
    model, ids = _model(again)
    truth = backward_of(model, lambda: _loss(model, ids))
    spans = sorted(truth)
    graph = marid.graph(*[p.grad for p in model.parameters()])
    right, wrong = 0, []
    for node in graph.nodes:
        place = bisect.bisect_right(spans, (node.id, 1 << 60)) - 1
        if node.scope is None or node.scope.phase != "backward" or node.scope.module_path is not None:
            continue
        if place < 0 or not spans[place][0] < node.id < spans[place][1]:
            continue
        if node.metadata.module_path == truth[spans[place]]:
            right += 1
        else:
            wrong.append((node, truth[spans[place]], node.metadata.module_path))
    assert right > 50
    assert len(wrong) <= 0.05 * right, wrong


def test_two_backwards_in_one_graph_are_told_apart() -> None:
    first, second = nn.Linear(3, 3).to(DEVICE), nn.Sequential(nn.Linear(3, 3), nn.Tanh()).to(DEVICE)
    x = torch.ones(2, 3, device=DEVICE)
    for model in (first, second):
        model(x).square().sum().backward()
    graph = marid.graph(first.weight.grad, second[0].weight.grad)
    paths = [node.metadata.module_path for node in graph.nodes if node.operation == "aten::mm"]
    assert paths == ["", "0"]


# --- phases and roles ------------------------------------------------------------------------------------------------


def _generated(prompt: bool) -> tuple[marid.ComputationGraph, list[list[torch.Tensor]]]:
    model, ids = _model()
    caches = [[torch.zeros(2, 4, length, 4, device=DEVICE) for _ in range(2)] for length in (5 * (not prompt),) * 2]
    marid.materialize(*[tensor for pair in caches for tensor in pair])
    with torch.no_grad():
        made = model(ids if prompt else ids[:, :1], caches)
    return marid.graph(made, *[tensor for pair in caches for tensor in pair]), caches


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_phases_of_generation(phase: str) -> None:
    """Told by caches and the length of queries; caches that grow by ``cat`` have their role."""
    graph, _ = _generated(phase == "prefill")
    assert {node.metadata.execution_phase for node in graph.nodes if node.metadata.module_path is not None} == {phase}
    grown = [node for node in graph.nodes if node.operation == "aten::cat"]
    assert len(grown) == 4
    assert {node.metadata.role for node in grown} == {"kv cache"}
    assert len(graph.regions.find("pattern", "kv cache")) == 4


def test_a_static_cache_is_one() -> None:
    """Written by index, before attention reads it."""

    class Static(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, cache: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            cache.index_copy_(1, at, x)
            return F.scaled_dot_product_attention(self.q(x)[:, None], cache[:, None], cache[:, None])

    model, cache = Static().to(DEVICE), torch.zeros(2, 9, 8, device=DEVICE)
    marid.materialize(cache, *model.parameters())
    with torch.no_grad():
        made = model(torch.ones(2, 1, 8, device=DEVICE), cache, torch.tensor([3], device=DEVICE))
    graph = marid.graph(made)
    assert [region.type for region in graph.regions.find("pattern", "kv cache")] == ["static"]
    sources = {source.seq for source in graph.sources}
    assert [node.metadata.role for node in graph.nodes if node.id in sources].count("kv cache") == 1
    assert {node.metadata.execution_phase for node in graph.nodes if node.metadata.module_path is not None} == {
        "decode"
    }


def test_a_users_phase_stays() -> None:
    graph = None
    with marid.phase("warm up"):
        graph, _ = _generated(True)
    inside = [node for node in graph.nodes if node.op is not None and node.scope.module_path]
    assert {node.metadata.execution_phase for node in inside} == {"warm up"}
    assert "warm up" in graph.costs("phase")


def test_roles_of_a_training_step() -> None:
    model, ids = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    loss = _loss(model, ids)
    loss.backward()
    optimizer.step()
    graph = marid.graph(loss.detach(), *model.parameters())
    roles = {node.id: node.metadata.role for node in graph.nodes}

    def role(tensor: Any) -> str | None:
        return roles[tensor._value.node.seq]

    assert {role(p) for p in model.parameters()} == {"parameter"}
    assert {role(p.grad) for p in model.parameters()} == {"gradient"}
    assert {role(state["exp_avg"]) for state in optimizer.state.values()} == {"optimizer state"}
    assert role(ids) == "input"
    assert role(loss) == "output"
    attention = next(node for node in graph.nodes if node.metadata.pattern == "attention")
    assert attention.metadata.role == "activation"
    assert attention.metadata.workload_hints["mode"] == "training"


def test_statistics_of_norms_are_buffers() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(DEVICE)
    marid.materialize(*model.parameters(), *model.buffers())
    graph = marid.graph(model(torch.ones(2, 3, 5, 5, device=DEVICE)))
    held = {t._value.node.seq for t in model.buffers()}  # type: ignore[attr-defined]
    assert {node.metadata.role for node in graph.nodes if node.id in held} == {"buffer"}


def test_marks_decide() -> None:
    """In the graph, and on the tensor."""
    x = marid.mark(torch.ones(2, device=DEVICE), role="table")
    assert x.metadata.role == "table"  # type: ignore[attr-defined]
    assert marid.graph(x * 2).nodes[0].metadata.role == "table"


def test_enrichers_add_knowledge() -> None:
    def lookup(node: Any, metadata: marid.SemanticMetadata) -> dict[str, Any] | None:
        return {"role": "wave", "frequency": 2} if metadata.operation_type == "aten::sin" else None

    def other(node: Any, metadata: marid.SemanticMetadata) -> None: ...

    other.__name__ = "lookup"
    marid.register_enricher(lookup)
    try:
        made = marid.graph(torch.ones(2, device=DEVICE).sin()).nodes[-1].metadata
        with pytest.raises(ValueError, match="lookup"):
            marid.register_enricher(other)
    finally:
        marid.unregister_enricher("lookup")
    assert made.role == "wave"
    assert made.workload_hints["frequency"] == 2


# --- costs -----------------------------------------------------------------------------------------------------------


def test_flops_are_those_of_pytorchs_counter() -> None:
    """Of products, forward and backward; everything else counts elements."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    with FlopCounterMode(display=False) as counter:
        model(torch.ones(5, 8)).sum().backward()
    model = model.to(DEVICE)
    model.zero_grad()
    model(torch.ones(5, 8, device=DEVICE)).sum().backward()
    graph = marid.graph(*[p.grad for p in model.parameters()])
    products = ("aten::mm", "aten::addmm", "aten::linear")
    assert sum(n.metadata.flops for n in graph.nodes if n.operation in products) == counter.get_total_flops()


def test_bytes_count_memory_once() -> None:
    x = torch.ones(4, 8, device=DEVICE)
    marid.materialize(x)
    graph = marid.graph(x[:1].expand(100, 8) + x[0])
    add = graph.nodes[-1].metadata
    assert add.bytes == 8 * 4 + 8 * 4 + 100 * 8 * 4
    assert add.flops == 800
    assert all(node.metadata.bytes == 0 for node in graph.nodes[:-1])


def test_costs_by_module_phase_and_pattern() -> None:
    """A module has those of the modules in it; phases add up to the whole."""
    _, graph = _step()
    modules, phases = graph.costs("module"), graph.costs("phase")
    inner = [cost.flops for path, cost in modules.items() if path.startswith("blocks.0.attention.")]
    assert modules["blocks.0.attention"].flops > sum(inner) > 0
    total = sum(cost.flops for cost in phases.values())
    assert total == sum(node.metadata.flops for node in graph.nodes)
    assert graph.costs("pattern")["attention"].intensity > 0
    assert all(cost.predicted > 0 for cost in phases.values())
    measured = graph.costs("phase", {node.id: 1.0 for node in graph.nodes})
    assert measured["forward"].measured == len(graph.regions.children[0].nodes)
    with pytest.raises(ValueError, match="moon"):
        graph.costs("moon")


def test_the_machine_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And kept in the cache's folder; a file that is damaged is measured anew."""
    monkeypatch.setattr(settings, "cache_dir", tmp_path)
    monkeypatch.setattr(roofline, "_known", {})
    found = roofline.machine()
    (file,) = tmp_path.glob("machine-*.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), "bandwidth": 123.0}))
    monkeypatch.setattr(roofline, "_known", {})
    assert roofline.machine().bandwidth == 123.0
    file.write_text("{")
    monkeypatch.setattr(roofline, "_known", {})
    assert roofline.machine().bandwidth != 123.0
    assert found.ridge > 0
    assert found.seconds(0, 0, torch.float32) == 0.0


# --- what it must not do ---------------------------------------------------------------------------------------------


def test_hints_change_no_value_and_nothing_runs() -> None:
    model, ids = _model()
    ran = marid.stats().ops_executed
    with torch.no_grad():
        made = model(ids)
        graph = marid.graph(made)
        assert graph.regions.nodes
        assert len([node.metadata for node in graph.nodes]) == len(graph)
        assert marid.stats().ops_executed == ran
        assert torch.equal(made.cpu(), Model.forward(model.cpu(), ids.cpu()))


def test_nothing_is_worked_out_before_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that only counts its nodes has no analysis; recording and running make none."""
    model, ids = _model()
    loss = _loss(model, ids)
    graph = marid.graph(loss)
    assert len(graph) > 10
    assert not {"scopes", "matches", "roles"} & vars(graph._meaning).keys()  # pyright: ignore[reportPrivateUsage]
    started = time.perf_counter()
    assert graph.regions.children
    assert time.perf_counter() - started < 30
    assert {"scopes", "matches"} <= vars(graph._meaning).keys()  # pyright: ignore[reportPrivateUsage]
