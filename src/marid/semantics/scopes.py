"""Where an operation was written: source line, module path and phase, stamped on every node at capture.

A stamp costs two references per node. Sites (code object and instruction) and scopes (module path and phase) are
interned, and turned into text only when somebody asks.

All of it is read from the stack of the thread that records: the innermost frame of the user's, the modules whose calls
are running, and the optimizer whose step is. So a module that records nothing costs nothing, one that is shared by two
parents has the path of the parent that called it, and there is nothing to put right after an exception.
"""

from __future__ import annotations

import dis
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch
import typing_extensions  # which PyTorch requires

from marid.semantics import notebook_cells
from marid.semantics.source_files import PACKAGES, is_of_the_standard_library

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"


def text_of_site(site: Site | None) -> str:
    """``file:line`` of a place in the user's source, for reports."""
    return "<unknown>" if site is None else str(site)


class Site:
    """A place in the user's source, and the line of an installed ``package`` that was called from there, if the
    operation is written in one. ``file``, ``line`` and ``function`` are worked out on demand."""

    __slots__ = ("code", "instruction", "package")

    def __init__(self, code: CodeType, instruction: int, package: Site | None = None) -> None:
        self.code = code
        self.instruction = instruction
        self.package = package

    @property
    def file(self) -> str:
        return self.code.co_filename

    @property
    def function(self) -> str:
        return self.code.co_qualname

    @property
    def line(self) -> int:
        lines = _instruction_lines(self.code)
        return lines[self.instruction][2] if 0 <= self.instruction < len(lines) else self.code.co_firstlineno

    def __str__(self) -> str:
        package = self.package
        beside = "" if package is None else f"{BESIDE}{PACKAGES.split(package.file)[-1]}:{package.line})"
        return f"{notebook_cells.name_of(self.file)}:{self.line}{beside}"

    def __repr__(self) -> str:
        return f"Site({self})"


BESIDE = " (in "
"""What stands between the user's line and that of the package in a text of both."""


