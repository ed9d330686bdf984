"""The device as PyTorch knows it from the import on: its name, and the module ``torch.remote_accelerator``.

Nothing of PyTorch is changed (``guest.py``) before the device is first used: PyTorch calls ``_lazy_init`` of that
module wherever it is given a device of this type. Where nobody has imported ``marid`` by then (``marid_autoload.py``),
the rest of it, all above this file, is loaded at that time too.
"""

from __future__ import annotations

import importlib
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import backend_registration

from marid import built
from marid.uninterrupted import Uninterrupted

DEVICE_TYPE = "remote_accelerator"

_LATE = set(
    """
    Event Stream current_device current_stream default_stream device empty_cache get_amp_supported_dtype
    get_device_name get_device_properties get_rng_state get_rng_state_all initial_seed is_bf16_supported manual_seed
    max_memory_allocated max_memory_reserved memory_allocated memory_reserved memory_stats reset_peak_memory_stats seed
    seed_all set_device set_rng_state set_rng_state_all stream synchronize
    """.split()
)
"""What the module has from ``frontend/device.py``, which is loaded when one of these is first asked for."""


class _DeviceModule(types.ModuleType):
    """``torch.remote_accelerator``."""

    _initialized = False  # checkpointing keeps the generator's state only of initialised devices

    def __getattr__(self, name: str) -> Any:
        if name not in _LATE:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        with Uninterrupted():
            _load()
        return self.__dict__[name]

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_LATE})


device_module = _DeviceModule(f"torch.{DEVICE_TYPE}", "The lazy device of marid.")
_keep_alive: list[Any] = []
_seed: int | None = None
_use: Callable[[], None] | None = None


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    """For where the C++ half is not built yet."""

    def is_available(self) -> bool:
        return True

    def has_primary_context(self, dev_id: int) -> bool:  # noqa: ARG002
        return device_module._initialized

    def is_built(self) -> bool:
        return True


class _Operators(torch._ops._OpNamespace):
    """``torch.ops.marid``, whose operators for everybody are defined when one is first asked for."""

    def __getattr__(self, name: str) -> Any:
        for module in ("linear_activation", "rwkv7_operators", "quantized_operators"):
            importlib.import_module(f"marid.frontend.{module}")
        return super().__getattr__(name)


def register() -> None:
    """Make the device known to PyTorch, unless it is.

    Raises ``RuntimeError`` when another package has already taken PyTorch's one place for a foreign device.
    """
    if "_lazy_init" in device_module.__dict__:
        return
    taken = torch._C._get_privateuse1_backend_name()
    if taken not in ("privateuseone", DEVICE_TYPE):
        raise RuntimeError(
            f"PyTorch has room for one foreign device, and {taken!r} is registered already; "
            "import marid in a process without that backend"
        )
    torch.utils.rename_privateuse1_backend(DEVICE_TYPE)  # pyright: ignore[reportPrivateImportUsage]
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    device_module.__dict__.update(
        device_count=_device_count,
        is_available=_is_available,
        is_initialized=is_used,
        init=first_use,
        manual_seed_all=_manual_seed_all,
        _is_in_bad_fork=lambda: False,  # a child has an engine of its own: see frontend/engines.py
        _lazy_init=first_use,
    )
    torch._register_device_module(DEVICE_TYPE, device_module)
    setattr(torch.ops, "marid", _Operators("marid"))  # noqa: B010
    path = built.library_path()
    if path.exists():
        built.load(path).register_hooks()
    else:
        _keep_alive.append(_Hooks())
        torch._C._acc.register_python_privateuseone_hook(_keep_alive[-1])
    torch.serialization.register_package(5, location_of, _restored)
    if torch.distributed.is_available() and torch.distributed.is_gloo_available():
        _offer_gloo()


GROUPS = "marid_gloo"
"""The backend of groups that are made without one in a process that has not used the device."""


def _offer_gloo() -> None:
    """Let there be a backend for the device. PyTorch takes a registered device for the accelerator of every process,
    and makes a group without a named backend for that one alone or, where it knows no backend for it, none."""
    from torch.distributed.distributed_c10d import Backend

    Backend.register_backend(GROUPS, _gloo, devices=[DEVICE_TYPE])


def _gloo(store: Any, rank: int, size: int, timeout: Any) -> Any:
    """Gloo, for the CPU too: a group is asked for the backend of the tensors that it is given. The group is not among
    the arguments, but the caller has it."""
    from torch.distributed import ProcessGroup, ProcessGroupGloo  # pyright: ignore[reportPrivateImportUsage]

    made = ProcessGroupGloo(store, rank, size, timeout=timeout)
    group = sys._getframe(1).f_locals.get("pg")
    if isinstance(group, ProcessGroup):
        group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, made)
    return made


# Programs that take whatever ``torch.accelerator`` offers, and PyTorch where it looks after every accelerator that is
# there, do not ask for a lazy device: for them there is none in a process that has not used it.
_ASK_FOR_ANY = ("torch.accelerator", "torch.random")


def _is_available() -> bool:
    """Whether the device can be used."""
    return device_module._initialized or sys._getframe(1).f_globals.get("__name__") not in _ASK_FOR_ANY


def _device_count() -> int:
    """How many devices there are."""
    if not is_used() and sys._getframe(1).f_globals.get("__name__") in _ASK_FOR_ANY:
        return 0
    return importlib.import_module("marid.frontend.handles").device_count


def is_used() -> bool:
    """Whether a tensor of the device has been made, or is about to be."""
    return device_module._initialized


def when_used(use: Callable[[], None]) -> None:
    """Call this at the first use, and at the next one after an end of it."""
    global _use
    _use = use


_first_use = threading.RLock()


def first_use() -> None:
    """The device is about to be used: let PyTorch be changed as that needs."""
    with _first_use:  # the first use of another thread waits until this one's is done
        if not device_module._initialized:
            with Uninterrupted():  # what is half loaded, or half done, cannot be gone on with
                _load()
                assert _use is not None
                _use()


def _load() -> None:
    global _seed
    importlib.import_module("marid.guest")  # which says what to call at the first use
    names = importlib.import_module("marid.frontend.device").names()
    if "set_device" not in device_module.__dict__:
        device_module.__dict__.update(names)
        if _seed is not None:
            names["manual_seed_all"](_seed)
            _seed = None


def _manual_seed_all(seed: int) -> None:
    """Seed the devices once they are there."""
    global _seed
    _seed = int(seed)


# --- files -----------------------------------------------------------------------------------------------------------


def location_of(storage: Any) -> str | None:
    return getattr(storage, "_marid_location", None)


def _restored(storage: Any, location: str) -> Any:
    if not location.startswith(DEVICE_TYPE):
        return None
    first_use()
    return importlib.import_module("marid.frontend.serialize").restore(storage, location)
