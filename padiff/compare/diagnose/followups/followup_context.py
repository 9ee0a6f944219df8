"""Further faults that a comparison finds in addition to the first diff, collected step by step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from padiff.align import Alignment
from padiff.compare.diagnose.evidence import Evidence
from padiff.compare.diagnose.first import scene_of
from padiff.compare.diagnose.followups.declared_faults import declared_besides
from padiff.compare.diagnose.followups.fault import Fault
from padiff.compare.diagnose.followups.independent import Found, chosen, described_alone, faults_of_step
from padiff.compare.diagnose.followups.later_faults import Later
from padiff.compare.diagnose.place import Place
from padiff.records import STAGES, Aftermath, Diff, Difference, FirstDiff, Pair, Standing, mark_of
from padiff.records.aftermath import Mark


class FollowupContext:
    """Further faults, and the relation of each diff to the first one.

    Args:
        first: the first diff, as it is reported.
        diff: the diff itself.
        place: where in the code the diff comes from.
        step: the diffs of its step.
        evidence: the input of the search for causes.
        began: the number of the first compared step; `None` if no step was compared.
    """

    def __init__(
        self, first: FirstDiff, diff: Diff, place: Place, step: Sequence[Diff], evidence: Evidence, began: int | None
    ) -> None:
        self._first, self._mark, self._later = first, mark_of(diff), Later(first, evidence.runs)
        self._evidence = replace(evidence, steps=None)  # the steps of the first diff are of no use in later steps
        self._began = first.step if began is None else began
        self._marks: dict[Mark, Standing] = {}
        self._faults: list[tuple[FirstDiff, Diff]] = []
        scene = scene_of(diff, step, evidence.alignment, evidence.runs)
        try:
            findings = faults_of_step(first, diff, place, scene, evidence, first.step == self._began)
        except Exception:
            findings = Found()  # an error here must not hide the first diff, so it only means no further faults
        self._marks.update((mark_of(d), Standing.AGAIN) for d in findings.again)
        for fault in findings.faults:
            self._add(fault, step, evidence)
        self._marks[self._mark] = Standing.FIRST

    def _add(self, fault: Fault, step: Sequence[Diff], evidence: Evidence) -> None:
        self._faults.append((described_alone(fault, step, evidence), fault.diff))
        self._marks[mark_of(fault.shown)] = Standing.NEW

    def search(self, diffs: Sequence[Diff], alignment: Alignment) -> None:
        """Search a later step for further faults.

        Args:
            diffs: the judged diffs of the step, of its first process with diffs.
            alignment: the pairs of layers and parameters.
        """
        if diffs[0].pair.step <= self._first.step:
            return
        evidence = replace(self._evidence, alignment=alignment)
        earlier = [first_diff for first_diff, _ in self._faults]
        try:
            faults = list(chosen(list(self._later.faults(diffs, alignment)), self._first, earlier, evidence))
        except Exception:
            faults = []  # an error here must not end the comparison
        for fault in faults:
            self._add(fault, diffs, evidence)

    def placed(self, found: FirstDiff, diff: Diff) -> FirstDiff:
        """Return the first diff of a later step, marked as a fault by itself or as a consequence.

        Args:
            found: the first diff of the step, as it is reported.
            diff: the diff itself.
        """
        mark = mark_of(diff)
        alone = next((fault for fault, shown in self._faults if mark_of(shown) == mark), None)
        return alone or replace(found, standing=self._marks.get(mark, Standing.FOLLOWS))

    def aftermath(self, first: FirstDiff | None, tensor: FirstDiff | None) -> Aftermath:
        """Return the relation of each diff to the first one.

        Args:
            first: the first difference between the runs: a tensor or a setting.
            tensor: the first tensor that differs, possibly because of that setting.
        """
        if first is None or first is tensor:
            return Aftermath(self._marks)
        standing = Standing.NEW if self._is_alone(first, tensor) else Standing.FOLLOWS
        return Aftermath({**self._marks, self._mark: standing})

    def independent(
        self,
        first: FirstDiff | None,
        tensor: FirstDiff | None,
        differ: Sequence[tuple[int, Difference]],
        steps: Collection[int],
        asked: Callable[[Pair], bool],
    ) -> tuple[FirstDiff, ...]:
        """Return further faults that show in some steps, in causal order.

        Args:
            first, tensor: as for `aftermath`.
            differ: the settings that differ in these steps, with the step numbers.
            steps: the numbers of the steps.
            asked: returns True for a pair that is reported.
        """
        if first is None:
            return ()
        faults = [
            fault for fault, shown in self._faults if fault.step in steps and asked(shown.pair) and fault is not first
        ]
        if first is not tensor and tensor is not None and self._is_alone(first, tensor):
            faults.append(replace(tensor, standing=Standing.NEW, extent=None))
        if first is tensor and first.standing is Standing.FIRST:
            faults += declared_besides(differ, first, faults, self._began)
        return tuple(sorted(faults, key=lambda one: (one.step, STAGES.index(one.stage))))

    @staticmethod
    def _is_alone(first: FirstDiff, tensor: FirstDiff | None) -> bool:
        """Return True if a tensor differs because its layer or loss is wrong, and not because of a setting."""
        if tensor is None or tensor.recomputed is None or not tensor.recomputed.wrong:
            return False
        return tensor.recomputed.what in ("layer", "loss") and first.stage in ("grad", "update")
