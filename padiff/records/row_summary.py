"""Summary of many diffs in few rows: similar diffs share one row."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from padiff.records.compared import Diff, factor_text, figures_text

_NUMBER = re.compile(r"\d+")
# Nouns for the tensors of each stage, singular and plural.
NOUNS = {
    "input": ("input", "inputs"),
    "weight": ("weight or buffer", "weights and buffers"),
    "forward": ("output", "outputs"),
    "loss": ("tensor of the loss", "tensors of the loss"),
    "backward": ("gradient of an output", "gradients of outputs"),
    "grad": ("gradient", "gradients"),
    "update": ("update", "updates"),
}
# Relative tolerance within which two ratios to the reference count as equal.
_SAME_RATIO = 1e-3


@dataclass(frozen=True, slots=True)
class Marked:
    """A diff and the words for its relation to the first diff.

    Attributes:
        number: position among the listed diffs.
        diff: the diff.
        mark: words for the relation; may be empty.
    """

    number: int
    diff: Diff
    mark: str

    @property
    def row(self) -> Row:
        """Return a row for this diff alone."""
        pair = self.diff.pair
        return Row(f"step {pair.step}", pair.anchor.site, figures_text(self.diff), self.mark)


class Row(NamedTuple):
    """Text about one diff, or about several similar ones.

    Attributes:
        steps: the steps in words.
        place: a site; for several diffs, the common pattern of their sites, or a stage.
        what: the size of the differences, in words.
        mark: relation to the first diff, in words; may be empty.
    """

    steps: str
    place: str
    what: str
    mark: str = ""

    @property
    def line(self) -> str:
        """Return the row as one line of text."""
        return f"  {self.steps}  {self.place}: {self.what}{f'  ({self.mark})' if self.mark else ''}"


def summarize_rows(listed: Sequence[Marked], at_most: int, known: Collection[str] = ()) -> tuple[list[Row], int]:
    """Return at most `at_most` rows that describe all diffs, in causal order, and the number of diffs without a row.

    Each stage gets one row. While rows remain, the first stages are split into more rows, one for each group of layers
    whose paths are equal except for numbers.

    Args:
        known: stages that the caller's text mentions already.
    """
    groups = _grouped(listed, lambda one: (one.diff.pair.stage, one.mark))
    left_out = 0
    if len(groups) > at_most:
        groups.sort(key=lambda group: not group[0].mark)  # diffs that do not follow from the first one come first
        left_out = sum(map(len, groups[at_most - 1 :]))
        groups = groups[: at_most - 1]
        groups.sort(key=lambda group: group[0].number)
    spare = at_most - len(groups) - bool(left_out)
    rows: list[Row] = []
    stages = set(known)
    for group in groups:
        alike = _grouped(group, lambda one: _masked(one.diff))
        if len(group) - 1 <= spare:
            alike = [[marked] for marked in group]
        parts, remainder = alike, []
        if len(alike) - 1 > spare:
            parts, remainder = alike[:spare], [marked for part in alike[spare:] for marked in part]
        spare -= len(parts) + bool(remainder) - 1
        rows += [_of_one_kind(part) for part in parts]
        stage = group[0].diff.pair.stage
        if remainder:
            rows.append(_of_one_stage(remainder, more=stage in stages or bool(parts)))
        stages.add(stage)
    return rows, left_out


def _grouped(listed: Iterable[Marked], key: Callable[[Marked], Hashable]) -> list[list[Marked]]:
    groups: dict[Hashable, list[Marked]] = {}
    for marked in listed:
        groups.setdefault(key(marked), []).append(marked)
    return list(groups.values())


def _masked(diff: Diff) -> tuple[str, str]:
    """Return layer path and slot, with the numbers in the path masked."""
    return _NUMBER.sub("#", diff.pair.anchor.layer), diff.pair.anchor.slot


def _of_one_kind(group: Sequence[Marked]) -> Row:
    """Return the row of diffs whose layer paths are equal except for numbers."""
    if len(group) == 1:
        return group[0].row
    anchor = group[0].diff.pair.anchor
    place = f"{_path([marked.diff.pair.anchor.layer for marked in group])}/{anchor.stage}/{anchor.slot}"
    return Row(_steps(group), place, f"{_counted(group)}, {_figures(group)}", group[0].mark)


def _of_one_stage(group: Sequence[Marked], more: bool) -> Row:
    paths = list(dict.fromkeys(marked.diff.pair.anchor.layer for marked in group))
    where = paths[0] if len(paths) == 1 else f"{len(paths)} layers, {paths[0]} to {paths[-1]}"
    stage = group[0].diff.pair.stage
    return Row(_steps(group), stage, f"{_counted(group, more)} ({where}), {_figures(group)}", group[0].mark)


def _steps(group: Sequence[Marked]) -> str:
    numbers = sorted({marked.diff.pair.step for marked in group})
    return f"step {numbers[0]}" if len(numbers) == 1 else f"steps {numbers[0]} to {numbers[-1]}"


def _counted(group: Sequence[Marked], more: bool = False) -> str:
    singular, plural = NOUNS.get(group[0].diff.pair.stage, ("tensor", "tensors"))
    return f"{len(group):,} {'more ' if more else ''}{plural if len(group) > 1 else singular}"


def with_ranges(names: Iterable[str]) -> list[str]:
    """Return names, with one for those that are equal except for numbers: ``layers.0-11.norm``."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_NUMBER.sub("#", name), []).append(name)
    return [_path(group) for group in groups.values()]


