"""The lines of steps, as ``diffs.jsonl`` and pages hold them: figures packed, names and reasons written once.

Of a step's diffs those that tell most stand whole in ``diffs``. The rest are rows of a table in ``packed``: a row is
the number of a site, the number of a kind (what many diffs have alike: passed, rule, ...), and figures as 16-bit codes
on a logarithmic scale, which are true to 0.4 %. A line names the sites and kinds that no line before it has named.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from padiff.errors import UsageError
from padiff.records import STAGES, Report, Standing
from padiff_hooks.figure_codes import ABSENT, NO_FIGURE, ZERO, as_json, codes, numbers_of

#: Diffs of a step that stand whole: the first diff, further faults, then those furthest beyond their limits.
WHOLE = 10
#: Bytes of a file after which rows hold how many times the allowed a diff is, and no other figure. A ResNet-50 comes
#: there after some 10,000 steps; what stands whole stays as it is.
FOLDED_AFTER = 256 << 20
#: Bytes of a page until which all diffs stand whole, with all of their digits: some 80 steps of a ResNet-50.
PAGE_WHOLE = 32 << 20
# Bytes that a diff takes which stands whole, about.
_OF_A_DIFF = 400
#: The figures of a row, in their order.
FIGURES = ("max_abs", "max_rel", "mean_abs", "rel_l2", "l2.reference", "l2.candidate", "judged.value", "judged.limit")
_KIND = ("passed", "standing", "problem", "basis", "spread")
_REASON = ("figure", "rule", "allowed_because")
# In which order diffs that did not pass are told.
_TELLING = [one.name.lower() for one in (Standing.FIRST, Standing.NEW, Standing.AGAIN, Standing.FOLLOWS)]


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
            **({"settings_differ": settings} if settings != (self._settings or []) else {}),
            "coverage": whole["coverage"]["share"],
        }
        self._settings = settings
        return line | self.packed([diff for step in whole["steps"] for diff in step["diffs"]])

    def packed(self, diffs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What a line holds of its step's diffs: ``diffs``, ``packed``, and the names that are new."""
        known = len(self.sites), len(self._kinds)
        numbers = [self._site(diff) for diff in diffs]
        places = range(len(diffs)) if self.size < self._whole_bytes else _telling(diffs)
        apart = set(places)
        rows = [k for k in range(len(diffs)) if k not in apart]
        line: dict[str, Any] = {"diffs": [diffs[k] for k in places]}
        if rows:
            kinds = [self._kind(diffs[k]) for k in rows]
            if self.size < self._folded_after:
                figures = [codes([_figure(diffs[k], name) for k in rows]) for name in FIGURES]
                name = "figures"
            else:
                figures, name = [codes([_times_or_equal(diffs[k]) for k in rows])], "times"
            table = np.array([kinds, *figures], "<u2")
            line["packed"] = {
                "rows": _ranges([numbers[k] for k in rows]),
                "at": list(places),
                name: base64.b64encode(table.tobytes()).decode(),
            }
        for name, at, new in (
            ("sites", known[0], [_site_to_json(site) for site in self.sites[known[0] :]]),
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
            self._put_site(_site_from_json(site), number)
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
        numbers, kinds, figures = _unpacked(packed)
        folded = "figures" not in packed
        rows = iter(
            [
                _diff(self.sites[number], self._kinds[kind], some, folded)
                for number, kind, some in zip(numbers, kinds, figures.T)
            ]
        )
        apart = dict(zip(packed["at"], line["diffs"]))
        total = len(numbers) + len(apart)
        return {**rest, "diffs": [apart[k] if k in apart else next(rows) for k in range(total)]}

    def rows(self, line: Mapping[str, Any]) -> Rows:
        """What a picture needs of a line that was learnt, or made here."""
        told = line.get("diffs", ())
        sites = [self._site(diff) for diff in told]
        times = [_times(diff) for diff in told]
        passed = [bool(diff["passed"]) for diff in told]
        equal = [diff.get("max_abs") == 0 and "basis" not in diff for diff in told]
        made = Rows(np.array(sites, int), np.array(times, float), np.array(passed, bool), np.array(equal, bool))
        packed = line.get("packed")
        if packed is None:
            return made
        numbers, kinds, figures = _unpacked(packed)
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
        rest = np.setdiff1d(np.arange(len(told) + len(numbers)), packed["at"])
        order = np.argsort(np.concatenate([np.array(packed["at"], int), rest]))
        return Rows(
            np.concatenate([made.sites, numbers]).astype(int)[order],
            np.concatenate([made.times, _on_its_side(found, passes)])[order],
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
        kind: dict[str, Any] = {name: diff[name] for name in _KIND if name in diff}
        if "spread" in kind:
            kind["spread"] = round(kind["spread"], 2)
        if "judged" in diff:
            kind["judged"] = {name: diff["judged"][name] for name in _REASON}
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
                with told_damage(path, number):
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
    with told_damage(path, number):
        line: dict[str, Any] = json.loads(text)
        if not isinstance(line, dict) or not isinstance(line.get("step", 0), int):
            raise ValueError("no object with a step")
    return line


@contextlib.contextmanager
def told_damage(path: Path, number: int) -> Iterator[None]:
    """Say of an error in reading a line which one it is.

    Raises:
        UsageError: instead of the error.
    """
    try:
        yield
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise UsageError(f"{path}, line {number}, is damaged ({error}): give another log folder") from error


def _site_to_json(site: tuple[Any, ...]) -> list[Any]:
    """A site in a line: the stage's number, the sites without it, 0 for a candidate's that is the reference's."""
    stage, reference, candidate, *view = site
    short = [name and name.replace(f"/{stage}/", "//", 1) for name in (reference, candidate)]
    entry = [STAGES.index(stage), short[0], 0 if short[0] == short[1] else short[1], *view]
    return entry if _site_from_json(entry) == site else list(site)  # a layer's name may be anything


def _site_from_json(entry: Sequence[Any]) -> tuple[Any, ...]:
    number, reference, candidate, *view = entry
    if isinstance(number, str):
        return tuple(entry)
    stage = STAGES[number]
    sites = (reference, reference if candidate == 0 else candidate)
    return stage, *(name and str(name).replace("//", f"/{stage}/", 1) for name in sites), *view


def _telling(diffs: Sequence[Mapping[str, Any]]) -> list[int]:
    """Places of the diffs that stand whole."""
    failed = [k for k, diff in enumerate(diffs) if not diff["passed"]]

    def rank(k: int) -> tuple[int, float]:
        standing = diffs[k].get("standing")
        return _TELLING.index(standing) if standing in _TELLING else len(_TELLING), -_times(diffs[k])

    return sorted(sorted(failed, key=rank)[:WHOLE])


def _times(diff: Mapping[str, Any]) -> float:
    """How many times the allowed a diff is; NaN where nothing was judged."""
    if "times" in diff:
        return _number(diff["times"])
    judged, passed = diff.get("judged"), diff["passed"]
    if judged is None or (diff.get("problem") and not passed):
        return math.nan if passed else math.inf
    value, limit = _number(judged["value"]), _number(judged["limit"])
    times = value / limit if limit else (0.0 if value == 0 else math.inf)
    return min(times, 1.0) if passed else math.inf if math.isnan(times) else max(times, 1.0)


def _on_its_side(times: np.ndarray, passed: np.ndarray) -> np.ndarray:
    """What passed is within its limit, whatever rounding made of its figures."""
    beyond = np.where(np.isnan(times), math.inf, np.maximum(times, 1.0))
    return np.where(passed, np.minimum(times, 1.0), beyond)


def _times_or_equal(diff: Mapping[str, Any]) -> float | str:
    if diff.get("max_abs") == 0 and "basis" not in diff:
        return 0.0
    times = _times(diff)
    if math.isnan(times):
        return NO_FIGURE
    return "inf" if math.isinf(times) else max(times, 1e-60)


def _figure(diff: Mapping[str, Any], name: str) -> Any:
    outer, _, inner = name.partition(".")
    found = diff.get(outer, NO_FIGURE)
    return found.get(inner, NO_FIGURE) if inner and isinstance(found, Mapping) else found


def _number(value: float | str | None) -> float:
    return math.nan if value is None else float(value)


def _diff(site: tuple[Any, ...], kind: Mapping[str, Any], figures: np.ndarray, folded: bool) -> dict[str, Any]:
    """A row as `to_json` writes a diff."""
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


def _ranges(numbers: Sequence[int]) -> list[list[int]]:
    """Numbers as ranges of consecutive ones: the first of each, and the one after the last."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1][1] += 1
        else:
            found.append([number, number + 1])
    return found


def _unpacked(packed: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers of sites and kinds, and codes of figures, a row of the last for each figure."""
    numbers = np.concatenate([np.arange(first, end) for first, end in packed["rows"]])
    content = packed["figures"] if "figures" in packed else packed["times"]
    table = np.frombuffer(base64.b64decode(content), "<u2").reshape(-1, len(numbers))
    return numbers, table[0], table[1:]
