"""``marid.graph``: looking at what is recorded; ``marid.stats`` and ``marid.no_sync``."""

from __future__ import annotations

import inspect
import threading

import networkx
import pytest
import torch
from torch import nn

import marid
from marid.errors import SyncForbiddenError
from tests.helpers import DEVICE, assert_same


def _names(graph: marid.ComputationGraph) -> list[str]:
    return [node.op.name for node in graph.operations if node.op is not None]


def test_graph_holds_what_the_tensor_needs() -> None:
    """And nothing else that is pending."""
    x = torch.ones(2, device=DEVICE)
    y = x * 2
    other = x + 100
    assert _names(marid.graph(y)) == ["aten::ones", "aten::mul"]
    assert _names(marid.graph(y, other)) == ["aten::ones", "aten::mul", "aten::add"]
    assert marid.stats().ops_executed == 0


@pytest.mark.usefixtures("nothing_alive")
def test_graph_of_nothing_is_everything_pending() -> None:
    """On all devices."""
    before = len(marid.graph())
    held = [torch.ones(2, device=DEVICE), torch.zeros(2, device=f"{DEVICE}:1")]
    assert _names(marid.graph())[-2:] == ["aten::ones", "aten::zeros"]
    assert len(marid.graph()) == before + 2
    held.clear()
    assert len(marid.graph()) == before


def test_graph_refuses_other_tensors() -> None:
    """Naming the type that it got."""
    with pytest.raises(TypeError, match="Tensor"):
        marid.graph(torch.ones(1))


def test_edges_follow_values() -> None:
    """From the operation that makes a value to the one that uses it; parallel uses are one edge."""
    x = torch.ones(2, device=DEVICE)
    y = x * x
    z = y + x
    graph = marid.graph(z)
    ones, mul, add = graph.nodes
    assert set(graph.edges) == {(ones, mul), (ones, add), (mul, add)}


def test_edges_follow_writes() -> None:
    """A reader of written memory comes after the write, through views too."""
    base = torch.zeros(4, device=DEVICE)
    base[1:3].add_(1)
    y = base * 2
    graph = marid.graph(y)
    order = graph.get_execution_order()
    write = next(n for n in order if n.op is not None and n.op.name == "aten::add_")
    read = next(n for n in order if n.op is not None and n.op.name == "aten::mul")
    assert (write, read) in graph.edges


