"""Units: parameters that are matched together, their matches, and the layers that hold them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TypeVar

from padiff.align.slices import ParameterPair, Slice
from padiff.model import equivalents
from padiff.records import ROOT, Both, Layer, Parameter, RunInfo

_KIND_OF_SLOT = re.compile(r"(?:^|_)(?:(weight|kernel|gamma|gain|scale|w|g)|(?:bias|beta|shift|offset|b))(?=_|$)")

# What weight norm and spectral norm compute a weight from: torch's parametrizations under the names of the older hooks
# and of paddle.
_COMPUTED_FROM = {
    "original": "weight_orig",
    "original0": "weight_g",
    "original1": "weight_v",
    "_u": "weight_u",
    "_v": "weight_v",
}

# Weight of a bias's evidence for a layout; it outweighs the evidence of the other side's shapes.
_BIAS_TELLS = 3

Shape = tuple[int, ...]
#: Evidence for each layout of a parameter of a class.
Votes = Counter[tuple[tuple[str, str], str]]
Signature = tuple[tuple[str, Shape], ...]
_T = TypeVar("_T")
_K = TypeVar("_K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters of one layer that are matched together: a matrix and its bias, a norm and its statistics.

    Attributes:
        layer: the layer that owns the parameters.
        group: name of the unit if the layer has several (``ih_l0``, ``in_proj``, ``cls_token``), else empty.
        kind: the layer's kind, under one name for both frameworks.
        parameters: parameters by role: ``weight``, ``bias``, ``running_mean``, ...
        defined: position in the order of definition.
        layout: storage of a matrix: ``out_in``, ``in_out``, or ``?`` if a user's class does not determine it.
        optional: True if the unit needs no partner: it is tied to another parameter, or a buffer.
        opaque: name of the user's rule that carries the layer over as a whole, with any contents; else empty.
    """

    layer: Layer
    group: str
    kind: str
    parameters: Mapping[str, Parameter]
    defined: int
    layout: str = ""
    optional: bool = False
    opaque: str = ""
    #: Shapes by role. Stored because they are read often, like the next three fields.
    signature: Signature = field(default=(), compare=False)
    path: str = field(init=False, compare=False)
    #: The path, with the group if the layer has several units.
    name: str = field(init=False, compare=False)
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        path = self.layer.path
        name = ".".join(part for part in ("" if path == ROOT else path, self.group) if part) if self.group else path
        for attribute, value in (("path", path), ("name", name), ("_hash", hash((path, self.group)))):
            object.__setattr__(self, attribute, value)

    @property
    def size(self) -> int:
        """Return the number of elements to match."""
        return 0 if self.optional else sum(math.prod(p.shape) for p in self.parameters.values() if _counts(p))

    @property
    def tied(self) -> bool:
        """Return True if a parameter is another one under a further name."""
        return any(p.tied_to for p in self.parameters.values())

    @property
    def matrix(self) -> Shape:
        """Return the weight's shape as (out, in, ...), () without a weight."""
        weight = self.parameters.get("weight")
        return as_out_in(weight.shape, self.layout) if weight is not None else ()

    def laid_out(self, layout: str) -> Unit:
        """Return the unit with a known layout of its matrix."""
        return replace(self, layout=layout, signature=_signature(self.parameters, layout, self.opaque))

    def __hash__(self) -> int:
        return self._hash


def units_of(layers: Sequence[Layer], whole: Mapping[str, str]) -> list[Unit]:
    """Return the units of a tree, in order of definition.

    Args:
        whole: class names of layers for which the user has a rule, with the name of the rule.
    """
    units: list[Unit] = []
    opaque: str | None = None  # path of the enclosing layer that has a rule
    for layer in layers:
        if opaque is not None and inside(layer.path, opaque):
            continue
        opaque = None
        if layer.type in whole:
            opaque = layer.path
            rule = whole[layer.type]
            owned = {p.slot: p for p in layer.parameters}
            units.append(Unit(layer, "", rule, owned, len(units), opaque=rule, signature=((rule, ()),)))
            continue
        groups = _groups(layer)
        for group, parameters in groups.items():
            units.append(_unit(layer, group if len(groups) > 1 or _free(layer) else "", parameters, len(units)))
    return units


