"""Pairing units that lie open, of no container: by shape, fused ones by their rows, and at last by kind alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from padiff.align.matching import names
from padiff.align.matching.assignment import CLOSE, TOO_CLOSE, Choice, assign
from padiff.align.matching.evidence import Item, scores
from padiff.align.matching.fused import Bundle, bundles, cells_beside
from padiff.align.matching.layer_tree import common_prefix
from padiff.align.matching.matches import Match, Matches
from padiff.align.matching.model_evidence import ModelEvidence
from padiff.align.matching.parameter_units import Signature, Unit, grouped, without_ones
from padiff.model import equivalents
from padiff.records import Both

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


class UnitPairing:
    """Pairs units of two models, wherever they lie."""

    def __init__(
        self, sides: Both[ModelEvidence], without: Collection[str], linked: names.Linked, matches: Matches
    ) -> None:
        self._sides, self._linked = sides, linked
        self._without = without
        self.matches = matches

    def pair(self, units: Both[list[Unit]]) -> Both[list[Unit]]:
        """Pair units of the same shapes, fused ones with their parts first; what is left over.

        What has to be carried over comes first; then what is tied, or a buffer, with what has no partner yet.
        """
        tied = _tied_alike(units)
        required = units.map(lambda side: [u for u in side if not u.optional or (u.signature in tied and u.tied)])
        self._same_shapes(self._fused(self._fused(required, False), True))
        self._same_shapes(self.matches.left_of(units))
        return self.matches.left_of(units)

    def _same_shapes(self, units: Both[list[Unit]]) -> None:
        for group in _common_groups(units, lambda unit: unit.signature):
            self._alike(group)

    def _fused(self, units: Both[list[Unit]], swapped: bool) -> Both[list[Unit]]:
        """Pair units that have no like on the other side with the several whose rows they hold; the rest of both.

        Args:
            swapped: whether it is the candidate's that hold what several of the reference's hold.
        """
        wholes, parts = units.swapped(swapped)
        side, other = self._sides.swapped(swapped)
        whole_counts, part_counts = (Counter(u.signature for u in group) for group in (wholes, parts))
        surplus = [u for u in wholes if whole_counts[u.signature] > part_counts[u.signature] and not u.opaque]
        spare = [u for u in parts if part_counts[u.signature] > whole_counts[u.signature] and not u.opaque]
        done: set[Unit] = set()
        for signature, members in grouped(surplus, lambda unit: unit.signature).items():
            found = _bundles(members, [u for u in spare if u not in done], other.seen.order)
            if not found:
                continue
            more = whole_counts[signature] - part_counts[signature] - sum(u.signature == signature for u in done)
            alike = [u for u in parts if u.signature == signature and u not in done]
            members = self._fusing([u for u in members if u not in done], found, alike, more, Both(side, other))
            items = Both([side.item(u) for u in members], [self._bundle_item(other, b) for b in found])
            for choice in sorted(self.assigned(items), key=lambda choice: -choice.score)[:more]:
                whole, bundle = members[choice.reference], found[choice.candidate]
                if done & set(bundle.parts) or choice.margin < TOO_CLOSE:
                    continue
                done |= {whole, *bundle.parts}
                confidence = min(choice.confidence, 0.95 if bundle.named else 0.7)
                evidence = ("rows add up", *(("names of the parts",) if bundle.named else ()), *choice.reasons)
                pair = Both((whole,), bundle.parts).swapped(swapped)
                self.matches.add(Match(pair.reference, pair.candidate, confidence, "parts", evidence))
        return units.map(lambda side: [unit for unit in side if unit not in done])

    def _fusing(
        self, wholes: list[Unit], found: list[Bundle], alike: list[Unit], more: int, sides: Both[ModelEvidence]
    ) -> list[Unit]:
        """Of units of one shape, those that are wholes of parts: so many as have no like on the other side.

        What is alike on the other side competes with the bundles. A first layer of an MLP may be as wide as query, key
        and value in one.

        Args:
            sides: the wholes', and the parts'.
        """
        if not alike:
            return wholes
        bundled = [self._bundle_item(sides.candidate, bundle) for bundle in found]
        items = Both([sides.reference.item(u) for u in wholes], [*bundled, *map(sides.candidate.item, alike)])
        chosen = [choice for choice in self.assigned(items) if choice.candidate < len(found)]
        best = sorted(chosen, key=lambda choice: -choice.score)[:more]
        # In their own order: among others, places in an order would be shifted.
        return [wholes[k] for k in sorted(choice.reference for choice in best)]

    def _bundle_item(self, side: ModelEvidence, bundle: Bundle) -> Item:
        item = side.item(bundle.parts[0])
        parent = item.path.rpartition(".")[0]
        # Called as the fused layer would be, so that its name can be compared.
        path = f"{item.path}.{bundle.role}" if bundle.role else parent or item.path
        return Item(path=path, defined=item.defined, ran=item.ran, kind=item.kind, context=item.context)

    def _alike(self, units: Both[list[Unit]]) -> None:
        for group in self._by_roles(units):
            for choice in self.assigned(self._items(group)):
                self._take(choice, group)

    def _by_roles(self, units: Both[list[Unit]]) -> Iterator[Both[list[Unit]]]:
        """The units cut into groups of one role, where either side has as many of it; what is left is one group.

        So a shortcut that is defined first on one side and last on the other does not shift the places of the rest.
        """
        if "names" in self._without or max(units.map(len)) < 2:
            yield units
            return
        # Only what both sides tell: one author's word for a layer, which the other has no like of, sets nothing apart.
        said = units.map(lambda side: {role for u in side for role in names.read(u.name, "").roles})
        telling = said.reference & said.candidate

        def roles(unit: Unit) -> frozenset[tuple[str, str]]:
            return names.read(unit.name, "").roles & telling

        groups = units.map(lambda side: grouped(side, roles))
        rest: Both[list[Unit]] = Both([], [])
        for key in {**groups.reference, **groups.candidate}:
            group = Both(*(side.get(key, []) for side in groups))
            if key and len(group.reference) == len(group.candidate):
                yield group
            else:
                for left, side in zip(rest, group):
                    left.extend(side)
        if all(rest):
            yield rest

    def _take(self, choice: Choice, units: Both[list[Unit]]) -> None:
        if choice.margin < TOO_CLOSE or choice.score <= _AGAINST:
            return
        alone = len(units.reference) == len(units.candidate) == 1
        reason = "only one fits" if alone else _REASONS.get(choice.decided, "order")
        confidence = choice.confidence if not alone else (0.99 if choice.score > 0 else 0.8)
        evidence = ("shapes", *choice.reasons)
        rivals = tuple(units.candidate[k] for k in choice.rivals) if choice.margin < CLOSE else ()
        a, b = units.reference[choice.reference], units.candidate[choice.candidate]
        a, b = self._sides.reference.twin(a, b.kind), self._sides.candidate.twin(b, a.kind)
        self.matches.add(Match((a,), (b,), confidence, reason, evidence, rivals))

    def _items(self, units: Both[list[Unit]]) -> Both[list[Item]]:
        return Both(*([side.item(unit) for unit in group] for side, group in zip(self._sides, units)))

    def assigned(self, items: Both[list[Item]]) -> list[Choice]:
        """The best assignment of like things."""
        for side in items:
            prefix = common_prefix([item.path for item in side]) if len(side) > 1 else ""
            for item in side:
                item.tail = item.path.removeprefix(prefix)
        return assign(items, lambda some: scores(some, self._without, self._linked))

    # -- what does not fit -------------------------------------------------------------------------------------

    def pair_loosely(self, units: Both[list[Unit]]) -> Both[list[Unit]]:
        """Pair what is left by kind, though the shapes differ: that is where the models differ, to be shown there."""
        units = self._beside(units)
        for shape in (lambda unit: without_ones(unit.matrix), _flat, _places):
            units = self._by_weight(units, shape)
        required = units.map(lambda side: [u for u in side if not u.optional and u.kind])
        for group in _common_groups(required, lambda unit: unit.kind):
            for choice in self.assigned(self._items(group)):
                if choice.margin >= TOO_CLOSE and choice.score > 0:
                    pair = (group.reference[choice.reference],), (group.candidate[choice.candidate],)
                    self.matches.add(Match(*pair, 0.5, "kind", ("kind, though the shapes differ",), unlike=True))
        return self.matches.left_of(units)

    def _beside(self, units: Both[list[Unit]]) -> Both[list[Unit]]:
        """Pair recurrent cells with cells that have one matrix for the input and the state beside each other."""
        found = [Both(*pair) for pair in cells_beside(*units)]
        found += [Both(*pair).swapped() for pair in cells_beside(*units.swapped())]
        for pair in found:
            evidence = ("rows and columns add up",)
            self.matches.add(Match(pair.reference, pair.candidate, 0.8, "parts", evidence, beside=True))
        return self.matches.left_of(units)

    def _by_weight(self, units: Both[list[Unit]], seen: Callable[[Unit], tuple[int, ...]]) -> Both[list[Unit]]:
        """Pair what has the same weight, in a way of seeing it, where only one side has a bias or its axes differ."""
        with_weight = units.map(lambda side: [u for u in side if u.matrix and not u.optional and seen(u)])
        for group in _common_groups(with_weight, seen):
            for choice in self.assigned(self._items(group)):
                if choice.margin >= TOO_CLOSE and choice.score > _AGAINST:
                    confidence = min(0.7, choice.confidence)
                    pair = (group.reference[choice.reference],), (group.candidate[choice.candidate],)
                    self.matches.add(Match(*pair, confidence, "kind", ("shape of the weight", *choice.reasons)))
        return self.matches.left_of(units)


def _bundles(wholes: Sequence[Unit], spare: Sequence[Unit], ran: Mapping[str, int]) -> list[Bundle]:
    """What wholes of one signature may consist of; of which parts depends on a whole's kind."""
    kinds = grouped(wholes, lambda unit: equivalents.group_of_kinds(unit.kind)).values()
    found = {bundle.parts: bundle for members in kinds for bundle in bundles(members[0], spare, ran)}
    return list(found.values())


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


def _tied_alike(units: Both[list[Unit]]) -> set[Signature]:
    """Signatures that are tied, of which both sides have as many: which of them comes first is then no matter."""
    counts = units.map(lambda side: Counter(u.signature for u in side if u.tied or not u.optional))
    tied = {u.signature for side in units for u in side if u.tied}
    return {signature for signature in tied if counts.reference[signature] == counts.candidate[signature]}


def _common_groups(units: Both[list[Unit]], key: Callable[[Unit], Any]) -> list[Both[list[Unit]]]:
    """The units of each key that both sides have."""
    groups = units.map(lambda side: grouped(side, key))
    return [Both(group, groups.candidate[k]) for k, group in groups.reference.items() if k in groups.candidate]
