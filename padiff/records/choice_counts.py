"""Counts of choices that differ within rounding between two runs."""

from __future__ import annotations

from dataclasses import dataclass

from padiff.records.recorded import LOOP


@dataclass(frozen=True, slots=True)
class ChoiceCounts:
    """Rows (tokens, samples, places) of scores that chose otherwise in one step, by scores that agree within rounding.

    Attributes:
        step: number of the step.
        calls: functions that chose, with the reference's layer: ``("topk", "layers.1.gate")``.
        flipped, rows: number of rows that chose otherwise, and of all rows.
        without: number of tensors judged without these rows, or with a limit that these raise.
        unjudged: number of tensors that were not judged because of these rows.
    """

    step: int
    calls: tuple[tuple[str, str], ...]
    flipped: int
    rows: int
    without: int
    unjudged: int


def choices_text(counts: tuple[ChoiceCounts, ...]) -> str:
    """Return the counts of all steps as a sentence without its end; empty if nothing chose otherwise."""
    if not counts:
        return ""
    calls = {call for each in counts for call in each.calls}
    names = " and ".join(sorted({f"{function}()" for function, _ in calls}))
    layers = {layer for _, layer in calls}
    where = next(iter(layers)) if len(layers) == 1 else f"{len(layers)} layers"
    where = "the loop" if where == LOOP else where
    flipped, rows, without, unjudged = (
        sum(getattr(each, name) for each in counts) for name in ("flipped", "rows", "without", "unjudged")
    )
    rate = f"{names} of {where}: {flipped:,} of {rows:,}"
    if len(counts) > 1:
        text = f"{rate} rows choose otherwise in {len(counts):,} steps, within rounding"
    else:
        text = f"{rate} rows choose otherwise, within rounding"
    costs = [
        f"{without:,} tensor{'s are' if without > 1 else ' is'} judged without these rows" * bool(without),
        f"{unjudged:,} not judged" * bool(unjudged),
    ]
    costs = [cost for cost in costs if cost]
    return f"{text}: {', '.join(costs)}" if costs else text
