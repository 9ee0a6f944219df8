"""The input of all hypotheses: the first diff, its step, and the records of the steps around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np

from padiff.align import Alignment, LayerPair
from padiff.compare.diagnose.place import Place as Place_
from padiff.compare.judge.limits import ROUNDING, coarse
from padiff.compare.measure.operands import Arrays, Sketches, operands
from padiff.errors import PadiffError
from padiff.pair.merge_ranks import merge_ranks
from padiff.pair.plans import rank_steps, step_pairs
from padiff.records import LOOP, STAGES, Both, Diff, Difference, Pair, Run, Step
from padiff.sketches.sketch import BUCKETS, sketch_of

#: Largest count of elements of a tensor that hypotheses compute with: enough for any proof, whatever the tensor's size.
ELEMENTS = 2048
#: Layer, slot and call number of a record, by the reference's names.
PairPlace = tuple[str, str, int]


@dataclass(frozen=True)
class DiffContext:
    """The first diff and the records around it.

    Attributes:
        diff: the first diff.
        step: the judged diffs of the first diff's step and rank.
        alignment: the pairs of corresponding layers.
        runs: reference and candidate.
        rank: the rank of the first diff.
        declared: settings that the runs declare differently in this step.
        place: the lines of code that computed the tensor of the first diff.
        unlimited: True if the limits of the step say nothing about the cause.
    """

    diff: Diff
    step: Sequence[Diff]
    alignment: Alignment
    runs: Both[Run]
    rank: int = 0
    declared: Sequence[Difference] = ()
    place: Place_ | None = None
    unlimited: bool = False
    _pairs: dict[int, Mapping[str, Mapping[PairPlace, Pair]]] = field(default_factory=dict, repr=False, compare=False)
    _sides: dict[int, Both[Step] | None] = field(default_factory=dict, repr=False, compare=False)

    @property
    def number(self) -> int:
        """Return the number of the first diff's step."""
        return self.diff.pair.step

    @property
    def stage(self) -> str:
        """Return the stage of the first diff; an input that is computed from outputs counts as an output."""
        return "forward" if self.diff.pair.derived else self.diff.pair.stage

    @cached_property
    def frameworks(self) -> Both[str]:
        return self.runs.map(lambda run: run.info.framework)

    @cached_property
    def layers(self) -> LayerPair | None:
        """Return the pair of layers of the first diff; `None` if the alignment has none."""
        path = self.diff.pair.anchor.layer
        return next((p for p in self.alignment.pairs if p.reference.path == path), None)

    @cached_property
    def numbers(self) -> list[int]:
        """Return the numbers of the steps that both runs have, ascending."""
        numbers = self.runs.map(lambda run: run.numbers())
        return sorted(set(numbers.reference) & set(numbers.candidate))

    def diffs(self, *stages: str) -> list[Diff]:
        """Return the compared diffs of the given stages, without those of the training loop itself."""
        return [d for d in self.step if d.pair.stage in stages and d.compared and d.pair.anchor.layer != LOOP]

    def sides(self, number: int) -> Both[Step] | None:
        """Return a recorded step of both runs; `None` if it can't be read."""
        if number not in self._sides:
            self._sides[number] = self._read(number)
        return self._sides[number]

    def _read(self, number: int) -> Both[Step] | None:
        try:
            steps = self.runs.map(lambda run: merge_ranks(run.steps(number)))
            ranks = rank_steps(steps, self.runs.map(lambda run: run.info))
        except (PadiffError, KeyError, OSError):
            return None  # deleted meanwhile, or damaged: a step that can't be read explains nothing
        return ranks[self.rank] if self.rank < len(ranks) else None

    def pairs(self, number: int, stage: str) -> Mapping[PairPlace, Pair]:
        """Return the pairs of a step and stage that have both sides, by place."""
        if number not in self._pairs:
            self._pairs[number] = self._paired(number)
        return self._pairs[number].get(stage, {})

    def _paired(self, number: int) -> Mapping[str, Mapping[PairPlace, Pair]]:
        by_stage: dict[str, dict[PairPlace, Pair]] = {}
        if number == self.number:
            pairs: Sequence[Pair] = [diff.pair for diff in self.step]
        else:
            sides = self.sides(number)
            pairs = [] if sides is None else step_pairs([sides], self.alignment, STAGES)[0]
        for pair in pairs:
            # The norm that clipping returned has the stage "grad" too, and is no gradient.
            if pair.complete and (pair.stage != "grad" or pair.anchor.layer != LOOP):
                by_stage.setdefault(pair.stage, {})[place_of(pair)] = pair
        return by_stage

    @property
    def earlier(self) -> list[int]:
        """Return the numbers of the steps before, which agreed."""
        return [number for number in self.numbers if number < self.number]

    def rates(self, number: int) -> Both[list[float]]:
        """Return the learning rate of each parameter group in a step; empty lists if the step can't be read."""
        sides = self.sides(number)
        if sides is None:
            return Both([], [])
        return sides.map(
            lambda step: [
                float(np.ravel(record.value)[0])
                for record in step.records
                if record.layer == LOOP and record.slot.startswith("learning_rate") and not record.source.sketched
            ]
        )

    def limit(self, pair: Pair) -> float:
        """Return the largest error, as a share of the norm, that the policy passes for a pair of this step.

        Infinite for a pair that the policy does not limit, and where limits say nothing: a step that passes may prove a
        cause, as limits grow with the distance of the runs.
        """
        if self.unlimited:
            return np.inf
        return self._limits.get((pair.stage, place_of(pair)), np.inf)

    @cached_property
    def _limits(self) -> Mapping[tuple[str, PairPlace], float]:
        return {
            (d.pair.stage, place_of(d.pair)): d.judgement.limit
            for d in self.step
            if d.judgement is not None and d.judgement.limit > 0 and str(d.judgement.figure).startswith("rel_l2")
        }


