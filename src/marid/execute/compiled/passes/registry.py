"""Which passes there are, in which order, and running them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from marid.execute.compiled.describe import Description
from marid.execute.compiled.passes import approximate, attention, norms
from marid.execute.compiled.passes.conditions import ALWAYS, Condition, violation
from marid.execute.compiled.passes.rewriter import Rewriter
from marid.settings import settings

Change = Callable[[Rewriter], int | None]


@dataclass(frozen=True)
class Pass:
    """A pass: ``change`` rewrites the graph and returns how many changes it made (None: unknown).

    ``requires`` must hold before it and ``ensures`` after it, beside what must hold always: checked for users' passes,
    and for Marid's own under ``marid.settings.verify_passes``.
    """

    name: str
    change: Change
    requires: tuple[Condition, ...] = ()
    ensures: tuple[Condition, ...] = ()


@dataclass(frozen=True)
class Improved:
    """What passes made of a part. ``relied`` are the positions of numbers that became part of it, ``changes`` how much
    each pass did, and ``for_any_size`` says that only Marid's own did something: they conclude nothing from a size but
    what the description says of all sizes that fit it. What a user's pass may have concluded nobody knows."""

    description: Description
    relied: frozenset[int]
    changes: dict[str, int]
    for_any_size: bool


class PassFailed(Exception):
    """A pass raised, or left a graph that is wrong."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"the pass {name!r} failed: {why}")
        self.name = name


_OWN = (
    Pass("transposes", approximate.read_transposed),
    Pass("attention", attention.fuse),
    Pass("norms", norms.fuse),
    Pass("bias", approximate.add_bias_in_product),
)
"""All of them round elsewhere."""
_registered: dict[str, Pass] = {}
_changes = 0


def generation() -> tuple[int, bool, bool]:
    """Another value whenever passes would do something else: what was compiled before is compiled again."""
    return _changes, settings.passes, settings.fast_math


def wanted() -> bool:
    """Whether there are passes to run."""
    return settings.passes and (settings.fast_math or bool(_registered))


def register_pass(
    change: Any = None,
    /,
    *,
    name: str | None = None,
    requires: tuple[Condition, ...] = (),
    ensures: tuple[Condition, ...] = (),
) -> Any:
    """Have a pass of yours change what is compiled, after Marid's own; also as a decorator, with or without arguments.

    ``change(rewriter)`` gets a ``Rewriter``: ``rewriter.graph`` is a ``torch.fx.Graph`` of ATen operators, in which
    ``node.meta["val"]`` is a meta tensor. It may return how many changes it made. ``requires`` and ``ensures`` are
    functions that take the rewriter and return what is wrong, or None. A pass that raises, or leaves a graph that does
    not stand for what was recorded, is reported once as a warning, and nothing is changed. What it does change is
    compiled for the sizes that it saw, and compared with what was recorded before it is used.

    Raises ``TypeError`` for what is no function of one argument, ``ValueError`` for a name that is taken.
    """
    if change is None:
        return lambda function: _register(function, name, requires, ensures)
    return _register(change, name, requires, ensures)


def _register(change: Any, name: str | None, requires: tuple[Condition, ...], ensures: tuple[Condition, ...]) -> Any:
    global _changes
    if not callable(change):
        raise TypeError(f"register_pass() takes a function of one Rewriter, but got {type(change).__name__}")
    try:
        inspect.signature(change).bind(None)
    except TypeError:
        raise TypeError(f"register_pass() takes a function of one Rewriter; {change} is not called so") from None
    for condition in (*requires, *ensures):
        if not callable(condition):
            raise TypeError(f"a condition is a function of one Rewriter, but got {type(condition).__name__}")
    title: str = name if name is not None else getattr(change, "__name__", type(change).__name__)
    if title in _registered or any(own.name == title for own in _OWN):
        raise ValueError(f"there is a pass named {title!r} already")
    _registered[title] = Pass(title, cast("Change", change), tuple(requires), tuple(ensures))
    _changes += 1
    return change


def unregister_pass(name: str) -> None:
    """Take a registered pass out. Raises ``ValueError`` when there is none of that name."""
    global _changes
    if name not in _registered:
        raise ValueError(f"there is no registered pass named {name!r}")
    del _registered[name]
    _changes += 1


def improve(description: Description, numbers: list[Any], varying: set[int]) -> Improved | None:
    """What passes make of a part with these sizes and numbers, or None where they change nothing. Raises
    ``PassFailed``."""
    rewriter = Rewriter(description, numbers, varying)
    changes: dict[str, int] = {}
    for one in (*(_OWN if settings.fast_math else ()), *_registered.values()):
        own = one.name not in _registered
        checked = not own or settings.verify_passes
        if checked:
            _check(rewriter, one, one.requires, "before it")
        count = _apply(rewriter, one, own)
        if checked:
            _check(rewriter, one, (*ALWAYS, *one.ensures), "after it")
        if count:
            changes[one.name] = count
    if not changes:
        return None
    try:
        made = rewriter.description()
    except Exception as error:  # whatever follows from a graph that no condition has caught
        raise PassFailed(", ".join(changes), f"{type(error).__name__}: {error}") from error
    return Improved(made, frozenset(rewriter.relied), changes, _registered.keys().isdisjoint(changes))


def _apply(rewriter: Rewriter, one: Pass, own: bool) -> int:
    before = "" if own else str(rewriter.graph)  # they may not know, or not say, that they changed it
    try:
        count = one.change(rewriter)
    except Exception as error:  # a user's function may raise anything, and Marid's own must not cost a result
        raise PassFailed(one.name, f"{type(error).__name__}: {error}") from error
    if not own and (count is None or count == 0):
        count = int(str(rewriter.graph) != before)
    if not isinstance(count, int):
        raise PassFailed(one.name, f"it returned {count!r} in place of how many changes it made")
    return count


def _check(rewriter: Rewriter, one: Pass, conditions: tuple[Condition, ...], when: str) -> None:
    try:
        rewriter.complete()
        wrong = violation(rewriter, conditions)
    except Exception as error:  # a graph may be broken in any way, and a user's condition too
        raise PassFailed(one.name, f"{when}, {type(error).__name__}: {error}") from error
    if wrong is not None:
        raise PassFailed(one.name, f"{when}, {wrong}")
