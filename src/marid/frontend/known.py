"""What is known of calls with one key: all that recording another one needs."""

from __future__ import annotations

from typing import Any

from marid.frontend import infer
from marid.frontend.limits import cost_of
from marid.graph.node import Spec
from marid.graph.tape import Tape
from marid.report.hooks import recorded
from marid.settings import settings

_NOTHING = infer.OutSpec((), None)


class Known:
    """What is known of calls with one key: the rule, which tensors they write, and what recording them needs.

    ``repeats`` says that another such call needs nothing but one more node. Where there is one result, it is an
    argument (``returned``), or new: of ``spec``, a view of argument ``view_of`` if that is not None, and copied from
    the pattern at the address ``pattern`` where there are patterns. Of several results, ``several`` says the same in
    tuples; it is None where they are not a plain list.
    """

    __slots__ = ("cost", "pattern", "repeats", "returned", "rule", "several", "spec", "tape", "view_of", "writes")

    def __init__(self, rule: infer.Rule, writes: list[int], tape: Tape) -> None:
        self.rule = rule
        self.writes = writes
        self.tape = tape
        self.follow_settings()
        one = rule.returns if isinstance(rule.returns, infer.OutSpec) else _NOTHING
        self.returned = one.same_as
        self.spec = one.spec if one.same_as is None else None
        self.view_of = one.view_of
        self.pattern = _pattern(self.spec)
        self.several = () if rule.returns is None else None
        if type(rule.returns) is list:
            described = [_described(part) for part in rule.returns]
            self.several = None if NotImplemented in described else tuple(described)

    def follow_settings(self) -> None:
        """Work out again what depends on ``marid.settings``."""
        self.cost = cost_of(self.rule.nbytes)
        watched = settings.log_intercepts or recorded.listeners  # then each call comes by here
        self.repeats = self.rule.eager is None and not self.rule.resized and not watched


def _pattern(spec: Spec | None) -> int | None:
    return None if spec is None or spec.pattern is None else spec.pattern._cdata


def _described(part: Any) -> Any:
    if part is None:
        return None
    if type(part) is list or (part.same_as is None and _pattern(part.spec) is None):
        return NotImplemented
    return part.same_as, part.path, part.spec, _pattern(part.spec), part.view_of
