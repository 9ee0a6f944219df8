"""What the runs declare differently besides the first diff's cause."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from padiff.compare.diagnose.aftermath.same import families
from padiff.compare.diagnose.settings import cause_in_settings, cause_of
from padiff.records import STAGES, Difference, FirstDiff, Standing

# What an optimizer is set to, and what it gets, is no matter of the model.
_OF_THE_LOOP = ("optimizer_setting", "learning_rate", "clipping", "loss_setting")
# Causes that come to the same as what is declared of a kind.
_ALIKE = {"clipping": "clip", "learning_rate": "learning", "loss_setting": "loss"}


def declared_besides(
    found: Sequence[tuple[int, Difference]], first: FirstDiff, others: Sequence[FirstDiff], began: int
) -> Iterator[FirstDiff]:
    """What is declared differently, changes the result, and has nothing to do with the first diff; one for each kind.

    Args:
        found: what differs, with the first step that shows it.
        first: the first diff, a tensor.
        others: further faults that are known.
        began: the first step that was compared.
    """
    if first.diff is None or not _is_known(first, began):
        return
    known = frozenset[str]().union(*(families(one.cause) for one in (first, *others)))
    stages = {one.stage for one in others}
    reported: dict[str, list[tuple[int, Difference]]] = {}
    for number, one in found:
        alike = _ALIKE.get(one.kind, one.kind.partition("_")[0])
        if not one.changes or alike in known or cause_in_settings(first.diff.pair, [one]) is not None:
            continue
        # What it acts on is reported already, with its cause.
        later = STAGES.index(one.stage) >= STAGES.index(first.stage)
        if one.kind in _OF_THE_LOOP and later and one.stage not in stages:
            reported.setdefault(one.kind, []).append((number, one))
    for of_kind in reported.values():
        number, one = of_kind[0]
        yield FirstDiff(
            number,
            one.stage,
            one.place.reference,
            one.place.candidate,
            slot=one.name,
            cause=cause_of([other for _, other in of_kind]),
            parameters=one.parameters,
            standing=Standing.NEW,
        )


def _is_known(first: FirstDiff, began: int) -> bool:
    """Whether the first diff can't come from what is declared: it is in the first step, or explained by itself."""
    if first.stage == "weight" and first.step != began:
        return False
    return first.step == began or first.recomputed is not None or (first.cause is not None and first.cause.proven)
