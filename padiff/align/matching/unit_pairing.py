"""Pairing of units outside containers: by shape, fused units by their rows, and finally by kind alone."""

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

# One word for the evidence that decided.
_REASONS = {
    "values": "values",
    "names": "names",
    "numbers in the names": "names",
    "order of execution": "execution",
    "kind": "kinds",
}

# Score at or below which a pair is rejected although no other partner fits.
_AGAINST = -4.0


class UnitPairing:
    """Matcher for units of two models, independent of their containers."""

    def __init__(
        self, sides: Both[ModelEvidence], without: Collection[str], linked: names.Linked, matches: Matches
    ) -> None:
        self._sides, self._linked = sides, linked
        self._without = without
        self.matches = matches

    def pair(self, units: Both[list[Unit]]) -> Both[list[Unit]]:
        """Pair units of the same shapes, fused units with their parts first; return the units without a partner.

        Required units come first; then tied units and buffers are paired with units that have no partner yet.
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
        """Pair units that lack a unit of their shape on the other side with several units that hold their rows.

        Args:
            swapped: True if the candidate's units are the fused ones.

        Returns:
            The remaining units of both sides.
        """
        wholes, parts = units.swapped(swapped)
        side, parts_side = self._sides.swapped(swapped)
        whole_counts, part_counts = (Counter(u.signature for u in group) for group in (wholes, parts))
        surplus = [u for u in wholes if whole_counts[u.signature] > part_counts[u.signature] and not u.opaque]
        spare = [u for u in parts if part_counts[u.signature] > whole_counts[u.signature] and not u.opaque]
        done: set[Unit] = set()
        for signature, members in grouped(surplus, lambda unit: unit.signature).items():
            candidates = _bundles(members, [u for u in spare if u not in done], parts_side.seen.order)
            if not candidates:
                continue
            more = whole_counts[signature] - part_counts[signature] - sum(u.signature == signature for u in done)
            alike = [u for u in parts if u.signature == signature and u not in done]
            members = self._fusing(
                [u for u in members if u not in done], candidates, alike, more, Both(side, parts_side)
            )
            items = Both([side.item(u) for u in members], [self._bundle_item(parts_side, b) for b in candidates])
            for choice in sorted(self.assigned(items), key=lambda choice: -choice.score)[:more]:
                fused, bundle = members[choice.reference], candidates[choice.candidate]
                if done & set(bundle.parts) or choice.margin < TOO_CLOSE:
                    continue
                done |= {fused, *bundle.parts}
                confidence = min(choice.confidence, 0.95 if bundle.named else 0.7)
                evidence = ("rows add up", *(("names of the parts",) if bundle.named else ()), *choice.reasons)
                pair = Both((fused,), bundle.parts).swapped(swapped)
                self.matches.add(Match(pair.reference, pair.candidate, confidence, "parts", evidence))
        return units.map(lambda side: [unit for unit in side if unit not in done])

    def _fusing(
        self, wholes: list[Unit], candidates: list[Bundle], alike: list[Unit], more: int, sides: Both[ModelEvidence]
    ) -> list[Unit]:
        """Return the units of one shape that are fused from parts: as many as have no unit of their shape on the other
        side.

        Units of the same shape on the other side compete with the bundles. A first layer of an MLP may be as wide as
        query, key and value fused.

        Args:
            sides: evidence about the fused units' side, and about the parts' side.
        """
        if not alike:
            return wholes
        bundled = [self._bundle_item(sides.candidate, bundle) for bundle in candidates]
        items = Both([sides.reference.item(u) for u in wholes], [*bundled, *map(sides.candidate.item, alike)])
        chosen = [choice for choice in self.assigned(items) if choice.candidate < len(candidates)]
        best = sorted(chosen, key=lambda choice: -choice.score)[:more]
        # In their original order, so that positions in an order are not shifted.
        return [wholes[k] for k in sorted(choice.reference for choice in best)]

    def _bundle_item(self, side: ModelEvidence, bundle: Bundle) -> Item:
        item = side.item(bundle.parts[0])
        parent = item.path.rpartition(".")[0]
        # Named like the fused layer, so that the names can be compared.
        path = f"{item.path}.{bundle.role}" if bundle.role else parent or item.path
        return Item(path=path, defined=item.defined, ran=item.ran, kind=item.kind, context=item.context)

    def _alike(self, units: Both[list[Unit]]) -> None:
        for group in self._by_roles(units):
            for choice in self.assigned(self._items(group)):
                self._take(choice, group)

    def _by_roles(self, units: Both[list[Unit]]) -> Iterator[Both[list[Unit]]]:
        """Yield groups of units with one role, if both sides have as many units with it; all other units form one last
        group.

        So a shortcut that is defined first on one side and last on the other does not shift the positions of the
        others.
        """
        if "names" in self._without or max(units.map(len)) < 2:
            yield units
            return
        # Only roles that both sides use: a role that only one model's names have separates nothing.
        used = units.map(lambda side: {role for u in side for role in names.read(u.name, "").roles})
        telling = used.reference & used.candidate

        def roles(unit: Unit) -> frozenset[tuple[str, str]]:
            return names.read(unit.name, "").roles & telling

        groups = units.map(lambda side: grouped(side, roles))
        others: Both[list[Unit]] = Both([], [])
        for key in {**groups.reference, **groups.candidate}:
            group = Both(*(side.get(key, []) for side in groups))
            if key and len(group.reference) == len(group.candidate):
                yield group
            else:
                for remaining, side in zip(others, group):
                    remaining.extend(side)
        if all(others):
            yield others

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
        """Return the best assignment of similar items."""
        for side in items:
            prefix = common_prefix([item.path for item in side]) if len(side) > 1 else ""
            for item in side:
                item.tail = item.path.removeprefix(prefix)
        return assign(items, lambda some: scores(some, self._without, self._linked))

    # -- units without a partner of their shape ----------------------------------------------------------------

    def pair_loosely(self, units: Both[list[Unit]]) -> Both[list[Unit]]:
        """Pair remaining units by kind although their shapes differ, so that a difference between the models is
        shown there.
        """
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
        """Pair recurrent cells with cells that have one matrix for the input and the state side by side."""
        pairs = [Both(*pair) for pair in cells_beside(*units)]
        pairs += [Both(*pair).swapped() for pair in cells_beside(*units.swapped())]
        for pair in pairs:
            evidence = ("rows and columns add up",)
            self.matches.add(Match(pair.reference, pair.candidate, 0.8, "parts", evidence, beside=True))
        return self.matches.left_of(units)

    def _by_weight(self, units: Both[list[Unit]], view: Callable[[Unit], tuple[int, ...]]) -> Both[list[Unit]]:
        """Pair units whose weights have the same shape in a view (a function of the unit); their biases or axes may
        differ.
        """
        with_weight = units.map(lambda side: [u for u in side if u.matrix and not u.optional and view(u)])
        for group in _common_groups(with_weight, view):
            for choice in self.assigned(self._items(group)):
                if choice.margin >= TOO_CLOSE and choice.score > _AGAINST:
                    confidence = min(0.7, choice.confidence)
                    pair = (group.reference[choice.reference],), (group.candidate[choice.candidate],)
                    self.matches.add(Match(*pair, confidence, "kind", ("shape of the weight", *choice.reasons)))
        return self.matches.left_of(units)


def _bundles(wholes: Sequence[Unit], spare: Sequence[Unit], ran: Mapping[str, int]) -> list[Bundle]:
    """Return the bundles that may make up units of one signature; suitable parts depend on a unit's kind."""
    kinds = grouped(wholes, lambda unit: equivalents.group_of_kinds(unit.kind)).values()
    by_parts = {bundle.parts: bundle for members in kinds for bundle in bundles(members[0], spare, ran)}
    return list(by_parts.values())


