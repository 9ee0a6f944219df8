"""Which units together hold what another holds in one matrix: query, key and value, gates, parts of an MLP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from padiff.align import names
from padiff.align.units import Unit

# Roles of the parts, in the order in which libraries put them below each other.
_PATTERNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("attention part", ("q", "k", "v")),
    ("attention part", ("q", "kv")),
    ("attention part", ("k", "v")),
    ("mlp part", ("gate", "up")),
    ("gate", ("input gate", "forget gate", "cell gate", "output gate")),
    ("gate", ("reset gate", "update gate", "new gate")),
)
# Never a part of a matrix of inputs.
_LAST = frozenset({("attention part", "o"), ("mlp part", "out"), ("attention part", "qkv")})
# Of layers whose names say nothing, at most so many are tried as parts.
_MOST_PARTS = 4


@dataclass(frozen=True)
class Bundle:
    """Units whose rows, below each other, may be another's; ``named`` if their names tell their order."""

    parts: tuple[Unit, ...]
    named: bool


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
    ]
    found: list[Bundle] = []
    taken: set[Unit] = set()
    for depth in (1, 2):
        for family in _families([unit for unit in fitting if unit not in taken], depth):
            if ran and all(unit.path in ran for unit in family):
                family = sorted(family, key=lambda unit: (ran[unit.path], unit.defined))
            bundle = _named(family, rows) or _consecutive(family, rows)
            while bundle is not None:
                found.append(bundle)
                taken.update(bundle.parts)
                family = [unit for unit in family if unit not in taken]
                bundle = _named(family, rows) or _consecutive(family, rows)
    return found


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
    for family in [*_families(units, 1), *_families(units, 2)]:
        bundle = _named(family, rows)
        if bundle is not None:
            return bundle.parts
        several = [unit for unit in family if unit.matrix[0] == family[0].matrix[0]]
        count = rows // family[0].matrix[0]
        if len(several) >= count > 1 and rows % family[0].matrix[0] == 0:
            return several[:count]
    return ()


def _families(units: Sequence[Unit], depth: int) -> list[list[Unit]]:
    """Units with the same layer so many levels above them."""
    families: dict[str, list[Unit]] = {}
    for unit in units:
        above = unit.name
        for _ in range(depth):
            above = above.rpartition(".")[0]
        families.setdefault(above, []).append(unit)
    return [family for family in families.values() if len(family) > 1]


def _named(family: Sequence[Unit], rows: int) -> Bundle | None:
    for kind, pattern in _PATTERNS:
        by_role: dict[str, list[Unit]] = {}
        for unit in family:
            by_role.setdefault(names.role(unit.name, kind), []).append(unit)
        if all(by_role.get(role) for role in pattern):
            parts = tuple(by_role[role][0] for role in pattern)
            if sum(unit.matrix[0] for unit in parts) == rows:
                return Bundle(parts, True)
    return None


def _consecutive(family: Sequence[Unit], rows: int) -> Bundle | None:
    for run in _runs([unit for unit in family if not _comes_last(unit)]):
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
    return any(names.role(unit.name, kind) == role for kind, role in _LAST)
