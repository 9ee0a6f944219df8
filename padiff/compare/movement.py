"""Measurement of how far a run's own training moved."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from padiff.compare.measure.pairs import measure_pair
from padiff.errors import PadiffError
from padiff.records import LOOP, Pair, Record, Run
from padiff.records.diff_rows import FIGURE_NUMBERS
from padiff.records.judgement import Figure
from padiff.records.movement import Movement
from padiff.records.step_diffs import StepDiffs
from padiff.records.stored_records import without_values

# Largest number of parameters that are looked at, evenly spread over the model.
_MOST = 32

# Number of the figure that is relative to the tensor.
_RELATIVE = FIGURE_NUMBERS[Figure.REL_L2]

Site = tuple[str, str]


def movement(run: Run, steps: Sequence[int], last: StepDiffs) -> Movement | None:
    """Return how far a run's training moved; `None` if its records do not show it.

    Args:
        run: the reference.
        steps: numbers of the compared steps.
        last: the diffs of the last compared step.
    """
    try:
        records = [run.steps(number)[0].records for number in (steps[0], steps[-1])]
        places = [_places(each) for each in records]
        trained = [site for site in places[0]["weight"] if site in places[-1]["update"]]
        chosen = trained[:: max(1, -(-len(trained) // _MOST))]
        # Within one step, the update is what moved.
        others = places[1]["update" if len(steps) == 1 else "weight"]
        pairs = [(records[0][places[0]["weight"][site]], records[1][others[site]]) for site in chosen if site in others]
        if len(steps) == 1:
            moved = [(_norm(update), _norm(weight)) for weight, update in pairs]
        else:
            moved = [_distance(before, after) for before, after in pairs]
        losses = [_loss(each, where["loss"]) for each, where in zip(records, places)]
    except (PadiffError, OSError, ValueError):
        return None  # what can no longer be read shows nothing
    size = math.hypot(*(norm for _, norm in moved))
    sites = set(trained)
    here = [place for place in last.known_places("weight").tolist() if last.sites.keys[place] in sites]
    if not size or not here or not math.isfinite(size):
        return None
    share = math.hypot(*(distance for distance, _ in moved)) / size
    updates = [place for place in last.known_places("update").tolist() if last.rows["figure"][place] == _RELATIVE]
    both = (losses[0], losses[1]) if len(steps) > 1 and losses[0] is not None and losses[1] is not None else None
    # A fault shows in the weights or, as a share of the movement, in the updates.
    limit = float(np.median(last.rows["limit"][here]))
    if updates:
        limit = min(limit, share * float(np.median(last.rows["limit"][updates])))
    return Movement(share, limit, both) if math.isfinite(share) else None


def _places(records: Sequence[Record]) -> dict[str, dict[Site, int]]:
    """Return the position of each weight, update and loss among the records."""
    places: dict[str, dict[Site, int]] = {"weight": {}, "update": {}, "loss": {}}
    for place, record in enumerate(without_values(records)):
        if record.stage in places:
            places[record.stage].setdefault((record.layer, record.slot), place)
    return places


def _distance(first: Record, last: Record) -> tuple[float, float]:
    figures = measure_pair(Pair(0, first, last)).figures
    return (math.nan, math.nan) if figures is None else (figures.l2, figures.reference_l2)


def _norm(record: Record) -> float:
    return _distance(record, record)[1]


def _loss(records: Sequence[Record], places: dict[Site, int]) -> float | None:
    place = places.get((LOOP, "loss"))
    record = None if place is None else records[place]
    return None if record is None or record.source.sketched or record.shape else float(record.value)
