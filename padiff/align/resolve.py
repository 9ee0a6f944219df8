"""Answering ambiguities by values: where both runs start from the same weights, only one way of storing them fits."""

from __future__ import annotations

import numpy as np

from padiff.align.alignment import Alignment
from padiff.align.seen import Seen, Values
from padiff.align.slices import ParameterPair
from padiff.records import Both
from padiff.sketches.sketch import Sketch

#: Relative L2 error below which two starting weights count as the same.
_SAME = 1e-3


def resolved(alignment: Alignment, seen: Both[Seen]) -> Alignment:
    """The alignment with each ambiguity answered by the option under which most of its own starting weights agree.

    Args:
        seen: what running the two models showed; without values, what is usual is assumed.
    """
    values = seen.map(lambda side: side.values)
    storage = alignment.storage
    if storage is None or None in values:
        return alignment
    for ambiguity in alignment.ambiguities:
        agreeing = {
            option: sum(_same(pair, values) for pair in storage.pairs_if(ambiguity.about, option))
            for option in ambiguity.options
        }
        # That other weights agree says nothing of these: where no option fits, the values do not tell.
        if any(agreeing.values()):
            storage = storage.answered({ambiguity.about: max(agreeing, key=agreeing.__getitem__)})
    return alignment.answered(storage.answers)


def _same(pair: ParameterPair, values: Both[Values | None]) -> bool:
    taken = []
    for parts, read in zip(pair, values):
        stored = read(parts[0].layer, parts[0].slot) if read is not None and len(parts) == 1 else None
        if stored is None or isinstance(stored, Sketch):
            return False
        taken.append(parts[0].take(stored).ravel().astype(np.float64))
    a, b = taken
    # Zeros agree in any order.
    return a.size == b.size and bool(np.linalg.norm(a - b) < _SAME * np.linalg.norm(a))
