"""Large packages that PyTorch imports without a need, and that are not imported on its behalf here: Dynamo and sympy.

Dynamo traces programs for ``torch.compile``. Optimizers and reference implementations import it to say that they are
not to be traced, which takes one to two seconds of each training. While it is missing nothing is traced.

Meta kernels that are written in Python import sympy, by way of ``symbolic_shapes``, to ask whether sizes are symbols,
which takes 0.4 s. Sizes are numbers here.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
import os
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch._compile
import torch.optim

from marid.imports import on_import

DYNAMO = "torch._dynamo"
_SYMBOLIC_SHAPES = "torch.fx.experimental.symbolic_shapes"
_REFERENCES = ("torch._decomp", "torch._meta_registrations", "torch._prims", "torch._refs")  # what meta kernels call
_SPARED = (*_REFERENCES, "torch.optim", "marid.")  # what is not to be traced

# --- Dynamo ----------------------------------------------------------------------------------------------------------

_spared: list[Callable[[], None]] = []


def spare_dynamo() -> Callable[[], None]:
    """Let optimizers and reference implementations run without Dynamo until it is imported. Returns what ends that."""
    if DYNAMO in sys.modules:
        return lambda: None
    _spared[:] = _spare_functions(), _spare_steps()
    return require_dynamo


def require_dynamo() -> None:
    """Dynamo is about to be imported, and can be told what not to trace."""
    while _spared:
        _spared.pop()()


def _spare_functions() -> Callable[[], None]:
    """What is not to be traced asks for its attribute ``__dynamo_disable`` at its first call, and where that is missing
    imports Dynamo to make it. Until then the function is its own answer."""
    compiling: Any = torch._compile

    def answer(owner: Any, name: str, *default: Any) -> Any:
        is_spared = name == "__dynamo_disable" and str(owner.__module__).startswith(_SPARED)
        return owner if is_spared else getattr(owner, name, *default)

    def end() -> None:
        if vars(compiling).get("getattr") is answer:
            del compiling.getattr

    compiling.getattr = answer
    return end


def _without_graph_breaks(func: Callable[..., Any]) -> FunctionType:
    """What ``_use_grad_for_differentiable`` makes of a step of PyTorch's optimizers, but for Dynamo's graph breaks."""

    def _use_grad(*args: Any, **kwargs: Any) -> Any:
        before = torch.is_grad_enabled()
        try:
            torch.set_grad_enabled(args[0].defaults["differentiable"])
            return func(*args, **kwargs)
        finally:
            torch.set_grad_enabled(before)

    assert isinstance(_use_grad, FunctionType)
    return _use_grad


def _breaks_graphs(own: CodeType, code: CodeType) -> bool:
    return (own.co_name, own.co_freevars) == (code.co_name, code.co_freevars) and "_dynamo" in own.co_names


def _spare_steps() -> Callable[[], None]:
    """A step of an optimizer imports Dynamo to break graphs. Its function stays what it is, whoever has it by then, and
    has other code until Dynamo is imported."""
    code = _without_graph_breaks(lambda: None).__code__
    before: dict[FunctionType, CodeType] = {}
    for optimizer in vars(torch.optim).values():
        step = vars(optimizer).get("step") if isinstance(optimizer, type) else None
        if isinstance(step, FunctionType) and _breaks_graphs(step.__code__, code):
            before[step], step.__code__ = step.__code__, code

    def end() -> None:
        for step, own in before.items():
            if step.__code__ is code:
                step.__code__ = own

    return end


# --- sympy -----------------------------------------------------------------------------------------------------------
#
# While a thread runs a meta kernel, two modules stand in for sympy and `symbolic_shapes`, and answer PyTorch's own
# functions on that thread. Whoever else meets one, and asks it for anything, gets what the module itself has, which is
# imported then.


class _Expression:
    """In place of ``sympy.Basic``: of this class there is nothing."""


def _itself(answer: Any) -> Any:
    return answer


_ANSWERS: dict[str, dict[str, Any]] = {
    "sympy": {"Basic": _Expression},
    _SYMBOLIC_SHAPES: {
        **dict.fromkeys(("expect_true", "guard_or_false", "guard_or_true", "guard_size_oblivious"), _itself),
        **dict.fromkeys(("guard_int", "guarding_hint_or_throw", "statically_known_true"), _itself),
        "has_guarding_hint": lambda _number: True,
        "is_nested_int": lambda _number: False,
        "sym_and": lambda *conditions: functools.reduce(operator.and_, conditions),
        "sym_eq": lambda one, other: tuple(one) == tuple(other) if isinstance(one, (tuple, list)) else one == other,
        "sym_or": lambda *conditions: functools.reduce(operator.or_, conditions),
    },
}

_lock = threading.RLock()
_running: set[int] = set()  # threads that run meta kernels
_spares_sympy = False


class _StandIn(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        del self.__spec__  # it is asked for like all else

    def __getattr__(self, name: str) -> Any:
        if self._answers(sys._getframe(1)):
            if name in _ANSWERS[self.__name__]:
                return _ANSWERS[self.__name__][name]
            if name == "__spec__":  # an import asks whether it has been loaded
                return None
            if name == "__path__":  # ... and is a package
                raise AttributeError(name)
        found = getattr(self._real(), name)
        if name == "__path__" and _imported not in sys.meta_path:  # for a module in it, which may have come with it
            sys.meta_path.insert(0, _imported)
        return found

    def __setattr__(self, name: str, value: Any) -> None:  # a module in it, when it has been imported
        setattr(self._real(), name, value)

    def _real(self) -> ModuleType:
        _require_sympy()
        return importlib.import_module(self.__name__)

    def _answers(self, caller: FrameType) -> bool:
        in_function = caller.f_code.co_flags & inspect.CO_NEWLOCALS  # what a module keeps is to be the thing itself
        module = caller.f_globals.get("__name__", "")
        is_reference = module == "torch" or module.startswith(_REFERENCES)  # `torch._check` is of the former
        return bool(
            in_function
            and is_reference
            and threading.get_ident() in _running
            and sys.modules.get(self.__name__) is self
        )


class _Imported(MetaPathFinder, Loader):
    """Finds modules that have been imported, for those who began to import them before."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in sys.modules and target is None else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = sys.modules[spec.name]
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


