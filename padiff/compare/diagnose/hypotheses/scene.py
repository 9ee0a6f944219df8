"""What hypotheses look at: the first diff, its step, and what the steps around it recorded."""

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
from padiff.pair.ranks import rank_steps, step_pairs
from padiff.pair.united import united
from padiff.records import LOOP, STAGES, Both, Diff, Difference, Pair, Run, Step
from padiff.sketches.sketch import BUCKETS, sketch_of

#: Elements of a tensor that are computed with: enough for any proof, whatever the tensor's size.
ELEMENTS = 2048
#: Layer, slot and call of a record, as the reference calls it.
Place = tuple[str, str, int]


@dataclass(frozen=True)
class Scene:
    """The first diff and what is recorded around it.

    Attributes:
        diff: the first diff.
        step: the judged diffs of its step, of its rank.
        alignment: which layers answer to each other.
        runs: reference and candidate.
        rank: which rank's.
        declared: what the runs declare differently in its step.
        place: where in the code it comes from.
    """

    diff: Diff
    step: Sequence[Diff]
    alignment: Alignment
    runs: Both[Run]
    rank: int = 0
    declared: Sequence[Difference] = ()
    place: Place_ | None = None
    _pairs: dict[int, Mapping[str, Mapping[Place, Pair]]] = field(default_factory=dict, repr=False, compare=False)
    _sides: dict[int, Both[Step] | None] = field(default_factory=dict, repr=False, compare=False)

    @property
    def number(self) -> int:
        """The step's."""
        return self.diff.pair.step

    @property
    def stage(self) -> str:
        return self.diff.pair.stage

    @cached_property
    def frameworks(self) -> Both[str]:
        return self.runs.map(lambda run: run.info.framework)

    @cached_property
    def layers(self) -> LayerPair | None:
        """The two layers that the first diff is of."""
        path = self.diff.pair.anchor.layer
        return next((p for p in self.alignment.pairs if p.reference.path == path), None)

    @cached_property
    def numbers(self) -> list[int]:
        """Steps that both runs have, ascending."""
        numbers = self.runs.map(lambda run: run.numbers())
        return sorted(set(numbers.reference) & set(numbers.candidate))

    def diffs(self, *stages: str) -> list[Diff]:
        """The step's diffs of some stages that were compared, but for those of the whole step."""
        return [d for d in self.step if d.pair.stage in stages and d.compared and d.pair.anchor.layer != LOOP]

    def sides(self, number: int) -> Both[Step] | None:
        """A recorded step of both runs; `None` if it can't be read."""
        if number not in self._sides:
            self._sides[number] = self._read(number)
        return self._sides[number]

    def _read(self, number: int) -> Both[Step] | None:
        try:
            steps = self.runs.map(lambda run: united(run.steps(number)))
            ranks = rank_steps(steps, self.runs.map(lambda run: run.info))
        except (PadiffError, KeyError, OSError):
            return None  # it went meanwhile, or is spoilt: what can't be read explains nothing
        return ranks[self.rank] if self.rank < len(ranks) else None

    def pairs(self, number: int, stage: str) -> Mapping[Place, Pair]:
        """A step's complete pairs of a stage."""
        if number not in self._pairs:
            self._pairs[number] = self._paired(number)
        return self._pairs[number].get(stage, {})

    def _paired(self, number: int) -> Mapping[str, Mapping[Place, Pair]]:
        found: dict[str, dict[Place, Pair]] = {}
        if number == self.number:
            pairs: Sequence[Pair] = [diff.pair for diff in self.step]
        else:
            sides = self.sides(number)
            pairs = [] if sides is None else step_pairs([sides], self.alignment, STAGES)[0]
        for pair in pairs:
            # A norm that clipping returned stands among the gradients, and is none.
            if pair.complete and (pair.stage != "grad" or pair.anchor.layer != LOOP):
                found.setdefault(pair.stage, {})[place_of(pair)] = pair
        return found

    def rates(self, number: int) -> Both[list[float]]:
        """The learning rates of each parameter group in a step."""
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
        """The share of its norm that the policy lets a pair of this step be off by; infinite where it has none."""
        return self._limits.get((pair.stage, place_of(pair)), np.inf)

    @cached_property
    def _limits(self) -> Mapping[tuple[str, Place], float]:
        return {
            (d.pair.stage, place_of(d.pair)): d.judgement.limit
            for d in self.step
            if d.judgement is not None and d.judgement.limit > 0 and str(d.judgement.figure).startswith("rel_l2")
        }


