"""Calls that no client of ours makes, of every operator that a worker admits: run as a process between guard pages.

Each begins as a call that PyTorch's own samples make (``record.py``), or as what the schema lets one guess, and is then
altered: sizes, strides, offsets and dimensions, the numbers in index tensors, the shapes and types of tensors. What a
kernel refuses is well. A kernel that reads or writes outside of what it was given ends this process (``guard.c``), and
``test_operators.py`` reads in the scratch file which call that was.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import mmap
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from marid.frontend import (  # noqa: F401  (define operators that are admitted)
    linear_activation,
    quantized_operators,
    recurrent,
    rwkv7_operators,
)
from marid.remote.worker.operators import check_call, kind_of, operator_named
from tests.attacks.alterations import each_alteration, other_tensors
from tests.attacks.own import own_calls
from tests.attacks.record import FILE, Unfit, described

__all__ = ["Calls", "Forger"]

_SCRATCH = 1 << 16
_WORD = 1 << 63
_LONGEST = 15.0  # seconds at one call
_NUMBERS = (0, 1, -1, 2, 3, 5, 7, 13, -2, -7, 64, 1000, -5000, 1 << 20, 1 << 31, -(1 << 31), 1 << 40, -(1 << 40))
_NUMBERS += (1 << 61, _WORD - 1, -_WORD)
_DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64)
_DTYPES += (torch.bfloat16, torch.int16)
_FIXED = {"ScalarType", "Layout", "MemoryFormat", "Device", "Generator"}
"""What a worker reads as what it is, or not at all."""
_BEGINNINGS = 4
_SHAPES = ((), (0,), (1,), (3,), (2, 3), (3, 2), (2, 0), (2, 3, 4), (1, 2, 4, 4), (2, 2, 3, 4, 4))


class Calls:
    """Valid calls by the name of an operator, as plain data."""

    def __init__(self) -> None:
        self.recorded: dict[str, list[Any]] = json.loads(gzip.decompress(FILE.read_bytes()))
        self.recorded.update(own_calls())
        # What autograd calls for an index unless a dispatch mode looks on, as it does where calls are recorded.
        puts = self.recorded["aten.index_put_.default"]
        self.recorded["aten._index_put_impl_.default"] = [[[*args[:3], True, True], {}] for args, _ in puts]

    def of(self, name: str, func: Any, source: random.Random) -> list[Any]:
        """Calls to begin with: recorded ones of the operator or of the one that it is a variant of, and guesses."""
        base = name.split(".")[1]
        found = list(self.recorded.get(name, ()))
        if not found:
            functional = base.removesuffix("_")
            near = [other for other in self.recorded if other.split(".")[1] in (base, functional, functional + "_")]
            found = [self._with_out(func, call, source) for other in near for call in self.recorded[other]]
        return [*found, *[_guessed(func, source) for _ in range(3 if found else 12)]]

    def _with_out(self, func: Any, call: Any, source: random.Random) -> Any:
        args, kwargs = call
        named = dict(kwargs)
        for formal in func._schema.arguments:
            if formal.is_out:
                named[formal.name] = _guess(kind_of(formal), source)
        return [args, named]


def _guessed(func: Any, source: random.Random) -> Any:
    args, kwargs = [], {}
    for formal in func._schema.arguments:
        if formal.has_default_value() and source.random() < 0.6:
            if formal.kwarg_only:
                continue
            args.append(_plain(formal.default_value))
            continue
        value = _guess(kind_of(formal), source)
        if formal.kwarg_only:
            kwargs[formal.name] = value
        else:
            args.append(value)
    return [args, kwargs]


def _plain(value: Any) -> Any:
    try:
        return described(value)
    except Unfit:  # it is left to the kernel
        return None


def _guess(kind: str, source: random.Random) -> Any:
    if kind in _FIXED:
        return {"t": "float32"} if kind == "ScalarType" else None
    if kind.startswith("Optional["):
        return None if source.random() < 0.4 else _guess(kind[len("Optional[") : -1], source)
    if kind.startswith("List["):
        inner = kind[len("List[") : -1]
        return [_guess(inner, source) for _ in range(source.choice((0, 1, 1, 2, 2, 3)))]
    if kind == "Tensor":
        dtype = source.choice((torch.float32, torch.float32, torch.int64, torch.bool))
        shape = source.choice(_SHAPES)
        return {"T": str(dtype).removeprefix("torch."), "s": list(shape), "d": None}
    if kind in ("int", "SymInt"):
        return source.choice((0, 1, 2, 3))
    if kind in ("number", "float", "SymFloat"):
        return {"f": source.choice((0.0, 1.0, 0.5)).hex()}
    if kind in ("bool", "SymBool"):
        return source.random() < 0.5
    if kind == "str":
        return source.choice(("none", "mean", "sum", "reduce", "linear", "ij", ""))
    return None


def _fixed(func: Any) -> set[str]:
    kinds = {formal.name: kind_of(formal).removeprefix("Optional[").strip("]") for formal in func._schema.arguments}
    return {name for name, kind in kinds.items() if kind in _FIXED}


class Forger:
    """Alters calls and makes them."""

    def __init__(self, source: random.Random) -> None:
        self._source = source

    def forged(self, func: Any, known: list[Any], count: int) -> Iterator[Any]:
        """So many calls: those that are known, and then altered ones."""
        for number in range(count):
            begin = known[number % len(known)]
            yield begin if number < len(known) else self.altered(func, begin)

    def each(self, func: Any, known: list[Any]) -> Iterator[Any]:
        """Every alteration of one thing in some calls that are known."""
        fixed = _fixed(func)
        positions = {index for index, formal in enumerate(func._schema.arguments) if formal.name in fixed}
        for call in known if len(known) <= _BEGINNINGS else self._source.sample(known, _BEGINNINGS):
            others = [] if '"float32"' not in json.dumps(call) else ["float64", "bfloat16"]
            for dtype in ["float32", *others]:  # kernels are chosen by type
                begin = json.loads(json.dumps(call).replace('"T": "float32"', f'"T": "{dtype}"'))
                yield begin
                yield from each_alteration(begin, {*fixed, *positions})

    def altered(self, func: Any, call: Any) -> Any:
        """A call with something in it that should not be there, but of kinds that the argument can have."""
        made = json.loads(json.dumps(call))
        formals = func._schema.arguments
        fixed = _fixed(func)
        places: list[tuple[Any, Any]] = []

        def walk(holder: Any, key: Any) -> None:
            item = holder[key]
            places.append((holder, key))
            if type(item) is list:
                for index in range(len(item)):
                    walk(item, index)

        for index, formal in zip(range(len(made[0])), formals, strict=False):
            if formal.name not in fixed:
                walk(made[0], index)
        for name in made[1]:
            if name not in fixed:
                walk(made[1], name)
        for _ in range(self._source.choice((0, 1, 1, 1, 2, 3))):
            if not places:
                break
            holder, key = self._source.choice(places)
            with contextlib.suppress(LookupError):  # it is in a list that was altered before
                holder[key] = self._alter(holder[key])
        return made

    def _alter(self, item: Any) -> Any:
        source = self._source
        if type(item) is bool:
            return not item
        if type(item) is int:
            return source.choice((*_NUMBERS, item + 1, item - 1, item * 2, -item))
        if type(item) is list:
            if item and source.random() < 0.4:
                return [*item[:-1]] if source.random() < 0.5 else [*item, item[-1]]
            return [self._alter(part) if source.random() < 0.5 else part for part in item] or [0]
        if type(item) is dict and "T" in item:
            return self._other_tensor(item)
        if type(item) is dict and "f" in item:
            return {"f": source.choice((0.0, -1.0, math.nan, math.inf, 1e30, 1e-30, 3.7)).hex()}
        if item is None:
            return source.choice(
                (None, 0, 1, {"T": "float32", "s": [3], "d": None}, {"T": "int64", "s": [2], "d": None})
            )
        return item

    def _other_tensor(self, item: dict[str, Any]) -> dict[str, Any]:
        source, shape = self._source, list(item["s"])
        if source.random() < 0.3:
            return source.choice(list(other_tensors(item)))
        made = {**item, "d": None}
        way = source.random()
        if "v" in item and way < 0.45:
            return {**item, "h": [source.choice(_NUMBERS) for _ in range(3)]}
        if way < 0.75 and shape:
            index = source.randrange(len(shape))
            shape[index] = source.choice((0, 1, shape[index] + 1, max(shape[index] - 1, 0), shape[index] * 2, 5000))
        elif way < 0.85:
            shape = [*shape, 2] if source.random() < 0.5 else shape[1:]
        elif way < 0.92:
            made["T"] = str(source.choice(_DTYPES)).removeprefix("torch.")
        else:
            made["e"] = True
        if math.prod(shape) > 20_000:
            return item
        made["s"] = shape
        made.pop("v", None)
        return made

    def build(self, item: Any) -> Any:
        """An argument from plain data, its tensors in new memory."""
        if type(item) is list:
            return [self.build(part) for part in item]
        if type(item) is not dict:
            return item
        if "f" in item:
            return float.fromhex(item["f"])
        if "c" in item:
            return complex(*[float.fromhex(part) for part in item["c"]])
        if "t" in item or "m" in item:
            return getattr(torch, item.get("t") or item["m"])
        return self._tensor(item)

    def _tensor(self, item: dict[str, Any]) -> torch.Tensor:
        dtype, shape = getattr(torch, item["T"]), item["s"]
        if item.get("e"):  # all elements are one
            return torch.ones([1] * len(shape), dtype=dtype).expand(shape)
        values = item.get("v")
        if values is not None:
            made = (
                torch.tensor(values, dtype=torch.int64 if dtype is not torch.bool else dtype).to(dtype).reshape(shape)
            )
        elif dtype.is_floating_point or dtype.is_complex:
            made = torch.rand(shape, dtype=torch.float32).to(dtype)
        else:
            made = torch.ones(shape, dtype=dtype)
        if item["d"] is not None and list(made.stride()) != item["d"] and min(item["d"], default=1) >= 0:
            span = 1 + sum((size - 1) * step for size, step in zip(shape, item["d"], strict=True) if size)
            if made.numel() and span <= 4 * made.numel() + 64:
                laid = torch.zeros(span, dtype=dtype).as_strided(shape, item["d"])
                if made.numel() == span or 0 not in item["d"]:
                    made = laid.copy_(made)
        if item.get("l") and made.numel():
            made = _laid(made, item["l"])
        if "at" in item and made.numel():
            made = _filled(made, *item["at"])
        if "h" in item and made.numel() and dtype not in (torch.bool,) and not dtype.is_complex:
            made = made.contiguous()
            flat, longest = made.view(-1), torch.iinfo(dtype) if not dtype.is_floating_point else None
            for value in item["h"]:
                if longest is None or longest.min <= value <= longest.max:
                    flat[self._source.randrange(made.numel())] = value
        return made


def _laid(tensor: torch.Tensor, way: str) -> torch.Tensor:
    """The same numbers, with other strides."""
    if way == "reversed":
        order = list(range(tensor.dim()))[::-1]
        return tensor.permute(order).contiguous().permute(order)
    if way.startswith("repeated "):
        place = int(way.removeprefix("repeated "))
        return tensor.narrow(place, 0, 1).contiguous().expand(tensor.shape)
    wide = tensor.new_zeros([2 * size for size in tensor.shape])
    return wide[tuple(slice(1, None, 2) for _ in tensor.shape)].copy_(tensor)


def _filled(tensor: torch.Tensor, place: str, number: int | str) -> torch.Tensor:
    """A new tensor with that number, which is text where it is a float, in some of its elements."""
    value = float.fromhex(number) if isinstance(number, str) else number
    limits = None if tensor.is_floating_point() or tensor.dtype is torch.bool else torch.iinfo(tensor.dtype)
    if tensor.dtype is torch.bool or (limits is not None and not limits.min <= value <= limits.max):
        return tensor
    made = tensor.contiguous().clone()
    made.view(-1)[{"first": slice(0, 1), "last": slice(-1, None), "all": slice(None)}[place]] = value
    return made


def outside(found: Any) -> bool:
    """Whether a tensor in there has elements that are not in its memory."""
    if isinstance(found, (list, tuple)):
        return any(outside(part) for part in found)
    if not isinstance(found, torch.Tensor) or found.layout is not torch.strided or not found.numel():
        return False
    reach = sum((size - 1) * step for size, step in zip(found.shape, found.stride(), strict=True))
    storage = found.untyped_storage()
    first = int(found.storage_offset())
    lowest = sum(min((size - 1) * step, 0) for size, step in zip(found.shape, found.stride(), strict=True))
    return first + lowest < 0 or (first + max(reach, 0) + 1) * found.itemsize > storage.nbytes()


def attack(name: str, calls: Calls, count: int, seed: int, memory: mmap.mmap) -> int:
    """Make ``count`` calls of an operator, or where that is 0 each alteration of some of its calls; each is noted in
    ``memory`` before. How many were not refused."""
    op = operator_named(name)
    source = random.Random(f"{seed}{name}")
    torch.manual_seed(seed)
    forger = Forger(source)
    known = calls.of(name, op.func, source)
    worked = 0
    for call in forger.forged(op.func, known, count) if count else forger.each(op.func, known):
        _note(memory, [worked, call])
        try:
            args = [forger.build(arg) for arg in call[0]]
            kwargs = {key: forger.build(arg) for key, arg in call[1].items()}
            check_call(op, tuple(args), tuple(kwargs.items()))
            found = op.call(*args, **kwargs)
            parts = found if isinstance(found, (list, tuple)) else [found]
            if any(isinstance(part, torch.Tensor) and min(part.shape, default=0) < 0 for part in parts):
                continue  # which no program takes, and no call gives
            worked += 1
        except Exception:  # (whatever an operator raises is well: it refused)
            continue
        if outside([found, args, list(kwargs.values())]):
            os.abort()
        for part in parts:
            if isinstance(part, torch.Tensor) and part.layout is torch.strided and part.numel() < 1 << 20:
                with contextlib.suppress(RuntimeError):  # the negative of what has none
                    part.clone()
    return worked


def _note(memory: mmap.mmap, value: Any) -> None:
    """Write it behind the number of notes so far, by which ``_ended`` sees that there is progress."""
    text = json.dumps(value).encode()[: _SCRATCH - 9]
    memory[8 : len(text) + 9] = text + b"\0"
    memory[:8] = (int.from_bytes(memory[:8], "little") + 1).to_bytes(8, "little")


def _main() -> None:
    """``count seed``: attack the operators that standard input names, one a line; a count of 0 is every alteration.

    Prints a line of JSON for each: name, how many calls were not refused, the signal that ended it (``"stuck"`` after
    too long at one call) and the call that did.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    count, seed = int(sys.argv[1]), int(sys.argv[2])
    memory, progress = mmap.mmap(-1, _SCRATCH), mmap.mmap(-1, 8)
    calls = Calls()
    names = sys.stdin.read().split()
    place = 0
    while place < len(names):
        progress[:8] = place.to_bytes(8, "little")
        child = os.fork()
        if not child:
            for index in range(place, len(names)):
                progress[:8] = index.to_bytes(8, "little")
                worked = attack(names[index], calls, count, seed, memory)
                print(json.dumps([names[index], worked, None, None]), flush=True)
            os._exit(0)
        status = _ended(child, memory)
        place = int.from_bytes(progress[:8], "little") if status else len(names)
        if status:
            worked, call = json.loads(memory[8 : memory.find(b"\0", 8)])
            print(json.dumps([names[place], worked, status, call]), flush=True)
            place += 1


def _ended(child: int, memory: mmap.mmap) -> int | str:
    """Wait for a child: 0, the signal that ended it, or ``"stuck"`` when it was too long at one call."""
    seen, since = b"", time.monotonic()
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return -os.waitstatus_to_exitcode(status)
        if memory[:8] != seen:
            seen, since = memory[:8], time.monotonic()
        if time.monotonic() - since > _LONGEST:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "stuck"
        time.sleep(0.01)


if __name__ == "__main__":
    _main()
