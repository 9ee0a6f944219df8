"""What a comparison finds around its first diff, as it goes on from step to step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from padiff.align import Alignment
from padiff.compare.diagnose.aftermath.declared import declared_besides
from padiff.compare.diagnose.aftermath.fault import Fault
from padiff.compare.diagnose.aftermath.independent import Found, chosen, described_alone, faults_of_step
from padiff.compare.diagnose.aftermath.later import Later
from padiff.compare.diagnose.evidence import Evidence
from padiff.compare.diagnose.first import scene_of
from padiff.compare.diagnose.place import Place
from padiff.records import STAGES, Aftermath, Diff, Difference, FirstDiff, Pair, Standing, mark_of
from padiff.records.aftermath import Mark


class Around:
    """Further faults, and how the diffs stand to the first one.

    Args:
        first: the first diff, as it is reported.
        diff: it itself.
        place: where in the code it comes from.
        step: the diffs of its step.
        evidence: what is known besides.
        began: the first step that was compared; `None` where none was.
    """

    def __init__(
        self, first: FirstDiff, diff: Diff, place: Place, step: Sequence[Diff], evidence: Evidence, began: int | None
    ) -> None:
        self._first, self._mark, self._later = first, mark_of(diff), Later(first, evidence.runs)
        self._evidence = replace(evidence, steps=None)  # later steps are others
        self._began = first.step if began is None else began
        self._marks: dict[Mark, Standing] = {}
        self._faults: list[tuple[FirstDiff, Diff]] = []
        scene = scene_of(diff, step, evidence.alignment, evidence.runs)
        try:
            found = faults_of_step(first, diff, place, scene, evidence, first.step == self._began)
        except Exception:
            found = Found()  # what can't be looked at shows no further fault; the first one stands whatever is met
        self._marks.update((mark_of(one), Standing.AGAIN) for one in found.again)
        for fault in found.faults:
            self._add(fault, step, evidence)
        self._marks[self._mark] = Standing.FIRST

    def _add(self, fault: Fault, step: Sequence[Diff], evidence: Evidence) -> None:
        self._faults.append((described_alone(fault, step, evidence), fault.diff))
        self._marks[mark_of(fault.shown)] = Standing.NEW

    def look(self, diffs: Sequence[Diff], alignment: Alignment) -> None:
        """Look at the judged diffs of a step, of its first process that has any."""
        if diffs[0].pair.step <= self._first.step:
            return
        evidence = replace(self._evidence, alignment=alignment)
        known = [one for one, _ in self._faults]
        try:
            faults = list(chosen(list(self._later.look(diffs, alignment)), self._first, known, evidence))
        except Exception:
            faults = []  # likewise
        for fault in faults:
            self._add(fault, diffs, evidence)

    def placed(self, found: FirstDiff, diff: Diff) -> FirstDiff:
        """The first diff of a step after the first diff's: it follows, or is a fault by itself."""
        mark = mark_of(diff)
        alone = next((one for one, shown in self._faults if mark_of(shown) == mark), None)
        return alone or replace(found, standing=self._marks.get(mark, Standing.FOLLOWS))

    def aftermath(self, first: FirstDiff | None, tensor: FirstDiff | None) -> Aftermath:
        """How all diffs stand to the first one.

        Args:
            first: where the runs part.
            tensor: the first tensor that parts, which may follow from what they are set to.
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
        """Further faults that show in some steps, in causal order.

        Args:
            first, tensor: as `aftermath` has them.
            differ: what the runs declare differently in these steps.
            asked: whether a pair is among those that are reported.
        """
        if first is None:
            return ()
        found = [one for one, shown in self._faults if one.step in steps and asked(shown.pair) and one is not first]
        if first is not tensor and tensor is not None and self._is_alone(first, tensor):
            found.append(replace(tensor, standing=Standing.NEW, extent=None))
        if first is tensor and first.standing is Standing.FIRST:
            found += declared_besides(differ, first, found, self._began)
        return tuple(sorted(found, key=lambda one: (one.step, STAGES.index(one.stage))))

    @staticmethod
    def _is_alone(first: FirstDiff, tensor: FirstDiff | None) -> bool:
        """Whether a tensor parts by itself, and not for what the runs are set to: its layer is another one."""
        if tensor is None or tensor.recomputed is None or not tensor.recomputed.wrong:
            return False
        return tensor.recomputed.what in ("layer", "loss") and first.stage in ("grad", "update")
