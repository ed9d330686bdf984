"""Programs on a device that work is captured on, which the processor plays (``simulated_graphs.py``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from marid.execute import accelerator, device_operators
from marid.execute.captured import CapturedProgram
from marid.execute.device_operators import HostOperator, WrittenOut, operator_on
from marid.execute.interrupted import Interrupted
from marid.frontend.engines import engine_of
from marid.graph.node import Operation
from marid.remote.worker.executor import Executor
from marid.remote.worker.operators import operator_named
from tests.helpers import DEVICE, assert_same
from tests.remote_helpers import Recorded, connected
from tests.simulated_graphs import Simulated

CPU = torch.device("cpu")
RUNS = 9


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Executor:
    monkeypatch.setitem(accelerator._KINDS, "cpu", Simulated)
    return Executor(CPU)


class Repeated:
    """A function of tensors and numbers, recorded once, to be run again with others."""

    def __init__(self, machine: Executor, function: Callable[..., Any], *examples: torch.Tensor) -> None:
        self.executor = machine
        self.function = function
        given = [one if one.device.type == DEVICE else one.clone().to(DEVICE) for one in examples]
        values = [example.cpu() for example in examples]
        returned = function(*given)
        self.recorded = Recorded(*returned, *given)
        self._order = [
            next(i for i, one in enumerate(values) if one.shape == tensor.shape and one.dtype is tensor.dtype
                 and torch.equal(one, tensor))
            for tensor in self.recorded.inputs
        ]  # fmt: skip
        self._returned = [one._value for one in returned]
        machine.define(self.recorded.digest, self.recorded.body)
        machine.describe(self.recorded.digest, self.recorded.geometry_digest, self.recorded.geometry)

    def __call__(self, *tensors: torch.Tensor, params: tuple[Any, ...] | None = None) -> list[torch.Tensor]:
        """What a run makes of these tensors, which it may write."""
        recorded = self.recorded
        given = [tensors[place] for place in self._order]
        numbers = list(recorded.params if params is None else params)
        _, results = self.executor.run(recorded.digest, recorded.geometry_digest, given, numbers, int)
        by_slot = dict(
            zip((*recorded.program.input_slots, *recorded.program.output_slots), (*given, *results), strict=True)
        )
        return [by_slot[slot] for slot in recorded.outputs[: len(self._returned)]]

    @property
    def program(self) -> CapturedProgram:
        prepared, _ = self.executor._programs[self.recorded.digest].geometries[self.recorded.geometry_digest]
        assert isinstance(prepared.ready, CapturedProgram)
        return prepared.ready


def _mlp(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    hidden = F.gelu(x @ w + b)
    return (hidden.tanh() * 2 + 1, hidden.sum())


WEIGHTS = torch.randn(6, 5), torch.randn(5)


def test_what_repeats_is_captured_and_results_are_their_owners(machine: Executor) -> None:
    """Each run has another ``x``, somewhere else; what earlier runs gave stays what it was."""
    repeated = Repeated(machine, _mlp, torch.randn(4, 6), *WEIGHTS)
    kept: list[tuple[list[torch.Tensor], tuple[torch.Tensor, ...]]] = []
    alive = []
    for _ in range(RUNS):
        x = torch.randn(4, 6)
        alive.append(x)
        kept.append((repeated(x, *WEIGHTS), _mlp(x, *WEIGHTS)))
    for found, expected in kept:
        for a, b in zip(found, expected, strict=True):
            assert_same(a, b)
    assert machine.captured.replays >= RUNS - 5
    assert repeated.program.graphs == 1


def test_nothing_is_captured_before_it_came_often_or_under_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(accelerator._KINDS, "cpu", Simulated)
    for machine, runs in ((Executor(CPU), 3), (Executor(CPU, memory_limit=1 << 30), RUNS)):
        repeated = Repeated(machine, _mlp, torch.randn(4, 6), *WEIGHTS)
        x = torch.randn(4, 6)
        for _ in range(runs):
            assert_same(repeated(x, *WEIGHTS)[0], _mlp(x, *WEIGHTS)[0])
        assert machine.captured.replays == 0
        assert repeated.program.graphs == 0


def _step(weight: torch.Tensor, momentum: torch.Tensor, x: torch.Tensor, rate: float = 0.1) -> tuple[torch.Tensor, ...]:
    out = (x @ weight).relu()
    grad = x.t() @ out / 4
    grad = grad + 0.01 * weight
    momentum.mul_(0.9).add_(grad)
    weight.sub_(momentum * rate)
    weight.clamp_(-3, 3)
    norm = weight.square().sum().sqrt()
    return out.mean(), norm.log1p().exp(), norm


def test_state_that_is_written_in_place(machine: Executor) -> None:
    """With a rate that changes, around which the program is cut."""
    torch.manual_seed(1)
    start = torch.randn(6, 6), torch.zeros(6, 6), torch.randn(4, 6)
    repeated = Repeated(machine, _step, *start)
    places = [i for i, number in enumerate(repeated.recorded.params) if number == 0.1]
    assert len(places) == 1
    mine, theirs = [t.clone() for t in start], [t.clone() for t in start]
    for run in range(RUNS):
        rate = 0.1 / (1 + run)
        params = tuple(rate if i in places else n for i, n in enumerate(repeated.recorded.params))
        x = torch.randn(4, 6)
        found = repeated(mine[0], mine[1], x, params=params)
        expected = _step(theirs[0], theirs[1], x, rate)
        for a, b in zip((*found, *mine[:2]), (*expected, *theirs[:2]), strict=True):
            assert_same(a, b)
    assert machine.captured.replays >= 2
    assert repeated.program.graphs == 2


def test_numbers_that_change_late_and_once(machine: Executor) -> None:
    start = torch.randn(6, 6), torch.zeros(6, 6), torch.randn(4, 6)
    repeated = Repeated(machine, _step, *start)
    place = repeated.recorded.params.index(0.1)
    mine, theirs = [t.clone() for t in start], [t.clone() for t in start]
    for run in range(2 * RUNS):
        rate = 0.1 if run < RUNS else 0.05
        params = tuple(rate if i == place else n for i, n in enumerate(repeated.recorded.params))
        found, expected = repeated(*mine, params=params), _step(*theirs, rate)
        for a, b in zip((*found, *mine), (*expected, *theirs), strict=True):
            assert_same(a, b)
    assert repeated.program.graphs == 2  # cut in two around the number


def test_written_memory_that_is_elsewhere_each_time(machine: Executor) -> None:
    """It cannot be copied into a buffer: what is written must be seen where it lies."""
    start = torch.randn(6, 6), torch.zeros(6, 6), torch.randn(4, 6)
    repeated = Repeated(machine, _step, *start)
    alive = []
    for _ in range(RUNS):
        mine = [torch.randn_like(t) for t in start]
        theirs = [t.clone() for t in mine]
        alive.append(mine)
        found, expected = repeated(*mine), _step(*theirs)
        for a, b in zip((*found, *mine), (*expected, *theirs), strict=True):
            assert_same(a, b)


def test_memory_that_is_written_without_saying_so(machine: Executor) -> None:
    """The schema of ``native_batch_norm`` does not mark the running statistics."""

    def function(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.batch_norm(x.exp().log().mul(2).add(1), mean, variance, training=True)
        return (y.tanh(),)

    repeated = Repeated(machine, function, torch.randn(4, 6), torch.zeros(6), torch.ones(6))
    alive = []
    for _ in range(RUNS):
        x, mean, variance = torch.rand(4, 6), torch.rand(6), torch.rand(6)
        theirs = mean.clone(), variance.clone()
        alive.append((x, mean, variance))
        found, expected = repeated(x, mean, variance), function(x, *theirs)
        for a, b in zip((*found, mean, variance), (*expected, *theirs), strict=True):
            assert_same(a, b)


def test_memory_at_the_same_place_may_be_another(machine: Executor) -> None:
    """A tensor dies and the next one lies where it lay: views of it that leave are views of the new one."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.t()
        return y, (y + 1).exp().log().neg().abs()

    block = torch.zeros(24)
    repeated = Repeated(machine, function, torch.randn(4, 6))
    for _ in range(RUNS):
        x = torch.empty(0).set_(
            torch.frombuffer(block.numpy(), dtype=torch.float32).untyped_storage(), 0, (4, 6), (6, 1)
        )
        x.copy_(torch.randn(4, 6))
        view, made = repeated(x)
        assert_same(made, function(x)[1])
        assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
        assert view.stride() == (1, 6)
    assert machine.captured.replays > 0


