"""Lines of steps in ``diffs.jsonl`` and pages: figures are packed, names and reasons are written once.

The most important diffs of a step are stored unpacked in ``diffs``. The other diffs are rows of a table in ``packed``.
A row has the number of a site, the number of a kind (attributes that many diffs share: passed, rule, ...), and figures
as 16-bit codes on a logarithmic scale, exact to 0.4 %. A line lists only the sites and kinds that are new in the file.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from padiff.errors import UsageError
from padiff.records import Report, Standing
from padiff.report_formats import first_to_json
from padiff_hooks.figure_codes import ZERO, codes, numbers_of
from padiff_hooks.packing import (
    FIGURES,
    KIND,
    REASON,
    diff_of,
    figure_of,
    on_its_side,
    ranges,
    site_from_json,
    site_to_json,
    telling,
    times_of,
    times_or_equal,
    unpacked,
)

#: Size of a file in bytes from which rows hold only the ratio to the limit, and no other figure. A ResNet-50 reaches
#: the size after some 10,000 steps; unpacked diffs do not change.
FOLDED_AFTER = 256 << 20
#: Size of a page in bytes up to which all diffs are unpacked, with all digits: some 80 steps of a ResNet-50.
PAGE_WHOLE = 32 << 20
# Approximate size of an unpacked diff in bytes.
_OF_A_DIFF = 400


@dataclass(frozen=True, slots=True)
class Rows:
    """Columns of a step's diffs for the heat map, an element for each diff.

    Attributes:
        sites: numbers of the sites in `StepLines.sites`.
        times: ratios to the limit; NaN if nothing was judged.
        passed: True if the diff is within its limit.
        equal: True if the tensors are bit-equal.
    """

    sites: np.ndarray
    times: np.ndarray
    passed: np.ndarray
    equal: np.ndarray


class StepLines:
    """Encoder and decoder of the lines of one file, which must be passed in order.

    Args:
        whole_bytes: size of the file in bytes up to which all diffs are unpacked.
        folded_after: size in bytes from which rows hold only the ratio to the limit.

    Attributes:
        sites: stage and names on both sides (and the candidate's layout) of each site, by number.
        size: size of the lines so far, in bytes.
    """

    def __init__(self, whole_bytes: int = 0, folded_after: int = FOLDED_AFTER) -> None:
        self._whole_bytes, self._folded_after = whole_bytes, folded_after
        self.sites: list[tuple[Any, ...]] = []
        self._kinds: list[dict[str, Any]] = []
        self._site_numbers: dict[tuple[Any, ...], int] = {}
        self._kind_numbers: dict[str, int] = {}
        self._settings: Any = None
        self.size = 0

    def line(self, report: Report, whole: Mapping[str, Any]) -> dict[str, Any]:
        """Return the line of one step.

        Args:
            report: report of the step.
            whole: the report in the form of `to_json`.
        """
        first, settings = whole["first_diff"], whole["settings_differ"]
        if first is not None and first["standing"] == Standing.FOLLOWS.name.lower():
            first = {**first, "picture": None}  # only the first diff keeps its picture
        line = {
            "step": report.coverage.steps[0],
            "passed": report.passed,
            "outcome": report.outcome,
            "first_diff": first,
            **({"independent": whole["independent"]} if whole["independent"] else {}),
            **({"explained": first_to_json(report.explained)} if report.explained is not None else {}),
            **({"settings_differ": settings} if settings != (self._settings or []) else {}),
            "coverage": whole["coverage"]["share"],
        }
        self._settings = settings
        return line | self.packed([diff for step in whole["steps"] for diff in step["diffs"]])

    def packed(self, diffs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the entries of a line for its step's diffs: ``diffs``, ``packed``, and new ``sites`` and ``kinds``."""
        sizes = len(self.sites), len(self._kinds)
        numbers = [self._site(diff) for diff in diffs]
        places = range(len(diffs)) if self.size < self._whole_bytes else telling(diffs)
        apart = set(places)
        rows = [k for k in range(len(diffs)) if k not in apart]
        line: dict[str, Any] = {"diffs": [diffs[k] for k in places]}
        if rows:
            kinds = [self._kind(diffs[k]) for k in rows]
            if self.size < self._folded_after:
                figures = [codes([figure_of(diffs[k], name) for k in rows]) for name in FIGURES]
                name = "figures"
            else:
                figures, name = [codes([times_or_equal(diffs[k]) for k in rows])], "times"
            table = np.array([kinds, *figures], "<u2")
            line["packed"] = {
                "rows": ranges([numbers[k] for k in rows]),
                "at": list(places),
                name: base64.b64encode(table.tobytes()).decode(),
            }
        for name, at, new in (
            ("sites", sizes[0], [site_to_json(site) for site in self.sites[sizes[0] :]]),
            ("kinds", sizes[1], self._kinds[sizes[1] :]),
        ):
            if new:
                line[name] = [at, new]
        return line

    def learn(self, line: Mapping[str, Any], size: int = 0) -> None:
        """Read the sites and kinds that a line of a file lists; a line of an older padiff lists them in its diffs.

        Args:
            line: the line.
            size: size of the line in bytes.
        """
        self.size += size
        self._settings = line.get("settings_differ", self._settings)
        at, sites = line.get("sites", (len(self.sites), ()))
        for number, site in enumerate(sites, at):
            self._put_site(site_from_json(site), number)
        at, kinds = line.get("kinds", (len(self._kinds), ()))
        for number, kind in enumerate(kinds, at):
            self._kinds[number:] = [kind]
            self._kind_numbers[json.dumps(kind, sort_keys=True)] = number
        for diff in line.get("diffs", ()):
            self._site(diff)

    def whole(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """Return a line with all diffs in the form of `to_json`; packed diffs have only the stored figures.

        The line must have been passed to `learn` before.
        """
        packed = line.get("packed")
        line_content = {key: value for key, value in line.items() if key not in ("packed", "sites", "kinds")}
        if packed is None:
            return line_content
        numbers, kinds, figures = unpacked(packed)
        folded = "figures" not in packed
        rows = iter(
            [
                diff_of(self.sites[number], self._kinds[kind], codes_of_row, folded)
                for number, kind, codes_of_row in zip(numbers, kinds, figures.T)
            ]
        )
        apart = dict(zip(packed["at"], line["diffs"]))
        total = len(numbers) + len(apart)
        return {**line_content, "diffs": [apart[k] if k in apart else next(rows) for k in range(total)]}

    def rows(self, line: Mapping[str, Any]) -> Rows:
        """Return the columns of a line's diffs, in the order of the step.

        The line must have been passed to `learn` or made by `line`.
        """
        diffs = line.get("diffs", ())
        sites = [self._site(diff) for diff in diffs]
        times = [times_of(diff) for diff in diffs]
        passed = [bool(diff["passed"]) for diff in diffs]
        equal = [diff.get("max_abs") == 0 and "basis" not in diff for diff in diffs]
        unpacked_rows = Rows(
            np.array(sites, int), np.array(times, float), np.array(passed, bool), np.array(equal, bool)
        )
        packed = line.get("packed")
        if packed is None:
            return unpacked_rows
        numbers, kinds, figures = unpacked(packed)
        passes = np.array([bool(kind.get("passed")) for kind in self._kinds], bool)[kinds]
        measured = np.array(["basis" not in kind for kind in self._kinds], bool)[kinds]
        judged = np.array(["judged" in kind for kind in self._kinds], bool)[kinds]
        faulty = np.array(["problem" in kind for kind in self._kinds], bool)[kinds] & ~passes
        if "figures" in packed:
            with np.errstate(all="ignore"):
                value, limit = numbers_of(figures[-2]), numbers_of(figures[-1])
                times_packed = np.where(limit == 0, np.where(value == 0, 0.0, np.inf), value / limit)
            times_packed = np.where(judged, times_packed, np.where(passes, np.nan, np.inf))
            times_packed[faulty] = np.inf
            alike = (figures[0] == ZERO) & measured
        else:
            times_packed, alike = numbers_of(figures[0]), (figures[0] == ZERO) & measured
        # "at" has the places of the unpacked diffs among all diffs of the step.
        packed_places = np.setdiff1d(np.arange(len(diffs) + len(numbers)), packed["at"])
        order = np.argsort(np.concatenate([np.array(packed["at"], int), packed_places]))
        return Rows(
            np.concatenate([unpacked_rows.sites, numbers]).astype(int)[order],
            np.concatenate([unpacked_rows.times, on_its_side(times_packed, passes)])[order],
            np.concatenate([unpacked_rows.passed, passes])[order],
            np.concatenate([unpacked_rows.equal, alike])[order],
        )

    def _site(self, diff: Mapping[str, Any]) -> int:
        view = (diff["view"],) if "view" in diff else ()
        site = (diff["stage"], diff["reference"], diff["candidate"], *view)
        number = self._site_numbers.get(site)
        if number is None:
            self._put_site(site, number := len(self.sites))
        return number

    def _put_site(self, site: tuple[Any, ...], number: int) -> None:
        self.sites[number:] = [site]
        self._site_numbers[site] = number

    def _kind(self, diff: Mapping[str, Any]) -> int:
        kind: dict[str, Any] = {name: diff[name] for name in KIND if name in diff}
        if "spread" in kind:
            kind["spread"] = round(kind["spread"], 2)
        if "judged" in diff:
            kind["judged"] = {name: diff["judged"][name] for name in REASON}
        text = json.dumps(kind, sort_keys=True)
        number = self._kind_numbers.setdefault(text, len(self._kinds))
        if number == len(self._kinds):
            self._kinds.append(kind)
        return number


def page_lines(steps: Iterable[Mapping[str, Any]], whole_bytes: int = PAGE_WHOLE) -> Iterator[dict[str, Any]]:
    """Yield the lines of a page for the steps of a report in the form of `to_json`; long runs get packed lines."""
    lines = StepLines(whole_bytes)
    for step in steps:
        line = {**step, **lines.packed(step["diffs"])}
        packed = line.get("packed", {})
        lines.size += _OF_A_DIFF * len(line["diffs"]) + len(packed.get("figures", packed.get("times", "")))
        yield line


def read(logdir: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the steps of a log folder in the order of ``diffs.jsonl``, with all diffs in the form of `to_json`.

    The figures of the ten most important diffs of a step are exact, the others to 0.4 %. Beyond 256 MiB, the others
    have ``times`` (the ratio to the limit) instead of figures. Files of an older padiff are read unchanged.

    Raises:
        UsageError: the file does not exist, or a line is damaged.
    """
    path, lines = Path(logdir) / "diffs.jsonl", StepLines()
    try:
        with open(path, "rb") as file:
            for number, text in enumerate(file, start=1):
                if not text.endswith(b"\n"):
                    return  # the last line is being written
                line = parsed(text, path, number)
                with damage_named(path, number):
                    lines.learn(line)
                    full_line = lines.whole(line)
                if "step" in line:
                    yield full_line
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error}. Give the log folder of a comparison") from error


def parsed(text: bytes, path: Path, number: int) -> dict[str, Any]:
    """Return a parsed line of a ``diffs.jsonl``.

    Raises:
        UsageError: the line is damaged.
    """
    with damage_named(path, number):
        line: dict[str, Any] = json.loads(text)
        if not isinstance(line, dict) or not isinstance(line.get("step", 0), int):
            raise ValueError("no object with a step")
    return line


@contextlib.contextmanager
def damage_named(path: Path, number: int) -> Iterator[None]:
    """Turn errors in reading a line into a `UsageError` that names the file and the line.

    Raises:
        UsageError: the line is damaged.
    """
    try:
        yield
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise UsageError(f"{path}, line {number}, is damaged ({error}): give another log folder") from error
