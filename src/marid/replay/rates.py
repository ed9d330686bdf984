"""Learning rates of PyTorch's optimizers, and the numbers that come of a rate alone.

A schedule changes rates from step to step. Those of the optimizers here are not compared as other state is: where two
recordings with other rates have shown which numbers come of a rate, a replay computes these anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, Optimizer, RMSprop

Formula = Callable[[float, dict[str, Any]], float]
"""Of a step and a group of parameters."""


def _negative_rate(_step: float, group: dict[str, Any]) -> float:
    return -group["lr"]


def _decay(_step: float, group: dict[str, Any]) -> float:
    return 1 - group["lr"] * group["weight_decay"]


# What an optimizer's own source computes from the rate, operation by operation; what it computes from a counter too is
# in ``counters.py``.
_FORMULAS: dict[type[Optimizer], tuple[Formula, ...]] = {
    SGD: (_negative_rate,),
    RMSprop: (_negative_rate,),
    Adadelta: (_negative_rate,),
    Adam: (_decay,),
    Adagrad: (),
    Adamax: (),
}


TAKES: dict[Formula, Callable[[dict[str, Any]], tuple[Any, ...]]] = {
    _negative_rate: lambda group: (group["lr"],),
    _decay: lambda group: (group["lr"], group["weight_decay"]),
}
"""What each formula takes of a group: where that is equal in two groups, so is the number, and stays so."""


def has_followed_rate(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether the rate of a group of parameters may be another one at a replay. What a class of the user's own does
    with it is not known."""
    own = type(optimizer).__module__.startswith("torch.optim.")
    return own and isinstance(optimizer, tuple(_FORMULAS)) and type(group.get("lr")) is float


def formulas_of(optimizer: Optimizer, group: dict[str, Any]) -> tuple[Formula, ...]:
    """What is computed from the rate of such a group alone. Without a decay, 1 is no number of the rate's."""
    found = next(formulas for kind, formulas in _FORMULAS.items() if isinstance(optimizer, kind))
    return tuple([one for one in found if one is not _decay or group["weight_decay"]])


def rated_groups(optimizers: Iterable[Optimizer]) -> list[dict[str, Any]]:
    """The groups of parameters whose rates are followed."""
    return [group for one in optimizers for group in one.param_groups if has_followed_rate(one, group)]
