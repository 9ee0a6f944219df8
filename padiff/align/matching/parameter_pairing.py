"""Pairs of parameters, or of their rows, computed from the matches of units."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

import numpy as np

from padiff.align.matching import names
from padiff.align.matching.parameter_units import (
    Match,
    Unit,
    containers_of,
    contradict,
    grouped,
    holds_several,
    tie_targets,
    whole_slice,
    without_ones,
)
from padiff.align.slices import (
    NOTHING_SEEN,
    Ambiguity,
    ParameterPair,
    RuntimeEvidence,
    Slice,
    StackedLayers,
    real_pairs,
)
from padiff.frameworks.settings import usual_layout
from padiff.model.equivalents import ONE_SIDED, stands_for_none
from padiff.records import ROOT, SIDES, Both, Layer, Parameter, RunInfo, unzipped
from padiff.sketches.sketch import Sketch

_SEPARATE = ("q_proj", "k_proj", "v_proj")


def with_packed_biases(matches: Sequence[Match], pairs: list[ParameterPair]) -> list[ParameterPair]:
    """Return the pairs, plus those of the packed biases of torch's attention with keys or values of another width.

    This attention has three matrices, ``q_proj_weight`` and so on, and one ``in_proj_bias`` that holds all three
    biases.
    """
    packed_pairs = []
    for match in matches:
        if len(match.reference) != 1 or len(match.candidate) != 1:
            continue
        units = match.map(lambda units: units[0])
        for (attention, single), swapped in ((units, False), (units.swapped(), True)):
            packed = next((p for p in attention.layer.parameters if p.slot == "in_proj_bias"), None)
            bias = single.parameters.get("bias")
            if attention.group in _SEPARATE and packed is not None and bias is not None:
                rows = packed.shape[0] // 3
                start = _SEPARATE.index(attention.group) * rows
                piece = Slice(attention.path, packed.slot, packed.shape, "", 1, start, start + rows)
                pair = Both((piece,), (whole_slice(single, bias, ""),)).swapped(swapped)
                packed_pairs.append(ParameterPair(*pair))
    return pairs + packed_pairs


#: Bias rows of a recurrent cell, by matrix (``ih``, ``hh``), gate by gate.
_Biases = dict[str, list[Slice]]


def recurrent_cells(matches: Sequence[Match]) -> list[dict[str, Match]]:
    """Return the matches of recurrent cells' two matrices, by matrix (``ih``, ``hh``)."""
    cells: dict[tuple[str, ...], dict[str, Match]] = {}
    for match in matches:
        which = {names.role(unit.name, "recurrent part") for units in match for unit in units}
        if len(which) == 1 and "" not in which and not match.unlike:
            key = tuple(names.without_recurrent_part(units[0].name) for units in match)
            cells.setdefault(key, {})[which.pop()] = match
    return [cell for cell in cells.values() if cell.keys() == {"ih", "hh"}]


def with_summed_biases(cells: Sequence[Mapping[str, Match]], pairs: list[ParameterPair]) -> list[ParameterPair]:
    """Return the pairs with a recurrent cell's two biases paired with a single bias of the other side, which is their
    sum.

    A GRU's biases are not combined, as its reset gate acts between the two.
    """
    for cell in cells:
        pairs = _summed(cell, pairs)
    return pairs


def _summed(cell: Mapping[str, Match], pairs: list[ParameterPair]) -> list[ParameterPair]:
    gates = max(len(side) for match in cell.values() for side in match)
    biases: Both[_Biases] = Both({}, {})
    for which, match in cell.items():
        for side, units in zip(biases, match):
            if all("bias" in unit.parameters for unit in units):
                side[which] = _by_gate(units, gates)
    hidden = cell["hh"].reference[0].matrix[1]
    three = sum(unit.matrix[0] for unit in cell["hh"].reference) == 3 * hidden
    if sorted(map(len, biases)) != [1, 2] or three or any(len(b) != gates for s in biases for b in s.values()):
        return pairs
    slots = biases.map(lambda side: {(part.layer, part.slot) for part in chain(*side.values())})
    unrelated = [p for p in pairs if not any((s.layer, s.slot) in sites for side, sites in zip(p, slots) for s in side)]
    # For each side and gate, one or two biases.
    sides = biases.map(lambda side: list(zip(*(side[which] for which in ("ih", "hh") if which in side))))
    return unrelated + list(map(ParameterPair, *sides))


