"""The record of one operator overload."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import torch

from marid.ops.irregular import ROWS

_FOREACH = "aten::_foreach_"


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of an operator overload.

    The first fields follow from its schema and tags, and from the row that it has in ``irregular.py``; the rest is what
    that row says. Positions count the arguments, or the returns, of the schema.
    """

    name: str
    """With its namespace, without its overload: ``aten::add_``."""
    written: tuple[bool, ...]
    """For each argument, whether a call writes it."""
    shared: tuple[int | None, ...]
    """For each return, the position of the argument in whose memory it lies: the argument itself, where that is
    written, or a view of it. None for memory of its own."""
    mutates: bool
    """Whether a call writes an argument."""
    shares: bool
    """Whether a result lies in the memory of an argument."""
    resized: tuple[bool, ...]
    """For each argument, whether a call may change its geometry: where results are to go, and what is resized.
    Operators of others may resize whatever they write."""
    draws: bool
    """Whether it takes random numbers."""
    takes_generator: bool
    dynamic: bool
    """Whether what it returns depends on data, or whether it only checks data: it has to run when it is called."""
    moves_memory: bool
    """Whether it may give its arguments other sizes and other memory."""
    is_foreach: bool
    """Whether it takes lists and works on them element by element."""
    writes_to_out: bool
    """Whether results go where it is told to put them, which is given their geometry, and nothing else is resized."""
    of_others: bool
    """Whether it is neither in ATen's namespace nor in Marid's: its kernels may count or print, and are not probed."""
    in_python: bool
    """Whether its kernel was written in Python, by others."""
    out_overload: str | None
    """The overload of a pointwise operator that takes the same arguments and the place of its result."""

    # --- memory ---
    writes: tuple[str, ...] = ()
    """Arguments that it writes though its schema does not say so."""
    views_as: str = ""
    """Its results lie in the memory of its first argument though its schema does not say so: the operator that computes
    the same, and whose schema does."""
    resizes: bool = False
    """It changes the geometry of what it writes."""
    only_updates: tuple[str, ...] = ()
    """Arguments that it writes, and takes nothing from, where it is called with ``training``: it returns the same
    without them."""
    same_value: bool = False
    """It does nothing, but returns another tensor."""
    in_place_of: str = ""
    """The operator whose view its first argument becomes."""
    uninitialized: bool = False
    """Its result has no elements that anybody could have seen."""

    # --- values ---
    draws_nothing: bool = False
    """It is tagged as random, and draws nothing on the CPU."""
    with_generator: str = ""
    """The overload that does the same and takes a generator. PyTorch before 2.13 lacks some."""
    mask: Literal["", "read", "written"] = ""
    """A mask among its indices decides the shape of what it returns (``read``), or which values it takes, and it raises
    where these do not fit (``written``)."""
    cpu_arguments: tuple[int, ...] = ()
    """Arguments that PyTorch takes from the CPU, whatever the device of the others."""

    # --- metadata ---
    shaped_by_sizes: bool = False
    """Its meta kernel is missing, or written for CUDA. Shapes do not depend on data, so a trial run tells them."""
    saves_nothing: bool = False
    """Where it does not train it returns less than its meta kernel says."""
    limited_in_size: bool = False
    """Its kernel refuses large sizes that its meta kernel accepts."""
    asks_for_more: bool = False
    """It asks for more than there is without data: for the storage behind an argument, for the CPU's backends, or for
    sizes that only the CPU's kernel looks at."""
    factory: bool = False
    """It makes a tensor of no tensor, and has a kernel of the device's own."""
    default_dtype: bool = False
    """A factory whose dtype, where none is given, is the default one."""
    like: bool = False
    """It makes a tensor with the geometry or type of another one, perhaps for another device."""

    # --- the CPU's road ---
    composed_on_cpu: bool = False
    """Its CPU kernel does nothing but call other operators."""
    whole: Literal["", "always", "in_rows"] = ""
    """A composite that draws nothing but for its ``dropout``, and that the CPU may compose where it runs at once and
    nobody differentiates. What it is composed of may depend on what requires gradients all the same; ``in_rows``: not
    where the rows of its first argument lie behind each other."""
    kernel: str = ""
    """The operator of ``native/gemm`` that runs in its place, with the same arguments and the same result."""

    # --- collectives ---
    collective: Literal["", "reads", "writes", "returns", "waits", "refused"] = ""
    """A backend on the host is given values: it only reads them, or writes those that its first argument holds.
    ``refused``: a message is received from whoever sends one."""
    waited_once: bool = False
    """The backend would wait for another message the second time."""

    # --- compiling ---
    fusion: Literal["", "pointwise", "reduction", "foreach", "between"] = ""
    """How Inductor fuses it, to what ATen's kernel computes; ``between`` is let in, and not a reason to compile. Empty
    for what stays with ATen: whatever raises by value, draws, or has kernels that are as good."""
    float_only: bool = False
    """Of integers it raises errors that depend on values, or rounds by ``rounding_mode``."""
    fills: bool = False
    """It raises where a number does not fit into a type."""
    number: str = ""
    """The argument whose number is an input of compiled code."""
    fused_by_passes: bool = False
    """``marid.settings.fast_math`` fuses it."""
    made_by_passes: bool = False
    """Passes may bring it in although it is not compiled where it is recorded."""
    factors: tuple[int, ...] = ()
    """The arguments that are matrices which it multiplies."""

    @property
    def keeps_geometry(self) -> bool:
        """Whether a call leaves its arguments the geometry and the memory that they have."""
        return not (any(self.resized) or self.moves_memory or self.resizes or self.in_place_of)

    @property
    def view(self) -> bool:
        """Whether it writes nothing and returns memory of its arguments."""
        return self.shares and not self.mutates

    @property
    def marked_name(self) -> str:
        """Its name, or that of the operator that computes the same and has a schema that says all."""
        return self.views_as or self.name

    @property
    def fusible(self) -> bool:
        """Whether it is a reason to compile."""
        return self.fusion not in ("", "between")


