"""The default engine: programs run in this process, on CPU tensors."""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch

from marid.errors import MaterializationError, MemoryLimitError
from marid.execute.arena import Arena
from marid.execute.cache import ProgramCache
from marid.execute.interrupted import Interrupted
from marid.execute.kernel_warnings import KernelWarnings
from marid.graph.node import Draw, Node, fail, finish
from marid.graph.prepared import Prepared
from marid.graph.program import Task, bind
from marid.graph.twister import Twisters
from marid.optimize.forecast import forecast
from marid.report.stats import counters
from marid.report.units import bytes_text
from marid.semantics.scopes import current_site

__all__ = ["InProcessEngine", "concretely"]

_LARGEST = 5  # results named when memory does not suffice


# Everything above the kernels: a program is below autograd, autocast and every tracing layer by construction. What
# resolves conjugate and negative bits stays on; a dispatch into Python would have switched it off with the rest.
def _keys(*names: str) -> torch._C.DispatchKeySet:
    found = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, names[0]))
    for name in names[1:]:
        found = found | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
    return found


_INCLUDED = _keys("BackendSelect")
_EXCLUDED = _keys(
    *("AutogradCPU", "AutogradMeta", "AutogradOther", "AutogradPrivateUse1", "AutogradNestedTensor", "ADInplaceOrView"),
    *("AutocastCPU", "AutocastCUDA", "AutocastPrivateUse1", "Python", "PythonTLSSnapshot", "PythonDispatcher"),
    *("FuncTorchDynamicLayerFrontMode", "FuncTorchDynamicLayerBackMode", "FuncTorchGradWrapper", "FuncTorchBatched"),
    *("FuncTorchVmapMode", "Functionalize", "PreDispatch"),
)


class concretely:
    """Context manager: inside, ATen calls go straight to the kernels of concrete tensors, as if called outside of any
    dispatch: no autograd, autocast, tensor subclass, mode or functional transform sees them."""

    __slots__ = ("_function", "_keys")

    def __enter__(self) -> None:
        self._keys = torch._C._ForceDispatchKeyGuard(_INCLUDED, _EXCLUDED)
        self._function = torch._C.DisableTorchFunction()
        self._keys.__enter__()
        self._function.__enter__()

    def __exit__(self, *error: object) -> None:
        self._function.__exit__(*error)  # pyright: ignore[reportArgumentType]
        self._keys.__exit__(*error)


class InProcessEngine:
    """Runs programs on the calling thread, one at a time."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.programs = ProgramCache()
        self.arena = Arena()
        self._twisters = Twisters()

    def run(self, nodes: list[Node], room: int | None = None) -> int:
        with self.lock:
            # Another thread may have run some of them while this one waited for the lock.
            nodes[:] = [node for node in nodes if node.args is not None]
            with KernelWarnings():
                return self._run(bind(nodes), room) if nodes else 0

    def replay(self, prepared: Prepared, inputs: list[torch.Tensor], params: list[Any]) -> list[torch.Tensor]:
        with self.lock, KernelWarnings():
            if prepared.ready is None:
                prepared.ready = self.programs.find(prepared)
            program = prepared.ready
            try:
                placement = program.placement(prepared)
                with concretely(), self.arena.run(placement):
                    results = program.run(inputs, params, self._twisters.at, placement)
            except Interrupted as stop:
                self._twisters.forget()
                if stop.index == len(prepared.nodes) or not isinstance(stop.error, Exception):
                    raise stop.error from None
                failure = _explain(prepared.nodes[stop.index], stop.error)
                failure.__cause__ = stop.error.with_traceback(None)
            else:
                counters.ops_executed += len(prepared.nodes)
                counters.epoch += 1
                return results
        inputs.clear()
        raise failure

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        with concretely():
            return _copy(tensor)

    def download(self, buffer: torch.Tensor) -> torch.Tensor:
        with concretely():
            return _copy(buffer)

    def generator(self, draw: Draw) -> torch.Generator:
        return self._twisters.at(draw)

    def trim(self) -> None:
        with self.lock:
            self.arena.trim()

    def _run(self, task: Task, room: int | None) -> int:
        if room is not None:
            _refuse_beyond(room, task)
        program = self.programs.find(task)
        try:
            placement = program.placement(task)
            with concretely(), self.arena.run(placement):
                results = program.run(task.inputs, task.params, self._twisters.at, placement)
        except Interrupted as stop:
            self._twisters.forget()
            _salvage(task, stop)
            if stop.index == len(task.nodes) or not isinstance(stop.error, Exception):
                raise stop.error from None
            failed = task.nodes[stop.index]
            failure = _explain(failed, stop.error)
            # Tracebacks would keep the tensors of this run alive as long as the error.
            failure.__cause__ = stop.error.with_traceback(None)
            fail(failed, failure)
        else:
            for value, tensor in zip(task.outputs, results, strict=True):
                value.concrete = tensor
            for node in task.nodes:
                finish(node)
            counters.ops_executed += len(task.nodes)
            counters.epoch += 1
            return program.transient_bytes
        del task, failed, program
        raise failure


def _refuse_beyond(room: int, task: Task) -> None:
    expected = forecast(task)
    if expected.nbytes <= room:
        return
    largest = [
        f"    {bytes_text(nbytes)}  {node.op.name if node.op else 'an operation'} written at {node.site}"
        for nbytes, node in expected.held[:_LARGEST]
    ]
    raise MemoryLimitError(
        f"running {len(task.nodes)} recorded operation(s) would take {bytes_text(expected.nbytes)} at once, and "
        f"marid.settings.memory_limit leaves {bytes_text(max(room, 0))}; nothing was run\n"
        f"  read at {current_site()}\n"
        "  the largest results at the fullest moment:\n" + "\n".join(largest)
    )


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    # Strides are part of the value, overlapping ones (expand) included; conjugate and negative bits are resolved.
    if tensor.layout is not torch.strided:
        return tensor.clone()
    tensor = tensor.resolve_conj().resolve_neg()
    if torch._C._TensorBase.is_contiguous(tensor):
        return tensor.clone()
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() == 0 or span == tensor.numel():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)
    block = tensor.as_strided((span,), (1,)).clone()
    return block.as_strided(tensor.shape, tensor.stride(), 0)


def _salvage(task: Task, stop: Interrupted) -> None:
    """Keep what ran before a failure, so that nothing runs twice and nothing is lost."""
    for value, slot in task.slots.items():
        if value.concrete is None and slot in stop.tensors:
            value.concrete = stop.tensors[slot]
    for index, node in enumerate(task.nodes[: stop.index + 1]):
        mutates = node.op is not None and node.op.mutates
        if index < stop.index or (stop.finished and mutates):
            finish(node)
    counters.ops_executed += stop.index


@functools.cache
def _error_class(kind: type[Exception]) -> type[MaterializationError]:
    """A ``MaterializationError`` that is also the error the operation raised, for whoever catches that."""
    if issubclass(MaterializationError, kind):
        return MaterializationError
    try:
        return type(
            "MaterializationError", (MaterializationError, kind), {"__module__": MaterializationError.__module__}
        )
    except TypeError:  # the layouts of the two do not combine (OSError, UnicodeError)
        return MaterializationError


def _explain(node: Node, error: Exception) -> MaterializationError:
    written = f"written at {node.site}" if node.site is not None else "written at an unknown line"
    where = f" in module {node.scope.module_path!r}" if node.scope is not None and node.scope.module_path else ""
    return _error_class(type(error))(
        f"{node.op.name if node.op else 'an operation'} failed when it ran: {error}\n"
        f"  {written}{where}\n"
        f"  read at {current_site()}"
    )
