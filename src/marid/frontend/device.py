"""The device: what ``torch.remote_accelerator`` has, and how modules, switches and loaders get along with it."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from marid import registration
from marid.execute.geometry import when_mispredicted
from marid.frontend import autocast, corrections, handles, random, script_modules, subclasses, uninitialized
from marid.frontend.engines import all_engines, engine_of
from marid.frontend.materialize import bytes_of, run_everything, wait_anyway
from marid.frontend.record import follow_switches
from marid.frontend.tensor import LazyTensor
from marid.graph.node import tell
from marid.native import module
from marid.report.stats import counters
from marid.semantics import scopes
from marid.semantics.tracebacks import folded

when_mispredicted(corrections.correct)


def give_devices() -> None:
    """Let PyTorch count the devices, for good; once per process. Before the first use there are none."""
    # Autograd counts devices in the first backward of a process, starts a thread for each, and with any refuses to run
    # in a fork. Ours needs none (frontend/backward.py). In a thread of its own nothing of the user's is on: no mode, no
    # transform.
    first_backward = threading.Thread(  # named: the numbers of threads without a name are the user's
        target=lambda: torch.ones((), device="cpu", requires_grad=True).backward(), name="marid-first-backward"
    )
    first_backward.start()
    first_backward.join()
    module.register_hooks()
    module.set_device_count(handles.device_count)


# What kernels ask for when they run, and set with these functions of ``torch._C``.
SWITCHES = (
    "_set_default_dtype",
    "_set_default_tensor_type",
    "_set_deterministic_algorithms",
    "_set_deterministic_fill_uninitialized_memory",
    "_set_float32_matmul_precision",
    "_set_fp32_precision_setter",
    "_set_mkldnn_deterministic",
    "_set_mkldnn_enabled",
    "_set_nnpack_enabled",
    "set_num_threads",
)


# Of those that are often set to what they are.
_NOW = {"_set_default_dtype": torch.get_default_dtype, "set_num_threads": torch.get_num_threads}


def running_everything_before(switch: Callable[..., Any]) -> Callable[..., Any]:
    """``switch``, which is one of these, or something else that changes what recorded calls would do."""
    owner = os.getpid()
    now = _NOW.get(switch.__name__)

    @folded
    @functools.wraps(switch)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        tapes = [handles.tape(index) for index in range(handles.device_count)]
        changes = now is None or args != (now(),)
        if changes and os.getpid() == owner:  # what is pending in a fork is its parent's business
            started = time.perf_counter()
            pending = [tape for tape in tapes if tape.pending()]
            for tape in pending:
                run_everything(tape, wait=False)  # a failure is raised where its value is read
            if wait_anyway() or pending:
                reason = f"{switch.__name__.removeprefix('_')}()"
                counters.count_sync(scopes.current_site(), reason, time.perf_counter() - started)
        result = switch(*args, **kwargs)
        follow_switches()
        return result

    return wrapper


def stacked(batch: list[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:  # noqa: ARG001
    """What a ``DataLoader`` makes of tensors of the device."""
    return torch.stack(batch)


# PyTorch moves a parameter between devices in place only where tensors of both have the same C++ type. Without that,
# each module gets a new parameter: tied weights come apart, and optimizers keep the old ones.


def keeping(move: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
    """``Module._apply``, for which parameters stay the same objects."""

    @folded
    @functools.wraps(move)
    def apply(self: torch.nn.Module, fn: Any, recurse: bool = True) -> torch.nn.Module:
        if isinstance(self, torch.jit.ScriptModule):  # whose parameters are C++'s, and set anew
            return move(self, script_modules.moving_parameters(self, fn), recurse)
        if recurse:  # first, as PyTorch does, and with the caller's function
            for module in self.children():
                module._apply(fn)
        names = {id(one): name for name, one in self._parameters.items() if one is not None}
        kept: dict[str, tuple[Any, ...]] = {}

        def convert(tensor: Any) -> torch.Tensor:
            if is_lazy(tensor):
                return uninitialized.moved(tensor, fn)
            applied = fn(tensor)
            stays = isinstance(applied, LazyTensor) == isinstance(tensor, LazyTensor)
            if stays or id(tensor) not in names:
                return applied
            kept[names[id(tensor)]] = _belongings(tensor)
            return _moved_in_place(tensor, applied, fn)

        try:
            return move(self, convert, False)
        finally:
            for name, belongings in kept.items():
                _keep(self._parameters[name], *belongings)

    return apply


def _belongings(parameter: Any) -> tuple[int, Any, Any, dict[str, Any]]:
    """The address of a parameter, its two kinds of hooks, and its attributes."""
    hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    return parameter._cdata, *hooks, handles.user_attributes(parameter)


def _keep(parameter: Any, address: int, of_gradients: Any, after_accumulation: Any, attributes: dict[str, Any]) -> None:
    """Give a parameter that was moved the hooks and the attributes that it had."""
    if parameter._cdata == address:
        return
    holds_tensors = not isinstance(parameter, LazyTensor) and is_traceable_wrapper_subclass(parameter)
    if not holds_tensors:  # else its attributes are what was moved
        parameter.__dict__.update({name: value for name, value in attributes.items() if name != "_is_param"})
    # Hooks belong to what was swapped; the handles that remove them know their dictionaries.
    if of_gradients is not None or after_accumulation is not None:
        parameter._backward_hooks = of_gradients
        parameter._post_accumulate_grad_hooks = after_accumulation


def swapping(is_wrapper: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """What PyTorch's ``Module._apply`` asks before it swaps a parameter in place. One that was running at the first use
    is to do so; ours has done it."""

    @functools.wraps(is_wrapper)
    def wrapper(tensor: Any) -> bool:
        if not isinstance(tensor, LazyTensor):
            return is_wrapper(tensor)
        move = sys._getframe(1)
        if isinstance(move.f_locals.get("self"), torch.jit.ScriptModule):
            move.f_locals["param"]._is_param = True  # as script_modules.moving_parameters has it
            return False
        has_moved = move.f_locals.get("param") is tensor  # in another place of the module, as tied weights have
        return not has_moved and move.f_back is not None and move.f_back.f_code.co_filename != __file__

    return wrapper


def swapping_whoever_holds_them(swap: Callable[..., None]) -> Callable[..., None]:
    """``torch.utils.swap_tensors``, which refuses tensors that something else refers to: weakly, as recurrent layers to
    their weights, or by a view or a graph. A parameter that moves to the device, or from it, stays itself for modules
    that share it and for optimizers; graphs and views of before keep what it was."""

    @functools.wraps(swap)
    def wrapper(t1: Any, t2: Any) -> None:
        if isinstance(t1, LazyTensor) == isinstance(t2, LazyTensor):
            swap(t1, t2)
            return
        if uninitialized.is_lazy(t1) and t1.device.type == "cpu":  # the first parameter that moves to the device
            t1.data = t1.data.to(t2.dtype)
            uninitialized.on_device(t1, t2.device)
            return
        belongings = _belongings(t1)
        kind = subclasses.user_class(t1) if isinstance(t1, LazyTensor) else type(t1)
        if isinstance(t2, LazyTensor):
            t2.__class__ = subclasses.class_on_device(kind, LazyTensor)
        elif kind is not torch.Tensor:
            t2.__class__ = kind
        may_have_a_graph = t1.is_leaf and t1.requires_grad and t1._use_count() > 1
        torch._C._swap_tensor_impl(t1, t2)
        for name in ("__class__", "__dict__"):
            first, second = getattr(t1, name), getattr(t2, name)
            setattr(t1, name, second)
            setattr(t2, name, first)
        if may_have_a_graph:
            torch.autograd.graph.get_gradient_edge(t2).node.register_prehook(_refuse_gradient)
        _keep(t1, *belongings)

    return wrapper


def _refuse_gradient(_grads: Any) -> None:
    raise RuntimeError(
        "a gradient for a parameter as it was before its module moved to another device: move the module before the "
        "forward, or after the backward"
    )


def _moved_in_place(parameter: Any, applied: torch.Tensor, fn: Any) -> torch.Tensor:
    """Let ``parameter`` become ``applied``; the latter where something in C++ refers weakly to the parameter."""
    grad = parameter.grad
    parameter.grad = None
    try:
        torch.utils.swap_tensors(parameter, torch.nn.Parameter(applied, parameter.requires_grad))
    except RuntimeError:
        parameter.grad = grad
        return applied
    if grad is not None:
        with torch.no_grad():
            parameter.grad = fn(grad).requires_grad_(grad.requires_grad)
    return parameter


def memory_allocated(device: Any = None) -> int:
    """Bytes of the memory that living values of a device (default: the current one) hold now."""
    wait_anyway()
    return bytes_of([_index(device)])


def peak_memory() -> int:
    """The largest ``memory_allocated`` of all devices together seen at a run so far, in bytes."""
    counters.peak_memory = max(counters.peak_memory, bytes_of(range(handles.device_count)))
    return counters.peak_memory


def _figures(device: int, reset: int) -> tuple[int, int]:
    if reset:
        counters.peak_memory = 0
    return bytes_of([device]), peak_memory()


def give_figures() -> Callable[[], None]:
    """Let ``torch.accelerator`` know how much memory is in use. Returns what ends that."""
    module.set_figures(_figures)
    return lambda: module.set_figures(None)


def require_first_use() -> None:
    """Have PyTorch ask for the first use again."""
    module.require_init()


def _index(device: Any) -> int:
    if device is None:
        return handles.current_device()
    if isinstance(device, int):
        index = device
    else:
        given = torch.device(device).index
        index = handles.current_device() if given is None else given
    if not 0 <= index < handles.device_count:
        raise RuntimeError(
            f"{handles.DEVICE_TYPE}:{index} does not exist: {handles.device_count} device(s) are available"
        )
    return index


@folded
def synchronize(device: Any = None) -> None:
    """Run everything recorded on a device (default: the current one) that somebody still holds.

    Raises ``MaterializationError`` for the first operation that failed, after running all the others.
    """
    error = run_everything(handles.tape(_index(device)))
    try:
        if error is not None:
            tell(error)
            raise error
    finally:
        del error  # which has this frame in its traceback


@functools.cache
def names() -> dict[str, Any]:
    """What ``torch.remote_accelerator`` has, apart from what it has before this file is loaded."""

    @folded
    def set_device(device: Any) -> None:
        """Make a device current for this thread, which is a first use of it."""
        index = _index(device)
        registration.first_use()
        module.set_current_device(index)

    @contextlib.contextmanager
    def device(device: Any) -> Iterator[None]:
        """Make a device current inside."""
        before = handles.current_device()
        set_device(device)
        try:
            yield
        finally:
            set_device(before)

    @contextlib.contextmanager
    def stream(stream: torch.Stream | None) -> Iterator[None]:
        """Make the device of a stream current inside; None changes nothing."""
        with contextlib.nullcontext() if stream is None else device(stream.device):
            yield

    def manual_seed(seed: int) -> None:
        """Seed the current device's generator."""
        random.default_generator(handles.current_device()).manual_seed(int(seed))

    @folded
    def get_rng_state(device: Any = None) -> torch.Tensor:
        """The position of a device's generator: a CPU ``uint8`` tensor of 24 bytes."""
        return random.default_generator(_index(device)).get_state()

    @folded
    def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
        """Go back to a position from ``get_rng_state``."""
        random.default_generator(_index(device)).set_state(new_state)

    def device_name(device: Any = None) -> str:
        """What runs the programs of a device."""
        return f"marid {engine_of(_index(device)).name} ({_index(device)})"

    def reset_peak_memory_stats(device: Any = None) -> None:  # noqa: ARG001
        """Forget the peak."""
        counters.peak_memory = 0

    def memory_stats(device: Any = None) -> dict[str, int]:
        """``allocated_bytes.all.current`` and ``allocated_bytes.all.peak``."""
        return {
            "allocated_bytes.all.current": memory_allocated(device),
            "allocated_bytes.all.peak": peak_memory(),
        }

    def current_stream(device: Any = None) -> torch.Stream:
        """The current stream of a device; every stream of a device runs in program order."""
        return torch.accelerator.current_stream(torch.device(handles.DEVICE_TYPE, _index(device)))

    return {
        "current_device": handles.current_device,
        "set_device": set_device,
        "device": device,
        "synchronize": synchronize,
        "manual_seed": manual_seed,
        "manual_seed_all": random.seed_all,
        "seed": lambda: manual_seed(torch.Generator().seed()),
        "seed_all": lambda: random.seed_all(torch.Generator().seed()),
        "initial_seed": lambda: random.default_generator(handles.current_device()).initial_seed(),
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "get_rng_state_all": lambda: [get_rng_state(i) for i in range(handles.device_count)],
        "set_rng_state_all": lambda states: [set_rng_state(s, i) for i, s in enumerate(states)] and None,
        "get_amp_supported_dtype": autocast.supported_dtypes,
        "memory_allocated": memory_allocated,
        "memory_reserved": memory_allocated,
        "max_memory_allocated": lambda device=None: peak_memory(),  # noqa: ARG005
        "max_memory_reserved": lambda device=None: peak_memory(),  # noqa: ARG005
        "reset_peak_memory_stats": reset_peak_memory_stats,
        "memory_stats": memory_stats,
        "empty_cache": lambda: [engine.trim() for engine in all_engines()] and None,
        "get_device_name": device_name,
        "get_device_properties": lambda device=None: types.SimpleNamespace(
            name=device_name(device), index=_index(device)
        ),
        "is_bf16_supported": lambda: True,
        "Stream": _on_device(torch.Stream),
        "Event": _on_device(torch.Event),
        "current_stream": current_stream,
        "default_stream": current_stream,
        "stream": stream,
    }


def _on_device(kind: Any) -> Any:
    def make(device: Any = None, **kwargs: Any) -> Any:
        return kind(torch.device(handles.DEVICE_TYPE, _index(device)), **kwargs)

    make.__name__ = kind.__name__
    return make
