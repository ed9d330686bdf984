"""Names and roles of what a saved program works on: those of modules and optimizers, else the variable's."""

from __future__ import annotations

import re
from typing import Any

import torch

from marid.frontend import handles
from marid.replay.reachable import Reached


class Names:
    """Names of tensors, each given once. Where one module has all parameters, its names are those of its
    ``state_dict``, else the variable's name stands before them; so for optimizers, behind "optimizer"."""

    def __init__(self, reached: Reached) -> None:
        self._reached = reached
        self._known: dict[int, tuple[str, str]] = {}
        self._taken: set[str] = set()
        found = [one for one in reached.seen.values() if isinstance(one, torch.nn.Module)]
        inner = {id(child) for module in found for child in module.children()}
        whole = [one for one in found if id(one) not in inner and one.state_dict(keep_vars=True)]
        self._modules = [(self._prefix(one) if len(whole) > 1 else "", one) for one in whole]
        for prefix, module in self._modules:
            for name, tensor in module.named_parameters():
                self._known.setdefault(id(tensor), (prefix + name, "parameter"))
            for name, tensor in module.named_buffers():
                self._known.setdefault(id(tensor), (prefix + name, "buffer"))
        for optimizer in reached.optimizers:
            prefix = self._prefix(optimizer) if len(reached.optimizers) > 1 else "optimizer."
            self._name_state(prefix, optimizer)

    def of(self, tensor: Any) -> tuple[str, str]:
        """Name and role of a tensor of the state."""
        known = self._known.get(id(tensor))
        name, role = known or (self._path(tensor), "tensor")
        return self.unique(name), role

    def unique(self, name: str) -> str:
        """The name, with a number if it is taken."""
        found, count = name, 1
        while found in self._taken:
            count += 1
            found = f"{name}_{count}"
        self._taken.add(found)
        return found

    def siblings(self, used: dict[int, str]) -> dict[str, Any]:
        """The other entries of the ``state_dict`` of modules of which a tensor is ``used``, by name: a tensor, or the
        name under which ``used`` has it."""
        more: dict[str, Any] = {}
        for prefix, module in self._modules:
            entries = module.state_dict(keep_vars=True)
            if any(id(tensor) in used for tensor in entries.values()):
                for key, tensor in entries.items():
                    name = prefix + key
                    if handles.is_lazy(tensor) and used.get(id(tensor)) != name:
                        more[name] = used.get(id(tensor), tensor)
        return more

    def _name_state(self, prefix: str, optimizer: torch.optim.Optimizer) -> None:
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        for index, parameter in enumerate(parameters):
            of = self._known.get(id(parameter), (str(index), ""))[0]
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    self._known.setdefault(id(value), (f"{prefix}{of}.{key}", "optimizer state"))
        for index, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if isinstance(value, torch.Tensor):
                    self._known.setdefault(id(value), (f"{prefix}{index}.{key}", "optimizer state"))

    def _prefix(self, thing: Any) -> str:
        return f"{self._path(thing)}."

    def _path(self, thing: Any) -> str:
        """The way to it as a name: ``Trainer.models['a']`` is ``Trainer.models.a``."""
        path = self._reached.paths.get(id(thing), "tensor")
        return re.sub(r"[^\w.]+", ".", path).strip(".")[:200] or "tensor"
