"""Settings that the runs declare differently, independent of the cause of the first diff."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from padiff.compare.diagnose.followups.same_fault import families
from padiff.compare.diagnose.settings import cause_in_settings, cause_of
from padiff.records import STAGES, Difference, FirstDiff, Standing

# Kinds of differences that are about the loop or the optimizer, not about the model.
_OF_THE_LOOP = ("optimizer_setting", "learning_rate", "clipping", "loss_setting")
# Families of causes, by the kind of difference with the same effect.
_ALIKE = {"clipping": "clip", "learning_rate": "learning", "loss_setting": "loss"}


def declared_besides(
    found: Sequence[tuple[int, Difference]], first: FirstDiff, others: Sequence[FirstDiff], began: int
) -> Iterator[FirstDiff]:
    """Yield differences of settings that change the result and are independent of the first diff; one for each kind.

    Args:
        found: the differences, each with the number of the first step that shows it.
        first: the first diff, of a tensor.
        others: the further faults found so far.
        began: the number of the first compared step.
    """
    if first.diff is None or not _is_known(first, began):
        return
    known_families = frozenset[str]().union(*(families(difference.cause) for difference in (first, *others)))
    stages = {difference.stage for difference in others}
    reported: dict[str, list[tuple[int, Difference]]] = {}
    for number, difference in found:
        alike = _ALIKE.get(difference.kind, difference.kind.partition("_")[0])
        if (
            not difference.changes
            or alike in known_families
            or cause_in_settings(first.diff.pair, [difference]) is not None
        ):
            continue
        # A stage that has a reported fault is left out: the setting may be its cause.
        later = STAGES.index(difference.stage) >= STAGES.index(first.stage)
        if difference.kind in _OF_THE_LOOP and later and difference.stage not in stages:
            reported.setdefault(difference.kind, []).append((number, difference))
    for of_kind in reported.values():
        number, difference = of_kind[0]
        yield FirstDiff(
            number,
            difference.stage,
            difference.place.reference,
            difference.place.candidate,
            slot=difference.name,
            cause=cause_of([d for _, d in of_kind]),
            parameters=difference.parameters,
            standing=Standing.NEW,
        )


def _is_known(first: FirstDiff, began: int) -> bool:
    """Return True if no setting can cause the first diff: it is in the first compared step, or explained by itself."""
    if first.stage == "weight" and first.step != began:
        return False
    return first.step == began or first.recomputed is not None or (first.cause is not None and first.cause.proven)
