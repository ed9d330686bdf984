"""The data of a recorded program: specs, operations, nodes and their outputs.

A *value* is what an operation produced: a ``Node`` is the value of its only output, an ``Output`` is one of several.
Before it runs a value knows where it comes from; after it ran it holds a concrete tensor and forgets the rest, so a
chain of history is freed as it is executed.

References point one way only: from a value to what it needs. A node never holds its outputs or its readers strongly,
so a value that nobody holds is freed at once, together with what only it needed.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch


class Spec:
    """Geometry and type of a tensor; interned by the recorder, so equal specs are one object.

    ``shape``, ``stride`` (in elements), ``offset`` (in elements), ``dtype``, ``device`` (index) and the lazy
    conjugate and negative bits of complex views. ``pattern`` and ``kind`` belong to the recorder, ``geometry`` to the
    executor.
    """

    __slots__ = (
        "__weakref__",
        "conj",
        "device",
        "dtype",
        "geometry",
        "kind",
        "nbytes",
        "neg",
        "numel",
        "offset",
        "pattern",
        "shape",
        "stride",
    )

    def __init__(
        self,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        offset: int,
        dtype: torch.dtype,
        device: int,
        conj: bool = False,
        neg: bool = False,
    ) -> None:
        self.shape = shape
        self.stride = stride
        self.offset = offset
        self.dtype = dtype
        self.device = device
        self.conj = conj
        self.neg = neg
        numel = 1
        for size in shape:
            numel *= size
        self.numel = numel
        self.nbytes = numel * dtype.itemsize
        self.pattern: Any = None
        self.kind: Any = None
        self.geometry: Any = None

    @property
    def is_contiguous(self) -> bool:
        """Whether elements follow each other in memory, in order; where they start is left open."""
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != step:
                return False
            step *= size
        return True

    @property
    def span(self) -> int:
        """How many elements lie from the first to the last, both counted; 0 where there are none."""
        return span_of(self.shape, self.stride)

    @property
    def overlaps(self) -> bool:
        """Whether two elements may lie in one place, so far as sorted strides tell."""
        reach = 0
        for stride, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size > 1:
                if stride <= reach:
                    return True
                reach += stride * (size - 1)
        return False

    def __repr__(self) -> str:
        return f"Spec({list(self.shape)}, stride={list(self.stride)}, offset={self.offset}, {self.dtype})"


class Operation:
    """One ATen (or custom) operator overload, as every node of it shares it.

    ``func`` says what it is: all that is known of operators is known of that overload. ``target`` is the overload that
    is called, which does the same and may check its arguments first; ``call`` calls it.
    """

    __slots__ = ("call", "factory", "func", "mutates", "name", "target", "view")

    waits = False
    """Whether a call waits for the device that it is for."""

    def __init__(
        self, func: torch._ops.OpOverload, mutates: bool, view: bool, target: torch._ops.OpOverload | None = None
    ) -> None:
        self.func = func
        self.target = func if target is None else target
        self.call = self.target._op
        namespace, _, rest = func._schema.name.partition("::")
        self.name = f"{namespace}::{rest}"
        self.mutates = mutates
        self.view = view
        self.factory = not any("Tensor" in str(argument.type) for argument in func._schema.arguments)

    def __repr__(self) -> str:
        return str(self.func)


class Draw:
    """Where in a random stream a node's numbers start and end: fixed at capture, replayable at any time.

    ``offset`` and ``end`` count 32-bit words of the stream of ``seed``; ``spare`` and ``end_spare`` are the word at
    which a normal pair was drawn whose second half is still to be used, or -1.
    """

    __slots__ = ("end", "end_spare", "offset", "seed", "spare")

    def __init__(self, seed: int, offset: int, spare: int, end: int, end_spare: int) -> None:
        self.seed = seed
        self.offset = offset
        self.spare = spare
        self.end = end
        self.end_spare = end_spare

    def __repr__(self) -> str:
        return f"Draw(seed={self.seed}, offset={self.offset}, end={self.end})"


class Node:
    """One recorded operation, and the value of its output where it has exactly one.

    ``args``/``kwargs`` are what the operator is called with, with values in place of tensors and tuples in place of
    lists; ``kwargs`` is a tuple of pairs. ``after`` are writes this node must see. ``overwrites`` are roots of storages
    this node writes and that earlier nodes may still have to read. A node that has run has ``args is None``; one in
    flight, which counts as run and may be taken back, has an empty ``after``.
    """

    __slots__ = (
        "__weakref__",
        "after",
        "args",
        "concrete",
        "kwargs",
        "op",
        "outs",
        "overwrites",
        "root",
        "scope",
        "seq",
        "site",
        "spec",
    )

    def __init__(
        self,
        seq: int,
        op: Operation | None,
        args: tuple[Any, ...] | None,
        kwargs: tuple[tuple[str, Any], ...] | None,
        spec: Spec | None,
        root: Value | None,
        site: Any,
        scope: Any,
    ) -> None:
        self.seq = seq
        self.op = op
        self.args = args
        self.kwargs = kwargs
        self.spec = spec
        self.root = root
        self.site = site
        self.scope = scope
        self.after: tuple[Node, ...] | None = None
        self.overwrites: tuple[Value, ...] | None = None
        self.outs: Sequence[weakref.ref[Output]] | None = None
        self.concrete: Any = None  # the engine's buffer

    @property
    def node(self) -> Node:
        return self

    def __repr__(self) -> str:
        state = "done" if self.args is None else "pending"
        return f"Node({self.seq}, {self.op.name if self.op else 'source'}, {state})"


class Output:
    """One of several results of ``node``; ``path`` indexes the operator's return value, outermost first."""

    __slots__ = ("__weakref__", "concrete", "node", "path", "root", "spec")

    def __init__(self, node: Node, path: tuple[int, ...], spec: Spec, root: Value | None) -> None:
        self.node = node
        self.path = path
        self.spec = spec
        self.root = root
        self.concrete: Any = None  # the engine's buffer

    def __repr__(self) -> str:
        return f"Output({self.node!r}, {self.path})"


