"""What the frameworks are known to do differently when they are called alike: the table that `padiff atlas` makes.

The table for the versions that padiff is tested with lies beside this file. Reading it needs neither framework.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from padiff.model import equivalents
from padiff.records import Both

#: Version of the table's JSON.
SCHEMA_VERSION = 1

_SHIPPED = Path(__file__).with_name("known.json")


@dataclass(frozen=True, slots=True)
class AtlasRow:
    """One operation, called alike in torch and paddle.

    Attributes:
        name: what is compared, in words.
        group: the group of probes it belongs to, e.g. ``losses``.
        operations: the layers and functions that it is about, in lower case, as either framework calls them.
        torch, paddle: the two calls.
        kind: ``same``, ``values``, ``shapes`` (or another number of outputs), or ``raises``.
        at: where they differ: the two values that are furthest apart, the two shapes, or ``runs`` and the error.
        rel_l2: the norm of the difference over torch's; infinity where torch's is zero or one side's is not finite.
            `None` without values.
        max_abs: the largest difference; likewise.
        ratio: paddle's over torch's where it is the same everywhere; else `None`.
        direction: ``+`` where paddle's are larger, ``-`` where they are smaller, ``±`` where both occur; or empty.
        mended, mended_torch: the call of the one that agrees with the other's as it stands; empty: none is given.
        mended_agrees, mended_torch_agrees: whether it does, as running it showed.
        formula: the definition in numpy, computed in float64; empty: none is given.
        agrees: which side agrees with it: ``torch``, ``paddle``, ``both``, ``neither``; empty without a formula.
        note: why they differ, in words.
    """

    name: str
    group: str
    operations: tuple[str, ...]
    torch: str
    paddle: str
    kind: str = "same"
    at: tuple[str, str] = ("", "")
    rel_l2: float | None = None
    max_abs: float | None = None
    ratio: float | None = None
    direction: str = ""
    mended: str = ""
    mended_agrees: bool = False
    mended_torch: str = ""
    mended_torch_agrees: bool = False
    formula: str = ""
    agrees: str = ""
    note: str = ""

    @property
    def differs(self) -> bool:
        return self.kind != "same"

    @property
    def wrong(self) -> bool:
        """Whether a call that should agree does not."""
        mended = (self.mended, self.mended_agrees), (self.mended_torch, self.mended_torch_agrees)
        return any(call and not agrees for call, agrees in mended)


@dataclass(frozen=True, slots=True)
class Atlas:
    """What all probes found.

    Attributes:
        versions: torch's and paddle's.
        rows: a row for each probe.
    """

    versions: Both[str]
    rows: tuple[AtlasRow, ...]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Atlas:
        """The table that JSON values hold."""
        rows = []
        for row in values["probes"]:
            numbers = {name: _number(row.get(name)) for name in ("rel_l2", "max_abs", "ratio")}
            rows.append(
                AtlasRow(
                    **row | numbers | {"operations": tuple(row["operations"]), "at": tuple(row.get("at", ("", "")))}
                )
            )
        return cls(Both(values["versions"]["torch"], values["versions"]["paddle"]), tuple(rows))

    def to_json(self) -> str:
        """The table as JSON, a row to a line; what says nothing is left out."""
        head = {
            "schema_version": SCHEMA_VERSION,
            "versions": {"torch": self.versions.reference, "paddle": self.versions.candidate},
            "differ": sum(row.differs for row in self.rows),
        }
        rows = ",\n".join(json.dumps(_plain(row), ensure_ascii=False) for row in self.rows)
        return f'{json.dumps(head)[:-1]}, "probes": [\n{rows}\n]}}'


@functools.cache
def shipped_atlas() -> Atlas:
    """The table for the versions that padiff is tested with."""
    return Atlas.of(json.loads(_SHIPPED.read_text(encoding="utf-8")))


def known_difference(operation: str) -> tuple[AtlasRow, ...]:
    """What torch and paddle are known to do differently in an operation; empty: nothing, or it was not probed.

    Args:
        operation: a layer's kind, a function or an optimizer, in either framework's spelling: ``BatchNorm2D``,
            ``avg_pool2d``, ``CrossEntropyLoss``, ``Adamax``. Where nothing is known of ``avg_pool3d``, say, what
            is known of the other dimensions is given.
    """
    known, key = _by_operation(), _key(operation)
    return known.get(key) or known.get(_any_dimension(key), ())


@functools.cache
def _by_operation() -> dict[str, tuple[AtlasRow, ...]]:
    found: dict[str, list[AtlasRow]] = {}
    for row in shipped_atlas().rows:
        if row.differs:
            keys = [_key(operation) for operation in row.operations]
            for key in dict.fromkeys([*keys, *map(_any_dimension, keys)]):
                found.setdefault(key, []).append(row)
    return {key: tuple(rows) for key, rows in found.items()}


def _key(operation: str) -> str:
    return equivalents.common_kind(operation.lower().replace("_", "")).removesuffix("loss")


def _any_dimension(key: str) -> str:
    return re.sub(r"[123]d$", "", key)


def _plain(row: AtlasRow) -> dict[str, Any]:
    usual = {field.name: field.default for field in fields(row) if field.name != "kind"}
    values = {name: value for name, value in asdict(row).items() if name not in usual or value != usual[name]}
    for name in ("rel_l2", "max_abs", "ratio"):
        if name in values:
            values[name] = "inf" if math.isinf(values[name]) else float(f"{values[name]:.6g}")
    return values


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