def _by_gate(side: Sequence[Unit], gates: int) -> list[Slice]:
    if len(side) > 1 or gates == 1:
        return [whole_slice(unit, unit.parameters["bias"], "") for unit in side]
    bias = side[0].parameters["bias"]
    rows = bias.shape[0] // gates
    return [Slice(side[0].path, bias.slot, bias.shape, "", 1, k * rows, (k + 1) * rows) for k in range(gates)]


Owned = tuple[Layer, Parameter]


def unmatched_parameters(info: RunInfo, parts: Iterable[Sequence[Slice]]) -> list[Owned]:
    """Return the parameters without a partner, in order of definition."""
    targets = tie_targets(info.layers)
    covered = {
        targets.get((part.layer, part.slot), (part.layer, part.slot))
        for part in chain(*parts)
        if part.result_shape[:1] != (0,)
    }
    return [
        (layer, p)
        for layer in info.layers
        for p in layer.parameters
        if p.role == "parameter" and not p.tied_to and p.slot not in ONE_SIDED
        if not stands_for_none(layer, p)
        if (layer.path, p.slot) not in covered
    ]


def match_unmatched(infos: Both[RunInfo], pairs: Sequence[ParameterPair]) -> list[ParameterPair]:
    """Return the pairs, plus pairs of the parameters that have no partner yet.

    Both sides must have the same number of such parameters of one shape; these are paired in order of definition.
    Unpaired they would be reported as missing on both sides, so a wrong pair costs nothing: its first values differ
    visibly.
    """
    unmatched = Both(*map(unmatched_parameters, infos, unzipped(pairs)))
    paired = [*pairs, *_paired(unmatched)] if all(unmatched) else list(pairs)
    if not any(unmatched):
        return paired
    if all(unmatched):
        paired += _numbers_of_vectors(Both(*map(unmatched_parameters, infos, unzipped(paired))))
    # A parameter that nothing trains is a buffer on the other side: a bias of a router's scores.
    frozen = Both(*map(unmatched_parameters, infos, unzipped(paired))).map(
        lambda side: [(layer, p) for layer, p in side if not p.trainable]
    )
    buffers = Both(*map(_unmatched_buffers, infos, unzipped(paired)))
    return [
        *paired,
        *_paired(Both(frozen.reference, buffers.candidate)),
        *_paired(Both(buffers.reference, frozen.candidate)),
    ]


def _numbers_of_vectors(unmatched: Both[list[Owned]]) -> Iterator[ParameterPair]:
    """Yield pairs of the numbers of one side's only vector without a partner with as many single numbers of the other
    side, in order of definition.
    """
    for swapped in (False, True):
        ones, others = unmatched.swapped(swapped)
        if len(ones) != 1 or len(ones[0][1].shape) != 1 or any(math.prod(p.shape) != 1 for _, p in others):
            continue
        (layer, vector), count = ones[0], ones[0][1].shape[0]
        if count == len(others) > 1:
            for k, (other, number) in enumerate(others):
                part = Slice(layer.path, vector.slot, vector.shape, start=k, stop=k + 1, label=number.slot)
                whole = Slice(other.path, number.slot, number.shape)
                yield ParameterPair(*Both((part,), (whole,)).swapped(swapped))


def match_buffers(
    infos: Both[RunInfo], pairs: Sequence[ParameterPair], seen: Both[RuntimeEvidence]
) -> list[ParameterPair]:
    """Return the pairs, plus pairs of buffers of paired layers that have other names and start from equal values.

    An unpaired buffer is no diff, so only equal values are evidence. One number alone, such as a count, is none.
    """
    homes = {(ROOT, ROOT)} | {(a.layer, b.layer) for pair in pairs for a, b in zip(*pair)}
    buffers = Both(*map(_unmatched_buffers, infos, unzipped(pairs)))
    by_layer = buffers.map(lambda side: grouped(side, lambda owned: owned[0].path))
    paired = list(pairs)
    for path, references in by_layer.reference.items():
        partners = {b for a, b in homes if a == path}
        others = [owned for b in sorted(partners) for owned in by_layer.candidate.get(b, [])]
        for layer, parameter in references:
            equal = [owned for owned in others if _starts_equal(Both((layer, parameter), owned), seen)]
            if len(equal) == 1 and sum(_starts_equal(Both(own, equal[0]), seen) for own in references) == 1:
                other, theirs = equal[0]
                others.remove(equal[0])
                both = Both((path, parameter), (other.path, theirs))
                paired.append(ParameterPair(*stored_as(both, is_transposed(both.map(lambda side: side[1].shape)))))
    return paired


