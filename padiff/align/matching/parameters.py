"""Which parameter, or which rows of one, holds what another holds, given the units that answer to each other."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from padiff.align.alignment import Doubt, ParameterPair, Part
from padiff.align.matching import names
from padiff.align.matching.sides import Match
from padiff.align.matching.units import Unit, bare, containers_of
from padiff.frameworks.known import usual_layout
from padiff.records import ROOT, Parameter, RunInfo

# Fused layers of these names alternate query, key and value head by head, as Megatron has it; others put the three
# matrices below each other.
_HEAD_BY_HEAD = re.compile(r"query_key_value$")

TOGETHER, BY_HEAD, BY_ROW = "one below the other", "head by head", "row by row"
AS_STORED = "the same on both sides"
CHANNELS_FIRST, CHANNELS_LAST = "channels first", "channels last"
INPUT_FIRST, STATE_FIRST = "the input", "the state"


_SIDES = ("reference", "candidate")


class Parameters:
    """Turns matches of units into pairs of parameters.

    Args:
        choices: the answers to doubts, by what they are about; the first option is taken otherwise.
    """

    def __init__(self, infos: tuple[RunInfo, RunInfo], choices: Mapping[str, str]) -> None:
        self._infos = infos
        self._choices = choices
        self._layers = [{layer.path: layer for layer in info.layers} for info in infos]
        self.doubts: dict[str, Doubt] = {}

    def of(self, match: Match) -> list[ParameterPair]:
        """The parameters that two matched units share; what only one has is left out."""
        if match.beside:
            return self._beside(match)
        if len(match.ours) == len(match.theirs) == 1:
            return self._one_to_one(match.ours[0], match.theirs[0])
        if len(match.ours) == 1:
            whole, parts, turned = match.ours[0], match.theirs, False
        else:
            whole, parts, turned = match.theirs[0], match.ours, True
        return self._split(whole, parts, turned)

    def _one_to_one(self, ours: Unit, theirs: Unit) -> list[ParameterPair]:
        pairs: list[ParameterPair] = []
        layouts = self._layouts(ours, theirs)
        groups = self._fused_groups(ours, theirs) if _holds_key(ours) and _holds_key(theirs) else None
        for role, parameter in ours.parameters.items():
            other = theirs.parameters.get(role)
            if other is not None and groups is not None and (role == "bias" or groups[0] != groups[1]):
                pairs += self._key_apart(
                    (ours, parameter, layouts[0], groups[0]), (theirs, other, layouts[1], groups[1]), role
                )
            elif other is not None:
                parts = _part(ours, parameter, layouts[0]), _part(theirs, other, layouts[1])
                if role == "weight":
                    parts = self._patches(*parts, ours, theirs)
                pairs.append(ParameterPair((parts[0],), (parts[1],)))
        return pairs

    def _fused_groups(self, ours: Unit, theirs: Unit) -> tuple[int, int]:
        """In how many groups query, key and value alternate on either side, both having them in one.

        As a rule in as many; where one is called as what alternates head by head and the other is not, it is a doubt.
        """
        by_head = [bool(_HEAD_BY_HEAD.search(unit.name.lower())) for unit in (ours, theirs)]
        heads = max(self._heads(ours, 0), self._heads(theirs, 1))
        if heads < 2 or ours.matrix[0] // 3 % heads:
            return 1, 1
        same = heads if all(by_head) else 1
        if by_head[0] == by_head[1]:
            return same, same
        about = f"order of rows in {ours.name.rpartition('.')[2]} against {theirs.name.rpartition('.')[2]}"
        ways = {AS_STORED: (1, 1), f"{BY_HEAD} against {TOGETHER}": (heads, 1) if by_head[0] else (1, heads)}
        return ways[self._decided(about, tuple(ways))]

    def _key_apart(
        self, ours: tuple[Unit, Parameter, str, int], theirs: tuple[Unit, Parameter, str, int], role: str
    ) -> list[ParameterPair]:
        """Query, key and value one by one, though both sides have them in one.

        Of biases in any case. An attention hardly depends on the key's: its gradient is rounding noise, and what an
        adaptive optimizer makes of that would hide among the others, or make them look wrong.
        """
        pieces: list[list[Part]] = []
        for unit, parameter, layout, groups in (ours, theirs):
            each = unit.matrix[0] // 3 // groups
            turned = layout if role == "weight" else ""
            pieces.append(
                [
                    Part(
                        unit.path,
                        parameter.slot,
                        parameter.shape,
                        turned,
                        groups,
                        n * each,
                        (n + 1) * each,
                        label=label,
                    )
                    for n, label in enumerate(("query", "key", "value"))
                ]
            )
        return [ParameterPair((a,), (b,)) for a, b in zip(*pieces)]

    def _layouts(self, ours: Unit, theirs: Unit) -> tuple[str, str]:
        """How the two matrices lie; where their classes do not say and the shape is no help, it is a doubt."""
        layouts = [ours.layout, theirs.layout]
        if "?" in layouts and ours.matrix and ours.matrix[0] == ours.matrix[-1]:
            if layouts == ["?", "?"] and self._infos[0].framework == self._infos[1].framework:
                return "", ""
            for k, unit in enumerate((ours, theirs)):
                if layouts[k] == "?":
                    layouts[k] = self._layout(k, unit)
        return layouts[0].replace("?", "out_in"), layouts[1].replace("?", "out_in")

    def _patches(self, ours: Part, theirs: Part, mine: Unit, other: Unit) -> tuple[Part, Part]:
        """A convolution over patches against a linear layer: which pixels come first is a doubt."""
        parts = [ours, theirs]
        for k, (picture, places) in enumerate(((ours.shape, theirs.shape), (theirs.shape, ours.shape))):
            if len(picture) == 4 and len(places) == 3 and places == (picture[0], picture[2] * picture[3], picture[1]):
                parts[k] = replace(parts[k], axes=(0, 2, 3, 1))
        for k, (conv, linear, unit) in enumerate(((ours, theirs, mine), (theirs, ours, other))):
            if len(conv.shape) > 2 and len(linear.shape) == 2 and len(bare(conv.shape)) > 2:
                about = f"order of pixels in the patches of {unit.layer.type}.{unit.path.rpartition('.')[2]}"
                if self._decided(about, (CHANNELS_FIRST, CHANNELS_LAST)) == CHANNELS_LAST:
                    parts[k] = replace(conv, axes=(0, *range(2, len(conv.shape)), 1))
        return parts[0], parts[1]

    def _beside(self, match: Match) -> list[ParameterPair]:
        """A cell's two matrices against gates that have them beside each other; its two biases are added up."""
        turned = names.role(match.ours[0].name, "recurrent part") != "ih" or len(match.ours) != 2
        (ih, hh), gates = (match.theirs, match.ours) if turned else (match.ours, match.theirs)
        wide, inputs = gates[0].matrix[1], ih.matrix[1]
        about = f"which of input and state comes first in {gates[0].layer.type}s beside {ih.layer.type}"
        first = self._decided(about, (INPUT_FIRST, STATE_FIRST)) == INPUT_FIRST
        columns = (0, inputs) if first else (wide - inputs, wide)
        state = (inputs, wide) if first else (0, wide - inputs)
        pairs: list[tuple[tuple[Part, ...], Part]] = []
        start = 0
        for gate in gates:
            stop = start + gate.matrix[0]
            for unit, where in ((ih, columns), (hh, state)):
                weight = unit.parameters["weight"]
                rows = Part(unit.path, weight.slot, weight.shape, "", 1, start, stop)
                own = _part(gate, gate.parameters["weight"], gate.layout.replace("?", "out_in"))
                pairs.append(((rows,), replace(own, columns=where)))
            biases = [(u.path, u.parameters["bias"]) for u in (ih, hh) if "bias" in u.parameters]
            if biases and "bias" in gate.parameters:
                parts = tuple(Part(path, p.slot, p.shape, "", 1, start, stop) for path, p in biases)
                pairs.append((parts, _part(gate, gate.parameters["bias"], "")))
            start = stop
        return [ParameterPair((b,), a) if turned else ParameterPair(a, (b,)) for a, b in pairs]

    def _layout(self, side: int, unit: Unit) -> str:
        slot = unit.parameters["weight"].slot
        usual = usual_layout(self._infos[side].framework, slot)
        other = "in_out" if usual == "out_in" else "out_in"
        return self._decided(f"layout of {unit.layer.type}.{slot} of the {_SIDES[side]}", (usual, other))

    def _split(self, whole: Unit, parts: Sequence[Unit], turned: bool) -> list[ParameterPair]:
        groups = self._groups(whole, parts, 1 if turned else 0)
        pairs = []
        for role, parameter in whole.parameters.items():
            if any(role not in part.parameters for part in parts):
                continue
            start = 0
            for part in parts:
                own = _part(part, part.parameters[role], part.layout.replace("?", "out_in"))
                rows = own.size[0] if own.size else 1
                layout = whole.layout.replace("?", "out_in") if role == "weight" else ""
                stop = start + rows // groups
                piece = Part(whole.path, parameter.slot, parameter.shape, layout, groups, start, stop)
                sides = (own, piece) if turned else (piece, own)
                pairs.append(ParameterPair((sides[0],), (sides[1],)))
                start = stop
        return pairs

    def _groups(self, whole: Unit, parts: Sequence[Unit], side: int) -> int:
        """In how many groups the parts' rows alternate in the whole."""
        rows = [part.matrix[0] for part in parts]
        stated = [self._heads(whole, side), *(self._heads(part, 1 - side) for part in parts)]
        # Stated numbers first, the fewest of them first: keys and values may have fewer heads than queries.
        counts = list(dict.fromkeys([*sorted(n for n in stated if n > 1), *range(2, min(rows))]))
        ways = {TOGETHER: 1}
        ways |= {f"{BY_HEAD}, {n} heads": n for n in counts if all(count % n == 0 for count in rows)}
        if len(set(rows)) == 1:
            ways[BY_ROW] = rows[0]
        options = list(ways)
        if _HEAD_BY_HEAD.search(whole.name.lower()) and len(options) > 1 and max(stated):
            options = [options[1], options[0], *options[2:]]
        if len(options) == 1 or not whole.parameters["weight"].shape:
            return 1
        parent = self._layers[side].get(whole.path.rpartition(".")[0] or ROOT, whole.layer)
        own = whole.group or whole.path.rpartition(".")[2]
        about = f"order of rows in {parent.type}.{own} of the {_SIDES[side]}"
        return ways[self._decided(about, tuple(options))]

    def _heads(self, unit: Unit, side: int) -> int:
        """The number of heads, of keys and values, that the nearest layer above states; 0 if none does."""
        for path in [unit.path, *reversed(containers_of(unit.path))]:
            layer = self._layers[side].get(path)
            for name in ("num_kv_heads", "num_heads"):
                heads = layer.settings.get(name) if layer is not None else None
                if isinstance(heads, int) and not isinstance(heads, bool) and heads > 0:
                    return heads
        return 0

    def _decided(self, about: str, options: tuple[str, ...]) -> str:
        chosen = self._choices.get(about, "")
        answer = chosen if chosen in options else ""
        self.doubts[about] = Doubt(about, options, answer)
        return answer or options[0]


