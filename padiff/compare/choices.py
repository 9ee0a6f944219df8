"""Choices that differ between two runs: which rows of scores chose otherwise, and if rounding explains it.

A choice flips if two scores nearly tie and rounding moves one across the other. A flip is explained if the scores agree
within rounding and are not equal to the bit on both sides: between equal scores only a rule for ties can choose. One
framework's ``topk`` and ``sort`` have no such rule: which of equal scores comes first depends on the others.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import Match, SequenceMatcher
from functools import cached_property, partial
from itertools import product
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from padiff.align import Alignment
from padiff.compare.judge.limits import ROUNDING, SINGLE, allowed
from padiff.errors import RunFolderError
from padiff.frameworks.catalog import RESHAPING, first_rank, is_descending, pooled_axes, row_axis
from padiff.recorder.calls import QUANTISERS, ROUNDINGS, SAMPLING, before_first
from padiff.records import LOOP, ROOT, Both, Choice, RunInfo, Step, Trace, TracedCall
from padiff.records.both import unzipped
from padiff.records.sources import TensorSource
from padiff.system.frames import Frame

# Functions that leave the order of equal scores open, and those that rank all places.
_OPEN, WHOLE = frozenset({"topk", "sort", "argsort"}), frozenset({"sort", "argsort"})
# Functions that take the first places of a row, or the first one.
_FIRST_ONES = frozenset({"topk", "argmax", "argmin"})
# Functions with whose scores at one rank the code may compare all scores.
_WITH_RANKS = frozenset({"topk", "sort", "kthvalue"})
#: Functions that compare with a number.
COMPARISONS = frozenset({"gt", "ge", "lt", "le"})
# Functions that cut off decimals: whole numbers have none.
_CUTS = frozenset({"cast", "floor", "ceil", "trunc", "floor_divide"})
# Functions that take a part of a tensor, and those that hand on one score of each row.
_SLICES = frozenset({"getitem", "slice", "narrow"})
_HAND_ON = RESHAPING | {"expand", "expand_as", "detach", "min", "amin"}
# Least relative distance of scores that are not of one form; factor by which another form has to be nearer.
_OTHER, _NEARER = 0.05, 4.0
# Units in the last place, of an element of usual size, up to which one lies at a bound. Chosen: a bound may be several
# times as large, and the element is rounded, and its scale and its input are.
_AT_BOUND = 16.0
# Largest number of entries whose scores do not tell the form of all.
_FEW = 2
# Most rows that hold one extreme score by chance: a table of distances holds each twice.
_TWICE = 2
# Largest number of scores for which a table of all places is made.
_MOST = 1 << 24
# Largest number of pairs of calls whose scores are held against each other; least number of scores that tell.
_CALLS, _LEAST_SCORES = 1 << 12, 8


_NO_PLACES: Mapping[int, np.ndarray] = MappingProxyType({})


def _none() -> np.ndarray:
    return np.zeros(0, np.int64)


@dataclass(frozen=True)
class View:
    """The rows that chose otherwise, as other tensors count them: by token, or by chosen place.

    Attributes:
        grid: shape of the rows.
        mask: mask of the rows that chose otherwise.
    """

    grid: tuple[int, ...]
    mask: np.ndarray


@dataclass(frozen=True)
class Swaps:
    """Places that one side chose in the place of others, of the other side.

    Attributes:
        rows: numbers of the rows that chose, one for each place.
        ranks: their ranks among the places that the calls return; `None` if these have no order, or start elsewhere.
        places: the places that each side chose.
        grid: shape of the rows.
        width: number of places among which a row chooses.
    """

    rows: np.ndarray
    ranks: np.ndarray | None
    places: Both[np.ndarray]
    grid: tuple[int, ...]
    width: int


@dataclass(frozen=True)
class Flips:
    """One choosing call of each side that chose otherwise in some rows.

    Attributes:
        calls: the calls.
        position: position of the reference's call in the trace.
        grid: shape of the rows: that of the scores without the axis along which a row runs.
        rows: number of rows.
        recorded: numbers of the rows that were recorded.
        flipped: mask of the recorded rows that chose otherwise.
        ties: mask of the recorded rows that chose otherwise between scores that are equal to the bit on each side,
            though the functions have a rule for these.
        error: largest distance of the two sides' scores in each recorded row.
        moved: the same over the scores of the places that either side chose.
        gap: largest distance, in each recorded row, of the scores that the two sides chose, on one side.
        size: root mean square of the scores.
        chosen: number of places that each side chooses.
        dtype: the narrower dtype of the scores.
        touched: numbers of rows that are the places that were chosen otherwise, of a table of distances between rows;
            and of rows that chose an entry which earlier steps have moved.
        chosen_places: mask of the places that each side chose, if there is one row.
        places: mask of the places that some row chose otherwise; of a threshold for each entry of a codebook, of the
            fewer entries that lie on one side of it, which may be replaced; else `None`.
        among: mask of the places that the rows chose which chose otherwise; `None` for a threshold.
        tokens: the places that were chosen otherwise, if the places are tokens or samples; else `None`.
        keys: the tokens that some row of their sample chose otherwise, if each row chooses among all of its sample.
        queries: the tokens for which some head of an attention chose otherwise.
        shared: the rows whose best score several places share, if it is handed on: gradients may go to any of these.
        picks: the chosen places, in the order in which the call returns them; `None` for a threshold.
        elements: the elements of the scores that only one side chose, if only values are used: only gradients then go
            to other elements; else `None`.
        shift: distance of two thresholds that are numbers, for the same values.
        tied: number of recorded rows that chose otherwise between equal scores, whether or not a rule chooses.
        swaps: the places that were chosen otherwise; `None` if they are not known.
        effect: distance of what was chosen otherwise, relative to that of any two rows; 1 if it is not known.
        rules: which of equal scores each side takes: ``the first``, ``the last``, ``any``, ``all`` or ``none``; `None`
            if there are no such rows.
        alone: True for bounds of one side, which the other side writes otherwise: elements at them count.
        few: number of elements on the side of a threshold where the fewer lie; 0 if not all elements were recorded.
        others: True if most values that two calls compare with a threshold differ by more than rounding.
    """

    calls: Both[TracedCall]
    position: int
    grid: tuple[int, ...]
    rows: int
    recorded: np.ndarray
    flipped: np.ndarray
    ties: np.ndarray
    error: np.ndarray
    moved: np.ndarray
    gap: np.ndarray
    size: float
    chosen: Both[int]
    dtype: str
    touched: np.ndarray = field(default_factory=_none)
    chosen_places: Both[np.ndarray] | None = None
    places: np.ndarray | None = None
    among: np.ndarray | None = None
    tokens: View | None = None
    keys: View | None = None
    queries: View | None = None
    shared: View | None = None
    picks: View | None = None
    elements: View | None = None
    shift: float = 0.0
    others: bool = False
    alone: bool = False
    few: int = 0
    tied: int = 0
    rules: Both[str] | None = None
    swaps: Swaps | None = None
    effect: float = 1.0

    @property
    def views(self) -> tuple[View | None, ...]:
        """Return the rows that chose otherwise as outputs may count them."""
        return self.tokens, self.queries, self.picks, self.elements

    @property
    def count(self) -> int:
        """Return the number of recorded rows that chose otherwise."""
        return int(self.flipped.sum())

    @property
    def sends_rows(self) -> bool:
        """Return True if the call may send rows elsewhere: it does not only round, or hold values between bounds."""
        return self.calls.reference.chooses and self.calls.reference.function not in ROUNDINGS | QUANTISERS

    @property
    def touching(self) -> int:
        """Return the number of rows whose outputs or gradients a choice may change."""
        return self.count + (0 if self.shared is None else int((self.shared.mask & ~self.mask).sum()))

    @property
    def share(self) -> float:
        """Return the share of rows that chose otherwise; of the tokens, where these are chosen; of windows."""
        if self.picks is not None and pooled(self.calls.reference):
            return float(self.picks.mask.mean())
        if self.tokens is not None:
            return float(self.tokens.mask.mean())
        if not any(self.chosen):  # of the elements, those nearest to the threshold are recorded
            return self.count / max(self.rows, 1)
        return self.count / max(len(self.recorded), 1)

    @property
    def mask(self) -> np.ndarray:
        """Return a mask of all rows; rows that were not recorded count as chosen alike."""
        mask = np.zeros(self.rows, np.bool_)
        mask[self.recorded[self.flipped]] = True
        mask[self.touched] = True
        return mask


def chooses(steps: Both[Step]) -> bool:
    """Return True if the traces of both sides have calls that choose; False if a trace is damaged."""
    try:
        kinds = [{call.chooses for call in step.trace.calls if call.choice is not None} for step in steps]
        return all(kinds) or any(False in kind for kind in kinds)
    except RunFolderError:
        return False


def is_readable(steps: Both[Step]) -> bool:
    """Return True if the calls of both sides' traces can be read; False if a trace is damaged."""
    try:
        for step in steps:
            deque(step.trace.calls, 0)
    except RunFolderError:
        return False
    return True


def flips_of(
    steps: Both[Step],
    alignment: Alignment,
    infos: Both[RunInfo],
    earlier: Mapping[int, np.ndarray] = _NO_PLACES,
    traced: Both[Trace] | None = None,
) -> list[Flips]:
    """Return the calls of a step that chose otherwise in some rows, in the reference's order.

    Args:
        earlier: masks of the entries of codebooks that follow the rows which chose them, by the number of entries:
            those that earlier steps chose otherwise. Their scores may differ in any way.
        traced: traces of an earlier step with calls of functions, which show what is used; `None` if there are none.
    """
    traces = steps.map(lambda step: step.trace)
    found: list[Flips] = []
    for position, parts in paired(traces, alignment):
        name = parts.reference[0].full_name
        repeated = [(each.calls.reference, each.places) for each in found if each.places is not None]
        before = [mask for call, mask in repeated if call.full_name == name]
        flips = _flips(traces, position, parts, earlier, before, traced)
        if flips is not None and (
            flips.count or flips.shared or flips.shift or flips.chosen.reference != flips.chosen.candidate
        ):
            found.append(flips)
    found += [each for each in at_other_places(traces, alignment) if each.count]
    found += [each for each in _by_code(traces, alignment, traced) if each.count]
    at_kinks = _at_kinks(traces, alignment)
    return sorted([*found, *_at_bounds(traces, alignment), *at_kinks], key=lambda each: each.position)


def at_other_places(traces: Both[Trace], alignment: Alignment, beyond: bool = False) -> Iterator[Flips]:
    """Yield the calls that rank other places than any call of the other side, and attain the same scores.

    One side may take the best sums of the best of two parts, the other one the best of all sums. Places that the code
    makes of these tell which rows chose otherwise; where they were not recorded, rows may have whose scores nearly tie.

    Args:
        beyond: True to yield also calls of which one chooses more places, or of whose places the code makes others in
            most rows.
    """
    others = _unpaired(traces, alignment)
    partners = {LOOP: LOOP, **{pair.reference.path: pair.candidate.path for pair in alignment.pairs}}
    for chooser in others.reference:
        for partner in others.candidate:
            flips = None
            if partners.get(chooser.call.layer) == partner.call.layer and chooser.call.call == partner.call.call:
                flips = _attained(traces, Both(chooser, partner), beyond)
            if flips is not None:
                others.candidate.remove(partner)
                yield flips
                break


