"""``LazyTensor``: the tensor a user holds; a handle on a value to come."""

from __future__ import annotations

import copy
from collections.abc import Generator
from typing import Any, Self

import numpy as np
import torch
from torch._C import _disabled_torch_function_impl
from torch.nn.parameter import UninitializedTensorMixin

from marid.frontend import capture, handles, serialize, storage_objects
from marid.frontend.engines import engine_of
from marid.frontend.handles import user_attributes
from marid.frontend.materialize import download, pending_nodes, read
from marid.frontend.printing import html_of, text_of
from marid.frontend.subclasses import as_class, is_parameter, user_class
from marid.frontend.uninitialized import converted
from marid.frontend.waits import awaited
from marid.graph.arguments import placed, values_in
from marid.graph.node import Node, Storage, Value, last_write
from marid.native import module
from marid.semantics.metadata import SemanticMetadata, metadata_of
from marid.semantics.tracebacks import folded
from marid.settings import settings

_SOURCE_NAME = "aten::alias"


class LazyTensor(torch.Tensor):
    """A tensor on ``remote_accelerator``: a promise that is kept when its value is read.

    Behaves like any ``torch.Tensor``; shape, dtype, strides and autograd are exact at once, and only reading a value
    (``item``, ``bool``, ``tolist``, ``numpy``, ``cpu``, control flow) runs what it depends on.
    """

    # No __slots__: moving a module swaps a parameter for its lazy counterpart in place, which needs equal layouts.
    _value: Value  # these two are in the C++ half of the tensor (native/handle.h)
    _storage: Storage | None

    __torch_function__ = _disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self:
        raise TypeError(
            "LazyTensor is not constructed directly; make a tensor on the device "
            f"(torch.zeros(2, device='{handles.DEVICE_TYPE}')) or use LazyTensor.lift(cpu_tensor)"
        )

    # --- what it stands for ---

    @property
    def id(self) -> str:
        """An identifier, unique in this process, of the operation that makes this value."""
        node = self._value.node
        return f"lt_{self.device.index}_{node.seq}"

    @property
    def operation(self) -> str:
        """The operation that made or last wrote this value, as ``aten::name``."""
        op = self._operation_node().op
        return op.name if op is not None else _SOURCE_NAME

    @property
    def inputs(self) -> list[Any]:
        """The operation's arguments; empty once it has run. Tensors among them are for reading, not for writing to."""
        args = self._operation_node().args or ()
        return [placed(arg, _for_user) for arg in args]

    @property
    def kwargs(self) -> dict[str, Any]:
        """The operation's keyword arguments; empty once it has run."""
        return {name: placed(arg, _for_user) for name, arg in self._operation_node().kwargs or ()}

    @property
    def metadata(self) -> SemanticMetadata:
        """Module path, phase, source line and geometry of the operation."""
        assert self._value.spec is not None
        return metadata_of(self._operation_node(), self._value.spec)

    @property
    def materialized(self) -> bool:
        """Whether the value exists: nothing has to run for a read."""
        return not pending_nodes(self)

    def is_materialized(self) -> bool:
        """Same as ``materialized``."""
        return self.materialized

    @property
    def concrete_value(self) -> torch.Tensor | None:
        """A CPU copy of the value if it exists, else None. Runs nothing."""
        return download(self, "concrete_value") if self.materialized else None

    @folded
    def materialize(self) -> torch.Tensor:
        """Run what this value needs; a CPU copy of it, without gradient."""
        return download(self, "materialize()")

    def __await__(self) -> Generator[Any, None, LazyTensor]:
        """Run what this value needs, while the event loop goes on; gives the tensor, and raises what reading raises."""
        return awaited(self)

    @staticmethod
    def lift(tensor: torch.Tensor) -> LazyTensor:
        """A lazy tensor with the value of a CPU tensor; a lazy one is returned as it is. No gradient flows back."""
        return tensor if isinstance(tensor, LazyTensor) else capture.lift(tensor)

    def _operation_node(self) -> Node:
        write = last_write(self._storage)
        if write is not None and write.args is not None and self._value in values_in(write.args[:1]):
            return write
        return self._value.node

    # --- printing ---

    @folded
    def _repr_html_(self) -> str:
        return html_of(self)

    def __repr__(self, *, tensor_contents: str | None = None) -> str:
        return text_of(self, False, tensor_contents)

    @folded
    def __str__(self) -> str:
        return text_of(self, True)

    @folded
    def __format__(self, spec: str) -> str:
        if self.dim() or isinstance(self, torch.nn.Parameter):
            return object.__format__(self, spec)
        if not spec and settings.print_materialize is False:
            return str(self)
        return self.item().__format__(spec)

    # --- values for Python and numpy ---

    @folded
    def tolist(self) -> Any:
        """The values as nested lists of Python numbers."""
        found = module.readable(self)
        return (read(self, "tolist()") if found is None else found).tolist()

    @folded
    def numpy(self, *, force: bool = False) -> np.ndarray:
        """A copy of the values as an array. Raises ``RuntimeError`` where gradients are recorded, unless ``force``."""
        if self.requires_grad and torch.is_grad_enabled() and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        for set_bit, name, resolve in ((self.is_conj(), "conjugate", "conj"), (self.is_neg(), "negative", "neg")):
            if set_bit and not force:
                raise RuntimeError(
                    f"Can't call numpy() on Tensor that has {name} bit set. Use tensor.resolve_{resolve}().numpy() "
                    "instead."
                )
        found = module.readable(self)
        copied = download(self, "numpy()") if found is None else engine_of(self.device.index).download(found)
        return copied.numpy()

    @folded
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("a lazy tensor's values must be copied to become an array; do not ask for copy=False")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    @folded
    def __dlpack__(self, **_: Any) -> Any:
        raise BufferError(f"a {handles.DEVICE_TYPE} tensor has no memory to share; use tensor.cpu()")

    # --- memory and identity ---

    def untyped_storage(self) -> torch.UntypedStorage:
        """The storage, for its identity and size; it holds no data in this process."""
        return storage_objects.untyped_storage(self)

    def _typed_storage(self) -> torch.TypedStorage:
        return torch.TypedStorage(wrap_storage=self.untyped_storage(), dtype=self.dtype, _internal=True)

    def storage(self) -> torch.TypedStorage:
        """The typed storage (deprecated in PyTorch)."""
        return self._typed_storage()

    def data_ptr(self) -> int:
        """A made-up address: equal for the same place in the same memory, never readable."""
        if self.numel() == 0:
            return 0
        return self.untyped_storage().data_ptr() + int(self.storage_offset()) * self.element_size()

    def is_shared(self) -> bool:
        """False: device memory is not in shared memory."""
        return False

    def share_memory_(self) -> LazyTensor:
        """Nothing to do, as for other devices."""
        return self

    def as_subclass(self, cls: Any) -> Any:
        """As of every tensor. PyTorch calls it for what an uninitialised parameter becomes when it is moved."""
        return converted(self, cls) if issubclass(cls, UninitializedTensorMixin) else as_class(self, cls, LazyTensor)

    @folded
    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if is_parameter(self):
            return self._copied_parameter(memo)
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the "
                "moment.  If you were attempting to deepcopy a module, this may be because of a torch.nn.utils."
                "weight_norm usage, see https://github.com/pytorch/pytorch/pull/103001"
            )
        if id(self) in memo:
            return memo[id(self)]
        with torch.no_grad():
            made: torch.Tensor = storage_objects.copy_with_aliases(self, memo)
            made = made.conj_physical() if self.is_conj() else made
            made = made.neg() if self.is_neg() else made
        if self.requires_grad:
            made.requires_grad_()
        made.__class__ = type(self)
        memo[id(self)] = made
        if self.grad is not None:
            made.grad = copy.deepcopy(self.grad, memo)
        made.__dict__.update(copy.deepcopy(user_attributes(self), memo))
        return made

    def _copied_parameter(self, memo: dict[int, Any]) -> torch.Tensor:
        # As `Parameter.__deepcopy__`: without gradient and attributes, and in memory of its own.
        if id(self) not in memo:
            data = self.data.clone(memory_format=torch.preserve_format)
            cls: Any = user_class(self)
            memo[id(self)] = (torch.nn.Parameter if cls is torch.Tensor else cls)(data, self.requires_grad)
        return memo[id(self)]

    def __copy__(self) -> torch.Tensor:
        made: torch.Tensor = self.data
        if is_parameter(self):
            made = torch.nn.Parameter(made, self.requires_grad)
        else:
            torch.autograd.graph.increment_version(made)  # as PyTorch's, which puts the storage into a new tensor
            made.requires_grad_(self.requires_grad)
            made.__class__ = type(self)
        made.__dict__.update(user_attributes(self))
        return made

    @folded
    def __reduce_ex__(self, _protocol: Any) -> Any:
        return serialize.reduce(self)


def _for_user(value: Value) -> Any:
    assert value.spec is not None
    return handles.wrap(value, value.spec)


handles.bind_handle_class(LazyTensor)
