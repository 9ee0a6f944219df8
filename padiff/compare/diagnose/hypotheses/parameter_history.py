"""Weights, gradients and updates of both runs, by parameter and over steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from padiff.compare.diagnose.hypotheses.diff_context import (
    ELEMENTS,
    DiffContext,
    Place,
    alike,
    is_elements,
    place_of,
    rounding_of,
)
from padiff.compare.diagnose.hypotheses.rules import History
from padiff.records import Both

#: Stages that are read of a parameter.
STAGES = ("weight", "grad", "update")
#: Most steps after the first diff that are read as well, if recorded.
LATER = 3
#: Most steps in all: for a longer training the state of the optimizer stays unknown.
MOST_STEPS = 64
# Most tensors that are read in all, and least count of parameters, for any count of steps.
_READS, _FEWEST = 6000, 12
#: Most numbers that are read in all, for both sides together; fewer elements of each tensor keep to it.
_MOST = 12_000_000
#: Rounding error of the arithmetic of an update, in rounding units: of the update itself, and of the usual size of the
#: tensor's updates, for elements whose moments cancel.
_OPERATIONS, _CANCELLED = 4.0, 4.0


@dataclass(frozen=True)
class ParameterHistory:
    """Values of a parameter in consecutive steps, on both sides.

    Attributes:
        place: the parameter.
        shape: its shape.
        elements: True for elements, False for projections, which show linear rules only.
        whole: True if the track has all elements.
        histories: gradients, weights and updates of each side; without learning rates.
        noise: rounding error of each element of an update, for each side.
    """

    place: Place
    shape: tuple[int, ...]
    elements: bool
    whole: bool
    histories: Both[History]
    noise: Both[np.ndarray]

    @property
    def is_norm(self) -> bool:
        """Return True for a norm or bias, which weight decay usually excludes."""
        return len(self.shape) < 2


@dataclass(frozen=True)
class ParameterHistories:
    """The tracks of all parameters, with their steps and learning rates.

    Attributes:
        numbers: the steps, from the first recorded one on; an optimizer with state from earlier steps follows no rule.
        at: index of the first diff's step in ``numbers``.
        parameters: the tracks, the largest first.
        rates: the learning rates of each step, by parameter group.
    """

    numbers: tuple[int, ...]
    at: int
    parameters: tuple[ParameterHistory, ...]
    rates: Both[np.ndarray]


def tracks_of(scene: DiffContext, first: int | None = None, later: int = LATER) -> ParameterHistories | None:
    """Return the tracks of a scene's parameters, up to a few steps after the first diff; `None` if there are none.

    Args:
        first: the last step that must be recorded; the scene's step by default.
        later: count of further steps to read.
    """
    last = scene.number if first is None else first
    numbers = _row(scene, last, later)
    if last not in numbers:
        return None
    usable = [number for number in numbers if _is_one_step(scene, number)]
    if usable != numbers:
        # An optimizer that steps twice within a step, or not at all, breaks the row.
        numbers = [n for n in usable if n > max((m for m in numbers if m not in usable and m <= last), default=-1)]
        numbers = [n for k, n in enumerate(numbers) if n == numbers[0] + k]
    if last not in numbers or numbers[0] != scene.numbers[0]:
        return None  # the state of the optimizer is unknown
    places = _chosen(scene, last, max(_READS // (6 * len(numbers)), _FEWEST))
    if not places:
        return None
    share = max(_MOST // (6 * len(numbers) * len(places)), 32)
    tracks = [track for place in places if (track := _track(scene, place, numbers, min(ELEMENTS, share))) is not None]
    tracks.sort(key=lambda track: -track.noise.reference.shape[1])
    rates = _rates(scene, numbers)
    if not tracks or rates is None:
        return None
    return ParameterHistories(tuple(numbers), numbers.index(last), tuple(tracks), rates)


def _chosen(scene: DiffContext, number: int, most: int) -> list[Place]:
    """Return at most about ``most`` parameters to read: first diffs, then the others at regular distances."""
    places = list(scene.pairs(number, "update"))
    if len(places) <= most:
        return places
    wrong = {place_of(d.pair) for d in scene.diffs("update", "weight") if not d.passed}
    first = [place for place in places if place in wrong]
    passed = [place for place in places if place not in wrong]
    chosen = first[:: max(1, -(-len(first) // most))]
    remaining = max(most - len(chosen), most // 4)
    return [*chosen, *passed[:: max(1, -(-len(passed) // remaining))]]


def joined(tracks: Sequence[ParameterHistory], side: str, most: int | None = None) -> tuple[History, np.ndarray]:
    """Return the tracks of several parameters as one history, and its noise.

    Args:
        side: ``reference`` or ``candidate``.
        most: about the largest count of elements in all; all elements by default.
    """
    each = None if most is None else max(most // len(tracks), 24)
    parts, noise, edges = [], [], [0]
    for track in tracks:
        history, errors = getattr(track.histories, side), getattr(track.noise, side)
        step = 1 if each is None else max(1, -(-errors.shape[1] // each))
        parts.append([array[:, ::step] for array in (history.gradients, history.weights, history.updates)])
        noise.append(errors[:, ::step])
        edges.append(edges[-1] + noise[-1].shape[1])
    gradients, weights, updates = (np.concatenate(arrays, axis=1) for arrays in zip(*parts))
    complete = all(track.whole for track in tracks) and each is None
    tensors = tuple(slice(a, b) for a, b in pairwise(edges))
    ones = np.ones(len(gradients))
    return History(gradients, weights, updates, ones, tensors, complete), np.concatenate(noise, axis=1)


def _row(scene: DiffContext, last: int, later: int) -> list[int]:
    """Return the recorded steps around ``last`` without a gap."""
    recorded = {*scene.numbers}
    first = last
    while first - 1 in recorded and last - first < MOST_STEPS - 1:
        first -= 1
    end = last
    while end + 1 in recorded and end - last < later:
        end += 1
    return list(range(first, end + 1)) if last in recorded else []


def _is_one_step(scene: DiffContext, number: int) -> bool:
    """Return True if the optimizers of both sides stepped exactly once in this step."""
    sides = scene.sides(number)
    if sides is None:
        return False
    calls = sides.map(lambda step: {r.call for r in step.records if r.stage == "update" and r.layer != "(loop)"})
    return calls.reference == calls.candidate == {0}


def _track(scene: DiffContext, place: Place, numbers: Sequence[int], most: int) -> ParameterHistory | None:
    rows: Both[dict[str, list[np.ndarray]]] = Both({}, {})
    elements, rounding, size = True, 0.0, 0
    sites = [(stage, scene.pairs(number, stage).get(place)) for number in numbers for stage in STAGES]
    for (stage, pair), values in zip(sites, alike([pair for _, pair in sites], most)):
        if pair is None or values is None or np.iscomplexobj(values.reference):
            return None
        elements = elements and is_elements(pair)
        if stage == "weight":
            rounding, size = max(rounding, rounding_of(pair)), int(np.prod(pair.anchor.shape))
        for side, array in zip(rows, values):
            side.setdefault(stage, []).append(array)
    if len({array.shape for side in rows for arrays in side.values() for array in arrays}) != 1:
        return None
    histories = rows.map(lambda side: _history(side, len(numbers)))
    if not all(np.isfinite(array).all() for h in histories for array in (h.gradients, h.weights, h.updates)):
        return None
    noise = histories.map(lambda history: _noise(history, rounding, elements))
    shape = scene.pairs(numbers[0], "weight")[place].anchor.shape
    complete = elements and histories.reference.weights.shape[1] == size
    return ParameterHistory(place, shape, elements, complete, histories, noise)


def _history(rows: dict[str, list[np.ndarray]], steps: int) -> History:
    return History(np.stack(rows["grad"]), np.stack(rows["weight"]), np.stack(rows["update"]), np.ones(steps))


def _noise(history: History, rounding: float, elements: bool) -> np.ndarray:
    """Return the rounding error of updates: from the weights they are the differences of, and from the arithmetic."""
    weights, updates = np.abs(history.weights), np.abs(history.updates)
    if not elements:
        # The noise of a sum with random signs is as large as the noise of all terms together.
        weights, updates = (np.broadcast_to(_root(v), v.shape) for v in (weights, updates))
    noise = rounding * (weights + _OPERATIONS * updates + _CANCELLED * _root(updates))
    return np.asarray(np.maximum(noise, np.finfo(np.float64).tiny * 1e20))


def _root(values: np.ndarray) -> np.ndarray:
    return np.asarray(np.sqrt(np.mean(np.square(values), axis=1, keepdims=True)))


def _rates(scene: DiffContext, numbers: Sequence[int]) -> Both[np.ndarray] | None:
    """Return the learning rates of each step by parameter group; ones if they are not recorded."""
    rates = [scene.rates(number) for number in numbers]
    sides = []
    for side in ("reference", "candidate"):
        rows = [getattr(rate, side) for rate in rates]
        if len({len(row) for row in rows}) != 1:
            return None
        sides.append(np.array(rows) if rows[0] else np.ones((len(numbers), 1)))
    return Both(*sides)
