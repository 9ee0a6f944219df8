"""Whether a planted fault does anything: its training against the same training without it."""

from __future__ import annotations

import math

import numpy as np
from kit import Trace


def effect(clean: Trace, faulty: Trace) -> float:
    """The larger of the relative changes of the weights and of the losses; infinite where they do not compare."""
    if len(clean.losses) != len(faulty.losses) or clean.weights.keys() != faulty.weights.keys():
        return math.inf
    losses = np.abs(np.subtract(clean.losses, faulty.losses)) / (np.abs(clean.losses) + 1e-8)
    moved = 0.0
    for name, value in clean.weights.items():
        if value.shape != faulty.weights[name].shape:
            return math.inf
        moved = max(moved, float(np.linalg.norm(value - faulty.weights[name]) / (np.linalg.norm(value) + 1e-8)))
    return max(float(losses.max()), moved)
