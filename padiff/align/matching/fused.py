"""Which units together hold what another holds in one matrix: query, key and value, gates, parts of an MLP."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from padiff.align.matching import names
from padiff.align.matching.parameter_units import Unit, grouped
from padiff.model import equivalents

# Roles of the parts, in the order in which libraries put them below each other.
_PATTERNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("attention part", ("q", "k", "v")),
    ("attention part", ("q", "kv")),
    ("attention part", ("k", "v")),
    ("mlp part", ("gate", "up")),
    ("gate", ("input gate", "forget gate", "cell gate", "output gate")),
    ("gate", ("reset gate", "update gate", "new gate")),
)
_ROLES = {("q", "k", "v"): "qkv", ("q", "kv"): "qkv", ("k", "v"): "kv", ("gate", "up"): "gate_up"}
# Never a part of a matrix of inputs.
_LAST = frozenset({("attention part", "o"), ("mlp part", "out"), ("attention part", "qkv")})
# Of layers whose names say nothing, at most so many are tried as parts.
_MOST_PARTS = 4
_ALONE = frozenset({"embedding", "norm"})


@dataclass(frozen=True)
class Bundle:
    """Units whose rows, below each other, may be another's.

    Attributes:
        named: whether their names tell their order.
        role: what a layer that holds them all is called.
    """

    parts: tuple[Unit, ...]
    named: bool
    role: str = ""


def bundles(whole: Unit, spare: Sequence[Unit], ran: Mapping[str, int]) -> list[Bundle]:
    """The bundles among the spare units that ``whole`` may consist of, the likeliest of each neighbourhood.

    Args:
        ran: position of layers in the order of execution, where known: parts come in it rather than as defined.
    """
    if len(whole.matrix) < 1 or "weight" not in whole.parameters:
        return []
    rows, rest = whole.matrix[0], whole.matrix[1:]
    fitting = [
        unit
        for unit in spare
        if unit.matrix[1:] == rest
        and unit.matrix
        and unit.matrix[0] < rows
        and (unit.parameters.keys() == whole.parameters.keys() or _one_bias_of_two(unit, whole))
        and _same_group(unit.kind, whole.kind)
    ]
    found: list[Bundle] = []
    taken: set[Unit] = set()
    # What names tell comes first, wherever the parts lie; then neighbours in order.
    for named, families in ((True, _families_by_number), (True, _siblings), (True, _cousins), (False, _siblings)):
        for family in families([unit for unit in fitting if unit not in taken]):
            ordered = _have_run(family, ran)
            left = sorted(family, key=lambda unit: (ran[unit.path], unit.defined)) if ordered else list(family)
            while (bundle := _named(left, rows) if named else _consecutive(left, rows, ordered)) is not None:
                found.append(bundle)
                taken.update(bundle.parts)
                left = [unit for unit in left if unit not in taken]
    return found


def _have_run(family: Sequence[Unit], ran: Mapping[str, int]) -> bool:
    return bool(ran) and all(unit.path in ran for unit in family)


def cells_beside(units: Sequence[Unit], others: Sequence[Unit]) -> list[tuple[tuple[Unit, ...], tuple[Unit, ...]]]:
    """Recurrent cells, as (input's, state's) unit, with the others whose matrices have the two beside each other.

    A cell of the kind ``gate(concat(x, h))`` has one such matrix, or one for each gate.
    """
    cells: dict[str, dict[str, Unit]] = {}
    for unit in units:
        which = names.role(unit.name, "recurrent part")
        if which and len(unit.matrix) == 2:
            cells.setdefault(names.without_recurrent_part(unit.name), {})[which] = unit
    found: list[tuple[tuple[Unit, ...], tuple[Unit, ...]]] = []
    left = [unit for unit in others if len(unit.matrix) == 2 and not unit.optional]
    for cell in cells.values():
        if cell.keys() != {"ih", "hh"}:
            continue
        (rows, inputs), (_, hidden) = cell["ih"].matrix, cell["hh"].matrix
        wide = [unit for unit in left if unit.matrix[1] == inputs + hidden]
        gates = [unit for unit in wide if unit.matrix[0] == rows][:1] or _gates(wide, rows)
        if gates:
            left = [unit for unit in left if unit not in gates]
            found.append(((cell["ih"], cell["hh"]), tuple(gates)))
    return found


def _gates(units: Sequence[Unit], rows: int) -> Sequence[Unit]:
    """So many gates that they have these rows, in the order in which the frameworks put them below each other."""
    for family in [*_siblings(units), *_cousins(units)]:
        bundle = _named(family, rows)
        if bundle is not None:
            return bundle.parts
        several = [unit for unit in family if unit.matrix[0] == family[0].matrix[0]]
        count = rows // family[0].matrix[0]
        if len(several) >= count > 1 and rows % family[0].matrix[0] == 0:
            return several[:count]
    return ()


def _same_group(kind: str, other: str) -> bool:
    """An embedding, or a normalisation, is never a part of anything else."""
    groups = equivalents.group_of_kinds(kind), equivalents.group_of_kinds(other)
    return groups[0] == groups[1] or not _ALONE & set(groups)


def _siblings(units: Sequence[Unit]) -> list[list[Unit]]:
    """Units with the same layer right above them."""
    return _families(units, lambda unit: unit.name.rpartition(".")[0])


def _cousins(units: Sequence[Unit]) -> list[list[Unit]]:
    """Units with the same layer two levels above them."""
    return _families(units, lambda unit: unit.name.rpartition(".")[0].rpartition(".")[0])


def _families_by_number(units: Sequence[Unit]) -> list[list[Unit]]:
    """Units whose names have the same numbers: ``q.3``, ``k.3`` and ``v.3`` of lists by kind."""
    return _families(units, lambda unit: tuple(re.findall(r"\d+", unit.name)))


def _families(units: Sequence[Unit], key: Callable[[Unit], Hashable]) -> list[list[Unit]]:
    return [family for family in grouped(units, key).values() if len(family) > 1]


def _named(family: Sequence[Unit], rows: int) -> Bundle | None:
    for kind, pattern in _PATTERNS:
        by_role = grouped(family, partial(_role, kind))
        if all(by_role.get(role) for role in pattern):
            parts = tuple(by_role[role][0] for role in pattern)
            if sum(unit.matrix[0] for unit in parts) == rows:
                return Bundle(parts, True, _ROLES.get(pattern, ""))
    return None


def _role(kind: str, unit: Unit) -> str:
    return names.role(unit.name, kind)


def _consecutive(family: Sequence[Unit], rows: int, ordered: bool) -> Bundle | None:
    if len({re.sub(r"\d+", "#", unit.name) for unit in family}) == 1 and len(family) > _MOST_PARTS:
        return None  # a list of its own: its elements belong to as many blocks
    # A name that says so is misread where others ran after it.
    before = family[:-1] if ordered else ()
    for run in _runs([unit for unit in family if unit in before or not _comes_last(unit)]):
        if sum(unit.matrix[0] for unit in run) == rows:
            return Bundle(tuple(run), False)
    return None


def _runs(units: Sequence[Unit]) -> Iterator[Sequence[Unit]]:
    for start in range(len(units)):
        for stop in range(start + 2, min(start + _MOST_PARTS, len(units)) + 1):
            yield units[start:stop]


def _one_bias_of_two(unit: Unit, whole: Unit) -> bool:
    """Whether the one has no bias because a recurrent cell has only one, the other two."""
    keys = unit.parameters.keys() | whole.parameters.keys()
    return keys == {"weight", "bias"} and names.role(whole.name, "recurrent part") != ""


def _comes_last(unit: Unit) -> bool:
    return any(_role(kind, unit) == role for kind, role in _LAST)
