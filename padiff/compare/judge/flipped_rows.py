"""Judge a step in which the two sides chose differently, by scores that agree within rounding.

Rows (tokens, samples, places) that chose otherwise are left out of the figures; the other rows have to agree as always.
Where later layers mix rows, the others may differ by the share of the rows that chose otherwise. Tensors without rows
(gradients of parameters, losses, sketches) are held against the error that these rows cause.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from padiff.compare.choices import Flips, grid_of, queries_of, reached
from padiff.compare.judge import limits
from padiff.compare.judge.drift import RELATIVE
from padiff.compare.judge.flip_effects import Site, effect_of, unreached
from padiff.compare.judge.limits import SINGLE
from padiff.compare.measure.operands import Arrays, Sketches, operands
from padiff.compare.rearranged import choosing_blocks, row_shape, row_table
from padiff.errors import SketchOnlyError
from padiff.records import LOOP, Both, Diff, Figure, Problem, Rule, Step, Trace, TracedCall, is_below, loss_role
from padiff.records.pair_table import Key
from padiff.records.report_data import ChoiceCounts
from padiff.records.step_diffs import FIGURE_NUMBERS, FIGURES, RULE_NUMBERS, StepDiffs
from padiff.sketches.sketch import BUCKETS, sketch_of

#: Limit of the scores of all rows together, whose largest in each row are looked at, as a multiple of the limit of a
#: whole tensor. Chosen.
LARGEST = 3.0
#: Rows that each row which chose otherwise may take along: another row moves where an expert is full. Chosen.
ALONG = 1
#: Error of the other rows, as a multiple of the share of rows that chose otherwise times their error: layers that mix
#: rows hand on their mean. The same for gradients, of the error of the tensors that they are computed from. Chosen.
MIXED = 3.0
#: Largest relative error of a gradient or an update that other rows explain: a missing one differs by 1. Chosen.
_OF_PARAMETERS = 0.9
#: Multiple of the spread of the rows' factors from which on a common factor is none of chance. Chosen.
_COMMON = 3.0
#: Relative error of a row that chose otherwise: that of unrelated vectors of the same size.
WHOLLY = 1.5
# Limit of a relative error from which on a tensor is not judged: by half as much again it would pass. Chosen.
_BLIND = 0.5
# Error of a tensor that agrees in each row, as a multiple of that of one other row. Chosen.
_OF_ONE_ROW = 0.1
# Largest distance of places that one convolution mixes. Chosen: kernels are up to seven wide.
_REACH = 3
# Least number of rows that have a common factor.
_LEAST_ROWS = 4
# Least relative error at which two rows count as different ones: that of float32 sums.
_LEAST = 1e-5
# Largest number of pairs of rows that are compared to find the rows of one tensor in another.
_MOST = 1 << 22
# Rows of which at most one is equal within rounding to a row that is exchanged: where more are, labels in any order
# would seem to be.
_NEAR = 4


@dataclass(frozen=True)
class EarlierFlips:
    """What rows that chose otherwise leave to later steps.

    Attributes:
        grads: largest relative error of each gradient in a step with such rows: an optimizer remembers it.
        places: masks of the places that were chosen otherwise, by their number: a codebook that no optimizer updates
            follows the rows that chose its entries.
        traced: traces of the last step with calls of functions: they show what depends on a choice.
        last: the judged diffs of the step before, and the share of its rows that chose otherwise.
        calls: names of the calls that chose otherwise.
        exchanged: largest number of rows that were exchanged among equal ones.
    """

    grads: Mapping[Key, float] = field(default_factory=dict)
    places: Mapping[int, np.ndarray] = field(default_factory=dict)
    traced: Both[Trace] | None = None
    last: tuple[StepDiffs, float] | None = None
    calls: frozenset[tuple[str, int, str, int]] = frozenset()
    exchanged: int = 0

    def with_counts(self, counts: ChoiceCounts) -> EarlierFlips:
        """Return these with the rows that a step exchanged."""
        return replace(self, exchanged=max(self.exchanged, counts.flipped)) if ("", LOOP) in counts.calls else self

    def with_traces(self, traces: Both[Trace]) -> EarlierFlips:
        """Return these with the traces of a step, if they have calls of functions."""
        return replace(self, traced=traces) if all(trace.functions for trace in traces) else self

    def with_grads(self, diffs: StepDiffs) -> EarlierFlips:
        """Return these with the gradients of a step in which rows chose otherwise within rounding."""
        grads, relative = dict(self.grads), diffs.relative
        for place in diffs.known_places("grad").tolist():
            key, error = diffs.sites.keys[place], float(relative[place])
            if diffs.rows["passed"][place] and math.isfinite(error):
                grads[key] = max(grads.get(key, 0.0), error)
        return replace(self, grads=grads)

    def moved(self, diffs: StepDiffs) -> dict[int, np.ndarray]:
        """Return the masks of entries that weights of a step hold which differ."""
        counts = {
            diffs.sites.shapes[k][:1] for k in diffs.known_places("weight").tolist() if not diffs.rows["passed"][k]
        }
        return {number: mask for number, mask in self.places.items() if (number,) in counts}

    def with_places(self, flips: Sequence[Flips]) -> EarlierFlips:
        """Return these with the places that calls chose otherwise; not by another threshold, or another number."""
        flips = [each for each in flips if not each.shift and each.chosen.reference == each.chosen.candidate]
        places = dict(self.places)
        for mask in (each.places for each in flips if each.places is not None):
            places[len(mask)] = places.get(len(mask), False) | mask
        last = self.last if self.last is None else (self.last[0], min(1.0, sum(each.share for each in flips)))
        calls = self.calls | {each.calls.reference.numbered_name for each in flips}
        return replace(self, places=places, last=last, calls=calls)

    def is_independent(self, shape: Sequence[int]) -> bool:
        """Return True if a trace shows that what is written into a buffer does not depend on what was chosen."""
        if self.traced is None:
            return False
        trace = self.traced.reference
        positions = [k for k, call in enumerate(trace.calls) if call.chooses and call.numbered_name in self.calls]
        writes = [
            {operand.tensor for operand in call.inputs[1:]}
            for call in trace.calls
            if call.function == "copy" and call.inputs and trace.tensors[call.inputs[0].tensor].shape == tuple(shape)
        ]
        if not positions or not writes:
            return False
        after = reached(trace, positions)
        return not any(written & after for written in writes)

    def with_diffs(self, diffs: StepDiffs) -> EarlierFlips:
        """Return these with the judged diffs of a step."""
        return replace(self, last=(diffs, 0.0))


def judged_by_rows(
    diffs: StepDiffs,
    flips: Sequence[Flips],
    step: Step,
    again: Callable[[StepDiffs], StepDiffs],
    earlier: EarlierFlips = EarlierFlips(),
) -> tuple[StepDiffs, ChoiceCounts | None]:
    """Return the diffs, with those passed that rows which chose otherwise explain; and what these rows cost.

    Rows that chose otherwise raise the limits of the gradients behind them. So the step is judged again with their
    error left out, and gradients have to agree in the other rows within the limits that are found then.

    Args:
        diffs: the judged diffs of one rank of a step, in causal order.
        flips: the step's calls that chose otherwise, in the reference's order.
        step: the reference's step.
        again: judges the step with other figures.
        earlier: what earlier steps leave.
    """
    traced = earlier.traced.reference if earlier.traced is not None else None
    flips = [replace(each, effect=effect_of(each, step.trace, traced)) for each in flips]
    first = _Judge(diffs, flips, step, earlier)
    judged, counts = first.judged()
    without = first.without_rows() if counts is not None and judged.passed else None
    if without is None:
        return judged, counts
    second = _Judge(diffs, flips, step, earlier, again(without).rows["limit"])
    return second.judged()


def counted(diffs: StepDiffs, flips: Sequence[Flips], step: Step) -> ChoiceCounts | None:
    """Return the count of the rows that chose otherwise in a step whose diffs all passed; `None` if there are none."""
    flips = [each for each in flips if not each.alone]
    return _Judge(diffs, flips, step, EarlierFlips()).judged()[1]


class _Judge:
    """Judge of one step.

    Args:
        diffs, flips, step, earlier: see `judged_by_rows`.
        limits: limits of the rows that chose alike, of each diff; `None` if they are not known yet.
    """

    def __init__(
        self,
        diffs: StepDiffs,
        flips: Sequence[Flips],
        step: Step,
        earlier: EarlierFlips,
        limits: np.ndarray | None = None,
    ) -> None:
        self._diffs, self._rows, self._limits, self._earlier = diffs, diffs.rows.copy(), limits, earlier
        self._relative: list[float] = diffs.relative.tolist()
        #: Calls that chose otherwise, with the position of the first diff that they can explain.
        self._waiting = sorted(zip(_starts(diffs, flips, step), flips), key=lambda each: each[0])
        self._explained: list[Flips] = []
        #: Paths of the layers among whose parts some call chooses: of experts, that are called with the rows that
        #: chose them.
        self._blocks = choosing_blocks(step)
        #: Grids of the rows of all calls that choose.
        self._grids = _grids(step)
        #: Share of the rows that chose otherwise, the largest error of such rows, and that of whole tensors.
        self._share = self._touched = self._whole = 0.0
        #: The share as far as it changes outputs: rows that hold the same as others change gradients only.
        self._of_outputs = 0.0
        self._without = self._unjudged = 0
        #: Largest error of gradients whose rows are not known: all places of planes before them may have it.
        self._of_gradients = 0.0
        #: True once a call chose otherwise beyond rounding: choices excuse nothing that follows.
        self._faulty = False
        #: True once an input of the loss is made of other rows; the largest error of a scalar output.
        self._other_samples, self._whole_scalars = False, 0.0
        #: Share of the samples or labels of a loss that the loop chooses, of all and of those in its terms, squared
        #: errors of which tell how many of the chosen ones are others; and the error of gradients that pass at bounds.
        self._by_loop = self._in_terms = self._at_bounds = 0.0
        #: Rows that others took along, by the number of all rows.
        self._along: dict[int, np.ndarray | bool] = {}
        sites = diffs.sites
        #: Layers that both sides call, but for those that choose: these may hold the parameters of all experts.
        self._called = {sites.layers[place] for place in sites.places["forward"].tolist() if sites.complete[place]}
        self._called -= self._blocks
        self._samples = _samples(diffs, self._grids)
        self._mixes = any("batch" in kind.lower() and "norm" in kind.lower() for kind in diffs.sites.types)
        #: True if the step has convolutions; how far they have handed on the places that chose otherwise.
        self._convolves, self._reach = any("conv" in kind.lower() for kind in diffs.sites.types), 0
        #: Limit of the relative error of the last output that passed.
        self._limit = 0.0
        #: Tensors that no choice of this step reaches: flips excuse nothing there.
        traced = earlier.traced.reference if earlier.traced is not None else None
        self._unreached = unreached(traced, flips, _agreeing(diffs) if flips else ())

    def judged(self) -> tuple[StepDiffs, ChoiceCounts | None]:
        passed = self._rows["passed"].tolist()
        for place, stage in enumerate(self._diffs.sites.stages):
            while self._waiting and self._waiting[0][0] <= place:
                self._explain(self._waiting.pop(0)[1])
            relative = self._is_relative(place)
            if stage == "forward" and relative and passed[place]:
                self._limit = float(self._rows["limit"][place])
            if stage == "update" and not passed[place] and not self._diffs.sites.complete[place]:
                self._judge(place, stage, 0.0)
                continue
            if not passed[place] and stage in ("weight", "update"):
                self._judge_later(place, stage)
                passed[place] = bool(self._rows["passed"][place])
            if stage in ("input", "weight"):
                continue
            if not passed[place]:
                self._judge(place, stage, float(self._rows["limit"][place]) if relative else 0.0)
            elif self._limits is not None and stage == "backward" and relative:
                self._judge_again(place, float(self._limits[place]))
            if stage == "loss" and relative and self._rows["passed"][place] and self._by_loop:
                self._in_terms = max(self._in_terms, min(self._relative[place] ** 2, 1.0))
            if stage == "loss" and relative and self._rows["passed"][place]:
                self._judge_rest(place)
            if self._rows["passed"][place] and stage in ("forward", "backward") and relative:
                error = self._relative[place]
                self._whole = max(self._whole, error if math.isfinite(error) else 0.0)
                if stage == "forward" and not self._diffs.sites.shapes[place]:
                    self._whole_scalars = max(self._whole_scalars, error if math.isfinite(error) else 0.0)
        if not self._explained:
            return (self._diffs.judged(self._rows) if self._unjudged or self._without else self._diffs), None
        counted = [each for each in self._explained if not each.alone] or self._explained
        counts = ChoiceCounts(
            step=self._diffs.number or 0,
            calls=tuple((each.calls.reference.function, each.calls.reference.layer) for each in counted),
            flipped=sum(each.touching for each in counted),
            rows=sum(len(each.recorded) for each in counted),
            without=self._without,
            unjudged=self._unjudged,
            tied=sum(each.tied for each in counted),
            rules=next((each.rules for each in counted if each.tied), None),
        )
        return self._diffs.judged(self._rows), counts

    def _judge_later(self, place: int, stage: str) -> None:
        """Pass an update or a buffer that differs because of rows which chose otherwise in earlier steps."""
        limit, diff = float(self._rows["limit"][place]), self._diffs[place]
        if stage == "update":
            before = self._earlier.grads.get(self._diffs.sites.keys[place], 0.0)
            most = (
                max(limit, min(limits.OF_GRADIENT * MIXED * before, _OF_PARAMETERS))
                if self._is_relative(place)
                else 0.0
            )
            if self._relative[place] <= most:
                self._pass(place, (Figure.REL_L2, self._relative[place], most))
            return
        shape = self._diffs.sites.shapes[place]
        mask = self._earlier.places.get(shape[0] if shape else 0)
        if mask is None or not diff.pair.complete or diff.problem is not None:
            return
        values = _values(diff)
        if values is None or mask.all():
            most = self._follows(place, diff)
            if self._is_relative(place) and self._relative[place] <= most:
                self._pass(place, (Figure.REL_L2, self._relative[place], most))
            return
        rows = values.map(lambda array: _rows_of(array, -1, len(mask)))
        errors, sizes = np.linalg.norm(rows.candidate - rows.reference, axis=1), np.linalg.norm(rows.reference, axis=1)
        error = _relative(errors, sizes, ~mask)
        if error <= limit:
            self._pass(place, (Figure.OTHER_ROWS, error, limit))

    def _follows(self, place: int, diff: Diff) -> float:
        """Return the largest relative error of a buffer that followed rows which chose otherwise in the step before.

        They are a share of the rows which moved it, and moved the other side's buffer elsewhere.
        """
        if self._earlier.last is None:
            return 0.0
        before, share = self._earlier.last
        key = self._diffs.sites.keys[place]
        stages = {before.sites.stages[k]: k for k in range(len(before.sites.keys)) if before.sites.keys[k] == key}
        number = stages.get("weight")
        if number is None or "grad" in stages or self._earlier.is_independent(self._diffs.sites.shapes[place]):
            return 0.0
        sides = [operands(each.pair) for each in (diff, before[number])]
        if isinstance(sides[0], Problem) or isinstance(sides[1], Problem):
            return 0.0
        now, then = _comparable(sides[0], sides[1])
        if now is None or then is None or now.reference.shape != then.reference.shape:
            return 0.0
        error = np.linalg.norm(then.candidate - then.reference)
        moved = np.linalg.norm(now.reference - then.reference)
        return float((error + WHOLLY * math.sqrt(share) * moved) / (np.linalg.norm(now.reference) or math.inf))

    def without_rows(self) -> StepDiffs | None:
        """Return the diffs with the error of the rows that chose otherwise left out; `None` if no rows are known."""
        rows, changed = self._diffs.rows.copy(), False
        for place, stage in enumerate(self._diffs.sites.stages):
            if stage not in ("forward", "loss", "backward") or not self._is_relative(place) or not rows["l2"][place]:
                continue
            diff = self._diffs[place]
            known = self._known_rows(diff)
            if known is None and diff.pair.complete and diff.pair.anchor.source.sketched:
                rows["l2"][place], changed = 0.0, True  # not judged again
            if known is not None and known[2].any() and not known[2].all():
                sides = Both(*(side[~known[2]] for side in known[:2]))
                rows["l2"][place] = np.linalg.norm(sides.candidate - sides.reference)
                for side, values in zip(("reference_l2", "candidate_l2"), sides):
                    rows[side][place] = np.linalg.norm(values)
                rows["bulk_l2"][place] = math.nan
                changed = True
        diffs = self._diffs
        return StepDiffs(diffs.pairs, diffs.sites, rows, diffs.problems, diffs.odd) if changed else None

    def _judge_again(self, place: int, limit: float) -> None:
        """Fail a gradient that passed only within a limit that the rows which chose otherwise have raised."""
        if not self._explained or self._faulty:
            return
        if not self._diffs.sites.shapes[place]:
            dtype = self._diffs.sites.anchor_dtypes[place]
            most = max(limits.allowed(dtype, "backward"), MIXED * self._whole_scalars)
            if self._relative[place] > most:
                self._fail(place, Figure.REL_L2, self._relative[place], most)
            return
        known = self._known_rows(self._diffs[place]) if limit < self._relative[place] else None
        if known is None or not known[2].any() or known[2].all():
            return
        reference, candidate, mask = known
        errors, sizes = np.linalg.norm(candidate - reference, axis=1), np.linalg.norm(reference, axis=1)
        self._touched = max(self._touched, min(_relative(errors, sizes, mask), WHOLLY))
        error, most = _relative(errors, sizes, ~mask), max(limit, self._mixed)
        around = self._by_neighbours(place, self._diffs[place], most) if error > most and self._convolves else None
        error, most = around or (error, most)
        if error > most:
            self._fail(place, Figure.OTHER_ROWS, error, most)

    def _fail(self, place: int, figure: Figure, value: float, limit: float) -> None:
        self._rows["passed"][place], self._rows["rule"][place] = False, RULE_NUMBERS[Rule.CHOICES]
        self._rows["figure"][place] = FIGURE_NUMBERS[figure]
        self._rows["value"][place], self._rows["limit"][place] = value, limit

    def _known_rows(self, diff: Diff) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Return the rows of both sides, and the mask of those that chose otherwise or were taken along.

        `None` if the rows are not known.
        """
        if not diff.pair.complete or diff.problem is not None:
            return None
        values = _values(diff)
        backward = diff.pair.stage == "backward"
        rows = split_rows(values, self._explained, backward) if values is not None else None
        return None if rows is None else (*rows[0], rows[1] | self._along.get(len(rows[1]), False))

    @property
    def _mixed(self) -> float:
        """Return the relative error of rows with which layers have mixed those that chose otherwise."""
        return MIXED * self._share * self._touched

    def _is_relative(self, place: int) -> bool:
        return FIGURES[self._rows["figure"][place]] in RELATIVE

    def _explain(self, flips: Flips) -> None:
        limit = self._limit or limits.allowed(flips.dtype, "forward")
        if not within_rounding(flips, max(limit, self._mixed), self._explained):
            self._faulty = self._faulty or flips.calls.reference.chooses
            return
        if not flips.count and flips.shared is None:
            return
        self._leave_out(flips)

    def _leave_out(self, flips: Flips) -> None:
        """Leave the rows that chose otherwise out of what follows."""
        self._explained.append(flips)
        share = flips.share * flips.effect
        self._share = min(1.0, self._share + flips.share)
        self._of_outputs = min(1.0, self._of_outputs + share)
        if flips.calls.reference.layer == LOOP:
            self._by_loop = self._of_outputs
            if flips.few:  # a threshold picks the elements that the loss is the mean of
                self._in_terms = max(self._in_terms, min(flips.count / flips.few, 1.0))
        if not flips.calls.reference.chooses:
            self._at_bounds = max(self._at_bounds, WHOLLY * math.sqrt(flips.share))

    def _exchange(self, place: int, diff: Diff) -> bool:
        """Leave rows out that got each other's labels, or gradients, if the model's outputs agree as well that way.

        The code may choose where no call shows it: it matches outputs with targets, in numpy. Rows that are equal
        within rounding may then be taken for each other. Returns True if all that differ are such rows.
        """
        sides = _values(diff) if diff.pair.complete and diff.problem is None and not self._faulty else None
        if sides is None or not sides.reference.ndim:
            return False
        is_loss = diff.pair.stage == "loss"
        number = math.prod(sides.reference.shape[: 1 if is_loss else -1])
        rows = sides.map(lambda side: side.reshape(number, -1))
        least, known = math.inf if is_loss else limits.allowed(diff.pair.anchor.dtype, "backward"), False
        for k in self._outputs_beside(place):
            values = _values(self._diffs[k])
            if values is None or values.reference.size % number:
                continue
            known, outputs = True, values.map(lambda side: side.reshape(number, -1))
            limit = limits.allowed(self._diffs.sites.anchor_dtypes[k], "forward")
            exchanged = _exchanged(rows, outputs, least, limit)
            if exchanged is not None:
                self._leave_out(self._of_code(*exchanged, diff))
                return True
        differ = (rows.reference != rows.candidate).any(axis=1)
        ordered = rows.map(lambda side: np.sort(side[differ], axis=0))
        is_order = is_loss and np.array_equal(ordered.reference, ordered.candidate)
        if known or not is_order or differ.sum() > (1 + ALONG) * self._earlier.exchanged:
            return False
        # Of outputs that are sketched, in a step after such rows: a loss agrees if these are equal, as they have to be.
        others = self._of_code(differ, limits.allowed("float32", "forward"), diff)
        self._leave_out(others)
        self._share = min(1.0, self._share + ALONG * others.share)  # others have equal labels
        return True

    def _outputs_beside(self, place: int) -> list[int]:
        """Return the outputs of the model that a loss has beside its labels, or that a gradient belongs to."""
        sites = self._diffs.sites
        is_loss = sites.stages[place] == "loss"
        name = sites.slots[place].partition("()")[0] if is_loss else sites.slots[place]
        return [
            k
            for k in sites.places["loss" if is_loss else "forward"].tolist()
            if k != place and (sites.layers[k], sites.calls[k]) == (sites.layers[place], sites.calls[place])
            if (sites.slots[k].partition("()")[0] if is_loss else sites.slots[k]) == name and sites.shapes[k]
            if self._rows["passed"][k] and self._is_relative(k)
        ]

    def _of_code(self, mask: np.ndarray, effect: float, diff: Diff) -> Flips:
        """Return rows that chose otherwise, as code did of which no call is recorded."""
        shapes = [shape for shape in self._diffs.sites.shapes if math.prod(shape[:-1]) == len(mask) != shape[0]]
        grid = shapes[0][:-1] if shapes else mask.shape
        call, none = TracedCall(LOOP, 0), np.zeros(len(mask))
        return Flips(
            calls=Both(call, call),
            position=0,
            grid=grid,
            rows=len(mask),
            recorded=np.arange(len(mask)),
            flipped=mask,
            ties=none.astype(np.bool_),
            error=none,
            moved=none,
            gap=none,
            size=1.0,
            chosen=Both(1, 1),
            dtype=diff.pair.anchor.dtype,
            places=np.asarray(mask.reshape(-1, grid[-1]).any(axis=0)) if shapes else None,
            effect=min(effect, 1.0),
        )

    def _judge(self, place: int, stage: str, limit: float) -> None:
        diff = self._diffs[place]
        if stage == "loss" and loss_role(self._diffs.sites.slots[place]) == "labels" and self._exchange(place, diff):
            self._pass(place)
            return
        inside = any(diff.pair.anchor.layer == path or is_below(diff.pair.anchor.layer, path) for path in self._blocks)
        if inside and not diff.pair.complete and self._explained and not self._faulty:
            if diff.pair.anchor.layer not in self._called:
                self._pass(place)  # an expert that only one side calls
            return
        if inside and stage in ("forward", "backward") and self._holds_some(diff, stage, limit):
            self._pass(place)
            return
        if stage == "backward" and not self._explained:
            self._exchange(place, diff)
        if (
            self._faulty
            or not self._explained
            or not diff.pair.complete
            or diff.problem is not None
            or diff.figures is None
        ):
            return
        sites = self._diffs.sites
        if self._is_unreached(place, stage):
            return
        of_outputs = stage in ("forward", "loss") and self._rows["rule"][place] != RULE_NUMBERS[Rule.EQUAL]
        by_rows = None
        if stage in ("forward", "backward", "loss") and not (of_outputs and self._agree_beside()):
            by_rows = self._by_rows(place, diff, limit)
        if by_rows is not None:
            if by_rows[0] > by_rows[1] and self._exchange(place, diff):  # of equal labels, too
                by_rows = self._by_rows(place, diff, limit) or by_rows
            if by_rows[0] <= by_rows[1]:
                self._pass(place, (Figure.OTHER_ROWS, *by_rows))
                self._other_samples = self._other_samples or stage == "loss"
            return
        if self._rows["rule"][place] == RULE_NUMBERS[Rule.EQUAL]:
            if inside:  # counts, sorted places: integers that hold several rows
                self._pass(place)
            return
        error, most = self._relative[place], self._most(place, stage, limit)
        outside = self._outside(diff) if stage in ("grad", "update") else None
        if stage in ("grad", "update"):
            if outside is None:
                most = max(most, min(self._at_bounds, _OF_PARAMETERS))
            else:
                error = outside
        if error <= most and (stage in ("grad", "update") or self._holds_chosen(diff, limit)):
            self._pass(place, (Figure.REL_L2, error, most))
            if stage == "backward" and sites.shapes[place]:
                self._of_gradients = max(self._of_gradients, error)
        elif (
            ((inside and any(each.sends_rows for each in self._explained)) or self._has_places(diff))
            and stage in ("grad", "update")
            and outside is None
            and self._rows["l2"][place] <= WHOLLY * self._largest(place, stage)
            and not self._is_scaled(diff, most)
        ):
            self._pass(place)

    def _is_unreached(self, place: int, stage: str) -> bool:
        """Return True if no choice of this step changes a tensor."""
        sites, beyond = self._diffs.sites, self._unreached
        site = sites.layers[place], sites.calls[place], sites.slots[place]
        if stage == "loss":
            return beyond.losses and all(each.calls.reference.layer != LOOP for each in self._explained)
        if stage == "grad":
            return sites.layers[place] in beyond.layers
        return site in (beyond.gradients if stage == "backward" else beyond.outputs) and stage != "update"

    def _agree_beside(self) -> bool:
        """Return True if what each side chose otherwise holds the same within rounding."""
        return all(each.effect <= SINGLE * limits.allowed(each.dtype, "forward") for each in self._explained)

    def _outside(self, diff: Diff) -> float | None:
        """Return the relative error of a gradient without the elements that flip; `None` if none of them do."""
        shape, masks = diff.pair.anchor.shape, []
        for each in self._explained:
            if each.elements is not None and shape in (each.elements.grid, each.elements.grid[::-1]):
                mask = each.elements.mask.reshape(each.elements.grid)
                masks.append(mask if mask.shape == shape else mask.T)
            elif each.chosen_places is not None and each.rows == math.prod(shape):
                masks.append(each.mask.reshape(shape))  # a mask of all elements
            elif each.places is not None and shape[:1] == each.places.shape == each.grid[1:][-1:]:  # one row for each
                masks.append(
                    np.broadcast_to(each.places.reshape(-1, *[1] * (len(shape) - 1)), shape)
                )  # one row for each
        values = _values(diff) if masks else None
        if values is None:
            return None
        mask = np.logical_or.reduce([*masks, *(mask.T for mask in masks if shape == shape[::-1])])
        errors, sizes = (np.abs(array).reshape(-1) for array in (values.candidate - values.reference, values.reference))
        return _relative(errors, sizes, ~mask.reshape(-1))

    def _has_places(self, diff: Diff) -> bool:
        """Return True if a parameter has a row for each of the places that code exchanged of which no call shows it."""
        shape = diff.pair.anchor.shape
        return any(
            not each.calls.reference.function and each.places is not None and each.places.shape == shape[:1]
            for each in self._explained
        )

    def _is_scaled(self, diff: Diff, limit: float) -> bool:
        """Return True if the gradient of the places that no row with another choice chose differs by one factor.

        Such rows are not among those that it is summed over: whatever they do, they explain no factor.
        """
        masks = [flips.among for flips in self._explained]
        mask, shape = masks[0], diff.pair.anchor.shape
        values = _values(diff) if len(masks) == 1 and mask is not None and len(mask) in shape else None
        if values is None or mask is None:
            return False
        axis = shape.index(len(mask))
        reference, candidate = (np.compress(~mask, side, axis).reshape(-1) for side in values)
        size = float(reference @ reference)
        factor = float(reference @ candidate) / size if size else 1.0
        rest = float(np.linalg.norm(candidate - factor * reference)) / (math.sqrt(size) or 1.0)
        return abs(factor - 1) > max(limit, _COMMON * rest)

    def _largest(self, place: int, stage: str) -> float:
        """Return the largest norm of the gradients of one shape in a step: an expert may get one row, another many."""
        sites = self._diffs.sites
        alike = [k for k in sites.places[stage].tolist() if sites.shapes[k] == sites.shapes[place]]
        return float(np.nanmax([self._rows[side][alike] for side in ("reference_l2", "candidate_l2")], initial=0.0))

    def _most(self, place: int, stage: str, limit: float) -> float:
        """Return the largest relative error of a tensor whose rows are not known."""
        if stage == "loss" and loss_role(self._diffs.sites.slots[place]) in ("", "0"):
            return max(limit, self._whole) + self._jump(place)
        if stage == "backward" and not self._diffs.sites.shapes[place]:  # a coefficient of the loss
            return max(limit, MIXED * self._whole_scalars)
        if stage == "forward" and not self._diffs.sites.shapes[place]:  # a mean, or a count, of all rows
            return max(limit, min(MIXED * self._of_outputs, WHOLLY))
        if stage in ("forward", "backward", "loss"):
            filled, share = _filled(self._diffs[place]), self._share if stage == "backward" else self._of_outputs
            mixed = WHOLLY * math.sqrt(max(share, self._in_terms) / filled) + MIXED * share / filled
            return math.hypot(limit, min(mixed, WHOLLY))
        further = limits.OF_GRADIENT if stage == "update" else 1.0
        of_loss = WHOLLY * math.sqrt(max(self._by_loop, self._in_terms))
        return max(limit, min(further * MIXED * max(self._whole, of_loss), _OF_PARAMETERS))

    def _judge_rest(self, place: int) -> None:
        """Fail a loss of which terms that no loss function gives differ by more than the flipped rows explain.

        What the loss function gives differs by what these rows cause; a term that balances a router's load is made of
        shares of all rows.
        """
        sites = self._diffs.sites
        before = [k for k in sites.places["loss"].tolist() if k < place and loss_role(sites.slots[k]) == "0"]
        if loss_role(sites.slots[place]) or not self._explained or self._faulty or len(before) != 1:
            return
        total, given = (_values(self._diffs[k]) for k in (place, before[0]))
        if total is None or given is None or total.reference.size + given.reference.size > 2:
            return
        rest = total.zip(given).map(lambda side: float(side[0].reshape(-1)[0] - side[1].reshape(-1)[0]))
        size, sizes = abs(float(total.reference.reshape(-1)[0])), [float(np.abs(side).max()) for side in given]
        coarse = max(limits.allowed(each.dtype, "forward") for each in self._explained)
        share = MIXED * self._of_outputs + SINGLE * coarse + abs(sizes[1] - sizes[0]) / (sizes[0] or math.inf)
        most = SINGLE * limits.allowed("float32", "loss") + share * rest.reference / size
        error = abs(rest.candidate - rest.reference) / size
        if rest.reference > 0 and error > most:
            self._fail(place, Figure.REL_L2, error, most)

    def _jump(self, place: int) -> float:
        """Return the relative change of a loss that takes other samples: the loop may rank them by other scores."""
        sites, jump = self._diffs.sites, MIXED * self._in_terms
        for flips in self._explained:
            if flips.calls.reference.layer != LOOP:
                continue
            losses = [
                k
                for k in sites.places["loss"].tolist()
                if k < place and loss_role(sites.slots[k]) == "0" and math.prod(sites.shapes[k]) == flips.rows > 1
            ]
            values = _values(self._diffs[losses[-1]]) if losses and flips.chosen_places is not None else None
            if values is not None and flips.chosen_places is not None:
                sums = [float(values.reference.reshape(-1)[mask].sum()) for mask in flips.chosen_places]
                jump += abs(sums[1] - sums[0]) / (abs(sums[0]) or math.inf)
            elif self._other_samples and flips.picks is not None:
                jump += MIXED * float(flips.picks.mask.mean())
        return jump

    def _holds_chosen(self, diff: Diff, limit: float) -> bool:
        """Return False if more rows of a tensor of chosen samples differ than samples were chosen otherwise.

        True if no call chooses among samples or tokens.
        """
        shapes = [self._diffs.sites.shapes[place] for place in self._diffs.sites.places["forward"].tolist()]
        rows = {math.prod(shape[:axes]) for shape in shapes for axes in range(1, len(shape))}
        counts = [each.count for each in self._explained if each.chosen_places is not None and each.rows in rows]
        arrays = _values(diff) if counts and len(counts) == len(self._explained) else None
        if arrays is None or arrays.reference.ndim < 2 or len(arrays.reference) ** 2 > _MOST:
            return True
        return self._strangers(arrays, limit) <= ALONG * sum(counts)

    def _strangers(self, arrays: Both[np.ndarray], limit: float) -> int:
        """Return the number of rows of the smaller tensor that are no rows of the other."""
        few, many = sorted((array.reshape(len(array), -1).astype(np.float64) for array in arrays), key=len)
        sizes = [(array**2).sum(axis=1) for array in (few, many)]
        squares = sizes[0][:, None] + sizes[1][None, :] - 2 * few @ many.T
        limit = max(limit, self._limit, self._mixed, _LEAST)
        return int((squares.min(axis=1, initial=math.inf) > (SINGLE * limit) ** 2 * sizes[0]).sum())

    def _holds_some(self, diff: Diff, stage: str, limit: float) -> bool:
        """Return True if a tensor inside of the block that chooses holds some of the rows, and mostly the same ones.

        An expert is called with the rows that chose it. Each row of the smaller tensor has to be a row of the other,
        but for those that chose otherwise.
        """
        sides = [record for record in diff.pair.sides if record is not None]
        shapes = [record.shape for record in sides]
        if len(sides) < 2 or any(len(shape) < 2 for shape in shapes) or len({*map(row_shape, shapes)}) > 1:
            return False
        if shapes[0] == shapes[1] and (
            self._faulty or not self._explained or any(_axis(shapes[0], grid) is not None for grid in self._grids)
        ):
            return False
        if stage == "backward":
            return True
        arrays = _arrays(diff)
        if arrays is None:
            return True
        arrays = arrays.map(row_table)
        if len(arrays.reference) * len(arrays.candidate) > _MOST:
            return True
        flipped = sum(flips.count * flips.chosen.reference for flips in self._explained)
        return self._strangers(arrays, limit) <= ALONG * flipped

    def _by_rows(self, place: int, diff: Diff, limit: float) -> tuple[float, float] | None:
        """Return the relative error of the rows that chose alike, and its limit; `None` if the rows are not known.

        Convolutions hand a row on to those around it.
        """
        judged = self._by_other_rows(place, diff, limit)
        if judged is None or judged[0] <= judged[1] or not self._convolves:
            return judged
        return self._by_neighbours(place, diff, max(limit, self._mixed)) or judged

    def _by_neighbours(self, place: int, diff: Diff, limit: float) -> tuple[float, float] | None:
        """Return the relative error of the places of planes that lie apart from those which chose otherwise, and its
        limit; `None` if they differ, too. If none lie apart, the error may be as large as before.
        """
        limit = max(limit, self._of_gradients)
        shape, masks = diff.pair.anchor.shape, []
        planes = (shape[0], *shape[2:])
        for each in self._explained:
            for grid, mask in ((each.grid, each.mask), *((v.grid, v.mask) for v in (each.elements, each.tokens) if v)):
                if len(grid) == len(shape) > 2 and (grid[0], *grid[2:]) == planes:
                    masks.append(mask.reshape(grid).any(axis=1))
                elif grid == planes:
                    masks.append(mask.reshape(grid))
        values = _values(diff) if masks else None
        if values is None:
            return None
        errors, sizes = (
            np.linalg.norm(side, axis=1).reshape(-1) for side in (values.candidate - values.reference, values.reference)
        )
        for reach in range(self._reach, self._reach + 1 + _REACH):
            near = _widened(np.logical_or.reduce(masks), reach).reshape(-1)
            if near.all():
                return self._relative[place], max(limit, MIXED * self._whole)
            error = _relative(errors, sizes, ~near)
            if error <= limit:
                self._reach = reach
                return error, limit
        return None

    def _by_other_rows(self, place: int, diff: Diff, limit: float) -> tuple[float, float] | None:
        """Return the relative error of the rows that chose alike, and its limit; `None` if the rows are not known."""
        known = self._known_rows(diff)
        if known is None:
            return None
        reference, candidate, mask = known
        if "rows" in diff.pair.layout.steps:
            return self._in_any_order(reference, candidate, max(limit, self._mixed))
        if self._rows["rule"][place] == RULE_NUMBERS[Rule.EQUAL]:
            return float(((reference != candidate).any(axis=1) & ~mask).sum()), ALONG * float(mask.sum())
        if mask.all():
            return None
        errors, sizes = np.linalg.norm(candidate - reference, axis=1), np.linalg.norm(reference, axis=1)
        # Of the tensors before: what mixes rows comes after what chose. A loss divides by the number of chosen ones.
        mixed = max(limit, self._mixed, MIXED * self._in_terms)
        self._touched = max(self._touched, min(_relative(errors, sizes, mask), WHOLLY))
        factor = self._common_factor(place, reference[~mask], candidate[~mask])
        if factor is not None:
            return factor
        apart = self._apart(mask)
        # A row that others take along goes elsewhere, as they do: its error is of their size.
        moved = mask & (errors > SINGLE * limit * sizes) & (sizes > 0)
        least = float(np.median(errors[moved] / sizes[moved])) / SINGLE if moved.any() else 0.0
        strangers = ~(errors <= max(SINGLE * limit, least) * sizes)
        if apart is not None:
            # Samples in which no row chose otherwise: nothing mixes them with the others, so a fault shows in them.
            mask, apart = self._taken_along(mask, apart & strangers, apart)
        if apart is not None:
            return _relative(errors, sizes, apart), limit
        mask, _ = self._taken_along(mask, ~mask & strangers & ~(errors <= SINGLE * mixed * sizes), None)
        return _relative(errors, sizes, ~mask), mixed

    def _common_factor(self, place: int, reference: np.ndarray, candidate: np.ndarray) -> tuple[float, float] | None:
        """Return by how much all rows are larger or smaller by one factor, and its limit; `None` within the limit.

        Rows with which layers mix those that chose otherwise move in all directions.
        """
        if self._limits is None or self._diffs.sites.stages[place] == "backward" or len(reference) < _LEAST_ROWS:
            return None
        limit = max(float(self._limits[place]), limits.allowed(self._diffs.sites.anchor_dtypes[place], "forward"))
        squares = (reference**2).sum(axis=1)
        with np.errstate(all="ignore"):
            factors = ((reference * candidate).sum(axis=1) / squares)[squares > 0]
        if not len(factors) or not np.isfinite(factors).all():
            return None
        middle = float(np.median(factors))
        spread, error = float(np.median(np.abs(factors - middle))), abs(middle - 1)
        # A normalised row that moves by a share shrinks along itself by half of its square.
        shrunk = float(((candidate - reference) ** 2).sum() / squares.sum()) if middle < 1 else 0.0
        return (error, limit) if error > max(limit, _COMMON * spread, shrunk) else None

    def _in_any_order(self, reference: np.ndarray, candidate: np.ndarray, limit: float) -> tuple[float, float] | None:
        """Return the relative error of the rows of a tensor whose rows are in another order, and its limit.

        Which rows chose otherwise is not known then: as many may differ as there are.
        """
        errors, sizes = np.linalg.norm(candidate - reference, axis=1), np.linalg.norm(reference, axis=1)
        others = ~(errors <= limit * sizes)
        most = sum(int(flips.picks.mask.sum()) for flips in self._explained if flips.picks is not None)
        if others.all() or others.sum() > ALONG * most:
            return None
        return _relative(errors, sizes, ~others), limit

    def _taken_along(
        self, mask: np.ndarray, along: np.ndarray, apart: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the mask with the rows that others may have taken along, and `_apart` for it."""
        if not along.any() or along.sum() > ALONG * mask.sum() or (mask | along).all():
            return mask, apart
        self._along[len(mask)] = self._along.get(len(mask), False) | along
        return mask | along, self._apart(mask | along)

    def _apart(self, mask: np.ndarray) -> np.ndarray | None:
        """Return a mask of the rows of samples in which no row chose otherwise; `None` if there are no such samples.

        Layers that normalise over the batch mix samples.
        """
        if self._mixes or self._samples is None or len(mask) % self._samples or len(mask) == self._samples:
            return None
        samples = mask.reshape(self._samples, -1).any(axis=1)
        return None if samples.all() else np.repeat(~samples, len(mask) // self._samples)

    def _pass(self, place: int, judged: tuple[Figure, float, float] | None = None) -> None:
        """Pass a diff.

        Args:
            judged: figure, value and limit by which it passes; `None` if it is not judged.
        """
        counts_rows = self._rows["rule"][place] == RULE_NUMBERS[Rule.EQUAL]
        self._rows["passed"][place], self._rows["rule"][place] = True, RULE_NUMBERS[Rule.CHOICES]
        value = limit = 0.0
        is_judged = judged is not None and (counts_rows or judged[2] < _BLIND)
        self._without, self._unjudged = self._without + is_judged, self._unjudged + (not is_judged)
        if judged is not None:
            figure, value, limit = judged
            self._rows["figure"][place] = FIGURE_NUMBERS[figure]
        self._rows["value"][place], self._rows["limit"][place] = value, limit


def _exchanged(
    sides: Both[np.ndarray], outputs: Both[np.ndarray], least: float, limit: float
) -> tuple[np.ndarray, float] | None:
    """Return a mask of the rows that differ, if these are exchanged among rows of outputs that are equal within the
    noise of most rows, or about as near to each other's place as to their own; and how far these are apart.

    `None` if they are not, or if so many rows are equal that it shows nothing.

    Args:
        sides: labels, or gradients, as rows.
        outputs: outputs of the model, as rows.
        least, limit: relative errors of both that are rounding; an infinite one for labels, which have to be equal.
    """
    scales = [_rms_of_rows(each.reference) for each in (sides, outputs)]
    errors = [np.linalg.norm(each.candidate - each.reference, axis=1) for each in (sides, outputs)]
    if not all(scales):
        return None
    noises = [
        0.0 if math.isinf(rounding) else SINGLE * max(float(np.median(error)) / scale, rounding)
        for error, scale, rounding in zip(errors, scales, (least, limit))
    ]
    differ: np.ndarray = errors[0] > noises[0] * scales[0]
    at = np.flatnonzero(differ)
    if not len(at) or len(at) * outputs.reference.size > _MOST:
        return None
    apart = [
        np.linalg.norm(each.candidate[at][:, None] - each.reference[None, :], axis=2) / scale
        for each, scale in zip((sides, outputs), scales)
    ]
    near = apart[1] <= np.maximum(noises[1], LARGEST * errors[1][at, None] / scales[1])
    if near.sum() * _NEAR > near.size:
        return None
    distance = np.where(near & (apart[0] <= noises[0]), apart[1], np.inf)[:, at]
    effect = 0.0
    for _ in at:  # the nearest ones first, each row once
        row, partner = np.unravel_index(int(distance.argmin()), distance.shape)
        if not np.isfinite(distance[row, partner]):
            return None
        effect = max(effect, float(distance[row, partner]))
        distance[row, :] = distance[:, partner] = np.inf
    return differ, effect


def _rms_of_rows(rows: np.ndarray) -> float:
    return math.sqrt(float((rows**2).sum()) / len(rows))


def within_rounding(flips: Flips, limit: float, before: Sequence[Flips]) -> bool:
    """Return True if rounding explains that rows chose otherwise.

    Args:
        limit: largest relative error of outputs at this place.
        before: earlier calls that chose otherwise: the scores of their rows, and what counts the rows that chose a
            place, may differ in any way.
    """
    if flips.chosen.reference != flips.chosen.candidate:
        return False
    fresh = np.ones(len(flips.recorded), np.bool_)
    for other in before:
        if other.rows == flips.rows:
            fresh &= ~other.mask[flips.recorded]
        elif other.grid[: len(flips.grid)] == flips.grid:  # elements of these rows
            fresh &= ~np.any(other.mask.reshape(flips.rows, -1), axis=1)[flips.recorded]
        else:  # rows of one sample, unless some of each chose otherwise
            axes = next((k for k, (a, b) in enumerate(zip(other.grid, flips.grid)) if a != b), len(other.grid))
            samples = np.any(other.mask.reshape(math.prod(other.grid[:axes]), -1), axis=1)
            if axes and not samples.all():
                fresh &= ~np.repeat(samples, flips.rows // len(samples))[flips.recorded]
        if other.places is not None and len(other.places) == flips.rows:  # counts of the rows that chose a place
            fresh &= ~other.places[flips.recorded]
    if (flips.ties & fresh).any():
        return False
    alike, flipped = fresh & ~flips.flipped, fresh & flips.flipped
    noise = float(np.linalg.norm(flips.error[alike])) / math.sqrt(max(alike.sum(), 1))
    most = limit * flips.size
    moved = float(flips.moved[flipped].max(initial=0.0))
    # Two sides that choose by one rule choose scores no farther apart than the sides' scores are, whatever the dtype.
    exact = SINGLE * limits.allowed("float32", "forward") * flips.size
    if not any(flips.chosen) and alike.any() and np.median(flips.error[alike]) <= exact / SINGLE:
        noise = 0.0  # the code may leave some elements out, which differ in any way
    if flips.shift > exact:
        return False
    apart = (flips.gap > 2 * np.maximum(flips.moved, flips.error) + exact) & flipped
    return noise <= LARGEST * most and moved <= SINGLE * most and not apart.any()


def _samples(diffs: StepDiffs, grids: Collection[tuple[int, ...]]) -> int | None:
    """Return the number of samples of a batch whose samples hold several rows; `None` if it is not known."""
    rows = {math.prod(grid) for grid in grids}
    shapes = [diffs.sites.shapes[place] for place in diffs.sites.places["forward"].tolist()]
    counts = {shape[0] for shape in shapes if len(shape) > 2 and 1 < shape[0] < shape[0] * shape[1] in rows}
    return counts.pop() if len(counts) == 1 else None


def _grids(step: Step) -> set[tuple[int, ...]]:
    calls = [(k, call) for k, call in enumerate(step.trace.calls) if call.chooses]
    grids = [grid_of(step.trace, call) for _, call in calls] + [queries_of(step.trace, *each) for each in calls]
    return {grid for grid in grids if grid is not None}


def _agreeing(diffs: StepDiffs) -> frozenset[Site]:
    """Return the outputs that agree in each row, in order: another row would show in the error of the whole."""
    sites, relative = diffs.sites, diffs.relative
    return frozenset(
        (sites.layers[k], sites.calls[k], sites.slots[k])
        for k in sites.places["forward"].tolist()
        if diffs.rows["passed"][k] and sites.complete[k] and sites.shapes[k]
        if relative[k] <= SINGLE * limits.allowed(sites.anchor_dtypes[k], "forward")
        if relative[k] <= _OF_ONE_ROW / math.sqrt(math.prod(sites.shapes[k][:-1]) or 1)
        if "rows" not in diffs[k].pair.layout.steps and not _by_moments(diffs[k])
    )


def _by_moments(diff: Diff) -> bool:
    return diff.figures is None or diff.figures.basis == "moments"


def _starts(diffs: StepDiffs, flips: Sequence[Flips], step: Step) -> list[int]:
    """Return for each call the position of the first diff of a tensor that was computed after it."""
    sites, starts = diffs.sites, []
    forward = [place for place in sites.places["forward"].tolist() if sites.complete[place]]
    for each in flips:
        if each.elements is not None:
            starts.append(int(sites.places["backward"].min(initial=len(sites.layers))))
            continue
        if each.calls.reference.layer == LOOP:
            starts.append(
                min(int(sites.places[stage].min(initial=len(sites.layers))) for stage in ("loss", "backward"))
            )
            continue
        earlier = {(call.layer, call.call) for call in step.trace.calls[: each.position] if not call.function}
        starts.append(1 + max((k for k in forward if (sites.layers[k], sites.calls[k]) in earlier), default=-1))
    return starts


def split_rows(
    values: Both[np.ndarray], flips: Sequence[Flips], backward: bool = False
) -> tuple[Both[np.ndarray], np.ndarray] | None:
    """Return the rows of both sides, and the mask of those that chose otherwise; `None` if they are not known.

    Args:
        backward: True for gradients: those of the tokens that were chosen otherwise differ, too.
    """
    split = _split(values.reference.shape, flips)
    if split is None:
        return None
    axis, mask = split
    shape = values.reference.shape
    if backward and len(shape) > 1 and len(mask) == math.prod(shape):  # elements, whose layer behind mixes their row
        mask = np.repeat(mask.reshape(-1, shape[-1]).any(axis=1), shape[-1])
    for view in (view for each in flips for view in (each.keys, each.shared) if backward and view is not None):
        mask = mask | view.mask if len(view.mask) == len(mask) else mask
    return values.map(lambda array: _rows_of(array, axis, len(mask))), mask


def _split(shape: Sequence[int], flips: Sequence[Flips]) -> tuple[int, np.ndarray] | None:
    """Return the axis of a tensor that does not count its rows, or -1, and the mask of the rows that chose otherwise.

    `None` if no call has rows like those of the tensor.
    """
    views = [view for each in flips for view in each.views if view is not None]
    exact = [view.grid for view in views if len(view.mask) > 1 and _counts(shape, view.grid)]
    grids = {math.prod(grid): grid for grid in [*(each.grid for each in flips if each.rows > 1), *exact]}
    for number, grid in sorted(grids.items(), reverse=True):
        axis = _axis(shape, grid)
        if axis is None:
            continue
        mask = np.zeros(number, np.bool_)
        # What one call chooses among, another may have put in its place: then whole rows are other ones.
        chained = {each.rows for each in flips if each.count and sum(each.rows == other.rows for other in flips) > 1}
        for each in flips:
            if 1 < each.rows < number and each.rows in chained and number % each.rows == 0:
                mask |= np.repeat(each.mask, number // each.rows)
            else:
                mask |= _mask(each, number, grid)
        return axis, mask
    return None


def _counts(shape: Sequence[int], grid: Sequence[int]) -> bool:
    """Return True if a tensor has a row for each place of a grid, and no other layout of its rows."""
    return len(shape) > 1 and (tuple(shape[: len(grid)]) == tuple(grid) or shape[0] == math.prod(grid))


def _mask(flips: Flips, number: int, grid: Sequence[int]) -> np.ndarray:
    """Return a mask of the rows of a tensor that chose otherwise.

    Args:
        number, grid: number and shape of the tensor's rows.
    """
    for view in flips.views:
        if view is not None and len(view.mask) == number and (view.grid == tuple(grid) or flips.rows != number):
            return view.mask | flips.mask if view is flips.picks and flips.rows == number else view.mask
    elements = flips.elements
    if elements is not None and len(elements.mask) % number == 0 and math.prod(elements.grid[: len(grid)]) == number:
        return np.asarray(elements.mask.reshape(number, -1).any(axis=1))
    if flips.rows == number:
        return flips.mask
    if flips.tokens is not None and len(flips.tokens.mask) % number == 0:
        return np.asarray(flips.tokens.mask.reshape(number, -1).any(axis=1))
    if flips.rows > number and flips.rows % number == 0:
        return np.asarray(flips.mask.reshape(number, -1).any(axis=1))
    if flips.rows > 1 and number % flips.rows == 0:
        return np.repeat(flips.mask, number // flips.rows)
    return np.zeros(number, np.bool_)


def _widened(mask: np.ndarray, reach: int) -> np.ndarray:
    """Return a mask of planes with the places up to a distance from its places, along each axis."""
    for axis in range(1, mask.ndim):
        for _ in range(reach):
            lines = np.moveaxis(mask, axis, 0)
            wider = lines.copy()
            wider[1:] |= lines[:-1]
            wider[:-1] |= lines[1:]
            mask = np.moveaxis(wider, 0, axis)
    return mask


def _axis(shape: Sequence[int], grid: Sequence[int]) -> int | None:
    """Return -1 if the first axes of a shape count the rows, 1 if all axes but the second do; else `None`.

    Args:
        grid: shape of the rows.
    """
    number = math.prod(grid)
    if not shape:
        return None
    count = 1
    for extent in shape[:-1]:
        count *= extent
        if count == number:
            return -1
    if tuple(shape) == tuple(grid) or tuple(shape) == (number,):
        return -1
    if len(shape) > 2 and math.prod(shape) == number * shape[1]:
        return 1
    return -1 if shape[0] % number == 0 and shape[0] else None


def _rows_of(array: np.ndarray, axis: int, number: int) -> np.ndarray:
    array = np.moveaxis(array, 1, -1) if axis == 1 else array
    return array.reshape(number, -1)


def _arrays(diff: Diff) -> Both[np.ndarray] | None:
    """Return the values of both sides as they were recorded; `None` for sketches."""
    pair = diff.pair
    assert pair.reference is not None and pair.candidate is not None
    try:
        return Both(pair.reference.value, pair.candidate.value)
    except SketchOnlyError:
        return None


def _filled(diff: Diff) -> float:
    """Return the share of elements of a sketched tensor that are not zero: the rows of a mask that count."""
    sources = [record.source for record in diff.pair.sides if record is not None]
    zeros = [source.sketch.zeros for source in sources if source.sketched and source.sketch]
    return max(1 - max(zeros, default=0.0), _LEAST)


def _values(diff: Diff) -> Both[np.ndarray] | None:
    """Return the values of both sides in the reference's layout, in float64; `None` for sketches, empty tensors, and
    tensors that one side lacks.

    The sketch of a small tensor holds its elements, up to signs that are those of the other side.
    """
    if diff.pair.reference is None or diff.pair.candidate is None:
        return None
    sides = operands(diff.pair)
    shape = diff.pair.anchor.shape
    if isinstance(sides, Sketches) and 0 < math.prod(shape) <= BUCKETS:
        values = sides.values()
        return None if values is None else values.map(lambda side: side.reshape(shape))
    return sides.values() if isinstance(sides, Arrays) and sides.reference.size else None


def _comparable(
    now: Arrays | Sketches, then: Arrays | Sketches
) -> tuple[Both[np.ndarray] | None, Both[np.ndarray] | None]:
    """Return the values of both, or projections that keep ratios of norms; `None` if they can't be compared."""
    if isinstance(now, Sketches) and isinstance(then, Arrays):
        return now.values(), then.values().map(_projection)
    return now.values(), None if isinstance(now, Arrays) and isinstance(then, Sketches) else then.values()


def _projection(values: np.ndarray) -> np.ndarray:
    return sketch_of(values).projection


def _relative(errors: np.ndarray, sizes: np.ndarray, rows: np.ndarray) -> float:
    """Return the relative L2 error of some rows, given the error and the norm of each row."""
    return float(np.linalg.norm(errors[rows])) / (float(np.linalg.norm(sizes[rows])) or math.inf)
