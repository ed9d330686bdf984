"""The Python state that a function can reach: what a recording of it depends on beside its arguments.

Followed are closures, the globals that the function's code names, defaults, attributes of objects (modules and
optimizers among them), containers, and methods and functions of the user's own code. PyTorch's and other installed
packages' functions are taken as they are. Where the state is given by the user, all code is. The rules stand in
``docs/compile.md``.
"""

from __future__ import annotations

import array
import contextlib
import contextvars
import enum
import functools
import importlib.util
import io
import logging
import queue
import random
import sys
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import UninitializedTensorMixin

from marid.frontend import handles
from marid.native import module as native
from marid.replay.code_names import is_of_user, looks_at_rates, names_in

MISSING = object()
_LIMIT = 200_000  # things looked at; beyond it a function is not one to replay
LONG = 4096  # containers with more entries are followed no further: only how many they have counts
_LARGE = 1 << 16  # bytes of an array of numpy's beyond which comparing it at each call costs too much

_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented), range, slice),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, enum.Enum, np.generic),
)
# What code looks a name up with that it does not spell: anything of its own module, or of one that it names.
_LOOKS_UP_GLOBALS = {"globals", "eval", "exec"}
_LOOKS_UP_ATTRIBUTES = {"getattr", "vars", "attrgetter", *_LOOKS_UP_GLOBALS}
_VALUES = (int, float, complex, str, bytes)
# Objects that hold what nobody is told of when it changes.
_MUTABLE = (bytearray, array.array, memoryview, queue.SimpleQueue)
_MUTABLE += (type({}.keys()), type({}.values()), type({}.items()))
# Objects that hold nothing that a tensor program could depend on.
_OPAQUE = (
    *(logging.Handler, threading.Thread, type(threading.Lock()), type(threading.RLock())),
    *(weakref.ref, types.CodeType, types.FrameType, torch._ops.OpOverload, torch._ops.OpOverloadPacket),
    *(torch.UntypedStorage, torch.Stream, torch.Event, np.random.BitGenerator),
)
_NAMED = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)
_BOUND = (types.BuiltinFunctionType, types.MethodWrapperType)
_CODE = (type, types.FunctionType, staticmethod, classmethod, property)
_CONTAINERS = (list, tuple, set, frozenset, deque)
_DRAWING = (random.Random, np.random.Generator, np.random.RandomState)


class Reached:
    """What was found: containers by kind, each with a name for messages, and tensors.

    ``dicts`` and ``lists`` are compared whole; ``names`` are mappings, or functions, of which only some keys, or
    attributes, count; ``cells`` are variables of closures; of ``instances`` their class counts, of ``classes``, seen
    as mappings, how many attributes they have; ``arrays`` are compared by content. ``lazy`` and ``host`` are the
    tensors, ``generators``, ``optimizers`` and ``schedules`` those of PyTorch, ``drawing`` those of Python and numpy;
    ``paused`` are generator functions that have begun. ``paths`` are the names of tensors, modules and optimizers, by
    identity. ``too_much`` says what makes this function none to replay. Code is followed if ``follows_code``;
    ``looks_at_rates`` says whether some of it looks at an optimizer's learning rate, ``group["lr"]``, or at what a
    schedule counts.
    """

    def __init__(self, follows_code: bool) -> None:
        self.follows_code = follows_code
        self.dicts: list[tuple[str, dict[Any, Any]]] = []
        self.lists: list[tuple[str, Any]] = []
        self.names: list[tuple[str, Any, tuple[str, ...]]] = []
        self.cells: list[tuple[str, types.CellType]] = []
        self.instances: list[tuple[str, Any]] = []
        self.classes: list[tuple[str, Any]] = []
        self.arrays: list[tuple[str, np.ndarray]] = []
        self.lazy: list[Any] = []
        self.host: list[torch.Tensor] = []
        self.generators: list[torch.Generator] = []
        self.drawing: list[Any] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedules: list[torch.optim.lr_scheduler.LRScheduler] = []
        self.paused: list[types.GeneratorType[Any, Any, Any]] = []
        self.modules: set[tuple[int, tuple[str, ...], bool]] = set()
        self.seen: dict[int, Any] = {}
        self.paths: dict[int, str] = {}
        self.too_much: str | None = None
        self.looks_at_rates = False


