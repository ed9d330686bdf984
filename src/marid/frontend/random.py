"""Random numbers: each device's generator is a position in the stream of a CPU generator with the same seed.

A random node takes its numbers' position at capture and moves the generator on, so what it yields depends neither on
when it runs nor on what else does, and equals what eager CPU PyTorch yields after the same ``manual_seed``. How many
words an operation takes is known for the operations in ``_TAKES`` (``tests/test_random.py`` measures each against the
CPU generator); any other one runs at once, and its use is measured.
"""

from __future__ import annotations

import functools
import struct
import threading
from collections.abc import Callable
from sys import _getframe as getframe
from typing import Any

import torch
from torch.utils._device import DeviceContext

from marid.frontend import handles
from marid.graph.mersenne_twister import PAIR_WORDS, MersenneTwisters
from marid.graph.node import Draw, Spec
from marid.native import module

_STATE = struct.Struct("=QQq")


class Generator:
    """A position in a random stream: of a device by default, or behind a ``torch.Generator`` of the user."""

    __slots__ = ("device", "offset", "seed", "spare")

    def __init__(self, device: int, seed: int) -> None:
        self.device = device
        self.seed, self.offset, self.spare = seed, 0, -1

    def manual_seed(self, seed: int) -> Generator:
        """Restart at the beginning of the stream of ``seed`` (any integer, taken modulo 2**64)."""
        self.seed, self.offset, self.spare = seed % (1 << 64), 0, -1
        return self

    def initial_seed(self) -> int:
        return self.seed

    def get_state(self) -> torch.Tensor:
        """The position as a CPU ``uint8`` tensor of 24 bytes: seed, words used, spare."""
        return torch.frombuffer(bytearray(_STATE.pack(self.seed, self.offset, self.spare)), dtype=torch.uint8)

    def set_state(self, state: torch.Tensor) -> None:
        """Go to a position from ``get_state``. Raises ``RuntimeError`` for anything else."""
        raw = bytes(state.cpu().tolist())
        if state.dtype != torch.uint8 or len(raw) != _STATE.size:
            raise RuntimeError(
                f"a {handles.DEVICE_TYPE} generator state is a uint8 tensor of {_STATE.size} bytes, but got "
                f"{state.dtype} with {state.numel()} elements; take it from get_rng_state() of the same device"
            )
        self.seed, self.offset, self.spare = _STATE.unpack(raw)

    def copy(self) -> Generator:
        """Another one at the same position."""
        copied = Generator(self.device, self.seed)
        copied.offset, copied.spare = self.offset, self.spare
        return copied

    def advance(self, words: int, spare: int) -> Draw:
        """Take ``words`` words, leaving ``spare``."""
        end = self.offset + words
        taken = Draw(self.seed, self.offset, self.spare, end, spare)
        self.offset, self.spare = end, spare
        return taken


generators = [Generator(index, torch.initial_seed()) for index in range(handles.device_count)]


def default_generator(device: int) -> Generator:
    """The generator of a device."""
    return generators[device]


def seed_all(seed: int) -> None:
    """What ``torch.manual_seed`` does to the lazy devices."""
    for generator in generators:
        generator.manual_seed(seed)


def is_of_the_cpu(given: torch.Generator | None) -> bool:
    """Whether an operation on the device draws from a generator of the CPU.

    That is how scripts that name no device work when the device is the default: ``torch.Generator()`` is always the
    CPU's (``random_split``, the samplers of a ``DataLoader``). Raises ``RuntimeError`` where the device was named.
    """
    if given is None or given.device.type == handles.DEVICE_TYPE:
        return False
    if given.device.type == "cpu" and _is_called_by_default():
        return True
    raise RuntimeError(f"Expected a '{handles.DEVICE_TYPE}' device type for generator but found '{given.device.type}'")


def _is_called_by_default() -> bool:
    # While a default device is being applied, PyTorch says that there is none; but it is further up the stack.
    frame = getframe()
    while frame is not None:
        if frame.f_code is _APPLIES_DEFAULT:
            return frame.f_locals["self"].device.type == handles.DEVICE_TYPE
        frame = frame.f_back
    return False


_APPLIES_DEFAULT = DeviceContext.__torch_function__.__code__


class generator_of:
    """Context manager: the generator an operation draws from; a ``torch.Generator`` is moved on at the end."""

    def __init__(self, given: torch.Generator | None, device: int) -> None:
        self._given = given
        self._generator = generators[device] if given is None else Generator(device, 0)

    def __enter__(self) -> Generator:
        if self._given is not None:
            self._generator.set_state(self._given.get_state())
        return self._generator

    def __exit__(self, *_: object) -> None:
        if self._given is not None:
            self._given.set_state(self._generator.get_state())


