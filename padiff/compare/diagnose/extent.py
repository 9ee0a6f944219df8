"""How far the first diff reaches: within its tensor, over its step, and back in time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from padiff.compare.measure.operands import Arrays, operands
from padiff.errors import RunFolderError
from padiff.model import equivalents
from padiff.records import LOOP, PARAMETER_STAGES, Diff, Extent, Figure, Within
from padiff.records.extent import CAUSAL
from padiff.records.planned import PlannedPairs
from padiff.records.sites import Sites
from padiff.records.step_diffs import StepDiffs

# A part of a tensor is worth naming if it is at most this share of it, and so many slices; elements are counted only.
_SHARE, _NAMED, _ELEMENTS = 0.25, 4, 0.01

#: What a tensor is, from step to step: layer, stage, slot, call.
Site = tuple[str, str, str, int]


#: How far off a tensor was at most (relative L2), and in how many steps it was compared.
Agreed = tuple[float, int]
NEVER: Agreed = (0.0, 0)
_Columns = tuple[np.ndarray, np.ndarray]
_NO_COLUMNS: Mapping[tuple[int, Sites], _Columns] = MappingProxyType({})
_NONE: Mapping[Site, Agreed] = MappingProxyType({})


def site_of(diff: Diff) -> Site:
    """What the diff's tensor is, from step to step."""
    anchor = diff.pair.anchor
    return anchor.layer, anchor.stage, anchor.slot, anchor.call


class Agreement:
    """How far off each tensor was in the steps so far, of all its processes.

    Args:
        columns: of tensors that steps have in common, by process and sites: the largest error of each, and in how many
            steps it was compared.
        others: the same of other tensors, one by one.
    """

    def __init__(
        self, columns: Mapping[tuple[int, Sites], _Columns] = _NO_COLUMNS, others: Mapping[Site, Agreed] = _NONE
    ) -> None:
        self._columns, self._others = columns, others

    def after(self, ranks: Sequence[StepDiffs]) -> Agreement:
        """With one step more."""
        columns, others = dict(self._columns), self._others
        for rank, diffs in enumerate(ranks):
            known = diffs.known
            if isinstance(diffs.pairs, PlannedPairs):
                most, steps = columns.get((rank, diffs.sites), (0.0, 0))
                errors = np.where(known, diffs.relative, 0.0)
                columns[rank, diffs.sites] = np.fmax(most, errors), steps + known
            else:
                others = self._after_one_by_one(others, diffs, known)
        return Agreement(columns, others)

    def _after_one_by_one(
        self, others: Mapping[Site, Agreed], diffs: StepDiffs, known: np.ndarray
    ) -> dict[Site, Agreed]:
        after = dict(others)
        errors, sites = diffs.relative.tolist(), _sites(diffs.sites)
        for place in np.flatnonzero(known).tolist():
            site, error = sites[place], errors[place]
            most = after.get(site, NEVER)[0]
            after[site] = error if error > most else most, self._others.get(site, NEVER)[1] + 1
        return after

    def get(self, site: Site, never: Any = None) -> Any:
        """How far off a tensor was at most, and in how many steps it was compared; ``never`` where in none."""
        most, steps = self._others.get(site, NEVER)
        by_rank: dict[int, int] = {}
        for (rank, sites), (errors, counts) in self._columns.items():
            places = [place for place, one in enumerate(_sites(sites)) if one == site]
            if places:
                most = max(most, *(float(errors[place]) for place in places))
                by_rank[rank] = by_rank.get(rank, 0) + max(int(counts[place]) for place in places)
        steps += max(by_rank.values(), default=0)
        return (most, steps) if steps else never


def _sites(sites: Sites) -> list[Site]:
    return list(zip(sites.layers, sites.stages, sites.slots, sites.calls))


def extent_of(diff: Diff, step: Sequence[Diff], agreed: Agreement) -> Extent:
    """How far a diff reaches.

    Args:
        step: the judged diffs of its step, in causal order.
        agreed: what the steps before showed.
    """
    most, steps = agreed.get(site_of(diff), (None, 0))
    others = _others(diff, step)
    differing = [other for other in others if not other.passed]
    return Extent(
        diff.pair.stage,
        _within(diff),
        len(differing),
        len(others),
        _only([diff, *differing], [other for other in others if other.passed]),
        most,
        steps,
    )


def _others(diff: Diff, step: Sequence[Diff]) -> list[Diff]:
    stage = diff.pair.stage
    same = [d for d in step if d.pair.stage == stage and d.counts and d.pair.anchor.layer != LOOP]
    if stage not in CAUSAL:
        return [d for d in same if d is not diff]
    place = next((k for k, d in enumerate(same) if d is diff), len(same))
    return same[place + 1 :]


def _only(differing: Sequence[Diff], equal: Sequence[Diff]) -> tuple[str, ...]:
    """The kinds of parameters that differ, where no parameter of another kind does and none of theirs is equal."""
    if differing[0].pair.stage not in PARAMETER_STAGES or not equal:
        return ()
    kinds, rest = {_kind(d) for d in differing}, {_kind(d) for d in equal}
    return tuple(sorted(kinds, reverse=True)) if kinds.isdisjoint(rest) else ()


def _kind(diff: Diff) -> str:
    anchor = diff.pair.anchor
    if equivalents.group_of_kinds(anchor.layer_type.lower()) == "norm":
        return "norms"
    return "biases" if equivalents.slot(anchor.slot).endswith("bias") else "matrices"


def _within(diff: Diff) -> Within | None:
    """The part of the tensor outside of which everything is within the limit."""
    judged = diff.judgement
    if judged is None or judged.figure not in (Figure.REL_L2, Figure.L2) or diff.figures is None or diff.problem:
        return None
    try:
        found = operands(diff.pair)
    except RunFolderError:
        return None
    if not isinstance(found, Arrays) or not found.reference.ndim:
        return None
    values = found.values()
    error = np.abs(values.candidate - values.reference) ** 2
    scale = diff.figures.reference_l2 if judged.figure is Figure.REL_L2 else 1.0
    allowed = (judged.limit * scale) ** 2
    best: Within | None = None
    for axis in range(error.ndim):
        indices = _fewest(error.sum(axis=tuple(k for k in range(error.ndim) if k != axis)), allowed)
        size = error.shape[axis]
        if 0 < len(indices) <= min(_NAMED, _SHARE * size) and (
            best is None or len(indices) / size < best.count / best.size
        ):
            best = Within(_axis_name(diff.pair.stage, axis, error.ndim), indices, len(indices), size)
    if best is None and error.ndim > 1:
        count = len(_fewest(error.ravel(), allowed))
        if 0 < count <= _ELEMENTS * error.size:
            return Within("element", (), count, error.size)
    return best


def _fewest(errors: np.ndarray, allowed: float) -> tuple[int, ...]:
    """The fewest slices without which the squared error is within what is allowed, in order."""
    order = np.argsort(errors)
    within = np.cumsum(errors[order]) <= allowed
    return tuple(sorted(int(k) for k in order[int(within.sum()) :]))


def _axis_name(stage: str, axis: int, axes: int) -> str:
    if stage not in PARAMETER_STAGES and axis == 0:
        return "sample"
    if axes == 1:
        return "element"
    if axes == 2 and stage in PARAMETER_STAGES:
        return ("row", "column")[axis]
    return f"index of axis {axis}"