class Wrapper:
    """Something that stands for a function: what it leads to is the function."""

    _function: Any


def _has_more(thing: Any) -> bool:
    """Whether something plain is of a class of the user's: a number, or a member of an enumeration, with attributes."""
    return isinstance(thing, enum.Enum) or (isinstance(thing, _VALUES) and type(thing).__dictoffset__ != 0)


def is_plain(thing: Any) -> bool:
    """Whether ``thing`` is all there is to it: equal ones can stand for each other."""
    return isinstance(thing, _PLAIN)


def reach(roots: list[tuple[str, Any]], follows_code: bool) -> Reached:
    """Everything that can be reached from ``roots`` (names and objects); through functions and classes too, if
    ``follows_code``."""
    found = Reached(follows_code)
    pending = deque(roots)
    while pending:
        path, thing = pending.popleft()
        if len(found.seen) > _LIMIT:
            found.too_much = f"more than {_LIMIT} Python objects"
            break
        try:
            if id(thing) in found.seen or (is_plain(thing) and not _has_more(thing)):
                continue
            found.seen[id(thing)] = thing
            if isinstance(thing, _NAMED):
                found.paths[id(thing)] = path
            pending.extend(_inside(path, thing, found))
        except Exception as error:  # from the user's code: a class can answer as it likes when it is looked at
            found.too_much = f"an object that cannot be looked at ({path}: {type(error).__name__})"
            break
    return found


def _inside(path: str, thing: Any, found: Reached) -> Iterator[tuple[str, Any]]:
    """Note ``thing``; what it leads to."""
    if isinstance(thing, UninitializedTensorMixin):
        found.instances.append((path, thing))  # which gets another class with its shape
    elif isinstance(thing, torch.Tensor) and hasattr(thing, "__tensor_flatten__"):  # a shell of others
        for name in thing.__tensor_flatten__()[0]:
            yield f"{path}.{name}", getattr(thing, name)
    elif isinstance(thing, torch.Tensor):
        (found.lazy if handles.is_lazy(thing) else found.host).append(thing)
        own = native.attributes_of(thing)
        if own is not None:
            yield path, own
        if not handles.is_lazy(thing) and thing.is_leaf and thing.grad is not None:
            yield f"{path}.grad", thing.grad
        yield from _hooks(path, thing)
        yield type(thing).__qualname__, type(thing)
    elif isinstance(thing, np.ndarray):
        found.arrays.append((path, thing))
        if thing.nbytes > _LARGE or thing.dtype.hasobject:
            found.too_much = f"a numpy array of {thing.nbytes} bytes ({path})"
    elif isinstance(thing, _MUTABLE):
        found.too_much = f"a {type(thing).__name__}, which cannot be watched ({path})"
    elif isinstance(thing, types.MappingProxyType):
        found.names.append((path, thing, tuple(thing)))
        found.classes.append((path, thing))
        for key in thing:
            yield f"{path}[{key!r}]", thing[key]
    elif isinstance(thing, torch.Generator):
        found.generators.append(thing)
    elif isinstance(thing, types.GeneratorType):
        found.paused.append(thing)
    elif isinstance(thing, _DRAWING):
        found.drawing.append(thing)
    elif isinstance(thing, _BOUND):
        if thing.__self__ is not None:
            yield path, thing.__self__
    elif _is_iterator_in_c(thing):
        found.too_much = f"an iterator, whose place cannot be watched ({path})"
    elif isinstance(thing, dict):
        found.dicts.append((path, thing))
        if len(thing) <= LONG:
            for key, value in list(thing.items()):
                yield f"{path}[{key!r}]" if is_plain(key) else f"{path}[...]", value
                yield f"a key of {path}", key
        if isinstance(thing, OrderedDict):
            found.lists.append((f"the order of {path}", thing))
        yield from _of_subclass(path, thing, found)
    elif isinstance(thing, _CONTAINERS):
        if not isinstance(thing, (tuple, frozenset)):
            found.lists.append((path, thing))
        if len(thing) <= LONG:
            for index, value in enumerate(list(thing)):
                yield f"{path}[{index}]", value
        yield from _of_subclass(path, thing, found)
    elif isinstance(thing, contextvars.ContextVar):
        found.names.append((path, _ValueInContext(thing), ("its value",)))
        yield path, thing.get(None)
    elif isinstance(thing, _CODE) and not found.follows_code:
        return
    elif isinstance(thing, Wrapper):
        yield path, thing._function
    elif isinstance(thing, types.FunctionType):
        yield from _function(path, thing, found)
    elif isinstance(thing, types.MethodType):
        yield path, thing.__func__
        yield path, thing.__self__
    elif isinstance(thing, functools.partial):
        yield path, thing.func
        yield path, thing.args
        yield path, thing.keywords
    elif isinstance(thing, (staticmethod, classmethod)):
        yield path, thing.__func__
    elif isinstance(thing, property):
        for function in (thing.fget, thing.fset, thing.fdel):
            yield path, function
    elif isinstance(thing, type):
        yield from _class(path, thing, found)
    elif isinstance(thing, types.ModuleType):
        if _is_of_user(thing):
            yield from _module(path, thing, _all_names(vars(thing)), True, found)
    elif isinstance(thing, logging.Logger):
        found.names.append((path, _Attributes(thing), ("level", "disabled")))
    elif not isinstance(thing, _OPAQUE) and not _is_ours(thing):
        yield from _object(path, thing, found)


