"""Walks over the arguments of operators and what they return: here alone is said what these nest in.

A tree is a tuple or a list, of just these types, of trees; all else is a leaf, dicts too. A node's arguments have
tuples only, one in another at most; operators are called with lists, and return both. What users give and get, at any
depth and in any container, is for PyTorch's pytrees; the arguments of a program's instructions are for
``graph.program.filled``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from marid.graph.node import Node, Output, Value


def leaves(tree: Any) -> Iterator[Any]:
    """The leaves of a tree, in order."""
    if type(tree) is tuple or type(tree) is list:
        for item in tree:
            yield from leaves(item)
    else:
        yield tree


def map_leaves(make: Callable[[Any], Any], tree: Any, sequence: type[tuple[Any, ...] | list[Any]] | None = None) -> Any:
    """The same tree with what ``make`` makes of its leaves, in order; with a ``sequence``, its tuples and lists all
    become that."""
    kind = type(tree)
    if kind is tuple or kind is list:
        return (sequence or kind)([map_leaves(make, item, sequence) for item in tree])
    return make(tree)


def placed(arg: Any, place: Callable[[Value], Any]) -> Any:
    """An argument of a node as its operator takes it: with what ``place`` says in place of values, and with lists."""
    kind = type(arg)
    if kind is Node or kind is Output:
        return place(arg)
    return [placed(item, place) for item in arg] if kind is tuple or kind is list else arg


def values_in(args: tuple[Any, ...]) -> Iterator[Value]:
    """The values among a node's arguments."""
    for arg in args:
        kind = type(arg)
        if kind is Node or kind is Output:
            yield arg
        elif kind is tuple:
            for item in arg:
                if type(item) is Node or type(item) is Output:
                    yield item


def input_values(node: Node) -> Iterator[Value]:
    """The values ``node`` is called with, in argument order; none once it has run."""
    if node.args is not None:
        yield from values_in(node.args)
        for _, arg in node.kwargs or ():
            yield from values_in((arg,))
