"""Why a program was built although much the same work had run before: the two compared, operation by operation.

Numbers are parameters of programs and never differ here. What can differ: the operations and their order, what decides
which kernel runs (booleans, dtypes, strings, absent arguments), which tensors meet, and which results somebody holds.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Any

from marid.graph.program import Constant, Instruction, ListOf, Param, Program, Slot
from marid.report.builds import Build, Builds
from marid.semantics.scopes import Site, text_of_site

_ALIGNED = 1_000  # operations between the first and the last difference that are aligned with care
_SMALL = 8  # programs that are compared whatever they have in common, where one line read both
_ALIKE_HERE, _ALIKE_ELSEWHERE = 0.3, 0.7  # the share of operations in common from which on work is the same work
_CANDIDATES = 16

_Place = Callable[[Site | None], str]
_Profile = Callable[[Build], Counter[tuple[str, ...]]]


@dataclass(frozen=True)
class Difference:
    """One difference. ``kind`` is ``"constant"``, ``"operator"``, ``"added"``, ``"removed"``, ``"order"``,
    ``"result"``, ``"input"`` or ``"evicted"``; ``source`` is the line in the new program and ``source_before`` that
    in the old one, where there is one; ``text`` says it without the lines."""

    kind: str
    text: str
    source: str | None = None
    source_before: str | None = None

    def __str__(self) -> str:
        places = [self.source_before, self.source]
        known = list(dict.fromkeys(place for place in places if place is not None))
        return ", ".join([self.text, " -> ".join(known)]) if known else self.text


@dataclass(frozen=True)
class Recompile:
    """A program built though one like it had been. ``source`` made it run, ``source_before`` the earlier one."""

    source: str
    source_before: str
    operations: int
    operations_before: int
    differences: tuple[Difference, ...]


def recompiles(builds: Builds) -> list[Recompile]:
    """The programs built since the last reset that are like an earlier one that is still remembered; oldest first."""
    place = functools.cache(text_of_site)
    profile = functools.cache(lambda build: _profile(build, place))
    kept = builds.kept()
    found = []
    for index, build in enumerate(kept):
        before = _nearest(build, kept[:index], place, profile) if builds.is_new(build) else None
        if before is not None:
            sizes = len(build.program.instructions), len(before.program.instructions)
            differences = _merged(_Comparison(before, build, place).differences())
            found.append(Recompile(place(build.site), place(before.site), *sizes, differences))
    return found


def _merged(differences: Iterable[Difference]) -> tuple[Difference, ...]:
    """Equal ones once, with their number: a line runs for every layer of a model."""
    counts = Counter(differences)
    return tuple(
        one if count == 1 else replace(one, text=f"{one.text} ({count:,} times)") for one, count in counts.items()
    )


def _nearest(build: Build, earlier: list[Build], place: _Place, profile: _Profile) -> Build | None:
    """The earlier program that is most like ``build``, the newest of several; None when none is like it."""
    here = place(build.site)
    best, likeness = None, 0.0
    mine = profile(build)
    same = [other for other in earlier if place(other.site) == here]
    others = [other for other in earlier if place(other.site) != here]
    for candidates, least in ((same, _ALIKE_HERE), (others, _ALIKE_ELSEWHERE)):
        for other in reversed(candidates[-_CANDIDATES:]):
            if other.program.key == build.program.key:
                return other
            theirs = profile(other)
            alike = 2 * (mine & theirs).total() / max(1, mine.total() + theirs.total())
            small = candidates is same and max(mine.total(), theirs.total()) <= _SMALL
            if (alike > likeness and alike >= least) or (small and best is None):
                best, likeness = other, alike
        if best is not None:
            break
    return best


def _profile(build: Build, place: _Place) -> Counter[tuple[str, ...]]:
    """The operations of a program by operator, line and what of the arguments is part of it."""
    return Counter(
        (i.op.name, place(site), *map(_shown, i.args), *(_shown(arg) for _, arg in i.kwargs))
        for i, site in zip(build.program.instructions, build.sites, strict=True)
    )


class _Comparison:
    """Two programs side by side. Operations are aligned by operator and line; what is left over was added or removed,
    and where two that are aligned have different arguments, those differ."""

    def __init__(self, before: Build, after: Build, place: _Place) -> None:
        self.before, self.after, self.place = before, after, place
        self.old, self.new = before.program.instructions, after.program.instructions

    def differences(self) -> Iterator[Difference]:
        if self.before.program.key == self.after.program.key:
            yield Difference("evicted", "the same program had been built, and was no longer in the cache of programs")
            return
        pairs, removed, added = self._align()
        pairs, removed, added = self._align_by_operator(pairs, removed, added)
        names = Counter(self.old[i].op.name for i in removed), Counter(self.new[j].op.name for j in added)
        if removed and names[0] == names[1]:
            text = f"the same operations in another order: {_listed(names[1])} moved"
            yield Difference("order", text, self._at(added[0]), self._was_at(removed[0]))
            yield from self._constants(pairs)
            return
        found = [*self._constants(pairs), *self._unmatched(removed, added)]
        # Another operation makes other tensors meet and keeps other results: said only where nothing else explains it.
        yield from found or [*self._results(pairs)] or [*self._inputs(pairs)]

    # --- aligning ---

    def _align(self) -> tuple[list[tuple[int, int]], list[int], list[int]]:
        """Indices of operations that correspond, and of those that only one of the two has."""
        old = [self._old_token(i) for i in range(len(self.old))]
        new = [self._new_token(i) for i in range(len(self.new))]
        start, shortest = 0, min(len(old), len(new))
        while start < shortest and old[start] == new[start]:
            start += 1
        end = 0
        while end < shortest - start and old[-1 - end] == new[-1 - end]:
            end += 1
        pairs = [(i, i) for i in range(start)]
        removed, added = [*range(start, len(old) - end)], [*range(start, len(new) - end)]
        if max(len(removed), len(added)) <= _ALIGNED:
            blocks = SequenceMatcher(None, old[start : len(old) - end], new[start : len(new) - end], False)
            for block in blocks.get_matching_blocks():
                pairs += [(start + block.a + i, start + block.b + i) for i in range(block.size)]
            matched_old, matched_new = {i for i, _ in pairs}, {j for _, j in pairs}
            removed = [i for i in removed if i not in matched_old]
            added = [j for j in added if j not in matched_new]
        pairs += [(len(old) - end + i, len(new) - end + i) for i in range(end)]
        return pairs, removed, added

    def _align_by_operator(
        self, pairs: list[tuple[int, int]], removed: list[int], added: list[int]
    ) -> tuple[list[tuple[int, int]], list[int], list[int]]:
        """Of what is left over, the same operators in the same order, which only moved to another line."""
        if not removed or not added or max(len(removed), len(added)) > _ALIGNED:
            return pairs, removed, added
        old, new = [self.old[i].op.name for i in removed], [self.new[j].op.name for j in added]
        blocks = SequenceMatcher(None, old, new, False).get_matching_blocks()
        moved = [(removed[block.a + i], added[block.b + i]) for block in blocks for i in range(block.size)]
        gone, come = {i for i, _ in moved}, {j for _, j in moved}
        return sorted([*pairs, *moved]), [i for i in removed if i not in gone], [j for j in added if j not in come]

    def _old_token(self, index: int) -> tuple[str, str]:
        return self.old[index].op.name, self._was_at(index)

    def _new_token(self, index: int) -> tuple[str, str]:
        return self.new[index].op.name, self._at(index)

    def _was_at(self, index: int) -> str:
        return self.place(self.before.sites[index])

    def _at(self, index: int) -> str:
        return self.place(self.after.sites[index])

    # --- what differs between operations that correspond ---

    def _constants(self, pairs: list[tuple[int, int]]) -> Iterator[Difference]:
        """Arguments that are part of the program, and the choice between overloads."""
        for i, j in pairs:
            old, new = self.old[i], self.new[j]
            if old.op is not new.op:
                yield Difference("operator", f"{old.op.func} -> {new.op.func}", self._at(j), self._was_at(i))
                continue
            before, after = _arguments(old), _arguments(new)
            names = dict.fromkeys([*before, *after])
            differ = [name for name in names if _shown(before.get(name)) != _shown(after.get(name))]
            # PyTorch leaves out arguments that have their default up to the last that has not: a number may be there
            # for the sake of the one after it.
            decisive = [
                name for name in differ if "a number" not in (_shown(before.get(name)), _shown(after.get(name)))
            ]
            for name in decisive or differ:
                change = f"`{name}` {_shown(before.get(name))} -> {_shown(after.get(name))}"
                yield Difference("constant", f"{change} in {new.op.name}", self._at(j), self._was_at(i))

    def _results(self, pairs: list[tuple[int, int]]) -> Iterator[Difference]:
        """Results that somebody holds after one of the runs only."""
        before, after = set(self.before.program.output_slots), set(self.after.program.output_slots)
        for i, j in pairs:
            held = [{r.path for r in self.old[i].results if r.slot in before}]
            held += [{r.path for r in self.new[j].results if r.slot in after}]
            known = [{r.path for r in instruction.results} for instruction in (self.old[i], self.new[j])]
            if held[0] != held[1]:
                state = "held now, and was not" if held[1] - held[0] else "no longer held, and was"
                what = "result" if len(self.new[j].results) < 2 else "one of the results"
                text = f"{what} of {self.new[j].op.name} is {state} when the program was built before"
                yield Difference("result", text, self._at(j), self._was_at(i))
            elif known[0] != known[1]:
                yield Difference(
                    "result", f"other results of {self.new[j].op.name} are used", self._at(j), self._was_at(i)
                )

    def _inputs(self, pairs: list[tuple[int, int]]) -> Iterator[Difference]:
        """The first operation that gets another tensor: what follows from it would only repeat it."""
        makers = _makers(self.before.program), _makers(self.after.program)
        counterpart = dict(pairs)
        same, back = dict[int, int](), dict[int, int]()
        for i, j in pairs:
            for (name, was), (_, now) in zip(_tensors(self.old[i]), _tensors(self.new[j]), strict=False):
                made, makes = makers[0].get(was), makers[1].get(now)
                if made is None and makes is None:
                    agree = same.setdefault(was, now) == now and back.setdefault(now, was) == was
                else:
                    agree = made is not None and makes is not None and counterpart.get(made) == makes
                if not agree:
                    was_one = "a tensor from before" if made is None else self._made(self.old[made], self._was_at(made))
                    is_one = "a tensor from before" if makes is None else self._made(self.new[makes], self._at(makes))
                    what = f"{is_one}, and was {was_one}" if is_one != was_one else "another one than it was"
                    text = f"`{name}` of {self.new[j].op.name} is {what}"
                    yield Difference("input", text, self._at(j), self._was_at(i))
                    return

    @staticmethod
    def _made(instruction: Instruction, line: str) -> str:
        return f"the result of {instruction.op.name} ({line})"

    def _unmatched(self, removed: list[int], added: list[int]) -> Iterator[Difference]:
        """Operations that only one of the programs has."""
        if len(removed) == len(added) == 1:
            (i,), (j,) = removed, added
            text = f"{self.old[i].op.name} -> {self.new[j].op.name}"
            yield Difference("operator", text, self._at(j), self._was_at(i))
            return
        for line, names in _by_line(removed, self.old, self._was_at):
            yield Difference("removed", f"{_operations(names, 'fewer')}", None, line)
        for line, names in _by_line(added, self.new, self._at):
            yield Difference("added", f"{_operations(names, 'more')}", line, None)


def _by_line(
    indices: list[int], instructions: Sequence[Instruction], at: Callable[[int], str]
) -> Iterable[tuple[str, Counter[str]]]:
    lines: dict[str, Counter[str]] = {}
    for index in indices:
        lines.setdefault(at(index), Counter())[instructions[index].op.name] += 1
    return lines.items()


def _operations(names: Counter[str], word: str) -> str:
    count = names.total()
    return f"{count:,} {word} operation{'s' if count > 1 else ''}: {_listed(names)}"


def _listed(names: Counter[str], most: int = 6) -> str:
    shown = [f"{name} x{count}" if count > 1 else name for name, count in names.most_common(most)]
    return ", ".join([*shown, "..."] if len(names) > most else shown)


def _arguments(instruction: Instruction) -> dict[str, Any]:
    """Arguments by name, in the order of the schema as far as they are given by position."""
    schema = instruction.op.func._schema.arguments
    defaults = {argument.name: Constant(argument.default_value) for argument in schema if argument.has_default_value()}
    names = [argument.name for argument in schema]
    given = {names[i] if i < len(names) else f"argument {i}": arg for i, arg in enumerate(instruction.args)}
    return defaults | given | dict(instruction.kwargs)


def _shown(arg: Any) -> str:
    """What of an argument is part of the program, as text."""
    if isinstance(arg, Slot):
        return "a tensor"
    if isinstance(arg, Param):
        return "a random position" if arg.draw else "a number"
    if isinstance(arg, ListOf):
        return f"[{', '.join(map(_shown, arg.items))}]" if len(arg.items) <= 4 else f"a list of {len(arg.items)}"
    if isinstance(arg, Constant):
        return repr(arg.value)
    return "not given"


def _tensors(instruction: Instruction) -> Iterator[tuple[str, int]]:
    for name, arg in _arguments(instruction).items():
        items: Iterable[Any] = arg.items if isinstance(arg, ListOf) else (arg,)
        yield from ((name, item.index) for item in items if isinstance(item, Slot))


def _makers(program: Program) -> dict[int, int]:
    return {result.slot: index for index, i in enumerate(program.instructions) for result in i.results}
