"""Measurement of one pair: the distance of its two tensors."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np

from padiff.compare.measure.arrays import figures_of, measured
from padiff.compare.measure.buffer_pool import buffer_pool
from padiff.compare.measure.operands import Arrays, operands
from padiff.compare.measure.sketches import estimated
from padiff.pair.merge_ranks import as_held, replicas_of
from padiff.records import Both, Diff, Figures, Kind, Pair, Problem

# Factor by which another choice of replicas has to be farther. Two replicas of a gradient that was not reduced are
# equally far from the reduced gradient, and rounding must not decide between them.
_FARTHER = 1.01


def measure_pair(pair: Pair, elementwise: tuple[float, float] | None = None) -> Diff:
    """Measure a pair by its tensors or, if one side recorded only a sketch, by sketches.

    Args:
        pair: the two records; if a side is missing, the other side's norm is still measured.
        elementwise: ``(atol, rtol)``: count elements with ``|c - r| > atol + rtol * |r|`` (numpy.isclose's formula).

    Returns:
        The diff, not judged yet: ``passed`` is false only if ``problem`` states a reason. A pair that can't be
        measured, such as a part of a sketch, passes and has no figures.
    """
    if pair.reference is not None and pair.candidate is not None:
        replicas = Both(replicas_of(pair.reference.source), replicas_of(pair.candidate.source))
        if replicas != Both(1, 1):
            return _farthest(pair, replicas, elementwise)
    return _measured(pair, elementwise)


def _farthest(pair: Pair, replicas: Both[int], elementwise: tuple[float, float] | None) -> Diff:
    """Measure a pair with replicas that differ between processes, by the replicas that are farthest apart."""
    candidates = []
    for choices in product(*map(range, replicas)):
        a, b = (replace(r, source=as_held(r.source, k)) for r, k in zip(pair.sides, choices) if r is not None)
        candidates.append(_measured(replace(pair, reference=a, candidate=b), elementwise))
    worst, *others = candidates
    for diff in others:
        if _apart(diff) > _FARTHER * _apart(worst):
            worst = diff
    return replace(worst, pair=pair)


def _apart(diff: Diff) -> float:
    if diff.problem is not None or diff.figures is None:
        return np.inf
    return diff.figures.l2


def _measured(pair: Pair, elementwise: tuple[float, float] | None) -> Diff:
    if pair.reference is None or pair.candidate is None:
        side = "reference" if pair.reference is None else "candidate"
        return Diff(pair, figures=_lone(pair), problem=Problem(Kind.MISSING, f"missing on the {side}"))
    pair_operands = operands(pair, buffer_pool())
    if isinstance(pair_operands, Problem):
        return Diff(pair, passed=pair_operands.kind is not Kind.SHAPES, problem=pair_operands)
    if isinstance(pair_operands, Arrays):
        figures = measured(pair_operands, pair.stage, pair.reference.dtype, elementwise)
    else:
        figures = estimated(pair_operands, elementwise)
    problem = None
    if figures.nonfinite:
        text = f"{figures.nonfinite} of {figures.size} values are NaN or infinite on one side only"
        problem = Problem(Kind.NONFINITE, text)
    return Diff(pair, figures=figures, passed=not problem, problem=problem)


def _lone(pair: Pair) -> Figures | None:
    """Return figures with the norm of a pair's only side; `None` for a part of a sketch."""
    source, scales = pair.anchor.source, pair.scales
    is_reference = pair.reference is not None
    if source.sketched:
        sketch = source.sketch
        if sketch is None:
            return None
        norm = sketch.l2 / (scales.reference if is_reference else scales.candidate)
        size, value, basis = sketch.size, 0.0, "sketches"
    else:
        array = source.read()
        norm_figures = figures_of(Arrays(array, np.broadcast_to(np.zeros((), array.dtype), array.shape), scales))
        size, norm, value, basis = (
            norm_figures.size,
            norm_figures.reference_l2,
            norm_figures.values.reference,
            "tensors",
        )
    norms, values = Both(norm, 0.0), Both(value, 0.0)
    if not is_reference:
        norms, values = norms.swapped(), values.swapped()
    return Figures(size=size, reference_l2=norms.reference, candidate_l2=norms.candidate, values=values, basis=basis)
