"""Pairing of units, region by region: by shape, by the best assignment, fused units by their rows, last by kind."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import Any

import numpy as np

from padiff.align.matching import names
from padiff.align.matching.evidence import Item, ModelEvidence, Scores, line_up, scores
from padiff.align.matching.names import Linked
from padiff.align.matching.parameter_units import (
    LayerNode,
    Match,
    Matches,
    Signature,
    Unit,
    common_prefix,
    grouped,
    opened,
    without_ones,
)
from padiff.model import equivalents
from padiff.records import Both

# Roles of the parts, in the order in which libraries stack their rows.
_PATTERNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("attention part", ("q", "k", "v")),
    ("attention part", ("q", "kv")),
    ("attention part", ("k", "v")),
    ("mlp part", ("gate", "up")),
    ("gate", ("input gate", "forget gate", "cell gate", "output gate")),
    ("gate", ("reset gate", "update gate", "new gate")),
)
_ROLES = {("q", "k", "v"): "qkv", ("q", "kv"): "qkv", ("k", "v"): "kv", ("gate", "up"): "gate_up"}
# Roles of layers that are never part of a fused matrix.
_LAST = frozenset({("attention part", "o"), ("mlp part", "out"), ("attention part", "qkv")})
# Maximum number of parts that are tried if the names show no roles.
_MOST_PARTS = 4
_ALONE = frozenset({"embedding", "norm"})
# A name up to the number of an element, and from it.
_LAST_NUMBER = re.compile(r"^(.*?)(?:(?<=\.)|^)\d+((?:\.[^.\d][^.]*)*)$")


@dataclass(frozen=True)
class Bundle:
    """Units whose stacked rows may be those of one unit of the other side.

    Attributes:
        parts: the units, in the order of their rows.
        named: True if the order follows from their names.
        role: usual name of a layer that fuses these parts.
    """

    parts: tuple[Unit, ...]
    named: bool
    role: str = ""


def bundles(whole: Unit, spare: Sequence[Unit], ran: Mapping[str, int]) -> list[Bundle]:
    """Return the bundles of spare units that may make up `whole`, the most likely ones of each family of neighbours.

    Args:
        ran: position of layers in the order of execution, if known: parts come in this order rather than as defined.
    """
    if len(whole.matrix) < 1 or "weight" not in whole.parameters:
        return []
    rows, inputs = whole.matrix[0], whole.matrix[1:]
    fitting = [
        unit
        for unit in spare
        if unit.matrix[1:] == inputs
        and unit.matrix
        and unit.matrix[0] < rows
        and (unit.parameters.keys() == whole.parameters.keys() or _one_bias_of_two(unit, whole))
        and _same_group(unit.kind, whole.kind)
    ]
    bundled: list[Bundle] = []
    used: set[Unit] = set()
    # Parts with known roles come first, wherever they are; then neighbours in order, numbered neighbours first.
    ways = (
        (_all, _lists),
        *((_named, families) for families in (_elements, _families_by_number, _siblings, _cousins)),
        *((_consecutive, families) for families in (_counted, _siblings)),
    )
    counted = False
    for made_of, families in ways:
        if counted:
            break  # the units between numbered ones form no bundle
        for family in families([unit for unit in fitting if unit not in used]):
            ordered = _have_run(family, ran)
            unused = sorted(family, key=lambda unit: (ran[unit.path], unit.defined)) if ordered else list(family)
            while (bundle := made_of(unused, rows, ordered)) is not None:
                bundled.append(bundle)
                used.update(bundle.parts)
                counted = families is _counted
                unused = [unit for unit in unused if unit not in used]
    return bundled


def _have_run(family: Sequence[Unit], ran: Mapping[str, int]) -> bool:
    return bool(ran) and all(unit.path in ran for unit in family)


def halves_beside(units: Sequence[Unit], others: Sequence[Unit]) -> list[tuple[tuple[Unit, ...], tuple[Unit, ...]]]:
    """Return two layers whose outputs are added, with units of the other side that hold both matrices side by side.

    A layer of the kind ``gate(concat(x, h))`` has one such matrix, and a recurrent cell one for each gate.
    """
    cells: dict[str, dict[str, Unit]] = {}
    for unit in units:
        which = names.role(unit.name, "recurrent part")
        if which and len(unit.matrix) == 2:
            cells.setdefault(names.without_recurrent_part(unit.name), {})[which] = unit
    halves = [(cell["ih"], cell["hh"]) for cell in cells.values() if cell.keys() == {"ih", "hh"}]
    in_cells = set(chain(*halves))
    plain = [unit for unit in units if unit not in in_cells and len(unit.matrix) == 2 and not unit.optional]
    halves += [pair for family in _siblings(plain) for pair in pairwise(family) if not in_cells & set(pair)]
    matched: list[tuple[tuple[Unit, ...], tuple[Unit, ...]]] = []
    done: set[Unit] = set()
    for first, second in halves:
        rows, inputs = first.matrix
        if second.matrix[0] != rows or done & {first, second}:
            continue
        unused = [unit for unit in others if len(unit.matrix) == 2 and not unit.optional and unit not in done]
        wide = [unit for unit in unused if unit.matrix[1] == inputs + second.matrix[1]]
        fused = [unit for unit in wide if unit.matrix[0] == rows][:1] or (first in in_cells and _gates(wide, rows))
        if fused:
            done |= {first, second, *fused}
            matched.append(((first, second), tuple(fused)))
    return matched


def _gates(units: Sequence[Unit], rows: int) -> Sequence[Unit]:
    """Return gates that together have `rows` rows, in the order in which the frameworks stack them; empty if there
    are none.
    """
    for family in [*_siblings(units), *_cousins(units)]:
        bundle = _named(family, rows)
        if bundle is not None:
            return bundle.parts
        several = [unit for unit in family if unit.matrix[0] == family[0].matrix[0]]
        count = rows // family[0].matrix[0]
        if len(several) >= count > 1 and rows % family[0].matrix[0] == 0:
            return several[:count]
    return ()


def _same_group(first: str, second: str) -> bool:
    """Return False if an embedding or a normalisation is paired with another group of kinds: these fuse with nothing
    else.
    """
    groups = equivalents.group_of_kinds(first), equivalents.group_of_kinds(second)
    return groups[0] == groups[1] or not _ALONE & set(groups)


def _siblings(units: Sequence[Unit]) -> list[list[Unit]]:
    """Return families of units with the same layer directly above them."""
    return _families(units, lambda unit: unit.name.rpartition(".")[0])


def _counted(units: Sequence[Unit]) -> list[list[Unit]]:
    """Return families of units with the same layer directly above, and names that differ by numbers only: ``s1``,
    ``s2``.
    """

    def key(unit: Unit) -> tuple[str, str]:
        above, _, name = unit.name.rpartition(".")
        return above, re.sub(r"\d+", "#", name)

    return _families(units, key)


def _cousins(units: Sequence[Unit]) -> list[list[Unit]]:
    """Return families of units with the same layer two levels above them."""
    return _families(units, lambda unit: unit.name.rpartition(".")[0].rpartition(".")[0])


def _lists(units: Sequence[Unit]) -> list[list[Unit]]:
    """Return families of units under one name in the elements of a list: ``heads.0.key``, ``heads.1.key``."""
    return _families(_numbered(units), lambda unit: _LAST_NUMBER.sub(r"\1#\2", unit.name))


def _elements(units: Sequence[Unit]) -> list[list[Unit]]:
    """Return families of all units in the elements of a list: ``heads.0.key``, ``heads.0.query``, ``heads.1.key``."""
    return _families(_numbered(units), lambda unit: _LAST_NUMBER.sub(r"\1", unit.name))


def _numbered(units: Sequence[Unit]) -> list[Unit]:
    return [unit for unit in units if _LAST_NUMBER.match(unit.name)]


def _families_by_number(units: Sequence[Unit]) -> list[list[Unit]]:
    """Return families of units whose names have the same numbers: ``q.3``, ``k.3`` and ``v.3`` of lists by kind."""
    return _families(units, lambda unit: tuple(re.findall(r"\d+", unit.name)))


def _families(units: Sequence[Unit], key: Callable[[Unit], Hashable]) -> list[list[Unit]]:
    return [family for family in grouped(units, key).values() if len(family) > 1]


def _all(family: Sequence[Unit], rows: int, ordered: bool = False) -> Bundle | None:
    """Return a whole family as the parts, in the order of definition."""
    if len(family) < 2 or sum(unit.matrix[0] for unit in family) != rows:
        return None
    parts = tuple(sorted(family, key=lambda unit: unit.defined))
    return Bundle(parts, True, _LAST_NUMBER.sub(r"\2", parts[0].name).lstrip("."))


def _named(family: Sequence[Unit], rows: int, ordered: bool = False) -> Bundle | None:
    for kind, pattern in _PATTERNS:
        by_role = grouped(family, partial(_role, kind))
        if all(by_role.get(role) for role in pattern):
            # One unit of each role, or those of all elements of a list.
            for parts in ([by_role[role][0] for role in pattern], [u for role in pattern for u in by_role[role]]):
                if sum(unit.matrix[0] for unit in parts) == rows:
                    return Bundle(tuple(parts), True, _ROLES.get(pattern, ""))
    return None


def _role(kind: str, unit: Unit) -> str:
    return names.role(unit.name, kind)


def _consecutive(family: Sequence[Unit], rows: int, ordered: bool) -> Bundle | None:
    if len({re.sub(r"\d+", "#", unit.name) for unit in family}) == 1 and len(family) > _MOST_PARTS:
        return None  # a list whose elements belong to different blocks
    # A name that suggests a last layer is misleading if other units ran after it.
    before = family[:-1] if ordered else ()
    for run in _runs([unit for unit in family if unit in before or not _comes_last(unit)]):
        if sum(unit.matrix[0] for unit in run) == rows:
            return Bundle(tuple(run), False)
    return None


def _runs(units: Sequence[Unit]) -> Iterator[Sequence[Unit]]:
    for start in range(len(units)):
        for stop in range(start + 2, min(start + _MOST_PARTS, len(units)) + 1):
            yield units[start:stop]


def _one_bias_of_two(unit: Unit, fused: Unit) -> bool:
    """Return True if only one of the units has a bias because a recurrent cell has one bias, the other two."""
    keys = unit.parameters.keys() | fused.parameters.keys()
    return keys == {"weight", "bias"} and names.role(fused.name, "recurrent part") != ""


def _comes_last(unit: Unit) -> bool:
    return any(_role(kind, unit) == role for kind, role in _LAST)


# Size of a piece. Groups of more than twice this size are split along their best common order, as the cost of an
# assignment grows with the third power of its size.
_PIECE = 512

#: Margin below which a pair is called ambiguous.
CLOSE = 1.0
# Evidence that cannot give a high confidence alone, as people define layers in any order.
_WEAK = frozenset({"order of definition", "numbers on one side", "output shape"})

#: Margin below which a pair is rejected.
TOO_CLOSE = 0.15


@dataclass(frozen=True)
class Choice(Both[int]):
    """A pair of the best assignment.

    Attributes:
        reference, candidate: positions in the two groups.
        margin: smallest loss of score if this pair swaps partners with another pair or takes a free partner; infinite
            if neither is possible.
        rivals: positions of the candidate's items that come closest.
        score: score of the pair.
        reasons: the evidence for and against the pair, in words.
        decided: the strongest evidence for the pair against its closest rival; empty without a rival.
    """

    margin: float
    rivals: tuple[int, ...]
    score: float
    reasons: tuple[str, ...]
    decided: str = ""

    @property
    def confidence(self) -> float:
        """Return the confidence, 0.5 (a toss-up) to 1; at most 0.75 if weak evidence such as the order of definition
        decided.
        """
        confidence = 0.5 + 0.5 * (1 - math.exp(-min(self.margin, 20.0) / 2.0))
        return min(confidence, 0.75) if self.decided in _WEAK else confidence


def assign(items: Both[list[Item]], score: Callable[[Both[list[Item]]], Scores]) -> list[Choice]:
    """Return the pairs of two groups of similar items with the largest sum of scores.

    scipy's ``linear_sum_assignment`` (a shortest augmenting path algorithm, Crouse 2016) solves the assignment. Very
    large groups are first ordered and split into pieces.
    """
    sizes = items.map(len)
    if not all(sizes):
        return []
    largest = max(sizes)
    if largest <= 2 * _PIECE:
        return _assign(sizes.map(lambda size: list(range(size))), items, score)
    pieces = math.ceil(largest / _PIECE)
    last = largest if sizes.reference == sizes.candidate else math.ceil(largest / pieces) * pieces
    cuts = [last * k // pieces for k in range(pieces + 1)]
    choices: list[Choice] = []
    orders = line_up(items)
    for start, stop in pairwise(cuts):
        chosen = Both(*(order[start:stop] for order in orders))
        if all(chosen):
            choices += _assign(chosen, items, score)
    return choices


def _best(total: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return rows and columns of the assignment with the largest sum: as many pairs as the shorter side has, by row."""
    if total.shape[0] > total.shape[1]:
        columns, rows = _best(total.T)
        order = np.argsort(rows)
        return rows[order], columns[order]
    # If all rows have their largest score in different columns, these are the solution. With ties the solver takes the
    # first column, too.
    columns = total.argmax(axis=1)
    if len(set(columns.tolist())) == len(columns):
        return np.arange(len(columns)), columns
    from scipy.optimize import linear_sum_assignment  # the import takes longer than many a comparison

    solution: tuple[np.ndarray, np.ndarray] = linear_sum_assignment(total, maximize=True)
    return solution


