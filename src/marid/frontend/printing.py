"""The text of a tensor: its values as PyTorch shows them, or what is known of it without them.

``str`` shows the values, which is a read like any other. ``repr``, which debuggers, the interpreter's echo and
containers call, runs nothing and waits for nothing: it shows the values where this process has them, and else the
operation, the shape and the dtype. ``marid.settings.print_materialize`` makes both read, or neither. Under ``marid
run`` both read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import _tensor_str
from torch.autograd import forward_ad
from torch.utils import _python_dispatch

from marid.frontend import handles
from marid.frontend.engines import engine_of
from marid.frontend.materialize import download, pending_nodes, read
from marid.frontend.observe import observer
from marid.frontend.subclasses import user_class
from marid.graph.dispatch_state import concretely
from marid.graph.html import pre_html, table_html
from marid.settings import settings

_PREFIX = "tensor("
_names_current_device = True


def show_as_python_does(names_device: bool) -> None:
    """Let the text of a tensor show values in containers too, and the device only where PyTorch would: it leaves out
    the one that a script gets without asking."""
    global _names_current_device
    _names_current_device = names_device
    if settings.print_materialize is None:
        settings.print_materialize = True


def text_of(tensor: Any, asked: bool, contents: str | None = None) -> str:
    """The text of a lazy tensor; ``asked`` where a read is what the user expects (``str``). ``contents`` stands in the
    place of the values, if given."""
    reads = asked if settings.print_materialize is None else settings.print_materialize
    if contents is None:
        if reads:
            contents = _values(tensor)
        elif _is_here(tensor):
            contents = _formatted(engine_of(tensor._value.spec.device).read(tensor._value.concrete))
        else:
            return _description(tensor)
    cls = user_class(tensor)
    prefix = "tensor(" if cls is torch.Tensor else f"{cls.__name__}("
    text = _tensor_str._add_suffixes(prefix + contents, _suffixes(tensor, asked), len(prefix), False)
    return f"Parameter containing:\n{text}" if isinstance(tensor, torch.nn.Parameter) else text


def html_of(tensor: Any) -> str:
    """A lazy tensor for notebooks: its values where they are here, and what is known of it. Runs nothing."""
    value = tensor._value
    spec, node = value.spec, value.node
    if _is_here(tensor):
        state = "computed"
        content = pre_html(_formatted(engine_of(spec.device).read(value.concrete)))
    else:
        state, content = ("computing" if value.concrete is not None else "not computed"), ""
    known = {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "device": f"{handles.DEVICE_TYPE}:{spec.device}",
        "operation": None if node.op is None else node.op.name,
        "module": None if node.scope is None else node.scope.module_path,
        "line": node.site,
        "state": state,
    }
    rows = [(name, said) for name, said in known.items() if said is not None]
    kind = "Parameter" if isinstance(tensor, torch.nn.Parameter) else type(tensor).__name__
    return f"<b>{kind}</b>{content}{table_html(('', ''), rows)}"


def _is_here(tensor: Any) -> bool:
    """Whether a read would neither run anything nor wait, nor be noticed by ``marid.compile``."""
    value = tensor._value
    engine = engine_of(value.spec.device)
    # What was brought from a worker is kept for the next read alone, which is not to be this one.
    return not pending_nodes(tensor) and observer() is None and engine.local and engine.has(value)


def _values(tensor: Any) -> str:
    """The values, of which no more is brought from a worker than what is shown."""
    options: Any = _tensor_str.PRINT_OPTS
    if tensor.numel() <= options.threshold or engine_of(tensor._value.spec.device).local:
        return _formatted(read(tensor, "print"))
    # A summary shows the ends of each long dimension. With one element left in the middle it is a summary still.
    with torch.no_grad(), _python_dispatch._disable_current_modes():
        shown = tensor.detach()
        for dim, size in enumerate(tensor.shape):
            if size > 2 * options.edgeitems + 1:
                first = shown.narrow(dim, 0, options.edgeitems + 1)
                shown = torch.cat([first, shown.narrow(dim, size - options.edgeitems, options.edgeitems)], dim)
    with _tensor_str.printoptions(threshold=0):
        return _formatted(download(shown, "print"))


def _formatted(values: torch.Tensor) -> str:
    with concretely():
        return _tensor_str._tensor_str(values, len(_PREFIX))


def _suffixes(tensor: Any, asked: bool) -> list[str]:
    """What stands behind the values, in PyTorch's order and words (``torch._tensor_str._str_intern``)."""
    suffixes: list[str] = []
    default = torch.get_default_dtype()
    if _names_current_device or tensor.device.index != handles.current_device():
        suffixes.append(f"device='{tensor.device}'")
    if tensor.numel() == 0:
        usual = tensor.dtype == default  # no element says of itself that it is an integer
        sized = tensor.dim() != 1
    else:
        complex_default = torch.complex128 if default == torch.float64 else torch.complex64
        usual = tensor.dtype in (default, complex_default, torch.int64, torch.bool)
        sized = not _tensor_str.PRINT_OPTS.edgeitems
    if sized:
        suffixes.append(f"size={tuple(tensor.shape)}")
    if not usual:
        suffixes.append(f"dtype={tensor.dtype}")
    suffixes += _gradient(tensor)
    tangent = forward_ad.unpack_dual(tensor).tangent
    if tangent is not None:
        suffixes.append(f"tangent={tangent if asked else repr(tangent)}")
    return suffixes


def _gradient(tensor: Any) -> list[str]:
    try:
        function = tensor.grad_fn
    except RuntimeError:  # of a view whose base was written to in a way that autograd refuses
        return ["grad_fn=<Invalid>"]
    if function is None:
        return ["requires_grad=True"] if tensor.requires_grad else []
    name = type(function).__name__
    return [f"grad_fn=<{function.name().rpartition('::')[2] if name == 'CppFunction' else name}>"]


def _description(tensor: Any) -> str:
    """What is known of a tensor without its values."""
    state = "lazy" if pending_nodes(tensor) else "materialized"
    facts = [
        f"op={tensor.operation}",
        f"shape={tuple(tensor.shape)}",
        f"dtype={tensor.dtype}",
        f"device='{tensor.device}'",
        *_gradient(tensor),
        state,
    ]
    return f"LazyTensor({', '.join(facts)})"
