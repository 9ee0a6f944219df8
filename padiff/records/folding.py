"""Many diffs in few rows: those that are alike are one."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from padiff.records.compared import Diff, figures_text

_NUMBER = re.compile(r"\d+")
# What the tensors of a stage are called, of one and of several.
_NOUNS = {
    "input": ("input", "inputs"),
    "weight": ("weight or buffer", "weights and buffers"),
    "forward": ("output", "outputs"),
    "loss": ("tensor of the loss", "tensors of the loss"),
    "backward": ("gradient of an output", "gradients of outputs"),
    "grad": ("gradient", "gradients"),
    "update": ("update", "updates"),
}
# How far the ratios of tensors may be apart that are the same multiple of the reference's.
_SAME_RATIO = 1e-3


@dataclass(frozen=True, slots=True)
class Marked:
    """A diff, and what is said of how it stands to the first one.

    Attributes:
        number: its place among those that are listed.
        diff: it.
        mark: what is said; may be empty.
    """

    number: int
    diff: Diff
    mark: str

    @property
    def row(self) -> Row:
        """It alone."""
        pair = self.diff.pair
        return Row(f"step {pair.step}", pair.anchor.site, figures_text(self.diff), self.mark)


class Row(NamedTuple):
    """What is said of one diff, or of several that are alike.

    Attributes:
        steps: of which steps.
        place: a site, of several with what they have in common; or a stage.
        what: how far they are apart.
        mark: how they stand to the first one; may be empty.
    """

    steps: str
    place: str
    what: str
    mark: str = ""

    @property
    def line(self) -> str:
        """All of it."""
        return f"  {self.steps}  {self.place}: {self.what}{f'  ({self.mark})' if self.mark else ''}"


def folded_rows(listed: Sequence[Marked], at_most: int, known: Collection[str] = ()) -> tuple[list[Row], int]:
    """So many rows at most for all of them, in causal order; and how many are in none.

    They are a row for each stage, and those that come first are taken apart as far as there are rows left: by their
    place in the models, where numbers in names stand for each other.

    Args:
        known: stages of which something is said already.
    """
    groups = _grouped(listed, lambda one: (one.diff.pair.stage, one.mark))
    left_out = 0
    if len(groups) > at_most:
        groups.sort(key=lambda group: not group[0].mark)  # what does not follow from the first one is listed first
        left_out = sum(map(len, groups[at_most - 1 :]))
        groups = groups[: at_most - 1]
        groups.sort(key=lambda group: group[0].number)
    spare = at_most - len(groups) - bool(left_out)
    rows: list[Row] = []
    stages = set(known)
    for group in groups:
        alike = _grouped(group, lambda one: _masked(one.diff))
        if len(group) - 1 <= spare:
            alike = [[one] for one in group]
        parts, rest = alike, []
        if len(alike) - 1 > spare:
            parts, rest = alike[:spare], [one for some in alike[spare:] for one in some]
        spare -= len(parts) + bool(rest) - 1
        rows += [_of_one_kind(some) for some in parts]
        stage = group[0].diff.pair.stage
        if rest:
            rows.append(_of_one_stage(rest, more=stage in stages or bool(parts)))
        stages.add(stage)
    return rows, left_out


def _grouped(listed: Iterable[Marked], key: Callable[[Marked], Hashable]) -> list[list[Marked]]:
    found: dict[Hashable, list[Marked]] = {}
    for one in listed:
        found.setdefault(key(one), []).append(one)
    return list(found.values())


def _masked(diff: Diff) -> tuple[str, str]:
    """Where a tensor is, without the numbers in the layer's path."""
    return _NUMBER.sub("#", diff.pair.anchor.layer), diff.pair.anchor.slot


def _of_one_kind(some: Sequence[Marked]) -> Row:
    """Diffs whose layers' paths are equal but for numbers."""
    if len(some) == 1:
        return some[0].row
    anchor = some[0].diff.pair.anchor
    place = f"{_path([one.diff.pair.anchor.layer for one in some])}/{anchor.stage}/{anchor.slot}"
    return Row(_steps(some), place, f"{_counted(some)}, {_figures(some)}", some[0].mark)


def _of_one_stage(some: Sequence[Marked], more: bool) -> Row:
    paths = list(dict.fromkeys(one.diff.pair.anchor.layer for one in some))
    where = paths[0] if len(paths) == 1 else f"{len(paths)} layers, {paths[0]} to {paths[-1]}"
    stage = some[0].diff.pair.stage
    return Row(_steps(some), stage, f"{_counted(some, more)} ({where}), {_figures(some)}", some[0].mark)


def _steps(some: Sequence[Marked]) -> str:
    numbers = sorted({one.diff.pair.step for one in some})
    return f"step {numbers[0]}" if len(numbers) == 1 else f"steps {numbers[0]} to {numbers[-1]}"


def _counted(some: Sequence[Marked], more: bool = False) -> str:
    one, several = _NOUNS.get(some[0].diff.pair.stage, ("tensor", "tensors"))
    return f"{len(some):,} {'more ' if more else ''}{several if len(some) > 1 else one}"


def _path(paths: Iterable[str]) -> str:
    """Paths that are equal but for numbers as one, with the numbers that there are: ``layers.0-11.norm``."""
    different = list(dict.fromkeys(paths))
    columns = list(zip(*(map(int, _NUMBER.findall(path)) for path in different)))
    numbers = iter(columns)

    def of(found: re.Match[str]) -> str:
        values = sorted(set(next(numbers)))
        if len(values) == 1:
            return found[0]
        whole = values[-1] - values[0] == len(values) - 1
        return f"{values[0]}-{values[-1]}" if whole or len(values) > 4 else ",".join(map(str, values))

    return _NUMBER.sub(of, different[0])


def _figures(some: Sequence[Marked]) -> str:
    """How far they are apart, and what is wrong besides."""
    diffs = [one.diff for one in some]
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
            parts.append(f"up to {max(beyond):.3g} times what is allowed")
    if problems:
        text, count = problems.most_common(1)[0]
        parts.append(text if count == len(diffs) else f"of {count}: {text}")
    return ", ".join(parts) or "not measured"


def _ratio(diffs: Sequence[Diff]) -> float | None:
    """What all are times the reference's; `None` where they are not one multiple of it."""
    ratios = [ratio_of(diff) for diff in diffs]
    known = [ratio for ratio in ratios if ratio is not None]
    if len(known) < len(ratios) or max(known) - min(known) > _SAME_RATIO * max(known):
        return None
    return known[0]


def ratio_of(diff: Diff) -> float | None:
    """How many times the reference the candidate is; `None` where it is no multiple of it."""
    figures = diff.figures
    if figures is None or diff.problem or not figures.reference_l2 or not figures.candidate_l2:
        return None
    # A multiple of the reference is as far from it as the two norms are apart.
    if abs(figures.l2 - abs(figures.candidate_l2 - figures.reference_l2)) > _SAME_RATIO * figures.l2:
        return None
    return figures.candidate_l2 / figures.reference_l2
