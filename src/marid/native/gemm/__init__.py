"""Products of matrices: kernels that take the place of BLAS's, where they are faster and right.

``docs/matrix_kernels.md`` says why they exist, what they assume, and what is tried before they are believed.
``products.cpp`` has the operators that programs run, with ATen's bits, ``trials.cpp`` chooses the kernel, and
``multiply.cpp`` and ``multiply_row.cpp`` (with ``row_kernels.cpp``) are the two kernels. Operators with sums in an
order of their own are in ``fast_linear.cpp`` (floats) and ``quantized.cpp`` (packed matrices); the ``*_kernels.cpp``
are compiled for this machine's vector unit. This module switches them on and off; which operator runs in the place of
which of ATen's is in ``ops/irregular.py``.
"""

from __future__ import annotations

from marid.native import module
from marid.settings import settings


def configure(
    *,
    also_slower: bool = False,
    uses: int = 2,
    work: float = 4e7,
    share: float = 0.1,
    block: int = -1,
    bytes_too: bool = True,
) -> None:
    """Begin anew, using the faster kernel wherever its bits are right, and it is faster unless ``also_slower``.

    Products of a class are tried once ``uses`` of them, of ``work`` floating-point operations together, were run by
    ATen, in no more than this ``share`` of the time. ``block`` is for tests: the depth of the stretches in which BLAS
    is taken to add up, -1 to find it out; and ``bytes_too``: whether packed matrices may be multiplied by instructions
    for bytes, where the processor has them.
    """
    module.products_configure(also_slower, uses, work, share, block)
    module.quantized_configure(bytes_too)


def count() -> int:
    """How many products the faster kernel has computed in this process."""
    return module.products_count()


def _settings_changed() -> None:
    module.products_enable(settings.fast_products)


configure()
settings.when_changed(_settings_changed)
_settings_changed()
