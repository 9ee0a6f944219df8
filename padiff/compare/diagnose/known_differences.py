"""Known differences of torch and paddle, for calls with the same arguments: the table of `padiff atlas`.

The table for the versions that padiff is tested with is the file ``known.json`` next to this module. Reading the table
imports neither framework.
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
    """One operation, called with the same arguments in torch and paddle.

    Attributes:
        name: the compared behaviour, in words.
        group: the group of probes that the row belongs to, e.g. ``losses``.
        operations: the layers and functions that the row is about, in lower case, as either framework spells them.
        torch, paddle: the two calls.
        kind: ``same``, ``values``, ``shapes`` (also another number of outputs), or ``raises``.
        at: the difference: the two values that are furthest apart, the two shapes, or ``runs`` and the error.
        rel_l2: the norm of the difference over torch's norm; infinity if torch's norm is zero or one side is not
            finite; `None` without values.
        max_abs: the largest difference, with the same rules for infinity and `None`.
        ratio: paddle's values over torch's, if the ratio is the same everywhere; else `None`.
        direction: ``+`` if paddle's values are larger, ``-`` if they are smaller, ``±`` if both occur; or empty.
        mended, mended_torch: the call of paddle, or of torch, changed to agree with the other framework; empty if none
            is known.
        mended_agrees, mended_torch_agrees: True if running the changed call showed that the two agree.
        formula: the definition in numpy, computed in float64; empty if none is known.
        agrees: the side that agrees with the formula: ``torch``, ``paddle``, ``both``, ``neither``; empty without a
            formula.
        note: the reason of the difference, in words.
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
        """True if a changed call that should agree with the other framework does not."""
        mended = (self.mended, self.mended_agrees), (self.mended_torch, self.mended_torch_agrees)
        return any(call and not agrees for call, agrees in mended)


@dataclass(frozen=True, slots=True)
class Atlas:
    """The results of all probes.

    Attributes:
        versions: the versions of torch (reference) and paddle (candidate).
        rows: one row for each probe.
    """

    versions: Both[str]
    rows: tuple[AtlasRow, ...]

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Atlas:
        """Return the table that parsed JSON holds."""
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
        """Return the table as JSON, one row per line; fields with their default value are left out."""
        head = {
            "schema_version": SCHEMA_VERSION,
            "versions": {"torch": self.versions.reference, "paddle": self.versions.candidate},
            "differ": sum(row.differs for row in self.rows),
        }
        rows = ",\n".join(json.dumps(_plain(row), ensure_ascii=False) for row in self.rows)
        return f'{json.dumps(head)[:-1]}, "probes": [\n{rows}\n]}}'


@functools.cache
def shipped_atlas() -> Atlas:
    """Return the table for the versions that padiff is tested with."""
    return Atlas.from_json(json.loads(_SHIPPED.read_text(encoding="utf-8")))


def known_difference(operation: str) -> tuple[AtlasRow, ...]:
    """Return the rows on an operation in which torch and paddle differ; empty if they agree or it was not probed.

    Args:
        operation: a layer's kind, a function or an optimizer, in either framework's spelling: ``BatchNorm2D``,
            ``avg_pool2d``, ``CrossEntropyLoss``, ``RMSProp``. If nothing is known of ``avg_pool3d``, for example, the
            rows of the other dimensions are returned.
    """
    rows, key = _by_operation(), _key(operation)
    return rows.get(key) or rows.get(_any_dimension(key), ())


@functools.cache
def _by_operation() -> dict[str, tuple[AtlasRow, ...]]:
    rows_by_key: dict[str, list[AtlasRow]] = {}
    for row in shipped_atlas().rows:
        if row.differs:
            keys = [_key(operation) for operation in row.operations]
            for key in dict.fromkeys([*keys, *map(_any_dimension, keys)]):
                rows_by_key.setdefault(key, []).append(row)
    return {key: tuple(rows) for key, rows in rows_by_key.items()}


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