def stored_as(owned: Both[tuple[str, Parameter]], transposed: bool) -> Iterator[tuple[Slice]]:
    """Yield the whole of a buffer of each side, with that of the candidate transposed or not."""
    for (path, parameter), layout in zip(owned, ("out_in", "in_out") if transposed else ("", "")):
        yield (Slice(path, parameter.slot, parameter.shape, layout),)


def is_transposed(shapes: Both[tuple[int, ...]]) -> bool:
    """Return True if two shapes are those of a matrix and its transpose, and the matrix is oblong."""
    return (
        shapes.reference != shapes.candidate
        and shapes.reference == shapes.candidate[::-1]
        and len(shapes.reference) == 2
    )


def _starts_equal(owned: Both[Owned], seen: Both[RuntimeEvidence]) -> bool:
    """Return True if two buffers have one shape, of more than one number, and equal values at the start."""
    shapes = owned.map(lambda side: side[1].shape)
    transposed = is_transposed(shapes)
    if (shapes.reference != shapes.candidate and not transposed) or math.prod(shapes.reference) < 2:
        return False
    values = owned.zip(seen).map(
        lambda side: None if side[1].values is None else side[1].values(side[0][0].path, side[0][1].slot)
    )
    a, b = values
    if isinstance(a, Sketch) and isinstance(b, Sketch):
        return a.is_equal(b)
    return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and np.array_equal(a, b.T if transposed else b)


def _unmatched_buffers(info: RunInfo, parts: Iterable[Sequence[Slice]]) -> list[Owned]:
    covered = {(part.layer, part.slot) for part in chain(*parts)}
    return [
        (layer, p)
        for layer in info.layers
        for p in layer.parameters
        if p.role == "buffer" and not p.tied_to and (layer.path, p.slot) not in covered
    ]


def _paired(unmatched: Both[list[Owned]]) -> Iterator[ParameterPair]:
    shapes = unmatched.map(lambda side: grouped(side, lambda owned: owned[1].shape))
    for shape, references in shapes.reference.items():
        others = shapes.candidate.get(shape, [])
        if len(references) == len(others) and 0 not in shape:
            for pair in zip(references, others):
                # A container's own parameter may belong to a layer on the other side, and so may one of a layer with
                # several matrices. Between two plain layers,
                # different parameters are a diff.
                if not any(layer.children or layer.path == ROOT or holds_several(layer) for layer, _ in pair):
                    continue
                yield ParameterPair(*((Slice(layer.path, p.slot, p.shape),) for layer, p in pair))


# Fused layers of these names alternate query, key and value head by head, as in Megatron; others stack the three
# matrices.
_HEAD_BY_HEAD = re.compile(r"query_key_value$")

TOGETHER, BY_HEAD, BY_ROW = "one below the other", "head by head", "row by row"
AS_STORED = "the same on both sides"
CHANNELS_FIRST, CHANNELS_LAST = "channels first", "channels last"
INPUT_FIRST, STATE_FIRST = "the input", "the state"


#: Layers of one run, by path.
_Layers = Mapping[str, Layer]


