"""Pairing units that lie open, of no container: by shape, fused ones by their rows, and at last by kind alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from padiff.align.matching import names
from padiff.align.matching.evidence import Item, Scores, scores
from padiff.align.matching.forest import common_prefix
from padiff.align.matching.fused import Bundle, bundles, cells_beside
from padiff.align.matching.sides import Match, Matches, Side
from padiff.align.matching.solve import CLOSE, TOO_CLOSE, Choice, assign
from padiff.align.matching.units import Signature, Unit, bare
from padiff.model import equivalents

# What decided, in a word.
_REASONS = {
    "values": "values",
    "names": "names",
    "numbers in the names": "names",
    "order of execution": "execution",
    "kind": "kinds",
}

# Below that score, what speaks against a pair outweighs that nothing else fits.
_AGAINST = -4.0


class Pool:
    """Pairs units of two models, wherever they lie."""

    def __init__(
        self, sides: tuple[Side, Side], without: Collection[str], linked: names.Linked, matches: Matches
    ) -> None:
        self._sides, self._linked = sides, linked
        self._without = without
        self.matches = matches

    def pair(self, ours: list[Unit], theirs: list[Unit]) -> tuple[list[Unit], list[Unit]]:
        """Pair units of the same shapes, fused ones with their parts first; what is left over.

        What has to be carried over comes first; then what is tied, or a buffer, with what has no partner yet.
        """
        tied = _tied_alike(ours, theirs)
        required = [[u for u in side if not u.optional or (u.signature in tied and u.tied)] for side in (ours, theirs)]
        rest = self._fused(required[0], required[1], False)
        rest = self._fused(rest[1], rest[0], True)[::-1]
        self._same_shapes(rest[0], rest[1])
        left = self.matches.left_of(ours, theirs)
        self._same_shapes(left[0], left[1])
        return self.matches.left_of(ours, theirs)

    def _same_shapes(self, ours: Sequence[Unit], theirs: Sequence[Unit]) -> None:
        groups = [_by(side, lambda unit: unit.signature) for side in (ours, theirs)]
        for signature in [s for s in groups[0] if s in groups[1]]:
            self._alike(groups[0][signature], groups[1][signature])

    def _fused(self, wholes: list[Unit], parts: list[Unit], turned: bool) -> tuple[list[Unit], list[Unit]]:
        """Pair units that have no like on the other side with the several whose rows they hold; the rest of both."""
        counts = Counter(u.signature for u in wholes), Counter(u.signature for u in parts)
        surplus = [u for u in wholes if counts[0][u.signature] > counts[1][u.signature] and not u.opaque]
        spare = [u for u in parts if counts[1][u.signature] > counts[0][u.signature] and not u.opaque]
        side, other = (self._sides[1], self._sides[0]) if turned else self._sides
        done: set[Unit] = set()
        for members in _by(surplus, lambda unit: (unit.signature, equivalents.group_of_kinds(unit.kind))).values():
            found = [b for b in bundles(members[0], spare, other.seen.order) if not done & set(b.parts)]
            if not found:
                continue
            items = [side.item(u) for u in members], [self._bundle_item(other, b) for b in found]
            signature = members[0].signature
            more = counts[0][signature] - counts[1][signature] - sum(u.signature == signature for u in done)
            chosen = assign(items[0], items[1], self._scoring(items), common_prefixes(items))
            # Only so many as have no like: the best of them.
            for choice in sorted(chosen, key=lambda choice: -choice.score)[:more]:
                whole, bundle = members[choice.ours], found[choice.theirs]
                if done & set(bundle.parts) or choice.margin < TOO_CLOSE:
                    continue
                done |= {whole, *bundle.parts}
                confidence = min(choice.confidence, 0.95 if bundle.named else 0.7)
                evidence = ("rows add up", *(("names of the parts",) if bundle.named else ()), *choice.reasons)
                sides = ((whole,), bundle.parts)
                ours, theirs = reversed(sides) if turned else sides
                self.matches.add(Match(ours, theirs, confidence, "parts", evidence))
        return [u for u in wholes if u not in done], [u for u in parts if u not in done]

    def _bundle_item(self, side: Side, bundle: Bundle) -> Item:
        item = side.item(bundle.parts[0])
        parent = item.path.rpartition(".")[0]
        # Called as the fused layer would be, so that its name can be compared.
        path = f"{item.path}.{bundle.role}" if bundle.role else parent or item.path
        return Item(path=path, defined=item.defined, ran=item.ran, kind=item.kind, around=item.around)

    def _alike(self, ours: Sequence[Unit], theirs: Sequence[Unit]) -> None:
        for mine, other in self._by_roles(ours, theirs):
            items = [self._sides[0].item(u) for u in mine], [self._sides[1].item(u) for u in other]
            for choice in assign(items[0], items[1], self._scoring(items), common_prefixes(items)):
                self._take(choice, mine, other)

    def _by_roles(self, ours: Sequence[Unit], theirs: Sequence[Unit]) -> Iterator[tuple[list[Unit], list[Unit]]]:
        """The units cut into groups of one role, where either side has as many of it; what is left is one group.

        So a shortcut that is defined first on one side and last on the other does not shift the places of the rest.
        """
        if "names" in self._without or max(len(ours), len(theirs)) < 2:
            yield list(ours), list(theirs)
            return
        read = [[names.read(unit.name, "").roles for unit in side] for side in (ours, theirs)]
        # Only of families that both sides tell.
        families = [{family for roles in side for family, _ in roles} for side in read]
        telling = families[0] & families[1]
        roles: list[dict[frozenset[tuple[str, str]], list[Unit]]] = [{}, {}]
        for k, side in enumerate((ours, theirs)):
            for unit, said in zip(side, read[k]):
                key = frozenset((family, value) for family, value in said if family in telling)
                roles[k].setdefault(key, []).append(unit)
        rest: tuple[list[Unit], list[Unit]] = ([], [])
        for key in {**roles[0], **roles[1]}:
            mine, other = roles[0].get(key, []), roles[1].get(key, [])
            if key and len(mine) == len(other):
                yield mine, other
            else:
                rest[0].extend(mine)
                rest[1].extend(other)
        if all(rest):
            yield rest

    def _take(self, choice: Choice, ours: Sequence[Unit], theirs: Sequence[Unit]) -> None:
        if choice.margin < TOO_CLOSE or choice.score <= _AGAINST:
            return
        alone = len(ours) == len(theirs) == 1
        reason = "only one fits" if alone else _REASONS.get(choice.decided, "order")
        confidence = choice.confidence if not alone else (0.99 if choice.score > 0 else 0.8)
        evidence = ("shapes", *choice.reasons)
        rivals = tuple(theirs[k] for k in choice.rivals) if choice.margin < CLOSE else ()
        a, b = ours[choice.ours], theirs[choice.theirs]
        a, b = self._sides[0].twin(a, b.kind), self._sides[1].twin(b, a.kind)
        self.matches.add(Match((a,), (b,), confidence, reason, evidence, rivals))

    def _scoring(self, items: Sequence[Sequence[Item]]) -> Callable[[Sequence[Item], Sequence[Item]], Scores]:
        inner = common_prefixes(items)
        return lambda a, b: scores(a, b, inner, self._without, self._linked)

    # -- what does not fit -------------------------------------------------------------------------------------

    def pair_loosely(self, ours: list[Unit], theirs: list[Unit]) -> tuple[list[Unit], list[Unit]]:
        """Pair what is left by kind, though the shapes differ: that is where the models differ, to be shown there."""
        ours, theirs = self._beside(ours, theirs)
        ours, theirs = self._by_weight(ours, theirs, lambda unit: bare(unit.matrix))
        ours, theirs = self._by_weight(ours, theirs, _flat)
        ours, theirs = self._by_weight(ours, theirs, _places)
        groups = [_by([u for u in side if not u.optional], lambda unit: unit.kind) for side in (ours, theirs)]
        for kind in [k for k in groups[0] if k in groups[1] and k]:
            mine, other = groups[0][kind], groups[1][kind]
            items = [self._sides[0].item(u) for u in mine], [self._sides[1].item(u) for u in other]
            for choice in assign(items[0], items[1], self._scoring(items), common_prefixes(items)):
                if choice.margin >= TOO_CLOSE and choice.score > 0:
                    pair = (mine[choice.ours],), (other[choice.theirs],)
                    self.matches.add(Match(*pair, 0.5, "kind", ("kind, though the shapes differ",), unlike=True))
        return self.matches.left_of(ours, theirs)

    def _beside(self, ours: list[Unit], theirs: list[Unit]) -> tuple[list[Unit], list[Unit]]:
        """Pair recurrent cells with cells that have one matrix for the input and the state beside each other."""
        for cell, gates, turned in [
            *((*found, False) for found in cells_beside(ours, theirs)),
            *((*found, True) for found in cells_beside(theirs, ours)),
        ]:
            sides = (gates, cell) if turned else (cell, gates)
            evidence = ("rows and columns add up",)
            self.matches.add(Match(*sides, 0.8, "parts", evidence, beside=True))
        return self.matches.left_of(ours, theirs)

    def _by_weight(
        self, ours: list[Unit], theirs: list[Unit], seen: Callable[[Unit], tuple[int, ...]]
    ) -> tuple[list[Unit], list[Unit]]:
        """Pair what has the same weight, in a way of seeing it, where only one side has a bias or its axes differ."""
        groups: list[dict[tuple[int, ...], list[Unit]]] = [{}, {}]
        for k, side in enumerate((ours, theirs)):
            for unit in side:
                if unit.matrix and not unit.optional:
                    groups[k].setdefault(seen(unit), []).append(unit)
        for shape in [shape for shape in groups[0] if shape in groups[1] and shape]:
            mine, other = groups[0][shape], groups[1][shape]
            items = [self._sides[0].item(u) for u in mine], [self._sides[1].item(u) for u in other]
            for choice in assign(items[0], items[1], self._scoring(items), common_prefixes(items)):
                if choice.margin >= TOO_CLOSE and choice.score > _AGAINST:
                    confidence = min(0.7, choice.confidence)
                    pair = (mine[choice.ours],), (other[choice.theirs],)
                    self.matches.add(Match(*pair, confidence, "kind", ("shape of the weight", *choice.reasons)))
        return self.matches.left_of(ours, theirs)


def common_prefixes(items: Sequence[Sequence[Item]]) -> tuple[str, str]:
    """What the paths of either side have in common, where it has several."""
    found = [common_prefix([item.path for item in side]) if len(side) > 1 else "" for side in items]
    return found[0], found[1]


def _flat(unit: Unit) -> tuple[int, ...]:
    """A convolution over patches is a linear layer of their pixels."""
    if len(unit.matrix) < 2 or not {"conv", "linear"} & {equivalents.group_of_kinds(unit.kind)}:
        return ()
    return (unit.matrix[0], math.prod(unit.matrix[1:]))


def _places(unit: Unit) -> tuple[int, ...]:
    """A picture (1, channels, height, width) is a row of places (1, height * width, channels)."""
    if len(unit.matrix) == 4 and unit.matrix[0] == 1:
        _, channels, height, width = unit.matrix
        return (1, height * width, channels) if channels != height * width else ()
    return unit.matrix if len(unit.matrix) == 3 else ()


def _tied_alike(ours: Sequence[Unit], theirs: Sequence[Unit]) -> set[Signature]:
    """Signatures that are tied, of which both sides have as many: which of them comes first is then no matter."""
    counts = [Counter(u.signature for u in side if u.tied or not u.optional) for side in (ours, theirs)]
    tied = [{u.signature for u in side if u.tied} for side in (ours, theirs)]
    return {signature for signature in tied[0] | tied[1] if counts[0][signature] == counts[1][signature]}


def _by(units: Sequence[Unit], key: Callable[[Unit], Any]) -> dict[Any, list[Unit]]:
    groups: dict[Any, list[Unit]] = {}
    for unit in units:
        groups.setdefault(key(unit), []).append(unit)
    return groups