def inside(path: str, above: str) -> bool:
    """Return True if a layer is below another."""
    return path != ROOT and (above == ROOT or path.startswith(f"{above}."))


def tie_targets(layers: Iterable[Layer]) -> dict[tuple[str, str], tuple[str, str]]:
    """Return the first layer and slot with the same tensor, by layer and slot of the tied parameters."""
    return {
        (layer.path, p.slot): (home[0], home[2])
        for layer in layers
        for p in layer.parameters
        if p.tied_to
        for home in (p.tied_to.rpartition("/"),)
    }


def grouped(items: Iterable[_T], key: Callable[[_T], _K]) -> dict[_K, list[_T]]:
    """Return the items of each key, in order of the keys' first occurrence."""
    groups: dict[_K, list[_T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def containers_of(path: str) -> list[str]:
    """Return the paths of all layers above a path, outermost first."""
    parts = path.split(".")
    return [] if path == ROOT else [ROOT, *(".".join(parts[:k]) for k in range(1, len(parts)))]


def as_out_in(shape: Shape, layout: str) -> Shape:
    """Return a stored shape as (out, in, ...)."""
    return shape[::-1] if layout == "in_out" and len(shape) == 2 else shape


def with_layouts(units: Both[list[Unit]]) -> Both[list[Unit]]:
    """Return the units with unknown layouts of matrices determined, as far as biases and the other side's shapes show
    them.

    The oblong matrices of a user's class decide for its square ones too: a bias has an element for each output, and
    otherwise the other side's shapes count. Without evidence the layout stays ``?``.
    """
    shapes = units.map(lambda side: Counter(unit.matrix for unit in side))
    return Both(*(_with_layouts(*side) for side in zip(units, shapes.swapped())))


def _with_layouts(units: Sequence[Unit], others: Counter[Shape]) -> list[Unit]:
    votes: Votes = Counter()
    for unit in units:
        if unit.layout == "?" and unit.matrix[0] != unit.matrix[1]:
            for layout in ("out_in", "in_out"):
                matrix = as_out_in(unit.matrix, layout)
                votes[_made(unit), layout] += _fits(matrix, others) + _BIAS_TELLS * _has_bias_of(unit, matrix[0])
    return [_with_layout(unit, votes) for unit in units]


def _with_layout(unit: Unit, votes: Votes) -> Unit:
    if unit.layout != "?":
        return unit
    straight, transposed = votes[_made(unit), "out_in"], votes[_made(unit), "in_out"]
    if straight == transposed:  # its class stores its other matrices in one way
        straight, transposed = (
            sum(count for ((kind, _), layout), count in votes.items() if kind == unit.kind and layout == each)
            for each in ("out_in", "in_out")
        )
    if straight == transposed:
        return unit
    return unit.laid_out("out_in" if straight > transposed else "in_out")


def _made(unit: Unit) -> tuple[str, str]:
    """Return the class and the parameter whose layout is to be determined."""
    return unit.kind, unit.group


def _has_bias_of(unit: Unit, outputs: int) -> bool:
    return "bias" in unit.parameters and unit.parameters["bias"].shape == (outputs,)


def _fits(shape: Shape, shapes: Counter[Shape]) -> int:
    """Return 2 if the other side has a matrix of this shape, 1 if it has one with a multiple or a fraction of the
    rows, else 0.
    """
    if shapes[shape]:
        return 2
    return int(any(len(s) == 2 and s[1] == shape[1] and (s[0] % shape[0] == 0 or shape[0] % s[0] == 0) for s in shapes))


def _groups(layer: Layer) -> dict[str, dict[str, Parameter]]:
    """Return the layer's parameters by unit, each by its role."""
    named: dict[str, dict[str, Parameter]] = {}
    for p in layer.parameters:
        slot = _common_slot(p)
        if slot in equivalents.ONE_SIDED or equivalents.stands_for_none(layer, p):
            continue
        if slot in equivalents.STATISTICS:
            named.setdefault("", {})[slot] = p
            continue
        group, role = _group_and_role(slot)
        named.setdefault(group, {})[role] = p
    return {group: members for group, members in named.items() if members}


def _common_slot(parameter: Parameter) -> str:
    """Return a parameter's name under the name that the frameworks and their versions share."""
    return _COMPUTED_FROM.get(parameter.slot, equivalents.slot(parameter.slot))


def multiplies(unit: Unit) -> bool | None:
    """Return True if a unit's only parameter multiplies, by its name, False if it is added (a bias); else `None`."""
    slots = [_common_slot(parameter) for parameter in unit.parameters.values()]
    return _says_it_multiplies(slots[0]) if len(slots) == 1 else None


def _says_it_multiplies(slot: str) -> bool | None:
    match = _KIND_OF_SLOT.search(slot)
    return None if match is None else bool(match[1])


def contradict(slots: Both[str]) -> bool:
    """Return True if the name of one slot says that it multiplies, and of the other that it is added."""
    return {*map(_says_it_multiplies, slots)} == {True, False}


def holds_several(layer: Layer) -> bool:
    """Return True if a layer owns several units, which are layers of their own elsewhere."""
    return len(_groups(layer)) > 1


@lru_cache(maxsize=1024)
def _group_and_role(slot: str) -> tuple[str, str]:
    """Return the unit of a parameter's slot, and the parameter's role in it."""
    match = _KIND_OF_SLOT.search(slot)
    if match is None:
        return slot, "weight"
    return (slot[: match.start()] + slot[match.end() :]).strip("_"), "weight" if match[1] else "bias"


def _free(layer: Layer) -> bool:
    """Return True if a layer has sublayers besides its own parameters, so that these need a name of their own."""
    return layer.children > 0


def _unit(layer: Layer, group: str, parameters: dict[str, Parameter], defined: int) -> Unit:
    if len(parameters) == 1:
        parameters = {"weight": next(iter(parameters.values()))}
    weight = parameters.get("weight")
    kind = equivalents.kind(layer)
    layout = ""
    if weight is not None and len(weight.shape) == 2:
        layout = weight.layout or equivalents.layout(layer, weight)
    optional = all(p.tied_to or p.role == "buffer" for p in parameters.values())
    signature = _signature(parameters, layout, "")
    if weight is not None and len(parameters) == 1 and weight.role == "buffer":
        # A table or a mask: matches need the same name and dtype.
        signature = ((f"{_common_slot(weight)} {weight.dtype}", weight.shape),)
    return Unit(layer, group, kind, parameters, defined, layout, optional, signature=signature)


def _signature(parameters: Mapping[str, Parameter], layout: str, opaque: str) -> Signature:
    if opaque:
        return ((opaque, ()),)
    telling = {role: p for role, p in parameters.items() if role not in equivalents.STATISTICS} or parameters
    return tuple(
        sorted(
            (role, without_ones(as_out_in(p.shape, layout if role == "weight" else ""))) for role, p in telling.items()
        )
    )


def without_ones(shape: Shape) -> Shape:
    """Return a shape without its extents of 1: a 1 x 1 convolution and a linear layer have the same parameters."""
    return tuple(extent for extent in shape if extent != 1)


def _counts(parameter: Parameter) -> bool:
    return parameter.role == "parameter" and not parameter.tied_to


def whole_slice(unit: Unit, parameter: Parameter, layout: str) -> Slice:
    """Return the slice of a unit's full parameter, in its stored layout."""
    layout = layout if parameter is unit.parameters.get("weight") and len(parameter.shape) == 2 else ""
    return Slice(unit.path, parameter.slot, parameter.shape, layout)


@dataclass(frozen=True)
class Match(Both[tuple[Unit, ...]]):
    """Units that correspond to each other: one on each side, or one and the several units that are its parts, in
    order.
    """

    confidence: float
    reason: str
    evidence: tuple[str, ...] = ()
    rivals: tuple[Unit, ...] = ()
    #: True if the shapes differ; such units are paired by kind, so that the difference is shown at its place.
    unlike: bool = False
    #: True for a recurrent cell's input and state matrices matched with gates that hold both matrices side by side.
    beside: bool = False


class Matches:
    """The matches so far; the last ones can be undone."""

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
        """Limit the confidence of all matches after the first `length`."""
        for k in range(length, len(self._found)):
            match = self._found[k]
            if match.confidence > confidence:
                self._found[k] = replace(match, confidence=confidence)

    def take_back(self, length: int) -> None:
        """Undo all matches after the first `length`."""
        for match in self._found[length:]:
            for done, units in zip(self._done, match):
                done.difference_update(units)
        del self._found[length:]

    def left_of(self, units: Both[list[Unit]]) -> Both[list[Unit]]:
        """Return the units that have no partner yet."""
        return Both(*([unit for unit in side if unit not in done] for side, done in zip(units, self._done)))


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
    def bare(self) -> Counter[str]:
        """Return the kinds of the layers without parameters, of this layer or those below, with their counts."""
        if not self.children:
            return Counter() if self.units else Counter([equivalents.kind(self.layer)])
        return sum((child.bare for child in self.children), Counter())

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


#: Paths of the layers at and below a mapped layer: those whose parameters were recorded, and all others.
_Held = tuple[frozenset[str], frozenset[str]]


def differing_inside(
    infos: Both[RunInfo],
    paired: Collection[Both[str]],
    parameters: Sequence[ParameterPair],
    left: Both[tuple[str, ...]],
) -> frozenset[tuple[str, str]]:
    """Return pairs of mapped layers that have different parameters, or parameters that only one of the runs recorded.

    A layer map excludes the layers below its own: a parameter that one side has in the layer itself, and the other side
    in a layer below, is recorded on one side only.

    Args:
        paired: paths of the paired layers.
        parameters: the paired parameters.
        left: ``layer/slot`` of each side's parameters without a partner.
    """
    differing = []
    alone = left.map(lambda sites: {site.rpartition("/")[0] for site in sites})
    for pair in map(Both, *infos.map(lambda info: info.layer_map)):
        # Two whole models correspond in any case, and are compared inside.
        if pair not in paired or ROOT in pair:
            continue
        recorded = Both(*(_held(info, path) for info, path in zip(infos, pair)))
        if any(side & paths for side, (paths, _) in zip(alone, recorded)) or any(
            _unlike(p, recorded) for p in parameters
        ):
            differing.append((pair.reference, pair.candidate))
    return frozenset(differing)


def _held(info: RunInfo, path: str) -> _Held:
    within = [layer for layer in info.layers if layer.path == path or inside(layer.path, path)]
    # The projections below an attention are recorded too, as one framework packs them into the attention itself.
    packed = equivalents.common_kind(within[0].kind) in equivalents.COMPOSITE and within[0].recorded
    recorded = frozenset(layer.path for layer in within if layer.recorded or packed)
    return recorded, frozenset(layer.path for layer in within) - recorded


def _unlike(pair: ParameterPair, parameters: Both[_Held]) -> bool:
    """Return True if parameters of the two layers have different shapes, or only one run recorded them."""
    present = [any(part.layer in side for part in parts) for (side, _), parts in zip(parameters, pair)]
    if not any(present):
        return False
    if not all(present):
        return True
    return not all(equivalents.same_rows(pair.reference[0].result_shape, part.result_shape) for part in pair.candidate)
