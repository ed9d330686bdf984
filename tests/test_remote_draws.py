"""Random operators of a worker whose device has no stream of the CPU's: drawn on the host, in every form of a program.

There is another device on few machines only, so the host plays it: what is copied to the host is a copy there too.
"""

from __future__ import annotations

import pytest
import torch

from marid.execute import device_operators
from marid.execute.device_operators import HostOperator, operator_on
from marid.graph.dispatch_state import concretely
from marid.graph.node import Operation
from marid.remote.worker import executor as machines
from marid.remote.worker.executor import Executor
from marid.remote.worker.operators import operator_named
from tests.helpers import DEVICE, assert_same
from tests.remote_helpers import Recorded

CPU = torch.device("cpu")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Executor:
    for module in (device_operators, machines):
        monkeypatch.setattr(module, "operator_on", lambda device, op, draws: HostOperator(op, device) if draws else op)
    return Executor(CPU)


def test_draws_of_programs_are_those_of_the_cpu(machine: Executor) -> None:
    torch.manual_seed(5)
    x = torch.arange(24.0).reshape(4, 6).to(DEVICE)
    x.t()[1:4].uniform_(2, 3)  # in place, of memory with other strides
    noise = torch.randn(4, 6, device=DEVICE)
    dropped = torch.nn.functional.dropout(x, 0.4)
    order = torch.randperm(11, device=DEVICE)
    mixed = torch.empty_like(x).exponential_() + dropped
    wanted = [x, noise, dropped, order, mixed]
    recorded = Recorded(*wanted)
    drawn = [one for one in recorded.program.instructions if "generator" in str(one.op.func._schema)]
    assert len(drawn) == 5, recorded.program
    machine.define(recorded.digest, recorded.body)
    machine.describe(recorded.digest, recorded.geometry_digest, recorded.geometry)
    expected = [one.cpu() for one in wanted]
    for _ in range(4):  # as recorded, then in its other forms
        given = [tensor.detach().clone() for tensor in recorded.inputs]
        _, results = machine.run(recorded.digest, recorded.geometry_digest, given, list(recorded.params), int)
        program = recorded.program
        found = dict(zip((*program.input_slots, *program.output_slots), (*given, *results), strict=True))
        for slot, tensor in zip(recorded.outputs, expected, strict=True):
            assert_same(found[slot], tensor)


def test_a_call_draws_on_the_host_and_says_where_it_stopped(machine: Executor) -> None:
    generator = torch.Generator().manual_seed(3)
    state = bytes(generator.get_state().tolist())
    x = torch.zeros(5)
    op = operator_named("aten.normal_.default")
    called = machine.call(op, [x], {}, [x], state, int)
    assert_same(x, torch.zeros(5).normal_(generator=generator))
    assert called.returned.same_as == 0
    assert called.state is not None
    assert_same(called.state, generator.get_state())


def test_on_the_cpu_operators_are_called_as_ever() -> None:
    op = operator_named("aten.normal_.default")
    assert operator_on(CPU, op, True) is op
    elsewhere = operator_on(torch.device("cuda", 0), op, True)
    assert isinstance(elsewhere, Operation)
    assert elsewhere.func is op.func
    assert elsewhere.mutates


def test_a_made_tensor_is_not_one_that_was_given(machine: Executor) -> None:
    """A copy is copied back only where the operator has written it."""
    assert machine.device == CPU
    op = HostOperator(operator_named("aten.normal.Tensor_Tensor"), CPU)
    mean, std = torch.zeros(3), torch.ones(3)
    with concretely():
        result = op.call(mean, std, generator=torch.Generator().manual_seed(1))
    assert_same(mean, torch.zeros(3))
    assert_same(result, torch.normal(mean, std, generator=torch.Generator().manual_seed(1)))
