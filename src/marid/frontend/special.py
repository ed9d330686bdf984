"""Operators that are more (or less) than a node: reads, copies across devices, aliases, geometry changes, factories."""

from __future__ import annotations

from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from marid.engine.protocol import other_layout
from marid.engine.snapshot import snapshot
from marid.frontend import handles
from marid.frontend.calls import unsupported
from marid.frontend.eager import run_now
from marid.frontend.engines import engine_of
from marid.frontend.handles import check_index
from marid.frontend.materialize import download, read, taken
from marid.frontend.observe import observer
from marid.frontend.record import Recorder, recorder_of, special
from marid.frontend.results import retarget
from marid.frontend.storage_objects import storage_behind
from marid.graph.dispatch_state import concretely
from marid.ops.facts import facts_of, named, overload_named

aten = torch.ops.aten

# --- reads ---------------------------------------------------------------------------------------------------------


@special(aten._local_scalar_dense.default)
def _item(_recorder: Recorder, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    watching = observer()
    if watching is not None and args[0].dtype is torch.bool:
        outcome = watching.outcome("ne", args[0], 0)
        if outcome is not None:
            return outcome
    with concretely():
        found = read(args[0], "item()")
        return aten._local_scalar_dense.default(found) if torch._C._is_tracing() else found.item()  # which warns there


@special(aten._linalg_check_errors.default, by_key=True)
def _linalg_check_errors(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Raises where a factorisation failed. In a recording that is a test of a number, at which a replay gives up."""
    watching = observer()
    if watching is not None and watching.outcome("ne", args[0].any(), 0) is False:
        return None
    return Recorder.record(recorder, args, kwargs)


@special(aten.is_pinned.default)
def _is_pinned(*_: Any) -> bool:
    return False


@special(aten._has_same_storage_numel.default)
def _has_same_storage_numel(_recorder: Recorder, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> bool:
    return len({tensor.untyped_storage().nbytes() // tensor.dtype.itemsize for tensor in args}) == 1


@special(aten._new_zeros_with_same_feature_meta.default)
def _new_zeros_with_same_feature_meta(_recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Zeros in memory as large as that of the second argument, once for each batch dimension of the first."""
    like, of = args
    batch = like.shape[: kwargs.get("self_num_batch_dims", 0)]
    count = of.untyped_storage().nbytes() // of.dtype.itemsize
    strides = torch.empty((*batch, count), device="meta").stride()[:-1]
    zeros = aten.zeros.default([*batch, count], dtype=of.dtype, device=of.device)
    made = aten.as_strided.default(zeros, [*batch, *of.shape], [*strides, *of.stride()], of.storage_offset())
    # Who asks sets these bits afterwards, which nothing would be recorded of.
    made = aten._conj.default(made) if of.is_conj() else made
    return aten._neg_view.default(made) if of.is_neg() else made


@special(aten.is_set_to.default)
def _is_set_to(_recorder: Recorder, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> bool:
    looks = {(t.untyped_storage().data_ptr(), t.storage_offset(), t.shape, t.stride()) for t in args}
    return len(looks) == 1


# --- copies --------------------------------------------------------------------------------------------------------


@special(aten._to_copy.default, by_key=True)
def _to_copy(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    layout = kwargs.get("layout")
    if layout is not None and layout is not torch.strided:
        raise unsupported("aten::_to_copy", f"layout {layout} was asked for")
    device = kwargs.get("device")
    rest = {k: v for k, v in kwargs.items() if k not in ("device", "non_blocking", "pin_memory", "layout")}
    tensor = args[0]
    if not handles.is_lazy(tensor):
        if (other := other_layout(tensor)) is not None:
            raise unsupported("aten::_to_copy", f"its input has layout {other}")
        check_index(device)
        plain = rest.get("dtype") in (None, tensor.dtype) and not rest.get("memory_format") and tensor.is_contiguous()
        make = snapshot if plain else lambda of: aten._to_copy.default(of, **rest)
        return _uploaded(tensor, _index(device), make)
    if device is not None and torch.device(device).type != handles.DEVICE_TYPE:
        target = torch.device(device)
        if target.type == "meta":
            return aten._to_copy.default(_meta(tensor), **rest, device="meta")
        with concretely():
            return aten._to_copy.default(read(tensor, f".to('{target}')"), **rest, device=target)
    check_index(device)
    index = tensor._value.spec.device if device is None else _index(device)
    if index == tensor._value.spec.device:
        return recorder.record(args, rest)
    if engine_of(index) is not engine_of(tensor._value.spec.device):
        as_asked = tensor if _is_plain(tensor, rest) else recorder.record((tensor,), rest)  # where it is
        moved = _taken(as_asked, index, f".to('{handles.DEVICE_TYPE}:{index}')")
        if moved is not None:
            return moved
    with concretely():
        copied = aten._to_copy.default(read(tensor, f".to('{handles.DEVICE_TYPE}:{index}')"), **rest)
    return handle_for(copied, index)


@special(aten.copy_.default, by_key=True)
@special(aten._copy_from.default, aten._copy_from_and_resize.default)
def _copy(recorder: Recorder, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    target, source = args[0], args[1]
    if recorder.func is not aten.copy_.default:
        target, source = source, target
    if not handles.is_lazy(target):
        with concretely():
            target.copy_(read(source, "copy_ to the CPU"))
        return target
    index = target._value.spec.device
    if handles.is_lazy(source) and source._value.spec.device != index:
        moved = _taken(source, index, "copy_ to another device")
        source = handle_for(download(source, "copy_ to another device"), index) if moved is None else moved
    elif not handles.is_lazy(source):
        if source.device.type != "cpu":
            raise RuntimeError(f"copy_ from {source.device} to {handles.DEVICE_TYPE} is not possible; use .cpu() first")
        if (other := other_layout(source)) is not None:
            raise unsupported("aten::copy_", f"its source has layout {other}")
        if _fills_fresh_memory(target, source):
            spec = target._value.spec

            def fill(of: torch.Tensor) -> torch.Tensor:
                return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="cpu").copy_(of)

            target._value = _uploaded(source, index, fill)._value
            return target
        source = _uploaded(source, index, snapshot)
    return recorder_of(aten.copy_.default).record((target, source), {})


def _fills_fresh_memory(target: Any, source: torch.Tensor) -> bool:
    """Whether ``target`` is a new empty tensor that nobody else has seen: then the copy is simply its value."""
    node = target._value.node
    return (
        target._storage is None
        and node.args is not None
        and node.op is not None
        and facts_of(node.op.func).uninitialized
        and target.shape == source.size()  # uninitialised ones have no `shape`
        and not target._value.spec.conj
        and not target._value.spec.neg
    )


def _uploaded(tensor: torch.Tensor, index: int, make: Any) -> Any:
    """A lazy tensor with what ``make`` makes of a CPU tensor."""
    with concretely():
        handle = handle_for(make(tensor), index)
    watching = observer()
    if watching is not None:
        watching.upload(handle._value, tensor, make)
    return handle


def handle_for(owned: torch.Tensor, index: int) -> Any:
    """A lazy tensor with the value of a CPU tensor that nobody else has."""
    spec = handles.spec_of(owned, index)
    return handles.wrap(handles.source(engine_of(index).adopt(owned), spec), spec)


def _is_plain(tensor: Any, asked: dict[str, Any]) -> bool:
    """Whether ``_to_copy`` with these arguments leaves elements and their order as they are."""
    dtype, memory_format = asked.get("dtype"), asked.get("memory_format")
    spec = tensor._value.spec
    plain = spec.is_contiguous and not spec.conj and not spec.neg
    return plain and dtype in (None, spec.dtype) and memory_format in (None, torch.preserve_format)


def _taken(tensor: Any, index: int, reason: str) -> Any | None:
    """A lazy tensor with the value of one of another device, where that can come without the host."""
    if tensor._value.spec.conj or tensor._value.spec.neg:
        return None
    buffer = taken(tensor, index, reason)
    if buffer is None:
        return None
    of = tensor._value.spec
    spec = handles.spec(of.shape, of.stride, 0, of.dtype, index)
    return handles.wrap(handles.source(buffer, spec), spec)


def _meta(tensor: Any) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _index(device: Any) -> int:
    index = torch.device(device).index
    return handles.current_device() if index is None else index


# --- aliases and geometry ------------------------------------------------------------------------------------------


@special(aten.detach.default, aten.lift_fresh.default, aten.lift.default)
def _same_value(_recorder: Recorder, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    # A second handle on the same value: no operation at all.
    tensor = args[0]
    return handles.new_handle(tensor._value, tensor._value.spec, handles.storage_of(tensor))


def _in_place_view(functional: Any) -> Any:
    def handler(_recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        view = recorder_of(functional).record(args, kwargs)
        retarget(tensor, view._value, view._storage)
        return tensor

    return handler


for _name in named("in_place_of"):
    _written = overload_named(_name)
    special(_written)(_in_place_view(overload_named(facts_of(_written).in_place_of)))


@special(aten.detach_.default)
def _detach_in_place(_recorder: Recorder, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    return args[0]


@special(
    aten.set_.source_Tensor,
    aten.set_.default,
    aten.set_.source_Storage,
    aten.set_.source_Storage_storage_offset,
)
def _set(_recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    source = args[1] if len(args) > 1 else kwargs.get("source")
    device = tensor._value.spec.device
    names = ("storage_offset", "size", "stride")
    geometry = {name: kwargs[name] for name in names if name in kwargs}
    geometry.update(zip(names, args[2:], strict=False))
    if source is None:
        base: Any = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    elif isinstance(source, torch.UntypedStorage):
        base = storage_behind(source, tensor.dtype, device)
        size = geometry.get("size", (base.numel(),))
        stride = geometry.get("stride") or _contiguous(size)
        base = aten.as_strided.default(base, size, stride, geometry.get("storage_offset", 0))
    elif not handles.is_lazy(source):
        raise RuntimeError(
            f"set_() expects a tensor on {handles.DEVICE_TYPE}, but got one on {source.device}; move it first"
        )
    else:
        if source.dtype != tensor.dtype:
            raise RuntimeError(f"Could not set tensor of type {source.dtype} to a tensor of type {tensor.dtype}")
        base = source
        if geometry:
            size = geometry.get("size", source.shape)
            stride = geometry.get("stride") or _contiguous(size)
            base = aten.as_strided.default(source, size, stride, geometry.get("storage_offset", 0))
    # The memory is taken as it is: whether a tensor is conjugate or negative stays its own.
    if tensor.is_conj() != base.is_conj():
        base = aten._conj.default(base)
    if tensor.is_neg() != base.is_neg():
        base = aten._neg_view.default(base)
    retarget(tensor, base._value, handles.storage_of(base))
    return tensor


def _contiguous(size: Any) -> tuple[int, ...]:
    stride, step = [], 1
    for length in reversed(size):
        stride.append(step)
        step *= max(length, 1)
    return tuple(reversed(stride))


@special(aten.resize_as_.default)
def _resize_as(_recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs.get("memory_format") is torch.preserve_format:
        kwargs = {"memory_format": suggest_memory_format(args[1])}
    return recorder_of(aten.resize_.default).record((args[0], list(args[1].shape)), kwargs)


@special(aten.record_stream.default)
def _record_stream(*_: Any) -> None:
    return None


@special(aten._pin_memory.default)
def _pin_memory(_recorder: Recorder, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    """It is where it is to be. (A ``DataLoader`` pins what its collator has made, on the default device too.)"""
    return args[0]


@special(aten.equal.default)
def _equal(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if args[0].device != args[1].device:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{args[0].device} and {args[1].device}!"
        )
    return run_now(recorder, recorder.read(args, kwargs), "equal()")


# --- factories from a lazy tensor, for another device ----------------------------------------------------------------


def _like_elsewhere(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    layout = kwargs.get("layout")
    if layout is not None and layout is not torch.strided:
        raise unsupported(recorder.op.name, f"layout {layout} was asked for")
    device = kwargs.get("device")
    if device is not None:
        target = torch.device(device)
        if target.type != handles.DEVICE_TYPE:
            spec = args[0]._value.spec
            with concretely():
                stand_in = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=target)
                return recorder.func(stand_in, *args[1:], **kwargs)
        index = _index(device)
        if index != args[0]._value.spec.device:
            spec = args[0]._value.spec
            args = (_empty_at(spec, index), *args[1:])
    general = _with_generator(recorder.func)
    if general is not None:
        return recorder_of(general).record(args, {**kwargs, "generator": None})
    return recorder.record(args, kwargs)


def _with_generator(func: Any) -> Any:
    """The overload that random factories are recorded as: the one that takes a generator; None for others."""
    name = facts_of(func).with_generator
    return overload_named(f"{func._schema.name}.{name}") if name else None


def _empty_at(spec: Any, index: int) -> Any:
    return recorder_of(aten.empty_strided.default).record(
        (spec.shape, spec.stride), {"dtype": spec.dtype, "device": torch.device(handles.DEVICE_TYPE, index)}
    )


for _name in named("like"):
    _packet = getattr(aten, _name.removeprefix("aten::"))
    for _overload in _packet.overloads():
        if "out" not in _overload:
            special(getattr(_packet, _overload), by_key=True)(_like_elsewhere)

# --- random numbers --------------------------------------------------------------------------------------------------


def _drawn_from(general: Any) -> Any:
    def handler(_recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return recorder_of(general).record(args, {**kwargs, "generator": None})

    return handler


for _name in named("with_generator"):
    _plain = overload_named(_name)
    if facts_of(_plain).factory:
        special(_plain)(_drawn_from(_with_generator(_plain)))


# --- kernels that the CPU lacks for some dtypes ---------------------------------------------------------------------


@special(aten.histc.default, by_key=True)
def _histc(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Accelerators count integers too, and code written for them relies on it; every int32 is a float64.
    tensor = args[0]
    if tensor.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        counted = recorder.record((aten._to_copy.default(tensor, dtype=torch.float64), *args[1:]), kwargs)
        return aten._to_copy.default(counted, dtype=tensor.dtype)
    return recorder.record(args, kwargs)


# --- layouts ---------------------------------------------------------------------------------------------------------


@special(aten.to_sparse.default, aten.to_sparse.sparse_dim, aten._to_sparse.default, aten._to_sparse.sparse_dim)
@special(aten._to_sparse_csr.default, aten._to_sparse_csc.default, aten._to_sparse_bsr.default)
@special(aten._to_sparse_bsc.default, aten.to_mkldnn.default, aten.quantize_per_tensor.default)
def _other_layout(recorder: Recorder, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    raise unsupported(recorder.op.name, "its result has a layout other than torch.strided")
