"""Where the layers of a model go: stretches of them in the order of their use, so that the least time is taken."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from marid.errors import MemoryLimitError
from marid.placement.forward import Forward
from marid.placement.moving import writes
from marid.report.units import bytes_text

_LATENCY = 1e-3
"""Seconds that a copy takes beyond its bytes: the client waits for what is copied."""
_BOTH_WAYS = 2
"""Bytes for each that a forward makes, where it is trained: those and their gradients."""
_ATTEMPTS = 32
"""Divisions that are tried with less room for layers, until activations fit too."""
_ORDERED = 4
"""Devices that are tried in every order."""
_NAMED = 5
"""Layers that an error names."""


@dataclass(frozen=True)
class Device:
    """A device by its index, the bytes that it may take (None for any number), and its operations a second."""

    index: int
    limit: int | None
    speed: float


@dataclass(frozen=True)
class Needs:
    """What is kept beside the layers: ``states`` times as many bytes again for each that is trained (its gradient, the
    optimizer's), and with ``training`` all that the forward makes, for the backward, which makes as much again."""

    training: bool
    states: int


@dataclass
class Cost:
    """What a placement takes, by device: bytes of layers and of activations, floating-point operations; and the bytes
    that go from one device to another in a forward, and in its backward."""

    layers: dict[int, int]
    activations: dict[int, int]
    flops: dict[int, int]
    forward_bytes: int
    backward_bytes: int
    copies: int
    output: int | None

    def bytes_on(self, device: int) -> int:
        """What lies on a device at most."""
        return self.layers.get(device, 0) + self.activations.get(device, 0)


def layer_bytes(forward: Forward, layer: str, needs: Needs) -> int:
    """What a layer takes, with what training keeps of it."""
    return forward.layers[layer] + needs.states * forward.trained.get(layer, 0)


def cost_of(forward: Forward, at: Mapping[str, int], devices: Sequence[int], needs: Needs) -> Cost:
    """Go through a forward whose layers lie at these devices, as ``Together`` runs it; inputs lie on the first one."""
    order = {device: place for place, device in enumerate(devices)}
    where = dict.fromkeys(range(forward.inputs), devices[0]) | {
        one: at[layer] for one, layer in forward.buffers.items()
    }
    copied: set[tuple[int, int]] = set()
    made: dict[int, int] = {}
    cost = Cost({}, {}, {}, 0, 0, 0, None)
    for layer in forward.layers:
        cost.layers[at[layer]] = cost.layers.get(at[layer], 0) + layer_bytes(forward, layer, needs)
    for step in forward.steps:
        on = [where[one] for one in step.reads if one in where]
        if writes(step.function) and on:
            target = on[0]
        elif step.layer is not None:
            target = at[step.layer]
        else:
            target = max(on, key=order.__getitem__, default=devices[0])
        for one in step.reads:
            if where.get(one, target) != target and (one, target) not in copied:
                copied.add((one, target))
                cost.forward_bytes += forward.nbytes[one]
                cost.backward_bytes += forward.nbytes[one] if needs.training and forward.has_gradient[one] else 0
                made[target] = made.get(target, 0) + forward.nbytes[one]
        cost.flops[target] = cost.flops.get(target, 0) + step.flops
        for one in step.makes:
            if one not in where:
                where[one] = target
                made[target] = made.get(target, 0) + forward.own_bytes[one]
                cost.output = target
    cost.copies = len(copied)
    doubled = {device: _BOTH_WAYS * nbytes for device, nbytes in made.items()}
    cost.activations = doubled if needs.training else _largest_alive(forward, where)
    return cost


def _largest_alive(forward: Forward, where: Mapping[int, int]) -> dict[int, int]:
    """The bytes of tensors that are still read, by device, where there are most of them."""
    last = {one: place for place, step in enumerate(forward.steps) for one in (*step.reads, *step.makes)}
    ends: dict[int, list[int]] = {}
    for one, place in last.items():
        ends.setdefault(place, []).append(one)
    alive: dict[int, int] = {}
    most: dict[int, int] = {}
    seen: set[int] = set()
    for place, step in enumerate(forward.steps):
        for one in (*step.reads, *step.makes):
            if one not in seen and one not in forward.buffers:
                seen.add(one)
                alive[where[one]] = alive.get(where[one], 0) + forward.own_bytes[one]
                most[where[one]] = max(most.get(where[one], 0), alive[where[one]])
        for one in ends.get(place, ()):
            if one in seen:
                alive[where[one]] -= forward.own_bytes[one]
    return most


def chosen(forward: Forward, devices: Sequence[Device], link: float, needs: Needs) -> dict[str, int]:
    """The device of each layer, by its index.

    Layers in the order of their first use are divided into stretches, one for a device, in any order of the devices and
    with any of them left out: for the least of operations / speed + bytes between devices / ``link``, within the
    limits. Stretches begin where fewer bytes go on than at the layers beside, between items of lists of modules; within
    them, and then at any layer, only where nothing else fits.

    Raises ``MemoryLimitError`` where nothing fits.
    """
    layers = list(forward.layers)
    crossing = _crossing(forward, layers)
    least = [
        place
        for place in range(1, len(layers))
        if crossing[place] <= crossing[place - 1]
        and (place + 1 == len(layers) or crossing[place] <= crossing[place + 1])
    ]
    whole = [place for place in least if _block(layers[place]) != _block(layers[place - 1])]
    for starts in (whole, least, range(1, len(layers))):
        best = _fastest(forward, layers, [0, *starts], crossing, devices, link, needs)
        if best is not None:
            return best
    raise _too_large(forward, devices, needs)


def _block(layer: str) -> str:
    """The block that a layer is in: the item of a list of modules, or the layer itself."""
    parts = layer.split(".")
    return next((".".join(parts[: place + 1]) for place, part in enumerate(parts) if part.isdecimal()), layer)


def _fastest(
    forward: Forward,
    layers: Sequence[str],
    starts: Sequence[int],
    crossing: Sequence[int],
    devices: Sequence[Device],
    link: float,
    needs: Needs,
) -> dict[str, int] | None:
    stretches = list(itertools.pairwise([*starts, len(layers)]))
    sums = _sums(forward, layers, needs)
    entering = [crossing[place] * (2 if needs.training else 1) for place in starts]
    best: tuple[float, dict[str, int]] | None = None
    for some in _orders(devices):
        found = _fitting(forward, layers, needs, some, lambda some: _divide(stretches, sums, entering, some, link))
        if found is None:
            continue
        at, cost = found
        seconds = (cost.forward_bytes + cost.backward_bytes) / link + cost.copies * _LATENCY
        seconds += sum(cost.flops.get(device.index, 0) / device.speed for device in some)
        if best is None or seconds < best[0]:
            best = seconds, at
    return None if best is None else best[1]


def _fitting(
    forward: Forward,
    layers: Sequence[str],
    needs: Needs,
    devices: tuple[Device, ...],
    divide: Callable[[tuple[Device, ...]], list[int] | None],
) -> tuple[dict[str, int], Cost] | None:
    """A division that fits, with its cost: where activations do not, there is less room for layers, and again."""
    some = devices
    for _ in range(_ATTEMPTS):
        ends = divide(some)
        if ends is None:
            return None
        at: dict[str, int] = {}
        for device, (first, last) in zip(devices, itertools.pairwise([0, *ends]), strict=True):
            at |= dict.fromkeys(layers[first:last], device.index)
        cost = cost_of(forward, at, [device.index for device in devices], needs)
        beyond = [0 if one.limit is None else cost.bytes_on(one.index) - one.limit for one in devices]
        if max(beyond) <= 0:
            return at, cost
        some = tuple(
            replace(one, limit=_counted(cost, one.index, needs) - more) if more > 0 else one
            for one, more in zip(some, beyond, strict=True)
        )
    return None


def _counted(cost: Cost, device: int, needs: Needs) -> int:
    """The bytes that a division counts on a device: without training, those of layers only."""
    return cost.bytes_on(device) if needs.training else cost.layers.get(device, 0)


def _orders(devices: Sequence[Device]) -> list[tuple[Device, ...]]:
    """The devices in every order, fewest first, of those that are alike only one; many devices only in the order of
    their speed, since eight have 109,600 orders."""
    order = itertools.permutations if len(devices) <= _ORDERED else itertools.combinations
    fastest = sorted(devices, key=lambda device: device.speed, reverse=True)
    seen: set[tuple[tuple[int | None, float], ...]] = set()
    found = []
    for count in range(1, len(devices) + 1):
        for some in order(fastest, count):
            kinds = tuple((device.limit, device.speed) for device in some)
            if kinds not in seen:
                seen.add(kinds)
                found.append(some)
    return found


def _crossing(forward: Forward, layers: Sequence[str]) -> list[int]:
    """The bytes that were made before the first use of a layer, and are read then or later."""
    last = {one: place for place, step in enumerate(forward.steps) for one in step.reads}
    changes = [0] * (len(forward.steps) + 1)
    seen = set(forward.buffers)
    for place, step in enumerate(forward.steps):
        for one in (*step.reads, *step.makes):
            if one not in seen and last.get(one, -1) > place:
                changes[place + 1] += forward.nbytes[one]
                changes[last[one] + 1] -= forward.nbytes[one]
            seen.add(one)
    alive = list(itertools.accumulate(changes))
    return [alive[forward.first_use.get(layer, len(forward.steps))] for layer in layers]


def _sums(forward: Forward, layers: Sequence[str], needs: Needs) -> list[tuple[int, int]]:
    """Bytes and operations of all layers before each."""
    flops = dict.fromkeys(layers, 0)
    made = dict.fromkeys(layers, 0)
    begins = {place: layer for layer, place in forward.first_use.items()}
    current = layers[0]
    seen: set[int] = set()
    for place, step in enumerate(forward.steps):
        current = begins.get(place, current) if step.layer is None else step.layer
        flops[current] += step.flops
        if needs.training:
            made[current] += _BOTH_WAYS * sum(forward.own_bytes[one] for one in step.makes if one not in seen)
            seen.update(step.makes)
    own = [(layer_bytes(forward, layer, needs) + made[layer], flops[layer]) for layer in layers]
    return [(0, 0), *itertools.accumulate(own, lambda a, b: (a[0] + b[0], a[1] + b[1]))]


def _divide(
    stretches: Sequence[tuple[int, int]],
    sums: Sequence[tuple[int, int]],
    crossing: Sequence[int],
    devices: Sequence[Device],
    link: float,
) -> list[int] | None:
    """Where the stretch of each device ends; None where nothing fits.

    The division takes the fewest nanoseconds by these estimates; of equal ones it is that which fills devices most
    evenly.
    """
    count = len(stretches)
    best: list[tuple[int, float, list[int]] | None] = [(0, 0.0, []), *[None] * count]
    for device in devices:
        now: list[tuple[int, float, list[int]] | None] = [None] * (count + 1)
        for start, before in enumerate(best):
            if before is None:
                continue
            entry = crossing[start] / link if 0 < start < count else 0.0
            for stop in range(start + 1, count + 1):
                first, last = sums[stretches[start][0]], sums[stretches[stop - 1][1]]
                nbytes = last[0] - first[0]
                if device.limit is not None and nbytes > device.limit:
                    break
                taken = before[0] + round(1e9 * (entry + (last[1] - first[1]) / device.speed))
                full = before[1] + (0.0 if device.limit is None else (nbytes / device.limit) ** 2)
                found = now[stop]
                if found is None or (taken, full) < found[:2]:
                    now[stop] = taken, full, [*before[2], stretches[stop - 1][1]]
        best = now
    whole = best[count]
    return None if whole is None else whole[2]


def _too_large(forward: Forward, devices: Sequence[Device], needs: Needs) -> MemoryLimitError:
    sizes = {layer: layer_bytes(forward, layer, needs) for layer in forward.layers}
    largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:_NAMED]
    room = ", ".join("any" if device.limit is None else bytes_text(device.limit) for device in devices)
    lines = [f"  {bytes_text(sizes[layer])}  {layer or 'the model itself'}" for layer in largest]
    own = f"the layers take {bytes_text(sum(sizes.values()))}"
    if needs.training:
        own += (
            f" with what training keeps of them, and what they make {bytes_text(_BOTH_WAYS * sum(forward.own_bytes))}"
        )
    return MemoryLimitError(
        f"{own}: there is no way to divide them over devices with {room}; the largest:\n" + "\n".join(lines)
    )
