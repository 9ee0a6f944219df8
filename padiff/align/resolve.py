"""Resolution of storage ambiguities by starting weights: if both runs start equal, only one way of storage fits."""

from __future__ import annotations

import numpy as np

from padiff.align.alignment import Alignment
from padiff.align.runtime_evidence import RuntimeEvidence, Values
from padiff.align.slices import ParameterPair
from padiff.records import Both
from padiff.sketches.sketch import Sketch

#: Relative L2 error below which two starting weights count as the same.
_SAME = 1e-3


def resolved(alignment: Alignment, seen: Both[RuntimeEvidence]) -> Alignment:
    """Return the alignment with each ambiguity answered by the option under which most starting weights agree.

    Args:
        seen: observations from running the two models; without values, the default options stay.
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
        # If no option fits, the weights of this ambiguity start unequal, and the values do not decide it.
        if any(agreeing.values()):
            storage = storage.answered({ambiguity.about: max(agreeing, key=agreeing.__getitem__)})
    return alignment.answered(storage.answers)


def _same(pair: ParameterPair, values: Both[Values | None]) -> bool:
    arrays = []
    for parts, read in zip(pair, values):
        stored = read(parts[0].layer, parts[0].slot) if read is not None and len(parts) == 1 else None
        if stored is None or isinstance(stored, Sketch):
            return False
        arrays.append(parts[0].read(stored).ravel().astype(np.float64))
    a, b = arrays
    # Zeros agree in any order.
    return a.size == b.size and bool(np.linalg.norm(a - b) < _SAME * np.linalg.norm(a))