def _is_iterator_in_c(thing: Any) -> bool:
    """Whether ``thing`` is an iterator of Python's own types, such as ``enumerate``. (Files say what they read.)"""
    kind = type(thing)
    return (
        hasattr(kind, "__next__")
        and not isinstance(kind.__next__, types.FunctionType)
        and not issubclass(kind, io.IOBase)
    )


def _is_ours(thing: Any) -> bool:
    """Whether ``thing`` belongs to the engine. A module does not, wherever it is written: it holds parameters."""
    return type(thing).__module__.startswith("marid.") and not isinstance(thing, torch.nn.Module)


def _hooks(path: str, tensor: torch.Tensor) -> Iterator[tuple[str, Any]]:
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(tensor, name, None)
        if hooks:
            yield f"{path}.{name}", hooks


def _function(path: str, function: types.FunctionType, found: Reached) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        found.cells.append((name, cell))
        with contextlib.suppress(ValueError):  # not bound yet
            yield name, cell.cell_contents
    found.names.append((path, function, ("__code__", "__defaults__", "__kwdefaults__")))  # which tools exchange
    for value in (function.__defaults__, function.__kwdefaults__):
        if value:
            yield f"{path}'s defaults", value
    if function.__dict__:
        yield path, function.__dict__
    if is_of_user(function.__code__.co_filename):
        named = names_in(function.__code__)
        found.looks_at_rates |= looks_at_rates(function.__code__)
        scope = function.__globals__
        names = tuple([name for name in named.names if name in scope])
        builtin = set(named.names) - set(names)
        anything = not builtin.isdisjoint(_LOOKS_UP_ATTRIBUTES) or "attrgetter" in named.attributes
        watched = named.names if builtin.isdisjoint(_LOOKS_UP_GLOBALS) else (*_all_names(scope), *builtin)
        found.names.append(("global", scope, watched))
        for name in names:
            value = scope[name]
            if isinstance(value, types.ModuleType):
                yield from _module(name, value, named.attributes, anything, found)
            else:
                yield name, value
        for imported, level in named.imports:
            with contextlib.suppress(ImportError):
                full = importlib.util.resolve_name("." * level + imported, scope.get("__package__"))
                for name in {full, full.partition(".")[0]} & sys.modules.keys():
                    yield from _module(name, sys.modules[name], named.attributes, anything, found)


