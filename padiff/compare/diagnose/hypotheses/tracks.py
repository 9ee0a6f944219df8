"""What the optimizers of both runs were given, and what they made of it, parameter by parameter, step after step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from padiff.compare.diagnose.hypotheses.rules import History
from padiff.compare.diagnose.hypotheses.scene import (
    ELEMENTS,
    Place,
    Scene,
    alike,
    is_elements,
    place_of,
    rounding_of,
)
from padiff.records import Both

#: What is looked at of a parameter.
STAGES = ("weight", "grad", "update")
#: Steps after the first diff that are looked at as well, where they are recorded.
LATER = 3
#: Steps in all: of a longer training what the optimizer remembers is not known.
MOST_STEPS = 64
# Tensors that are read in all, and parameters that are looked at however many steps there are.
_READS, _FEWEST = 6000, 12
#: Numbers that are read in all, at most, for both sides together; what of the tensors is looked at goes with it.
_MOST = 12_000_000
#: What the arithmetic of an update rounds, in units of a number's rounding: of the update itself, and of what updates
#: of the tensor are at large, where its moments cancel.
_OPERATIONS, _CANCELLED = 4.0, 4.0


@dataclass(frozen=True)
class Track:
    """A parameter in a row of steps, both sides.

    Attributes:
        place: the parameter.
        shape: its shape.
        elements: whether its elements are known; else projections of it are, which show what is linear.
        whole: whether all of its elements are there.
        histories: what either optimizer was given and made; without learning rates.
        noise: what rounding makes of an element of an update, of either side.
    """

    place: Place
    shape: tuple[int, ...]
    elements: bool
    whole: bool
    histories: Both[History]
    noise: Both[np.ndarray]

    @property
    def is_norm(self) -> bool:
        """Whether people leave it out of weight decay: norms and biases."""
        return len(self.shape) < 2


@dataclass(frozen=True)
class Tracks:
    """The parameters' tracks, and what holds for all of them.

    Attributes:
        numbers: the steps, from the first one on that is recorded: before it, optimizers remember nothing, or no rule
            explains what they make.
        at: which of them is that of the first diff.
        parameters: the tracks, the largest first.
        rates: the learning rates of each step, by parameter group.
    """

    numbers: tuple[int, ...]
    at: int
    parameters: tuple[Track, ...]
    rates: Both[np.ndarray]


def tracks_of(scene: Scene, first: int | None = None, later: int = LATER) -> Tracks | None:
    """The tracks of a scene's parameters, up to its step and a few steps beyond; `None` where there are none.

    Args:
        first: the last step that has to be there; the scene's own by default.
        later: how many further steps are looked at.
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
        return None  # what the optimizer remembers is not known
    places = _chosen(scene, last, max(_READS // (6 * len(numbers)), _FEWEST))
    if not places:
        return None
    share = max(_MOST // (6 * len(numbers) * len(places)), 32)
    found = [track for place in places if (track := _track(scene, place, numbers, min(ELEMENTS, share))) is not None]
    found.sort(key=lambda track: -track.noise.reference.shape[1])
    rates = _rates(scene, numbers)
    if not found or rates is None:
        return None
    return Tracks(tuple(numbers), numbers.index(last), tuple(found), rates)


def _chosen(scene: Scene, number: int, most: int) -> list[Place]:
    """The parameters that are looked at: those that are diffs, and of the others every so many."""
    places = list(scene.pairs(number, "update"))
    if len(places) <= most:
        return places
    wrong = {place_of(d.pair) for d in scene.diffs("update", "weight") if not d.passed}
    first = [place for place in places if place in wrong]
    rest = [place for place in places if place not in wrong]
    some = first[:: max(1, -(-len(first) // most))]
    left = max(most - len(some), most // 4)
    return [*some, *rest[:: max(1, -(-len(rest) // left))]]


def joined(tracks: Sequence[Track], side: str, most: int | None = None) -> tuple[History, np.ndarray]:
    """Several parameters' tracks as one history, and its noise.

    Args:
        side: ``reference`` or ``candidate``.
        most: how many elements of all of them, if not all.
    """
    each = None if most is None else max(most // len(tracks), 24)
    parts, noise, edges = [], [], [0]
    for track in tracks:
        history, own = getattr(track.histories, side), getattr(track.noise, side)
        step = 1 if each is None else max(1, -(-own.shape[1] // each))
        parts.append([array[:, ::step] for array in (history.gradients, history.weights, history.updates)])
        noise.append(own[:, ::step])
        edges.append(edges[-1] + noise[-1].shape[1])
    gradients, weights, updates = (np.concatenate(arrays, axis=1) for arrays in zip(*parts))
    whole = all(track.whole for track in tracks) and each is None
    tensors = tuple(slice(a, b) for a, b in pairwise(edges))
    ones = np.ones(len(gradients))
    return History(gradients, weights, updates, ones, tensors, whole), np.concatenate(noise, axis=1)


def _row(scene: Scene, last: int, later: int) -> list[int]:
    """The recorded steps right before and after one, without a gap."""
    there = {*scene.numbers}
    first = last
    while first - 1 in there and last - first < MOST_STEPS - 1:
        first -= 1
    end = last
    while end + 1 in there and end - last < later:
        end += 1
    return list(range(first, end + 1)) if last in there else []


def _is_one_step(scene: Scene, number: int) -> bool:
    """Whether both optimizers took one step in it."""
    sides = scene.sides(number)
    if sides is None:
        return False
    calls = sides.map(lambda step: {r.call for r in step.records if r.stage == "update" and r.layer != "(loop)"})
    return calls.reference == calls.candidate == {0}


def _track(scene: Scene, place: Place, numbers: Sequence[int], most: int) -> Track | None:
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
    whole = elements and histories.reference.weights.shape[1] == size
    return Track(place, shape, elements, whole, histories, noise)


def _history(rows: dict[str, list[np.ndarray]], steps: int) -> History:
    return History(np.stack(rows["grad"]), np.stack(rows["weight"]), np.stack(rows["update"]), np.ones(steps))


def _noise(history: History, rounding: float, elements: bool) -> np.ndarray:
    """What rounding makes of an update: that of the weight it is taken from, and of the rule's arithmetic."""
    weights, updates = np.abs(history.weights), np.abs(history.updates)
    if not elements:
        # Of a sum with random signs the noise is as large as that of all of its terms together.
        weights, updates = (np.broadcast_to(_root(v), v.shape) for v in (weights, updates))
    noise = rounding * (weights + _OPERATIONS * updates + _CANCELLED * _root(updates))
    return np.asarray(np.maximum(noise, np.finfo(np.float64).tiny * 1e20))


def _root(values: np.ndarray) -> np.ndarray:
    return np.asarray(np.sqrt(np.mean(np.square(values), axis=1, keepdims=True)))


def _rates(scene: Scene, numbers: Sequence[int]) -> Both[np.ndarray] | None:
    """The learning rates of each step, by parameter group; of ones where they are not recorded."""
    rates = [scene.rates(number) for number in numbers]
    found = []
    for side in ("reference", "candidate"):
        rows = [getattr(rate, side) for rate in rates]
        if len({len(row) for row in rows}) != 1:
            return None
        found.append(np.array(rows) if rows[0] else np.ones((len(numbers), 1)))
    return Both(*found)
