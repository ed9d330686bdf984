"""The device: registering ``remote_accelerator`` with PyTorch, and its module ``torch.remote_accelerator``."""

from __future__ import annotations

import contextlib
import functools
import os
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import backend_registration

from marid.execute.geometry import when_mispredicted
from marid.frontend import (
    autocast,
    convolutions,
    corrections,
    dynamo,
    factories,
    group_norm,
    handles,
    late,
    nested,
    overrides,
    random,
    recurrent,
    serialize,
    special,
    tuples,
    uninitialized,
)
from marid.frontend.engines import all_engines, engine_of
from marid.frontend.materialize import bytes_of, optimizer_stepped, run_everything, wait_anyway
from marid.frontend.record import follow_switches
from marid.frontend.tensor import LazyTensor
from marid.graph.node import tell
from marid.report.stats import counters
from marid.semantics import scopes

__all__ = ["memory_allocated", "peak_memory", "register"]


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return True

    def has_primary_context(self, dev_id: int) -> bool:  # noqa: ARG002
        return True

    def is_built(self) -> bool:
        return True


class _PythonGuard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        return torch._C._autograd.DeviceType.PrivateUse1


_keep_alive: list[Any] = [convolutions, group_norm, recurrent, special]  # importing them registers handlers and rules


def register() -> None:
    """Make the device known to PyTorch; once per process.

    Raises ``RuntimeError`` when another package has already taken PyTorch's one place for a foreign device.
    """
    taken = torch._C._get_privateuse1_backend_name()
    if taken not in ("privateuseone", handles.DEVICE_TYPE):
        raise RuntimeError(
            f"PyTorch has room for one foreign device, and {taken!r} is registered already; "
            "import marid in a process without that backend"
        )
    torch.utils.rename_privateuse1_backend(handles.DEVICE_TYPE)  # pyright: ignore[reportPrivateImportUsage]
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    torch._register_device_module(handles.DEVICE_TYPE, _module())
    hooks = _Hooks()
    _keep_alive.append(hooks)
    torch._C._acc.register_python_privateuseone_hook(hooks)
    if handles.library is None:
        guard = _PythonGuard()
        _keep_alive.append(guard)
        torch._C._acc.register_python_privateuseone_device_guard(guard)
    else:
        handles.library.marid_set_device_count(handles.device_count)
    factories.register()
    overrides.register()
    autocast.register()
    when_mispredicted(corrections.correct)
    serialize.install()
    tuples.install()
    scopes.install_hooks()
    register_optimizer_step_post_hook(optimizer_stepped)
    _allow_exact_type()
    _collate()
    _run_before_switches()
    uninitialized.install()
    nested.install()
    dynamo.install()
    late.install()
    _keep_parameters()


def _allow_exact_type() -> None:
    # Optimizers group parameters into foreach operators, and make_fx traces tensors, by exact type.
    from torch.fx.experimental import proxy_tensor
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    proxy_tensor.HANDLED_TYPES = (*proxy_tensor.HANDLED_TYPES, LazyTensor)
    modules: list[Any] = [optimizer, _foreach_utils]
    for module in modules:
        if LazyTensor not in module._foreach_supported_types:
            module._foreach_supported_types.append(LazyTensor)


# What kernels ask for when they run, and set with these functions of ``torch._C``.
_SWITCHES = (
    "_set_default_dtype",
    "_set_default_tensor_type",
    "_set_deterministic_algorithms",
    "_set_deterministic_fill_uninitialized_memory",
    "_set_float32_matmul_precision",
    "_set_mkldnn_enabled",
    "_set_nnpack_enabled",
    "set_num_threads",
)


def _run_before_switches() -> None:
    private: Any = torch._C
    for name in _SWITCHES:
        setattr(private, name, _running_everything_before(getattr(private, name)))
    torch.set_num_threads = private.set_num_threads