def test_execution_order_is_topological() -> None:
    """Every edge goes forward."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1)).to(DEVICE)
    model(torch.ones(2, 3, device=DEVICE)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    graph = marid.graph(*model.parameters())
    place = {node: index for index, node in enumerate(graph.get_execution_order())}
    assert len(place) == len(graph.nodes) == len(graph)
    assert graph.edges
    assert all(place[a] < place[b] for a, b in graph.edges)


def test_materialised_inputs_are_sources() -> None:
    """What has run already appears once, as the place where values come in."""
    x = torch.ones(2, device=DEVICE)
    x.materialize()
    graph = marid.graph(x * 2 + x)
    assert len(graph.sources) == 1
    assert _names(graph) == ["aten::mul", "aten::add"]
    assert marid.graph(x).operations == []


def _training_step() -> list[torch.Tensor]:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.LayerNorm(4), nn.Linear(4, 1)).to(DEVICE)
    x = torch.randn(2, 3, device=DEVICE)
    loss = model(x).square().mean()
    loss.backward()
    torch.optim.AdamW(model.parameters()).step()
    return [loss.detach(), *model.parameters()]


def _views_and_writes() -> list[torch.Tensor]:
    base = torch.arange(12.0, device=DEVICE).reshape(3, 4)
    base[1].mul_(10)
    first, second = base.split(2, dim=1)
    second.copy_(first * 2)
    return [base, first + second, base.t().contiguous()]


def _several_results() -> list[torch.Tensor]:
    values, indices = torch.tensor([3.0, 1.0, 2.0], device=DEVICE).sort()
    return [torch.cat([values, values * 2]), indices]


def _random() -> list[torch.Tensor]:
    x = torch.randn(20, device=DEVICE)
    torch.rand(5, device=DEVICE)
    return [x * torch.rand(20, device=DEVICE), x.clone().uniform_()]


@pytest.mark.parametrize("make", [_training_step, _views_and_writes, _several_results, _random])
def test_to_fx_runs_and_gives_the_same_result(make: object) -> None:
    """A ``GraphModule`` over the sources; running it changes nothing on the device."""
    assert callable(make)
    asked = make()
    graph = marid.graph(*asked)
    module = graph.to_fx()
    assert isinstance(module, torch.fx.GraphModule)
    found = module(*[t.clone() for t in module.inputs()])  # type: ignore[operator]
    assert marid.stats().ops_executed == 0 or graph.sources
    for value, tensor in zip(found, asked, strict=True):
        assert_same(value, tensor.detach().cpu())


def test_to_fx_of_one_tensor_returns_one_tensor() -> None:
    """And no tuple."""
    x = torch.arange(3.0, device=DEVICE) * 2
    assert_same(marid.graph(x).to_fx()(), torch.arange(3.0) * 2)


def test_to_fx_after_the_run_still_has_the_program() -> None:
    """A graph is a snapshot: it can be looked at after its tensors have run."""
    x = torch.arange(3.0, device=DEVICE)
    y = x * 2
    graph = marid.graph(y)
    y.tolist()
    assert_same(graph.to_fx()(), torch.arange(3.0) * 2)


def test_fx_nodes_carry_metadata() -> None:
    """What passes and other tools expect: ``val``, ``stack_trace``, ``nn_module_stack``."""
    model = nn.Sequential(nn.Linear(2, 2)).to(DEVICE)
    y = model(torch.ones(1, 2, device=DEVICE))
    output = [node for node in marid.graph(y).to_fx().graph.nodes if node.op == "call_function"][-1]
    assert output.meta["val"].shape == (1, 2)
    assert output.meta["val"].device.type == "meta"
    assert __file__ in output.meta["stack_trace"]
    assert list(output.meta["nn_module_stack"].values()) == [("", "Sequential"), ("0", "Linear")]
    assert output.meta["marid"].written_as == "nn.Linear"


def test_to_networkx_is_the_same_graph() -> None:
    """A directed acyclic graph with readable attributes."""
    x = torch.ones(2, 2, device=DEVICE)
    y = nn.Linear(2, 2).to(DEVICE)(x)
    graph = marid.graph(y)
    exported = graph.to_networkx()
    assert networkx.is_directed_acyclic_graph(exported)
    assert exported.number_of_nodes() == len(graph)
    assert exported.number_of_edges() == len(graph.edges)
    last = exported.nodes[graph.operations[-1].seq]
    assert last["shape"] == [2, 2]
    assert last["dtype"] == "torch.float32"
    assert last["phase"] == "forward"
    assert last["source"].startswith(__file__)


def test_to_dot_names_every_node_and_edge() -> None:
    """Graphviz source, with quotes escaped."""
    x = torch.ones(2, device=DEVICE)
    graph = marid.graph(x * 2 + x)
    dot = graph.to_dot()
    assert dot.startswith("digraph")
    assert dot.rstrip().endswith("}")
    assert dot.count("->") == len(graph.edges)
    for node in graph.nodes:
        assert f"n{node.seq} [" in dot
    assert "aten::mul" in dot


@pytest.mark.usefixtures("nothing_alive")
def test_a_graph_keeps_no_memory_of_dropped_tensors_after_it_is_dropped() -> None:
    """Holding a graph holds its nodes; dropping it frees them."""
    x = torch.ones(1000, device=DEVICE)
    graph = marid.graph(x)
    del x
    pending = marid.stats().pending_nodes
    del graph
    assert marid.stats().pending_nodes == pending - 1


# --- stats -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_alive")
def test_stats_count_what_happened() -> None:
    """Captured, executed, built, reused, read."""
    x = torch.ones(2, device=DEVICE)
    for _ in range(3):
        (x * 2).sum().item()
    stats = marid.stats()
    assert stats.ops_captured == 7
    assert stats.ops_executed == 7
    assert stats.programs_built == 2  # with and without the ones()
    assert stats.programs_reused == 1
    assert stats.materializations == 3
    assert stats.fallbacks == {}


def test_reset_starts_again_but_the_epoch_goes_on() -> None:
    """``epoch()`` counts runs since the start."""
    torch.ones(1, device=DEVICE).item()
    epoch = marid.epoch()
    marid.reset_stats()
    stats = marid.stats()
    assert (stats.ops_captured, stats.ops_executed, stats.materializations, stats.syncs) == (0, 0, 0, [])
    assert stats.epoch == marid.epoch() == epoch
    torch.ones(1, device=DEVICE).add(1).item()
    assert marid.epoch() == epoch + 1


def test_syncs_name_line_and_reason() -> None:
    """Each line that waited, how often and why."""
    x = torch.ones(2, device=DEVICE)
    line = inspect.currentframe().f_lineno + 2  # type: ignore[union-attr]
    for _ in range(4):
        (x * 2).sum().item()
    (sync,) = marid.stats().syncs
    assert sync.source == f"{__file__}:{line}"
    assert sync.count == 4
    assert "item" in sync.reason
    assert sync.seconds > 0


@pytest.mark.usefixtures("nothing_alive")
def test_pending_bytes_and_memory() -> None:
    """Bytes wait, then exist, then are gone."""
    x = torch.ones(1000, device=DEVICE)
    before = marid.stats()
    assert before.pending_bytes >= 4000
    x.materialize()
    after = marid.stats()
    assert after.pending_bytes <= before.pending_bytes - 4000
    assert after.memory_allocated - before.memory_allocated == 4000
    assert after.peak_memory >= 4000
    del x
    assert marid.stats().memory_allocated == before.memory_allocated


def test_data_dependent_operations_are_counted() -> None:
    """Apart from fallbacks: no recording could know their shape."""
    x = torch.tensor([0, 1, 2], device=DEVICE)
    x.nonzero(), x[x > 0], torch.unique(x)
    stats = marid.stats()
    assert stats.dynamic["aten::nonzero"] >= 1
    assert sum(stats.dynamic.values()) == 3
    assert stats.fallbacks == {}


# --- no_sync ---------------------------------------------------------------------------------------------------------


def test_no_sync_names_the_line_that_would_wait() -> None:
    """Reading raises; recording does not; afterwards everything works."""
    x = torch.ones(100, device=DEVICE)
    with marid.no_sync():
        y = (x * 2).sum()
        line = inspect.currentframe().f_lineno + 2  # type: ignore[union-attr]
        with pytest.raises(SyncForbiddenError) as caught:
            y.item()
    assert f"{__file__}:{line}" in str(caught.value)
    assert "no_sync" in str(caught.value)
    assert y.item() == 200.0


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: x.cpu(),
        lambda x: bool((x > 0).all()),
        lambda x: f"{x.sum():.2f}",
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.equal(x, x),
        lambda x: x.materialize(),
        lambda x: marid.materialize(x),
        lambda x: torch.zeros(100).copy_(x),
        lambda x: x.to(f"{DEVICE}:1"),
    ],
)
def test_no_sync_forbids_every_kind_of_read(read: object) -> None:
    """Whatever makes a value concrete is found; nothing runs."""
    assert callable(read)
    x = torch.ones(100, device=DEVICE) * 2
    with marid.no_sync(), pytest.raises(SyncForbiddenError):
        read(x)
    assert marid.stats().ops_executed == 0


def test_no_sync_allows_what_needs_no_run() -> None:
    """Values that exist can be read."""
    x = torch.ones(100, device=DEVICE)
    x.materialize()
    with marid.no_sync():
        assert x.tolist() == [1.0] * 100


def test_no_sync_nests_ends_with_exceptions_and_belongs_to_its_thread() -> None:
    """An inner block's end does not end the outer one; another thread may read."""
    x = torch.ones(100, device=DEVICE) * 2
    with marid.no_sync():
        with marid.no_sync():
            x.add_(1)
        with pytest.raises(SyncForbiddenError):
            x.tolist()
    with pytest.raises(ZeroDivisionError), marid.no_sync():
        1 / 0
    other = x * 3
    read: list[float] = []
    with marid.no_sync():
        thread = threading.Thread(target=lambda: read.append(other.sum().item()))
        thread.start()
        thread.join()
    assert read == [900.0]
    assert x.sum().item() == 300.0


def test_a_training_loop_runs_under_no_sync() -> None:
    """Forward, backward, clipping and AdamW read nothing."""
    model = nn.Linear(4, 4).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.ones(8, 4, device=DEVICE)
    with marid.no_sync():
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    assert loss.item() > 0
