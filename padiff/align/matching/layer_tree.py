"""Layer tree for the alignment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from padiff.align.matching.parameter_units import Signature, Unit, grouped, inside
from padiff.records import ROOT, Layer


@dataclass(eq=False)
class LayerNode:
    """A layer with the layers below it."""

    layer: Layer
    units: Sequence[Unit] = ()
    children: Sequence[LayerNode] = ()
    parent: LayerNode | None = None

    @property
    def path(self) -> str:
        return self.layer.path

    @cached_property
    def size(self) -> int:
        """Return the number of elements to match, of this layer and those below."""
        return sum(unit.size for unit in self.units) + sum(child.size for child in self.children)

    @cached_property
    def bag(self) -> Counter[Signature]:
        """Return the signatures of all units, of this layer and those below. Similar layers share it: do not modify
        it.
        """
        direct = _counted(tuple(unit.signature for unit in self.units if not unit.optional))
        if not self.children:
            return direct
        total = direct.copy()
        for child in self.children:
            for signature, count in child.bag.items():
                total[signature] += count
        return total

    @cached_property
    def frozen(self) -> tuple[frozenset[tuple[Signature, int]], int]:
        """Return the bag and its total count, as a hashable value."""
        if not self.children:
            return _frozen(tuple(unit.signature for unit in self.units if not unit.optional))
        return frozenset(self.bag.items()), self.bag.total()

    @cached_property
    def first(self) -> int:
        """Return the position of the first unit in the order of definition."""
        return min([unit.defined for unit in self.units] + [child.first for child in self.children], default=1 << 60)

    def below(self) -> Iterable[Unit]:
        yield from self.units
        for child in self.children:
            yield from child.below()


@lru_cache(maxsize=1024)
def _counted(signatures: tuple[Signature, ...]) -> Counter[Signature]:
    return Counter(signatures)


@lru_cache(maxsize=1024)
def _frozen(signatures: tuple[Signature, ...]) -> tuple[frozenset[tuple[Signature, int]], int]:
    return frozenset(_counted(signatures).items()), len(signatures)


def layer_trees(layers: Sequence[Layer], units: Iterable[Unit]) -> list[LayerNode]:
    """Return the trees of some of a model's layers, which have to come depth first, in order of definition."""
    owned = grouped(units, lambda unit: unit.path)
    roots: list[LayerNode] = []
    above: list[tuple[LayerNode, list[LayerNode]]] = []
    for layer in layers:
        while above and not inside(layer.path, above[-1][0].path):
            above.pop()
        node = LayerNode(layer, owned.get(layer.path, ()), parent=above[-1][0] if above else None)
        beside = above[-1][1] if above else roots
        beside.append(node)
        if above:
            above[-1][0].children = beside
        above.append((node, []))
    return roots


def opened(node: LayerNode) -> LayerNode:
    """Return the outermost layer inside a chain of wrappers that has several children or owns units."""
    while not node.units and len(node.children) == 1:
        node = node.children[0]
    return node


def common_prefix(paths: Sequence[str]) -> str:
    """Return the innermost path that contains all of these paths, with a trailing dot; empty if they share none."""
    if not paths or ROOT in paths:
        return ""
    parts = [path.split(".")[:-1] for path in (min(paths), max(paths))]
    common = []
    for first, last in zip(*parts):
        if first != last:
            break
        common.append(first)
    return "".join(f"{part}." for part in common)
