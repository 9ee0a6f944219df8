"""Evidence about one model's units and containers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from padiff.align.matching.evidence import NOTHING, Bag, Item
from padiff.align.matching.layer_tree import LayerNode
from padiff.align.matching.parameter_units import Unit, grouped
from padiff.align.runtime_evidence import RuntimeEvidence


@dataclass
class ModelEvidence:
    """Evidence about one model's units and containers."""

    units: Sequence[Unit]
    seen: RuntimeEvidence
    #: Numbers that represent the units' values, if both sides start from the same values.
    values: Mapping[Unit, int] = field(default_factory=dict)
    #: All containers, by path.
    nodes: Mapping[str, LayerNode] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._twins = grouped(self.units, lambda u: u.parameters["weight"].tied_to if "weight" in u.parameters else "")

    def item(self, unit: Unit) -> Item:
        """Return the item of a unit."""
        return Item(
            path=unit.name,
            defined=unit.defined,
            ran=self.seen.order.get(unit.path),
            kind=unit.kind,
            output=_extents(self.seen.outputs.get(unit.path)),
            values=frozenset({self.values[unit]}) if unit in self.values else frozenset(),
            context=self._context(unit.path, 1),
        )

    def container(self, node: LayerNode) -> Item:
        """Return the item of a container."""
        ran = [self.seen.order[u.path] for u in node.below() if u.path in self.seen.order]
        return Item(
            path=node.path,
            defined=node.first,
            ran=min(ran, default=None),
            bag=node.frozen,
            output=_extents(self.seen.outputs.get(node.path)),
            values=frozenset(self.values[unit] for unit in node.below() if unit in self.values),
            context=self._context(node.path, node.frozen[1]),
        )

    def _context(self, path: str, count: int) -> Bag:
        """Return the contents of the innermost layer at or above a path that contains more than `own` units."""
        node = self.nodes.get(path)
        while node is not None and node.frozen[1] <= count:
            node = node.parent
        return node.frozen if node is not None else NOTHING

    def twin(self, unit: Unit, kind: str) -> Unit:
        """Return the unit, or the unit of this kind that is tied to it: a head and its embedding are one matrix."""
        if unit.kind == kind:
            return unit
        weight = unit.parameters.get("weight")
        tied = self._twins.get(f"{unit.path}/{weight.slot}", ()) if weight is not None else ()
        return next((u for u in tied if u.kind == kind), unit)


def _extents(shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
    return None if shape is None else tuple(sorted(shape))
