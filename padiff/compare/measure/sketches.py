"""How far apart two tensors are of which at least one was kept as a sketch: estimates, and how sure they are."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from padiff.compare.measure.arrays import figures_of, loaded, measure
from padiff.errors import SketchOnlyError
from padiff.model import equivalents
from padiff.pair import layouts as views
from padiff.records import PARAMETER_STAGES, Diff, Figures, Pair, Record
from padiff.sketches.sketch import BUCKETS, ELEMENTS, SPREAD, Sketch, sketch_of

# Moments of two samples of one tensor that lie at other places: so much of the norm may be chance. Outputs of
# convolutions, whose channels are of different size, were seen a third apart, channels first against last.
_CHANCE = 0.5


def measure_pair(pair: Pair, elementwise: tuple[float, float] | None = None) -> Diff:
    """Measure a pair by its tensors or, where a sketch is all that one side kept, by sketches."""
    return measure_sketched(pair, elementwise) if is_sketched(pair) else measure(pair, elementwise)


def is_sketched(pair: Pair) -> bool:
    """Whether a sketch is all that one side kept."""
    return any(record is not None and kept_as_sketch(record) for record in (pair.reference, pair.candidate))


def kept_as_sketch(record: Record) -> bool:
    """Whether a sketch is all that was kept of a tensor."""
    return bool(getattr(record.source, "sketched", False))


def measure_sketched(pair: Pair, elementwise: tuple[float, float] | None = None) -> Diff:
    """Measure such a pair, as `padiff.compare.measure.arrays.measure` does with tensors.

    Where both sketches look at the same elements in the same order, their projections give the relative L2 error
    (``basis`` is ``sketches``). Where one side's tensor lies in another layout, norms and means still bound the error
    from below (``moments``). Rows of a fused tensor can't be taken out of a sketch: that pair is not measured.
    """
    if pair.reference is None or pair.candidate is None:
        return _lone(pair)
    shapes = _shape(pair.reference.shape, "", ()), _shape(pair.candidate.shape, pair.transform, pair.reference.shape)
    if pair.transform == views.BROADCAST:
        return Diff(pair, problem="one side has for every sample what the other has once, and a sketch is of the whole")
    if not _fits(*shapes, pair.stage):
        return Diff(pair, passed=False, problem=f"shapes differ: {shapes[0]} against {shapes[1]}")
    try:
        reference, candidate, aligned = _sketches(pair)
    except SketchOnlyError:
        return Diff(pair, problem="a part of what was kept as a sketch only")
    figures = _estimated(reference, candidate, pair, elementwise) if aligned else _bounded(reference, candidate, pair)
    share = abs(reference.nonfinite - candidate.nonfinite)
    both = min(reference.nonfinite, candidate.nonfinite)
    # Samples of other places have another share by chance, where both sides have such values.
    by_chance = not aligned and reference.size > ELEMENTS and both > 0
    count, problem = 0, ""
    if share > (_CHANCE if by_chance else 0.0):
        count = max(1, round(share * figures.size))
        problem = f"{count} of {figures.size} values are NaN or infinite on one side only"
    figures = replace(figures, nonfinite=count, overflowed=math.ceil(both * figures.size))
    return Diff(pair, figures=figures, passed=not problem, problem=problem)


def elements(pair: Pair) -> tuple[np.ndarray, np.ndarray] | None:
    """Both sides' elements in one order, divided by their scales; `None` where sketches do not have them.

    Of a small tensor a sketch has each, give or take the sign, which is the same on both sides.
    """
    if not is_sketched(pair):
        sides = loaded(pair)
        return sides[0].reshape(-1), sides[1].reshape(-1)
    return projections(pair) if math.prod(pair.anchor.shape) <= BUCKETS else None


def projections(pair: Pair) -> tuple[np.ndarray, np.ndarray] | None:
    """Both sides' projections, which keep ratios and angles; `None` where they can't be compared."""
    try:
        reference, candidate, aligned = _sketches(pair)
    except SketchOnlyError:
        return None
    scaled = reference.projection / pair.scales[0], candidate.projection / pair.scales[1]
    return scaled if aligned else None


def _sketches(pair: Pair) -> tuple[Sketch, Sketch, bool]:
    """Sketches of both sides, and whether they look at the same elements in the same order."""
    assert pair.reference is not None and pair.candidate is not None
    ours, theirs = pair.reference.sketch, pair.candidate.sketch
    # A side that was kept in full is brought into the other's layout.
    if theirs is None:
        values = views.apply(pair.transform, pair.candidate.value, pair.reference.shape)
        if ours is None:
            raise SketchOnlyError(pair.reference.site)  # a part of one
        return ours, sketch_of(values, ours.turned), True
    if ours is None:
        values = views.undo(pair.transform, pair.reference.value, pair.candidate.shape)
        return sketch_of(values, theirs.turned), theirs, True
    steps = pair.transform.split(" then ")
    in_order = all(part in ("", "reshape", "transpose") for part in steps)
    return ours, theirs, in_order and (ours.turned != theirs.turned) == (steps.count("transpose") % 2 == 1)


def _fits(reference: tuple[int, ...], candidate: tuple[int, ...], stage: str) -> bool:
    """Whether two shapes hold the same elements in the same order, as far as tensors themselves would be compared."""
    if reference == candidate or math.prod(reference) == math.prod(candidate) == 1:
        return True
    return stage in PARAMETER_STAGES and equivalents.same_order(reference, candidate)


def _shape(shape: tuple[int, ...], view: str, reference: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a tensor as a view shows it."""
    if not view:
        return shape
    return tuple(views.apply(view, np.broadcast_to(np.zeros(()), shape), reference).shape)


