"""Further faults in the steps after the first diff that no differing tensor can have caused.

Only a few facts are checked in each step: its inputs, the steps of its optimizers, and a few weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from padiff.align import Alignment
from padiff.compare.diagnose.first import scene_of
from padiff.compare.diagnose.followups.fault import Fault
from padiff.compare.diagnose.hypotheses import external_weight_write, missing_gradient
from padiff.compare.diagnose.hypotheses.diff_context import DiffContext, Place, alike, place_of, rounding_of
from padiff.compare.diagnose.hypotheses.engine import explain
from padiff.compare.diagnose.hypotheses.proof import explains, weigh
from padiff.compare.diagnose.shifted import shift_cause
from padiff.errors import PadiffError
from padiff.records import LOOP, Both, Cause, Diff, FirstDiff, Recomputed, Run, Step
from padiff.records.both import SIDES

# The most weights that are checked in each step, and the most elements of each; the largest error of an unchanged
# weight and the smallest error of a weight that was written to, in units of rounding. Chosen.
_WEIGHTS, _ELEMENTS = 4, 512
_NEAR, _FAR = 8.0, 100.0
# The most hypotheses on the code that wrote to the weights.
_TRIED = 20
# The most steps after the first diff whose weights are checked, as each step's records have to be paired again.
_STEPS = 16


class Later:
    """Search for faults in the steps after the first diff.

    Args:
        first: the first diff.
        runs: the reference and the candidate run.
    """

    def __init__(self, first: FirstDiff, runs: Both[Run]) -> None:
        self._first, self._runs = first, runs
        self._steps = 0
        # Names of the checks that are done: a fault is reported once.
        self._seen: set[str] = {"input"} if first.stage == "input" else set()
        if first.diff is not None and not first.diff.pair.complete:
            self._seen.add("stepped")
        if first.stage == "weight" and first.step:
            self._seen.add("written")

    def faults(self, diffs: Sequence[Diff], alignment: Alignment) -> Iterator[Fault]:
        """Yield the faults of a step.

        Args:
            diffs: the judged diffs of the step, of one rank.
            alignment: the pairs of layers and parameters.
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
                continue  # the values can no longer be read
            if fault is not None:
                self._seen.add(name)
                yield fault

    def _scene(self, diff: Diff, diffs: Sequence[Diff], alignment: Alignment) -> DiffContext:
        return scene_of(diff, diffs, alignment, self._runs)

    def _input(self, wrong: Sequence[Diff], diffs: Sequence[Diff], alignment: Alignment) -> Fault | None:
        """Return a fault if the candidate's batch is another batch of the reference's; else `None`.

        A model may compute its own inputs, so an unknown batch is no fault.
        """
        diff = next((d for d in wrong if d.pair.stage == "input" and d.pair.complete and not d.pair.derived), None)
        if diff is None:
            return None
        self._seen.add("input")
        cause = shift_cause(diff, self._runs) or explain(self._scene(diff, diffs, alignment)).cause
        return Fault(diff, cause, kind="input") if cause is not None and cause.proven else None

    def _stepped(self, wrong: Sequence[Diff], diffs: Sequence[Diff], alignment: Alignment) -> Fault | None:
        """Return a fault if an optimizer left out a step or repeated it; else `None`."""
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
        cause = next(missing_gradient.causes(self._scene(diff, diffs, alignment)), None)
        if cause is None or not cause.proven or cause.kind not in ("step_skipped", "step_repeated"):
            return None
        return Fault(diff, cause, kind="update")

    def _written(self, wrong: Sequence[Diff], diffs: Sequence[Diff], alignment: Alignment) -> Fault | None:
        """Return a fault if a weight differs from the weight of the step before plus its update, on one side only;
        else `None`.
        """
        weights = [d for d in wrong if d.pair.stage == "weight" and d.pair.complete]
        if not weights:
            return None
        largest = sorted(weights, key=lambda d: -float(np.prod(d.pair.anchor.shape)))[:_WEIGHTS]
        scene = self._scene(weights[0], diffs, alignment)
        sides = scene.sides(scene.number - 1) if scene.number - 1 in scene.numbers else None
        if sides is None or any(_steps(step) != 1 for step in sides):
            return None  # skipped and repeated optimizer steps are reported by themselves
        measured: list[tuple[Diff, Both[float], Both[float]]] = []
        for diff in largest:
            errors = _beside_its_update(scene, diff, place_of(diff.pair))
            if errors is not None:
                measured.append((diff, *errors))
        if not measured:
            return None
        for side, other_side in (tuple(SIDES.swapped()), tuple(SIDES)):
            alone = [entry for entry in measured if getattr(entry[1], side) > _FAR]
            if alone and all(getattr(entry[1], other_side) <= _NEAR for entry in measured):
                diff, _, shares = alone[0]
                cause = _what_wrote(replace(scene, diff=diff))
                return Fault(diff, cause, Recomputed("weight", Both("", ""), shares, side), kind="weight")
        return None


def _steps(step: Step) -> int:
    """Return the number of optimizer steps in a step."""
    return len({record.call for record in step.records if record.stage == "update" and record.layer != LOOP})


def _what_wrote(scene: DiffContext) -> Cause | None:
    """Return the cause of the changed weights if a hypothesis proves it; else `None`."""
    for hypothesis in islice(external_weight_write.hypotheses(scene), _TRIED):
        if explains(weigh(hypothesis.predict()), hypothesis):
            return Cause(hypothesis.kind, hypothesis.sentence, True, fix=hypothesis.fix_line)
    return None


def _beside_its_update(scene: DiffContext, diff: Diff, at: Place) -> tuple[Both[float], Both[float]] | None:
    """Return the error of each side's weight, compared with the weight before plus its update.

    Returns:
        The errors in units of rounding, and as shares of the weight's norm; `None` if they can't be computed.
    """
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
