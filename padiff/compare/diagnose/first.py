"""The first diff: where it is, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from padiff.align import Alignment
from padiff.compare.diagnose.causes import cause
from padiff.compare.diagnose.environments import environment_cause
from padiff.compare.diagnose.shifted import shift_cause
from padiff.records import Both, Diff, Difference, FirstDiff, Pair, Run


def first_diff(
    diffs: Sequence[Diff],
    alignment: Alignment,
    runs: Both[Run],
    declared: Callable[[int], Sequence[Difference]] = lambda _: (),
) -> FirstDiff | None:
    """The first diff that did not pass, in one sentence; `None` if all passed.

    Args:
        runs: the reference and the candidate, where other steps may be looked at.
        declared: what the runs declare differently in a step.
    """
    diff = next((diff for diff in diffs if not diff.passed), None)
    if diff is None:
        return None
    pair = diff.pair
    reference, candidate = _paths(pair, alignment)
    infos = runs.map(lambda run: run.info)
    reason = (
        shift_cause(diff, runs)
        or environment_cause(diff, infos)
        or cause(diff, [d for d in diffs if d.pair.step == pair.step], alignment, declared(pair.step))
    )
    return FirstDiff(pair.step, pair.stage, reference, candidate, pair.anchor.slot, diff, reason)


def _paths(pair: Pair, alignment: Alignment) -> Both[str | None]:
    """Paths of both layers; where one side's record is missing, the layer that would have had it."""
    reference, candidate = pair.sides.map(lambda record: record.layer if record is not None else None)
    for layers in alignment.pairs:
        if reference is None and layers.candidate.path == candidate:
            reference = layers.reference.path
        elif candidate is None and layers.reference.path == reference:
            candidate = layers.candidate.path
    return Both(reference, candidate)
