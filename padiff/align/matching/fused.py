"""Units that together hold the rows of one matrix: query, key and value, gates, parts of an MLP."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from padiff.align.matching import names
from padiff.align.matching.parameter_units import Unit, grouped
from padiff.model import equivalents

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
    ways = ((True, _families_by_number), (True, _siblings), (True, _cousins), (False, _counted), (False, _siblings))
    counted = False
    for named, families in ways:
        if counted:
            break  # the units between numbered ones form no bundle
        for family in families([unit for unit in fitting if unit not in used]):
            ordered = _have_run(family, ran)
            unused = sorted(family, key=lambda unit: (ran[unit.path], unit.defined)) if ordered else list(family)
            while (bundle := _named(unused, rows) if named else _consecutive(unused, rows, ordered)) is not None:
                bundled.append(bundle)
                used.update(bundle.parts)
                counted = families is _counted
                unused = [unit for unit in unused if unit not in used]
    return bundled


def _have_run(family: Sequence[Unit], ran: Mapping[str, int]) -> bool:
    return bool(ran) and all(unit.path in ran for unit in family)


def cells_beside(units: Sequence[Unit], others: Sequence[Unit]) -> list[tuple[tuple[Unit, ...], tuple[Unit, ...]]]:
    """Return recurrent cells, as (input's, state's) unit, with units of the other side that hold both matrices side by
    side.

    A cell of the kind ``gate(concat(x, h))`` has one such matrix, or one for each gate.
    """
    cells: dict[str, dict[str, Unit]] = {}
    for unit in units:
        which = names.role(unit.name, "recurrent part")
        if which and len(unit.matrix) == 2:
            cells.setdefault(names.without_recurrent_part(unit.name), {})[which] = unit
    matched: list[tuple[tuple[Unit, ...], tuple[Unit, ...]]] = []
    unused = [unit for unit in others if len(unit.matrix) == 2 and not unit.optional]
    for cell in cells.values():
        if cell.keys() != {"ih", "hh"}:
            continue
        (rows, inputs), (_, hidden) = cell["ih"].matrix, cell["hh"].matrix
        wide = [unit for unit in unused if unit.matrix[1] == inputs + hidden]
        gates = [unit for unit in wide if unit.matrix[0] == rows][:1] or _gates(wide, rows)
        if gates:
            unused = [unit for unit in unused if unit not in gates]
            matched.append(((cell["ih"], cell["hh"]), tuple(gates)))
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


def _families_by_number(units: Sequence[Unit]) -> list[list[Unit]]:
    """Return families of units whose names have the same numbers: ``q.3``, ``k.3`` and ``v.3`` of lists by kind."""
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
