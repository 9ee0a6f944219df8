"""What is known of one model's units and containers, ready to be paired; and the matches that come of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from padiff.align.matching.evidence import NOTHING, Bag, Item
from padiff.align.matching.forest import Node
from padiff.align.matching.units import Unit
from padiff.align.seen import Seen
from padiff.records import Both


@dataclass(frozen=True)
class Match(Both[tuple[Unit, ...]]):
    """Units that answer to each other: one to one, or one to the several that are its parts, in their order."""

    confidence: float
    reason: str
    evidence: tuple[str, ...] = ()
    rivals: tuple[Unit, ...] = ()
    #: The shapes differ; paired by kind, so that the difference is shown at its place.
    unlike: bool = False
    #: Input's and state's matrix of a recurrent cell, against gates that have the two beside each other.
    beside: bool = False


class Matches:
    """The matches so far; what has been matched can be taken back."""

    def __init__(self) -> None:
        self._found: list[Match] = []
        self._done: Both[set[Unit]] = Both(set(), set())

    def __iter__(self) -> Iterator[Match]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def add(self, match: Match) -> None:
        self._found.append(match)
        for done, units in zip(self._done, match):
            done.update(units)

    def since(self, length: int) -> Sequence[Match]:
        return self._found[length:]

    def cap(self, length: int, confidence: float) -> None:
        """Make no match but the first so many surer than this."""
        for k in range(length, len(self._found)):
            match = self._found[k]
            if match.confidence > confidence:
                self._found[k] = replace(match, confidence=confidence)

    def take_back(self, length: int) -> None:
        """Forget all matches but the first so many."""
        for match in self._found[length:]:
            for done, units in zip(self._done, match):
                done.difference_update(units)
        del self._found[length:]

    def left_of(self, units: Both[list[Unit]]) -> Both[list[Unit]]:
        """The units that have no partner yet."""
        return Both(*([unit for unit in side if unit not in done] for side, done in zip(units, self._done)))


@dataclass
class Side:
    """What is known of one model's units."""

    units: Sequence[Unit]
    seen: Seen
    #: Numbers that stand for the units' values, where both sides start from the same.
    values: Mapping[Unit, int] = field(default_factory=dict)
    #: All containers, by path.
    nodes: Mapping[str, Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._twins: dict[str, list[Unit]] = {}
        for unit in self.units:
            weight = unit.parameters.get("weight")
            if weight is not None and weight.tied_to:
                self._twins.setdefault(weight.tied_to, []).append(unit)

    def item(self, unit: Unit) -> Item:
        """A unit, ready to be paired."""
        return Item(
            path=unit.name,
            defined=unit.defined,
            ran=self.seen.order.get(unit.path),
            kind=unit.kind,
            output=_extents(self.seen.outputs.get(unit.path)),
            values=frozenset({self.values[unit]}) if unit in self.values else frozenset(),
            around=self._around(unit.path, 1),
        )

    def container(self, node: Node) -> Item:
        """A container, ready to be paired."""
        ran = [self.seen.order[u.path] for u in node.below() if u.path in self.seen.order]
        return Item(
            path=node.path,
            defined=node.first,
            ran=min(ran, default=None),
            bag=node.frozen,
            output=_extents(self.seen.outputs.get(node.path)),
            values=frozenset(self.values[unit] for unit in node.below() if unit in self.values),
            around=self._around(node.path, node.bag.total()),
        )

    def _around(self, path: str, own: int) -> Bag:
        """What the innermost layer holds that holds more than this."""
        node = self.nodes.get(path)
        while node is not None and node.bag.total() <= own:
            node = node.parent
        return node.frozen if node is not None else NOTHING

    def twin(self, unit: Unit, kind: str) -> Unit:
        """The unit itself, or the layer of this kind that is tied to it: a head and its embedding are one matrix."""
        if unit.kind == kind:
            return unit
        weight = unit.parameters.get("weight")
        home = f"{unit.path}/{weight.slot}" if weight is not None else ""
        return next((u for u in self._twins.get(home, ()) if u.kind == kind), unit)


def _extents(shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
    return None if shape is None else tuple(sorted(shape))
