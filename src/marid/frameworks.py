"""Frameworks that choose a device by a list of their own, and would take the CPU.

*Lightning* puts the model of an accelerator that it does not know on the CPU, and gives it autocast of CUDA. So beside
an entry in its registries, the methods that decide this are replaced, for this accelerator only. *Accelerate*, and
with it the ``Trainer`` of transformers, is told the device by an environment variable.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from marid.frontend import handles
from marid.imports import after_loading, on_import

NAME = "marid"
_TRAINER = "trainer.connectors.accelerator_connector", "_AcceleratorConnector", "AcceleratorRegistry"
_FABRIC = "connector", "_Connector", "ACCELERATOR_REGISTRY"
_PACKAGES = {
    "lightning.pytorch": _TRAINER,
    "lightning.fabric": _FABRIC,
    "pytorch_lightning": _TRAINER,
    "lightning_fabric": _FABRIC,
}


def choose_the_device() -> None:
    """Let frameworks that a script imports from now on take the device where the script names none."""
    os.environ.setdefault("ACCELERATE_TORCH_DEVICE", handles.DEVICE_TYPE)
    packages = {f"{package}.{module}": package for package, (module, *_) in _PACKAGES.items()}
    on_import(packages, lambda spec: after_loading(spec, functools.partial(_register_with, packages[spec.name])))


def register_with_lightning() -> None:
    """Add the accelerator to every Lightning that is installed. Raises ``ImportError`` where none is."""
    found = [package for package in _PACKAGES if find_spec(package.partition(".")[0]) is not None]
    if not found:
        raise ImportError("marid.lightning needs Lightning: pip install 'marid[lightning]'")
    for package in found:
        importlib.import_module(f"{package}.{_PACKAGES[package][0]}")
        _register_with(package)


def _register_with(package: str) -> None:
    module, name, registry = _PACKAGES[package]
    accelerators = importlib.import_module(f"{package}.accelerators")
    known = getattr(accelerators, registry)
    if NAME in known:
        return
    made = _accelerator(accelerators.Accelerator)
    known.register(NAME, made, description="The lazy device of marid")
    connector = getattr(sys.modules[f"{package}.{module}"], name)
    strategies = importlib.import_module(f"{package}.strategies")
    precision = importlib.import_module(f"{package}.plugins.precision")

    def strategy(choose: Callable[[Any], Any], self: Any) -> Any:
        alone = isinstance(self.accelerator, made) and len(self._parallel_devices) == 1 and self._num_nodes_flag == 1
        return strategies.SingleDeviceStrategy(device=self._parallel_devices[0]) if alone else choose(self)

    def plugin(choose: Callable[[Any], Any], self: Any) -> Any:
        chosen = choose(self)
        if isinstance(self.accelerator, made) and type(chosen) is precision.MixedPrecision:
            scaler = None if chosen.scaler is None else torch.amp.GradScaler(handles.DEVICE_TYPE)
            chosen = precision.MixedPrecision(chosen.precision, handles.DEVICE_TYPE, scaler)
        return chosen

    def automatic(choose: Callable[[], str]) -> str:
        return NAME if torch.get_default_device().type == handles.DEVICE_TYPE else choose()

    _replace(connector, "_choose_strategy", strategy)
    _replace(connector, "_check_and_init_precision", plugin)
    connector._choose_auto_accelerator = staticmethod(functools.partial(automatic, connector._choose_auto_accelerator))


def _replace(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    before = getattr(owner, name)

    @functools.wraps(before)
    def replaced(self: Any) -> Any:
        return replacement(before, self)

    setattr(owner, name, replaced)


def _accelerator(base: type) -> type:
    """The class of the accelerator, for one package's base."""

    class MaridAccelerator(base):
        """The lazy device of Marid."""

        def setup_device(self, device: torch.device) -> None:
            if device.type != handles.DEVICE_TYPE:
                raise ValueError(f"the device should be {handles.DEVICE_TYPE}, but is {device}")
            getattr(torch, handles.DEVICE_TYPE).set_device(device)

        def teardown(self) -> None:
            """Nothing is kept."""

        def get_device_stats(self, device: Any) -> dict[str, Any]:
            return getattr(torch, handles.DEVICE_TYPE).memory_stats(device)

        @staticmethod
        def parse_devices(devices: Any) -> list[int]:
            """Indices, from a number of devices or a list of indices."""
            if isinstance(devices, (list, tuple)):
                return [int(index) for index in devices]
            count = int(devices)
            return list(range(handles.device_count if count == -1 else count))

        @staticmethod
        def get_parallel_devices(devices: list[int]) -> list[torch.device]:
            return [torch.device(handles.DEVICE_TYPE, index) for index in devices]

        @staticmethod
        def auto_device_count() -> int:
            return 1  # the others are this machine as well

        @staticmethod
        def is_available() -> bool:
            return True

        @staticmethod
        def name() -> str:
            return NAME

    return MaridAccelerator