def _module(
    path: str, module: types.ModuleType, attributes: tuple[str, ...], anything: bool, found: Reached
) -> Iterator[tuple[str, Any]]:
    """What code that names these attributes, or perhaps ``anything``, may take of a module. Of an installed one,
    functions and objects are as they are; what names stand for, and what is in containers (``sys.argv``), counts there
    too."""
    if (id(module), attributes, anything) in found.modules:
        return
    found.modules.add((id(module), attributes, anything))
    users = _is_of_user(module)
    scope = vars(module)
    names = tuple([name for name in attributes if name in scope])
    found.names.append((path, scope, (*attributes, *_all_names(scope)) if users and anything else names))
    for name in names:
        value = scope[name]
        if isinstance(value, types.ModuleType):
            yield from _module(f"{path}.{name}", value, attributes, anything, found)
        elif users or isinstance(value, (list, dict, set)):
            yield f"{path}.{name}", value


def _is_of_user(module: types.ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return module.__spec__ is None if file is None else is_of_user(file)  # or one that was made, as in a notebook


def _all_names(scope: dict[str, Any]) -> tuple[str, ...]:
    return tuple([name for name in scope if type(name) is str and not name.startswith("__")])


_OF_CLASSES = {"__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__annotations__", "__slots__"}
_OF_CLASSES |= {"__abstractmethods__", "_abc_impl", "__annotations_cache__", "__static_attributes__", "__firstlineno__"}


def _class(path: str, kind: type, found: Reached) -> Iterator[tuple[str, Any]]:
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    if kind.__module__ == "builtins" or (file is not None and not is_of_user(file)):
        return
    names = tuple([name for name in vars(kind) if name not in _OF_CLASSES])
    found.names.append((path, vars(kind), names))
    found.classes.append((path, vars(kind)))
    for name in names:
        yield f"{path}.{name}", vars(kind)[name]
    for base in (*kind.__bases__, type(kind)):
        yield path, base


def _object(path: str, thing: Any, found: Reached) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, torch.optim.Optimizer):
        found.optimizers.append(thing)
    if isinstance(thing, torch.optim.lr_scheduler.LRScheduler):
        found.schedules.append(thing)
    found.instances.append((path, thing))
    yield type(thing).__qualname__, type(thing)
    own = getattr(thing, "__dict__", None)
    if isinstance(thing, threading.local):
        found.names.append((path, _OfThread(thing), (_OfThread.NAMES, *(own or ()))))
        for name, value in list((own or {}).items()):
            yield f"{path}.{name}", value
    elif type(own) is dict:
        found.dicts.append((path, own))
        found.seen[id(own)] = own
        for name, value in list(own.items()):
            yield f"{path}.{name}", value
    slots = [name for kind in type(thing).__mro__ for name in _slots(kind)]
    if slots:
        found.names.append((path, _Attributes(thing), tuple(slots)))
        for name in slots:
            yield f"{path}.{name}", getattr(thing, name, None)


def _of_subclass(path: str, container: Any, found: Reached) -> Iterator[tuple[str, Any]]:
    """The attributes of a container of a class that is not Python's own."""
    if type(container).__module__ not in ("builtins", "collections"):
        yield from _object(path, container, found)


def _slots(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    names = [slots] if isinstance(slots, str) else slots
    private = f"_{kind.__name__.lstrip('_')}"
    hidden = [name.startswith("__") and not name.endswith("__") for name in names]
    names = [private + name if is_hidden else name for name, is_hidden in zip(names, hidden, strict=True)]
    return [name for name in names if name not in ("__dict__", "__weakref__")]


class _Attributes:
    """The attributes of an object without a dictionary, as a mapping."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing

    def get(self, name: str, default: Any) -> Any:
        return getattr(self._thing, name, default)


class _OfThread(_Attributes):
    """The attributes that a ``threading.local`` has in the thread that asks, and which these are."""

    NAMES = "which attributes there are"

    def get(self, name: str, default: Any) -> Any:
        return ", ".join(sorted(vars(self._thing))) if name == self.NAMES else super().get(name, default)


class _ValueInContext:
    """A variable of a context, as a mapping."""

    def __init__(self, variable: contextvars.ContextVar[Any]) -> None:
        self._variable = variable

    def get(self, _: str, default: Any) -> Any:
        return self._variable.get(default)