@dataclass(frozen=True)
class StoredParameters:
    """Pairs of the parameters of matched units, for given answers about their storage.

    Attributes:
        infos: both runs.
        matches: the matches of units.
        answers: answers to ambiguities, by `Ambiguity.about`; without an answer the first option applies.
        stacks: layers that stand for elements of stacked parameters; the pairs are those of the stacked ones.
        seen: observations from running both models.
    """

    infos: Both[RunInfo]
    matches: Sequence[Match]
    answers: Mapping[str, str] = field(default_factory=dict)
    stacks: Both[StackedLayers] = field(default_factory=lambda: Both(StackedLayers(), StackedLayers()))
    seen: Both[RuntimeEvidence] = NOTHING_SEEN

    def answered(self, answers: Mapping[str, str]) -> StoredParameters:
        """Return the same matches with more answers."""
        return replace(self, answers={**self.answers, **answers})

    @property
    def pairs(self) -> tuple[ParameterPair, ...]:
        pairs = [pair for _, pairs, _ in self._made for pair in pairs]
        with_biases = with_packed_biases(self.matches, with_summed_biases(self._cells, pairs))
        matched = match_buffers(self.infos, match_unmatched(self.infos, list(with_biases)), self.seen)
        return real_pairs(matched, self.stacks)

    @property
    def ambiguities(self) -> tuple[Ambiguity, ...]:
        """Return the ambiguities that neither names nor shapes decide."""
        return tuple(
            {about: ambiguity for _, _, ambiguities in self._made for about, ambiguity in ambiguities.items()}.values()
        )

    def pairs_if(self, about: str, option: str) -> list[ParameterPair]:
        """Return the pairs that depend on an ambiguity, computed with one of its options as the answer."""
        maker = _PairMaker(self.infos, self._layers, {**self.answers, about: option})
        pairs = [pair for match, _, ambiguities in self._made if about in ambiguities for pair in maker.pairs(match)]
        return list(real_pairs(with_summed_biases(self._cells, pairs), self.stacks))

    @cached_property
    def _made(self) -> list[tuple[Match, list[ParameterPair], dict[str, Ambiguity]]]:
        """Return the pairs of each match, with the ambiguities about them."""
        results = []
        for match in self.matches:
            maker = _PairMaker(self.infos, self._layers, self.answers)
            results.append((match, maker.pairs(match), maker.ambiguities))
        return results

    @cached_property
    def _layers(self) -> Both[_Layers]:
        return self.infos.map(lambda info: {layer.path: layer for layer in info.layers})

    @cached_property
    def _cells(self) -> list[dict[str, Match]]:
        return recurrent_cells(self.matches)


