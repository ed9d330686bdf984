"""Collectives of ``torch.distributed`` on tensors of the device: the group's backend for the CPU does them.

Gloo reads and writes memory, on threads of its own, and knows nothing of what is recorded. So it is given snapshots on
the host, is waited for, and what it has written is recorded as a write. Its ranks are processes; devices of one
process reduce among themselves through ``marid.process_group``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from marid.frontend import handles
from marid.frontend.calls import unsupported
from marid.frontend.materialize import download
from marid.frontend.record import Recorder, special
from marid.frontend.special import handle_for

GLOO = "gloo"


def _on_the_host(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[int, Any]]:
    """What the operator returned, having been waited for, and the snapshots that it was given, by tensor."""
    given: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def snapshot(thing: Any) -> Any:
        if not handles.is_lazy(thing):
            return thing
        if id(thing) not in given:
            given[id(thing)] = thing, download(thing, recorder.op.name).contiguous()
        return given[id(thing)][1]

    args, kwargs = tree_map(snapshot, (args, kwargs))
    returned = recorder.func(*args, **kwargs)
    work = returned[-1] if isinstance(returned, tuple) else returned
    if isinstance(work, torch.ScriptObject):
        distributed = torch._C._distributed_c10d
        distributed.Work.unbox(work).wait()
        if recorder.facts.waited_once:
            returned = distributed.Work.boxed(distributed.FakeWork())  # one that is done
    return returned, given


@special("reads")
def _read(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _on_the_host(recorder, args, kwargs)[0]


@special("refused")
def _refuse(recorder: Recorder, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    raise unsupported(recorder.op.name, "a message is received from whoever sends one")


@special("writes")
def _written(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    returned, given = _on_the_host(recorder, args, kwargs)

    def write(thing: Any) -> Any:
        if id(thing) in given:
            tensor, snapshot = given[id(thing)]
            tensor.copy_(snapshot)
        return thing

    tree_map(write, args[0])
    return (args[0], returned[-1]) if isinstance(returned, tuple) else returned


@special("returns")
def _returned(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A functional collective: it returns tensors that are to be waited for, new ones or those that it has written."""
    returned, given = _on_the_host(recorder, args, kwargs)
    index = next(tensor._value.spec.device for tensor, _ in given.values())

    def on_the_device(tensor: torch.Tensor) -> Any:
        torch.ops._c10d_functional.wait_tensor.default(tensor)
        for written, snapshot in given.values():
            if snapshot is tensor:
                return written.copy_(snapshot)
        return handle_for(tensor, index)

    return tree_map(on_the_device, returned)


@special("waits")
def _has_been_waited_for(_recorder: Recorder, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    return args[0]


# --- groups ----------------------------------------------------------------------------------------------------------


def for_device_and_cpu(initialise: Callable[..., Any]) -> Callable[..., Any]:
    """``BackendConfig.__init__``. Groups of gloo are for both: the CPU's backend does the work of the device."""

    @functools.wraps(initialise)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        devices = "cpu", handles.DEVICE_TYPE
        if GLOO in map(self.device_backend_map.get, devices):
            for device in devices:
                self.device_backend_map.setdefault(device, GLOO)

    return wrapper


def drawing_as_on_the_cpu(supported: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """``is_rng_supported_mesh`` of ``DTensor``, which takes a device with a state of random numbers for one like CUDA,
    with Philox's state."""

    @functools.wraps(supported)
    def wrapper(device_mesh: Any) -> bool:
        return device_mesh.device_type != handles.DEVICE_TYPE and supported(device_mesh)

    return wrapper


# --- DistributedDataParallel -----------------------------------------------------------------------------------------


def telling_gradients_apart(initialise: Callable[..., Any]) -> Callable[..., Any]:
    """``DistributedDataParallel._ddp_init_helper``. Its reducer asks whether a gradient lies in a bucket already, by
    memory that handles of the device seem to share; so gradients get handles of their own before it looks."""

    @functools.wraps(initialise)
    def wrapper(self: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        for parameter in parameters:
            if handles.is_lazy(parameter):
                parameter.register_post_accumulate_grad_hook(_stand_alone)
        return initialise(self, parameters, *args, **kwargs)

    return wrapper


def _stand_alone(parameter: torch.Tensor) -> None:
    grad: Any = parameter.grad
    if handles.is_lazy(grad) and not grad.requires_grad:
        parameter.grad = handles.wrap(grad._value, grad._value.spec, handles.storage_of(grad), alone=True)
