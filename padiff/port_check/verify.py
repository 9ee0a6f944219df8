"""Verification of a receipt: the runs are compared again, with the receipt's options."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec

from padiff.port_check.receipt import Receipt, short
from padiff.records.report_data import DIFFER, MATCH

# Fields of a run that say where it lies and which recording it is: the same training may be recorded again elsewhere.
_REMARKS = ("padiff", "python", "reference.name", "reference.path", "reference.identity", "candidate.name",
            "candidate.path", "candidate.identity")  # fmt: skip
# Largest relative difference of two figures. Chosen: another numpy adds in another order.
_CLOSE = 1e-4


def changes(receipt: Receipt, now: Receipt) -> tuple[list[str], list[str]]:
    """Return each field that differs now, as sentences, and remarks: other versions, names and recordings.

    Args:
        receipt: the receipt.
        now: the result of the same check, made again.
    """
    changed: list[str] = []
    remarks: list[str] = []
    for name, before, after in _differences(msgspec.to_builtins(receipt), msgspec.to_builtins(now), ""):
        line = short(f"{name}: {_shown(before)} in the receipt, {_shown(after)} now")
        (remarks if name in _REMARKS else changed).append(line)
    return changed, remarks


def contradictions(receipt: Receipt) -> list[str]:
    """Return sentences on fields of a receipt that contradict each other."""
    rows = [check.outcome for check in receipt.checks]
    found = []
    if receipt.outcome == MATCH and set(rows) != {MATCH}:
        found.append("the outcome is match, but not that of every check")
    if receipt.outcome == DIFFER and DIFFER not in rows:
        found.append("the outcome is differ, but every check matches")
    for check in receipt.checks:
        if bool(check.differ) != (check.outcome == DIFFER) or check.equal > check.in_full:
            found.append(short(f"{check.name}: its outcome and its numbers contradict each other"))
    if receipt.coverage.tensors != sum(check.tensors for check in receipt.checks):
        found.append("the checks hold another number of tensors than were compared")
    return found


def _differences(before: Any, after: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name and both values of each field that differs."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys([*before, *after]):
            yield from _differences(before.get(key), after.get(key), f"{name}.{key}" if name else str(key))
    elif isinstance(before, list) and isinstance(after, list) and name == "checks" and len(before) == len(after):
        for one, other in zip(before, after):
            yield from _differences(one, other, f"check {one['name']}")
    elif isinstance(before, float) and isinstance(after, float):
        if not math.isclose(before, after, rel_tol=_CLOSE):
            yield name, before, after
    elif before != after:
        yield name, before, after


def _shown(value: Any) -> str:
    if isinstance(value, dict) and "text" in value:
        value = value["text"]
    if isinstance(value, str) and len(value) == 64 and " " not in value:
        value = f"{value[:12]}..."  # a digest
    text = "none" if value in (None, "") else f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
