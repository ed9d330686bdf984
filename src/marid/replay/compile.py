"""``marid.compile``: what it makes of functions, and of modules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch

from marid.replay.function import Compiled


class CompiledModule(Compiled):
    """A module under ``marid.compile``: called, it is replayed; in everything else it is the module, whose parameters,
    hooks and mode are its own. So it can be a part of other modules, and ``isinstance`` takes it for one."""

    @property
    def __class__(self) -> type:
        return self._function.__class__

    @property
    def __dict__(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._function.__dict__

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if not isinstance(found, MethodType) or found.__self__ is not self._function:
            return found

        @functools.wraps(found)
        def method(*args: Any, **kwargs: Any) -> Any:
            returned = found(*args, **kwargs)
            return self if returned is self._function else returned  # as `to` and `eval` return the module

        return method

    # Python looks for these in the class, not in the object.

    def __eq__(self, other: object) -> bool:
        return self._function == (other._function if isinstance(other, CompiledModule) else other)

    def __hash__(self) -> int:
        return hash(self._function)

    def __len__(self) -> int:
        return len(self._function)  # pyright: ignore[reportArgumentType]

    def __bool__(self) -> bool:
        return bool(self._function)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._function)  # pyright: ignore[reportArgumentType]

    def __contains__(self, key: Any) -> bool:
        return key in self._function  # pyright: ignore[reportOperatorIssue]

    def __getitem__(self, key: Any) -> Any:
        return self._function[key]  # pyright: ignore[reportIndexIssue]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._function[key] = value  # pyright: ignore[reportIndexIssue]

    def __delitem__(self, key: Any) -> None:
        del self._function[key]  # pyright: ignore[reportIndexIssue]

    def __dir__(self) -> list[str]:
        return sorted({*dir(self._function), "forget", "stats"})

    def __repr__(self) -> str:
        return repr(self._function)


def compile(
    fn: Callable[..., Any] | None = None, *, state: Any = None, fullgraph: bool = False, dynamic_dims: Any = None
) -> Any:
    """``fn``, recorded when it is called, and replayed without its Python once two recordings did the same.

    A replay does what the Python did: results of its own, state written in place, gradients, random numbers. It is
    made only while everything that the Python could see is as it was; see ``docs/compile.md`` for what that covers.
    What cannot be replayed runs as Python, and ``stats()`` of the returned object says why; with ``fullgraph`` it
    raises instead: ``SyncForbiddenError`` where a value is read, else ``UnsupportedOperationError``.

    ``state`` gives the objects that hold what ``fn`` works on beside its arguments, such as ``(model, optimizer)``, in
    place of what ``fn`` can reach; all else counts as fixed. ``dynamic_dims`` gives, by position or name of an
    argument, a dimension or several whose size varies (``mark_dynamic``). Without ``fn``, a decorator.

    Of a module it makes one with the same parameters, which can be a part of other modules.
    """
    if fn is None:
        return lambda function: compile(function, state=state, fullgraph=fullgraph, dynamic_dims=dynamic_dims)
    kind = CompiledModule if isinstance(fn, torch.nn.Module) else Compiled
    return kind(fn, state, fullgraph, dynamic_dims)
