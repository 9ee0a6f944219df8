"""Comparison of the inputs of two calls: which calls of two loops are the same."""

from __future__ import annotations

import numpy as np

from padiff.pair.layouts import layout_between
from padiff.records import Record

# Largest relative error of two inputs that are the same: more than rounding of one step, less than other samples.
_AGREES = 1e-3


def inputs_agree(reference: Record, candidate: Record) -> bool:
    """Return True if two inputs of models are the same but for rounding.

    Raises:
        PadiffError: the values can no longer be read.
    """
    if sorted(reference.shape) != sorted(candidate.shape) or reference.source.sketched != candidate.source.sketched:
        return False
    sketches = reference.source.sketch, candidate.source.sketch
    if sketches[0] is not None and sketches[1] is not None:
        if sketches[0].size != sketches[1].size or sketches[0].transposed != sketches[1].transposed:
            return False
        error, size = float(np.linalg.norm(sketches[0].errors(sketches[1]))), sketches[0].l2
        return error <= _AGREES * size
    layout = layout_between(reference.shape, candidate.shape)
    values = np.asarray(layout.apply(candidate.value, reference.shape), np.float64)
    expected = np.asarray(reference.value, np.float64)
    if values.shape != expected.shape or not np.isfinite(values).all():
        return False
    return float(np.linalg.norm(values - expected)) <= _AGREES * float(np.linalg.norm(expected))
