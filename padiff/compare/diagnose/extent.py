"""The extent of the first diff: within its tensor, over its step, and in the steps before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from padiff.compare.measure.operands import Arrays, operands
from padiff.errors import RunFolderError
from padiff.model import equivalents
from padiff.records import LOOP, PARAMETER_STAGES, Diff, Extent, Figure, TensorExtent
from padiff.records.extent import CAUSAL
from padiff.records.pair_schema import PairSchema
from padiff.records.pair_table import PairTable
from padiff.records.step_diffs import StepDiffs

# A part of a tensor is named if it is at most this share of the tensor and at most this many slices. Single elements
# are counted, not named, up to the last share.
_SHARE, _NAMED, _ELEMENTS = 0.25, 4, 0.01

#: The key of a tensor in every step: layer, stage, slot, call.
Site = tuple[str, str, str, int]


#: The largest relative L2 error of a tensor, and the number of steps in which the tensor was compared.
Agreed = tuple[float, int]
NEVER: Agreed = (0.0, 0)
_Columns = tuple[np.ndarray, np.ndarray]
_NO_COLUMNS: Mapping[tuple[int, PairSchema], _Columns] = MappingProxyType({})
_NONE: Mapping[Site, Agreed] = MappingProxyType({})


def site_of(diff: Diff) -> Site:
    """Return the key of a diff's tensor, which is the same in every step."""
    anchor = diff.pair.anchor
    return anchor.layer, anchor.stage, anchor.slot, anchor.call


class Agreement:
    """The largest error of each tensor in the steps so far, over all processes.

    Args:
        columns: arrays for the tensors that steps with the same schema share, by process and schema: the largest error
            of each tensor, and the number of steps in which the tensor was compared.
        others: the same two numbers for each remaining tensor.
    """

    def __init__(
        self, columns: Mapping[tuple[int, PairSchema], _Columns] = _NO_COLUMNS, others: Mapping[Site, Agreed] = _NONE
    ) -> None:
        self._columns, self._others = columns, others

    def after(self, ranks: Sequence[StepDiffs]) -> Agreement:
        """Return an agreement that includes one more step.

        Args:
            ranks: the step's diffs, by process.
        """
        columns, others = dict(self._columns), self._others
        for rank, diffs in enumerate(ranks):
            compared = diffs.known
            if isinstance(diffs.pairs, PairTable):
                most, steps = columns.get((rank, diffs.sites), (0.0, 0))
                errors = np.where(compared, diffs.relative, 0.0)
                columns[rank, diffs.sites] = np.fmax(most, errors), steps + compared
            else:
                others = self._after_one_by_one(others, diffs, compared)
        return Agreement(columns, others)

    def _after_one_by_one(
        self, others: Mapping[Site, Agreed], diffs: StepDiffs, places: np.ndarray
    ) -> dict[Site, Agreed]:
        after = dict(others)
        errors, sites = diffs.relative.tolist(), _sites(diffs.sites)
        for place in np.flatnonzero(places).tolist():
            site, error = sites[place], errors[place]
            most = after.get(site, NEVER)[0]
            after[site] = error if error > most else most, self._others.get(site, NEVER)[1] + 1
        return after

    def get(self, site: Site, never: Any = None) -> Any:
        """Return the largest error of a tensor and the number of steps in which the tensor was compared.

        Args:
            site: the key of the tensor.
            never: the value to return if the tensor was not compared in any step.
        """
        most, steps = self._others.get(site, NEVER)
        by_rank: dict[int, int] = {}
        for (rank, sites), (errors, counts) in self._columns.items():
            places = [place for place, key in enumerate(_sites(sites)) if key == site]
            if places:
                most = max(most, *(float(errors[place]) for place in places))
                by_rank[rank] = by_rank.get(rank, 0) + max(int(counts[place]) for place in places)
        steps += max(by_rank.values(), default=0)
        return (most, steps) if steps else never


def _sites(sites: PairSchema) -> list[Site]:
    return list(zip(sites.layers, sites.stages, sites.slots, sites.calls))


def extent_of(diff: Diff, step: Sequence[Diff], agreed: Agreement) -> Extent:
    """Return how far a diff reaches within its tensor, over its step and in the steps before.

    Args:
        diff: the first diff that did not pass.
        step: the judged diffs of its step, in causal order.
        agreed: the largest errors in the steps before.
    """
    most, steps = agreed.get(site_of(diff), (None, 0))
    others = _others(diff, step)
    differing = [d for d in others if not d.passed]
    return Extent(
        diff.pair.stage,
        _within(diff),
        len(differing),
        len(others),
        _only([diff, *differing], [d for d in others if d.passed]),
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
    """Return the kinds of parameters that differ, if all compared parameters of these kinds differ and no others."""
    if differing[0].pair.stage not in PARAMETER_STAGES or not equal:
        return ()
    kinds, equal_kinds = {_kind(d) for d in differing}, {_kind(d) for d in equal}
    return tuple(sorted(kinds, reverse=True)) if kinds.isdisjoint(equal_kinds) else ()


def _kind(diff: Diff) -> str:
    anchor = diff.pair.anchor
    if equivalents.group_of_kinds(anchor.layer_type.lower()) == "norm":
        return "norms"
    return "biases" if equivalents.slot(anchor.slot).endswith("bias") else "matrices"


def _within(diff: Diff) -> TensorExtent | None:
    """Return the part of the tensor that differs, if the remaining elements are within the limit; else `None`."""
    judged = diff.judgement
    if judged is None or judged.figure not in (Figure.REL_L2, Figure.L2) or diff.figures is None or diff.problem:
        return None
    try:
        tensors = operands(diff.pair)
    except RunFolderError:
        return None
    if not isinstance(tensors, Arrays) or not tensors.reference.ndim:
        return None
    values = tensors.values()
    error = np.abs(values.candidate - values.reference) ** 2
    scale = diff.figures.reference_l2 if judged.figure is Figure.REL_L2 else 1.0
    allowed = (judged.limit * scale) ** 2
    best: TensorExtent | None = None
    for axis in range(error.ndim):
        indices = _fewest(error.sum(axis=tuple(k for k in range(error.ndim) if k != axis)), allowed)
        size = error.shape[axis]
        if 0 < len(indices) <= min(_NAMED, _SHARE * size) and (
            best is None or len(indices) / size < best.count / best.size
        ):
            best = TensorExtent(_axis_name(diff.pair.stage, axis, error.ndim), indices, len(indices), size)
    if best is None and error.ndim > 1:
        count = len(_fewest(error.ravel(), allowed))
        if 0 < count <= _ELEMENTS * error.size:
            return TensorExtent("element", (), count, error.size)
    return best


def _fewest(errors: np.ndarray, allowed: float) -> tuple[int, ...]:
    """Return the sorted indices of the fewest slices without which the squared error is within the limit."""
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