def _assign(
    chosen: Both[list[int]], items: Both[list[Item]], score: Callable[[Both[list[Item]]], Scores]
) -> list[Choice]:
    scores = score(Both(*([side[k] for k in places] for side, places in zip(items, chosen))))
    total = scores.total
    rows, columns = _best(total)
    swapped = total[np.ix_(rows, columns)]
    gains = np.diag(swapped)
    loss = gains[:, None] + gains[None, :]
    loss -= swapped
    loss -= swapped.T
    np.fill_diagonal(loss, np.inf)
    closest, margins = loss.argmin(axis=1), loss.min(axis=1)
    decided = scores.decided((rows, columns), (rows[closest], columns[closest]))
    reasons = scores.reasons((rows, columns))
    about = zip(rows.tolist(), columns.tolist(), margins.tolist(), gains.tolist(), reasons, decided)
    choices = []
    free = [sorted(set(range(n)) - set(used)) for n, used in zip(total.shape, (rows.tolist(), columns.tolist()))]
    for k, (i, j, margin, value, words, what) in enumerate(about):
        rivals: list[int] = []
        if margin < CLOSE:
            rivals = [int(columns[r]) for r in np.argsort(loss[k])[:3].tolist() if loss[k, r] < CLOSE]
        if free[1]:
            spare = value - total[i, free[1]]
            margin = min(margin, float(spare.min()))
            rivals += [free[1][r] for r in np.argsort(spare)[:2].tolist() if spare[r] < CLOSE]
        if free[0]:
            margin = min(margin, float((value - total[free[0], j]).min()))
        others = tuple([chosen.candidate[r] for r in rivals])
        choices.append(Choice(chosen.reference[i], chosen.candidate[j], margin, others, value, words, what))
    return choices


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
        """Pair layers whose outputs are added with layers that have one matrix for both inputs side by side."""
        pairs = [Both(*pair) for pair in halves_beside(*units)]
        pairs += [Both(*pair).swapped() for pair in halves_beside(*units.swapped())]
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


