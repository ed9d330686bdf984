"""The tape: a device's pending nodes in program order, and the cut that chooses which of them must run.

The tape holds its nodes weakly: what the user dropped is gone without a sweep. Entries of dead and executed nodes are
removed when they outnumber the rest, so the cost stays constant per recorded node.

The hazard rule. A cut contains, for every asked value:

* the node that makes it, the writes it must see, and the same for their inputs (read after write);
* for every write in the cut, each live pending node recorded before it that reads the storage (write after read).
"""

from __future__ import annotations

import itertools
import weakref

from marid.graph.arguments import input_values
from marid.graph.node import Node, Operation, Spec, Value, fail_like, failures
from marid.native import module


class Tape:
    """Pending nodes of one device.

    ``budget`` is what the recorder may still add before it has to ``measure``: cheap to keep, and never too large,
    because nodes that die give nothing back. While ``grace`` is positive, the tape is full but waits for a node like
    ``cut_at``, where it was last run for being full: a loop that never reads is cut once around, at one place, so that
    what is run repeats. ``chunk``, where it is not 0, is how much is recorded before it is run unasked. ``run`` counts
    the nodes that were run. While ``immediate``, operations whose arguments exist run at once and are not added, as
    long as each touches no more than ``allowance`` bytes on average. ``measured_at`` is what had been ``charged`` when
    an optimizer's step last had the tape measured. ``steps``, ``stepped_at`` and ``rarely_reads`` are for
    ``frontend/ahead.py``, which decides what runs: how many times an optimizer has stepped since the last read, what
    had been charged then, and whether such reads are far apart.
    """

    __slots__ = (
        "_charged",
        "_given",
        "_kept",
        "_recorded",
        "_resident_limit",
        "allowance",
        "budget",
        "chunk",
        "cut_at",
        "device",
        "entries",
        "grace",
        "immediate",
        "measured_at",
        "rarely_reads",
        "resident",
        "run",
        "sequence",
        "stepped_at",
        "steps",
    )

    def __init__(self, device: int) -> None:
        self.device = device
        self.sequence = itertools.count(1)
        self.entries: list[weakref.ref[Node]] = []
        self.resident: list[weakref.ref[Value]] = []
        self.budget = 0
        self.grace = 0
        self.immediate = False
        self.allowance = 0
        self.measured_at = 0
        self.chunk = 0
        self.run = 0
        self.steps = 0
        self.stepped_at = 0
        self.rarely_reads = False
        self._given = 0
        self._charged = 0
        self.cut_at: tuple[object, ...] | None = None
        self._resident_limit = 4096
        self._recorded = 0
        self._kept = 0

    def append(self, node: Node, cost: int) -> None:
        """Add a node; ``cost`` is what the recorder charges for it against ``budget``."""
        self.entries.append(weakref.ref(node))
        self.budget -= cost

    def take_back(self, nodes: list[Node]) -> None:
        """Nodes that counted as run are pending again."""
        here = {node for entry in self.entries if (node := entry()) is not None}  # entries go when all are looked at
        back = [weakref.ref(node) for node in nodes if node not in here]
        self.entries += back
        self._recorded -= len(back)
        self.run -= len(nodes)

    def set_budget(self, budget: int) -> None:
        """Let the recorder add so much before it asks again."""
        self._charged += self._given - self.budget
        self._given = self.budget = budget

    @property
    def charged(self) -> int:
        """What all nodes that were ever added were charged."""
        return self._charged + self._given - self.budget

    @property
    def recorded(self) -> int:
        """How many nodes were ever added."""
        return self._recorded + len(self.entries) - self._kept

    def pending(self) -> list[Node]:
        """Live nodes that have not run, in program order. Compacts the tape."""
        return module.pending(self)

    def measure(self) -> tuple[int, int]:
        """How many live nodes are pending, and how many bytes their results will take when they run."""
        pending = self.pending()
        return len(pending), module.allocated(pending)

    def cut(self, asked: list[Node]) -> list[Node]:
        """The nodes that must run so that every node of ``asked`` has run, in program order; O(nodes).

        Raises the error of a needed node that has failed.
        """
        return module.cut(self, asked)

    def fail_dependents(self) -> None:
        """After a failure: what needs a failed value, or must see a failed write, can never run, and fails likewise."""
        if not failures:
            return
        for node in self.pending():
            needed = [value.node for value in input_values(node) if value.concrete is None]
            failed = next((one for one in (*needed, *(node.after or ())) if one in failures), None)
            if failed is not None:
                fail_like(node, failed)

    def note_resident(self, values: list[Value]) -> None:
        """Remember values that now hold memory."""
        module.note_resident(self, values)

    def note_results(self, nodes: list[Node]) -> None:
        """Remember what of these nodes, which have run, holds memory."""
        module.note_results(self, nodes)

    def resident_values(self) -> list[Value]:
        """Values that hold memory on the device, views included."""
        return module.resident_values(self)


def traffic(nodes: list[Node]) -> int:
    """How many bytes these nodes read and write, at most; none for views."""
    return module.allocated(nodes) + sum(
        value.spec.nbytes
        for node in nodes
        if node.op is not None and not node.op.view
        for value in input_values(node)
        if value.spec is not None
    )


module.configure_resident(Tape=Tape, Spec=Spec, Operation=Operation)