def _unpaired(traces: Both[Trace], alignment: Alignment) -> Both[list[_Chooser]]:
    """Return the calls of each side that take the first places of their rows, and have no partner."""
    rankings = traces.map(
        lambda trace: [_Chooser(trace, k, call) for k, call in enumerate(trace.calls) if call.chooses]
    ).map(lambda side: [each for each in side if each.choice.chosen and each.first is None and not pooled(each.call)])
    if not any(rankings):
        return rankings
    in_pairs = unzipped([parts for _, parts in paired(traces, alignment)]).map(
        lambda side: {id(call) for calls in side for call in calls}
    )
    return rankings.zip(in_pairs).map(lambda side: [each for each in side[0] if id(each.call) not in side[1]])


def _by_code(traces: Both[Trace], alignment: Alignment, traced: Both[Trace] | None) -> Iterator[Flips]:
    """Yield the calls of one side that choose what code of the other side chooses which no call shows (in numpy).

    The places tell which rows chose otherwise. In steps without calls of functions, rows may have whose scores nearly
    tie.

    Args:
        traced: see `flips_of`.
    """
    shown = traces if all(trace.functions for trace in traces) else traced
    if shown is None:
        return
    makers = shown.map(
        lambda trace: [(k, call) for k, call in enumerate(trace.calls) if call.function == "tensor" and not call.inputs]
    )
    if not any(makers):
        return
    partners = {pair.reference.path: pair.candidate.path for pair in alignment.pairs}
    others = _unpaired(shown, alignment)
    for chooser, (position, call), is_reference in (
        *((chooser, maker, True) for chooser, maker in product(others.reference, makers.candidate)),
        *((chooser, maker, False) for chooser, maker in product(others.candidate, makers.reference)),
    ):
        layers = (chooser.call.layer, call.layer) if is_reference else (call.layer, chooser.call.layer)
        other = shown.candidate if is_reference else shown.reference
        if partners.get(layers[0]) != layers[1] or call.call != chooser.call.call:
            continue
        places = _chosen_by_code(chooser, other, call)
        if chooser.tables is None or places is None:
            continue
        at = chooser.position if is_reference else position
        if shown is not traces:
            layers_before = sum(not each.function for each in shown.reference.calls[:at])
            at = [k for k, each in enumerate(traces.reference.calls) if not each.function][layers_before - 1] + 1
            here = traces.reference if is_reference else traces.candidate
            again = ((k, each) for k, each in enumerate(here.calls) if each.chooses)
            same = [(k, each) for k, each in again if each.numbered_name == chooser.call.numbered_name]
            chooser, places = _Chooser(here, *same[0]) if same else chooser, None
        flips = _of_one_side(chooser, at, places)
        if flips is not None:
            yield flips


def _chosen_by_code(chooser: _Chooser, other: Trace, call: TracedCall) -> np.ndarray | None:
    """Return the places that the other side's code chose, as rows; `None` if most rows are not those of a call."""
    traced, count = other.tensors[call.outputs[0].tensor], chooser.choice.chosen
    if not traced.dtype.startswith("int") or traced.source is None or traced.source.sketched or chooser.tables is None:
        return None
    if math.prod(traced.shape) != chooser.rows * count or chooser.choice.every > 1 or traced.shape[-1] != count:
        return None
    places, picked = traced.source.read().reshape(-1, count), chooser.tables.picked[:, :count]
    if places.shape != picked.shape or 2 * (places != picked).any(axis=1).sum() > len(picked):
        return None
    return np.asarray(places)


def _of_one_side(chooser: _Chooser, position: int, places: np.ndarray | None) -> Flips | None:
    """Return the flips of a call whose partner is no call, by its own scores; `None` if these were not recorded.

    Args:
        position: the position in the reference's trace.
        places: the places that the other side's code chose; `None` if they are not known.
    """
    grid, tables, count = grid_of(chooser.trace, chooser.call), chooser.tables, chooser.choice.chosen
    if grid is None or tables is None:
        return None
    scores = tables.scores.astype(np.float64)
    gaps, size = _to_next(scores, count), _rms(scores)
    dtype = chooser.trace.tensors[chooser.choice.scores].dtype
    picked = tables.picked[:, :count]
    near = gaps <= SINGLE * allowed(dtype, "forward") * size
    otherwise = np.asarray(near if places is None else places != picked)
    none, flipped = np.zeros(len(gaps)), np.asarray(otherwise.any(axis=1))
    is_graph = places_of(chooser.trace, chooser.call) == len(flipped)
    around = (
        _around(flipped, picked if places is None else np.concatenate([picked, places], axis=1))
        if is_graph
        else np.zeros_like(flipped)
    )
    recorded = np.arange(0, chooser.rows, chooser.choice.every)
    return Flips(
        calls=Both(chooser.call, chooser.call),
        position=position,
        grid=grid,
        rows=chooser.rows,
        recorded=recorded,
        flipped=flipped,
        ties=none.astype(np.bool_),
        error=none,
        moved=none,
        gap=np.where(otherwise, gaps, 0.0).max(axis=1),
        size=size,
        chosen=Both(count, count),
        dtype=dtype,
        touched=np.flatnonzero(around),
        picks=View((*grid, count), _rows_at(recorded, chooser.rows, otherwise | around[:, None]).reshape(-1)),
    )


def _around(flipped: np.ndarray, picked: np.ndarray) -> np.ndarray:
    """Return a mask of the rows of a graph that take what rows which chose otherwise give, and of those that give
    to any of these: an output holds the former, a gradient the latter.
    """
    takes = np.asarray(flipped | flipped[picked].any(axis=1))
    takes[picked[takes]] = True
    return takes


def _attained(traces: Both[Trace], choosers: Both[_Chooser], beyond: bool) -> Flips | None:
    """Return the flips of two calls that attain the same scores at places of their own; `None` if they do not.

    Args:
        beyond: see `at_other_places`.
    """
    tables, choices = choosers.map(lambda each: each.tables), choosers.map(lambda each: each.choice)
    grid, chosen = grid_of(traces.reference, choosers.reference.call), choices.map(lambda choice: choice.chosen)
    count, as_many = min(chosen), chosen.reference == chosen.candidate
    if tables.reference is None or tables.candidate is None or grid is None or not (as_many or beyond):
        return None
    if len({(each.rows, each.choice.every) for each in choosers}) > 1:
        return None
    scores = Both(tables.reference, tables.candidate).map(lambda side: side.scores.astype(np.float64))
    attained = scores.map(lambda side: side[:, :count])
    rows = len(attained.reference)
    none = np.zeros(rows, np.bool_)
    if len(attained.candidate) != rows or attained.reference.size < _LEAST_SCORES or _apart(attained, none) > _OTHER:
        return None
    error = np.abs(attained.candidate - attained.reference).max(axis=1)
    noise = float(error.max())
    gaps = np.minimum(*scores.map(partial(_to_next, count=count)))
    indices = traces.zip(choosers).map(lambda side: _indices(*side) if as_many else [])
    recorded = np.arange(0, choosers.reference.rows, choices.reference.every)
    differing = [a[recorded] != b[recorded] for a, b in product(*indices)]
    if differing:
        otherwise = min(differing, key=lambda each: int(each.sum()))
        if not beyond and 2 * otherwise.any(axis=1).sum() > rows:
            return None
    else:
        otherwise = gaps <= 2 * noise
    flipped = otherwise.any(axis=1)
    return Flips(
        calls=choosers.map(lambda each: each.call),
        position=choosers.reference.position,
        grid=grid,
        rows=choosers.reference.rows,
        recorded=recorded,
        flipped=flipped,
        ties=none,
        error=error,
        moved=np.where(flipped, noise, error),
        gap=np.where(otherwise, gaps, 0.0).max(axis=1),
        size=_rms(attained.reference),
        chosen=chosen,
        dtype=_dtype(traces, choices),
        picks=View((*grid, count), _rows_at(recorded, choosers.reference.rows, otherwise).reshape(-1)),
    )


def _to_next(scores: np.ndarray, count: int) -> np.ndarray:
    """Return how far each of the first scores of a row lies from the nearer one of those before and after it."""
    steps = np.abs(np.diff(scores, axis=1, append=np.inf, prepend=np.inf))
    return np.minimum(steps[:, :-1], steps[:, 1:])[:, :count]


def _indices(trace: Trace, chooser: _Chooser) -> list[np.ndarray]:
    """Return the recorded places, as rows, that the code makes of those which a call chose, and then uses."""
    count, axis = chooser.choice.chosen, shape_and_axis(trace, chooser.call)[1]
    after, indices = {operand.tensor for operand in chooser.call.outputs if not _is_real(trace, operand.tensor)}, []
    for call in trace.calls[chooser.position + 1 :]:
        places = [
            operand.tensor
            for operand in call.inputs
            if not _is_real(trace, operand.tensor)
            and math.prod(trace.tensors[operand.tensor].shape) == chooser.rows * count
            and (operand.tensor in after or not (trace.functions or call.function))
        ]
        computed = {operand.tensor for operand in call.outputs if not _is_real(trace, operand.tensor)}
        if call.function and computed:
            after |= computed if places else set()
            continue
        for traced in (trace.tensors[number] for number in places):
            if traced.source is not None and not traced.source.sketched and axis is not None:
                values = np.asarray(traced.source.read())
                has_axis = values.ndim == len(chooser.scores) and values.shape[axis] == count
                indices.append((np.moveaxis(values, axis, -1) if has_axis else values).reshape(-1, count))
    return indices


def _at_kinks(traces: Both[Trace], alignment: Alignment) -> Iterator[Flips]:
    """Yield the calls of ReLU with elements that are 0 on one side only: no gradient passes there.

    Sums of quantised numbers are often 0 on one side, and the rounding of one on the other.
    """
    calls = traces.map(lambda trace: [(k, call) for k, call in enumerate(trace.calls) if call.function == "relu"])
    partners = {LOOP: LOOP, **{pair.reference.path: pair.candidate.path for pair in alignment.pairs}}
    counterparts = {(call.layer, call.call, call.nth): call for _, call in calls.candidate}
    for position, call in calls.reference:
        counterpart = counterparts.get((partners.get(call.layer, ""), call.call, call.nth))
        if counterpart is None or not call.outputs or not counterpart.outputs:
            continue
        tensors = traces.zip(Both(call, counterpart)).map(lambda side: side[0].tensors[side[1].outputs[0].tensor])
        sources = [tensor.source for tensor in tensors if tensor.source is not None and not tensor.source.sketched]
        coarse = any(tensor.dtype in ("float16", "bfloat16") for tensor in tensors)  # whose limits hold such elements
        if coarse or tensors.reference.shape != tensors.candidate.shape or len(sources) < 2:
            continue
        values = [source.read().astype(np.float64).reshape(-1) for source in sources]
        flipped, distance = (values[0] > 0) != (values[1] > 0), np.abs(values[1] - values[0])
        flipped &= distance <= allowed(tensors.reference.dtype, "forward") * _rms(values[0])
        if flipped.any():
            yield Flips(
                calls=Both(call, counterpart),
                position=position,
                grid=tensors.reference.shape,
                rows=flipped.size,
                recorded=np.arange(flipped.size),
                flipped=flipped,
                ties=np.zeros_like(flipped),
                error=distance,
                moved=distance,
                gap=distance,
                size=_rms(values[0]),
                chosen=Both(0, 0),
                dtype=tensors.reference.dtype,
                elements=View(tensors.reference.shape, flipped),
                alone=True,
            )


