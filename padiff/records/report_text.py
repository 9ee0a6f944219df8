"""Report as text: similar diffs in one row, coverage in words, the layer tree."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from padiff.records.both import Both
from padiff.records.compared import Diff, Figure, Grade, Rule, factor_text, figures_text
from padiff.records.first_diff import Standing
from padiff.records.recorded import ROOT, STAGES, Layer, is_below
from padiff.records.report_data import Models, ReportData
from padiff.records.traces import LOOP
from padiff.sketches.sketch import ELEMENTS, SPREAD
from padiff.system.language import translated
from padiff.system.terminal import printable, printable_lines

#: Marker of a layer.
HERE = "    <---  *** HERE ***"
# Maximum number of lines; a longer tree is cut to the surroundings of the mark.
_MOST_LINES = 120
# Number of layers shown before and after a layer, in addition to the layers that contain it.
_NEAR = 3
_GAP = "    ..."
_BETWEEN = 4


def tree_text(layers: Sequence[Layer], marked: str | None = None) -> str:
    """Return the tree as text, a line for each layer; `marked` is the path of the layer to mark."""
    lines = [_line(layers, position, layer.path == marked) for position, layer in enumerate(layers)]
    place = next((k for k, layer in enumerate(layers) if layer.path == marked), 0)
    start = max(0, min(place - _MOST_LINES // 2, len(lines) - _MOST_LINES))
    shown = lines[start : start + _MOST_LINES]
    if start:
        shown.insert(0, f"    ... {start} layers above")
    if start + _MOST_LINES < len(lines):
        shown.append(f"    ... {len(lines) - start - _MOST_LINES} layers below")
    return "\n".join(shown)


def around_lines(layers: Sequence[Layer], marked: str) -> list[str]:
    """Return the lines of a tree near a layer: the layers that contain it, and a few before and after it."""
    place = next((k for k, layer in enumerate(layers) if layer.path == marked), None)
    if place is None:
        return []
    shown = [k for k, layer in enumerate(layers) if abs(k - place) <= _NEAR or is_below(marked, layer.path) or not k]
    lines: list[str] = []
    before = -1
    for k in shown:
        lines += [_GAP] if k > before + 1 else []
        lines.append(_line(layers, k, k == place))
        before = k
    return lines + ([_GAP] if before + 1 < len(layers) else [])


def place_lines(
    models: Models, names: Both[str], paths: Both[str | None], stacks: Both[tuple[str, ...]], width: int
) -> list[str]:
    """Return both trees near two layers with the lines of code that call them; empty if neither layer exists.

    The trees are side by side if they fit into `width` columns, else one below the other.
    """
    sides = models.layers.zip(paths).map(lambda side: around_lines(side[0], side[1]) if side[1] else [])
    if not any(sides):
        return []
    heads = names.zip(models.frameworks).map(lambda side: f"    {printable(side[0])} ({printable(side[1])})")
    left, right = heads.zip(sides).map(lambda side: [side[0], *(side[1] or ["    no such layer"])])
    # Side by side, the stacks of both trees start in the same row.
    height = max(len(left), len(right)) if any(stacks) else 0
    for side, stack in zip((left, right), stacks):
        side += [""] * (height - len(side)) + _stack_lines(stack)
    column = max(map(len, left)) + _BETWEEN
    if column + max(map(len, right)) > width:
        return [*left, "", *right]
    rows = max(len(left), len(right))
    padded = [*left, *[""] * (rows - len(left))], [*right, *[""] * (rows - len(right))]
    return [f"{reference.ljust(column)}{candidate}".rstrip() for reference, candidate in zip(*padded)]


def _stack_lines(stack: Sequence[str]) -> list[str]:
    heads = ["    called at ", *["         from "] * len(stack)]
    return [f"{head}{printable(line.replace(' ', ' in ', 1))}" for head, line in zip(heads, stack)]


def _line(layers: Sequence[Layer], position: int, here: bool) -> str:
    layer = layers[position]
    depth = 0 if layer.path == ROOT else layer.path.count(".") + 1
    name = f"({layer.path.rsplit('.', 1)[-1]}) " if depth else ""
    last = not any(_is_sibling(layer, later) for later in layers[position + 1 :])
    branch = "" if not depth else "     " * (depth - 1) + (" +--- " if last else " |--- ")
    return f"    {branch}{printable(name + layer.type)}{HERE if here else ''}"


def _is_sibling(layer: Layer, later: Layer) -> bool:
    above = layer.path.rpartition(".")[0]
    return later.path.rpartition(".")[0] == above and later.path != ROOT


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


# Maximum number of names that a line lists.
_NAMED = 8


def coverage_lines(report: ReportData) -> list[str]:
    """Return lines that say how much was compared, what was not, and further remarks."""
    coverage = report.coverage
    lines = [f"{coverage.compared} pairs, {coverage.share:.1%} of what was recorded in the compared steps"]
    if coverage.ranks:
        lines.append(coverage.ranks)
    if coverage.sketched:
        sampled = f"of tensors above {ELEMENTS:,} elements a sample was looked at"
        lines.append(f"{coverage.sketched} pairs judged from sketches: relative L2 to +- {SPREAD:.0%}, {sampled}")
    if coverage.bounded:
        lines.append(f"{coverage.bounded} of them from norms and means only: the layouts differ")
    if coverage.amplified is not None:
        lines.append(
            f"from step {coverage.amplified} on the runs are apart by rounding that the training "
            "amplified: ignore other differences from there on"
        )
    if coverage.zeros:
        lines.append(f"{zeros_text(coverage.zeros)}: {_first(coverage.zeros)}")
    named: list[tuple[str, Iterable[str]]] = [
        (f"layers of the {report.reference} run without a partner", coverage.reference_layers),
        (f"layers of the {report.candidate} run without a partner", coverage.candidate_layers),
        (
            f"containers of the {report.reference} run without a partner (another nesting)",
            coverage.reference_containers,
        ),
        (
            f"containers of the {report.candidate} run without a partner (another nesting)",
            coverage.candidate_containers,
        ),
        (f"compared as parts of another layer, but for their outputs ({report.reference})", coverage.reference_parts),
        (f"compared as parts of another layer, but for their outputs ({report.candidate})", coverage.candidate_parts),
        (f"parameters of the {report.reference} run that train and have no record", coverage.reference_unrecorded),
        (f"parameters of the {report.candidate} run that train and have no record", coverage.candidate_unrecorded),
        ("not recorded", coverage.left_out),
        (f"parameters of the {report.reference} run without a partner", coverage.reference_parameters),
        (f"parameters of the {report.candidate} run without a partner", coverage.candidate_parameters),
        (f"recorded on the {report.reference} run only", coverage.reference_sites),
        (f"recorded on the {report.candidate} run only", coverage.candidate_sites),
        ("copies of a model that are not recorded", coverage.copies),
        ("steps that lack a rank", coverage.lost),
        ("steps of the reference only", map(str, coverage.reference_steps)),
        ("steps of the candidate only", map(str, coverage.candidate_steps)),
        ("never called", coverage.uncalled),
        ("layers that are set differently", coverage.notes),
        ("close choices of a partner (`padiff map` shows them)", coverage.ambiguous),
        ("assumed, since neither names nor shapes tell", coverage.assumed),
        ("compared in the reference's layout", coverage.views),
        ("layers that end at another place of the computation, compared inside only", coverage.cut_elsewhere),
        ("kept as sketches, which do not show parts of a tensor: not compared", coverage.unmeasured),
    ]
    others = [difference.text for difference in report.settings_differ if difference.kind not in ("layer_setting",)]
    named.append(("set differently", others))
    named.append(("environments differ", report.environment))
    for title, names in named:
        listed = list(names)
        if listed:
            lines.append(f"{title}: {_first(listed)}")
    return printable_lines(lines)


def zeros_text(zeros: Collection[str]) -> str:
    """Return a sentence that counts the gradients accepted as noise and the tensors that this noise moved."""
    counts = [sum(f"/{stage}/" in site for site in zeros) for stage in ("grad", "weight")]
    counts.append(len(zeros) - sum(counts))
    text = f"{counts[0]} gradient{' is' if counts[0] == 1 else 's are'} rounding noise around zero"
    moved = [f"{n} {what}{'s' if n > 1 else ''}" for n, what in zip(counts[1:], ("weight", "output")) if n]
    return text + (f", and moved {' and '.join(moved)}" if moved else "")


def _first(names: Sequence[str]) -> str:
    if len(names) > _NAMED:
        names = with_ranges(names)
    more = f", and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def left_out_text(report: ReportData) -> str:
    coverage = report.coverage
    counts = [
        (len(coverage.reference_layers), "layer", "reference"),
        (len(coverage.candidate_layers), "layer", "candidate"),
        (len(coverage.reference_parameters), "parameter", "reference"),
        (len(coverage.candidate_parameters), "parameter", "candidate"),
        (len(coverage.reference_steps), "step", "reference"),
        (len(coverage.candidate_steps), "step", "candidate"),
    ]
    return ", ".join(f"{n} {what}{'s' if n > 1 else ''} of the {side}" for n, what, side in counts if n)


#: Relative L2 error above which a diff that passed indicates amplified rounding.
AMPLIFIED = 0.1

# Maximum number of diffs that a printed report lists, and of parameters that the verdict names.
_LISTED, _FEW = 10, 3
# Default rules, for which the report gives no reason beside the figures.
_PLAIN = frozenset({Rule.ROUNDING, Rule.SCALAR, Rule.EQUAL, Rule.TOLERANCE})
# Minimum number of diffs of one step and stage with one ratio that share a line.
_ALIKE = 3


def details_text(report: ReportData) -> str:
    """Return the details of a report as text: the table of stages, the failed diffs, both layer trees around the first
    one, the coverage, and the verdict with its evidence.
    """
    place = where_lines(report)
    figures = [*_table(report), *failed_lines(report), *floor_lines(report), *third_lines(report)]
    lines = [*figures, "", *place, *([""] if place else [])]
    spoken = " ".join(translated(each) for each in verdict_sentences(report))
    return "\n".join([*lines, *coverage_lines(report), "", spoken])


def where_lines(report: ReportData, width: int = 120) -> list[str]:
    """Return both layer trees around the first diff, and the lines of code that call it; empty if it is in no layer.

    Args:
        width: number of available columns.
    """
    first, models = report.first_diff, report.models
    if first is None or models is None:
        return []
    names, paths = Both(report.reference, report.candidate), Both(first.reference, first.candidate)
    return place_lines(models, names, paths, first.stacks, width)


def count_text(report: ReportData) -> str:
    """Return how many of the counted pairs differ, in words."""
    return f"{len(report.failed)} of {report.coverage.compared} pairs differ"


def verdict(report: ReportData) -> str:
    """Return the report as one sentence or a few."""
    return " ".join(verdict_sentences(report))


def verdict_sentences(report: ReportData) -> list[str]:
    """Return the sentences of the verdict."""
    if report.first_diff is not None:
        faults = (report.first_diff, *report.independent)
        return printable_lines(sentence for first in faults for sentence in first.sentences)
    return [printable(_without_fault(report))]


def _without_fault(report: ReportData) -> str:
    coverage = report.coverage
    if coverage.unrecorded:
        return _cannot_tell(report)
    steps = f"{len(coverage.steps)} step{'s' if len(coverage.steps) != 1 else ''}"
    text = f"The runs match: {coverage.compared} tensors in {steps} compared, {coverage.share:.0%} of what was recorded"
    if coverage.reference_steps or coverage.candidate_steps:
        text += " in them"
    worst = report.worst
    if worst is not None and worst.figures is not None:
        text += (
            f". Largest diff: relative L2 {worst.figures.rel_l2:.2g} (max |diff| {worst.figures.max_abs:.2g}) "
            f"at {worst.pair.anchor.site}, step {worst.pair.step}"
        )
    return " ".join([f"{text}.", *(f"{note}." for note in match_notes(report))])


def match_notes(report: ReportData) -> list[str]:
    """Return what to know of a match, as sentences without full stops: what was not compared, and other settings."""
    coverage, worst = report.coverage, report.worst
    notes = []
    not_compared = left_out_text(report)
    if not_compared:
        notes.append(f"Not compared: {not_compared}")
    notes += [f"{line[0].upper()}{line[1:]}" for line in (*coverage.copies, *coverage.lost)]
    if coverage.sketched:
        notes.append(f"{coverage.sketched} of the pairs were judged from sketches (relative L2 to +- {SPREAD:.0%})")
    if coverage.ranks:
        notes.append(f"{coverage.ranks[0].upper()}{coverage.ranks[1:]}")
    cut = len(coverage.cut_elsewhere)
    if cut == 1:
        notes.append("One layer ends at another place of the computation, and is compared inside only")
    elif cut:
        notes.append(f"{cut} layers end at other places of the computation, and are compared inside only")
    if coverage.amplified is not None:
        notes.append(
            f"From step {coverage.amplified} on outputs are more than a tenth of themselves apart, as this training "
            "amplifies rounding: smaller differences there say nothing, and the steps before give the answer"
        )
    elif worst is not None and worst.figures is not None and worst.figures.rel_l2 > AMPLIFIED:
        notes.append("This training amplifies rounding: its earlier steps give the sharper answer")
    if coverage.zeros:
        notes.append(zeros_text(coverage.zeros))
    if coverage.notes:
        more = f" (and {len(coverage.notes) - 2} more)" if len(coverage.notes) > 2 else ""
        notes.append(f"But layers are set differently: {'; '.join(coverage.notes[:2])}{more}")
    precision = next((setting for setting in report.settings_differ if setting.kind == "precision"), None)
    if precision is not None:
        notes.append(f"But {precision.said}: {precision.text}")
    return notes


def _cannot_tell(report: ReportData) -> str:
    coverage = report.coverage
    counts = []
    for side, names in (("reference", coverage.reference_unrecorded), ("candidate", coverage.candidate_unrecorded)):
        if names:
            more = ", ..." if len(names) > _FEW else ""
            counts.append(f"{len(names)} of the {side} ({', '.join(names[:_FEW])}{more})")
    text = f"Can't tell whether the runs match: parameters that train have no record, {' and '.join(counts)}."
    if coverage.left_out:
        text += f" Not recorded: {'; '.join(coverage.left_out)}."
    return text + (
        f" What was recorded agrees: {coverage.compared} tensors, {coverage.share:.0%} of what should have been."
    )


def floor_lines(report: ReportData) -> list[str]:
    """Return lines that compare diffs with their measured floors; empty without floors."""
    if not report.may_hold("floor"):
        return []
    worst: dict[str, Diff] = {}
    grades: Counter[Grade] = Counter()
    count = 0
    for diff in report.diffs:
        floors = diff.floors
        if diff.grade is not None:
            grades[diff.grade] += 1
        if floors is None:
            continue
        count += 1
        if diff.pair.stage not in worst or floors > (worst[diff.pair.stage].floors or 0.0):
            worst[diff.pair.stage] = diff
    if not count:
        return []
    summary = ", ".join(f"{grades[grade]} {grade}" for grade in Grade if grades[grade])
    lines = [f"{count} diffs have a measured floor, what rounding alone makes of them; all diffs: {summary}"]
    largest = (
        f"{stage} {worst[stage].floors:.3g} ({worst[stage].pair.anchor.site})" for stage in STAGES if stage in worst
    )
    return [*lines, f"largest in multiples of their floors: {', '.join(largest)}"]


def third_lines(report: ReportData) -> list[str]:
    """Return a line that says which side is farther from the step in float64; empty without a step in float64."""
    if not report.may_hold("third_reference"):
        return []
    count: Counter[str] = Counter()
    worst: dict[str, Diff] = {}
    code = ""
    for diff in report.diffs:
        third = diff.figures.third if diff.figures is not None else None
        if third is None:
            continue
        code, side = third.code, third.farther
        count[side] += 1
        before = worst[side].figures if side in worst else None
        if before is None or before.third is None or max(third.errors) > max(before.third.errors):
            worst[side] = diff
    if not count:
        return []
    parts = []
    for side in ("reference", "candidate"):
        far = worst.get(side)
        if far is not None and far.figures is not None and far.figures.third is not None:
            third = far.figures.third
            times = f"{third.times:.3g} times as far" if math.isfinite(third.times) else "the other is equal to it"
            parts.append(
                f"the {side} is farther from it in {count[side]}, by {max(third.errors):.2g} at most "
                f"({far.pair.anchor.site}, {times})"
            )
    total = sum(count.values())
    return [f"float64 ({code}'s code): of {total} tensors, {'; '.join(parts) or 'both sides are as far from it'}"]


def failed_lines(report: ReportData, at_most: int | None = _LISTED, say: Callable[[str], str] = str) -> list[str]:
    """Return a line for each failed diff, in causal order; many similar diffs share a line.

    Args:
        at_most: maximum number of lines, besides the one that counts the diffs; `None` lists each diff separately.
        say: returns a message in the reader's language.
    """
    if not report.failed:
        return []
    rows, hidden = failed_rows(report, at_most)
    follow = (", which follows" if hidden == 1 else ", which follow") if report.aftermath.marks else ""
    last = [f"  {say(f'... and {hidden} more{follow}')}"] if hidden else []
    rows = [Row(say(row.steps), row.place, say(row.what), say(row.mark)) for row in rows]
    return printable_lines([f"{count_text(report)}, in causal order:", *(row.line for row in rows), *last])


def failed_rows(report: ReportData, at_most: int | None = _LISTED) -> tuple[list[Row], int]:
    """Return the rows that `failed_lines` prints, and the number of diffs without a row."""
    if at_most is None:
        return [Marked(k, diff, _mark(report, diff)).row for k, diff in enumerate(report.failed)], 0
    alike: dict[tuple[Any, ...], list[Marked]] = {}
    for number, diff in enumerate(report.failed):
        alike.setdefault(_likeness(diff) or (number,), []).append(Marked(number, diff, _mark(report, diff)))
    counts = _counts(report) if any(len(group) >= _ALIKE for group in alike.values()) else Counter()
    shown: list[tuple[list[Marked], Row]] = []
    for key, group in alike.items():
        if len(group) >= _ALIKE:
            shown.append((group, _folded(key, group, counts[key[0], key[1]])))
        else:
            shown += [([marked], marked.row) for marked in group]
    if len(shown) <= at_most:
        return [row for _, row in shown], 0
    # The first row stays separate, with the diffs that have the same ratio.
    (first, row), *others = shown
    remainder = [marked for group, _ in others for marked in group]
    rows, hidden = summarize_rows(remainder, max(at_most - 1, 1), {first[0].diff.pair.stage})
    return [row, *rows], hidden


def _mark(report: ReportData, diff: Diff) -> str:
    """Return the relation of a diff to the first one in words; empty if the diff follows from it."""
    standing = report.standing(diff)
    return "" if standing is None or standing is Standing.FOLLOWS else str(standing)


def _likeness(diff: Diff) -> tuple[Any, ...] | None:
    """Return step, stage, and a phrase that similar diffs share; `None` if the diff has no such phrase."""
    pair = diff.pair
    if pair.anchor.layer == LOOP:
        return None
    if not pair.complete:
        return pair.step, pair.stage, f"are {diff.problem}"
    ratio = ratio_of(diff)
    return None if ratio is None else (pair.step, pair.stage, f"are {ratio:.3g} times the reference's")


def _counts(report: ReportData) -> Counter[tuple[int, str]]:
    return Counter((d.pair.step, d.pair.stage) for d in report.diffs if d.counts and d.pair.anchor.layer != LOOP)


def _folded(key: tuple[Any, ...], group: Sequence[Marked], count: int) -> Row:
    step, stage, what = key
    anchors = [marked.diff.pair.anchor for marked in group[:_FEW]]
    names = ", ".join(f"{anchor.layer}/{anchor.slot}" for anchor in anchors)
    mark = next((marked.mark for marked in group if marked.mark), "")
    return Row(f"step {step}", stage, f"{len(group)} of {count} {what} ({names}, ...)", mark)


def _table(report: ReportData) -> list[str]:
    """Return the table of stages as plain text."""
    rows = [["stage", "pairs", "differ", "rel L2", "allowed", "closest to its limit"]]
    table = stage_table(report)
    for row in table:
        figures = ["" if row[name] is None else f"{row[name]:.2g}" for name in ("worst", "limit")]
        rows.append([row["stage"], str(row["compared"]), str(row["differ"]), *figures, row["where"]])
    widths = [max(len(row[k]) for row in rows) for k in range(5)]
    lines = []
    for cells in rows:
        cells = [*map(printable, cells)]
        cells = [cells[0].ljust(widths[0]), *(cells[k].rjust(widths[k]) for k in range(1, 5)), cells[5]]
        lines.append("  ".join(cells).rstrip())
    return lines + limit_lines(table)


def limit_lines(table: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a line for each reason why stages are allowed more than rounding.

    Args:
        table: the rows of `stage_table`.
    """
    stages: dict[Rule, list[str]] = {}
    for row in table:
        if row["limit"] is not None and row["rule"] not in _PLAIN:
            stages.setdefault(row["rule"], []).append(row["stage"])
    return [f"allowed at {', '.join(names)}: {rule}" for rule, names in stages.items()]


def stage_table(report: ReportData) -> list[dict[str, Any]]:
    """Return a row for each stage: number of pairs, number that differ, the worst relative L2 error and its
    position.
    """
    rows = []
    for stage in STAGES:
        counts = report.stages.get(stage)
        if counts is None:
            continue
        row: dict[str, Any] = {"stage": stage, "compared": counts.compared, "differ": counts.differ}
        row |= {"alone": counts.alone, "worst": None, "limit": None, "where": "", "rule": None}
        worst = counts.worst
        if worst is not None and worst.figures is not None:
            judged = worst.judgement
            row["worst"] = worst.figures.rel_l2
            row["limit"] = judged.limit if judged is not None and judged.figure is Figure.REL_L2 else None
            row["rule"] = judged.rule if judged is not None else None
            row["where"] = f"{worst.pair.anchor.site}, step {worst.pair.step}"
        rows.append(row)
    return rows
