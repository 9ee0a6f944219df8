"""The first diff of two runs: its extent, picture and recomputation, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from padiff.records.both import SIDES, Both
from padiff.records.compared import UNKNOWN_LINES, Cause, Diff, Figures, Pair, figures_text
from padiff.records.recorded import is_below
from padiff.system.frames import Frame


class Standing(Enum):
    """Relation of a failed diff to the first diff of its run; the value is the wording of reports."""

    FIRST = "first difference"
    #: May be a consequence of earlier diffs; the default wherever nothing shows otherwise.
    FOLLOWS = "follows"
    #: Does not follow, and may be the same fault at another place.
    AGAIN = "again"
    #: Does not follow, and is another fault.
    NEW = "new difference"

    def __str__(self) -> str:
        return self.value


#: Step and site of a diff.
Mark = tuple[int, str]


@dataclass(frozen=True, slots=True)
class Aftermath:
    """Relation of every failed diff of a run to the first one; `FOLLOWS` for every diff without an entry in `marks`.

    Attributes:
        marks: the exceptions to `FOLLOWS`, by step and site (for every rank that has such a site).
    """

    marks: Mapping[Mark, Standing] = field(default_factory=dict)

    def standing_of(self, diff: Diff) -> Standing | None:
        """Return the relation of a diff to the first one; `None` if the diff passed."""
        return None if diff.passed else self.marks.get(mark_of(diff), Standing.FOLLOWS)


def mark_of(diff: Diff) -> Mark:
    """Return the key of a diff within its run: step and site."""
    return diff.pair.step, diff.pair.anchor.site


#: Plural nouns for the tensors of each stage.
NOUNS = {
    "input": "inputs",
    "weight": "weights and buffers",
    "forward": "outputs",
    "loss": "losses",
    "backward": "activation gradients",
    "grad": "gradients",
    "update": "updates",
}
#: Stages in which each tensor is computed from those before it in the order.
CAUSAL = frozenset({"forward", "backward"})


@dataclass(frozen=True, slots=True)
class TensorExtent:
    """The part of a tensor that holds all of its error beyond the limit.

    Attributes:
        what: noun of the part: ``sample``, ``row``, ``column``, ``channel``, ``element``, or ``index of axis 2``.
        indices: the affected indices; empty for elements.
        count: number of affected indices.
        size: number of all indices.
    """

    what: str
    indices: tuple[int, ...]
    count: int
    size: int

    def __str__(self) -> str:
        if not self.indices:
            return f"only in {self.count:,} of its {self.size:,} {self.what}s"
        named = ", ".join(map(str, self.indices))
        noun, _, axis = self.what.partition(" ")
        plural = {"index": "indices"}.get(noun, f"{noun}s") if self.count > 1 else noun
        return f"only in {plural} {named}{f' {axis}' if axis else ''} of {self.size:,}"


@dataclass(frozen=True, slots=True)
class Extent:
    """Extent of a first diff: within its tensor, over its step, and over earlier steps.

    Attributes:
        stage: the diff's stage.
        within: the part of the tensor that differs; `None` if all of it differs, or if not known.
        differing, others: number of other tensors of the same stage and step that differ, and number of all others. For
            outputs and activation gradients only later ones count.
        only: the kinds of parameters that differ (``norms``, ``biases``, ``matrices``), if all parameters of these
            kinds differ and none of another kind.
        agreed: largest relative L2 error of the same tensor in the steps compared before; `None` without such a step.
        steps: number of the steps compared before.
    """

    stage: str
    within: TensorExtent | None = None
    differing: int = 0
    others: int = 0
    only: tuple[str, ...] = ()
    agreed: float | None = None
    steps: int = 0

    @property
    def text(self) -> str:
        """Return the extent in sentences; empty if nothing is known."""
        sentences = [f"It differs {self.within}."] if self.within is not None else []
        if self.others:
            sentences.append(f"{self._spread()}.")
        if self.agreed is not None:
            steps = "step" if self.steps == 1 else f"{self.steps:,} steps"
            sentences.append(
                f"In the {steps} compared before it agreed {f'to {self.agreed:.2g}' if self.agreed else 'exactly'}."
            )
        return " ".join(sentences)

    def _spread(self) -> str:
        """Return a clause that says which other tensors of the step differ."""
        noun, every = NOUNS[self.stage], self.differing == self.others
        if self.only:
            return f"{self.differing + 1:,} of {self.others + 1:,} {noun} differ: {' and '.join(self.only)}"
        if self.stage not in CAUSAL:
            return (
                f"{_all(self.others + 1) if every else f'{self.differing + 1:,} of {self.others + 1:,}'} {noun} differ"
            )
        if self.others == 1:
            return f"The {noun[:-1]} after it {'differs too' if every else 'does not differ'}"
        if not self.differing:
            return f"None of the {self.others:,} {noun} after it differs"
        return (
            f"{_all(self.others) if every else f'{self.differing:,} of the {self.others:,}'} {noun} after it differ too"
        )


def _all(count: int) -> str:
    return "Both" if count == 2 else f"All {count:,}"


@dataclass(frozen=True, slots=True)
class Element:
    """One element of a pair: its index and both values."""

    index: tuple[int, ...]
    values: Both[float]


@dataclass(frozen=True, slots=True)
class Picture:
    """Histograms, worst elements, and a small grid of the error of two tensors.

    Attributes:
        shape: shape of the reference's tensor.
        edges: edges of the bins of both histograms, one more than there are bins.
        counts: number of finite values of each side in each bin.
        worst: the elements with the largest differences, the worst first.
        error: the largest ``|c - r|`` in each cell of a small grid; its rows are ranges of one axis of the tensor.
        rows, columns: meaning of the grid's rows and columns, in words.
    """

    shape: tuple[int, ...]
    edges: tuple[float, ...]
    counts: Both[tuple[int, ...]]
    worst: tuple[Element, ...]
    error: tuple[tuple[float, ...], ...]
    rows: str
    columns: str


@dataclass(frozen=True, slots=True)
class Recomputed:
    """Agreement of both sides with float64, at a place that each side's own recorded values allow to recompute.

    Attributes:
        what: the recomputed object: ``layer``, ``loss``, ``update``, or ``weight`` (from the previous step and its
            update).
        rules: the formula of each side, from its own settings: ``LayerNorm``, ``cross_entropy``, ``AdamW``. Empty: the
            side runs code without a known formula, and was compared with the other side's formula.
        errors: relative L2 error of each side.
        wrong: the side that does not agree: ``reference`` or ``candidate``; empty: both agree, and the runs' settings
            differ.
    """

    what: str
    rules: Both[str]
    errors: Both[float]
    wrong: str = ""

    @property
    def text(self) -> str:
        """Return the result as a sentence."""
        if not self.wrong:
            return self._both()
        right, wrong = SIDES if self.wrong == SIDES.candidate else SIDES.swapped()
        near, far = _share(getattr(self.errors, right)), _share(getattr(self.errors, wrong))
        if self.what == "weight":
            return (
                f"The {right}'s weight is that of the step before with its update added (to {near}), the {wrong}'s is "
                f"off by {far}."
            )
        if self.what == "update":
            rules = getattr(self.rules, right), getattr(self.rules, wrong)
            return (
                f"The {right}'s update agrees with its own declared {rules[0]} in float64 to {near}, the {wrong} "
                f"departs from its own declared {rules[1]} by {far}."
            )
        if not all(self.rules):
            rule = self.rules.reference or self.rules.candidate
            return f"The {right} agrees with a {rule} in float64 to {near}, the {wrong} is off by {far}."
        return f"The {right} agrees with float64 to {near}, the {wrong} is off by {far}."

    def _both(self) -> str:
        near = " and ".join(map(_share, self.errors))
        if self.what == "update":
            return (
                f"Each side's update agrees with its own declared optimizer in float64 (to {near}): the runs are set "
                "differently."
            )
        return f"Both sides agree with float64 by their own settings (to {near}): the runs are set differently."


def _share(error: float) -> str:
    return f"{error:.2g}"


_NOTHING: Both[tuple[str, ...]] = Both((), ())


@dataclass(frozen=True, slots=True)
class FirstDiff:
    """The first diff of two runs in causal order: step, stage, execution order of the reference.

    Attributes:
        step, stage: position in the run.
        reference, candidate: paths of the two layers, `None` if there is no such layer.
        slot: the tensor of the layer, e.g. ``output.0``.
        diff: the measured diff; `None` if no tensor shows the fault.
        cause: the explanation; `None` if nothing indicates a cause.
        caveat: a sentence that says why this may be no diff at all; else empty.
        statement: a sentence that describes the fault if no tensor shows it.
        extent: the share of the tensor, the step and the run that differs; `None` if no tensor shows the fault.
        parameters: parameters that a difference in declared settings affects, by ``layer/slot``; empty: all.
        last_agreeing: for an output, the last layer before it whose output agrees, by the reference's path; empty if
            not known.
        inside: True if the inputs of the layer agree, so that the diff is caused inside the layer; `None` if not known.
            If False, the cause is in the code between the last layer that agrees and this one, and ``slot`` and
            ``diff`` are those of the differing input.
        call: the function call that causes the diff, in words; empty if not known.
        recomputed: agreement of either side with a computation in float64; `None` if not computable.
        standing: relation to the first diff of the run: it is the first, follows from it (in a later step's report), or
            is a separate fault.
        picture: distributions and worst elements of both tensors; `None` if they were not recorded in full.
        rank: number of the process; `None` if there is one process, or if the diff is in a tensor that all processes
            share.
        stacks: lines of each side's code that lead to the call, ``file:line function``, innermost first; empty if not
            recorded.
        tokens: the first token that differs, in words, if the tensor has a row for each token; else empty.
        code: the line of each side's code that makes the call of a function; `None` if not known.
    """

    step: int
    stage: str
    reference: str | None
    candidate: str | None
    slot: str = ""
    diff: Diff | None = None
    cause: Cause | None = None
    caveat: str = ""
    statement: str = ""
    extent: Extent | None = None
    parameters: Both[tuple[str, ...]] = _NOTHING
    last_agreeing: str = ""
    inside: bool | None = None
    call: str = ""
    recomputed: Recomputed | None = None
    standing: Standing = Standing.FIRST
    picture: Picture | None = None
    rank: int | None = None
    stacks: Both[tuple[str, ...]] = _NOTHING
    tokens: str = ""
    code: Both[Frame | None] = UNKNOWN_LINES

    @property
    def max_abs(self) -> float:
        """Return the largest ``|c - r|``; NaN if nothing was measured."""
        return self._figures.max_abs

    @property
    def max_rel(self) -> float:
        """Return the largest ``|c - r| / |r|``; NaN if nothing was measured."""
        return self._figures.max_rel

    @property
    def _figures(self) -> Figures:
        measured = self.diff is not None and self.diff.compared and self.diff.figures
        return measured or Figures(max_abs=math.nan, max_rel=math.nan)

    @property
    def message(self) -> str:
        """Return the whole description in words."""
        return " ".join(self.sentences)

    @property
    def sentences(self) -> list[str]:
        """Return the sentences of the whole description."""
        because = [] if self.cause is None else self.cause.sentences
        float64 = "" if self.recomputed is None else self.recomputed.text
        if self.standing is Standing.NEW:
            where = self.statement or f"at {self.where if self.recomputed is not None else self.place_text}"
            head = [f"A second fault, which does not follow from the first: {where}.", float64]
        elif self.diff is None:
            return [self.statement, *([f"Fix: {self.cause.fix}"] if self.cause is not None and self.cause.fix else [])]
        else:
            follows = self.standing is Standing.FOLLOWS
            subject = "This follows from the first diff: the runs differ" if follows else "The runs differ first"
            reach = "" if self.extent is None else self.extent.text
            head = [f"{subject} at {self.place_text}.", self._place, reach, float64]
            because = [*because, self.caveat]
        return [each for each in (*head, *because) if each]

    @property
    def place_text(self) -> str:
        """Return the position of the diff and its figures, in words."""
        return self.where if self.diff is None else f"{self.where}: {figures_text(self.diff)}"

    @property
    def where(self) -> str:
        """Return the position of the diff in words: step, rank, stage, layers, slot and call."""
        step = f"step {self.step}" + ("" if self.rank is None else f", rank {self.rank}")
        if self.diff is None:
            return f"{step}, stage {self.stage}"
        call = f" (call {self.diff.pair.anchor.call})" if self.diff.pair.anchor.call else ""
        return f"{step}, stage {self.stage}, {self._layers(self.diff.pair)}, {self.slot}{call}"

    @property
    def _place(self) -> str:
        """Return a sentence that locates the diff in the code; empty if not known."""
        last, layer = self.last_agreeing, self.reference
        call = f": {self.call}" if self.call else ""
        if last and layer is not None and is_below(last, layer):
            return f"It is in the code of `{layer}` after `{last}`, the last layer that agrees{call}."
        if self.inside is None and not call:
            return ""
        if self.inside:
            return f"It is inside of this layer, as its inputs agree{call}."
        if last:
            return f"It is in the code between `{last}`, the last layer that agrees, and `{layer}`{call}."
        return f"It is in the code before `{layer}`, the first layer that is called{call}."

    def _layers(self, pair: Pair) -> str:
        names = [
            f"{path} ({record.layer_type})" if record is not None and record.layer_type else str(path or "nothing")
            for path, record in zip((self.reference, self.candidate), pair.sides)
        ]
        return f"layer {names[0]} against {names[1]}"

    def __str__(self) -> str:
        return self.message
