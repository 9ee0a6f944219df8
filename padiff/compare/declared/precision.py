"""Precision of two runs, read from the dtypes of layers' outputs: trainers switch autocast on out of the user's
sight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from padiff.align import Alignment
from padiff.compare.judge.limits import ROUNDING, coarse
from padiff.records import LOOP, Both, Difference, Step, is_functional
from padiff.records.stored_records import without_values

_NOTE = "the coarser one rounds each output, and so much is allowed of all stages"


def precision_differences(alignment: Alignment, steps: Both[Step]) -> Iterator[Difference]:
    """Yield the floating dtypes of outputs that differ between paired layers.

    The difference alone does not count: both may be intended, and tensors are judged by the coarser dtype.
    """
    dtypes = steps.map(_dtypes)
    pairs = [
        Both(dtypes.reference[pair.reference.path], dtypes.candidate[pair.candidate.path])
        for pair in alignment.pairs
        if pair.reference.path in dtypes.reference and pair.candidate.path in dtypes.candidate
    ]
    dtype_counts = Counter(tuple(pair) for pair in pairs if pair.reference != pair.candidate)
    for (reference, candidate), count in dtype_counts.most_common():
        yield Difference(
            "dtype",
            Both(reference, candidate),
            "forward",
            "precision",
            about=f"outputs of {count} of {len(pairs)} layers",
            changes=False,
            note=_NOTE,
        )


def _dtypes(step: Step) -> dict[str, str]:
    """Return the dtype of each layer's first output, if it is a floating dtype."""
    by_layer: dict[str, str] = {}
    for record in without_values(step.records):
        if record.stage == "forward" and record.layer != LOOP and not is_functional(record.slot):
            by_layer.setdefault(record.layer, coarse(record.dtype))
    return {path: dtype for path, dtype in by_layer.items() if dtype in ROUNDING}