@functools.lru_cache(512)
def _instruction_lines(code: CodeType) -> list[tuple[int, int, int]]:
    spans = []
    for start, end, line in code.co_lines():
        spans += [(start, end, line or code.co_firstlineno)] * ((end - start) // 2)
    return spans


class Scope:
    """A module path (``None`` outside of modules, ``""`` in the outermost module) and a phase; interned.

    ``parent`` is the scope that the module was called in, ``module_class`` the full name of its class. In an
    optimizer's step, both names of a class are the optimizer's.
    """

    __slots__ = ("backward", "children", "module_class", "module_path", "module_type", "parent", "phase")

    def __init__(
        self,
        module_path: str | None,
        module_type: str | None,
        phase: str,
        parent: Scope | None = None,
        module_class: str | None = None,
    ) -> None:
        self.module_path = module_path
        self.module_type = module_type
        self.module_class = module_class
        self.phase = phase
        self.parent = parent
        self.children: dict[tuple[str, str], Scope] = {}
        self.backward = self
        if phase != BACKWARD:
            above = parent.backward if parent is not None else None
            self.backward = Scope(module_path, module_type, BACKWARD, above, module_class)

    def child(self, path: str, module_type: str, module_class: str | None = None) -> Scope:
        found = self.children.get((path, module_type))
        if found is None:
            made = Scope(path, module_type, self.phase, self, module_class)
            found = self.children.setdefault((path, module_type), made)
        return found

    def calls(self) -> list[Scope]:
        """The scopes of the module calls that this is in, from the outermost inward."""
        found: list[Scope] = []
        at: Scope | None = self
        while at is not None and at.module_path is not None:
            found.append(at)
            at = at.parent
        return found[::-1]


_OUTSIDE = Scope(None, None, FORWARD)
_steps: dict[type, Scope] = {}
"""The scopes of the steps of optimizers, by their class; kept for good, as all scopes."""
_phases: dict[str, Scope] = {}


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Operations recorded inside, by this thread, have this phase in place of "forward"; a hint, which changes no
    value. For example "prefill" and "decode"."""
    before = _state.outside
    _set_outside(_phases.setdefault(name, Scope(None, None, name)))
    try:
        yield
    finally:
        _set_outside(before)


def _set_outside(scope: Scope) -> None:
    _state.outside = scope
    if _native is not None:
        _native.set_outside(scope)


class _State(threading.local):
    """Per thread: the scope outside of all modules, and the line of another thread that it works for."""

    outside = _OUTSIDE
    asked_at: Site | None = None


_state = _State()

# --- source lines ------------------------------------------------------------------------------------------------

INTERNAL = object()
# Keyed by identity because hashing a code object hashes its contents; the code objects are kept alive, so an
# identity is never reused. Whatever is kept for good here is kept where the first of several threads has put it
# (`setdefault`): native/stack.cpp knows it by its address.
_codes: list[CodeType] = []
_sites: dict[int, Any] = {}
"""By identity of a code object: INTERNAL, or the interned sites by instruction."""
_INTERNAL_FOLDERS = tuple(
    os.path.normpath(folder) + os.sep
    for folder in (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))
)
_BACKPORTS = os.path.normpath(typing_extensions.__file__)
"""What the standard library will have: PyTorch's decorators come from it."""


class _PackageSites(dict[int, Site]):
    """The sites in code of an installed package."""


_calls: dict[tuple[Site, Site], Site] = {}


def _called_in(site: Site, package: Site) -> Site:
    """The user's line that has called a line of a package; interned."""
    found = _calls.get((site, package))
    if found is None:
        found = _calls.setdefault((site, package), Site(site.code, site.instruction, package))
    return found


def capture_site(frame: FrameType | None) -> Site | None:
    """The innermost frame of user code at or outside ``frame``, with that of the installed package which it has called;
    only the latter where there is no user code (a program that is a package); None when there is neither (interpreter
    exit)."""
    tables = _sites
    package: Site | None = None
    while frame is not None:
        code = frame.f_code
        table = tables.get(id(code))
        if table is None:
            table = _classify(code)
        if table is INTERNAL:
            frame = frame.f_back
            continue
        if type(table) is dict or package is None:
            site = table.get(frame.f_lasti)
            site = _site_at(code, frame.f_lasti) if site is None else site
            if type(table) is dict:
                return site if package is None else _called_in(site, package)
            package = site
        frame = frame.f_back
    return package


_PRECALL = dis.opmap.get("PRECALL")  # Python 3.11: stands before CALL, and calls itself once specialised


def _site_at(code: CodeType, instruction: int) -> Site:
    table = site_table(code)
    call = instruction + 4 if code.co_code[instruction] == _PRECALL else instruction
    return table.setdefault(instruction, table.setdefault(call, Site(code, call // 2)))


_native: Any = None


def use(module: Any) -> None:
    """Have the stack walked by ``native/stack.cpp``, which does the same as this file: below some dozen frames it saves
    tens of microseconds when caches are cold."""
    global _native
    module.configure_stack(
        sites=_sites,
        internal=INTERNAL,
        site_table=site_table,
        site_at=_site_at,
        called_in=_called_in,
        outside=_OUTSIDE,
        child_scope=child_scope,
        meet=_meet,
        walk=_walk,
        module_code=_MODULE_CALL,
        optimizer_code=_OPTIMIZER_STEP,
        optimizer_self=_OPTIMIZER_STEP.co_varnames.index("self"),
    )
    _native = module
    module.set_outside(_state.outside)


def current_site() -> Site | None:
    """The user's line that is running now, in this thread or in the one that it works for."""
    here = _native.here() if _native is not None else capture_site(sys._getframe(1))
    return _state.asked_at if here is None else here


@contextmanager
def working_for(site: Site | None) -> Iterator[None]:
    """What this thread, in which no line of the user's runs, does inside is done for that line of another thread."""
    _state.asked_at, before = site, _state.asked_at
    try:
        yield
    finally:
        _state.asked_at = before


def site_table(code: CodeType) -> Any:
    """``INTERNAL`` for code of PyTorch, Marid and the standard library; else the sites in it, as ``_PackageSites`` for
    code of other installed packages."""
    table = _sites.get(id(code))
    return _classify(code) if table is None else table


def _classify(code: CodeType) -> Any:
    name = code.co_filename
    table: Any = {}
    if name.startswith(_INTERNAL_FOLDERS) or name == _BACKPORTS or is_of_the_standard_library(name):
        table = INTERNAL
    elif PACKAGES.search(name):
        table = _PackageSites()
    _codes.append(code)
    return _sites.setdefault(id(code), table)


# --- modules and optimizers --------------------------------------------------------------------------------------

_names: weakref.WeakKeyDictionary[torch.nn.Module, dict[int, tuple[weakref.ref[torch.nn.Module], str]]] = (
    weakref.WeakKeyDictionary()
)


outermost: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""Modules that were called by no other, and recorded something."""


def _name_under(parent: torch.nn.Module, module: torch.nn.Module) -> str | None:
    """The name of ``module`` below ``parent`` as ``named_modules`` gives it; None when it is not below it."""
    known = _names.get(parent)
    if known is not None:
        entry = known.get(id(module))
        if entry is not None and entry[0]() is module:
            return entry[1]
    fresh = {id(m): (weakref.ref(m), name) for name, m in parent.named_modules() if m is not parent}
    _names[parent] = fresh
    entry = fresh.get(id(module))
    return None if entry is None else entry[1]


def child_scope(scope: Scope, parent: torch.nn.Module | None, module: torch.nn.Module) -> Scope:
    """The scope inside of ``module`` when ``parent``, or nobody, calls it in ``scope``."""
    kind = type(module).__name__
    full = f"{type(module).__module__}.{type(module).__qualname__}"
    if parent is None:
        outermost.add(module)
        return scope.child("", kind, full)
    name = _name_under(parent, module) if parent is not module else None
    own = name if name is not None else f"<{kind}>"
    return scope.child(f"{scope.module_path}.{own}" if scope.module_path else own, kind, full)


# What PyTorch runs a module in, and an optimizer's step; both have it as the local variable `self`.
_MODULE_CALL: CodeType = torch.nn.Module._call_impl.__code__
_OPTIMIZER_STEP = next(
    constant
    for constant in torch.optim.Optimizer.profile_hook_step.__code__.co_consts
    if isinstance(constant, CodeType) and constant.co_name == "wrapper"
)


def current_scope() -> Scope:
    """The modules, or the optimizer, that are running now."""
    return _native.scope() if _native is not None else _scope_of(sys._getframe(1))


def _scope_of(frame: FrameType | None) -> Scope:
    modules: list[torch.nn.Module] = []
    while frame is not None:
        if frame.f_code is _MODULE_CALL:
            modules.append(frame.f_locals["self"])
        elif frame.f_code is _OPTIMIZER_STEP:
            step = _meet(frame.f_locals["self"])
            if not modules:
                return step
            break  # what is outside of it has not called these
        frame = frame.f_back
    scope, parent = _state.outside, None
    for module in reversed(modules):
        scope, parent = child_scope(scope, parent, module), module
    return scope


def _walk() -> tuple[Site | None, Scope]:
    return capture_site(sys._getframe(1)), _scope_of(sys._getframe(1))


# --- optimizers ------------------------------------------------------------------------------------------------------

_after_step: Callable[..., None] | None = None
_met: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = weakref.WeakKeyDictionary()


def _meet(optimizer: torch.optim.Optimizer) -> Scope:
    """An optimizer records something in its step: the scope of that, which has its class for a module's."""
    if _after_step is not None and optimizer not in _met:
        _met[optimizer] = optimizer.register_step_post_hook(_after_step)
    kind = type(optimizer)
    if kind not in _steps:
        full = f"{kind.__module__}.{kind.__qualname__}"
        return _steps.setdefault(kind, Scope(None, kind.__name__, OPTIMIZER, module_class=full))
    return _steps[kind]


def meet(optimizer: torch.optim.Optimizer) -> None:
    """Do what its first step would do to it, for whoever looks at what a step changes."""
    _meet(optimizer)


def met_optimizers() -> list[torch.optim.Optimizer]:
    """The optimizers whose steps have recorded something, and that are alive."""
    return list(_met)


def meet_optimizers(after_step: Callable[..., None]) -> Callable[[], None]:
    """Have ``after_step`` called after each step of an optimizer that records something. Returns what ends that."""
    global _after_step
    _after_step = after_step

    def end() -> None:
        global _after_step
        _after_step = None
        for handle in _met.values():
            handle.remove()
        _met.clear()
        if _native is not None:
            _native.forget_optimizers()

    return end