# Share of its elements that must be matched for a pair of containers to stay.
_ENOUGH = 0.5


class RegionPairing:
    """Matcher for the units of two models."""

    def __init__(self, sides: Both[ModelEvidence], without: Collection[str] = (), linked: Linked = frozenset()) -> None:
        self._sides = sides
        self._without = without
        self.matches = Matches()
        self._units = UnitPairing(sides, without, linked, self.matches)

    def pair(self, nodes: Both[list[LayerNode]], own: Both[list[Unit]]) -> Both[list[Unit]]:
        """Pair all units in two forests and the units next to them; return the units without a partner."""
        return self._units.pair_loosely(self._region(nodes, own))

    def _region(self, nodes: Both[list[LayerNode]], units: Both[list[Unit]]) -> Both[list[Unit]]:
        """Pair units in two forests and the units next to them; return the units without a partner."""
        open_units: Both[list[Unit]] = units.map(list)
        if "containers" in self._without:
            for lying_open, side in zip(open_units, nodes):
                lying_open.extend(unit for node in side for unit in node.below())
            return self._units.pair(open_units)
        waiting: Both[dict[int, list[LayerNode]]] = Both(defaultdict(list), defaultdict(list))
        for side, heap, lying_open in zip(nodes, waiting, open_units):
            for node in side:
                _lay_open(node, heap, lying_open)
        while any(waiting):
            size = max(chain(*waiting))
            here = _with_siblings(Both(*(heap.pop(size, []) for heap in waiting)), waiting)
            for side, heap, lying_open in zip(self._containers(here, open_units), waiting, open_units):
                for node in side:
                    lying_open.extend(node.units)
                    for child in node.children:
                        _lay_open(child, heap, lying_open)
        return self._units.pair(open_units)

    def _chosen(self, nodes: Both[list[LayerNode]]) -> Iterator[tuple[LayerNode, LayerNode, Choice]]:
        """Yield the pairs of the best assignment of containers."""
        items = Both(*([side.container(node) for node in group] for side, group in zip(self._sides, nodes)))
        for choice in self._units.assigned(items):
            yield nodes.reference[choice.reference], nodes.candidate[choice.candidate], choice

    def _containers(self, nodes: Both[list[LayerNode]], open_units: Both[list[Unit]]) -> Both[list[LayerNode]]:
        """Pair containers of one size, and their contents; return the containers without a partner."""
        if not all(nodes):
            return nodes
        paired: Both[set[LayerNode]] = Both(set(), set())
        for a, b, choice in chain.from_iterable(map(self._chosen, _by_bare_layers(nodes))):
            if choice.margin < TOO_CLOSE or not _may_hold_the_same(a, b):
                continue
            before = len(self.matches)
            unmatched = self._region(Both([*a.children], [*b.children]), Both([*a.units], [*b.units]))
            covered = sum(unit.size for match in self.matches.since(before) for unit in match.reference)
            if covered < _ENOUGH * a.size:
                self.matches.take_back(before)
                continue
            # A layer's confidence is at most that of its container.
            self.matches.cap(before, choice.confidence)
            for lying_open, units in zip(open_units, unmatched):
                lying_open.extend(units)
            paired.reference.add(a)
            paired.candidate.add(b)
        return Both(*([node for node in side if node not in done] for side, done in zip(nodes, paired)))