Value = Node | Output

failures: weakref.WeakKeyDictionary[Node, Exception] = weakref.WeakKeyDictionary()
"""The errors of nodes that failed. What is raised are copies: a raised error has a traceback, which has the frames of
those that read the value, with all of their tensors."""


def finish(node: Node) -> None:
    """Note that a node has run, or never will: it forgets what it needed."""
    node.args = node.kwargs = node.after = node.overwrites = None


def hand_over(node: Node) -> None:
    """Note that a node counts as run, and may be taken back. A write is still what readers of its memory come after."""
    finish(node)
    node.after = ()


def is_in_flight(node: Node) -> bool:
    """Whether a node was handed over, and has not landed."""
    return node.after == ()


def land(nodes: Iterable[Node]) -> None:
    """Note that nodes that were handed over have run."""
    for node in nodes:
        node.after = None


def fail(node: Node, error: Exception) -> None:
    """Note that a node has failed: whoever asks for its value gets ``error``. A failed write leaves memory as it is;
    whoever reads that gets the error, once, if nobody has been told of it by then."""
    finish(node)
    error.__dict__.setdefault(_TOLD, _Told())
    failures[node] = without_frames(error)


def fail_like(node: Node, other: Node) -> None:
    """The same for a node that needs one that has failed."""
    error = without_frames(failures[other])
    if error.__dict__[_TOLD].yet:
        error.__dict__[_TOLD] = _Told()  # it was recorded since
    fail(node, error)


def failure_of(node: Node) -> Exception | None:
    """The error of a node that failed, new for each who asks."""
    error = failures.get(node) if failures else None
    return None if error is None else without_frames(error)


def raise_failure(node: Node) -> None:
    """Raise the error of a node that failed, if it did, to the user."""
    if node in failures:
        tell(failures[node])
        raise without_frames(failures[node])  # in no variable: the frame is in the error's traceback


def tell(error: Exception) -> None:
    """Note that the user is told of an error, in this or another copy."""
    told = error.__dict__.get(_TOLD)
    if told is not None:
        told.yet = True


class _Told:
    """Whether the user has been told of a failure: shared by all copies of its error."""

    __slots__ = ("yet",)

    def __init__(self) -> None:
        self.yet = False


_TOLD = "_marid_told"


def without_frames(error: Exception) -> Exception:
    """A copy of an error that has not been raised; its causes lose the frames that they were raised in."""
    cause = error.__cause__
    while cause is not None and (cause.__traceback__ is not None or cause.__context__ is not None):
        cause.__traceback__ = cause.__context__ = None
        cause = cause.__cause__
    made = type(error)(*error.args)
    made.__dict__.update(error.__dict__)
    made.__cause__ = error.__cause__
    return made


class Storage:
    """What a base and its views share while recording. Held by tensors, never by values.

    ``last_write`` is the newest recorded write, ``last_read`` the sequence number of the newest recorded reader.
    ``handle`` belongs to the recorder.
    """

    __slots__ = ("__weakref__", "handle", "last_read", "last_write")

    def __init__(self, last_read: int) -> None:
        self.last_write: Node | None = None
        self.last_read = last_read
        self.handle: Any = None


def root_of(value: Value) -> Value:
    """The value whose operation made the memory that ``value`` lies in."""
    return value.root or value


def last_write(storage: Storage | None) -> Node | None:
    """The write that a reader of ``storage`` must see, if any: a pending one, one in flight, or one that failed
    unnoticed."""
    if storage is None or storage.last_write is None:
        return None
    write = storage.last_write
    if (
        write.args is None
        and not is_in_flight(write)
        and (write not in failures or failures[write].__dict__[_TOLD].yet)
    ):
        storage.last_write = None
    return storage.last_write


def span_of(shape: Sequence[int], stride: Sequence[int]) -> int:
    """How many elements lie from a tensor's first to its last, both counted; 0 where there are none."""
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def strides_alike(stride: tuple[int, ...], spec: Spec) -> bool:
    """Whether strides differ from those of ``spec`` at most where they do not matter."""
    steps = zip(stride, spec.stride, spec.shape, strict=True)
    return spec.numel == 0 or all(a == b or size == 1 for a, b, size in steps)
