"""What a worker says, looked at by the client before anything is made of it. Everything raises ``WireError``."""

from __future__ import annotations

from typing import Any

import torch

from marid.engine.plain import as_bytes, as_int, as_list, as_text, dtype_named, sizes_from, spec_to
from marid.errors import WireError
from marid.execute.accelerator import Host
from marid.execute.geometry import Misprediction
from marid.remote.wire.tensors import number_of, packing_of, tensor_of

_HOST = Host()
_MOST = 1 << 53
_LIST = 1 << 14
_TEXT = 1 << 16
_LIMITS = ("in_flight", "messages", "memory", "spill")


def check_welcome(header: dict[str, Any]) -> None:
    """What a worker says of itself."""
    as_bytes(header.get("boot"), 8, "a boot")
    as_bytes(header.get("peer"), 32, "a key")
    as_int(header.get("pid"), 0, _MOST, "a process")
    for name in ("device", "torch"):
        as_text(header.get(name), 256, name)
    limits = header.get("limits")
    if type(limits) is not dict:
        raise WireError("a worker says nothing of its limits")
    for name in _LIMITS:
        as_int(limits.get(name), 0, 1 << 62, "a limit")
    lease: Any = limits.get("lease")
    if type(lease) not in (int, float) or not 0 < lease < _MOST:
        raise WireError("a lease is no number of seconds")
    if limits["in_flight"] < 1 or limits["messages"] < 1:
        raise WireError("a worker takes no messages")


def check_results(results: list[Any]) -> None:
    """Answers with the numbers of their requests."""
    for one in results:
        if len(as_list(one, 2, "an answer")) != 2:
            raise WireError("an answer has a number and a value")
        as_int(one[0], 1, _MOST, "a request")


def check_failure(failure: Any, asked_to_stop: bool) -> None:
    """Why a request failed. ``Cancelled`` only where that was asked for."""
    if type(failure) is not dict:
        raise WireError("a failure is no map")
    as_int(failure.get("seq"), 1, _MOST, "a request")
    kind = as_text(failure.get("type"), 256, "the type of an error")
    as_text(failure.get("text"), _TEXT, "the text of an error")
    if kind == "Cancelled" and not asked_to_stop:
        raise WireError("a worker has stopped what it was not asked to stop")
    if failure.get("index") is not None:
        as_int(failure["index"], 0, _MOST, "an instruction")
    for slot in as_list(failure.get("existing", []), _LIST, "slots"):
        as_int(slot, 0, _MOST, "a slot")
    for digest in as_list(failure.get("missing", []), _LIST, "digests"):
        as_bytes(digest, 32, "a digest")
    for name in ("nbytes", "available"):
        if name in failure:
            as_int(failure[name], -_MOST, _MOST, name)


def as_tensor(value: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor that was asked for, which has this type and shape."""
    if not isinstance(value, torch.Tensor) or value.dtype is not dtype or tuple(value.shape) != tuple(shape):
        raise WireError(f"a {dtype} tensor of shape {list(shape)} was asked for, and something else was sent")
    return value


def as_stats(value: Any) -> dict[str, Any]:
    """What a worker has counted: numbers, by names."""
    if type(value) is not dict:
        raise WireError("statistics are no map")
    for name, count in value.items():
        if name == "refused":
            as_stats(count)
        else:
            as_int(count, 0, 1 << 62, name)
    return value


def misprediction_to(seq: int, misprediction: Misprediction) -> list[Any]:
    """A misprediction of request ``seq`` as plain data. The nodes of a worker count the instructions of a program."""
    path = list(misprediction.path)
    return [seq, misprediction.node.seq, path, spec_to(misprediction.seen), misprediction.shares]


def tensor_from(described: Any, segments: list[Any]) -> torch.Tensor:
    """The CPU tensor that a worker has sent. Raises ``WireError``."""
    parts = as_list(described, 5, "a tensor")
    if len(parts) < 4:
        raise WireError("a tensor that was sent has four parts, or five")
    name, shape, stride, *where = parts
    dtype = dtype_named(name)
    if len(where) == 1 and shape == [] == stride:
        return number_of(as_bytes(where[0], dtype.itemsize, "a number"), dtype)
    shape, stride = sizes_from(shape, stride, dtype)
    packing = packing_of(shape, stride, dtype)
    if len(where) == 1:
        return tensor_of([as_bytes(where[0], packing.nbytes, "a small tensor")], packing, dtype, _HOST)
    first, count = where
    first = as_int(first, 0, len(segments), "a segment")
    count = as_int(count, 0, len(segments) - first, "a number of segments")
    return tensor_of(segments[first : first + count], packing, dtype, _HOST)
