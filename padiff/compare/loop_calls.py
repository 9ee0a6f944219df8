"""Alignment of the calls that two training loops make of their models."""

from __future__ import annotations

from dataclasses import replace

from padiff.align import Alignment
from padiff.align.call_order import call_order, derived_inputs, outermost_calls
from padiff.errors import PadiffError
from padiff.pair.same_inputs import inputs_agree
from padiff.records import Both, RunInfo, Step, settings_at
from padiff.records.stored_records import without_values


def with_loop(alignment: Alignment, steps: Both[Step], infos: Both[RunInfo]) -> Alignment:
    """Return the alignment with the order of the loops' calls, and the inputs that they derive from other outputs."""
    settings = infos.zip(steps).map(lambda side: settings_at(side[0].settings, side[1].settings))
    paths = [(pair.reference.path, pair.candidate.path) for pair in alignment.pairs]
    try:
        named = steps.map(lambda step: replace(step, records=without_values(step.records)))
        derived = named.zip(settings).map(lambda side: derived_inputs(*side))
        alignment = replace(alignment, derived=derived)
        if not any(call for step in named for _, call in outermost_calls(step.records)):
            return alignment  # each layer is called once
        return replace(alignment, call_order=call_order(steps, derived, paths, inputs_agree))
    except PadiffError:  # a trace is damaged, or the values can no longer be read
        return alignment
