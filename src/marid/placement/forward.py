"""What the forward of a module does, found by running it on tensors without memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils.flop_counter import FlopCounterMode

from marid.errors import UnsupportedOperationError


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors among arguments or results, those in lists, tuples and dicts too."""
    return [leaf for leaf in _pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class Step:
    """One call of a function of PyTorch: the tensors that it reads and makes, by number, the layer whose parameters it
    reads, and its floating-point operations."""

    function: str
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    layer: str | None
    flops: int


@dataclass
class Forward:
    """The steps of a forward, in order, and what they are about.

    A *layer* is a module that owns parameters or buffers. ``layers`` has their bytes, in the order of their first use,
    ``first_use`` the place of the step that uses each first, ``trained`` the bytes of parameters that get gradients.

    Tensors have numbers: first the ``inputs`` that were given, then, in ``buffers``, those of layers. ``nbytes`` are
    the bytes of each, ``own_bytes`` those of its memory, which is 0 for a view; ``has_gradient`` says whether as many
    come back in the backward.
    """

    steps: list[Step] = field(default_factory=list)
    layers: dict[str, int] = field(default_factory=dict)
    first_use: dict[str, int] = field(default_factory=dict)
    trained: dict[str, int] = field(default_factory=dict)
    inputs: int = 0
    buffers: dict[int, str] = field(default_factory=dict)
    nbytes: list[int] = field(default_factory=list)
    own_bytes: list[int] = field(default_factory=list)
    has_gradient: list[bool] = field(default_factory=list)


def forward_of(model: nn.Module, examples: Sequence[Any], named: Mapping[str, Any], training: bool) -> Forward:
    """The forward of ``model`` for arguments like ``examples`` and ``named``; no memory is taken and nothing is run.

    Raises ``UnsupportedOperationError`` where it depends on values, and what the forward raises.
    """
    found = Forward()
    watch = _Watch(found)
    given = _pytree.tree_map_only(Tensor, lambda one: one.detach().to("meta"), (tuple(examples), dict(named)))
    for tensor in tensors_in(given):
        watch.number(tensor)
    found.inputs = len(found.nbytes)
    meta: dict[str, Tensor] = {}
    for name, buffer in model.named_buffers():
        meta[name] = torch.empty_like(buffer, device="meta")
        found.buffers[watch.number(meta[name])] = owner(name)
    for name, parameter in model.named_parameters():
        trains = training and parameter.requires_grad
        meta[name] = torch.empty_like(parameter, device="meta").requires_grad_(trains)
        watch.layers[id(meta[name])] = owner(name)
        if trains:
            found.trained[owner(name)] = found.trained.get(owner(name), 0) + _nbytes(parameter)
    try:
        with torch.set_grad_enabled(training), watch.counter, watch:
            torch.func.functional_call(model, meta, *given)
    except (NotImplementedError, RuntimeError) as error:
        if "meta" not in str(error):
            raise
        raise UnsupportedOperationError(
            f"marid.place() follows the forward of {type(model).__name__} on shapes alone, and it depends on values, "
            f"or on tensors that are no parameters or buffers of its modules: {error}"
        ) from error
    for name, tensor in meta.items():  # layers that nothing used come last
        found.layers[owner(name)] = found.layers.get(owner(name), 0) + _nbytes(tensor)
    return found


def owner(name: str) -> str:
    """The layer that a parameter or buffer of that name belongs to; "" is the model itself."""
    return name.rpartition(".")[0]


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize


class _Watch(TorchFunctionMode):
    """Notes each function that is called."""

    def __init__(self, found: Forward) -> None:
        super().__init__()
        self.layers: dict[int, str] = {}
        """Of parameters, by their identity."""
        self.counter = FlopCounterMode(display=False)
        self._found = found
        self._numbers: dict[int, int] = {}
        self._memory: set[int] = set()
        self._alive: list[Tensor] = []  # or another one could get the same identity

    def number(self, tensor: Tensor) -> int:
        """The number of a tensor, a new one if it has none."""
        number = self._numbers.get(id(tensor))
        if number is None:
            number = self._numbers[id(tensor)] = len(self._alive)
            self._alive.append(tensor)
            self._found.nbytes.append(_nbytes(tensor))
            memory = tensor.untyped_storage()._cdata
            self._found.own_bytes.append(0 if memory in self._memory else _nbytes(tensor))
            self._memory.add(memory)
            self._found.has_gradient.append(tensor.requires_grad)
        return number

    def _layer(self, tensor: Tensor) -> str | None:
        return self.layers.get(id(tensor), self.layers.get(id(tensor._base)))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.counter.get_total_flops()
        returned = func(*args, **(kwargs or {}))
        made = tensors_in(returned)
        if made:
            read = tensors_in((args, kwargs))
            layer = next((layer for one in read if (layer := self._layer(one)) is not None), None)
            reads = tuple(self.number(one) for one in read if self._layer(one) is None)
            for used in (layer, *(self._found.buffers.get(one) for one in reads)):
                if used is not None:
                    self._found.layers.setdefault(used, 0)
                    self._found.first_use.setdefault(used, len(self._found.steps))
            step = Step(
                getattr(func, "__name__", str(func)),
                reads,
                tuple(self.number(one) for one in made),
                layer,
                self.counter.get_total_flops() - before,
            )
            self._found.steps.append(step)
        return returned