class _PairMaker:
    """Maker of pairs of parameters from matched units; collects ambiguities."""

    def __init__(self, infos: Both[RunInfo], layers: Both[_Layers], answers: Mapping[str, str]) -> None:
        self._infos, self._layers, self._answers = infos, layers, answers
        self.ambiguities: dict[str, Ambiguity] = {}

    def pairs(self, match: Match) -> list[ParameterPair]:
        """Return pairs of the parameters that two matched units share; parameters of only one unit are skipped."""
        if match.beside:
            return self._beside(match)
        if len(match.reference) == len(match.candidate) == 1:
            return self._one_to_one(match.map(lambda units: units[0]))
        return self._split(match)

    def _one_to_one(self, units: Both[Unit]) -> list[ParameterPair]:
        pairs: list[ParameterPair] = []
        layouts = self._layouts(units)
        groups = self._fused_groups(units) if all(map(_holds_key, units)) else None
        for role in units.reference.parameters:
            if role not in units.candidate.parameters:
                continue
            # A lone bias has the role of a weight: beside a layer with both, its partner is not the weight.
            if len(set(units.map(lambda unit: len(unit.parameters)))) > 1 and contradict(
                units.map(lambda unit, role=role: unit.parameters[role].slot)  # type: ignore[misc]
            ):
                continue
            sizes = units.map(lambda unit, role=role: math.prod(unit.parameters[role].shape))  # type: ignore[misc]
            if sizes.reference != sizes.candidate and all(unit.layer.children for unit in units):
                continue  # a container's own parameters are no matrix: those of other sizes are others
            if groups is not None and (role == "bias" or groups.reference != groups.candidate):
                pairs += _key_apart(units, role, layouts, groups)
                continue
            parts = Both(*(whole_slice(unit, unit.parameters[role], layout) for unit, layout in zip(units, layouts)))
            if role == "weight":
                parts = self._patches(parts, units)
            pairs.append(ParameterPair(*((part,) for part in parts)))
        return pairs

    def _fused_groups(self, units: Both[Unit]) -> Both[int]:
        """Return the number of groups in which query, key and value alternate on each side; both sides have them fused.

        Usually the numbers are equal; an ambiguity arises if only one side's name indicates a head-by-head order.
        """
        by_head = units.map(lambda unit: bool(_HEAD_BY_HEAD.search(unit.name.lower())))
        heads = max(map(_heads, units, self._layers))
        if heads < 2 or units.reference.matrix[0] // 3 % heads:
            return Both(1, 1)
        if by_head.reference == by_head.candidate:
            return by_head.map(lambda alternates: heads if alternates else 1)
        about = "order of rows in " + " against ".join(unit.name.rpartition(".")[2] for unit in units)
        unequal = Both(heads, 1) if by_head.reference else Both(1, heads)
        ways = {AS_STORED: Both(1, 1), f"{BY_HEAD} against {TOGETHER}": unequal}
        return ways[self._decided(about, tuple(ways))]

    def _layouts(self, units: Both[Unit]) -> Both[str]:
        """Return the layouts of both matrices; unknown layouts of square matrices are ambiguities."""
        layouts = units.map(lambda unit: unit.layout)
        if layouts.reference != layouts.candidate and _are_stored_alike(units):
            return Both(_known(layouts.reference), _known(layouts.reference))
        matrix = units.reference.matrix
        if "?" in layouts and matrix and matrix[0] == matrix[-1]:
            frameworks = [info.framework for info in self._infos]
            if set(layouts) == {"?"} and len(set(frameworks)) == 1:
                return Both("", "")
            sides = zip(SIDES, units, frameworks)
            return Both(*(self._layout(*side) if side[1].layout == "?" else side[1].layout for side in sides))
        return layouts.map(_known)

    def _patches(self, parts: Both[Slice], units: Both[Unit]) -> Both[Slice]:
        """Return the slices of a convolution over patches and a linear layer; the order of pixels is an ambiguity."""
        return Both(
            self._patched(parts.reference, parts.candidate, units.reference),
            self._patched(parts.candidate, parts.reference, units.candidate),
        )

    def _patched(self, part: Slice, partner: Slice, unit: Unit) -> Slice:
        shape = part.shape
        if len(shape) == 4 and partner.shape == (shape[0], shape[2] * shape[3], shape[1]):
            return replace(part, axes=(0, 2, 3, 1))  # a picture against a sequence of its positions
        if len(partner.shape) == 2 and len(without_ones(shape)) > 2:
            about = f"order of pixels in the patches of {unit.layer.type}.{unit.path.rpartition('.')[2]}"
            if self._decided(about, (CHANNELS_FIRST, CHANNELS_LAST)) == CHANNELS_LAST:
                return replace(part, axes=(0, *range(2, len(shape)), 1))
        return part

    def _beside(self, match: Match) -> list[ParameterPair]:
        """Return pairs of two matrices with gates that hold both side by side; their two biases are summed."""
        swapped = match.reference[0].matrix[1] > match.candidate[0].matrix[1]
        halves, gates = match.swapped(swapped)
        widths = [unit.matrix[1] for unit in halves]
        about = f"which of input and state comes first in {gates[0].layer.type}s beside {halves[0].layer.type}"
        if self._decided(about, (INPUT_FIRST, STATE_FIRST)) == INPUT_FIRST:
            columns = [(0, widths[0]), (widths[0], sum(widths))]
        else:
            columns = [(widths[1], sum(widths)), (0, widths[1])]
        pairs: list[Both[tuple[Slice, ...]]] = []
        start = 0
        for gate in gates:
            stop = start + gate.matrix[0]

            def rows(unit: Unit, role: str, start: int = start, stop: int = stop) -> Slice:
                full_slice = whole_slice(unit, unit.parameters[role], _known(unit.layout) if role == "weight" else "")
                return replace(full_slice, start=start, stop=stop)

            for unit, where in zip(halves, columns):
                gate_slice = whole_slice(gate, gate.parameters["weight"], _known(gate.layout))
                pairs.append(Both((rows(unit, "weight"),), (replace(gate_slice, columns=where),)))
            parts = tuple(rows(unit, "bias") for unit in halves if "bias" in unit.parameters)
            if parts and "bias" in gate.parameters:
                pairs.append(Both(parts, (whole_slice(gate, gate.parameters["bias"], ""),)))
            start = stop
        return [ParameterPair(*pair.swapped(swapped)) for pair in pairs]

    def _layout(self, side: str, unit: Unit, framework: str) -> str:
        slot = unit.parameters["weight"].slot
        usual = usual_layout(framework, slot)
        transposed = "in_out" if usual == "out_in" else "out_in"
        return self._decided(f"layout of {unit.layer.type}.{slot} of the {side}", (usual, transposed))

    def _split(self, match: Match) -> list[ParameterPair]:
        swapped = len(match.reference) != 1
        (fused,), parts = match.swapped(swapped)
        layers = self._layers.swapped(swapped)
        groups = self._groups(fused, parts, layers, SIDES.swapped(swapped).reference)
        pairs = []
        for role, parameter in fused.parameters.items():
            if any(role not in part.parameters for part in parts):
                continue
            layout = _known(fused.layout) if role == "weight" else ""
            start = 0
            for part in parts:
                part_slice = whole_slice(part, part.parameters[role], _known(part.layout))
                stop = start + (part_slice.result_shape[0] if part_slice.result_shape else 1) // groups
                rows = Slice(fused.path, parameter.slot, parameter.shape, layout, groups, start, stop)
                pairs.append(ParameterPair(*Both((rows,), (part_slice,)).swapped(swapped)))
                start = stop
        return pairs

    def _groups(self, fused: Unit, parts: Sequence[Unit], layers: Both[_Layers], side: str) -> int:
        """Return the number of groups in which the parts' rows alternate in the fused unit.

        Args:
            fused: the unit that holds the rows of the parts.
            parts: the units of the other side whose rows it holds.
            layers: layers of the fused unit's model, and of the parts' model.
            side: the fused unit's side.
        """
        rows = [part.matrix[0] for part in parts]
        stated = [_heads(fused, layers.reference), *(_heads(part, layers.candidate) for part in parts)]
        # Numbers from settings first, smallest first: keys and values may have fewer heads than queries.
        counts = list(dict.fromkeys([*sorted(n for n in stated if n > 1), *range(2, min(rows))]))
        ways = {TOGETHER: 1}
        ways |= {f"{BY_HEAD}, {n} heads": n for n in counts if all(count % n == 0 for count in rows)}
        if len(set(rows)) == 1:
            ways[BY_ROW] = rows[0]
        options = list(ways)
        if _HEAD_BY_HEAD.search(fused.name.lower()) and len(options) > 1 and max(stated):
            options = [options[1], options[0], *options[2:]]
        if len(options) == 1 or not fused.parameters["weight"].shape:
            return 1
        parent = layers.reference.get(fused.path.rpartition(".")[0] or ROOT, fused.layer)
        name = fused.group or fused.path.rpartition(".")[2]
        return ways[self._decided(f"order of rows in {parent.type}.{name} of the {side}", tuple(options))]

    def _decided(self, about: str, options: tuple[str, ...]) -> str:
        chosen = self._answers.get(about, "")
        answer = chosen if chosen in options else ""
        self.ambiguities[about] = Ambiguity(about, options, answer)
        return answer or options[0]


