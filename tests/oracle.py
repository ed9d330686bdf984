"""A reference in plain Python for what ``native/cut.cpp`` does: what a cut chooses, and what its program is."""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Sequence
from typing import Any

from marid.graph.arguments import input_values
from marid.graph.node import Draw, Node, Output, Value, raise_failure, root_of
from marid.graph.program import Task
from marid.graph.tape import Tape

# Markers between the elements of a key. Slots are non-negative, so no marker is mistaken for one.
_PARAM, _LIST, _KEYWORDS, _INPUT, _ESCAPES = -1, -2, -3, -4, -5
_sequence_of = operator.attrgetter("seq")


def pending(tape: Tape) -> list[Node]:
    """``Tape.pending``."""
    tape._recorded += len(tape.entries) - tape._kept
    alive = [node for entry in tape.entries if (node := entry()) is not None and node.args is not None]
    alive.sort(key=_sequence_of)
    tape.entries = [weakref.ref(node) for node in alive]
    tape._kept = len(tape.entries)
    return alive


def cut(tape: Tape, asked: list[Node]) -> list[Node]:
    """``Tape.cut``."""
    chosen: set[Node] = set()
    writes: list[Node] = []
    _close(asked, chosen, writes)
    if writes:
        others = [node for node in pending(tape) if node not in chosen]
        while writes and others:
            overwritten: dict[Value, int] = {}
            for write in writes:
                for root in write.overwrites or ():
                    overwritten[root] = max(overwritten.get(root, 0), write.seq)
            writes = []
            overtaken = [
                node
                for node in others
                if node not in chosen
                and any(node.seq < overwritten.get(root_of(value), 0) for value in input_values(node))
            ]
            _close(overtaken, chosen, writes)
    return sorted(chosen, key=_sequence_of)


def _close(asked: list[Node], chosen: set[Node], writes: list[Node]) -> None:
    """Add to ``chosen`` all of ``asked`` and what they need; list the nodes added that overwrite storages.

    Raises the error of a node that has failed.
    """
    stack = list(asked)
    push = stack.append
    while stack:
        node = stack.pop()
        args = node.args
        if args is None:
            raise_failure(node)
            continue
        if node in chosen:
            continue
        chosen.add(node)
        if node.kwargs is not None:
            args = (*args, *[arg for _, arg in node.kwargs])
        for arg in args:  # values_in, written out: this loop is most of what a cut costs
            kind = type(arg)
            if kind is Node or kind is Output:
                if arg.concrete is None:
                    push(arg.node)
            elif kind is tuple:
                for item in arg:
                    if (type(item) is Node or type(item) is Output) and item.concrete is None:
                        push(item.node)
        if node.after is not None:
            stack.extend(node.after)
        if node.overwrites is not None:
            writes.append(node)


def bind(task: Task) -> None:
    """Fill in a task that has its nodes, as ``marid.graph.program.bind`` does. They may be in no variable."""
    _find_escaping(task, _number(task))
    task.key = tuple(task.key_parts)
    task.specs = tuple([value.spec for value in task.slots])


def _number(task: Task) -> dict[int, int]:
    """Number the tensors, and count the references that the cut holds, by id: the nodes are alive, so ids are unique.

    A function of its own, because what it has in its variables would be counted as held by somebody else.
    """
    slots, key = task.slots, task.key_parts
    inner: dict[int, int] = {}
    count = inner.get
    put = key.append
    for node in task.nodes:
        put(node.op)
        assert node.args is not None
        for arg in node.args:  # the common kinds of argument, written out
            kind = type(arg)
            if kind is Node:
                slot = slots.get(arg)
                if slot is None:
                    _bind_arguments(task, (arg,), inner)
                else:
                    inner[id(arg)] = count(id(arg), 0) + 1
                    put(slot)
            elif kind is float:
                task.params.append(arg)
                put(_PARAM)
            else:
                _bind_arguments(task, (arg,), inner)
        if node.kwargs is not None:
            key.append(_KEYWORDS)
            for name, arg in node.kwargs:
                key.append(name)
                _bind_arguments(task, (arg,), inner)
        if node.after is not None:
            for write in node.after:
                inner[id(write)] = count(id(write), 0) + 1
        if node.root is not None:
            inner[id(node.root)] = count(id(node.root), 0) + 1
        if node.overwrites is not None:
            for root in node.overwrites:
                inner[id(root)] = count(id(root), 0) + 1
        if node.outs is None:
            slots[node] = len(slots)
            task.results.append(None)
        else:
            outs = [out for ref in node.outs if (out := ref()) is not None]
            for out in outs:
                slots[out] = len(slots)
                if out.root is not None:
                    inner[id(out.root)] = count(id(out.root), 0) + 1
            task.results.append(outs)
    return inner


def _bind_arguments(task: Task, args: tuple[Any, ...], inner: dict[int, int]) -> None:
    slots, key = task.slots, task.key_parts
    for arg in args:
        kind = type(arg)
        if kind is Node or kind is Output:
            slot = slots.get(arg)
            if slot is None:
                slots[arg] = slot = len(slots)
                task.inputs.append(arg.concrete)
                task.input_slots.append(slot)
                key.append(_INPUT)
            else:
                inner[id(arg)] = inner.get(id(arg), 0) + 1
            key.append(slot)
        elif kind is float or kind is int or kind is complex or kind is Draw:
            task.params.append(arg)
            key.append(_PARAM)
        elif kind is tuple:
            if _is_numbers(arg):
                task.params.append(arg)
                key.append(_PARAM)
            else:
                key.append(_LIST)
                key.append(len(arg))
                _bind_arguments(task, arg, inner)
        else:
            key.append(kind)
            key.append(arg)


def _references(values: Sequence[object]) -> list[int]:
    """How many references there are to each of some values, and how many more are here while that is counted.

    The latter are a matter of the interpreter: from CPython 3.14 on, variables lend theirs to what they are given to.
    """
    references, found = sys.getrefcount, []
    for index in range(len(values)):  # zip, enumerate and comprehensions may hold references of their own
        value = values[index]
        found.append(references(value))
    return found


def _find_escaping(task: Task, inner: dict[int, int]) -> None:
    key = task.key_parts
    slots, results = task.slots, task.results
    (held,) = _references([object()])  # by one list, and while counting
    held += 1  # by task.slots
    counted = _references(task.nodes)
    roots: list[Value] = []
    for i, outs in enumerate(results):
        if outs is None:
            node = task.nodes[i]
            if counted[i] - held > inner.get(id(node), 0):
                slot = slots[node]
                key.append(_ESCAPES)
                key.append(slot)
                task.escaping.add(slot)
                task.outputs.append(node)
                if node.root is not None:
                    roots.append(node.root)
        else:
            counts = _references(outs)
            for j, out in enumerate(outs):
                slot = slots[out]
                key.append(out.path)
                key.append(slot)
                if counts[j] - held > inner.get(id(out), 0):
                    key.append(_ESCAPES)
                    task.escaping.add(slot)
                    task.outputs.append(out)
                    if out.root is not None:
                        roots.append(out.root)
    # A view keeps its memory, so what it is a view of stays readable too: its storage may be asked for.
    for root in roots:
        slot = slots.get(root, -1)
        if slot >= 0 and slot not in task.escaping and root.concrete is None:
            key.append(_ESCAPES)
            key.append(slot)
            task.escaping.add(slot)
            task.outputs.append(root)


def _is_numbers(items: Sequence[Any]) -> bool:
    return all(type(item) in (int, float, bool) for item in items)
