"""Where a value goes that a function reads: the function's bytecode, followed with kinds in place of values.

An abstract interpretation: what may be on the stack and in the local variables before each instruction, joined over all
ways that lead there, until nothing changes. A value may be compared, returned, put into containers that the function
makes and returns, and take part in arithmetic if it is a number; anything else is a use that cannot wait.

An opcode that ``opcodes.py`` does not list may not come while a value is on the stack.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

from marid.replay.flow_state import APPEND, CALLEE, HOLDER, MADE, NOTHING, NUMBER, OTHER, VALUE, Kind, State
from marid.replay.opcodes import CLEANS, ENDS, IN_TURN, JUMPS, POPS, POPS_BY_COUNT, QUIET, SIGNS, SKIPPED, looks_aside
from marid.replay.waiting import Conversion


def _python(name: str) -> tuple[str, str]:
    """The callee that is a builtin of Python, or stands for it."""
    return CALLEE, f"{name} of Python"


CONVERSIONS = {name: _python(name)[1] for name in ("int", "float")}
"""The names by which ``use_of`` knows the calls of these."""
BUILTINS = frozenset(["abs", "len", "sum"])
"""What is followed where a function calls it by a global name, and that is the builtin."""
_LENGTH, _SUM = frozenset([_python("len")]), frozenset([_python("sum")])
_OF_A_NUMBER = frozenset([_python("abs"), *[(CALLEE, name) for name in CONVERSIONS.values()]])


@dataclass(frozen=True)
class Use:
    """What becomes of a value: whether it may be ``returned``, and whether the function may do something to its tensor
    ``before`` the value is returned or compared."""

    returned: bool
    before: bool


@functools.lru_cache(1024)
def use_of(code: CodeType, offset: int, name: str, builtins: frozenset[str]) -> Use | None:
    """What becomes of what the call at ``offset`` (``f_lasti`` of a frame in that call) returns: of the method or the
    comprehension ``name``, or of one of the ``CONVERSIONS``. None where it may be used in another way, and where
    something else is called there. ``builtins`` are those of ``BUILTINS`` that global names stand for."""
    if code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        return None
    if looks_aside(code):
        return None
    try:
        return _Flow(code, offset, name, builtins).use()
    except _Unknown:
        return None


class _Unknown(Exception):
    """The value is used in a way that is not followed."""


class _Flow:
    """One function, and the value that the call of ``name`` at ``offset`` returns. Raises ``_Unknown``."""

    def __init__(self, code: CodeType, offset: int, name: str, builtins: frozenset[str]) -> None:
        self._builtins = builtins
        self._callee = frozenset([(CALLEE, name)])
        is_number = name == "item" or name in CONVERSIONS.values()
        self._kind: Kind = frozenset([NUMBER if is_number else HOLDER if name.startswith("<") else VALUE])
        found = dis.Bytecode(code)
        self._instructions = [one for one in found if one.opname not in SKIPPED]
        # Within a call, a frame is at the instruction, in what is cached behind it, or (Python 3.11) at PRECALL before.
        here = max((one for one in found if one.offset <= offset), key=lambda one: one.offset)
        if here.opname not in ("CALL", "PRECALL"):
            raise _Unknown
        self._read = next(one.offset for one in self._instructions if one.offset >= here.offset)
        self._index = {one.offset: index for index, one in enumerate(self._instructions)}
        entries = [entry for entry in found.exception_entries if not self._only_cleans(entry.target)]
        self._handled = [range(entry.start, entry.end) for entry in entries]
        if any(self._read in lines for lines in self._handled):
            raise _Unknown
        self._holding: dict[int, Kind] = {}  # containers in which the value may be, and what is put into them
        self._inside: dict[int, Kind] = {}  # all containers that are followed: which others they have, or what else
        self._escaped: set[int] = set()  # those that others may look into
        self._returned = self._before = False

    def use(self) -> Use:
        """What becomes of the value. Raises ``_Unknown``."""
        while True:
            known = {**self._holding}, {**self._inside}
            self._follow()
            if self._holding.keys() & self._escaped:
                raise _Unknown
            if (self._holding, self._inside) == known:
                return Use(self._returned, self._before)

    def _follow(self) -> None:
        before: dict[int, State] = {0: State([], {}, False)}
        waiting = [0]
        left = 100 * len(self._instructions)  # it ends long before, unless an instruction is not what it is taken for
        while waiting:
            left -= 1
            if left < 0:
                raise _Unknown
            index = waiting.pop()
            for following, state in self._successors(index, before[index].copy()):
                known = before.get(following)
                joined = state if known is None else known.joined(state)
                if joined != known:
                    before[following] = joined
                    waiting.append(following)

    def _successors(self, index: int, state: State) -> Iterator[tuple[int, State]]:
        one = self._instructions[index]
        kinds = (*state.stack, *state.variables.values())
        if any(one.offset in lines for lines in self._handled) and any(map(self._holds, kinds)):
            raise _Unknown
        target = self._target(one)
        if target is not None and one.opname not in JUMPS:
            jumped = state.copy()
            self._step(one, jumped, jump=True)
            yield target, jumped
        self._step(one, state, jump=False)
        if one.opname in JUMPS:
            assert target is not None
            yield target, state
        elif one.opname not in ENDS:
            yield index + 1, state

    def _target(self, one: dis.Instruction) -> int | None:
        if one.opcode not in dis.hasjrel and one.opcode not in dis.hasjabs:
            return None
        return self._at(one.argval)

    def _at(self, offset: int) -> int:
        return next(self._index[at] for at in itertools.count(offset, 2) if at in self._index)

    def _only_cleans(self, handler: int) -> bool:
        """Whether a handler does nothing but put variables back and raise again, as that of a comprehension."""
        for one in self._instructions[self._at(handler) :]:
            if one.opname not in CLEANS:
                return False
            if one.opname == "RERAISE":
                return True
        return False

    @staticmethod
    def _may_be_number(kind: Kind) -> bool:
        """Whether it is nothing that the function has made, and holds nothing."""
        return all(one in (NUMBER, OTHER) or (type(one) is tuple and one[0] == CALLEE) for one in kind)

    def _holds(self, kind: Kind) -> bool:
        return any(one in (NUMBER, VALUE, HOLDER) or (type(one) is tuple and one[1] in self._holding) for one in kind)

    # --- one instruction ---

    def _step(self, one: dis.Instruction, state: State, jump: bool) -> None:
        """What is known behind an instruction. Raises ``_Unknown``."""
        name, count = one.opname, one.arg or 0
        if self._moves(one, state):
            return
        effect = dis.stack_effect(one.opcode, one.arg, jump=jump)
        pops = POPS_BY_COUNT[name](count) if name in POPS_BY_COUNT else POPS.get(name)
        if name.startswith("POP_JUMP"):
            pops = 1
        if name.startswith("JUMP_IF"):  # the value stays on the stack where it jumps
            self._test(state.stack[-1:], state, truth=True)
            state.pop(-effect)
            return
        if pops is None:
            self._unknown(state)
            return
        pops = max(pops, -effect)
        taken = state.pop(pops)
        made = self._result(one, taken, state)
        if not any(map(self._holds, (*state.stack, *state.variables.values(), made))):
            state.called = False
        elif not (name.startswith(QUIET) or any(map(self._holds, taken)) or self._is_append(one, taken)):
            state.called = True
        if one.offset == self._read:
            if name != "CALL" or self._callee not in taken[:2]:
                raise _Unknown
            made = self._kind
        # Of a call, Python 3.11 counts the arguments at an instruction before it.
        pushes = 1 if name.startswith("CALL") else pops + effect
        state.stack += [made] * pushes

    def _moves(self, one: dis.Instruction, state: State) -> bool:
        """Carry out what only moves entries between stack and variables; whether it was that."""
        name, count, at = one.opname, one.arg or 0, one.argval
        load, store = state.variables.get, state.variables
        if name in IN_TURN:
            state.stack += [load(variable, NOTHING) for variable in at]
        elif name == "STORE_FAST_LOAD_FAST":
            store[at[0]] = state.pop(1)[0]
            state.stack.append(load(at[1], NOTHING))
        elif name == "STORE_FAST_STORE_FAST":
            store[at[1]], store[at[0]] = state.pop(2)
        elif name.startswith("LOAD_FAST"):
            state.stack.append(load(at, NOTHING))
            if name == "LOAD_FAST_AND_CLEAR":
                store[at] = NOTHING
        elif name == "STORE_FAST":
            store[at] = state.pop(1)[0]
        elif name == "DELETE_FAST":
            store[at] = NOTHING
        elif name == "POP_TOP":
            state.pop(1)
        elif name == "COPY":
            state.reach(count)
            state.stack.append(state.stack[-count])
        elif name == "SWAP":
            state.reach(count)
            state.stack[-1], state.stack[-count] = state.stack[-count], state.stack[-1]
        else:
            return False
        return True

    def _unknown(self, state: State) -> None:
        if any(map(self._holds, state.stack)):
            raise _Unknown
        self._escape(state.stack)
        state.called = True
        state.stack = []

    def _result(self, one: dis.Instruction, taken: list[Kind], state: State) -> Kind:
        """What an instruction makes of what it takes."""
        name, count = one.opname, one.arg or 0
        held = any(map(self._holds, taken))
        if name == "RETURN_VALUE":
            self._returned |= held
            self._before |= held and state.called
        elif name in ("BUILD_LIST", "BUILD_MAP", "BUILD_CONST_KEY_MAP"):
            if name == "BUILD_MAP" and any(map(self._holds, taken[::2])):
                raise _Unknown  # as keys
            for kind in taken[:-1] if name == "BUILD_CONST_KEY_MAP" else taken:
                self._hold(one.offset, kind)
            return frozenset([(MADE, one.offset)])
        elif name == "BUILD_TUPLE":
            return frozenset([HOLDER]) if held else NOTHING
        elif name in ("LIST_APPEND", "LIST_EXTEND", "MAP_ADD"):
            state.reach(count)
            if name == "LIST_EXTEND" and taken[-1] & {NUMBER, VALUE}:
                raise _Unknown  # what stands for a value has no items
            self._put(self._items(taken[-1]) if name == "LIST_EXTEND" else taken[-1], state.stack[-count])
            self._plain(taken[:-1])
        elif name == "STORE_SUBSCR":
            self._put(taken[0], taken[1])
            self._plain(taken[2:])
        elif self._is_append(one, taken):
            if name == "CALL":
                self._put(taken[2], frozenset([(MADE, site) for site in self._appends(taken)]))
            else:
                return frozenset([(APPEND, site) for site in self._sites(taken[0])])
        elif name in ("LOAD_ATTR", "LOAD_METHOD"):
            self._plain(taken)
            return frozenset([(CALLEE, one.argval)])
        elif name == "LOAD_GLOBAL" and one.argval in self._builtins:
            return frozenset([_python(one.argval)])
        elif name == "LOAD_CONST" and isinstance(one.argval, Conversion):
            return frozenset([(CALLEE, CONVERSIONS[one.argval.name])])
        elif name == "CALL" and held and self._calls(taken, _OF_A_NUMBER):
            return self._of_numbers(one, taken, state)
        elif name == "CALL" and held and self._calls(taken, _LENGTH):
            if not self._are_containers(taken[2]):
                raise _Unknown
        elif name == "CALL" and held and self._calls(taken, _SUM):
            site = self._made(taken[2])
            if site is None or not self._may_be_number(self._holding.get(site, NOTHING)):
                raise _Unknown
            return frozenset([NUMBER])
        elif (name == "BINARY_SUBSCR" or one.argrepr == "[]") and (container := self._made(taken[0])) is not None:
            self._plain(taken[1:])
            inside = self._inside.get(container, NOTHING)
            return inside if self._sites(inside) else self._holding.get(container, NOTHING) | NOTHING
        elif name == "BINARY_OP" and one.argrepr in ("+", "+=") and all(map(self._are_containers, taken)):
            return self._together(one, *taken)
        elif name == "LOAD_CONST" and type(one.argval) is CodeType:
            return frozenset([(CALLEE, one.argval.co_name)])
        elif name == "MAKE_FUNCTION":
            self._plain(taken)
            return taken[-1]
        elif name in ("COMPARE_OP", "BINARY_OP", "TO_BOOL", "UNARY_NOT", "UNARY_NEGATIVE") or "_IF_" in name:
            return self._of_numbers(one, taken, state)
        else:
            self._plain(taken)
        return NOTHING

    def _of_numbers(self, one: dis.Instruction, taken: list[Kind], state: State) -> Kind:
        """What arithmetic, comparisons and branches make of numbers."""
        if not any(map(self._holds, taken)):
            self._escape(taken)
            return NOTHING
        if one.opname in ("BINARY_OP", "UNARY_NEGATIVE", "CALL"):
            known = one.opname != "BINARY_OP" or one.argrepr.rstrip("=") in SIGNS
            if not known or not all(map(self._may_be_number, taken)):
                raise _Unknown
            return frozenset([NUMBER])
        if one.opname.endswith("NONE"):
            raise _Unknown
        self._test(taken, state, truth=one.opname != "COMPARE_OP")
        return NOTHING

    def _test(self, taken: list[Kind], state: State, truth: bool) -> None:
        """Numbers are compared; or it is asked whether something is true, as are containers that have items."""
        if any(map(self._holds, taken)):
            numbers = [one for kind in taken for one in kind if not (truth and self._is_container(one))]
            if not self._may_be_number(frozenset(numbers)):
                raise _Unknown
            self._before |= state.called

    def _plain(self, taken: list[Kind]) -> None:
        """These go where they are not followed."""
        if any(map(self._holds, taken)):
            raise _Unknown
        self._escape(taken)

    def _escape(self, taken: list[Kind]) -> None:
        self._escaped.update(one[1] for kind in taken for one in kind if type(one) is tuple)

    def _put(self, value: Kind, container: Kind) -> None:
        sites = self._sites(container)
        if not sites:
            self._plain([value])
            self._escape([container])
        for site in sites:
            self._hold(site, value)

    def _hold(self, site: int, value: Kind) -> None:
        containers = frozenset([one if type(one) is tuple and one[0] == MADE else OTHER for one in value])
        self._inside[site] = self._inside.get(site, frozenset()) | containers
        if self._holds(value):
            self._holding[site] = self._holding.get(site, NOTHING) | value

    def _items(self, kind: Kind) -> Kind:
        """What the items of a container may be."""
        found: Kind = frozenset()
        for one in kind:
            if self._is_container(one) and one != HOLDER:
                found |= self._inside.get(one[1], NOTHING) | (self._holding.get(one[1], NOTHING) - NOTHING)
            else:
                found |= {one if one == HOLDER else OTHER}
        return found

    def _together(self, one: dis.Instruction, left: Kind, right: Kind) -> Kind:
        """A list with the items of two lists, which is the left one for ``+=``."""
        if left == frozenset([HOLDER]):
            return left
        site = one.offset if one.argrepr == "+" else self._made(left)
        if site is None:
            raise _Unknown
        self._hold(site, self._items(right if one.argrepr == "+=" else left | right))
        return frozenset([(MADE, site)])

    @staticmethod
    def _calls(taken: list[Kind], callees: frozenset[Any]) -> bool:
        """Whether a call is of one of these, with one argument."""
        return len(taken) == 3 and any(len(kind) == 1 and kind <= callees for kind in taken[:2])

    @staticmethod
    def _is_container(one: Any) -> bool:
        return one == HOLDER or (type(one) is tuple and one[0] == MADE)

    def _are_containers(self, kind: Kind) -> bool:
        return all(map(self._is_container, kind))

    @staticmethod
    def _sites(kind: Kind) -> list[int]:
        """Which containers it may be, if it is one that the function has made."""
        made = [one[1] for one in kind if type(one) is tuple and one[0] == MADE]
        return made if len(made) == len(kind) else []

    def _made(self, kind: Kind) -> int | None:
        """The same where it can be one only."""
        sites = self._sites(kind)
        return sites[0] if len(sites) == 1 else None

    def _is_append(self, one: dis.Instruction, taken: list[Kind]) -> bool:
        """Whether an instruction looks the `append` of a container up that the function has made, or calls it."""
        if one.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            return one.argval == "append" and bool(self._sites(taken[0]))
        return one.opname == "CALL" and bool(self._appends(taken))

    @staticmethod
    def _appends(taken: list[Kind]) -> list[int]:
        """The containers to one of which a call adds its one argument, if it calls an `append`."""
        if len(taken) != 3:
            return []
        called = {*taken[:2]} - {NOTHING}
        callees = [*called.pop()] if len(called) == 1 else []
        return [one[1] for one in callees] if all(type(one) is tuple and one[0] == APPEND for one in callees) else []
