"""``marid.compile``: a function that is recorded, and replayed when two recordings of it did the same."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from marid import policy
from marid.errors import UnsupportedOperationError
from marid.frontend.observe import observer
from marid.graph.prepared import GuardFailed
from marid.recent import Recent
from marid.replay.arguments import Call, Unreadable
from marid.replay.checks import Checks
from marid.replay.dynamic import mark_arguments
from marid.replay.guards import last_guard
from marid.replay.impure import has_profiler
from marid.replay.observed_run import Run
from marid.replay.places import Refused
from marid.replay.reachable import Wrapper
from marid.replay.recording import Recording
from marid.replay.template import Fit, Template
from marid.replay.waiting import values_read
from marid.report.stats import FunctionStats, functions
from marid.semantics.tracebacks import folded
from marid.settings import settings

logger = logging.getLogger("marid")


_made: weakref.WeakValueDictionary[int, Compiled] = weakref.WeakValueDictionary()


def forget_recordings() -> None:
    """Forget what was recorded under ``marid.compile``, by all functions; they record again when they are called."""
    for function in list(_made.values()):
        function.forget()


class _Kind:
    """Calls that differ only in the values of tensors."""

    def __init__(self, others: list[Any]) -> None:
        self.others = others  # their identities are in the key
        self.templates: list[Template] = []
        self.recordings: list[Recording] = []
        self.attempts = 0
        self.checks = Checks()
        self.given_up = False
        self.replays = 0
        self.failed_at: Any = None  # the line of the last test that came out otherwise
        self.lost = 0  # replays for nothing, as it were
        self._served: tuple[Template, ...] = ()  # the last ones
        self._followed_by: Recent[tuple[Template, ...], Template] = Recent(64)

    def add(self, template: Template, instead_of: Recording) -> None:
        """Have a template, made of one recording and another like it."""
        kept = [one for one in self.templates if one.recording is not instead_of]
        self.templates = [template, *kept][: policy.REPLAY_TEMPLATES]
        self.recordings = [one for one in self.recordings if one is not instead_of]
        self._served = ()  # what is no more a template is not held
        self._followed_by.clear()

    def clear(self) -> None:
        """Have no templates."""
        self.templates, self._served = [], ()
        self._followed_by.clear()

    def in_order(self) -> list[Template]:
        """The templates, that first which served the last time that the same ones had served before."""
        first = self._followed_by.used(self._served)
        others = [template for template in self.templates if template is not first]
        return others if len(others) == len(self.templates) or first is None else [first, *others]

    def served(self, template: Template) -> None:
        """A template has served a call."""
        if len(self.templates) > 1 and template in self.templates:
            self._followed_by.put(self._served, template)
            self._served = *self._served[-2:], template
            self.templates.remove(template)
            self.templates.insert(0, template)


_WAIT = 0.005  # seconds between looks at what another thread does with a function
_OWN = {"_function", *functools.WRAPPER_ASSIGNMENTS, "__wrapped__"}


def _sees_order(function: Callable[..., Any]) -> bool:
    """Whether a function can see in which order its keyword arguments were given."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # one in C
        return True
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


