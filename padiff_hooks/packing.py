"""Conversion of diffs in JSON form to and from table rows: a site, a kind shared by many diffs, and figures."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from padiff.records import STAGES, Standing
from padiff_hooks.figure_codes import ABSENT, NO_FIGURE, ZERO, as_json, numbers_of

#: Number of diffs of a step that are stored unpacked: the first diff, further faults, then the diffs furthest beyond
#: their limits.
WHOLE = 10
#: The figures of a row, in their order.
FIGURES = ("max_abs", "max_rel", "mean_abs", "rel_l2", "l2.reference", "l2.candidate", "judged.value", "judged.limit")
KIND = ("passed", "grade", "standing", "problem", "basis", "spread")
REASON = ("figure", "rule", "allowed_because")
# Order in which failed diffs are reported.
_TELLING = [item.name.lower() for item in (Standing.FIRST, Standing.NEW, Standing.AGAIN, Standing.FOLLOWS)]


def site_to_json(site: tuple[Any, ...]) -> list[Any]:
    """Return the short JSON form of a site: the stage's number, then both names without the stage.

    The candidate's name is 0 if it equals the reference's.
    """
    stage, reference, candidate, *view = site
    short = [name and name.replace(f"/{stage}/", "//", 1) for name in (reference, candidate)]
    entry = [STAGES.index(stage), short[0], 0 if short[0] == short[1] else short[1], *view]
    return entry if site_from_json(entry) == site else list(site)  # a layer's name may be anything


def site_from_json(entry: Sequence[Any]) -> tuple[Any, ...]:
    """Return the site that `site_to_json` wrote."""
    number, reference, candidate, *view = entry
    if isinstance(number, str):
        return tuple(entry)
    stage = STAGES[number]
    sites = (reference, reference if candidate == 0 else candidate)
    return stage, *(name and str(name).replace("//", f"/{stage}/", 1) for name in sites), *view


def telling(diffs: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the indices of the diffs that are stored unpacked, in ascending order."""
    failed = [k for k, diff in enumerate(diffs) if not diff["passed"]]

    def rank(k: int) -> tuple[int, float]:
        standing = diffs[k].get("standing")
        return _TELLING.index(standing) if standing in _TELLING else len(_TELLING), -times_of(diffs[k])

    return sorted(sorted(failed, key=rank)[:WHOLE])


def times_of(diff: Mapping[str, Any]) -> float:
    """Return the ratio of a diff's judged value to its limit; NaN if nothing was judged.

    The ratio of a passed diff is at most 1, that of a failed diff at least 1; a failed diff without a ratio gets inf.
    """
    if "times" in diff:
        return _number(diff["times"])
    judged, passed = diff.get("judged"), diff["passed"]
    if judged is None or (diff.get("problem") and not passed):
        return math.nan if passed else math.inf
    value, limit = _number(judged["value"]), _number(judged["limit"])
    times = value / limit if limit else (0.0 if value == 0 else math.inf)
    return min(times, 1.0) if passed else math.inf if math.isnan(times) else max(times, 1.0)


def on_its_side(times: np.ndarray, passed: np.ndarray) -> np.ndarray:
    """Return the ratios to the limit, clipped to at most 1 for passed and at least 1 for failed diffs.

    Rounding to 16-bit codes may have moved a ratio to the other side of 1.
    """
    beyond = np.where(np.isnan(times), math.inf, np.maximum(times, 1.0))
    return np.where(passed, np.minimum(times, 1.0), beyond)


def times_or_equal(diff: Mapping[str, Any]) -> float | str:
    """Return the ratio of a diff to its limit for encoding, where 0 marks bit-equal diffs only.

    Returns `NO_FIGURE` if nothing was judged.
    """
    if diff.get("max_abs") == 0 and "basis" not in diff:
        return 0.0
    times = times_of(diff)
    if math.isnan(times):
        return NO_FIGURE
    return "inf" if math.isinf(times) else max(times, 1e-60)


def figure_of(diff: Mapping[str, Any], name: str) -> Any:
    """Return one of the `FIGURES` of a diff; `NO_FIGURE` if the diff does not have the figure."""
    outer, _, inner = name.partition(".")
    figure = diff.get(outer, NO_FIGURE)
    return figure.get(inner, NO_FIGURE) if inner and isinstance(figure, Mapping) else figure


def _number(value: float | str | None) -> float:
    return math.nan if value is None else float(value)


def diff_of(site: tuple[Any, ...], kind: Mapping[str, Any], figures: np.ndarray, folded: bool) -> dict[str, Any]:
    """Return a table row as a diff in the form of `to_json`.

    Args:
        site: site of the diff.
        kind: attributes that the diff shares with others.
        figures: codes of the figures.
        folded: True if the only figure is the ratio to the limit.
    """
    out = {"stage": site[0], "reference": site[1], "candidate": site[2], **kind}
    if len(site) > 3:
        out["view"] = site[3]
    values = [as_json(code, value) for code, value in zip(figures.tolist(), numbers_of(figures).tolist())]
    if folded:
        out.pop("judged", None)
        if figures[0] != ABSENT:
            out["times"] = values[0]
        if figures[0] == ZERO and "basis" not in kind:
            out["max_abs"] = 0.0
        return out
    for name, code, value in zip(FIGURES, figures, values):
        if code != ABSENT:
            outer, _, inner = name.partition(".")
            if inner:
                out[outer] = {**out.get(outer, {}), inner: value}
            else:
                out[outer] = value
    return out


def ranges(numbers: Sequence[int]) -> list[list[int]]:
    """Return numbers as half-open ranges ``[first, end]`` of consecutive numbers."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number:
            spans[-1][1] += 1
        else:
            spans.append([number, number + 1])
    return spans


def unpacked(packed: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the numbers of sites, the numbers of kinds, and the codes of figures with a row for each figure."""
    numbers = np.concatenate([np.arange(first, end) for first, end in packed["rows"]])
    content = packed["figures"] if "figures" in packed else packed["times"]
    table = np.frombuffer(base64.b64decode(content), "<u2").reshape(-1, len(numbers))
    return numbers, table[0], table[1:]
