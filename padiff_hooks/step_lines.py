"""The lines of steps, as ``diffs.jsonl`` and pages hold them: figures packed, names and reasons written once.

Of a step's diffs those that tell most stand whole in ``diffs``. The rest are rows of a table in ``packed``: a row is
the number of a site, the number of a kind (what many diffs have alike: passed, rule, ...), and figures as 16-bit codes
on a logarithmic scale, which are true to 0.4 %. A line names the sites and kinds that no line before it has named.
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

#: Bytes of a file after which rows hold how many times the allowed a diff is, and no other figure. A ResNet-50 comes
#: there after some 10,000 steps; what stands whole stays as it is.
FOLDED_AFTER = 256 << 20
#: Bytes of a page until which all diffs stand whole, with all of their digits: some 80 steps of a ResNet-50.
PAGE_WHOLE = 32 << 20
# Bytes that a diff takes which stands whole, about.
_OF_A_DIFF = 400


@dataclass(frozen=True, slots=True)
class Rows:
    """What a picture needs of a step's diffs, an element for each.

    Attributes:
        sites: their numbers in `StepLines.sites`.
        times: how many times the allowed; NaN where nothing was judged.
        passed, equal: whether it is within its limit, and bit-equal.
    """

    sites: np.ndarray
    times: np.ndarray
    passed: np.ndarray
    equal: np.ndarray


class StepLines:
    """Makes and reads the lines of one file, in their order.

    Args:
        whole_bytes: diffs stand whole until so many bytes are written.
        folded_after: from so many bytes on rows hold no figures.

    Attributes:
        sites: stage and sites of both sides (and the candidate's layout), by number.
        size: bytes of the lines so far.
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
        """The line of one step.

        Args:
            whole: the report as `to_json` writes it.
        """
        first, settings = whole["first_diff"], whole["settings_differ"]
        if first is not None and first["standing"] == Standing.FOLLOWS.name.lower():
            first = {**first, "picture": None}  # of the first diff alone
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
        """What a line holds of its step's diffs: ``diffs``, ``packed``, and the names that are new."""
        known = len(self.sites), len(self._kinds)
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
            ("sites", known[0], [site_to_json(site) for site in self.sites[known[0] :]]),
            ("kinds", known[1], self._kinds[known[1] :]),
        ):
            if new:
                line[name] = [at, new]
        return line

    def learn(self, line: Mapping[str, Any], size: int = 0) -> None:
        """Take over what a line of a file names; of an older padiff's, what its diffs are of."""
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
        """A line that was learnt, with all of its diffs as `to_json` writes them, as far as they were kept."""
        packed = line.get("packed")
        rest = {key: value for key, value in line.items() if key not in ("packed", "sites", "kinds")}
        if packed is None:
            return rest
        numbers, kinds, figures = unpacked(packed)
        folded = "figures" not in packed
        rows = iter(
            [
                diff_of(self.sites[number], self._kinds[kind], some, folded)
                for number, kind, some in zip(numbers, kinds, figures.T)
            ]
        )
        apart = dict(zip(packed["at"], line["diffs"]))
        total = len(numbers) + len(apart)
        return {**rest, "diffs": [apart[k] if k in apart else next(rows) for k in range(total)]}

    def rows(self, line: Mapping[str, Any]) -> Rows:
        """What a picture needs of a line that was learnt, or made here."""
        diffs = line.get("diffs", ())
        sites = [self._site(diff) for diff in diffs]
        times = [times_of(diff) for diff in diffs]
        passed = [bool(diff["passed"]) for diff in diffs]
        equal = [diff.get("max_abs") == 0 and "basis" not in diff for diff in diffs]
        made = Rows(np.array(sites, int), np.array(times, float), np.array(passed, bool), np.array(equal, bool))
        packed = line.get("packed")
        if packed is None:
            return made
        numbers, kinds, figures = unpacked(packed)
        passes = np.array([bool(kind.get("passed")) for kind in self._kinds], bool)[kinds]
        measured = np.array(["basis" not in kind for kind in self._kinds], bool)[kinds]
        judged = np.array(["judged" in kind for kind in self._kinds], bool)[kinds]
        faulty = np.array(["problem" in kind for kind in self._kinds], bool)[kinds] & ~passes
        if "figures" in packed:
            with np.errstate(all="ignore"):
                value, limit = numbers_of(figures[-2]), numbers_of(figures[-1])
                found = np.where(limit == 0, np.where(value == 0, 0.0, np.inf), value / limit)
            found = np.where(judged, found, np.where(passes, np.nan, np.inf))
            found[faulty] = np.inf
            alike = (figures[0] == ZERO) & measured
        else:
            found, alike = numbers_of(figures[0]), (figures[0] == ZERO) & measured
        # In the order of the step: a whole diff stands where it was among all.
        rest = np.setdiff1d(np.arange(len(diffs) + len(numbers)), packed["at"])
        order = np.argsort(np.concatenate([np.array(packed["at"], int), rest]))
        return Rows(
            np.concatenate([made.sites, numbers]).astype(int)[order],
            np.concatenate([made.times, on_its_side(found, passes)])[order],
            np.concatenate([made.passed, passes])[order],
            np.concatenate([made.equal, alike])[order],
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
    """The steps of a report as `to_json` writes them, as lines of a page: those of long runs are packed."""
    lines = StepLines(whole_bytes)
    for step in steps:
        line = {**step, **lines.packed(step["diffs"])}
        packed = line.get("packed", {})
        lines.size += _OF_A_DIFF * len(line["diffs"]) + len(packed.get("figures", packed.get("times", "")))
        yield line


def read(logdir: str | Path) -> Iterator[dict[str, Any]]:
    """The steps of a log folder, in the order of ``diffs.jsonl``, each with all of its diffs as `to_json` writes them.

    Of the ten that tell most of a step every figure is exact, of the others to 0.4 %; beyond 256 MiB these have
    ``times`` (how many times the allowed) in the place of figures. Files of an older padiff are read as they are.

    Raises:
        UsageError: there is no such file, or a line of it is damaged.
    """
    path, lines = Path(logdir) / "diffs.jsonl", StepLines()
    try:
        with open(path, "rb") as file:
            for number, text in enumerate(file, start=1):
                if not text.endswith(b"\n"):
                    return  # is being written
                line = parsed(text, path, number)
                with damage_named(path, number):
                    lines.learn(line)
                    whole = lines.whole(line)
                if "step" in line:
                    yield whole
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error}. Give the log folder of a comparison") from error


def parsed(text: bytes, path: Path, number: int) -> dict[str, Any]:
    """A line of a ``diffs.jsonl``.

    Raises:
        UsageError: it is damaged.
    """
    with damage_named(path, number):
        line: dict[str, Any] = json.loads(text)
        if not isinstance(line, dict) or not isinstance(line.get("step", 0), int):
            raise ValueError("no object with a step")
    return line


@contextlib.contextmanager
def damage_named(path: Path, number: int) -> Iterator[None]:
    """Say of an error in reading a line which one it is.

    Raises:
        UsageError: instead of the error.
    """
    try:
        yield
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise UsageError(f"{path}, line {number}, is damaged ({error}): give another log folder") from error
