"""Pairing of two runs of one model, whose records have the same names."""

from __future__ import annotations

from collections.abc import Callable

from padiff.align import Alignment
from padiff.align.matching.parameter_units import tie_targets
from padiff.pair.losses import identified_by_values
from padiff.pair.parameters import whole_layout
from padiff.pair.steps import causal_order
from padiff.records import LOOP, PARAMETER_STAGES, Both, Record, Step
from padiff.records.pair_schema import Key


def identity_pairing(steps: Both[Step], alignment: Alignment) -> list[int] | None:
    """Return the indices of two steps' records in the causal order of their pairs, if equal indices pair.

    Returns `None` if `padiff.pair.steps.pair_steps` would pair otherwise or in another layout, or if that is uncertain.
    """
    records = steps.reference.records
    answers = _answers(alignment)
    if (
        answers is None
        or alignment.call_order.numbers
        or not all(map(answers, records))
        or identified_by_values(records)
    ):
        return None
    if len({(record.layer, record.stage, record.slot, record.call) for record in records}) < len(records):
        return None
    order = causal_order(steps, alignment.derived)
    keys = [order(record, record) for record in records]
    return sorted(range(len(records)), key=keys.__getitem__)


def _answers(alignment: Alignment) -> Callable[[Record], bool] | None:
    """Return a predicate that is true for a record aligned with its namesake.

    Returns `None` if some paired layers or parameters differ in name, kind or layout.
    """
    if alignment.splits or alignment.cut_elsewhere or alignment.differ_inside:
        return None
    layers = alignment.pairs
    if any((a.path, a.type, a.kind) != (b.path, b.type, b.kind) for a, b in layers):
        return None
    parameters: set[Key] = set()
    for pair in alignment.parameters:
        layout = whole_layout(pair)
        if layout is None or layout:
            return None
        expected, actual = ((part.layer, part.slot) for part in (pair.reference[0], pair.candidate[0]))
        if expected != actual:
            return None
        parameters.add(expected)
    # A tied parameter is recorded under its target.
    homes = alignment.layers.map(tie_targets)
    if homes.reference != homes.candidate:
        return None
    parameters = {homes.reference.get(key, key) for key in parameters}
    paths = {layer.path for layer, _ in layers}

    def answers(record: Record) -> bool:
        if record.layer == LOOP:
            return True
        return record.layer in paths and (
            record.stage not in PARAMETER_STAGES or (record.layer, record.slot) in parameters
        )

    return answers
