"""Which operators a worker runs: PyTorch's on strided tensors, Marid's own, and those of modules it was told to import.

An operator is named ``namespace.name.overload``. It is admitted by its schema: arguments and results must be of kinds
that can be sent, so nothing that takes a storage, a stream, a file or an address is ever called; a few that have such
schemas all the same are refused by name. Nothing else of PyTorch can be named.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
from typing import Any

import torch

from marid.errors import WireError
from marid.graph.node import Operation
from marid.graph.operators import operation_of

__all__ = ["admit_namespace", "operator_name", "operator_named"]

_NAME = re.compile(r"[A-Za-z_]\w{0,63}\.[A-Za-z_]\w{0,127}\.[A-Za-z_]\w{0,127}", re.ASCII)

_ARGUMENTS = {
    *("Tensor", "Optional[Tensor]", "List[Tensor]", "List[Optional[Tensor]]", "Optional[List[Tensor]]"),
    *("number", "Optional[number]", "int", "Optional[int]", "float", "Optional[float]", "bool", "Optional[bool]"),
    *("str", "Optional[str]", "List[int]", "Optional[List[int]]", "List[float]", "Optional[List[float]]"),
    *("List[bool]", "List[number]", "SymInt", "Optional[SymInt]", "List[SymInt]", "Optional[List[SymInt]]"),
    *("ScalarType", "Optional[ScalarType]", "Layout", "Optional[Layout]", "MemoryFormat", "Optional[MemoryFormat]"),
    *("Device", "Optional[Device]", "Generator", "Optional[Generator]", "SymBool", "SymFloat"),
}
_RESULTS = {"Tensor", "Optional[Tensor]", "List[Tensor]", "number", "int", "float", "bool", "SymInt", "SymFloat"}

# Operators that reach files, layouts or libraries that a worker has no use for, by the beginnings of their names.
_REFUSED = (
    *("from_file", "set_.", "set_data", "_cudnn", "cudnn_", "_use_cudnn", "_cufft", "miopen_", "_mps", "_nnpack"),
    *(
        "_sparse",
        "sparse_",
        "to_sparse",
        "_to_sparse",
        "_coalesce",
        "resize_as_sparse",
        "_cslt",
        "_validate",
        "_nested",
    ),
    *("nested_", "to_mkldnn", "_mkldnn_", "mkldnn_reorder", "quantize_", "_empty_affine", "_empty_per_channel", "q_"),
    *("int_repr", "dequantize", "_make_per", "fbgemm_", "_wrapped_", "_dyn_quant", "_weight_int", "_convert_weight"),
    *(
        "_test",
        "_print",
        "_backward.",
        "requires_grad_",
        "retain_grad",
        "is_leaf",
        "output_nr",
        "_version",
        "_fw_primal",
    ),
    *("_make_dual", "_unpack_dual", "_pin_memory", "pin_memory", "record_stream", "_copy_from", "_lazy_clone"),
    *("_flash_attention", "_efficient_attention", "_propagate_xla", "_sync.", "_resize_output", "_reshape_from_tensor"),
    "_has_compatible_shallow",
)

_namespaces = {"aten", "marid", "torch_nn"}
_HOMES = {"torch_nn": "torch.nn.modules.linear_cross_entropy"}
"""Modules of PyTorch that define operators when they are imported, which PyTorch does when it needs them."""


def admit_namespace(name: str) -> None:
    """Let the operators of ``torch.ops.<name>`` be named."""
    _namespaces.add(name)
    operator_named.cache_clear()


def operator_name(func: Any) -> str:
    """The name that an operator overload travels by."""
    return str(func)


@functools.lru_cache(16384)
def operator_named(name: str) -> Operation:
    """The operation of that name, always the same object. Raises ``WireError`` for one that is not admitted."""
    if not _NAME.fullmatch(name):
        raise WireError("an operator's name is not of the form namespace.name.overload")
    namespace, base, overload = name.split(".")
    if namespace not in _namespaces:
        raise WireError(f"operators of {namespace!r} are not admitted")
    if namespace in _HOMES and importlib.util.find_spec(_HOMES[namespace]) is not None:
        importlib.import_module(_HOMES[namespace])
    if namespace == "aten" and f"{base}.{overload}".startswith(_REFUSED):
        raise WireError(f"operator {name} is not admitted")
    if overload.startswith("__") or not torch._C._dispatch_has_kernel(_qualified(namespace, base, overload)):
        raise WireError(f"there is no operator {name}")
    func = getattr(getattr(getattr(torch.ops, namespace), base), overload, None)
    if not isinstance(func, torch._ops.OpOverload):
        raise WireError(f"there is no operator {name}")
    unfit = [a.name for a in func._schema.arguments if str(a.type) not in _ARGUMENTS]
    if unfit or any(str(r.type) not in _RESULTS for r in func._schema.returns):
        raise WireError(f"operator {name} takes or returns what cannot be sent")
    return operation_of(func)


def _qualified(namespace: str, base: str, overload: str) -> str:
    return f"{namespace}::{base}" + ("" if overload == "default" else f".{overload}")
