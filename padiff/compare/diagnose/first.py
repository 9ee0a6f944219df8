"""The first diff: where it is, how far it reaches, and why."""

from __future__ import annotations

from collections.abc import Sequence

from padiff.align import Alignment
from padiff.compare.diagnose.causes import cause
from padiff.compare.diagnose.environments import environment_cause
from padiff.compare.diagnose.evidence import Evidence
from padiff.compare.diagnose.extent import extent_of
from padiff.compare.diagnose.shifted import shift_cause
from padiff.records import Both, Diff, FirstDiff, Pair


def first_diff(diffs: Sequence[Diff], evidence: Evidence) -> FirstDiff | None:
    """The first diff that did not pass; `None` if all passed."""
    diff = next((diff for diff in diffs if not diff.passed), None)
    if diff is None:
        return None
    pair, runs, alignment = diff.pair, evidence.runs, evidence.alignment
    reference, candidate = _paths(pair, alignment)
    infos = runs.map(lambda run: run.info)
    step = [d for d in diffs if d.pair.step == pair.step]
    return FirstDiff(
        pair.step,
        pair.stage,
        reference,
        candidate,
        pair.anchor.slot,
        diff,
        shift_cause(diff, runs)
        or environment_cause(diff, infos)
        or cause(diff, step, alignment, evidence.declared(pair.step)),
        extent=extent_of(diff, step, evidence.agreed),
    )


def _paths(pair: Pair, alignment: Alignment) -> Both[str | None]:
    """Paths of both layers; where one side's record is missing, the layer that would have had it."""
    reference, candidate = pair.sides.map(lambda record: record.layer if record is not None else None)
    for layers in alignment.pairs:
        if reference is None and layers.candidate.path == candidate:
            reference = layers.reference.path
        elif candidate is None and layers.reference.path == reference:
            candidate = layers.candidate.path
    return Both(reference, candidate)