def _lone(pair: Pair) -> Diff:
    side = "reference" if pair.reference is None else "candidate"
    sketch = pair.anchor.sketch
    problem = f"missing on the {side}"
    if sketch is None:
        return Diff(pair, problem=problem)
    norm = sketch.l2 / pair.scales[0 if pair.reference is not None else 1]
    ours = pair.reference is not None
    norms = (norm, 0.0) if ours else (0.0, norm)
    figures = Figures(size=sketch.size, basis="sketches", reference_l2=norms[0], candidate_l2=norms[1])
    return Diff(pair, figures, problem=problem)


def _estimated(reference: Sketch, candidate: Sketch, pair: Pair, elementwise: tuple[float, float] | None) -> Figures:
    """Figures from the projections."""
    if reference.size <= BUCKETS:
        # Each number of the projection is one element, give or take its sign: nothing is estimated.
        exact = figures_of(reference.projection, candidate.projection, elementwise, pair.scales)
        return replace(exact, basis="sketches")
    errors = reference.errors(candidate, pair.scales)
    l2 = float(np.linalg.norm(errors))
    # The error of a few elements is in a few numbers of the projection: their median does not know of it. 0.4549 is the
    # median of a squared normal variable. (Not numpy.median, most of whose time goes into what is not needed here.)
    squares = np.square(errors)
    squares.partition(BUCKETS // 2)
    bulk = math.sqrt(float(squares[BUCKETS // 2]) / 0.4549 * BUCKETS)
    return _figures(reference, candidate, pair.scales, l2, bulk, "sketches", SPREAD, elementwise)


def _bounded(reference: Sketch, candidate: Sketch, pair: Pair) -> Figures:
    """Figures from norms and means, which bound the error from below whatever the order of the elements is."""
    ours, theirs = (sketch.l2 / scale for sketch, scale in zip((reference, candidate), pair.scales))
    means = abs(reference.mean / pair.scales[0] - candidate.mean / pair.scales[1]) * math.sqrt(reference.size)
    chance = _CHANCE * max(ours, theirs) if reference.size > ELEMENTS else 0.0
    l2 = max(abs(ours - theirs) - chance, means - chance, 0.0)
    return _figures(reference, candidate, pair.scales, l2, l2, "moments", 0.0, None)


def _figures(
    reference: Sketch,
    candidate: Sketch,
    scales: tuple[float, float],
    l2: float,
    bulk: float,
    basis: str,
    spread: float,
    elementwise: tuple[float, float] | None,
) -> Figures:
    size = reference.size
    root_mean_square = l2 / math.sqrt(size) if size else 0.0
    norm = reference.l2 / scales[0]
    extremes = [abs(c / scales[1] - r / scales[0]) for r, c in _extremes(reference, candidate)]
    largest = max(abs(reference.minimum), abs(reference.maximum)) / scales[0]
    beyond = 0
    if elementwise is not None:
        # Some element is off by as much as the root of the mean square, or more.
        beyond = int(root_mean_square > elementwise[0] + elementwise[1] * largest)
    return Figures(
        max_abs=max([root_mean_square, *extremes]) if size else 0.0,
        max_rel=l2 / norm if norm else 0.0,
        mean_abs=root_mean_square,
        mean_reference=reference.mean_abs / scales[0],
        l2=l2,
        reference_l2=norm,
        candidate_l2=candidate.l2 / scales[1],
        size=size,
        bulk_l2=bulk if size > BUCKETS else None,
        beyond=beyond,
        basis=basis,
        spread=spread,
    )


def _extremes(reference: Sketch, candidate: Sketch) -> list[tuple[float, float]]:
    # Only of whole tensors, or of the same elements: a sample elsewhere has other extremes.
    if reference.size > ELEMENTS and reference.turned != candidate.turned:
        return []
    return [(reference.minimum, candidate.minimum), (reference.maximum, candidate.maximum)]
