"""Whether a compiled part differs from the flat tier by rounding.

Elements are first compared within the tolerances of ``torch.testing``. A sum whose terms cancel is farther off than
these, and so is a chain in bfloat16 whose intermediate results compiled code keeps in float32. So where that fails, the
flat tier runs again with the last bits of its inputs and of each operation's results changed at random: what differs no
more than some times as much as that is rounding. (Monte Carlo arithmetic: D. S. Parker, 1997.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from marid.graph.node import span_of

# Relative and absolute, as torch.testing.assert_close has them.
_TOLERANCES = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
}
_PIECE = 1 << 15

_TRIALS = 8
_MOST_BITS = 3
"""How many times the last bit an input may be changed by. With one, two inputs are changed alike in half of the trials,
and where they cancel nothing is seen."""
_TIMES = 16
"""How much farther off an element may be than in the farthest of the trials. Of 3 * 10^7 elements of right results
(chains, softmax, layer norm, sums and products of matrices in three dtypes) the farthest was 6.4 times as far off."""
_LAST_BITS = 4
"""How many times its last bit an element may be off anyway."""

Disturb = Callable[[Sequence[torch.Tensor]], None]
"""Changes each element of results by its last bit, as another order or another formula of the same function may."""


def is_close(got: torch.Tensor, right: torch.Tensor) -> bool:
    """Equality within the tolerances of ``torch.testing``, with dtype and strides."""
    if not _is_alike(got, right):
        return False
    if got.dtype not in _TOLERANCES:
        return torch.equal(got, right)
    relative, absolute = _TOLERANCES[got.dtype]
    # In pieces that fit into a cache: a user waits for this.
    pieces = zip(got.reshape(-1).split(_PIECE), right.reshape(-1).split(_PIECE), strict=True)
    quick = got.dtype in (torch.float32, torch.float64)  # the others would be rounded on the way
    return all(
        (quick and bool((a - b).abs_().sub_(b.abs(), alpha=relative).max() <= absolute))
        or torch.allclose(a, b, relative, absolute, equal_nan=True)  # also for infinities and NaN
        for a, b in pieces
    )


def beyond_rounding(
    results: Sequence[tuple[torch.Tensor, torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    bases: Sequence[int],
    run: Callable[[list[torch.Tensor], Disturb], list[torch.Tensor]],
) -> list[int]:
    """Which of the results, pairs of what was computed and what is right, differ by more than rounding.

    ``inputs`` are those by which they were computed, ``bases`` of which other one an input is a view (-1 for none).
    ``run`` computes what is right from inputs like these, which it may write to, and has each operation's results
    disturbed.
    """
    limits = [_zeros(right) for _, right in results]
    for trial in range(_TRIALS):
        generator = torch.Generator("cpu").manual_seed(trial)
        changed = copies(inputs, bases, [base < 0 for base in bases])
        own = [one for one, base in zip(changed, bases, strict=True) if base < 0]
        _change_last_bits(own, torch.arange(-_MOST_BITS, _MOST_BITS + 1, device="cpu"), generator)
        disturb = functools.partial(_change_last_bits, steps=torch.tensor([-1, 1], device="cpu"), generator=generator)
        for limit, other, (_, right) in zip(limits, run(changed, disturb), results, strict=True):
            torch.maximum(limit, _distance(other, right), out=limit)
    return [
        index
        for index, ((got, right), limit) in enumerate(zip(results, limits, strict=True))
        if not _is_alike(got, right) or bool((_distance(got, right) > _TIMES * limit + _last_bits(right)).any())
    ]


def copies(tensors: Sequence[torch.Tensor], bases: Sequence[int], which: Sequence[bool]) -> list[torch.Tensor]:
    """Tensors with the same geometry and elements: these of them with memory of their own, and views of those in it."""
    made = [_copy(own) if copied else own for own, copied in zip(tensors, which, strict=True)]
    for index, (own, base) in enumerate(zip(tensors, bases, strict=True)):
        if base >= 0:
            made[index] = made[base].as_strided(own.shape, own.stride(), own.storage_offset())
    return made


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    # As large as what it lies in, of which only what may be read is touched.
    memory = torch.empty(tensor.untyped_storage().nbytes() // tensor.element_size(), dtype=tensor.dtype, device="cpu")
    start, span = tensor.storage_offset(), span_of(tensor.shape, tensor.stride())
    memory[start : start + span] = tensor.as_strided((span,), (1,), start)
    return memory.as_strided(tensor.shape, tensor.stride(), start)


def _is_alike(got: torch.Tensor, right: torch.Tensor) -> bool:
    return (got.shape, got.stride(), got.dtype) == (right.shape, right.stride(), right.dtype)


def _change_last_bits(tensors: Sequence[torch.Tensor], steps: torch.Tensor, generator: torch.Generator) -> None:
    """Change each element by one of ``steps``, in last bits."""
    for tensor in tensors:
        if not tensor.is_floating_point():
            continue
        flat = tensor.as_strided((span_of(tensor.shape, tensor.stride()),), (1,), tensor.storage_offset())
        factors = (1 + steps * torch.finfo(tensor.dtype).eps).to(tensor.dtype)
        flat.mul_(factors[torch.randint(len(factors), flat.shape, generator=generator, device="cpu")])


def _counts(tensor: torch.Tensor) -> bool:
    """Whether not each element is compared, but how many differ: integers and truths."""
    return not tensor.is_floating_point() and not tensor.is_complex()


def _zeros(right: torch.Tensor) -> torch.Tensor:
    return torch.zeros(() if _counts(right) else right.shape, dtype=torch.float64, device="cpu")


def _last_bits(right: torch.Tensor) -> torch.Tensor | float:
    if _counts(right):
        return 0.0
    return _LAST_BITS * torch.finfo(right.dtype).eps * right.abs().double().nan_to_num(0.0, 0.0, 0.0)


def _distance(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """How far elements are apart; of integers and truths, how many differ."""
    if _counts(first):
        return (first != second).sum().double()
    same = (first == second) | (first.isnan() & second.isnan())
    apart = first.to(torch.complex128) - second if first.is_complex() else first.double() - second
    return apart.abs().masked_fill(same, 0.0).nan_to_num(float("inf"), float("inf"), float("inf"))
