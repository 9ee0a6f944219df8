"""The first diff: where it is, and why."""

from __future__ import annotations

from collections.abc import Sequence

from padiff.align import Alignment
from padiff.compare.diagnose.causes import guess, recorded_cause
from padiff.compare.diagnose.environments import environment_cause
from padiff.compare.diagnose.hypotheses import held
from padiff.compare.diagnose.hypotheses.engine import Finding, explain
from padiff.compare.diagnose.hypotheses.scene import Scene
from padiff.compare.diagnose.shifted import shift_cause
from padiff.records import Both, Diff, FirstDiff, Pair, Run


def first_diff(diffs: Sequence[Diff], alignment: Alignment, runs: Both[Run], compute: bool = True) -> FirstDiff | None:
    """The first diff that did not pass, in one sentence; `None` if all passed.

    Args:
        runs: the reference and the candidate, where other steps may be looked at.
        compute: whether hypotheses on its cause are computed, which takes a second or so.
    """
    diff = next((diff for diff in diffs if not diff.passed), None)
    if diff is None:
        return None
    pair = diff.pair
    reference, candidate = _paths(pair, alignment)
    step = [d for d in diffs if d.pair.step == pair.step]
    scene = _scene(diff, step, alignment, runs)
    reason = shift_cause(diff, runs) or environment_cause(diff, runs.map(lambda run: run.info))
    reason = reason or next(held.causes(scene), None) or recorded_cause(diff, step, alignment)
    if reason is None:
        found = explain(scene) if compute else Finding()
        reason = found.cause or guess(diff, step, alignment, found.excluded)
    return FirstDiff(pair.step, pair.stage, reference, candidate, pair.anchor.slot, diff, reason)


def _scene(diff: Diff, step: Sequence[Diff], alignment: Alignment, runs: Both[Run]) -> Scene:
    """What hypotheses look at: of a step's diffs those of the first one's rank, which come one after the other."""
    ranks: list[list[Diff]] = [[]]
    seen: set[tuple[bool, str]] = set()
    for one in step:
        site = one.pair.reference is None, one.pair.anchor.site
        if site in seen:
            ranks.append([])
            seen.clear()
        seen.add(site)
        ranks[-1].append(one)
    number = next((k for k, rank in enumerate(ranks) if any(one is diff for one in rank)), 0)
    return Scene(diff, ranks[number], alignment, runs, number)


def _paths(pair: Pair, alignment: Alignment) -> Both[str | None]:
    """Paths of both layers; where one side's record is missing, the layer that would have had it."""
    reference, candidate = pair.sides.map(lambda record: record.layer if record is not None else None)
    for layers in alignment.pairs:
        if reference is None and layers.candidate.path == candidate:
            reference = layers.reference.path
        elif candidate is None and layers.reference.path == reference:
            candidate = layers.candidate.path
    return Both(reference, candidate)