def _holds_key(unit: Unit) -> bool:
    """Whether a unit is query, key and value in one, of the same size."""
    fused = names.role(unit.name, "attention part") == "qkv"
    return fused and len(unit.matrix) == 2 and unit.matrix[0] % 3 == 0 and unit.matrix[0] >= unit.matrix[1]


def _part(unit: Unit, parameter: Parameter, layout: str) -> Part:
    turned = layout if parameter is unit.parameters.get("weight") and len(parameter.shape) == 2 else ""
    return Part(unit.path, parameter.slot, parameter.shape, turned)


# -- biases that stand elsewhere than their matrices ---------------------------------------------------------------

_SEPARATE = ("q_proj", "k_proj", "v_proj")


def with_packed_biases(matches: Sequence[Match], pairs: list[ParameterPair]) -> list[ParameterPair]:
    """The pairs, and those of torch's attention with keys or values of another width.

    It keeps three matrices, ``q_proj_weight`` and so on, but the three biases in one ``in_proj_bias``.
    """
    found = []
    for match in matches:
        if len(match.ours) != 1 or len(match.theirs) != 1:
            continue
        for one, other, turned in ((match.ours[0], match.theirs[0], False), (match.theirs[0], match.ours[0], True)):
            packed = next((p for p in one.layer.parameters if p.slot == "in_proj_bias"), None)
            bias = other.parameters.get("bias")
            if one.group in _SEPARATE and packed is not None and bias is not None:
                rows = packed.shape[0] // 3
                start = _SEPARATE.index(one.group) * rows
                piece = Part(one.path, packed.slot, packed.shape, "", 1, start, start + rows)
                own = _part(other, bias, "")
                found.append(ParameterPair((own,), (piece,)) if turned else ParameterPair((piece,), (own,)))
    return pairs + found


