"""Choices of the reference, given to the candidate's functions that choose."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from padiff.compare.judge.flipped_rows import SINGLE
from padiff.compare.judge.limits import allowed
from padiff.errors import RunFolderError, SketchOnlyError
from padiff.frameworks.values import Tensors
from padiff.recorder.choosing import Ranks, Seen, picked, ranks_of
from padiff.recorder.plain_arguments import plain_arguments
from padiff.records import LOOP, Step, is_below
from padiff.replaying.feeding import CallFeeder
from padiff.system.naming import first_few


@dataclass(frozen=True)
class RecordedChoice:
    """What a call of the reference chose.

    Attributes:
        layer: path of the layer.
        function: the function's common name.
        places: the chosen places of each row, of shape (rows, chosen).
    """

    layer: str
    function: str
    places: np.ndarray


def choices_of(step: Step) -> list[RecordedChoice]:
    """Return the choices of a recorded step that can be given to another model, in order."""
    try:
        calls = [call for call in step.trace.calls if call.choice is not None and call.layer != LOOP]
    except RunFolderError:
        return []
    choices = []
    for call in calls:
        choice = call.choice
        assert choice is not None
        source = step.trace.tensors[choice.picked].source
        if not choice.chosen or choice.every != 1 or source is None or source.sketched:
            continue
        try:
            places = np.atleast_2d(source.read())
        except (RunFolderError, SketchOnlyError):
            continue
        if places.shape == (choice.rows, choice.chosen):
            choices.append(RecordedChoice(call.layer, call.function, places.astype(np.int64)))
    return choices


def unpinned(step: Step) -> list[str]:
    """Return the calls that choose, and whose choice can't be given to another model, as ``layer (function)``."""
    try:
        calls = [call for call in step.trace.calls if call.choice is not None]
    except RunFolderError:
        return []
    left = [call for call in calls if call.choice is not None and (not call.choice.chosen or call.choice.every != 1)]
    return list(dict.fromkeys(f"{call.layer} ({call.function})" for call in left))


@dataclass
class _Pinned:
    """How often a layer's calls were given places, and in how many rows they chose otherwise themselves."""

    rows: int = 0
    otherwise: int = 0
    layers: dict[str, None] = field(default_factory=dict)


