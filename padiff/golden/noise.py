"""Rounding noise of a training's tensors, measured by running it again with weights moved in their last places."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from padiff.compare.judge.limits import ROUNDING, coarse
from padiff.dump.files import digest
from padiff.records import Record, Sketched, Step
from padiff.sketches.sketch import Sketch, sketch_of

#: Size of the move of each weight, in units in the last place: 16, as in measured floors, so that values cross kinks
#: (ReLU, maxima) as often as with larger noise.
UNITS = 16
#: Largest error of a drift, in multiples of the largest error in the moved runs. Chosen: the changes of
#: `benchmarks/goldens.py --seen` have at most half of this; a factor of 1.0001 is found by the norm all the same.
FACTOR = 8.0
#: Least limit, in units in the last place of the dtype that is computed in: for tensors that no weight moves. Chosen:
#: a transcendental function is right to 4 units in both frameworks' vector code, and is called a few times in a row.
LEAST = 16.0
#: The same of the norm and of the mean of many numbers: rounding cancels there, unless code rounds to one side. Chosen:
#: vector code is right to a unit, and is called a few times in a row.
LEAST_CANCELLED = 4.0
#: Units in the last place of a weight that an update may differ by: the decay, the product and the step each round.
ROUNDINGS = 3.0
#: Least limit of weights that a training starts from, and of buffers. Chosen: random draws are rounded two times.
LEAST_START = 4.0

# A running mean, and the variance that says what it is a mean of; the share of a batch in it by default.
_MEANS = {"running_mean": "running_var", "_mean": "_variance"}
_SHARE = 0.1


class Errors(NamedTuple):
    """Errors of a tensor between two runs, as shares of its root mean square.

    Attributes:
        l2: relative L2 error.
        size: share by which the norm is larger or smaller. Rounding cancels in it, a factor does not.
        mean: shift of the mean. Rounding cancels in it, a shift does not.
    """

    l2: float
    size: float
    mean: float

    def largest(self, other: Errors) -> Errors:
        """Return the larger one of each error."""
        return Errors(*map(max, self, other))


#: Errors of a tensor that did not change.
NOTHING = Errors(0.0, 0.0, 0.0)


def sketch_of_record(record: Record, transposed: bool = False) -> Sketch:
    """Return a record's sketch, of its values if these were recorded."""
    sketch = record.source.sketch
    return sketch_of(record.value, transposed) if sketch is None else sketch


def errors_between(before: Sketch, now: Sketch) -> Errors | None:
    """Return the errors of a tensor; `None` if a sketch does not tell."""
    if before.size != now.size or before.transposed != now.transposed or not before.size:
        return None
    norms = before.l2, now.l2
    if not all(map(math.isfinite, norms)) or before.nonfinite or now.nonfinite:
        return None
    if not norms[0]:
        return NOTHING if not norms[1] else None
    rms = norms[0] / math.sqrt(before.size)
    return Errors(
        float(np.linalg.norm(before.errors(now))) / norms[0],
        abs(norms[1] / norms[0] - 1),
        abs(now.mean - before.mean) / rms,
    )


def measured(base: Step, moved: Iterable[Step]) -> dict[str, Errors]:
    """Return the largest errors of each tensor of a step in the moved runs, by site."""
    sketches = {r.site: sketch_of_record(r) for r in base.records if coarse(r.dtype) in ROUNDING}
    noise: dict[str, Errors] = {}
    for step in moved:
        for record in step.records:
            before = sketches.get(record.site)
            if before is None:
                continue
            found = errors_between(before, sketch_of_record(record, before.transposed))
            if found is not None:
                noise[record.site] = found.largest(noise.get(record.site, NOTHING))
    for record in base.records:
        before = sketches.get(record.site)
        scale = None if before is None or record.site not in noise else _scale_of(record, before, sketches)
        if before is not None and scale is not None:
            noise[record.site] = noise[record.site].largest(_rounding_of(scale, before, record.dtype))
    return noise


def _scale_of(record: Record, sketch: Sketch, sketches: Mapping[str, Sketch]) -> float | None:
    """Return the L2 norm of the numbers whose rounding a tensor has although it is smaller; `None` if there is none.

    Moves by whole units keep the rounding of a weight that an update is added to, and moves of weights cancel in a
    mean, while the rounding of its terms does not.
    """
    if record.stage == "update":
        weight = sketches.get(record.site.replace("/update/", "/weight/"))
        return None if weight is None else ROUNDINGS / FACTOR * weight.l2
    if record.stage == "weight" and record.slot in _MEANS:
        variance = sketches.get(record.site.replace(record.slot, _MEANS[record.slot]))
        return None if variance is None else _SHARE * math.sqrt(max(variance.mean, 0.0) * sketch.size)
    return None


def _rounding_of(scale: float, sketch: Sketch, dtype: str) -> Errors:
    """Return the errors of a tensor by rounding numbers of a scale once, by a unit in the last place."""
    if not sketch.l2:
        return NOTHING
    error = 2 * ROUNDING[coarse(dtype)] * scale / sketch.l2
    # Of many numbers these errors cancel in the norm and in the mean.
    return Errors(error, *(error / math.sqrt(sketch.size),) * 2)


def limits_of(noise: Errors, dtype: str, is_start: bool, count: int) -> Errors:
    """Return the largest errors of a tensor that rounding explains.

    Args:
        noise: its errors in the moved runs.
        dtype: the coarsest dtype that the step computes in.
        is_start: the tensor is a weight that the training starts from, which the moved runs move themselves.
        count: its number of elements.
    """
    unit = 2 * ROUNDING[dtype]
    if is_start:
        return Errors(*(LEAST_START * unit,) * 3)
    cancelled = max(LEAST_CANCELLED, LEAST / math.sqrt(count))
    # The norm and the mean each take one direction of the same error. A single number of few runs may be small by
    # chance; that both are is much less likely.
    direction = max(noise.size, noise.mean)
    noise = Errors(noise.l2, direction, direction)
    return Errors(*(max(FACTOR * each, least * unit) for each, least in zip(noise, (LEAST, cancelled, cancelled))))


def limits_of_first(limits: Errors, dtype: str, count: int) -> Errors:
    """Return the limits of a tensor whose inputs are all equal to the bit, so that it inherits no error.

    Kernels that add in another order were measured at 15 units of L2, and a third of a unit of the norm and the mean.
    """
    least = max(LEAST_CANCELLED, LEAST / math.sqrt(count)) * 2 * ROUNDING[dtype]
    return Errors(limits.l2, min(limits.size, least), min(limits.mean, least))


def unit_of(noise: Errors, dtype: str) -> float:
    """Return one unit of a tensor's rounding noise: its relative L2 error for a move by one unit in the last place."""
    return max(noise.l2 / UNITS, ROUNDING[dtype])


def mark_of_record(record: Record) -> str:
    """Return a digest of a record's bits; of a sketch's, if its values were not recorded."""
    source = record.source
    array: Any = source.row if isinstance(source, Sketched) else record.value
    return digest(np.asarray(array))


def marks_of(step: Step) -> Mapping[str, str]:
    """Return the digests of a step's tensors by site."""
    return {record.site: mark_of_record(record) for record in step.records}
