"""``marid.compile``: a function that is recorded, and replayed when two recordings of it did the same."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

from marid.errors import UnsupportedOperationError
from marid.frontend.observe import observer
from marid.replay.arguments import Call, Unreadable
from marid.replay.places import Refused
from marid.replay.recording import Recording
from marid.replay.run import Run
from marid.replay.template import MISS, Template
from marid.report.stats import FunctionStats, functions
from marid.settings import settings

__all__ = ["Compiled", "compile"]

logger = logging.getLogger("marid")

_TEMPLATES = 8  # that calls of one kind keep: each is what the function did in another state
_RECORDINGS = 4  # kept to be compared with the next ones


class _Kind:
    """Calls that differ only in the values of tensors."""

    def __init__(self, others: list[Any]) -> None:
        self.others = others  # their identities are in the key
        self.templates: list[Template] = []
        self.recordings: list[Recording] = []
        self.attempts = 0
        self.given_up = False


class Compiled:
    """A function under ``marid.compile``; called like the function."""

    def __init__(self, function: Callable[..., Any], fullgraph: bool) -> None:
        functools.update_wrapper(self, function, updated=())
        self._function = function
        self._fullgraph = fullgraph
        self._kinds: dict[Any, _Kind] = {}
        self._lock = threading.RLock()
        self._given_up = False
        self._stats = FunctionStats(getattr(function, "__qualname__", type(function).__qualname__))
        functions.add(self._stats)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if observer() is not None:  # part of a function that is being recorded
            return self._function(*args, **kwargs)
        with self._lock:
            self._stats.calls += 1
            if not self._given_up:
                try:
                    call = Call(args, kwargs)
                except Unreadable:
                    self._stats.count_fallback("inside of a transform, a mode or hooks on saved tensors")
                else:
                    kind = self._kind_of(call)
                    result = self._replayed(kind, call)
                    if result is not MISS:
                        return result
                    if not kind.given_up:
                        return self._recorded(kind, call, args, kwargs)
            self._stats.plain += 1
        return self._function(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_function":
            raise AttributeError(name)
        return getattr(self._function, name)

    def stats(self) -> FunctionStats:
        """What became of the calls so far; a snapshot."""
        return self._stats.copy()

    def _kind_of(self, call: Call) -> _Kind:
        kind = self._kinds.get(call.key)
        if kind is None:
            kind = self._kinds[call.key] = _Kind(call.others)
            if len(self._kinds) > settings.compile_kinds:
                kind.given_up = True
                self._say(f"more than {settings.compile_kinds} kinds of arguments (MARID_COMPILE_KINDS)")
                self._kinds.pop(call.key)
        return kind

    def _replayed(self, kind: _Kind, call: Call) -> Any:
        for index, template in enumerate(kind.templates):
            result = template.run(call)
            if result is not MISS:
                self._stats.replays += 1
                if index:
                    kind.templates.insert(0, kind.templates.pop(index))
                return result
        return MISS

    def _recorded(self, kind: _Kind, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = Run(self._function, call)
        result = run.call(args, kwargs, self._fullgraph)
        self._stats.recordings += 1
        kind.attempts += 1
        recording = run.recording
        if recording is None:
            assert run.refusal is not None
            self._fall_back(kind, run.refusal)
            return result
        why = None
        for earlier in kind.recordings:
            why = earlier.difference(recording)
            if why is None:
                kind.templates.insert(0, Template(recording, run.prepare(), len(call.lazy)))
                del kind.templates[_TEMPLATES:]
                kind.recordings.remove(earlier)
                kind.attempts = 0
                return result
        kind.recordings.append(recording)
        del kind.recordings[:-_RECORDINGS]
        if why is not None:
            self._fall_back(kind, Refused(why))
        return result

    def _fall_back(self, kind: _Kind, refused: Refused) -> None:
        reason = str(refused)
        self._stats.count_fallback(reason)
        if refused.for_good:
            self._given_up = True
        elif kind.attempts >= settings.compile_recordings:
            kind.given_up = True
        else:
            return
        kind.recordings.clear()
        self._say(reason)

    def _say(self, reason: str) -> None:
        text = f"marid.compile: {self._stats.name} runs as plain Python: {reason}"
        if self._fullgraph:
            raise UnsupportedOperationError(text)
        logger.warning("%s", text)


def compile(  # noqa: A001
    fn: Callable[..., Any] | None = None, *, fullgraph: bool = False, dynamic_dims: Any = None
) -> Any:
    """``fn``, recorded when it is called and replayed, without its Python, once two recordings did the same."""
    del dynamic_dims
    if fn is None:
        return lambda function: Compiled(function, fullgraph)
    return Compiled(fn, fullgraph)