def place_of(pair: Pair) -> Place:
    """Layer, slot and call of a pair, as the reference calls them."""
    anchor = pair.anchor
    return anchor.layer, anchor.slot, anchor.call


def values_of(pair: Pair, most: int = ELEMENTS) -> Both[np.ndarray] | None:
    """Some of a pair's elements, at the same places of every tensor of this size; of a sketch its projection.

    `None` where neither can be had.
    """
    try:
        found = operands(pair)
    except PadiffError:
        return None
    if isinstance(found, Sketches):
        return found.values()
    if not isinstance(found, Arrays):
        return None
    sides = Both(found.reference, found.candidate)
    if sides.reference.size > most:
        places = np.unravel_index(_places(sides.reference.size, most), sides.reference.shape)
        sides = sides.map(lambda array: np.asarray(array[places]))
    wide = sides.zip(found.scales).map(lambda side: _float64(side[0]) / side[1])
    return wide.map(np.ravel)


def like(pair: Pair, other: Pair, most: int = ELEMENTS) -> Both[np.ndarray] | None:
    """`values_of` a pair, looked at as another one of its shape is: one step may have a tensor whole, and another a
    sketch of it, in which elements have signs.

    `None` where it can't be: of a sketch, elements can't be had.
    """
    try:
        found, shown = operands(pair), operands(other)
    except PadiffError:
        return None
    if isinstance(shown, Sketches) and isinstance(found, Arrays):
        return _projected(pair, found, other, shown)
    if type(found) is not type(shown):
        return None
    return values_of(pair, most)


def alike(pairs: Sequence[Pair | None], most: int = ELEMENTS) -> list[Both[np.ndarray] | None]:
    """`values_of` several pairs of one quantity or of one shape, all looked at in one way."""
    there = [pair for pair in pairs if pair is not None]
    shown = next((pair for pair in there if any(r is not None and r.source.sketched for r in pair.sides)), None)
    if shown is None:
        return [None if pair is None else values_of(pair, most) for pair in pairs]
    return [None if pair is None else like(pair, shown, most) for pair in pairs]


def _projected(pair: Pair, arrays: Arrays, other: Pair, shown: Sketches) -> Both[np.ndarray] | None:
    """Tensors that are whole, as the sketches of other ones of their shape are."""
    assert pair.candidate is not None and other.reference is not None
    reference, candidate = arrays.reference, arrays.candidate
    if not shown.aligned or reference.dtype.kind == "c" or reference.size != shown.reference.size:
        return None
    transposed = shown.reference.transposed
    if not other.reference.source.sketched:
        # Looked at as the candidate has them.
        transposed, shape = shown.candidate.transposed, pair.candidate.shape
        reference, candidate = (pair.layout.undo(array, shape) for array in (reference, candidate))
    return Sketches(sketch_of(reference, transposed), sketch_of(candidate, transposed), arrays.scales, True).values()


def whole_of(pair: Pair) -> Both[np.ndarray] | None:
    """Both tensors of a pair in the reference's layout, in float64; `None` where sketches are all there is."""
    try:
        found = operands(pair)
    except PadiffError:
        return None
    return found.values() if isinstance(found, Arrays) else None


def is_elements(pair: Pair) -> bool:
    """Whether `values_of` gives elements, give or take a sign that is the same on both sides, and in every stage."""
    assert pair.reference is not None and pair.candidate is not None
    sketched = pair.reference.source.sketched or pair.candidate.source.sketched
    return not sketched or int(np.prod(pair.anchor.shape)) <= BUCKETS


def rounding_of(pair: Pair) -> float:
    """What rounding a number of the pair's coarser dtype is off by, relative to it."""
    return max((ROUNDING.get(coarse(r.dtype), 0.0) for r in pair.sides if r is not None), default=0.0)


def _float64(array: np.ndarray) -> np.ndarray:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


@lru_cache(maxsize=64)
def _places(size: int, most: int) -> np.ndarray:
    """Places of a tensor's elements that are looked at, ascending; spread, so that no shape's rows are missed."""
    edges = np.linspace(0, size, most + 1).astype(np.int64)
    return np.asarray(edges[:-1] + np.random.default_rng(size).integers(0, np.diff(edges)))