def test_results_that_share_memory_still_do(machine: Executor) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        base = x.exp().log().mul(3).add(1)
        return base, base[1:, ::2], base.t()

    repeated = Repeated(machine, function, torch.randn(4, 6))
    x = torch.randn(4, 6)
    for _ in range(RUNS):
        base, piece, turned = repeated(x)
        base.zero_()
        assert not piece.any()
        assert not turned.any()
        assert piece.stride() == (6, 2)
    assert machine.captured.replays > 0


def test_results_of_other_sizes_are_written_where_they_lie(machine: Executor) -> None:
    """``out=`` gives tensors other memory, and so could take that of a graph from it."""

    def function(x: torch.Tensor, values: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.exp().log().mul(2).add(1).tanh()
        torch.topk(y, 2, out=(values, indices))
        return values, indices, y

    def empty() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty(0), torch.empty(0, dtype=torch.long)

    repeated = Repeated(machine, function, torch.randn(4, 6), *empty())
    x = torch.randn(4, 6)
    for _ in range(RUNS):
        x.normal_()
        for found, expected in zip(repeated(x, *empty()), function(x, *empty()), strict=True):
            assert_same(found, expected)
    assert repeated.program.graphs == 0


def test_a_resized_result_is_no_graphs(machine: Executor) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.exp().log().mul(2).add(1).tanh()
        z = y * 2
        return z, y.resize_(5, 9)[:2, :4] * 2

    repeated = Repeated(machine, function, torch.rand(4, 6))
    x = torch.rand(4, 6)
    for _ in range(RUNS):
        x.uniform_()
        for found, expected in zip(repeated(x), function(x), strict=True):
            assert_same(found, expected)
    assert repeated.program.graphs == 0


def test_empty_tensors_are_told_apart(machine: Executor) -> None:
    def function(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return a.view(0), b.view(0, 2), x.exp().log().mul(2).add(1).tanh()

    examples = torch.randn(4, 6), torch.empty(0), torch.empty(0, dtype=torch.long)
    repeated = Repeated(machine, function, *examples)
    for _ in range(RUNS):
        given = examples[0], torch.empty(0), torch.empty(0, dtype=torch.long)
        a, b, _ = repeated(*given)
        assert a.untyped_storage()._cdata == given[1].untyped_storage()._cdata
        assert b.untyped_storage()._cdata == given[2].untyped_storage()._cdata
    assert repeated.program.graphs == 1


def test_a_part_of_memory_is_read_where_it_lies(machine: Executor) -> None:
    """``as_strided`` counts from the beginning of its memory, which a copy of it would not have."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        seen = torch.as_strided(x, (3, 2), (2, 1), 4)
        return (seen.exp().log().mul(2).add(1).tanh(),)

    example = torch.randn(40).to(DEVICE)[4:14]
    example.materialize()  # type: ignore[attr-defined]
    repeated = Repeated(machine, function, example)
    assert [tensor.shape for tensor in repeated.recorded.inputs] == [example.shape]
    alive = []
    for _ in range(RUNS):
        x = torch.randn(40)[4:14]
        alive.append(x)
        assert_same(repeated(x)[0], function(x)[0])
    for _ in range(RUNS):  # where it no longer moves
        x.untyped_storage().copy_(torch.randn(40).untyped_storage())
        assert_same(repeated(x)[0], function(x)[0])


def test_what_never_moved_may_move(machine: Executor) -> None:
    """Weights are replaced, once and then each time."""
    repeated = Repeated(machine, _mlp, torch.randn(4, 6), *WEIGHTS)
    x = torch.randn(4, 6)
    w, b = WEIGHTS
    alive = []
    for run in range(3 * RUNS):
        if run == RUNS or run > 2 * RUNS:
            w = torch.randn(6, 5)
            alive.append(w)
        assert_same(repeated(x, w, b)[0], _mlp(x, w, b)[0])
    assert repeated.program.graphs == 1


@pytest.mark.parametrize("seed", range(4))
def test_a_piece_that_is_captured_again_disturbs_no_later_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a later piece uses while it runs was free when that one was captured."""

    def function(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = a.exp().log().mul(2).add(1).tanh()
        noise = torch.zeros_like(a).uniform_()
        parts = [b + number for number in range(8)]
        second = torch.stack(parts).sum(0)
        drawn = torch.zeros_like(b).uniform_()
        third = (first + second).exp().log().mul(2).add(1).tanh()
        return first, second, third, noise, drawn

    monkeypatch.setitem(accelerator._KINDS, "cpu", lambda device: Simulated(device, seed))
    examples = torch.rand(4, 6), torch.rand(4, 6)
    repeated = Repeated(Executor(CPU), function, *examples)
    a, b = examples
    for run in range(2 * RUNS):
        a = torch.rand(4, 6) if run == RUNS else a
        for found, expected in zip(repeated(a, b)[:3], function(a, b)[:3], strict=True):
            assert_same(found, expected)
    assert repeated.program.graphs == 3


def test_what_draws_is_between_pieces(machine: Executor) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.exp().log().mul(2).add(1).tanh()
        y = F.dropout(y, 0.5)
        return (y.exp().log().mul(2).add(1).tanh(),)

    torch.manual_seed(3)
    repeated = Repeated(machine, function, torch.rand(4, 6))
    torch.manual_seed(3)
    alive = []
    for _ in range(RUNS):
        x = torch.rand(4, 6)
        alive.append(x)
        state = torch.get_rng_state()
        torch.manual_seed(3)
        expected = function(x)
        torch.set_rng_state(state)
        assert_same(repeated(x)[0], expected[0])
    assert repeated.program.graphs == 2


def test_what_cannot_be_captured_runs_one_by_one(machine: Executor) -> None:
    """And is left out, so that the rest is captured."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (F.gelu(x.exp().log().mul(2).add(1)).exp().log().mul(3).cos(),)

    assert isinstance(machine.accelerator, Simulated)
    machine.accelerator.refused.add("aten.gelu.default")
    repeated = Repeated(machine, function, torch.rand(4, 6))
    x = torch.rand(4, 6)
    for _ in range(RUNS):
        x.uniform_()
        assert_same(repeated(x)[0], function(x)[0])
    assert repeated.program.graphs == 2


def test_a_program_of_which_nothing_can_be_captured(machine: Executor) -> None:
    assert isinstance(machine.accelerator, Simulated)
    machine.accelerator.refused |= {"aten.exp.default", "aten.log.default"}

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for _ in range(30):
            x = x.exp().log()
        return (x,)

    repeated = Repeated(machine, function, torch.rand(4, 6))
    x = torch.rand(4, 6)
    for _ in range(60):
        x.uniform_()
        assert_same(repeated(x)[0], function(x)[0])
    assert repeated.program.graphs == 0
    assert len(repeated.program._refused) < 20


def test_an_interrupt_while_capturing_has_done_nothing(machine: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    start = torch.randn(6, 6), torch.zeros(6, 6), torch.randn(4, 6)
    repeated = Repeated(machine, _step, *start)
    tensors = [t.clone() for t in start]
    capture = machine.accelerator.capture

    def interrupted(launch: Callable[[], None]) -> Callable[[], None]:
        capture(launch)
        raise Interrupted(5, False, {}, KeyboardInterrupt())

    for _ in range(4):
        repeated(*tensors)
    monkeypatch.setattr(machine.accelerator, "capture", interrupted)
    before = [t.clone() for t in tensors]
    with pytest.raises(Interrupted) as caught:
        repeated(*tensors)
    assert caught.value.index == 0
    assert isinstance(caught.value.error, KeyboardInterrupt)
    for a, b in zip(tensors, before, strict=True):
        assert_same(a, b)
    monkeypatch.setattr(machine.accelerator, "capture", capture)
    found, expected = repeated(*tensors), _step(*before)
    for a, b in zip((*found, *tensors), (*expected, *before), strict=True):
        assert_same(a, b)


def test_an_error_behind_a_piece_leaves_tensors_that_stay(machine: Executor) -> None:
    """What exists when a run stops is told, and is no longer in the memory of graphs."""
    failing = [False]

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.exp().log().mul(2).add(1).tanh()
        return y, F.dropout(y, 0.5)

    torch.manual_seed(0)
    repeated = Repeated(machine, function, torch.rand(4, 6))
    x = torch.rand(4, 6)
    at = machine.twisters.at

    def position(draw: Any) -> torch.Generator:
        if failing[0]:
            raise RuntimeError("no generator")
        return at(draw)

    machine.twisters.at = position  # type: ignore[method-assign]
    for _ in range(RUNS):
        repeated(x)
    assert repeated.program.graphs == 1
    failing[0] = True
    with pytest.raises(Interrupted) as caught:
        repeated(x)
    expected = x.exp().log().mul(2).add(1).tanh()
    found = [t for t in caught.value.tensors.values() if t.shape == x.shape and t.data_ptr() != x.data_ptr()]
    assert any(torch.equal(one, expected) for one in found)
    failing[0] = False
    copies = [one.clone() for one in found]
    x.uniform_()
    repeated(x)
    for a, b in zip(found, copies, strict=True):
        assert_same(a, b)


@pytest.mark.mispredicts
def test_results_are_laid_out_as_recorded(machine: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever strides the kernels of a device prefer."""
    layer_op = torch.ops.aten.convolution.default

    def elsewhere(device: torch.device, op: Operation, draws: bool) -> Operation:
        def preferring(*args: Any, **kwargs: Any) -> torch.Tensor:
            return op.func._op(*args, **kwargs).contiguous(memory_format=torch.channels_last)

        return WrittenOut(op, preferring) if op.func is layer_op else operator_on(device, op, draws)

    monkeypatch.setattr("marid.execute.device_operators.operator_on", elsewhere)

    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.conv2d(x, w)
        return y, y.view(-1)[3:7] * 2

    x, w = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 2, 2)
    repeated = Repeated(machine, function, x, w)
    for _ in range(2):
        for a, b in zip(repeated(x, w), function(x, w), strict=True):
            assert_same(a, b)


def test_what_is_written_out_is_captured_and_what_the_host_does_is_not(
    machine: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.scaled_dot_product_attention(x.exp().log().mul(2), x, x + 1)
        z = (y.tanh() * 3).log_softmax(-1).exp()
        return y, z.exp().log().mul(2).add(1).tanh()

    cuda = torch.device("cuda", 0)
    host = torch.ops.aten._log_softmax.default

    def placed(device: torch.device, op: Operation, draws: bool) -> Operation:
        return HostOperator(op, device) if op.func is host else operator_on(cuda, op, draws)

    monkeypatch.setattr("marid.execute.device_operators.operator_on", placed)
    x = torch.randn(2, 3, 5, 8)
    repeated = Repeated(machine, function, x)
    for _ in range(RUNS):
        x.normal_()
        for a, b in zip(repeated(x), function(x), strict=True):
            torch.testing.assert_close(a, b)
            assert a.stride() == b.stride()
    assert repeated.program.graphs == 2
    kinds = [type(one.op) for one in repeated.program.program.instructions]
    assert WrittenOut in kinds
    assert HostOperator in kinds


@pytest.mark.in_process("connects workers of its own")
def test_training_and_generating_on_a_worker_that_captures() -> None:
    """The losses, parameters and tokens are those of eager PyTorch, bit for bit."""
    with connected(2, imports=["tests.simulated_graphs"]):
        for function in (_trained, _generated):
            for found, expected in zip(function(f"{DEVICE}:2"), function("cpu"), strict=True):
                assert_same(found, expected)
        stats = engine_of(2).worker_stats()
        assert stats is not None
        assert stats["graph_replays"] > 20


def _trained(device: str) -> list[Any]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    model = nn.Sequential(layer, nn.Linear(16, 5)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    batches = [(torch.randn(3, 7, 16).to(device), torch.randint(5, (3, 7)).to(device)) for _ in range(16)]
    torch.manual_seed(1)  # which the processor has one generator for, and a device one of its own
    losses = []
    for x, y in batches:
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return [losses, [parameter.detach().cpu() for parameter in model.parameters()]]


def _generated(device: str) -> list[Any]:
    """With a cache that is written in place."""
    torch.manual_seed(0)
    embed, project = (torch.randn(32, 16).to(device), torch.randn(16, 48).to(device))
    cache = torch.zeros(2, 1, 40, 16, device=device)
    token, tokens = torch.tensor([[3]]).to(device), []
    position = torch.zeros(1, dtype=torch.long, device=device)
    with torch.no_grad():
        for _ in range(30):
            x = embed[token]
            query, key, value = (x @ project).split(16, dim=-1)
            cache[0].index_copy_(1, position, key)
            cache[1].index_copy_(1, position, value)
            mask = torch.arange(40, device=device) <= position
            scores = (query @ cache[0].transpose(1, 2) / 4).masked_fill(~mask, -torch.inf)
            x = x + scores.softmax(-1) @ cache[1]
            token = (x @ embed.t()).argmax(-1)
            position += 1
            tokens.append(token.item())
    return [tokens, cache.cpu()]


# --- memory of graphs ------------------------------------------------------------------------------------------------


def test_what_nobody_holds_is_not_copied(machine: Executor) -> None:
    """And what is held when its graph runs again keeps its value, its views too, in memory of its own."""
    repeated = Repeated(machine, _mlp, torch.randn(4, 6), *WEIGHTS)
    for _ in range(RUNS):
        repeated(torch.randn(4, 6), *WEIGHTS)
    assert machine.captured.results.moved == 0
    x = torch.randn(4, 6)
    found, expected = repeated(x, *WEIGHTS), _mlp(x, *WEIGHTS)
    row, before = found[0][1], found[0].data_ptr()
    repeated(torch.randn(4, 6), *WEIGHTS)
    assert machine.captured.results.moved == 2
    assert found[0].data_ptr() != before
    assert_same(found[0], expected[0])
    assert_same(row, expected[0][1])
    row.zero_()
    assert not found[0][1].any()


def test_results_of_later_graphs_survive_earlier_ones(machine: Executor) -> None:
    """They may lie in memory that an earlier graph uses while it runs."""
    first = Repeated(machine, lambda x: ((x.exp() + 1).log().tanh().sum(),), torch.randn(8, 8))
    second = Repeated(machine, lambda x: (x * 2 + 1, (x - 1).sin()), torch.randn(8, 8))
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    for run in range(2 * RUNS):
        x = torch.randn(8, 8)
        first(x)
        held += zip(second(x), (x * 2 + 1, (x - 1).sin()), strict=True)
        first(torch.randn(8, 8))
        for a, b in held:
            assert_same(a, b)
        if run % 3 == 0:
            del held[:]
    assert first.program.graphs == second.program.graphs == 1
    assert machine.captured.results.moved > 0


def test_a_graph_reads_the_results_of_another_where_they_lie(machine: Executor) -> None:
    """From the first time that both are captured, though before that they came from somewhere else in each run."""
    first = Repeated(machine, lambda x: ((x.exp() + 1).log(), (x + 3).tanh() * 2), torch.randn(8, 8))
    second = Repeated(machine, lambda a, b: ((a @ b).relu() * 2 + a,), torch.randn(8, 8), torch.randn(8, 8))
    for _ in range(RUNS):
        a, b = first(x := torch.randn(8, 8))
        (found,) = second(a, b)
        del a, b
        a, b = (x.exp() + 1).log(), (x + 3).tanh() * 2
        assert_same(found, (a @ b).relu() * 2 + a)
        del found
    (graph,) = [segment.graph for segment in second.program._segments]
    assert graph is not None
    assert not graph.buffers
    assert machine.captured.results.moved == 0


def test_a_result_in_the_memory_of_a_graph_can_grow(machine: Executor) -> None:
    repeated = Repeated(machine, _mlp, torch.randn(4, 6), *WEIGHTS)
    for _ in range(RUNS):
        found = repeated(x := torch.randn(4, 6), *WEIGHTS)[0]
    found.untyped_storage().resize_(2 * found.untyped_storage().nbytes())
    repeated(torch.randn(4, 6), *WEIGHTS)
    assert_same(found, _mlp(x, *WEIGHTS)[0])


def test_results_outlive_the_graphs_that_made_them(machine: Executor) -> None:
    repeated = Repeated(machine, _mlp, torch.randn(4, 6), *WEIGHTS)
    for _ in range(RUNS):
        found = repeated(x := torch.randn(4, 6), *WEIGHTS)
    machine.captured.clear()
    others = [Repeated(machine, lambda x, n=n: ((x + n).exp().tanh() * 2,), torch.randn(4, 6)) for n in range(3)]
    for _ in range(RUNS):
        for other in others:
            other(torch.randn(4, 6))
    for a, b in zip(found, _mlp(x, *WEIGHTS), strict=True):
        assert_same(a, b)


# --- operators -------------------------------------------------------------------------------------------------------


def test_operators_without_a_kernel_are_computed_on_the_host() -> None:
    cuda = torch.device("cuda", 0)
    assert isinstance(operator_on(cuda, operator_named("marid.lstm_layer.default"), False), HostOperator)
    assert isinstance(operator_on(cuda, operator_named("aten.histogram.bin_ct"), False), HostOperator)
    add = operator_named("aten.add.Tensor")
    assert operator_on(cuda, add, False) is add
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert isinstance(operator_on(cuda, Operation(forward, False, False), False), WrittenOut)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ["plain", "causal", "mask", "boolean mask", "scale"])
def test_attention_written_out_is_the_cpus(kind: str, dtype: torch.dtype) -> None:
    """Forward, log-sum-exp and gradients; a row that attends to nothing too."""
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    ours = [
        operator_on(torch.device("cuda"), Operation(func, False, False), False).call for func in (forward, backward)
    ]
    query, key, value = (torch.randn(2, 3, n, 8, dtype=dtype) for n in (5, 7, 7))
    kept = torch.rand(5, 7) > 0.4
    kept[2] = False
    mask = torch.zeros(5, 7, dtype=dtype).masked_fill(~kept, -torch.inf)
    causal = kind == "causal"
    options: dict[str, Any] = {"attn_mask": mask} if "mask" in kind else {}
    options |= {"scale": 0.3} if kind == "scale" else {}
    expected = forward(query, key, value, 0.0, causal, **options)
    given = {**options, "attn_mask": kept} if kind == "boolean mask" else options
    found = ours[0](query, key, value, 0.0, causal, **given)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {}
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **tolerance)
    grad = torch.randn_like(expected[0])
    found = ours[1](grad, query, key, value, *expected, 0.0, causal, **given)
    expected = backward(grad, query, key, value, *expected, 0.0, causal, **options)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


@pytest.mark.parametrize(("kernel", "dtype"), [("flash", torch.bfloat16), ("efficient", torch.float32)])
def test_kernels_of_cuda_for_attention_take_what_they_are_given(
    kernel: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By PyTorch's meta kernels of these; a GPU says whether they compute the same (``test_cuda.py``)."""
    monkeypatch.setattr(device_operators, "_kernel_for", lambda *_: kernel)
    query, key, value = (torch.randn(2, 3, length, 64, device="meta", dtype=dtype) for length in (37, 50, 50))
    out, logsumexp = device_operators._attention(query, key, value, 0.0, False, scale=0.5)
    assert (out.shape, logsumexp.shape, logsumexp.dtype) == (query.shape, (2, 3, 37), torch.float32)
    found = device_operators._attention_backward(
        torch.empty_like(out), query, key, value, out, logsumexp, 0.0, False, scale=0.5
    )
    assert [one.shape for one in found] == [query.shape, key.shape, value.shape]