def _at_bounds(traces: Both[Trace], alignment: Alignment) -> Iterator[Flips]:
    """Yield the calls that hold values between bounds, with elements whose gradient passes on one side only.

    Of bounds that only one side has (the other side may compare, or quantise by one function), these are the elements
    that lie at the bounds up to a few units in their last place.
    """
    bounds = traces.map(
        lambda trace: [
            _Chooser(trace, k, call) for k, call in enumerate(trace.calls) if call.choice and not call.chooses
        ]
    )
    pairs = list(_paired(bounds, alignment)) if all(bounds) else []
    for side in pairs:
        choosers = side.map(lambda some: some[0])
        flips = _flips(traces, choosers.reference.position, choosers.map(lambda each: (each.call,)), {}, ())
        if flips is not None and flips.count:
            yield replace(flips, elements=View(flips.grid, flips.mask))
    for name in ("reference", "candidate"):
        held = {getattr(side, name)[0].position for side in pairs}
        for chooser in (each for each in getattr(bounds, name) if each.position not in held):
            table, trace, calls = tables_of(chooser.trace, chooser.call), chooser.trace, (chooser.call,)
            flips = _flips(Both(trace, trace), chooser.position, Both(calls, calls), {}, ())
            if table is None or flips is None:
                continue
            distances = np.abs(table.scores[0][np.argsort(table.places[0])])
            near = distances <= _AT_BOUND * ROUNDING[flips.dtype] * flips.size
            if near.any():
                flips = replace(flips, flipped=near, alone=True, position=flips.position if name == "reference" else 0)
                yield replace(flips, elements=View(flips.grid, flips.mask))


class Mask(NamedTuple):
    """The places of a row that a comparison of its scores with the one at a rank takes.

    Attributes:
        places: number of places, if no scores are equal.
        largest: True if those are the largest scores.
        rank: rank of the score, in the order of the call that ranks.
        strict: True if places whose scores equal that one are left out; else all of them are taken.
        line: the line of code that compares.
    """

    places: int
    largest: bool
    rank: int
    strict: bool
    line: Frame | None


def masked(trace: Trace, call: TracedCall, largest: bool | None = None) -> Mask | None:
    """Return the places that the code takes by a comparison with the score at one rank; `None` if it does not.

    Args:
        call: the call that ranks the scores.
        largest: the end of the row from which places are asked for; `None` for the end that the comparison takes.
    """
    if call.function not in _WITH_RANKS | WHOLE or not call.inputs or call.choice is None:
        return None
    scores, axis = shape_and_axis(trace, call)
    if axis is None:
        return None
    size, rows = scores[axis], math.prod(scores) // max(scores[axis], 1)
    if (below := _below_rank(trace, call, largest, size)) or call.function not in _WITH_RANKS:
        return below
    first, falls = _first(trace, call), is_descending(call.function, call.arguments)
    ranks = {o.tensor: (first or 0, 1 if first is not None else call.choice.chosen) for o in call.outputs[:1]}
    ranked = {call.inputs[0].tensor}
    for each in trace.calls:  # all elements of a tensor may be ranked as one row, and compared in its shape
        if each.function in RESHAPING | {"detach"} and ranked & {o.tensor for o in (*each.inputs, *each.outputs)}:
            ranked |= {o.tensor for o in (*each.inputs, *each.outputs)}
    for later in trace.calls:
        mask_of = [operand.tensor for operand in later.inputs if operand.tensor in ranks]
        if len(mask_of) != 1 or not later.outputs:
            continue
        start, count = ranks[mask_of[0]]
        shapes = [trace.tensors[operands[0].tensor].shape for operands in (later.inputs, later.outputs)]
        if later.function in COMPARISONS and count == 1 and len(later.inputs) == 2:
            at = [operand.tensor for operand in later.inputs]
            if not ranked & {*at}:
                continue
            takes_largest = (later.function in ("gt", "ge")) == (at[0] in ranked)
            from_start, strict = takes_largest == falls, later.function in ("gt", "lt")
            taken_count = start + 1 - strict if from_start else size - start - strict
            mask = Mask(taken_count, takes_largest, start, strict, later.line)
            if largest in (None, takes_largest):
                return mask
            return mask._replace(places=size - taken_count, largest=not takes_largest, strict=not strict)
        if later.function == "getitem" and len(shapes[0]) == len(scores):
            key, part = _key_at(later, len(scores), axis), math.prod(shapes[1]) // max(rows, 1)
            begin = key if isinstance(key, int) else (key or "?").partition(":")[0] or "0"
            if str(begin).lstrip("-").isdigit() and str(key).count(":") < 2:
                ranks[later.outputs[0].tensor] = start + int(begin) % max(count, 1), part
        elif later.function in _HAND_ON:
            if later.function in ("min", "amin") and falls and math.prod(shapes[1]) == rows:
                start, count = start + count - 1, 1
            if count == 1:
                ranks[later.outputs[0].tensor] = start, count
    return None


def _below_rank(trace: Trace, call: TracedCall, largest: bool | None, size: int) -> Mask | None:
    """Return the places that the code takes by a comparison of all ranks with a number: ``argsort`` of places gives the
    rank of each place; `None` if the code compares no ranks.

    Args:
        largest: see `masked`.
        size: number of places.
    """
    places, ranks = {operand.tensor for operand in call.outputs}, set[int]()
    for later in trace.calls if call.function in WHOLE else ():
        given = {operand.tensor for operand in later.inputs}
        if later.function == "argsort" and given & places and not is_descending("argsort", later.arguments):
            ranks |= {operand.tensor for operand in later.outputs}
        count = number(later) if given & ranks else None
        if count is not None and 0 < count < size:
            first = math.ceil(count) if later.function in ("lt", "ge") else math.floor(count) + 1
            from_start, falls = later.function in ("lt", "le"), is_descending(call.function, call.arguments)
            end = largest if largest is not None else falls == from_start
            taken_count = first if end == falls else size - first
            return Mask(taken_count, end, first - (end == falls), False, later.line)
    return None


