"""Further faults in the steps after the first diff's: what no tensor that differs can have caused.

Each step is looked at for little: its inputs, whether its optimizers stepped, and a few of its weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from padiff.align import Alignment
from padiff.compare.diagnose.aftermath.fault import Fault
from padiff.compare.diagnose.first import scene_of
from padiff.compare.diagnose.hypotheses import held, written
from padiff.compare.diagnose.hypotheses.engine import explain
from padiff.compare.diagnose.hypotheses.proof import explains, weigh
from padiff.compare.diagnose.hypotheses.scene import Place, Scene, alike, place_of, rounding_of
from padiff.compare.diagnose.shifted import shift_cause
from padiff.errors import PadiffError
from padiff.records import LOOP, Both, Cause, Diff, FirstDiff, Recomputed, Run, Step
from padiff.records.both import SIDES

# Weights that are looked at in each step, and how many of their elements; how near each has to be to what its update
# comes to, and how far off the one that was written is, in units of rounding. Chosen.
_WEIGHTS, _ELEMENTS = 4, 512
_NEAR, _FAR = 8.0, 100.0
# Hypotheses on what wrote to weights.
_TRIED = 20
# Steps after the first diff's of which weights are looked at: each costs a step's records to be paired again.
_STEPS = 16


class Later:
    """Looks at the steps after the first diff's.

    Args:
        first: the first diff.
        runs: reference and candidate.
    """

    def __init__(self, first: FirstDiff, runs: Both[Run]) -> None:
        self._first, self._runs = first, runs
        self._steps = 0
        # Whatever differed once is no news when it differs again.
        self._seen: set[str] = {"input"} if first.stage == "input" else set()
        if first.diff is not None and not first.diff.pair.complete:
            self._seen.add("stepped")
        if first.stage == "weight" and first.step:
            self._seen.add("written")

    def look(self, diffs: Sequence[Diff], alignment: Alignment) -> Iterator[Fault]:
        """The faults of a step.

        Args:
            diffs: its judged diffs, of one rank.
        """
        self._steps += 1
        if self._steps > _STEPS:
            self._seen.add("written")
        if self._seen >= {"input", "stepped", "written"}:
            return
        wrong = [d for d in diffs if not d.passed]
        for name, find in (("input", self._input), ("stepped", self._stepped), ("written", self._written)):
            if name in self._seen:
                continue
            try:
                with np.errstate(all="ignore"):
                    fault = find(wrong, diffs, alignment)
            except (PadiffError, OSError, KeyError, ValueError, IndexError):
                continue  # what would tell it is no longer there
            if fault is not None:
                self._seen.add(name)
                yield fault

    def _scene(self, diff: Diff, diffs: Sequence[Diff], alignment: Alignment) -> Scene:
        return scene_of(diff, diffs, alignment, self._runs)

    def _input(self, wrong: Sequence[Diff], diffs: Sequence[Diff], alignment: Alignment) -> Fault | None:
        """Another batch; a model may make its own inputs, so it has to be one of the reference's."""
        diff = next((d for d in wrong if d.pair.stage == "input" and d.pair.complete), None)
        if diff is None:
            return None
        self._seen.add("input")
        cause = shift_cause(diff, self._runs) or explain(self._scene(diff, diffs, alignment)).cause
        return Fault(diff, cause, kind="input") if cause is not None and cause.proven else None

    def _stepped(self, wrong: Sequence[Diff], diffs: Sequence[Diff], alignment: Alignment) -> Fault | None:
        """A step that an optimizer left out, or took twice."""
        diff = next(
            (
                d
                for d in wrong
                if d.pair.stage in ("grad", "update") and not d.pair.complete and d.pair.anchor.layer != LOOP
            ),
            None,
        )
        if diff is None:
            return None
        self._seen.add("stepped")
        cause = next(held.causes(self._scene(diff, diffs, alignment)), None)
        if cause is None or not cause.proven or cause.kind not in ("step_skipped", "step_repeated"):
            return None
        return Fault(diff, cause, kind="update")

    def _written(self, wrong: Sequence[Diff], diffs: Sequence[Diff], alignment: Alignment) -> Fault | None:
        """A weight that is not what the step before, and its update, come to; on the other side it is."""
        weights = [d for d in wrong if d.pair.stage == "weight" and d.pair.complete]
        if not weights:
            return None
        largest = sorted(weights, key=lambda d: -float(np.prod(d.pair.anchor.shape)))[:_WEIGHTS]
        scene = self._scene(weights[0], diffs, alignment)
        sides = scene.sides(scene.number - 1) if scene.number - 1 in scene.numbers else None
        if sides is None or any(_steps(step) != 1 for step in sides):
            return None  # an optimizer did not step, or it did twice: that is reported by itself
        off: list[tuple[Diff, Both[float], Both[float]]] = []
        for diff in largest:
            found = _beside_its_update(scene, diff, place_of(diff.pair))
            if found is not None:
                off.append((diff, *found))
        if not off:
            return None
        for side, other in (tuple(SIDES.swapped()), tuple(SIDES)):
            alone = [one for one in off if getattr(one[1], side) > _FAR]
            if alone and all(getattr(one[1], other) <= _NEAR for one in off):
                diff, _, shares = alone[0]
                cause = _what_wrote(replace(scene, diff=diff))
                return Fault(diff, cause, Recomputed("weight", Both("", ""), shares, side), kind="weight")
        return None


def _steps(step: Step) -> int:
    """How many steps an optimizer took."""
    return len({record.call for record in step.records if record.stage == "update" and record.layer != LOOP})


def _what_wrote(scene: Scene) -> Cause | None:
    """What the weights are instead, if that is proven."""
    for one in islice(written.hypotheses(scene), _TRIED):
        if explains(weigh(one.predict()), one):
            return Cause(one.kind, one.sentence, True, fix=one.fix)
    return None


def _beside_its_update(scene: Scene, diff: Diff, at: Place) -> tuple[Both[float], Both[float]] | None:
    """What each side's weight is off by, beside the step before's and its update: in rounding, and as a share."""
    before, added = (scene.pairs(scene.number - 1, stage).get(at) for stage in ("weight", "update"))
    if before is None or added is None:
        return None
    now, was, by = alike((diff.pair, before, added), _ELEMENTS)
    if now is None or was is None or by is None or not now.reference.shape == was.reference.shape == by.reference.shape:
        return None
    rounding = rounding_of(diff.pair)
    noise, share = [], []
    for values, start, update in ((getattr(now, s), getattr(was, s), getattr(by, s)) for s in SIDES):
        error = float(np.linalg.norm(values - start - update))
        size = float(np.linalg.norm(values))
        if not size or not rounding or not np.isfinite(error):
            return None
        noise.append(error / (size * rounding))
        share.append(error / size)
    return Both(*noise), Both(*share)
