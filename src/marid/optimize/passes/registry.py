"""Which passes there are, in which order, and running them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, cast

from marid.graph.node import Spec
from marid.graph.program import Program
from marid.optimize.passes import approximate, attention, common, constants, dead_code, linear, norms, simplify, views
from marid.optimize.passes.conditions import ALWAYS, Condition, no_dead_code, no_repeated_views, violation
from marid.optimize.passes.lowering import Improved, lower
from marid.optimize.passes.rewriter import Rewriter
from marid.optimize.passes.storages import Storages
from marid.settings import settings

__all__ = ["Pass", "PassFailed", "generation", "improve", "register_pass", "unregister_pass"]

Change = Callable[[Rewriter], int | None]

_LARGEST = 3_000  # instructions; the graph of a larger program would take seconds, and tens of megabytes

# What changes the geometry of a tensor that others may hold.
_RESHAPING = {"resize_", "resize_as_", "set_", "as_strided_", "swapaxes_", "transpose_", "t_", "squeeze_", "unsqueeze_"}


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
    approximates: bool = False


class PassFailed(Exception):
    """A pass raised, or left a graph that is wrong. ``own`` says that it is one of Marid's."""

    def __init__(self, name: str, why: str, own: bool) -> None:
        super().__init__(f"the pass {name!r} failed: {why}")
        self.name = name
        self.own = own


_DEAD_CODE = Pass("dead code", dead_code.remove, ensures=(no_dead_code,))
_OWN = (
    Pass("views", views.collapse),
    Pass("constants", constants.fold),
    Pass("simplify", simplify.simplify),
    Pass("common", common.merge, ensures=(no_repeated_views,)),
    _DEAD_CODE,  # what is left over has other readers
    Pass("transposes", approximate.read_transposed, approximates=True),
    Pass("attention", attention.fuse, approximates=True),
    Pass("norms", norms.fuse, approximates=True),
    Pass("bias", approximate.add_bias_in_product, approximates=True),
    Pass("linear", linear.fuse_activation),
    _DEAD_CODE,
)
_registered: dict[str, Pass] = {}
_generation = 0


def generation() -> int:
    """Grows with everything that decides what passes do: a program that was improved before is improved again."""
    return _generation


def _renew() -> None:
    global _generation
    _generation += 1


settings.when_changed(_renew)


def register_pass(
    change: Any = None,
    /,
    *,
    name: str | None = None,
    requires: tuple[Condition, ...] = (),
    ensures: tuple[Condition, ...] = (),
) -> Any:
    """Have a pass of yours improve programs, after Marid's own; also as a decorator, with or without arguments.

    ``change(rewriter)`` gets a ``Rewriter``: ``rewriter.graph`` is a ``torch.fx.Graph`` of ATen operators, in which
    ``node.meta["val"]`` is a meta tensor. It may return how many changes it made. ``requires`` and ``ensures`` are
    functions that take the rewriter and return what is wrong, or None. A pass that raises, or leaves a graph that does
    not stand for the program, is reported once as a warning, and the program runs as it was recorded.

    Raises ``TypeError`` for what is no function of one argument, ``ValueError`` for a name that is taken.
    """
    if change is None:
        return lambda function: _register(function, name, requires, ensures)
    return _register(change, name, requires, ensures)


def _register(change: Any, name: str | None, requires: tuple[Condition, ...], ensures: tuple[Condition, ...]) -> Any:
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
    _renew()
    return change


def unregister_pass(name: str) -> None:
    """Take a registered pass out. Raises ``ValueError`` when there is none of that name."""
    if name not in _registered:
        raise ValueError(f"there is no registered pass named {name!r}")
    del _registered[name]
    _renew()


def improvable(program: Program) -> bool:
    """Whether passes may look at a program: it is worth it, and no operation gives its arguments another shape."""
    if not settings.pass_instructions <= len(program.instructions) <= _LARGEST:
        return False
    for instruction in program.instructions:
        if instruction.op.mutates:
            schema = instruction.op.func._schema
            if schema.name.partition("::")[2] in _RESHAPING or any(a.is_out for a in schema.arguments):
                return False
    return True


def improve(
    program: Program,
    specs: tuple[Spec | None, ...],
    params: list[Any],
    varying: set[int],
    unequal: set[tuple[int, int]],
) -> Generator[None, None, Improved | None]:
    """What passes make of a program for runs with these specs, or None where they change nothing.

    A generator, so that it can be done in pieces: it yields a few times and returns the result. Raises ``PassFailed``.
    """
    verifies = settings.verify_passes
    rewriter = Rewriter(program, specs, params, varying, unequal, with_val=bool(_registered))
    yield
    original = Storages(rewriter)
    rewriter.storages = original.copy()
    changes: dict[str, int] = {}
    for one in (*_OWN, *_registered.values()):
        if one.approximates and not settings.fast_math:
            continue
        own = one.name not in _registered
        _check(rewriter, one, one.requires, own, "before it", verifies or not own)
        count = _apply(rewriter, one, own)
        _check(rewriter, one, (*ALWAYS, *one.ensures), own, "after it", verifies or not own)
        if count:
            changes[one.name] = changes.get(one.name, 0) + count
    yield
    if not changes:
        return None
    if _registered:
        dead_code.remove(rewriter)
    try:
        improved = lower(rewriter, original)
    except Exception as error:  # BrokenRule, or whatever follows from a graph that no condition has caught
        names = ", ".join(_registered)
        raise PassFailed(names or "lowering", str(error), not names) from error
    improved.changes = changes
    return improved


def _apply(rewriter: Rewriter, one: Pass, own: bool) -> int:
    before = "" if own else str(rewriter.graph)
    try:
        count = one.change(rewriter)
    except Exception as error:  # a user's function may raise anything, and Marid's own must not cost a result
        raise PassFailed(one.name, f"{type(error).__name__}: {error}", own) from error
    if count is None:
        count = int(str(rewriter.graph) != before)
    if not isinstance(count, int):
        raise PassFailed(one.name, f"it returned {count!r} in place of how many changes it made", own)
    return count


def _check(
    rewriter: Rewriter, one: Pass, conditions: tuple[Condition, ...], own: bool, when: str, wanted: bool
) -> None:
    if not wanted:
        return
    try:
        if not own:
            rewriter.complete()
        wrong = violation(rewriter, conditions)
    except Exception as error:  # a graph may be broken in any way, and a user's condition too
        raise PassFailed(one.name, f"{when}, {type(error).__name__}: {error}", own) from error
    if wrong is not None:
        raise PassFailed(one.name, f"{when}, {wrong}", own)