def _path(paths: Iterable[str]) -> str:
    """Return one path for paths that are equal except for numbers, with ranges of the numbers: ``layers.0-11.norm``."""
    different = list(dict.fromkeys(paths))
    columns = list(zip(*(map(int, _NUMBER.findall(path)) for path in different)))
    numbers = iter(columns)

    def of(found: re.Match[str]) -> str:
        values = sorted(set(next(numbers)))
        if len(values) == 1:
            return found[0]
        contiguous = values[-1] - values[0] == len(values) - 1
        return f"{values[0]}-{values[-1]}" if contiguous or len(values) > 4 else ",".join(map(str, values))

    return _NUMBER.sub(of, different[0])


def _figures(group: Sequence[Marked]) -> str:
    """Return the range of errors and the most common problem, in words."""
    diffs = [marked.diff for marked in group]
    problems = Counter(str(diff.problem) for diff in diffs if diff.problem)
    measured = [
        diff for diff in diffs if not diff.problem and diff.figures is not None and math.isfinite(diff.figures.rel_l2)
    ]
    parts = []
    if measured:
        errors = [diff.figures.rel_l2 for diff in measured if diff.figures is not None]
        low, high = f"{min(errors):.2g}", f"{max(errors):.2g}"
        parts.append(f"relative L2 {low if low == high else f'{low} to {high}'}")
        ratio = _ratio(measured)
        if ratio is not None:
            parts.append(f"each {ratio:.3g} times the reference's")
        beyond = [diff.excess for diff in measured if math.isfinite(diff.excess)]
        if beyond:
            parts.append(f"up to {factor_text(max(beyond))} times the limit")
    if problems:
        text, count = problems.most_common(1)[0]
        parts.append(text if count == len(diffs) else f"of {count}: {text}")
    return ", ".join(parts) or "not measured"


def _ratio(diffs: Sequence[Diff]) -> float | None:
    """Return the common ratio of all candidates to their references; `None` if there is no common ratio."""
    ratios = [ratio_of(diff) for diff in diffs]
    finite = [ratio for ratio in ratios if ratio is not None]
    if len(finite) < len(ratios) or max(finite) - min(finite) > _SAME_RATIO * max(finite):
        return None
    return finite[0]


def ratio_of(diff: Diff) -> float | None:
    """Return the ratio of the candidate to the reference; `None` if the candidate is no multiple of the reference."""
    figures = diff.figures
    if figures is None or diff.problem or not figures.reference_l2 or not figures.candidate_l2:
        return None
    # The distance between a tensor and a multiple of it equals the difference of their norms.
    if abs(figures.l2 - abs(figures.candidate_l2 - figures.reference_l2)) > _SAME_RATIO * figures.l2:
        return None
    return figures.candidate_l2 / figures.reference_l2