class ChoiceFeeder(CallFeeder[RecordedChoice]):
    """Source of the reference's choices for the candidate's functions that choose.

    A call takes the next unused choice among as many places of as many rows, from the partner of the innermost
    enclosing layer that has one, then from the partners of the layers around. It keeps its own choice if no choice
    fits, or if its scores say that rounding does not explain the other one: then the difference is to be seen.

    Args:
        choices: the reference's choices of the step, in order.
        partners: the reference's layer path by the candidate's layer path.
        running: returns the paths of the candidate's running layer calls, outermost first.
        recomputing: returns True inside a forward that is repeated during backward.
        tensors: the candidate's framework.
        unheard: context for calls that are not the user's.
    """

    def __init__(
        self,
        choices: Sequence[RecordedChoice],
        partners: Mapping[str, str],
        running: Callable[[], Sequence[str]],
        recomputing: Callable[[], bool],
        tensors: Tensors,
        unheard: Callable[[], AbstractContextManager[None]],
    ) -> None:
        super().__init__(partners, running, recomputing)
        self._waiting = list(choices)
        self._tensors, self._unheard = tensors, unheard
        self._pinned: dict[str, _Pinned] = defaultdict(_Pinned)
        self._refused: dict[str, None] = {}

    def notes(self) -> Iterator[str]:
        """Yield what was pinned, and what was not."""
        for function, pinned in self._pinned.items():
            layers = len(pinned.layers)
            where, counts = f"{layers} layer{'s' * (layers > 1)}", f"{pinned.otherwise:,} of {pinned.rows:,} rows"
            yield f"{function}() of {where} takes the reference's places: {counts} choose otherwise, within rounding"
        for call in self._refused:
            yield f"{call} keeps its own choice, which is not the reference's"
        left = list(dict.fromkeys(f"{choice.layer} ({choice.function})" for choice in self._waiting))
        if left:
            yield f"choices of the reference that no call here took: {first_few(left, 4)}"

    def places(self, name: str, arguments: Mapping[str, Any], output: Any) -> tuple[int | None, np.ndarray] | None:
        """Return the axis and the reference's places for a call; `None` to leave the call its own."""
        scores = next(iter(arguments.values()))
        if not self._tensors.is_tensor(scores):
            return None
        ranks = ranks_of(name, plain_arguments(arguments), self._tensors.shape(scores))
        if ranks is None:
            return None
        with self._unheard(), self._tensors.without_grad():
            table = self._tensors.rows(scores, ranks.axis)
            rows = self._tensors.shape(table)[0]
            outputs = list(output) if isinstance(output, (tuple, list)) else [output]
            own = picked(self._tensors, Seen(ranks, rows, 1, None, None), outputs)
            if own is None:
                return None
            own, table = (self._tensors.copy(tensor) for tensor in (own, table))
        choice = self._choice(name, own.shape)
        if choice is None or int(choice.places.max(initial=0)) >= table.shape[1]:
            return None
        layer = self._running()[-1]
        otherwise = (own != choice.places).any(axis=1)
        if otherwise.any() and not _explained(table, own, choice.places, self._tensors.dtype(scores)):
            self._refused[f"{layer} ({name}, beyond rounding)"] = None
            return None
        pinned = self._pinned[name]
        pinned.rows, pinned.otherwise = pinned.rows + rows, pinned.otherwise + int(otherwise.sum())
        pinned.layers[layer] = None
        if not otherwise.any():
            return None
        shape = self._tensors.shape(next(each for each in reversed(outputs) if self._is_places(each)))
        return ranks.axis, _shaped(choice.places, ranks, self._tensors.shape(scores), tuple(shape))

    def refuse(self, name: str) -> None:
        """Note that a call keeps its own choice, in a form that is not known."""
        self._refused[f"{self._running()[-1]} ({name}, in a form that padiff does not know)"] = None

    def _is_places(self, tensor: Any) -> bool:
        return self._tensors.dtype(tensor).startswith("int")

    def _choice(self, name: str, shape: tuple[int, ...]) -> RecordedChoice | None:
        return self._feed(lambda: self._next(name, shape))

    def _next(self, name: str, shape: tuple[int, ...]) -> RecordedChoice | None:
        fitting = [choice for choice in self._waiting if choice.places.shape == shape]
        partners = self._partners_around()
        for alike in (True, False):
            for reference in partners:
                for choice in fitting:
                    within = choice.layer == reference or is_below(choice.layer, reference)
                    if within and (not alike or choice.function == name):
                        self._waiting = [each for each in self._waiting if each is not choice]
                        return choice
        return None


def _explained(scores: np.ndarray, own: np.ndarray, places: np.ndarray, dtype: str) -> bool:
    """Return True if the scores of both choices are so near that rounding can exchange them."""
    wide = scores.astype(np.float64)
    gaps = np.abs(np.take_along_axis(wide, own, 1) - np.take_along_axis(wide, places, 1))
    finite = wide[np.isfinite(wide)]
    size = math.sqrt(float((finite**2).mean())) if finite.size else 0.0
    return bool(np.nan_to_num(gaps, nan=np.inf).max() <= SINGLE * allowed(dtype, "forward") * size)


def _shaped(places: np.ndarray, ranks: Ranks, scores: Sequence[int], shape: tuple[int, ...]) -> np.ndarray:
    """Return places of rows in the shape in which a function returns them."""
    if ranks.axis is None:
        return places.reshape(shape)
    axis = ranks.axis % len(scores)
    lead = [extent for k, extent in enumerate(scores) if k != axis]
    return np.moveaxis(places.reshape(*lead, places.shape[1]), -1, axis).reshape(shape)
