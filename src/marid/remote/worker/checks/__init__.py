"""What is looked at before an operator runs whose kernel takes its arguments on trust.

PyTorch calls these operators itself, from operators that have checked everything, so their kernels read and write where
they are told to. A client may call them with anything. A check says whether the sizes agree, and whether the numbers in
index tensors lie within what they index; it raises ``ValueError`` where they do not. Each is given the arguments of
its operator by their names in the schema, and serves all overloads.
"""

from __future__ import annotations

from collections.abc import Callable

from marid.remote.worker.checks import losses, normalisation, other, shapes
from marid.remote.worker.checks.requirements import Given

CHECKS: dict[str, Callable[[Given], None]] = {**shapes.CHECKS, **normalisation.CHECKS, **losses.CHECKS, **other.CHECKS}
"""By the name of an operator of ATen."""