# -- two biases against one --------------------------------------------------------------------------------------

#: Bias rows of a recurrent cell, by what they belong to (``ih``, ``hh``), gate by gate.
_Biases = dict[str, list[Part]]


def with_summed_biases(matches: Sequence[Match], pairs: list[ParameterPair]) -> list[ParameterPair]:
    """The pairs, where a recurrent cell's two biases are one on the other side: they are only ever added up.

    In a GRU they are not: its reset gate comes between the two.
    """
    cells: dict[tuple[str, str], dict[str, Match]] = {}
    for match in matches:
        which = [{names.role(u.name, "recurrent part") for u in side} for side in (match.ours, match.theirs)]
        if which[0] == which[1] and len(which[0]) == 1 and "" not in which[0] and not match.unlike:
            key = names.without_recurrent_part(match.ours[0].name), names.without_recurrent_part(match.theirs[0].name)
            cells.setdefault(key, {})[which[0].pop()] = match
    for cell in cells.values():
        if cell.keys() == {"ih", "hh"}:
            pairs = _summed(cell, pairs)
    return pairs


def _summed(cell: Mapping[str, Match], pairs: list[ParameterPair]) -> list[ParameterPair]:
    gates = max(len(side) for match in cell.values() for side in (match.ours, match.theirs))
    biases: tuple[_Biases, _Biases] = ({}, {})
    for which, match in cell.items():
        for k, side in enumerate((match.ours, match.theirs)):
            if all("bias" in unit.parameters for unit in side):
                biases[k][which] = _by_gate(side, gates)
    hidden = cell["hh"].ours[0].matrix[1]
    three = sum(unit.matrix[0] for unit in cell["hh"].ours) == 3 * hidden
    if sorted(map(len, biases)) != [1, 2] or three or any(len(b) != gates for s in biases for b in s.values()):
        return pairs
    mine = {(part.layer, part.slot) for part in _all(biases[0])}
    other = {(part.layer, part.slot) for part in _all(biases[1])}
    kept = [
        pair
        for pair in pairs
        if not any((p.layer, p.slot) in mine for p in pair.reference)
        and not any((p.layer, p.slot) in other for p in pair.candidate)
    ]
    for gate in range(gates):
        sides = [tuple(side[which][gate] for which in ("ih", "hh") if which in side) for side in biases]
        kept.append(ParameterPair(sides[0], sides[1]))
    return kept


def _by_gate(side: Sequence[Unit], gates: int) -> list[Part]:
    if len(side) > 1 or gates == 1:
        return [_part(unit, unit.parameters["bias"], "") for unit in side]
    bias = side[0].parameters["bias"]
    rows = bias.shape[0] // gates
    return [Part(side[0].path, bias.slot, bias.shape, "", 1, k * rows, (k + 1) * rows) for k in range(gates)]


def _all(biases: _Biases) -> list[Part]:
    return [part for parts in biases.values() for part in parts]