class Compiled(Wrapper):
    """A function under ``marid.compile``; called like the function, whose attributes it has. Its own have private
    names, so that they hide none."""

    def __init__(self, function: Callable[..., Any], state: Any, fullgraph: bool, dynamic_dims: Any) -> None:
        self._function = function
        functools.update_wrapper(self, function, updated=())
        self.__state = state
        self.__fullgraph = fullgraph
        self.__dynamic_dims = dynamic_dims
        self.__families: set[Any] = set()
        self.__kinds: dict[Any, _Kind] = {}
        self.__lock = threading.RLock()
        self.__runs_python = False
        self.__given_up = False
        self.__said: set[str] = set()
        self.__sees_order = _sees_order(function)
        self.__stats = FunctionStats(getattr(function, "__qualname__", type(function).__qualname__))
        functions.add(self.__stats)
        _made[id(self)] = self

    @folded
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if observer() is not None:  # part of a function that is being recorded
            return self._function(*args, **kwargs)
        if len(kwargs) > 1 and not self.__sees_order:
            kwargs = dict(sorted(kwargs.items()))
        while not self.__lock.acquire(timeout=_WAIT):
            if self.__runs_python:  # which may wait for this thread
                self.__stats.calls += 1
                self.__stats.plain += 1
                return self._function(*args, **kwargs)
        try:
            self.__stats.calls += 1
            if not self.__given_up:
                if self.__dynamic_dims:
                    mark_arguments(self.__dynamic_dims, args, kwargs)
                try:
                    call = Call(args, kwargs)
                except Unreadable:
                    self.__stats.count_fallback("inside of a transform, a mode or hooks on saved tensors")
                else:
                    kind = self.__kind_of(call)
                    template, fit = self.__fitting(kind, call)
                    watched = has_profiler()
                    lost = kind.lost
                    while template is not None and fit is not None and (watched or not kind.checks.is_due()):
                        try:
                            return self.__replayed(kind, template, call, fit)
                        except GuardFailed as failed:
                            outcomes = self.__guard_failed(kind, template, failed)
                        template, fit = self.__fitting(kind, call, outcomes)
                    del fit  # it holds values, and what is held counts as a result
                    if kind.lost > lost and template is None:
                        self.__recorded_again(kind)
                    if watched:
                        self.__stats.count_fallback("another profiler is in its thread: what it reads is not noticed")
                    elif template is not None:
                        return values_read(self.__checked(kind, template, call, args, kwargs))
                    elif not kind.given_up:
                        return values_read(self.__recorded(kind, call, args, kwargs))
            self.__stats.plain += 1
        finally:
            self.__lock.release()
        return self._function(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """What it is as an attribute of a class: a method, if the function would be one."""
        is_one = instance is not None and type(self._function) in (FunctionType, Compiled)
        return MethodType(self, instance) if is_one else self

    def __copy__(self) -> Any:
        return self.__like(copy.copy(self._function), self.__state)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.__like(copy.deepcopy(self._function, memo), copy.deepcopy(self.__state, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        names = str(getattr(self._function, "__qualname__", "")).split(".")
        scope: Any = sys.modules.get(getattr(self._function, "__module__", None) or "")
        for name in names:
            scope = getattr(scope, name, None)
        if scope is self:  # as functions are pickled: by their names
            return ".".join(names)
        return _made_anew, (type(self), self._function, self.__state, self.__fullgraph, self.__dynamic_dims)

    def __like(self, function: Any, state: Any) -> Any:
        """What the same call of ``marid.compile`` makes of a copy; functions are their own copies."""
        same = function is self._function and state is self.__state
        return self if same else type(self)(function, state, self.__fullgraph, self.__dynamic_dims)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_function":
            raise AttributeError(name)
        return getattr(self._function, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Attributes are those of the function, as far as it can have any; that is where they are watched, too."""
        own = name in _OWN or name.startswith("_Compiled__")
        if own or not hasattr(self._function, "__dict__") or isinstance(self._function, MethodType):
            object.__setattr__(self, name, value)
        else:
            setattr(self._function, name, value)

    def __delattr__(self, name: str) -> None:
        try:
            object.__delattr__(self, name)
        except AttributeError:
            delattr(self._function, name)

    def stats(self) -> FunctionStats:
        """What became of the calls so far; a snapshot."""
        return self.__stats.copy()

    def forget(self) -> None:
        """Forget its recordings."""
        with self.__lock:
            self.__kinds.clear()
            self.__families.clear()

    def __kind_of(self, call: Call) -> _Kind:
        kind = self.__kinds.get(call.key)
        if kind is None:
            kind = _Kind(call.others)
            family = call.family()
            if family not in self.__families and len(self.__families) >= settings.compile_kinds:
                kind.given_up = True
                reason = f"more than {settings.compile_kinds} kinds of arguments (MARID_COMPILE_KINDS)"
                self.__stats.count_fallback(reason)
                self.__say(reason)
            else:
                self.__families.add(family)
                self.__kinds[call.key] = kind
                while len(self.__kinds) > 4 * settings.compile_kinds:  # sizes of dynamic dimensions
                    self.__kinds.pop(next(iter(self.__kinds)))
        return kind

    def __fitting(self, kind: _Kind, call: Call, outcomes: tuple[bool, ...] = ()) -> tuple[Template | None, Fit | None]:
        """A template for a call whose first tests of numbers come out so."""
        for template in kind.in_order():
            fit = template.fit(call) if template.is_open_to(outcomes) else None
            if fit is not None:
                return template, fit
        return None, None

    def __replayed(self, kind: _Kind, template: Template, call: Call, fit: Fit) -> Any:
        start = time.perf_counter()
        result = template.run(call, fit)
        kind.checks.replayed(time.perf_counter() - start)
        kind.served(template)
        kind.attempts = 0
        kind.replays += 1
        self.__stats.replays += 1
        return result

    def __guard_failed(self, kind: _Kind, template: Template, failed: GuardFailed) -> tuple[bool, ...]:
        """How the first tests of a call have come out, the last of them otherwise than in the template."""
        self.__stats.guard_failures += 1
        kind.lost += 1
        kind.failed_at = failed.node.site
        return template.outcomes_until(failed.node)

    def __recorded_again(self, kind: _Kind) -> None:
        """A call goes on as no recording did."""
        kind.lost += policy.REPLAY_RECORDED_AGAIN
        if kind.lost > kind.replays + policy.REPLAY_LOST:
            kind.attempts = settings.compile_recordings
            kind.clear()
            self.__fall_back(kind, Refused(f"the test at {kind.failed_at} comes out now so, now otherwise"))

    def __checked(
        self, kind: _Kind, template: Template, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The result of the Python, which runs in place of a replay to be compared with it."""
        start = time.perf_counter()
        run, result = self.__run(call, args, kwargs)
        if run.recording is None:  # it did what no replay can: no difference in what could be watched
            kind.templates.remove(template)
            assert run.refusal is not None
            self.__fall_back(kind, run.refusal)
            return result
        why = template.departure(run.recording)
        if why is not None and run.recording.outcomes == template.recording.outcomes:
            kind.clear()
            self.__fall_back(kind, Refused(f"what is not watched changed: {why}", for_good=True))
        kind.checks.checked(time.perf_counter() - start)
        return result

    def __run(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Run, Any]:
        run = Run(self._function, call, self.__state)
        self.__runs_python = True
        try:
            result = run.call(args, kwargs, self.__fullgraph)
        finally:
            self.__runs_python = False
        self.__stats.recordings += 1
        return run, result

    def __recorded(self, kind: _Kind, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run, result = self.__run(call, args, kwargs)
        kind.attempts += 1
        recording = run.recording
        if recording is None:
            assert run.refusal is not None
            self.__fall_back(kind, run.refusal)
            return result
        known = [template.recording for template in kind.templates]
        why = None
        for earlier in (*kind.recordings, *known):
            why = earlier.difference(recording)
            if why is None:
                prepared = run.prepare()
                if prepared is None:
                    break
                template = Template(
                    recording,
                    earlier.computed(recording),
                    earlier.counters.moved_rates(recording.counters),
                    prepared,
                    run.written(prepared[0].program),
                    run.written(prepared[0].program, last_guard(prepared[0].nodes)),
                    len(call.lazy),
                )
                kind.add(template, instead_of=earlier)
                return result
        kind.recordings.append(recording)
        del kind.recordings[: -policy.REPLAY_RECORDINGS]
        if why is not None:
            self.__fall_back(kind, Refused(why))
        return result

    def __fall_back(self, kind: _Kind, refused: Refused) -> None:
        reason = str(refused)
        self.__stats.count_fallback(reason)
        if refused.for_good:
            self.__given_up = True
        elif kind.attempts >= settings.compile_recordings:
            kind.given_up = True
        else:
            return
        kind.recordings.clear()
        self.__say(reason)

    def __say(self, reason: str) -> None:
        text = f"marid.compile: {self.__stats.name} runs as plain Python: {reason}"
        if self.__fullgraph:
            raise UnsupportedOperationError(text)
        if reason not in self.__said:
            self.__said.add(reason)
            logger.warning("%s", text)


def _made_anew(kind: type[Compiled], function: Any, state: Any, fullgraph: bool, dynamic_dims: Any) -> Compiled:
    return kind(function, state, fullgraph, dynamic_dims)