def _are_stored_alike(units: Both[Unit]) -> bool:
    """Return True if two matrices have one shape, which is not square, and a layout that contradicts it is a guess."""
    weights = [unit.parameters["weight"] for unit in units if "weight" in unit.parameters]
    shapes = {weight.shape for weight in weights}
    return len(weights) == 2 and len(shapes) == 1 < len(set(*shapes)) and not all(weight.layout for weight in weights)


def _known(layout: str) -> str:
    """Return a layout, with the usual one in place of an unknown one."""
    return layout.replace("?", "out_in")


def _heads(unit: Unit, layers: _Layers) -> int:
    """Return the number of heads (of keys and values) in the settings of the nearest layer at or above a unit; 0 if
    none.
    """
    for path in [unit.path, *reversed(containers_of(unit.path))]:
        layer = layers.get(path)
        for name in ("num_kv_heads", "num_heads"):
            heads = layer.settings.get(name) if layer is not None else None
            if isinstance(heads, int) and not isinstance(heads, bool) and heads > 0:
                return heads
    return 0


def _holds_key(unit: Unit) -> bool:
    """Return True if a unit is query, key and value fused, of equal size."""
    fused = names.role(unit.name, "attention part") == "qkv"
    return fused and len(unit.matrix) == 2 and unit.matrix[0] % 3 == 0 and unit.matrix[0] >= unit.matrix[1]


def _key_apart(units: Both[Unit], role: str, layouts: Both[str], groups: Both[int]) -> Iterator[ParameterPair]:
    """Yield separate pairs of query, key and value, which both sides have fused.

    Biases are always separated. An attention hardly depends on the key's bias: its gradient is rounding noise, and an
    adaptive optimizer's update from that noise would hide among the others, or make them look wrong.
    """
    for number, label in enumerate(("query", "key", "value")):
        parts = []
        for unit, layout, count in zip(units, layouts, groups):
            rows = unit.matrix[0] // 3 // count
            full = whole_slice(unit, unit.parameters[role], layout)
            start = number * rows
            parts.append((replace(full, groups=count, start=start, stop=start + rows, label=label),))
        yield ParameterPair(*parts)
