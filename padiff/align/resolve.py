"""Answering doubts by values: where both runs start from the same weights, only one way of storing them fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from padiff.align.alignment import Alignment, ParameterPair, Seen, Values
from padiff.records import Both
from padiff.sketches.sketch import Sketch

#: Largest relative L2 error at which two starting weights count as the same.
_SAME = 1e-3


def settled(make: Callable[[Mapping[str, str]], Alignment], seen: Both[Seen]) -> Alignment:
    """The alignment with each doubt answered by the option under which most starting weights agree.

    Args:
        make: makes the alignment, given answers to doubts.
        seen: what running the two models showed; without values, what is usual is assumed.
    """
    alignment = make({})
    values = seen.map(lambda side: side.values)
    if None in values:
        return alignment
    choices: dict[str, str] = {}
    for doubt in alignment.doubts:
        agreeing = {option: _agreeing(make({**choices, doubt.about: option}), values) for option in doubt.options}
        best = max(doubt.options, key=lambda option: agreeing[option])
        if agreeing[best]:
            choices[doubt.about] = best
    return make(choices) if choices else alignment


def _agreeing(alignment: Alignment, values: Both[Values | None]) -> int:
    """How many of the pairs of matrices hold the same values."""
    return sum(_same(pair, values) for pair in alignment.parameters)


def _same(pair: ParameterPair, values: Both[Values | None]) -> bool:
    taken = []
    for parts, read in zip(pair, values):
        stored = read(parts[0].layer, parts[0].slot) if read is not None and len(parts) == 1 else None
        if stored is None or isinstance(stored, Sketch):
            return False
        taken.append(parts[0].take(stored).ravel().astype(np.float64))
    a, b = taken
    return a.size == b.size and bool(np.linalg.norm(a - b) <= _SAME * np.linalg.norm(a))
