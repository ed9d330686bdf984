"""Recording a function to be saved: it is called until two recordings did the same, and what that did is undone."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

from marid.errors import UnsupportedOperationError
from marid.frontend import handles, random
from marid.frontend.materialize import materialize
from marid.graph.prepared import Prepared
from marid.replay.arguments import Call, Unreadable
from marid.replay.counters import may_count
from marid.replay.observed_run import Run, grad_of
from marid.replay.places import ChangesState
from marid.replay.reachable import Reached, reach
from marid.replay.recording import Recording
from marid.saved.sizes import is_dense
from marid.semantics.scopes import meet
from marid.settings import settings

logger = logging.getLogger("marid")

_FIRST_CALLS = 2
"""How many calls may change Python state before one is recorded. An optimizer makes its state in its first step."""


@dataclass
class RecordedFunction:
    """A recording that can be replayed: its program, the numbers that come of counters, and the call of which it is.

    ``arguments`` are those that the function was called with: copies of the examples.
    """

    recording: Recording
    prepared: Prepared
    computed: list[tuple[int, Any]]
    call: Call
    arguments: tuple[Any, ...]


def name_of_function(function: Any) -> str:
    """How messages name it: with its line, where it has one."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(inspect.unwrap(function), "__code__", None)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def record_function(function: Callable[..., Any], examples: tuple[Any, ...], state: Any) -> RecordedFunction:
    """Record ``function``. Tensors, gradients and generators are left as they were before the first call that could be
    recorded. Raises ``TypeError`` for arguments that no file can have, ``UnsupportedOperationError`` for what cannot
    be replayed, and what the function raises."""
    before: _Before | None = None
    earlier: list[Recording] = []
    first_calls = 0
    why = ""
    while len(earlier) < settings.compile_recordings:
        arguments = _copied(examples)
        try:
            call = Call(arguments, {})
        except Unreadable:
            raise _refused(function, "it is inside of a transform, a mode or hooks on saved tensors") from None
        root = ("the function", function) if state is None else ("state", state)
        before = before or _Before(_met(reach([root], state is None)))
        run = Run(function, call, state, for_file=True)
        try:
            run.call(arguments, {}, False)
        except BaseException:
            before.put_back()
            raise
        recording = run.recording
        if recording is None:
            assert run.refusal is not None
            if isinstance(run.refusal, ChangesState) and first_calls < _FIRST_CALLS:
                first_calls += 1
                logger.warning("marid.save_program: call %d of %s counts: %s", first_calls, function, run.refusal)
                before = None
                earlier.clear()
                continue
            before.put_back()
            raise _refused(function, str(run.refusal))
        for one in earlier:
            why = one.difference(recording)
            if why is None:
                prepared = run.prepare()
                before.put_back()
                if prepared is None:
                    raise _refused(function, "another thread has run what was recorded")
                return RecordedFunction(recording, prepared[0], one.computed(recording), call, arguments)
        earlier.append(recording)
    if before is not None:
        before.put_back()
    raise _refused(function, f"no two of {len(earlier)} recordings did the same: {why}")


def _met(reached: Reached) -> Reached:
    for optimizer in reached.optimizers:
        meet(optimizer)
    return reached


def _refused(function: Any, why: str) -> UnsupportedOperationError:
    return UnsupportedOperationError(f"marid.save_program: {name_of_function(function)} cannot be saved: {why}")


def _copied(examples: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with tensors of the device that nobody else has, and that take the whole of their memory: so they
    share none with each other, and what is written to them is lost."""
    copies: list[Any] = []

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if not handles.is_lazy(leaf):
            return leaf if is_dense(handles.spec_of(leaf, 0)) else leaf.contiguous()
        copies.append(leaf.detach().clone().requires_grad_(leaf.requires_grad))
        return copies[-1]

    with torch.no_grad():
        made = tree_map(copy, examples)
    materialize(copies, "save_program()")
    return made


class _Before:
    """What tensors, their gradients and generators were, to be put back."""

    def __init__(self, reached: Reached) -> None:
        self._grads = [(tensor, grad_of(tensor)) for tensor in reached.lazy]
        grads = [grad for _, grad in self._grads if grad is not None]
        counters = [tensor for tensor in reached.host if may_count(tensor)]
        # Nothing can be written where several elements lie in one place.
        apart = [one for one in (*reached.lazy, *grads) if not one._value.spec.overlaps]
        with torch.no_grad():
            self._tensors = [(tensor, tensor.detach().clone()) for tensor in (*apart, *counters)]
        materialize([copy for _, copy in self._tensors if handles.is_lazy(copy)], "save_program()")
        self._versions = [(tensor, tensor._version) for tensor, _ in self._tensors if not tensor.is_inference()]
        generators = [random.default_generator(index) for index in range(handles.device_count)]
        self._generators = [(one, one.get_state()) for one in (*generators, *reached.generators)]

    def put_back(self) -> None:
        """Have all of it as it was; what the calls have recorded runs."""
        with torch.no_grad():
            for tensor, grad in self._grads:
                if grad_of(tensor) is not grad:
                    tensor.grad = grad
            for tensor, copy in self._tensors:  # versions do not tell which changed: norms leave those of statistics
                tensor.copy_(copy)
        # What autograd has saved of them before is what they hold.
        for tensor, version in self._versions:
            torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
        for generator, state in self._generators:
            generator.set_state(state)
        materialize([tensor for tensor, _ in self._tensors if handles.is_lazy(tensor)], "save_program()")
