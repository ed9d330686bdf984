"""Where an operation was written: source line, module path and phase, stamped on every node at capture.

A stamp costs two references per node. Sites (code object and instruction) and scopes (module path and phase) are
interned, and turned into text only when somebody asks.

Module paths follow the calls, as seen by PyTorch's global module hooks: a module shared by two parents has the path of
the parent that called it, and a forward that raises is left like one that returns. What Dynamo traces records nothing:
the hooks vanish from it.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

__all__ = [
    "BACKWARD",
    "FORWARD",
    "INTERNAL",
    "OPTIMIZER",
    "Scope",
    "Site",
    "capture_site",
    "current_site",
    "install_hooks",
    "is_of_the_standard_library",
    "phase",
    "site_table",
    "sites",
    "state",
    "use",
]

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"


class Site:
    """A place in the user's source. ``file``, ``line`` and ``function`` are worked out on demand."""

    __slots__ = ("code", "instruction")

    def __init__(self, code: CodeType, instruction: int) -> None:
        self.code = code
        self.instruction = instruction

    @property
    def file(self) -> str:
        return self.code.co_filename

    @property
    def function(self) -> str:
        return self.code.co_qualname

    @property
    def line(self) -> int:
        for index, (_, _, line) in enumerate(_instruction_lines(self.code)):
            if index == self.instruction:
                return line
        return self.code.co_firstlineno

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    def __repr__(self) -> str:
        return f"Site({self})"


