"""Observations from running a model, in addition to its tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from padiff.records import LOOP, Both, Step, is_functional
from padiff.records.stored_records import without_values
from padiff.sketches.sketch import Sketch

#: ``values(path, slot)``: the values of a layer's parameter, or `None` if they are not available.
Values = Callable[[str, str], "np.ndarray | Sketch | None"]


@dataclass(frozen=True)
class RuntimeEvidence:
    """Observations from running a model, in addition to its tree.

    Attributes:
        order: position of each layer's first forward call, by path; layers that were not called are absent.
        outputs: shape of the first output of each layer's first call, by path.
        values: the parameters' values at the start; `None` if they are not available.
    """

    order: Mapping[str, int] = field(default_factory=dict)
    outputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    values: Values | None = None

    @classmethod
    def from_step(cls, step: Step) -> RuntimeEvidence:
        """Return the observations of a recorded step."""
        order: dict[str, int] = {}
        outputs: dict[str, tuple[int, ...]] = {}
        weights: dict[tuple[str, str], int] = {}
        for place, record in enumerate(without_values(step.records)):
            if record.stage == "forward" and record.layer != LOOP and not is_functional(record.slot):
                order.setdefault(record.layer, record.order)
                outputs.setdefault(record.layer, record.shape)
            elif record.stage == "weight":
                weights[record.layer, record.slot] = place

        def values(path: str, slot: str) -> np.ndarray | Sketch | None:
            place = weights.get((path, slot))
            if place is None:
                return None
            source = step.records[place].source
            return source.sketch if source.sketched else source.read()

        return cls(order, outputs, values if weights else None)


#: Observations of models that were not run.
NOTHING_SEEN = Both(RuntimeEvidence(), RuntimeEvidence())