def _running_everything_before(switch: Callable[..., Any]) -> Callable[..., Any]:
    owner = os.getpid()

    @functools.wraps(switch)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        tapes = [handles.tape(index) for index in range(handles.device_count)]
        changes = args != (torch.get_default_dtype(),) and args != (torch.get_num_threads(),)
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


def _collate() -> None:
    # Workers of a DataLoader would stack into a storage in shared memory, which the device has not.
    from torch.utils.data._utils.collate import default_collate_fn_map

    default_collate_fn_map[LazyTensor] = _stacked


def _stacked(batch: list[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:  # noqa: ARG001
    return torch.stack(batch)


def _keep_parameters() -> None:
    # PyTorch moves a parameter between devices in place only where tensors of both have the same C++ type. Without
    # that, each module gets a new parameter: tied weights come apart, and optimizers keep the old ones.
    move = torch.nn.Module._apply

    @functools.wraps(move)
    def apply(self: torch.nn.Module, fn: Any, recurse: bool = True) -> torch.nn.Module:
        results: dict[int, torch.Tensor] = {}
        for parameter in self._parameters.values():
            if parameter is not None and not is_lazy(parameter):
                with torch.no_grad():
                    applied = fn(parameter)
                if (type(applied) is LazyTensor) != (type(parameter) is LazyTensor):
                    applied = _moved_in_place(parameter, applied, fn)
                results[id(parameter)] = applied

        def apply_once(tensor: Any) -> torch.Tensor:
            if is_lazy(tensor):
                return uninitialized.moved(tensor, fn)
            return results.pop(id(tensor)) if id(tensor) in results else fn(tensor)

        return move(self, apply_once, recurse)

    torch.nn.Module._apply = apply


def _moved_in_place(parameter: Any, applied: torch.Tensor, fn: Any) -> torch.Tensor:
    """Let ``parameter`` become ``applied``; the latter where an autograd graph still holds the parameter."""
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


def _module() -> types.ModuleType:
    module = types.ModuleType(f"torch.{handles.DEVICE_TYPE}", "The lazy device of marid.")

    def set_device(device: Any) -> None:
        """Make a device current for this thread."""
        index = _index(device)
        if handles.library is not None:
            handles.library.marid_set_current_device(index)

    @contextlib.contextmanager
    def device(device: Any) -> Iterator[None]:
        """Make a device current inside."""
        before = handles.current_device()
        set_device(device)
        try:
            yield
        finally:
            set_device(before)

    def manual_seed(seed: int) -> None:
        """Seed the current device's generator."""
        random.default_generator(handles.current_device()).manual_seed(int(seed))

    def get_rng_state(device: Any = None) -> torch.Tensor:
        """The position of a device's generator: a CPU ``uint8`` tensor of 24 bytes."""
        return random.default_generator(_index(device)).get_state()

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

    names = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_initialized": True,  # checkpointing keeps the generator's state only of initialised devices
        "init": lambda: None,
        "device_count": lambda: handles.device_count,
        "current_device": handles.current_device,
        "set_device": set_device,
        "device": device,
        "synchronize": synchronize,
        "_is_in_bad_fork": lambda: False,
        "manual_seed": manual_seed,
        "manual_seed_all": random.seed_all,
        "seed": lambda: manual_seed(torch.Generator().seed()),
        "seed_all": lambda: random.seed_all(torch.Generator().seed()),
        "initial_seed": lambda: random.default_generator(handles.current_device()).initial_seed(),
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "get_rng_state_all": lambda: [get_rng_state(i) for i in range(handles.device_count)],
        "set_rng_state_all": lambda states: [set_rng_state(s, i) for i, s in enumerate(states)] and None,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
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
        "stream": contextlib.nullcontext,
    }
    for name, value in names.items():
        setattr(module, name, value)
    return module


def _on_device(kind: Any) -> Any:
    def make(device: Any = None, **kwargs: Any) -> Any:
        return kind(torch.device(handles.DEVICE_TYPE, _index(device)), **kwargs)

    make.__name__ = kind.__name__
    return make