_imported = _Imported()
_stand_ins = [_StandIn(name) for name in _ANSWERS]


def _take_away() -> None:
    with _lock:
        for module in _stand_ins:
            if sys.modules.get(module.__name__) is module:
                del sys.modules[module.__name__]


class SizesAreNumbers:
    """A block in which this thread runs meta kernels on tensors whose sizes are numbers."""

    def __enter__(self) -> None:
        with _lock:
            _running.add(threading.get_ident())
            if _spares_sympy:
                sys.modules.update({module.__name__: module for module in _stand_ins})

    def __exit__(self, *_: object) -> None:
        with _lock:
            _running.discard(threading.get_ident())
            if not _running:
                _take_away()


def _forked() -> None:
    """In the child there are no other threads, whatever they held."""
    global _lock
    _lock = threading.RLock()
    _running.clear()
    _take_away()


os.register_at_fork(after_in_child=_forked)


def _require_sympy() -> None:
    """Somebody imports one of the two: from here on there are the modules themselves."""
    global _spares_sympy
    with _lock:
        _spares_sympy = False
        _take_away()


def spare_sympy() -> Callable[[], None]:
    """Let such blocks do without sympy, until somebody imports it. Returns what ends that."""
    global _spares_sympy
    _spares_sympy = not any(name in sys.modules for name in _ANSWERS)
    watch_no_more = on_import(_ANSWERS, lambda _spec: _require_sympy())

    def end() -> None:
        watch_no_more()
        _require_sympy()
        if _imported in sys.meta_path:
            sys.meta_path.remove(_imported)

    return end
