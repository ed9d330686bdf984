"""What Python code looks up: global names, names of attributes, modules that it imports, and whose code it is."""

from __future__ import annotations

import dis
import functools
import os
import types
from collections import deque
from typing import Any, NamedTuple

import torch

from marid.semantics.source_files import is_of_a_package

_FOLDERS = tuple(
    os.path.normpath(folder) + os.sep
    for folder in (
        os.path.dirname(torch.__file__),
        os.path.dirname(os.path.dirname(__file__)),
        os.path.dirname(os.__file__),
    )
)


def is_of_user(file: str) -> bool:
    """Whether the code of a file belongs neither to PyTorch, Python or Marid nor to an installed package."""
    return not file.startswith(_FOLDERS) and not file.startswith("<frozen ") and not is_of_a_package(file)


_OF_RATES = {"last_epoch", "get_lr", "get_last_lr", "base_lrs", "_last_lr", "_step_count"}
_OF_RATES |= {"state_dict", "load_state_dict", "param_groups"}


@functools.lru_cache(4096)
def looks_at_rates(code: types.CodeType) -> bool:
    """Whether code looks at the learning rates of an optimizer, or at what a schedule counts."""
    inside = (looks_at_rates(const) for const in code.co_consts if isinstance(const, types.CodeType))
    named = {*code.co_names, *[const for const in code.co_consts if isinstance(const, str)]}
    return "lr" in code.co_consts or not _OF_RATES.isdisjoint(named) or any(inside)


class Names(NamedTuple):
    """What code (functions inside included) looks up: global names, all names in it, and what it imports, with the
    level of relative imports."""

    names: tuple[str, ...]
    attributes: tuple[str, ...]
    imports: tuple[tuple[str, int], ...]


@functools.lru_cache(4096)
def names_in(code: types.CodeType) -> Names:
    """What code looks up."""
    names: dict[str, None] = {}
    attributes: dict[str, None] = {}
    imports: dict[tuple[str, int], None] = {}
    pending = [code]
    while pending:
        one = pending.pop()
        attributes.update(dict.fromkeys(one.co_names))
        loaded: deque[Any] = deque(maxlen=2)  # an import is of two constants: its level, and the names
        for instruction in dis.get_instructions(one):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL"):
                names[instruction.argval] = None
            elif instruction.opname == "IMPORT_NAME":
                level = next((value for value in loaded if type(value) is int), 0)
                imports[instruction.argval, level] = None
            loaded.append(instruction.argval)
        pending += [const for const in one.co_consts if isinstance(const, types.CodeType)]
    return Names(tuple(names), tuple(attributes), tuple(imports))
