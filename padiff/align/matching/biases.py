"""Biases that belong to another layer than their matrices, or are two on one side and one on the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from padiff.align.matching import names
from padiff.align.matching.matches import Match
from padiff.align.matching.parameter_units import Unit, whole_slice
from padiff.align.slices import ParameterPair, Slice
from padiff.records import Both

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