class _PerThread(threading.local):
    def __init__(self) -> None:
        self.twisters = MersenneTwisters()


_per_thread = _PerThread()


def cpu_state(seed: int, offset: int, spare: int) -> torch.Tensor:
    """The state, as ``torch.Generator().get_state()`` gives it, of a CPU generator that stands at this position."""
    return _per_thread.twisters.at(Draw(seed, offset, spare, offset, spare)).get_state()


# --- how many words an operation takes -----------------------------------------------------------------------------

# Operators by name, or by name and overload where overloads differ.
Takes = Callable[[Generator, Spec, tuple[Any, ...], dict[str, Any]], Draw | None]


def draw(name: str, generator: Generator, of: Spec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draw | None:
    """Take the numbers that an operator (``aten::randn.generator``) needs to fill ``of``; None if that is not known.

    Arguments that equal their default may be missing.
    """
    takes = _TAKES.get(name) or _TAKES.get(name.partition(".")[0])
    while takes is not None:
        drawn = takes(generator.copy(), of, args, kwargs)
        if drawn is None or module.take(generator, drawn):
            return drawn  # else another thread has drawn meanwhile
    return None


def _words(of: Spec) -> int:
    """Words for one number of the dtype."""
    return 2 if of.dtype in (torch.float64, torch.complex128) else 1


def _uniform(generator: Generator, of: Spec, *_: Any) -> Draw:
    return generator.advance(_parts(of) * _words(of), generator.spare)


def _normal(generator: Generator, of: Spec, *_: Any) -> Draw:
    return _filled_normal(generator, of) if of.is_contiguous else _pairs(generator, _parts(of))


def _fresh_normal(generator: Generator, of: Spec, *_: Any) -> Draw:
    return _filled_normal(generator, of)


def _filled_normal(generator: Generator, of: Spec) -> Draw:
    """Large contiguous tensors are filled in blocks of 16."""
    count = _parts(of)
    if count < 16:
        return _pairs(generator, count)
    if of.dtype in (torch.bfloat16, torch.float16):
        return generator.advance(-(-count // 16) * 16, generator.spare)  # the last block is drawn whole
    return generator.advance((count + (16 if count % 16 else 0)) * _words(of), generator.spare)  # the last 16 twice


def _parts(of: Spec) -> int:
    return of.numel * (2 if of.dtype.is_complex else 1)


def _pairs(generator: Generator, count: int) -> Draw:
    fresh = count - (1 if generator.spare >= 0 and count else 0)
    pairs = (fresh + 1) // 2
    words = pairs * PAIR_WORDS
    if fresh % 2:
        spare = generator.offset + words - PAIR_WORDS
    else:
        spare = -1 if count else generator.spare
    return generator.advance(words, spare)


def _doubles(generator: Generator, of: Spec, *_: Any) -> Draw:
    return generator.advance(2 * of.numel, generator.spare)


def _log_normal(generator: Generator, of: Spec, *_: Any) -> Draw:
    return _pairs(generator, of.numel)


def _integers(generator: Generator, of: Spec, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Draw | None:
    bounds = [arg for arg in args if type(arg) is int]
    if not bounds:  # random_(): the whole range of the dtype
        words = 2 if of.dtype in (torch.int64, torch.float64, torch.uint64) else 1
    else:
        low, high = (0, bounds[0]) if len(bounds) == 1 else (bounds[0], bounds[1])
        words = 2 if high - low >= 1 << 32 else 1
    return generator.advance(words * of.numel, generator.spare)


def _bernoulli(generator: Generator, of: Spec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draw:
    # By tensor: a number of the probabilities' dtype each. The tensor is the argument p, or else self.
    probability = args[1] if len(args) > 1 else kwargs.get("p", args[0])  # pyright: ignore[reportGeneralTypeIssues]
    return generator.advance(of.numel * _words(probability.spec), generator.spare)


def _doubles_or_seed(generator: Generator, of: Spec, *_: Any) -> Draw:
    # Built with MKL, these kernels take one word, as the seed of a stream of MKL's own.
    words = 2 * of.numel if _draws_doubles() else min(of.numel, 1)
    return generator.advance(words, generator.spare)


@functools.cache
def _draws_doubles() -> bool:
    probe = torch.Generator().manual_seed(0)
    before = probe.get_state()
    torch.empty(32, dtype=torch.float32, device="cpu").exponential_(generator=probe)
    return measure(Generator(0, 0), before, probe.get_state()).end == 64


def _multinomial(generator: Generator, of: Spec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draw:
    samples = args[1]
    replacement = args[2] if len(args) > 2 else kwargs.get("replacement", False)
    if replacement and samples > 1:
        return generator.advance(2 * of.numel, generator.spare)
    # The largest of probabilities over exponential draws.
    return _doubles_or_seed(generator, args[0].spec)  # pyright: ignore[reportGeneralTypeIssues]


def _randperm(generator: Generator, of: Spec, *_: Any) -> Draw:
    return generator.advance(max(of.numel - 1, 0), generator.spare)


_TAKES: dict[str, Takes] = {
    "aten::uniform_": _uniform,
    "aten::rand": _uniform,
    "aten::rand_like": _uniform,
    "aten::normal_": _normal,
    "aten::randn": _fresh_normal,
    "aten::randn_like": _normal,
    "aten::randint": _integers,
    "aten::randint_like": _integers,
    "aten::random_": _integers,
    "aten::cauchy_": _doubles,
    "aten::geometric_": _doubles,
    "aten::log_normal_": _log_normal,
    "aten::randperm": _randperm,
    "aten::exponential_": _doubles_or_seed,
    "aten::bernoulli_.Tensor": _bernoulli,
    "aten::bernoulli_.float": _doubles_or_seed,
    "aten::bernoulli.p": _doubles_or_seed,
    "aten::bernoulli": _bernoulli,
    "aten::multinomial": _multinomial,
}


# --- operations whose use is only known afterwards -----------------------------------------------------------------


def measure(generator: Generator, before: torch.Tensor, reached: torch.Tensor) -> Draw:
    """Move ``generator`` to where a CPU generator is that went from state ``before`` to state ``reached``. Raises
    ``RuntimeError`` where that is not found within ``_FARTHEST`` words."""
    walker = torch.Generator()
    walker.set_state(before)
    words = (_left(before) - _left(reached)) % _TWIST
    _skip(walker, words)
    while not torch.equal(_twister(walker.get_state()), _twister(reached)):
        if words > _FARTHEST:
            raise RuntimeError(f"a state of the CPU's generator is none of the first {words} behind its seed")
        _skip(walker, _TWIST)
        words += _TWIST
    spare = generator.spare
    if not torch.equal(_spare_of(before), _spare_of(reached)):
        spare = _find_spare(generator, before, words, reached)
    return generator.advance(words, spare)


def position_of(state: torch.Tensor) -> tuple[int, int, int]:
    """Seed, words and spare of a state of the CPU's generator: it is looked for from its seed on, 10 ms for a million
    numbers. Raises ``RuntimeError`` as ``measure``."""
    seed = int(state[:8].view(torch.int64).item()) % (1 << 64)
    found = Generator(0, seed)
    measure(found, torch.Generator().manual_seed(seed).get_state(), state)
    return found.seed, found.offset, found.spare


_TWIST = 624
_FARTHEST = 1 << 31
_WINDOW = 2048
_TWISTER_BYTES = 8 + 4 + 4 + 8 + 8 * _TWIST  # seed, left, seeded, next, state: at::CPUGeneratorImplStateLegacy


def _left(state: torch.Tensor) -> int:
    return int(state[8:12].view(torch.int32).item())


def _twister(state: torch.Tensor) -> torch.Tensor:
    return state[8:_TWISTER_BYTES]


def _spare_of(state: torch.Tensor) -> torch.Tensor:
    return state[_TWISTER_BYTES:]


def _skip(generator: torch.Generator, words: int) -> None:
    if words:
        torch.empty(words, dtype=torch.uint8, device="cpu").random_(generator=generator)


def _find_spare(generator: Generator, before: torch.Tensor, words: int, reached: torch.Tensor) -> int:
    nothing = _spare_of(torch.Generator().get_state())
    if torch.equal(nothing[24:28], _spare_of(reached)[24:28]):
        return -1
    for stop in range(words, 0, -_WINDOW):  # mostly it was made a few words ago
        start = max(stop - _WINDOW, 0)
        near = torch.Generator()
        near.set_state(torch.cat([before[:_TWISTER_BYTES], nothing]))
        _skip(near, start)
        state = near.get_state()
        for at in range(min(stop, words - PAIR_WORDS), start - 1, -1):
            near.set_state(state)
            _skip(near, at - start)
            torch.empty(1, dtype=torch.float64, device="cpu").normal_(generator=near)
            if torch.equal(_spare_of(near.get_state()), _spare_of(reached)):
                return generator.offset + at
    raise AssertionError("the generator holds a spare normal number that no drawn pair explains")


module.draw_from(generators, Generator, Draw, cpu_state, measure)