def _flat(unit: Unit) -> tuple[int, ...]:
    """Return the (out, in) shape of a unit's weight as a linear layer: a convolution over patches is linear in their
    pixels.
    """
    if len(unit.matrix) < 2 or not {"conv", "linear"} & {equivalents.group_of_kinds(unit.kind)}:
        return ()
    return (unit.matrix[0], math.prod(unit.matrix[1:]))


def _places(unit: Unit) -> tuple[int, ...]:
    """Return the shape of a picture (1, channels, height, width) as a row of positions (1, height * width,
    channels).
    """
    if len(unit.matrix) == 4 and unit.matrix[0] == 1:
        _, channels, height, width = unit.matrix
        return (1, height * width, channels) if channels != height * width else ()
    return unit.matrix if len(unit.matrix) == 3 else ()


def _tied_alike(units: Both[list[Unit]]) -> set[Signature]:
    """Return signatures of tied units that both sides have equally often: the order of these units does not matter
    then.
    """
    counts = units.map(lambda side: Counter(u.signature for u in side if u.tied or not u.optional))
    tied = {u.signature for side in units for u in side if u.tied}
    return {signature for signature in tied if counts.reference[signature] == counts.candidate[signature]}


def _common_groups(units: Both[list[Unit]], key: Callable[[Unit], Any]) -> list[Both[list[Unit]]]:
    """Return the units of each key that both sides have."""
    groups = units.map(lambda side: grouped(side, key))
    return [Both(group, groups.candidate[k]) for k, group in groups.reference.items() if k in groups.candidate]