@functools.cache
def facts_of(func: Any) -> Facts:
    """What is known of an operator overload (``torch.ops.aten.add.Tensor``)."""
    schema = func._schema
    row = {**_compiling(schema), **_row(schema.name, schema.overload_name)}
    written = tuple([_is_written(a) or a.name in row.get("writes", ()) for a in schema.arguments])
    mutates = any(written)
    draws = torch.Tag.nondeterministic_seeded in func.tags and not row.get("draws_nothing")
    checks = not schema.returns and not mutates  # it returns nothing and writes nothing: it is there to raise
    own = schema.name.startswith("aten::") and not row.get("resizes")
    outs = tuple([a.is_out for a in schema.arguments])
    shared = _shared(schema, row)
    shares = any(position is not None for position in shared)
    return Facts(
        name=schema.name,
        written=written,
        shared=shared,
        mutates=mutates,
        shares=shares,
        resized=outs if own else written,
        draws=draws,
        takes_generator=any(a.name == "generator" for a in schema.arguments),
        dynamic=checks or torch.Tag.dynamic_output_shape in func.tags or torch.Tag.data_dependent_output in func.tags,
        moves_memory=torch.Tag.inplace_view in func.tags or any(outs),
        is_foreach=schema.name.startswith(_FOREACH),
        writes_to_out=any(outs) and own and not row.get("in_place_of"),
        of_others=schema.name.partition("::")[0] not in ("aten", "marid"),
        in_python=_is_in_python(schema),
        out_overload=None if mutates or shares else _out_overload(func),
        **row,
    )


_KERNELS = ("CPU", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")


def _is_in_python(schema: Any) -> bool:
    space, _, name = schema.name.partition("::")
    overload = f".{schema.overload_name}" if schema.overload_name else ""
    written = torch.library._impls
    return space != "marid" and any(f"{space}/{name}{overload}/{key}" in written for key in _KERNELS)


def named(field: str) -> dict[str, Any]:
    """What rows in ``irregular.py`` say of ``field``, by operator, with their overloads where they say it of one."""
    return {name: row[field] for name, row in ROWS.items() if row.get(field)}


def overload_named(name: str) -> Any:
    """The overload of this name, of ATen unless it says otherwise (``t``, ``t.default``, ``c10d::send``); None where
    PyTorch has none."""
    namespace, _, rest = name.rpartition("::")
    base, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace or "aten"), base, None)
    return None if packet is None else getattr(packet, overload or "default", None)


def base_name(name: str) -> str:
    """The name of an operator without its namespace and the underscore of in-place operators."""
    base = name.partition("::")[2]
    return base[:-1] if base.endswith("_") and not base.endswith("__") else base


def _row(name: str, overload: str) -> dict[str, Any]:
    return {**ROWS.get(name, {}), **ROWS.get(f"{name}.{overload or 'default'}", {})}


_COMPILING = ("fusion", "float_only", "fills", "number", "fused_by_passes")


def _compiling(schema: Any) -> dict[str, Any]:
    """What is known of compiling it: in place, and as a view that does not say that it is one, it is compiled as the
    plain operator is."""
    if not schema.name.startswith("aten::"):
        return {}
    marked = ROWS.get(schema.name, {}).get("views_as", schema.name)
    plain = _row(f"aten::{base_name(marked)}", schema.overload_name)
    return {field: plain[field] for field in _COMPILING if field in plain}


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _shared(schema: Any, row: dict[str, Any]) -> tuple[int | None, ...]:
    if row.get("views_as"):
        return (0,) * len(schema.returns)
    marked = [(i, a.alias_info) for i, a in enumerate(schema.arguments) if a.alias_info is not None]
    found: list[int | None] = []
    for info in [returned.alias_info for returned in schema.returns]:
        held = [i for i, other in marked if info is not None and info.before_set & other.before_set]
        # Of a list of views, PyTorch keeps no name: it is of the only argument that has one.
        found.append(None if info is None or not marked else (held or [marked[0][0]])[0])
    return tuple(found)


def _out_overload(func: Any) -> str | None:
    schema = func._schema
    if torch.Tag.pointwise not in func.tags or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    if len(schema.returns) != 1 or str(schema.returns[0].type) != "Tensor":
        return None
    wanted = [(a.name, str(a.type)) for a in schema.arguments]
    packet = func.overloadpacket
    for name in packet.overloads():
        formal = getattr(packet, name)._schema.arguments
        if [(a.name, str(a.type)) for a in formal[:-1]] == wanted and formal[-1].is_out:
            return "" if name == "default" else name
    return None