@dataclass(frozen=True)
class _Chooser:
    """A call that chooses, at its position in the trace of its side."""

    trace: Trace
    position: int
    call: TracedCall

    @property
    def choice(self) -> Choice:
        assert self.call.choice is not None
        return self.call.choice

    @property
    def rows(self) -> int:
        """Number of rows; of a threshold, that of its elements."""
        if self.choice.chosen:
            return self.choice.rows
        return math.prod(self.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the output."""
        return elements_of(self.trace, self.call)

    @property
    def scores(self) -> tuple[int, ...]:
        """Shape of the scores."""
        return shape_and_axis(self.trace, self.call)[0] if self.call.inputs else ()

    @cached_property
    def first(self) -> int | None:
        """The rank of the chosen place; `None` if the first ones are chosen."""
        return None if masked(self.trace, self.call) else _first(self.trace, self.call)

    @property
    def key(self) -> tuple[int, int, int, float | None]:
        """Number of rows, of the places among which the call chooses, of the chosen ones; a rank, or a threshold."""
        places = places_of(self.trace, self.call) if self.call.inputs else 0
        mask = masked(self.trace, self.call)
        by = self.first if self.choice.chosen else number(self.call)
        return self.rows, places, mask.places if mask else self.choice.chosen, by

    @cached_property
    def tables(self) -> Tables | None:
        return tables_of(self.trace, self.call)

    @property
    def is_counted(self) -> bool:
        """True for scores that are whole numbers: counts, or a mask."""
        return self.tables is not None and bool((self.tables.scores == np.round(self.tables.scores)).all())


def paired(traces: Both[Trace], alignment: Alignment) -> Iterator[tuple[int, Both[tuple[TracedCall, ...]]]]:
    """Yield choosing calls that correspond, with the position of the reference's, in the reference's order.

    Rankings are paired in order if both sides rank as often, among as many rows; else layer by layer, and those that
    return places apart from those that return values only. The same for thresholds. One side may choose in several
    calls, one after the other, for the rows of one call of the other side.
    """
    choosers = traces.map(
        lambda trace: [_Chooser(trace, k, call) for k, call in enumerate(trace.calls) if call.chooses]
    )
    rankings = choosers.map(lambda side: [each for each in side if each.choice.chosen])
    thresholds = choosers.map(lambda side: [each for each in side if not each.choice.chosen])
    groups = [thresholds]
    if not _alike(*thresholds):  # a number that is rounded, and one that is compared
        groups = [thresholds.map(partial(_that_round, rounds=rounds)) for rounds in (True, False)]
    if _alike(*rankings):
        groups.append(rankings)
    else:
        for places in (True, False):
            groups.append(rankings.map(partial(_that_return, places=places)))
    pairs = [pair for group in groups for pair in _paired(group, alignment)]
    pairs += _paired(_without_pairs(rankings, pairs), alignment)  # one side's call may return places that nobody uses
    pairs += _by_rank(*_without_pairs(rankings, pairs))
    for sides in sorted(pairs, key=lambda pair: pair.reference[0].position):
        yield sides.reference[0].position, sides.map(lambda side: tuple(each.call for each in side))


def _without_pairs(rankings: Both[list[_Chooser]], pairs: list[Both[list[_Chooser]]]) -> Both[list[_Chooser]]:
    in_pairs = unzipped(pairs).map(lambda side: {each.position for some in side for each in some})
    return rankings.zip(in_pairs).map(lambda side: [each for each in side[0] if each.position not in side[1]])


def _by_rank(choosers: Sequence[_Chooser], others: Sequence[_Chooser]) -> Iterator[Both[list[_Chooser]]]:
    """Yield a call of one side that ranks all places with each call of the other that takes one rank of its rows."""
    for side, ranks in ((choosers, others), (others, choosers)):
        for each in ranks:
            whole = [every for every in side if every.call.function in WHOLE and every.key[:2] == each.key[:2]]
            if each.first is not None and len(whole) == 1:
                yield Both([each], whole) if side is others else Both(whole, [each])


def _that_return(choosers: list[_Chooser], places: bool) -> list[_Chooser]:
    """Return the calls that return places, or those that do not."""
    return [each for each in choosers if returns_places(each.trace, each.call) is places]


def _that_round(choosers: list[_Chooser], rounds: bool) -> list[_Chooser]:
    """Return the calls that round, or those that compare."""
    return [each for each in choosers if (each.call.function in ROUNDINGS | QUANTISERS) is rounds]


def _paired(choosers: Both[list[_Chooser]], alignment: Alignment) -> Iterator[Both[list[_Chooser]]]:
    partners = {LOOP: LOOP, **{pair.reference.path: pair.candidate.path for pair in alignment.pairs}}
    groups = [choosers]
    if not _alike(*choosers):
        layers = choosers.map(_by_layer)
        groups = [
            Both(some, layers.candidate.get((partners.get(path, ""), number), []))
            for (path, number), some in layers.reference.items()
        ]
    for some, others in groups:
        blocks = [Match(0, 0, len(some)), Match(len(some), len(others), 0)]
        if not _alike(some, others):
            repeated = _repeated(some, others)
            yield from repeated
            some, others = (
                [each for each in side if not any(each in pair for pair in pairs)]
                for side, pairs in zip((some, others), unzipped(repeated))
            )
            blocks = _by_scores(some, others)
        ends = 0, 0
        for first, second, count in blocks:
            rest = some[ends[0] : first], others[ends[1] : second]
            if rest[0] and len(rest[0]) == len(rest[1]) and not rest[0][0].choice.chosen:  # other thresholds
                yield from (Both([each], [partner]) for each, partner in zip(*rest) if each.rows == partner.rows)
            else:
                yield from _of_several(*rest)
            ends = first + count, second + count
            for here, partner in zip(some[first : ends[0]], others[second : ends[1]]):
                yield Both([here], [partner])


def _repeated(choosers: Sequence[_Chooser], partners: Sequence[_Chooser]) -> list[Both[list[_Chooser]]]:
    """Return the calls of a line of code that a loop over the samples repeats, with the one call of the other side for
    all samples: first those with the same scores.
    """
    pairs: list[tuple[int, Both[list[_Chooser]]]] = []
    lines = Both(choosers, partners).map(_by_line)
    for sides in (Both(*pair) for pair in product(lines.reference.values(), lines.candidate.values())):
        single, parts = sorted(sides, key=len)
        if len(single) == 1 < len(parts) and {(len(parts), *each.shape) for each in parts} == {single[0].shape}:
            pairs.append((_agreement(*sides), sides))
    matches: list[Both[list[_Chooser]]] = []
    for agreement, pair in sorted(pairs, key=lambda each: -each[0]):
        if agreement and not any(side is group for match in matches for side, group in zip(pair, match)):
            matches.append(pair)
    return matches


def _by_line(choosers: Sequence[_Chooser]) -> dict[tuple[Frame | None, str, str], list[_Chooser]]:
    lines: dict[tuple[Frame | None, str, str], list[_Chooser]] = defaultdict(list)
    for each in choosers:  # later steps have no lines
        lines[each.call.line, each.call.function, str(each.call.arguments)].append(each)
    return lines


def _by_scores(choosers: Sequence[_Chooser], partners: Sequence[_Chooser]) -> list[Match]:
    """Return the blocks of calls that correspond, in order: those with the same scores, and between these those that
    choose as many of as many places. One side may choose in several calls where the other makes one.
    """
    if len(choosers) * len(partners) > _CALLS:
        table = np.zeros((len(choosers), len(partners)), np.int64)
    else:
        table = np.array([[_agreement([chooser], [partner]) for partner in partners] for chooser in choosers], np.int64)
        lines = {(choosers[k].call.line, partners[m].call.line) for k, m in np.argwhere(table == 2)}
        for k, m in np.argwhere(table == 0):  # a loop's later rounds: by then all rows may hold other scores
            if (choosers[k].call.line, partners[m].call.line) in lines and choosers[k].rows == partners[m].rows:
                table[k, m] = 1
    totals = np.zeros((len(choosers) + 1, len(partners) + 1), np.int64)  # of the calls from two positions on
    for k, m in np.ndindex(*table.shape):
        row, column = len(choosers) - 1 - k, len(partners) - 1 - m
        totals[row, column] = max(
            totals[row + 1, column], totals[row, column + 1], table[row, column] + totals[row + 1, column + 1]
        )
    blocks, start, k, m = [], (0, 0), 0, 0
    keys = Both(choosers, partners).map(lambda side: [(*each.key, each.is_counted) for each in side])
    while True:
        ends = k == len(choosers) or m == len(partners)
        if ends or (table[k, m] and totals[k, m] == table[k, m] + totals[k + 1, m + 1]):
            until = (len(choosers), len(partners)) if ends else (k, m)
            between = keys.reference[start[0] : until[0]], keys.candidate[start[1] : until[1]]
            matches = SequenceMatcher(None, *between, autojunk=False).get_matching_blocks()[:-1]
            blocks += [Match(start[0] + each.a, start[1] + each.b, each.size) for each in matches]
            blocks.append(Match(*until, int(not ends)))
            if ends:
                return blocks
            k, m = start = k + 1, m + 1
        else:
            k, m = (k + 1, m) if totals[k, m] == totals[k + 1, m] else (k, m + 1)


def _agreement(choosers: Sequence[_Chooser], partners: Sequence[_Chooser]) -> int:
    """Return 2 if calls of two sides choose by the same scores, 1 if by the same up to a number (another threshold),
    else 0.
    """
    chooser, partner = choosers[0], partners[0]
    if bool(chooser.choice.chosen) != bool(partner.choice.chosen):
        return 0
    if sum(each.rows for each in choosers) != sum(each.rows for each in partners):
        return 0
    tables = Both(choosers, partners).map(
        lambda side: side[0].tables if len(side) == 1 else _joined_tables(side[0].trace, [each.call for each in side])
    )
    if tables.reference is None or tables.candidate is None:
        return 0
    sides = Both(tables.reference, tables.candidate)
    if not chooser.choice.chosen:
        return 2 - (moved != 0) if (moved := moved_threshold(sides)) is not None else 0
    if (
        not _take_alike(chooser, partner)
        or chooser.key[1] != partner.key[1]
        or chooser.choice.every != partner.choice.every
    ):
        return 0
    width = 1 + max(int(side.places.max(initial=0)) for side in sides)
    if width * len(sides.reference.places) > _MOST or len({len(side.places) for side in sides}) > 1:
        return 0
    scores = sides.map(lambda side: _spread(side.scores, side.places, width))
    few = (np.isfinite(scores.reference) & np.isfinite(scores.candidate)).sum() < _LEAST_SCORES
    none = np.zeros(len(scores.reference), np.bool_)
    return 0 if few else 2 * int(_apart(_in_one_form(_masked(scores), none), none) <= _OTHER)


def moved_threshold(tables: Both[Tables]) -> float | None:
    """Return what the candidate's distances of elements to its threshold lack to be the reference's, from either side
    of it; 0 within rounding, `None` if they are distances of other elements.
    """
    margins = _common(tables, tables.map(lambda side: side.places[0]))[2]
    counts = all((side == np.round(side)).all() for side in margins)
    if counts or margins.reference.size < _LEAST_SCORES:
        return None
    moves: list[float] = []
    for sign in (1, -1):
        distances = margins.reference - sign * margins.candidate
        shift, size = float(np.median(distances)), float(np.std(margins.reference))
        if np.median(np.abs(distances - shift)) <= _OTHER * size:
            moves.append(sign * shift if abs(shift) > _OTHER * size else 0.0)
    return min(moves, key=abs, default=None)


def _of_several(choosers: Sequence[_Chooser], others: Sequence[_Chooser]) -> Iterator[Both[list[_Chooser]]]:
    """Yield calls that rank as many places, in order: as many rows by one call of one side, by several of the other."""
    while choosers and others and choosers[0].choice.chosen:
        counts = [1, 1]
        sides = choosers, others
        if choosers[0].rows != others[0].rows and choosers[0].scores == others[0].scores:
            yield Both([choosers[0]], [others[0]])  # one ranks them along another axis
            choosers, others = choosers[1:], others[1:]
            continue
        while (rows := [side[0].rows * count for side, count in zip(sides, counts)])[0] != rows[1]:
            counts[rows[0] > rows[1]] += 1
            if any(count > len(side) for side, count in zip(sides, counts)):
                return
        parts = Both(choosers[: counts[0]], others[: counts[1]])
        if min(counts) > 1 or any(len({each.key for each in side}) > 1 for side in parts):
            return
        if choosers[0].key[1] != others[0].key[1] or choosers[0].first != others[0].first:
            return
        yield parts.map(list)
        choosers, others = choosers[counts[0] :], others[counts[1] :]


def _alike(choosers: Sequence[_Chooser], others: Sequence[_Chooser]) -> bool:
    """Return True if calls of the two sides choose as often, among as many rows, and none one rank for the first ones.

    A call that ranks all places stands for any.
    """
    if len(choosers) != len(others) or [each.rows for each in choosers] != [each.rows for each in others]:
        return False
    return all(map(_take_alike, choosers, others))


def _take_alike(chooser: _Chooser, partner: _Chooser) -> bool:
    """Return False if one call takes the first places, the other one rank; a call may rank all places for either."""
    return any(each.call.function in WHOLE for each in (chooser, partner)) or (chooser.first is None) == (
        partner.first is None
    )


def _by_layer(choosers: list[_Chooser]) -> dict[tuple[str, int], list[_Chooser]]:
    layers: dict[tuple[str, int], list[_Chooser]] = defaultdict(list)
    for each in choosers:
        layers[each.call.layer, each.call.call].append(each)
    return layers


def _first(trace: Trace, call: TracedCall) -> int | None:
    return first_rank(call.function, call.arguments, places_of(trace, call)) if call.inputs else None


def returns_places(trace: Trace, call: TracedCall) -> bool:
    """Return True if a call that ranks returns places, and not only values; or a mask of them is made."""
    return masked(trace, call) is not None or any(not _is_real(trace, operand.tensor) for operand in call.outputs)


def _hands_on_best(trace: Trace, call: TracedCall) -> bool:
    """Return True if the best values of a call's scores are handed on without their places, by the call or another."""
    others = (each for each in trace.calls if each.choice is not None and each.choice.chosen == 1 and each.inputs)
    scores = call.inputs[0].tensor
    return any(each.inputs[0].tensor == scores and not returns_places(trace, each) for each in others)


def chooses_experts(trace: Trace, call: TracedCall) -> bool:
    """Return True if a call hands on which places rank first: not a rank in the middle, a place in a window, values."""
    if call.choice is None or not call.choice.chosen or pooled(call):
        return False
    return _first(trace, call) is None and returns_places(trace, call)


@dataclass(frozen=True)
class Tables:
    """The recorded tensors of a choice: scores, their places, and what was picked."""

    scores: np.ndarray
    places: np.ndarray
    picked: np.ndarray

    def at(self, rows: np.ndarray) -> Tables:
        return Tables(self.scores[rows], self.places[rows], self.picked[rows])


def _flips(
    traces: Both[Trace],
    position: int,
    parts: Both[tuple[TracedCall, ...]],
    earlier: Mapping[int, np.ndarray],
    before: Sequence[np.ndarray],
    traced: Both[Trace] | None = None,
) -> Flips | None:
    calls = parts.map(lambda side: side[0])
    choices: Both[Choice] = calls.map(lambda call: call.choice)  # type: ignore[arg-type, return-value]
    tables = [_joined_tables(*side) for side in traces.zip(parts)]
    grid = grid_of(traces.reference, calls.reference)
    if tables[0] is None or tables[1] is None or grid is None:
        return None
    if not any(choice.chosen for choice in choices):
        shapes = traces.zip(calls).map(lambda side: elements_of(*side))
        if len({math.prod(shape) * len(some) for shape, some in shapes.zip(parts)}) > 1:
            return None
        grid = (len(parts.reference), *grid) if len(parts.reference) > 1 else grid
        return _of_threshold(traces, calls, position, grid, Both(tables[0], tables[1]), _dtype(traces, choices))
    if not all(call.inputs for call in calls):
        return None
    several, (shape, axis) = len(parts.reference), shape_and_axis(traces.reference, calls.reference)
    rows, chosen = choices.reference.rows * several, choices.map(lambda choice: choice.chosen)
    if not all(chosen):
        return None
    if rows != choices.candidate.rows * len(parts.candidate):
        return None
    if several > 1:
        grid, shape, axis = (several, *grid), (several, *shape), None if axis is None else axis + 1
    ids = parts.zip(choices).map(
        lambda side: np.concatenate(
            [np.arange(0, side[1].rows, side[1].every) + k * side[1].rows for k in range(len(side[0]))]
        )
    )
    common = np.intersect1d(*ids)
    sides = Both(*(table.at(np.isin(each, common)) for table, each in zip((tables[0], tables[1]), ids)))
    if len(common) == rows and max(map(len, parts)) > 1:  # several calls for what one call has along another axis
        order = common.reshape(-1, max(map(len, parts))).T.reshape(-1)
        order = order if len(parts.candidate) == 1 else np.argsort(order)
        turned, count = sides.candidate.at(order), min(side.picked.shape[1] for side in sides)
        alike = [
            (table.picked[:, :count] == sides.reference.picked[:, :count]).sum() for table in (sides.candidate, turned)
        ]
        sides = sides if alike[0] >= alike[1] else Both(sides.reference, turned)
    firsts = traces.zip(calls).map(lambda side: _first(*side))
    first = next((each for each in firsts if each is not None), 0)
    masks = masks_of(traces, calls)
    part, other = parts_taken(traces, calls, masks)
    width = places_of(traces.reference, calls.reference)
    largest = max(int(table.max(initial=0)) for side in sides for table in (side.places, side.picked))
    smallest = min(int(table.min(initial=0)) for side in sides for table in (side.places, side.picked))
    width = max(width, 1 + largest)
    if width * len(common) > _MOST or smallest < 0:
        return None
    beside = np.zeros((len(common), width), np.bool_)
    if any(masks):
        chosen = Both(part[1] if part else chosen.reference, other[1] if other else chosen.candidate)
        if any(each is None and call.function in WHOLE for each, call in zip((part, other), calls)):
            chosen = Both(min(chosen), min(chosen))  # all places are ranked, and how many are taken is not known
        count = min(chosen)
        by_masks = _by_masks(sides, calls, masks, count, width) if chosen.reference == chosen.candidate else None
        best, beside = by_masks or (sides.map(lambda side: side.picked[:, :1]), beside)
        if by_masks is None and chosen.reference == chosen.candidate:
            return None
        count = best.reference.shape[1]
    elif part and other and part[1] == other[1]:
        count = part[1]
        chosen = Both(sum(part), sum(other))  # parts that begin elsewhere are no choice of the same places
        best = sides.zip(Both(part[0], other[0])).map(lambda side: side[0].picked[:, side[1] : side[1] + count])
    else:
        if part and other:
            chosen = Both(part[1], other[1])
        elif {call.function in WHOLE for call in calls} == {True, False} or (
            len({call.function for call in calls}) > 1 and not all(trace.functions for trace in traces)
        ):
            chosen = Both(min(chosen), min(chosen))  # one side ranks more places, and its code takes the first ones
        count = min(*chosen, *(side.picked.shape[1] for side in sides))
        best = sides.zip(firsts).map(lambda side: _taken(side[0], first if side[1] is None else 0, count))
    if any(side.shape[1] != count for side in best):
        return None
    known = sides.map(lambda side: _spread(side.scores, side.places, width))
    for table, partner, side, mask, rank in zip(known, known.swapped(), sides, masks, firsts):
        if mask is None:  # a mask takes places that are not recorded only where the other side does
            _fill(
                table, side, np.concatenate([best.reference, best.candidate], axis=1), None if rank is None else partner
            )
    at = np.arange(len(common))[:, None]
    if any(call.arguments.get("sorted") is False for call in calls):
        best = best.zip(known).map(lambda side: _in_order(side[0], side[1][at, side[0]], sides.reference))
    others = _otherwise(best, width) | beside
    hands_on = traces.zip(calls).map(lambda side: returns_places(*side))
    shared = np.zeros(len(common), np.bool_)
    for side, has_values in zip(sides, traces.zip(calls).map(lambda side: _hands_on_best(*side))):
        if has_values and count == 1 and first == 0:  # its gradient may go to all places that share the best score
            several_best = (side.scores[:, 1:] == side.scores[:, :1]).any(axis=1)
            shared |= several_best
            if not all(hands_on):
                rows_at, ranks_at = np.nonzero((side.scores == side.scores[:, :1]) & several_best[:, None])
                others[rows_at, side.places[rows_at, ranks_at]] = True
    flipped = np.asarray(others.any(axis=1))
    moved = earlier.get(width)
    for places in before if moved is None else ():
        if len(places) == width and _has_moved(known, places, flipped, _dtype(traces, choices)):
            moved = places | others.any(axis=0)
    if moved is not None:
        for table in known:
            table[:, moved if (~moved).sum() > _FEW else slice(None)] = np.nan
    raw = known
    known = _in_one_form(_masked(known), flipped)
    size, dtype = _rms(known.reference), _dtype(traces, choices)
    are_distances = all((table[at, side] >= 0).all() for table, side in zip(known, best))
    measure = partial(_between, size=size if are_distances else 0.0)
    with np.errstate(invalid="ignore"):  # scores of minus infinity on both sides
        distance = np.nan_to_num(measure(*known), nan=0.0, posinf=np.inf)
    tied = best.reference == best.candidate
    no_rule = any(masks) or any(call.function in _OPEN for call in calls)
    equal = np.logical_and(*(table[at, best.reference] == table[at, best.candidate] for table in known))
    involved = np.maximum(distance[at, best.reference], distance[at, best.candidate])
    with np.errstate(invalid="ignore"):
        gaps, raw_gaps = (
            some.map(lambda table: measure(table[at, best.reference], table[at, best.candidate]))
            for some in (known, raw)
        )
        apart = np.minimum(*gaps)
        apart = np.where(np.isinf(apart), np.minimum(*raw_gaps), apart)  # one of the two is masked elsewhere
        gap = np.nan_to_num(apart, nan=0.0, posinf=np.inf).max(axis=1)
    ties = flipped & (tied | equal).all(axis=1)
    tied_rows = int(ties.sum())
    rules = Both(*(_rule(*side, ties) for side in zip(raw, best, masks))) if tied_rows else None
    # Equal scores in no order: the rows that chose alike judge the two sides. A mask may take more places than others.
    few = 2 * ties.sum() <= len(common) if any(masks) else not ties.all()
    if not all(hands_on) or (no_rule and few):
        ties = np.zeros_like(ties)
    otherwise = best.reference != best.candidate
    if moved is not None:
        otherwise |= moved[best.reference] | moved[best.candidate]
    picks = View((*grid, count), _rows_at(common, rows, otherwise).reshape(-1))
    swapped = np.nonzero(otherwise)
    in_order = not any(masks) and all(call.arguments.get("sorted") is not False for call in calls)
    ranks = swapped[1] if in_order and not first and not (part and part[0]) else None
    swaps = Swaps(common[swapped[0]], ranks, best.map(lambda places: places[swapped]), grid if rows > 1 else (), width)
    used = [_uses_places(*side, shown) for side, shown in zip(traces.zip(calls), traced or (None, None))]
    if rows == 1 and len(common) == 1:  # its places, of samples or tokens, are what is chosen
        chose = others[0]
        return Flips(
            calls=calls,
            position=position,
            grid=(width,),
            rows=width,
            recorded=np.arange(width),
            flipped=chose,
            ties=np.zeros(width, np.bool_),
            error=distance[0],
            moved=np.where(chose, max(float(involved.max(initial=0.0)), 0.0), distance[0]),
            gap=np.where(chose, gap[0], 0.0),
            size=size,
            chosen=chosen,
            dtype=dtype,
            chosen_places=best.map(lambda places: np.isin(np.arange(width), places[0])),
            picks=picks,
            swaps=None if beside.any() else swaps,
        )
    table, flipped_rows = _rows_at(common, rows, others), _rows_at(common, rows, flipped[:, None])
    # A token whose ranks differ is chosen all the same; of all tokens in another order, others may follow.
    by_both = np.logical_and(*(_members(side, width) for side in best)) if count < width else np.zeros_like(others)
    alone = _rows_at(common, rows, (others & ~by_both) | beside)
    return Flips(
        calls=calls,
        position=position,
        grid=grid,
        rows=rows,
        recorded=common,
        flipped=flipped,
        ties=ties,
        error=distance.max(axis=1),
        moved=involved.max(axis=1),
        gap=gap,
        size=size,
        chosen=chosen,
        dtype=dtype,
        touched=np.union1d(
            np.flatnonzero(others.any(axis=0)) if width == rows and not pooled(calls.reference) else _none(),
            _none() if moved is None else common[(moved[best.reference] | moved[best.candidate]).any(axis=1)],
        ),
        places=np.asarray(others.any(axis=0)),
        among=np.isin(np.arange(width), np.concatenate([side[flipped] for side in best], axis=None)),
        tokens=_tokens(_outputs_before(traces.reference, position), shape, axis, pooled(calls.reference), alone),
        queries=_of_queries(queries_of(traces.reference, position, calls.reference), flipped_rows),
        keys=_keys(_outputs_before(traces.reference, position), shape, axis, pooled(calls.reference), table),
        shared=View(grid, _rows_at(common, rows, shared[:, None]).reshape(-1)) if shared.any() else None,
        picks=picks,
        swaps=None if beside.any() else swaps,
        tied=tied_rows,
        rules=rules,
        elements=_elements(shape, axis, table) if not any(used) and (None not in used or not all(hands_on)) else None,
    )


def _has_moved(scores: Both[np.ndarray], places: np.ndarray, flipped: np.ndarray, dtype: str) -> bool:
    """Return True if the scores of all rows differ by more than rounding, and almost only those of some places.

    The code that chooses may make entries of the rows that chose them, and choose again: means of clusters.

    Args:
        places: mask of the places that rows chose otherwise when the code chose before.
        flipped: mask of the rows that choose otherwise.
    """
    if (~places).sum() <= _FEW:
        return False
    errors = []
    for scored in (scores, scores.map(lambda side: np.where(places, np.nan, side))):
        values = _in_one_form(_masked(scored), flipped)
        distance = np.abs(values.candidate - values.reference)[~flipped]
        errors.append(_rms(distance) / (_rms(values.reference) or math.inf))
    return errors[0] > max(allowed(dtype, "forward"), _NEARER * errors[1])


def pooled(call: TracedCall) -> int:
    """Return the number of axes over which a call pools, and returns from where its output comes; else 0."""
    return pooled_axes(call.function, call.arguments)


def jumping(trace: Trace, call: TracedCall) -> set[int]:
    """Return the tensors that another choice changes by more than rounding: of best values, the places only."""
    if call.choice is None or not call.choice.chosen or masked(trace, call) is not None:
        return {operand.tensor for operand in call.outputs}
    return {operand.tensor for operand in call.outputs if not _is_real(trace, operand.tensor)}


def _uses_places(trace: Trace, call: TracedCall, traced: Trace | None) -> bool | None:
    """Return True if calls of functions show that the places are used which a call chose; `None` if none are known.

    Args:
        traced: the trace of an earlier step, with calls of functions.
    """
    if not trace.functions and traced is not None:
        same = [each for each in traced.calls if each.numbered_name == call.numbered_name]
        trace, call = (traced, same[0]) if same else (trace, call)
    if not trace.functions:
        return None
    places = jumping(trace, call)
    return any(operand.tensor in places for each in trace.calls for operand in each.inputs)


def shape_and_axis(trace: Trace, call: TracedCall) -> tuple[tuple[int, ...], int | None]:
    """Return the shape of the scores and the axis along which a row runs; `None` if the row is all of them."""
    shape, axis = trace.tensors[call.inputs[0].tensor].shape, row_axis(call.function, call.arguments)
    return shape, axis % len(shape) if isinstance(axis, int) and -len(shape) <= axis < len(shape) else None


def _elements(shape: tuple[int, ...], axis: int | None, mask: np.ndarray) -> View | None:
    """Return a mask of the places of each row as one of the elements of the scores; `None` if these are others."""
    if mask.size != math.prod(shape):
        return None
    if axis is not None:
        lead = [extent for number, extent in enumerate(shape) if number != axis]
        mask = np.moveaxis(mask.reshape(*lead, shape[axis]), -1, axis)
    return View(shape, mask.reshape(-1))


def _taken(side: Tables, first: int, count: int) -> np.ndarray:
    """Return what a side picked from a rank on, counted from the least score if it is not the first one."""
    if first and side.scores[0, 0] > side.scores[0, -1]:
        first = side.picked.shape[1] - 1 - first
    return side.picked[:, first : first + count]


def masks_of(traces: Both[Trace], calls: Both[TracedCall]) -> Both[Mask | None]:
    """Return the masks by which each side takes places; none where both compare with one rank by one function, or
    one side hands on the score at a rank.
    """
    masks = traces.zip(calls).map(lambda side: masked(*side))
    if all(masks) and calls.reference.function == calls.candidate.function not in WHOLE:
        return Both(None, None)
    if not all(masks) and all(len(ranks_taken(*side)) == 1 for side in traces.zip(calls)):
        return Both(None, None)  # the value at a rank is handed on, which one side also compares with
    ends = [mask.largest if mask else is_descending(call.function, call.arguments) for mask, call in zip(masks, calls)]
    end = ends[1] if masks.reference and not masks.candidate else ends[0]
    return traces.zip(calls).map(lambda side: masked(*side, end))


def _rule(scores: np.ndarray, best: np.ndarray, mask: Mask | None, rows: np.ndarray) -> str:
    """Return which of the places that share the last chosen score a side takes, in rows with such places."""
    if mask is not None:
        return "none" if mask.strict else "all"
    table, best = scores[rows], best[rows]
    at = np.arange(len(table))[:, None]
    tied = table == table[at, best[:, -1:]]
    chosen = np.zeros_like(tied)
    chosen[at, best] = True
    chosen &= tied
    order, counts = np.cumsum(tied, axis=1), chosen.sum(axis=1)[:, None]
    if (chosen == (tied & (order <= counts))).all():
        return "the first"
    return "the last" if (chosen == (tied & (order > order[:, -1:] - counts))).all() else "any"


def _by_masks(
    sides: Both[Tables], calls: Both[TracedCall], masks: Both[Mask | None], count: int, width: int
) -> tuple[Both[np.ndarray], np.ndarray] | None:
    """Return the places that both sides take, and a table of the doubtful ones (see `_by_mask`); `None`: not known."""
    beside = np.zeros((len(sides.reference.places), width), np.bool_)
    best: list[np.ndarray | None] = [None if mask else side.picked[:, :count] for mask, side in zip(masks, sides)]
    triples = list(zip(sides, masks, calls))
    for k in sorted(range(2), key=lambda k: triples[k][0].picked.shape[1] == 1):  # one rank: after those with all
        side, mask, call = triples[k]
        if mask is not None:
            best[k], doubtful = _by_mask(side, mask, call, best[1 - k], width)
            beside |= doubtful
    if best[0] is None or best[1] is None:
        return None
    return Both(best[0], best[1]), beside


def _by_mask(
    side: Tables, mask: Mask, call: TracedCall, others: np.ndarray | None, width: int
) -> tuple[np.ndarray | None, np.ndarray]:
    """Return the places that a mask takes, in the other side's order (`None`: not known), and a table of those with the
    score of the mask's rank that are taken, or left out, besides these.

    Args:
        others: the places that the other side chose: taken where the scores around the rank do not tell.
    """
    falls = is_descending(call.function, call.arguments)
    ranks = np.arange(side.places.shape[1])
    at = mask.rank - (0 if side.picked.shape[1] > 1 else before_first(mask.rank))
    inside = ranks <= at if mask.largest == falls else ranks >= at
    if mask.strict:
        inside &= ranks != at
    doubtful, flags = np.zeros((2, len(side.places), width), np.bool_)
    rows, places = np.arange(len(side.places))[:, None], side.places.astype(np.int64)
    equal = side.scores == side.scores[:, at : at + 1]
    np.put_along_axis(doubtful, places, equal & (inside == mask.strict), axis=1)
    if others is not None:
        flags[rows, others] = True
    np.put_along_axis(flags, places, np.broadcast_to(inside, places.shape), axis=1)
    if others is None:
        return places[:, inside], doubtful
    arranged, alike = others.copy(), flags[rows, others]
    unknown = flags.sum(axis=1) != mask.places  # the other side chose a place beyond the recorded ranks
    far = unknown & ~(equal[:, 0] | equal[:, -1])
    if far.sum() > (~alike[~unknown]).any(axis=1).sum():
        return None, doubtful
    doubtful[far, side.places[far, at]] = True
    alike[unknown] = True
    flags[unknown] = False
    flags[rows, others] = False
    arranged[~alike] = np.nonzero(flags)[1]
    return arranged, doubtful


def _dtype(traces: Both[Trace], choices: Both[Choice]) -> str:
    dtypes = traces.zip(choices).map(lambda side: side[0].tensors[side[1].scores].dtype)
    return max(dtypes, key=lambda dtype: allowed(dtype, "forward"))


def places_of(trace: Trace, call: TracedCall) -> int:
    """Return the number of places among which a call chooses."""
    shape, axis = shape_and_axis(trace, call)
    axes = pooled(call)
    if axes:
        return math.prod(shape[-axes:])
    return math.prod(shape) if axis is None else shape[axis]


def _in_order(picked: np.ndarray, scores: np.ndarray, side: Tables) -> np.ndarray:
    """Return the chosen places of each row with the best first, of a call that returns them in no order."""
    falls = bool((side.scores[:, 0] >= side.scores[:, -1]).all())
    order = np.argsort(-scores if falls else scores, axis=1, kind="stable")
    return np.take_along_axis(picked, order, 1)


def _otherwise(best: Both[np.ndarray], width: int) -> np.ndarray:
    """Return a mask of the places of each row that only one side chose, or that the sides rank differently."""
    rows, count = best.reference.shape
    ranks = np.full((2, rows, width), -1)
    for table, side in zip(ranks, best):
        np.put_along_axis(table, side, np.broadcast_to(np.arange(count), side.shape), axis=1)
    return np.asarray(ranks[0] != ranks[1])


def _members(best: np.ndarray, width: int) -> np.ndarray:
    """Return a mask of the places of each row that a side chose."""
    mask = np.zeros((len(best), width), np.bool_)
    np.put_along_axis(mask, best, True, axis=1)
    return mask


def _rows_at(recorded: np.ndarray, rows: int, table: np.ndarray) -> np.ndarray:
    """Return a mask with all rows: rows that were not recorded count as chosen alike."""
    whole = np.zeros((rows, table.shape[1]), np.bool_)
    whole[recorded] = table
    return whole


def _tokens(
    before: Sequence[tuple[int, ...]], shape: tuple[int, ...], axis: int | None, pools: int, mask: np.ndarray
) -> View | None:
    """Return the places that were chosen otherwise if layers before the call have one output for each of them.

    Args:
        before: shapes of these outputs.
        shape, axis: shape of the scores, and the axis along which a row runs.
        pools: number of axes over which the call pools.
        mask: mask of the places of each row that were chosen otherwise.

    Either each row chooses among tokens of its own (the tokens of a sequence that a layer takes), or all rows choose
    among the same ones (experts that choose tokens).
    """
    if pools:
        return _elements(shape, None, mask)
    if axis is None:
        return None
    if any(len(each) > len(shape) > 1 and each[: len(shape)] == shape for each in before):
        return _elements(shape, axis, mask)
    if any(math.prod(each[:-1]) == shape[axis] for each in before) and shape[axis] > len(mask):
        return View((shape[axis],), np.asarray(mask.any(axis=0)))
    return None


def _outputs_before(trace: Trace, position: int) -> list[tuple[int, ...]]:
    """Return the shapes of what layers gave before a call."""
    calls = (call for call in trace.calls[:position] if not call.function)
    shapes = (trace.tensors[operand.tensor].shape for call in calls for operand in call.outputs)
    return [shape for shape in shapes if len(shape) > 1 and shape[-1] > 1]


def _keys(
    before: Sequence[tuple[int, ...]], shape: tuple[int, ...], axis: int | None, pools: int, mask: np.ndarray
) -> View | None:
    """Return the tokens that rows of their sample chose otherwise: of attention, those whose gradient differs."""
    if axis is None or len(shape) < 3 or axis != len(shape) - 1 or pools:
        return None
    samples, tokens = shape[0], shape[-1]
    if not any(len(each) > 2 and each[0] == samples and each[-2] == tokens for each in before):
        return None
    return View((samples, tokens), mask.reshape(samples, -1, tokens).any(axis=1).reshape(-1))


def queries_of(trace: Trace, position: int, call: TracedCall) -> tuple[int, int] | None:
    """Return the shape of the tokens for which the heads of an attention choose; `None` for other calls."""
    grid = grid_of(trace, call)
    if grid is None or len(grid) != 3 or call.choice is None or not call.choice.chosen or pooled(call):
        return None
    tokens = grid[0], grid[-1]
    return tokens if any(shape[:-1] == tokens for shape in _outputs_before(trace, position)) else None


def _of_queries(tokens: tuple[int, int] | None, mask: np.ndarray) -> View | None:
    return None if tokens is None else View(tokens, mask.reshape(tokens[0], -1, tokens[1]).any(axis=1).reshape(-1))


def _of_threshold(
    traces: Both[Trace],
    calls: Both[TracedCall],
    position: int,
    grid: tuple[int, ...],
    tables: Both[Tables],
    dtype: str,
) -> Flips | None:
    """Return the flips of a call that compares with a threshold: each element is a row of its own.

    Returns `None` if most scores differ by more than their size: the calls compare other things.
    """
    shapes = traces.zip(calls).map(lambda side: elements_of(*side))
    places = tables.map(lambda side: side.places[0])
    both, at, known = _common(tables, places)
    if len(grid) == 2 and shapes.candidate == grid[::-1]:  # a linear layer's weight
        rows, columns = np.divmod(places.candidate.astype(np.int64), grid[0])
        turned = Both(places.reference, columns * grid[1] + rows)
        others = _common(tables, turned)
        if shapes.candidate != grid or _median_apart(others[2]) < _median_apart(known):
            places, (both, at, known) = turned, others
    picked = [side.picked[0, each].astype(np.float64) for side, each in zip(tables, at)]
    names = calls.map(lambda call: call.function)
    if names.reference != names.candidate and "sign" in names:  # -1, 0 and 1 for a mask; 0 is neither of its numbers
        picked = [(each + 1) / 2 if name == "sign" else each for each, name in zip(picked, names)]
    if np.abs(known.candidate + known.reference).sum() < np.abs(known.candidate - known.reference).sum():
        # One side asks which elements lie above the threshold, the other which lie below it.
        known, picked = Both(known.reference, -known.candidate), [picked[0], 1 - picked[1]]
    if not any(side.any() for side in known) and all(call.function in _CUTS for call in calls):
        return None  # whole numbers: the call that made them chose
    flipped = picked[0] != picked[1]
    distance = np.abs(known.candidate - known.reference)
    if all(call.function in ROUNDINGS | QUANTISERS for call in calls):
        distance = np.minimum(distance, np.abs(1 - distance))  # midway between two thresholds, above one or below one
    if distance.size and np.median(distance) > max(map(_rms, known)):
        return None
    shift, size, are_others = _compared(traces, calls, allowed(dtype, "forward"))
    entries = None
    if flipped.any() and len(both) == math.prod(grid) == max(grid) and all(side.max(initial=0) <= 1 for side in picked):
        taken_by = [side if 2 * side.sum() <= len(both) else 1 - side for side in picked]  # the few are replaced
        entries = np.zeros(len(both), np.bool_)
        entries[both] = np.logical_or(*taken_by)
    if shift:
        # The elements nearest to one threshold are others than those nearest to the other one.
        both = both if both.size else places.reference[:1]
        flipped = flipped if flipped.size else np.zeros(1, np.bool_)
        distance = np.maximum(distance if distance.size else np.zeros(1), shift)
    return Flips(
        calls=calls,
        position=position,
        grid=grid,
        rows=math.prod(grid),
        recorded=both,
        flipped=flipped,
        ties=flipped & (distance == 0),
        error=distance,
        moved=distance,
        gap=distance,
        size=max(size, _rms(known.reference)),
        shift=shift,
        others=are_others,
        few=int(min(picked[0].astype(bool).sum(), (picked[0] == 0).sum())) if len(both) == math.prod(grid) else 0,
        places=entries,
        chosen=Both(0, 0),
        dtype=dtype,
    )


def _common(tables: Both[Tables], places: Both[np.ndarray]) -> tuple[np.ndarray, list[np.ndarray], Both[np.ndarray]]:
    """Return the elements that both sides recorded, where each side has them, and their scores."""
    both, *at = np.intersect1d(*places, return_indices=True)
    return both, at, Both(*(side.scores[0, each].astype(np.float64) for side, each in zip(tables, at)))


def _median_apart(scores: Both[np.ndarray]) -> float:
    return float(np.median(np.abs(scores.candidate - scores.reference))) if scores.reference.size else math.inf


def _compared(traces: Both[Trace], calls: Both[TracedCall], limit: float) -> tuple[float, float, bool]:
    """Return by how much two thresholds that are numbers differ, for equal values; the size of the values; and True if
    most of them differ by more than rounding: of other values, those nearest to a threshold are as near.
    """
    if not all(call.inputs for call in calls):
        return 0.0, 0.0, False
    compared = int(calls.reference.function in SAMPLING)  # the grid
    sources = traces.zip(calls).map(lambda side: side[0].tensors[side[1].inputs[compared].tensor].source)
    try:
        sides = sources.map(_picture)
    except RunFolderError:
        return 0.0, 0.0, False
    size, numbers = _rms(sides.reference), calls.map(number)
    if sides.reference.shape != sides.candidate.shape:
        return 0.0, size, False
    errors = np.abs(sides.candidate - sides.reference)
    complete = errors.size > 0 and all(source is not None and not source.sketched for source in sources)
    others = complete and float(np.median(errors)) > limit * size
    same = np.linalg.norm(errors) <= limit * np.linalg.norm(sides.reference) or (complete and not others)
    shift = 0.0
    if same and numbers.reference is not None and numbers.candidate is not None:
        shift = abs(numbers.candidate - numbers.reference)
    return shift, size, others


def _picture(source: TensorSource | None) -> np.ndarray:
    """Return all values, or a projection that keeps their root mean square, as one row; no values if unknown."""
    if source is None:
        return np.zeros(0)
    if not source.sketched:
        return np.asarray(source.read(), np.float64).reshape(-1)
    sketch = source.sketch
    if sketch is None:
        return np.zeros(0)
    return np.asarray(sketch.projection, np.float64) / math.sqrt(sketch.looked_at / len(sketch.projection))


def bounds_of(trace: Trace, call: TracedCall) -> list[float]:
    """Return the numbers between which a call holds values, or a quantiser does; none if all values lie inside."""
    if call.function in QUANTISERS:
        return [float(value) for name, value in call.arguments.items() if name.startswith("quant_")]
    inside = _table(trace, call.choice.picked) if call.choice is not None and not call.chooses else None
    if inside is None or inside.all():
        return []
    return [float(value) for value in call.arguments.values() if isinstance(value, (int, float))]


def opposed(traces: Both[Trace], parts: Both[tuple[TracedCall, ...]]) -> bool:
    """Return True if one side ranks what the other side's scores are the negatives of, up to a number for each row."""
    tables = traces.zip(parts).map(lambda side: _joined_tables(*side))
    if tables.reference is None or tables.candidate is None:
        return False
    width = 1 + max(int(side.places.max(initial=0)) for side in tables if side is not None)
    if len(tables.reference.places) != len(tables.candidate.places) or width * len(tables.reference.places) > _MOST:
        return False
    known = Both(*(_spread(side.scores, side.places, width) for side in tables if side is not None))
    both = np.isfinite(known.reference) & np.isfinite(known.candidate)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # rows without scores that both sides recorded
        centred = known.map(lambda side: side - np.nanmean(np.where(both, side, np.nan), axis=1, keepdims=True))
    return float((centred.reference * centred.candidate)[both].sum()) < 0


def number(call: TracedCall) -> float | None:
    """Return the number with which a call compares a tensor; `None` if it is no comparison with one number."""
    if call.function == "sign":
        return 0.0
    values = [value for value in call.arguments.values() if isinstance(value, (int, float))]
    return float(values[0]) if call.function in COMPARISONS and len(values) == 1 else None


def taken(trace: Trace, call: TracedCall, mask: Mask | None) -> frozenset[int]:
    """Return how many of the places that a call ranks the code takes: its `k`, or the lengths of slices of them."""
    if mask is not None:
        return frozenset({mask.places})
    chosen = frozenset() if call.function in WHOLE or call.choice is None else frozenset({call.choice.chosen})
    return chosen | {count for _, count in _parts(trace, call)}


def parts_taken(traces: Both[Trace], calls: Both[TracedCall], masks: Both[Mask | None]) -> Both[tuple[int, int] | None]:
    """Return the parts of its places that the code of each side takes (see `part_taken`).

    One side may take the places behind those that the other one takes, and leaves out.
    """
    parts = traces.zip(calls).zip(masks).map(lambda side: part_taken(*side[0], side[1]))
    ordered = sorted(part for part in parts if part)
    behind = len(ordered) == 2 and ordered[0][0] == 0 < ordered[0][1] == ordered[1][0]
    if behind and sum(ordered[1]) == places_of(traces.reference, calls.reference):
        return Both(ordered[0], ordered[0])
    return parts


def part_taken(trace: Trace, call: TracedCall, mask: Mask | None) -> tuple[int, int] | None:
    """Return the start and the length of the part of its places that the code takes; `None` if it is not known."""
    if mask is not None:
        return 0, mask.places
    parts = _parts(trace, call)
    chosen = call.choice.chosen if call.choice is not None and call.function in _FIRST_ONES else 0
    if not parts and chosen and (trace.functions or chosen == 1):
        return 0, chosen
    outputs = {operand.tensor for operand in call.outputs}
    whole = any(each.function not in _SLICES and outputs & {k.tensor for k in each.inputs} for each in trace.calls)
    (start, count), *others = parts or [(None, 0)]
    return None if others or start is None or whole else (start, count)


def _parts(trace: Trace, call: TracedCall) -> set[tuple[int | None, int]]:
    """Return the starts and lengths of the slices that the code takes of what a call ranks; `None`: unknown start."""
    outputs = {operand.tensor for operand in call.outputs}
    shape, axis = trace.tensors[call.outputs[0].tensor].shape, row_axis(call.function, call.arguments)
    parts: set[tuple[int | None, int]] = set()
    if not isinstance(axis, int) or not -len(shape) <= axis < len(shape):
        return parts
    for slicing in trace.calls:
        if (
            slicing.function in _SLICES
            and slicing.inputs
            and slicing.inputs[0].tensor in outputs
            and len(slicing.inputs) == 1
        ):
            part, key = trace.tensors[slicing.outputs[0].tensor].shape, _key_at(slicing, len(shape), axis)
            if isinstance(key, int) and len(part) == len(shape) - 1:
                parts.add((key % shape[axis], 1))
            elif len(part) == len(shape) and part[axis] < shape[axis]:
                start, _, end = (key if isinstance(key, str) else "?").partition(":")
                plain = ":" not in end and (not start or start.isdigit())
                parts.add((int(start or 0) if plain else None, part[axis]))
    return parts


def ranks_taken(trace: Trace, call: TracedCall) -> frozenset[int]:
    """Return the ranks, from the least score, of the single scores of each row that the code takes, if these are all
    that it takes.
    """
    rank = _first(trace, call)
    if rank is not None or call.function not in WHOLE:
        return frozenset(() if rank is None else (rank,))
    falls, last = is_descending(call.function, call.arguments), places_of(trace, call) - 1
    parts = _parts(trace, call)
    starts = [start for start, count in parts if count == 1 and start is not None]
    return frozenset(last - start if falls else start for start in starts if len(starts) == len(parts))


def _key_at(call: TracedCall, axes: int, axis: int) -> str | int | None:
    """Return the slice, or the number, with which a call selects along an axis; `None` if it is not known."""
    key = call.arguments.get("key", call.arguments.get("item"))
    key = [key] if isinstance(key, (str, int)) else key
    if call.function != "getitem" or not isinstance(key, (list, tuple)):
        return None
    if "..." in key:
        at = key.index("...")
        key = [*key[:at], *[":"] * (axes - len(key) + 1), *key[at + 1 :]]
    key = [*key, *[":"] * (axes - len(key))]
    at = axis % axes
    if len(key) > axes or not all(isinstance(each, str) for k, each in enumerate(key) if k != at):
        return None
    return key[at] if type(key[at]) in (str, int) else None


def reached(
    trace: Trace,
    positions: Collection[int],
    by_value: bool = False,
    jumps: bool = False,
    ends: Collection[int] = (),
) -> set[int]:
    """Return the numbers of the tensors of a trace that may depend on what calls returned.

    A tensor whose origin is not recorded may depend on any earlier call, unless the model was given it.

    Args:
        trace: a trace with calls of functions.
        positions: positions of the calls.
        by_value: True to follow real numbers only: not which rows are taken, but what they hold.
        jumps: True to follow from the calls only what another choice changes by more than rounding.
        ends: tensors that hand nothing on.
    """
    if not positions:
        return set()
    first = min(positions)
    origins = {operand.tensor for call in trace.calls[:first] for operand in (*call.inputs, *call.outputs)}
    if trace.calls[first].layer != LOOP:
        given = (call for call in trace.calls if not call.function and call.layer == ROOT and call.call == 0)
        origins |= {operand.tensor for call in given for operand in call.inputs}
    after: set[int] = set()
    for position, call in enumerate(trace.calls[first:], first):
        inputs, outputs = ({operand.tensor for operand in side} for side in (call.inputs, call.outputs))
        if by_value:
            inputs, outputs = ({k for k in side if _is_real(trace, k)} for side in (inputs, outputs))
        if call.function or position in positions:
            unknown = not (inputs or call.parameters or by_value) or by_host(call) or bool(inputs - origins)
        else:
            unknown, outputs = not inputs <= origins, outputs - origins
        if position in positions and jumps and not inputs & after:
            after |= jumping(trace, call).difference(ends)
        elif position in positions or unknown or inputs & after:
            after |= outputs.difference(ends)
        origins |= inputs | outputs
    return after


def _is_real(trace: Trace, tensor: int) -> bool:
    return not trace.tensors[tensor].dtype.startswith(("int", "uint", "bool"))


def by_host(call: TracedCall) -> bool:
    """Return True if a call may select by numbers that the code read from a tensor."""
    if call.function not in ("getitem", "setitem") or any(operand.slot.startswith("key") for operand in call.inputs):
        return False
    key = call.arguments.get("key", [[]])
    return isinstance(key, (list, tuple)) and (
        any(isinstance(each, (list, tuple)) for each in key)
        or sum(isinstance(each, int) and not isinstance(each, bool) for each in key) > 1
    )


def _joined_tables(trace: Trace, calls: Sequence[TracedCall]) -> Tables | None:
    """Return the recorded tensors of the choices of several calls, those of one after those of the other."""
    tables = [tables_of(trace, call) for call in calls]
    complete = [(table.scores, table.places, table.picked) for table in tables if table is not None]
    if len(calls) > 1 and len(complete) == len(calls) and not (calls[0].choice and calls[0].choice.chosen):
        sizes = [math.prod(elements_of(trace, call)) for call in calls]
        starts = np.cumsum([0, *sizes])
        complete = [(scores, places + start, picked) for (scores, places, picked), start in zip(complete, starts)]
        return Tables(*(np.concatenate(arrays, axis=1) for arrays in zip(*complete)))
    if len(complete) < len(calls) or any(len({array.shape[1] for array in arrays}) > 1 for arrays in zip(*complete)):
        return None
    return tables[0] if len(calls) == 1 else Tables(*(np.concatenate(arrays) for arrays in zip(*complete)))


def tables_of(trace: Trace, call: TracedCall) -> Tables | None:
    """Return the recorded tensors of a call's choice; `None` unless all were recorded in full."""
    choice = call.choice
    tables = [] if choice is None else [_table(trace, k) for k in (choice.scores, choice.places, choice.picked)]
    scores, places, picked = tables or (None, None, None)
    if choice is None or scores is None or places is None or picked is None:
        return None
    if choice.places == choice.scores:  # whole rows
        order = -scores.astype(np.float64) if is_descending(call.function, call.arguments) else scores
        places = np.argsort(order, axis=1, kind="stable")
        scores = np.take_along_axis(scores, places, 1)
    return Tables(scores, places, picked) if len(scores) == len(places) == len(picked) else None


def _table(trace: Trace, number: int) -> np.ndarray | None:
    source = trace.tensors[number].source
    if source is None or source.sketched:
        return None
    values = np.atleast_2d(source.read())
    return values if values.size and values.ndim == 2 else None


def elements_of(trace: Trace, call: TracedCall) -> tuple[int, ...]:
    """Return the shape of the elements that a call compares: of a picture that it samples, without the channels."""
    shape = trace.tensors[call.outputs[0].tensor].shape
    return (shape[0], *shape[2:]) if call.function in SAMPLING else shape


def grid_of(trace: Trace, call: TracedCall) -> tuple[int, ...] | None:
    """Return the shape of the rows of the call's scores, in the order in which they were recorded."""
    choice = call.choice
    assert choice is not None
    if not choice.chosen:
        return elements_of(trace, call)  # its other operand may be the larger one
    if not call.inputs:
        return None
    shape = trace.tensors[call.inputs[0].tensor].shape
    axes = pooled(call)
    if axes:
        return shape[:-axes] if math.prod(shape[:-axes]) == choice.rows else None
    axis = shape_and_axis(trace, call)[1]
    if axis is None:
        return (1,)
    grid = (*shape[:axis], *shape[axis + 1 :])
    return grid if math.prod(grid) == choice.rows else None


def _spread(scores: np.ndarray, places: np.ndarray, width: int) -> np.ndarray:
    """Return the scores at their places; NaN at places whose score is not recorded."""
    table = np.full((len(scores), width), np.nan)
    np.put_along_axis(table, places.astype(np.int64), scores.astype(np.float64), axis=1)
    return table


def _fill(table: np.ndarray, side: Tables, picked: np.ndarray, partner: np.ndarray | None) -> None:
    """Set the scores that are not recorded, of places that either side picked, to the last recorded one of their row.

    They are no better than that one, so that the distance to the other side's score is not overestimated.

    Args:
        partner: the other side's table, if the scores around a rank are recorded, and others lie beyond either end.
    """
    at, last = np.arange(len(table))[:, None], side.scores[:, -1:].astype(np.float64)
    if partner is not None:
        last = np.clip(partner[at, picked], *(end(side.scores, axis=1, keepdims=True) for end in (np.min, np.max)))
    values = table[at, picked]
    table[at, picked] = np.where(np.isnan(values), last, values)


def _masked(scores: Both[np.ndarray]) -> Both[np.ndarray]:
    """Return the scores with those left out that both sides mask: one may mask by minus infinity, the other by 0.

    Masked places of several rows hold one value, to the bit, and no score lies beyond it.
    """
    masks = [np.logical_or(*(side == _end(side, end) for end in (np.nanmin, np.nanmax))) for side in scores]
    both = np.logical_and(*masks)
    return scores.map(lambda side: np.where(both, np.inf, side)) if both.any() else scores


def _end(scores: np.ndarray, end: Callable[[np.ndarray], float]) -> float:
    """Return the least or the largest score if several rows hold it; else NaN."""
    value = math.nan if np.isnan(scores).all() else end(scores)
    return value if (scores == value).any(axis=1).sum() > _TWICE else math.nan


def _in_one_form(scores: Both[np.ndarray], flipped: np.ndarray) -> Both[np.ndarray]:
    """Return the scores of both sides in one form: one may rank probabilities, the other what a softmax makes them of.

    Args:
        scores: the scores at their places; NaN at places whose score is not recorded.
        flipped: mask of the rows that chose otherwise.
    """
    known = np.isfinite(scores.reference) & np.isfinite(scores.candidate)
    forms = Both(*(list(_forms(np.where(known, side, np.nan))) for side in scores))
    plain = _apart(scores, flipped)
    if plain <= _OTHER:
        return scores
    pairs = [_to_scale(Both(a, b)) for a in forms.reference for b in forms.candidate]
    best = min(pairs, key=lambda pair: _apart(pair, flipped))
    return best if _apart(best, flipped) * _NEARER < min(plain, 1.0) else scores


def _forms(scores: np.ndarray) -> Iterator[np.ndarray]:
    """Yield scores, their logarithms, logits and squares, each about the mean of its row: they rank alike."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # rows without scores
        squares = np.where(scores < 0, np.nan, scores**2)
        for form in (scores, np.log(scores), np.log(scores / (1 - scores)), squares):
            if np.isfinite(form[np.isfinite(scores)]).all():
                yield form - np.nanmean(form, axis=1, keepdims=True)


def _to_scale(scores: Both[np.ndarray]) -> Both[np.ndarray]:
    """Return the scores with the candidate's multiplied by a factor: the nearer, the higher a similarity is."""
    reference, candidate = (side[np.isfinite(scores.reference) & np.isfinite(scores.candidate)] for side in scores)
    size = float(candidate @ candidate)
    return Both(scores.reference, scores.candidate * (float(candidate @ reference) / size if size else 1.0))


def _between(scores: np.ndarray, others: np.ndarray, size: float) -> np.ndarray:
    """Return how far scores are apart. Of distances, whose usual size is given, their squares may tell: a root of the
    difference of large numbers is as exact as its square.
    """
    apart = np.abs(others - scores)
    return np.asarray(np.minimum(apart, np.abs(others**2 - scores**2) / size) if size else apart)


def _apart(scores: Both[np.ndarray], flipped: np.ndarray) -> float:
    """Return the relative distance of the scores of rows that chose alike."""
    rows = ~flipped if (~flipped).any() else np.ones(len(flipped), np.bool_)
    reference, candidate = (side[rows] for side in scores)
    both = np.isfinite(reference) & np.isfinite(candidate)
    size = float(np.linalg.norm(reference[both]))
    return float(np.linalg.norm(candidate[both] - reference[both])) / size if size else math.inf


def _rms(scores: np.ndarray) -> float:
    values = scores[np.isfinite(scores)]
    return math.sqrt(float((values**2).mean())) if values.size else 0.0