def place_of(pair: Pair) -> PairPlace:
    """Return the layer, slot and call number of a pair, by the reference's names."""
    anchor = pair.anchor
    return anchor.layer, anchor.slot, anchor.call


def values_of(pair: Pair, most: int = ELEMENTS) -> Both[np.ndarray] | None:
    """Return up to ``most`` elements of both tensors, flat and in float64; for sketches their projections.

    Tensors of the same size are read at the same places. `None` if the pair has neither elements nor projections.
    """
    try:
        loaded = operands(pair)
    except PadiffError:
        return None
    if isinstance(loaded, Sketches):
        return loaded.values()
    if not isinstance(loaded, Arrays):
        return None
    sides = Both(loaded.reference, loaded.candidate)
    if sides.reference.size > most:
        places = np.unravel_index(_places(sides.reference.size, most), sides.reference.shape)
        sides = sides.map(lambda array: np.asarray(array[places]))
    wide = sides.zip(loaded.scales).map(lambda side: _float64(side[0]) / side[1])
    return wide.map(np.ravel)


def like(pair: Pair, other: Pair, most: int = ELEMENTS) -> Both[np.ndarray] | None:
    """Return `values_of` of a pair in the form of ``other``, a pair of the same shape.

    One step may have a whole tensor, and another step a sketch of the tensor, in which elements have signs: the whole
    tensor is then projected like the sketch. `None` if that is impossible, as a sketch has no elements.
    """
    try:
        sides, form = operands(pair), operands(other)
    except PadiffError:
        return None
    if isinstance(form, Sketches) and isinstance(sides, Arrays):
        return _projected(pair, sides, other, form)
    if type(sides) is not type(form):
        return None
    return values_of(pair, most)


def alike(pairs: Sequence[Pair | None], most: int = ELEMENTS) -> list[Both[np.ndarray] | None]:
    """Return `values_of` of several pairs of the same shape in the same form: all elements, or all projections."""
    present = [pair for pair in pairs if pair is not None]
    sketched = next((pair for pair in present if any(r is not None and r.source.sketched for r in pair.sides)), None)
    if sketched is None:
        return [None if pair is None else values_of(pair, most) for pair in pairs]
    return [None if pair is None else like(pair, sketched, most) for pair in pairs]


def _projected(pair: Pair, arrays: Arrays, pattern: Pair, sketches: Sketches) -> Both[np.ndarray] | None:
    """Return the projections of whole tensors, made like the sketches of another pair; `None` if not comparable."""
    assert pair.candidate is not None and pattern.reference is not None
    reference, candidate = arrays.reference, arrays.candidate
    if not sketches.aligned or reference.dtype.kind == "c" or reference.size != sketches.reference.size:
        return None
    transposed = sketches.reference.transposed
    if not pattern.reference.source.sketched:
        # Projected in the candidate's layout.
        transposed, shape = sketches.candidate.transposed, pair.candidate.shape
        reference, candidate = (pair.layout.undo(array, shape) for array in (reference, candidate))
    return Sketches(sketch_of(reference, transposed), sketch_of(candidate, transposed), arrays.scales, True).values()


def whole_of(pair: Pair) -> Both[np.ndarray] | None:
    """Return both whole tensors of a pair in the reference's layout, in float64; `None` if only sketches exist."""
    try:
        sides = operands(pair)
    except PadiffError:
        return None
    return sides.values() if isinstance(sides, Arrays) else None


def is_elements(pair: Pair) -> bool:
    """Return True if `values_of` returns elements, up to a sign that is equal on both sides and in every stage."""
    assert pair.reference is not None and pair.candidate is not None
    sketched = pair.reference.source.sketched or pair.candidate.source.sketched
    return not sketched or int(np.prod(pair.anchor.shape)) <= BUCKETS


def rounding_of(pair: Pair) -> float:
    """Return the relative rounding error of a number in the coarser dtype of the pair."""
    return max((ROUNDING.get(coarse(r.dtype), 0.0) for r in pair.sides if r is not None), default=0.0)


def _float64(array: np.ndarray) -> np.ndarray:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


@lru_cache(maxsize=64)
def _places(size: int, most: int) -> np.ndarray:
    """Return the indices of the elements to read, ascending and spread over all rows of any shape."""
    edges = np.linspace(0, size, most + 1).astype(np.int64)
    return np.asarray(edges[:-1] + np.random.default_rng(size).integers(0, np.diff(edges)))