def _instruction_lines(code: CodeType) -> list[tuple[int, int, int]]:
    spans = []
    for start, end, line in code.co_lines():
        spans += [(start, end, line or code.co_firstlineno)] * ((end - start) // 2)
    return spans


class Scope:
    """A module path (``None`` outside of modules, ``""`` in the outermost module) and a phase; interned."""

    __slots__ = ("backward", "children", "module_path", "module_type", "phase")

    def __init__(self, module_path: str | None, module_type: str | None, phase: str) -> None:
        self.module_path = module_path
        self.module_type = module_type
        self.phase = phase
        self.children: dict[tuple[str, str], Scope] = {}
        self.backward = self if phase == BACKWARD else Scope(module_path, module_type, BACKWARD)

    def child(self, path: str, module_type: str) -> Scope:
        found = self.children.get((path, module_type))
        if found is None:
            found = self.children[path, module_type] = Scope(path, module_type, self.phase)
        return found


_OUTSIDE = Scope(None, None, FORWARD)
_OUTSIDE_OPTIMIZER = Scope(None, None, OPTIMIZER)


_phases: dict[tuple[str, str | None, str | None], Scope] = {}


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Operations recorded inside, by this thread, have this phase in place of "forward"; a hint, which changes no
    value. For example "prefill" and "decode"."""
    here, before, outside = state, state.scope, state.outside
    here.outside = _in_phase(name, outside)
    here.scope = _in_phase(name, before)
    try:
        yield
    finally:
        here.scope, here.outside = before, outside


def _in_phase(name: str, scope: Scope) -> Scope:
    key = (name, scope.module_path, scope.module_type)
    return _phases.setdefault(key, Scope(scope.module_path, scope.module_type, name))


class _State(threading.local):
    """Per thread: the current scope, and the modules being called with the scope outside of each."""

    def __init__(self) -> None:
        self.scope = _OUTSIDE
        self.outside = _OUTSIDE  # of all modules
        self.modules: list[tuple[torch.nn.Module, Scope]] = []
        self.optimizers: list[Scope] = []
        # Backward must run on the thread that recorded: on autograd's device threads there is no user frame, no
        # module stack, and interpreter exit can race with them. PyTorch keeps this switch per thread.
        torch.autograd.set_multithreading_enabled(False)


state = _State()

# --- source lines ------------------------------------------------------------------------------------------------

INTERNAL = object()
# Keyed by identity because hashing a code object hashes its contents; the code objects are kept alive, so an
# identity is never reused.
_codes: list[CodeType] = []
sites: dict[int, Any] = {}
"""By identity of a code object: INTERNAL, or the interned sites by instruction."""
_INTERNAL_FOLDERS = tuple(
    os.path.normpath(folder) + os.sep
    for folder in (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(__file__)))
)
_CONTESTANTS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "bench", "contestants") + os.sep
"""What ``marid bench`` measures is user code."""
_STDLIB = os.path.dirname(os.__file__) + os.sep


def capture_site(frame: FrameType | None) -> Site | None:
    """The innermost frame of user code at or outside ``frame``; None when there is none (interpreter exit)."""
    tables = sites
    while frame is not None:
        code = frame.f_code
        table = tables.get(id(code))
        if table is None:
            table = _classify(code)
        if table is INTERNAL:
            frame = frame.f_back
            continue
        instruction = frame.f_lasti
        site = table.get(instruction)
        if site is None:
            site = table[instruction] = Site(code, instruction // 2)
        return site
    return None


_quicker: Callable[[], Site | None] | None = None


def use(quicker: Callable[[], Site | None]) -> None:
    """Have ``current_site`` ask this, which does the same: below some dozen frames of ours it saves tens of
    microseconds when caches are cold."""
    global _quicker
    _quicker = quicker


def current_site() -> Site | None:
    """The user's line that is running now."""
    return _quicker() if _quicker is not None else capture_site(sys._getframe(1))


def is_of_the_standard_library(file: str) -> bool:
    """Whether a source file is Python's own."""
    return file.startswith("<frozen ") or (file.startswith(_STDLIB) and "site-packages" not in file)


def site_table(code: CodeType) -> Any:
    """``INTERNAL`` for code of PyTorch, Marid and the standard library; else the sites in it."""
    table = sites.get(id(code))
    return _classify(code) if table is None else table


def _classify(code: CodeType) -> Any:
    name = code.co_filename
    internal = name.startswith(_INTERNAL_FOLDERS) or is_of_the_standard_library(name)
    internal = internal and not name.startswith(_CONTESTANTS)
    table: Any = INTERNAL if internal else {}
    _codes.append(code)
    sites[id(code)] = table
    return table


# --- modules and optimizers --------------------------------------------------------------------------------------

_names: weakref.WeakKeyDictionary[torch.nn.Module, dict[int, tuple[weakref.ref[torch.nn.Module], str]]] = (
    weakref.WeakKeyDictionary()
)


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


def _enter_module(module: torch.nn.Module, _args: Any) -> None:
    if is_dynamo_compiling():
        return
    here = state
    outside = here.scope
    kind = type(module).__name__
    if here.modules:
        parent = here.modules[-1][0]
        name = _name_under(parent, module) if parent is not module else None
        if name is None and not _is_running(parent):
            # An interrupt left this stack behind: PyTorch runs no hooks then.
            outside = here.modules[0][1]
            here.modules.clear()
        else:
            prefix = outside.module_path
            own = name if name is not None else f"<{kind}>"
            here.modules.append((module, outside))
            here.scope = outside.child(f"{prefix}.{own}" if prefix else own, kind)
            return
    if outside.phase == OPTIMIZER:
        _forget_dead_optimizers(entering=0)
        outside = here.scope
    here.modules.append((module, outside))
    here.scope = here.outside.child("", kind)


def _leave_module(module: torch.nn.Module, _args: Any, _result: Any) -> None:
    if is_dynamo_compiling():
        return
    here = state
    for index in range(len(here.modules) - 1, -1, -1):
        if here.modules[index][0] is module:
            here.scope = here.modules[index][1]
            del here.modules[index:]
            return


def _is_running(module: torch.nn.Module) -> bool:
    return any(
        frame.f_code.co_name in ("_call_impl", "_wrapped_call_impl") and frame.f_locals.get("self") is module
        for frame in _frames()
    )


def _frames() -> list[FrameType]:
    frames, frame = [], sys._getframe(2)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _enter_optimizer(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
    if is_dynamo_compiling():
        return
    _forget_dead_optimizers(entering=1)
    state.optimizers.append(state.scope)
    state.scope = _OUTSIDE_OPTIMIZER


def _leave_optimizer(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
    if not is_dynamo_compiling() and state.optimizers:
        state.scope = state.optimizers.pop()


def _forget_dead_optimizers(entering: int) -> None:
    # A step that raised runs no post-hook; as many steps are running as there are wrapper frames.
    running = sum("profile_hook_step" in frame.f_code.co_qualname for frame in _frames())
    while len(state.optimizers) > running - entering:
        state.scope = state.optimizers.pop()


def install_hooks() -> None:
    """Follow module calls and optimizer steps, in every thread of this process."""
    torch.nn.modules.module.register_module_forward_pre_hook(_enter_module)
    torch.nn.modules.module.register_module_forward_hook(_leave_module, always_call=True)
    register_optimizer_step_pre_hook(_enter_optimizer)
    register_optimizer_step_post_hook(_leave_optimizer)