def _by_bare_layers(nodes: Both[list[LayerNode]]) -> list[Both[list[LayerNode]]]:
    """Return containers in groups that hold the same layers without parameters, if both sides have the same groups.

    Of networks of the same matrices, one ends with a tanh. Functions in the code are no layers.
    """
    groups = nodes.map(lambda side: grouped(side, lambda node: frozenset(node.bare.items())))
    sizes = groups.map(lambda side: {bare: len(members) for bare, members in side.items()})
    paths = nodes.map(lambda side: {node.path: node.bare for node in side})
    of_one_name = paths.reference.keys() & paths.candidate.keys()
    if sizes.reference != sizes.candidate or any(paths.reference[p] != paths.candidate[p] for p in of_one_name):
        return [nodes]
    return [Both(members, groups.candidate[bare]) for bare, members in groups.reference.items()]


def _with_siblings(here: Both[list[LayerNode]], waiting: Both[dict[int, list[LayerNode]]]) -> Both[list[LayerNode]]:
    """Return the containers of one size, where one side has fewer, with smaller siblings that have no other partner.

    The first block of a stack may hold a table that the other author keeps outside of it: its size is not that of the
    others. A block that is larger than all of the other side waits for its siblings' size.
    """
    for swapped in (False, True):
        (fewer, more), (ours, theirs) = here.swapped(swapped), waiting.swapped(swapped)
        for node in list(fewer):
            siblings = [
                (size, each)
                for size in sorted(ours, reverse=True)
                for each in ours[size]
                if each.parent is node.parent and each.layer.type == node.layer.type
            ]
            for size, each in siblings:
                if len(fewer) < len(more) and len(theirs.get(size, ())) < len(ours[size]):
                    ours[size].remove(each)
                    fewer.append(each)
                elif not more and each.bag <= node.bag:
                    fewer.remove(node)
                    ours[size].append(node)
                    break
        for size in [size for size, nodes in ours.items() if not nodes]:
            del ours[size]
    return here


def _lay_open(node: LayerNode, waiting: dict[int, list[LayerNode]], lying_open: list[Unit]) -> None:
    node = opened(node)
    if node.children and node.size:
        waiting[node.size].append(node)
    else:
        lying_open.extend(node.below())


def _may_hold_the_same(reference: LayerNode, candidate: LayerNode) -> bool:
    """Return True if two containers of one size may have the same contents, fused or not."""
    if reference.bag == candidate.bag:
        return True
    shared = (reference.bag & candidate.bag).total()
    # Fused units differ in number; the others have to be on both sides.
    return shared > 0 or min(reference.bag.total(), candidate.bag.total()) <= 4
