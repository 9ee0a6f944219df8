"""The same content at another place: rows in another order, layers that end elsewhere."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np

from padiff.align import Alignment, LayerPair
from padiff.align.matching.parameter_units import containers_of
from padiff.compare.choices import chooses_experts, reached
from padiff.compare.diagnose.traced import Graph, is_looking
from padiff.compare.judge.limits import COARSENESS, allowed, coarse
from padiff.compare.measure.pairs import measure_pair
from padiff.errors import RunFolderError, SketchOnlyError
from padiff.frameworks.catalog import LAYERS
from padiff.model import equivalents
from padiff.pair.parameters import DerivedSource
from padiff.records import (
    LOOP,
    RESHAPED,
    ROOT,
    SAME,
    Both,
    Diff,
    Figure,
    Kind,
    Layer,
    Layout,
    Pair,
    Record,
    Step,
    is_below,
)
from padiff.records.sources import TensorSource
from padiff.records.step_diffs import StepDiffs

# Share of the error in the given order to which the other order has to reduce it.
_BETTER = 0.5
# Relative error below which an order is the right one: equal rows of outputs have several, and gradients tell.
_SURE = 1e-3
# Number of neighbours of a row that are looked at, of random projections that stand for it, and the relative distance
# below which neighbours count as equal.
_NEIGHBOURS, _PROJECTIONS, _EQUAL = 16, 8, 1e-4
# Largest number of distances that are computed at once.
_AT_ONCE = 1 << 18
# Largest number of rows that are looked up.
_MOST = 1 << 17
# Least number of rows that have an order.
_LEAST = 2


@dataclass(frozen=True, slots=True)
class Rows(DerivedSource):
    """Chosen rows of another source.

    Attributes:
        whole: the tensor.
        numbers: numbers of the rows, in their order; rows run along the last axis, in three or more axes from the
            second on.
        shape: shape of the result.
    """

    whole: TensorSource
    numbers: np.ndarray
    shape: tuple[int, ...]

    def read(self) -> np.ndarray:
        return np.asarray(row_table(self.whole.read())[self.numbers]).reshape(self.shape)


def choosing_blocks(step: Step) -> frozenset[str]:
    """Return the paths of the layers among whose parts a call chooses places: the layer of the call, or its parent.

    A router that hands the places on chooses among the parts of its parent, whatever layers it has itself.
    """
    called = {call.layer for call in step.trace.calls if not call.function}
    choosing = {call.layer for call in step.trace.calls if chooses_experts(step.trace, call)} - {LOOP}
    routers = {
        record.layer
        for record in step.records
        if record.layer in choosing and record.stage == "forward" and record.dtype.startswith("int")
    }
    parents = {path: path.rpartition(".")[0] or (ROOT if path in routers else path) for path in choosing}
    return frozenset(
        path if path not in routers and any(is_below(each, path) for each in called) else parents[path]
        for path in choosing
    )


def with_row_orders(diffs: StepDiffs, step: Step, measure: Callable[[Pair], Diff]) -> StepDiffs | None:
    """Return the diffs, with pairs measured again whose rows are in another order; `None` if there are none.

    Args:
        diffs: the judged diffs of one rank of a step, in causal order.
        step: the reference's step.
        measure: function that measures a pair.
    """
    try:
        return _Search(diffs, step, measure).search()
    except RunFolderError:
        return None  # the trace is damaged; the figures stay valid


class _Search:
    def __init__(self, diffs: StepDiffs, step: Step, measure: Callable[[Pair], Diff]) -> None:
        self._diffs, self._measure = diffs, measure
        self._blocks = choosing_blocks(step)
        #: Numbers of rows, and of tokens, among which calls choose: of a batch that is given whole.
        calls = [call for call in step.trace.calls if call.chooses]
        choices = [call.choice for call in calls if call.choice is not None]
        self._batches = {choice.rows for choice in choices}
        self._batches |= {math.prod(step.trace.tensors[o.tensor].shape) for call in calls for o in call.inputs[:1]}
        #: Those of which each row chooses several places.
        self._several = {choice.rows for choice in choices if choice.chosen > 1 and choice.rows > 1}
        sites = diffs.sites
        passed = diffs.rows["passed"] & ~diffs.troubled & sites.complete
        #: Layers all of whose outputs agree in order, and have an order.
        self._agreeing: set[str] = set()
        failing: set[str] = set()
        for place in sites.places["forward"].tolist():
            if len(sites.shapes[place]) > 1:
                (self._agreeing if passed[place] else failing).add(sites.layers[place])
        self._agreeing -= failing
        #: Orders by layer, call and slot, newest last.
        self._orders: dict[tuple[str, int, str], Both[np.ndarray]] = {}
        #: The same of sketches whose rows are in another order.
        self._sketched: set[tuple[str, int, str]] = set()

    def search(self) -> StepDiffs | None:
        sites, agreeing = self._diffs.sites, {}
        for stage in ("forward", "backward"):
            for place in sites.places[stage].tolist():
                layer = sites.layers[place]
                site = layer, sites.calls[place], sites.slots[place]
                # The limit of a gradient falls where the outputs agree in another order.
                turned = stage == "backward" and (site in self._orders or site in self._sketched)
                if (self._diffs.rows["passed"][place] and not turned) or not sites.complete[place]:
                    continue
                chosen = any(is_below(layer, block) for block in self._blocks)
                if chosen or any(is_below(layer, path) for path in self._agreeing):
                    diff = self._in_order(self._diffs[place], chosen, float(self._diffs.rows["limit"][place]))
                    if diff is not None:
                        agreeing[place] = diff
        if not agreeing:
            return None
        return StepDiffs.from_diffs([agreeing.get(place, diff) for place, diff in enumerate(self._diffs)])

    def _in_order(self, diff: Diff, chosen: bool, limit: float) -> Diff | None:
        """Return the diff of a pair with its rows in one order; `None` if they are not the same rows.

        Args:
            chosen: True inside of a layer that chooses.
            limit: limit of the relative error in the given order.
        """
        pair = diff.pair
        assert pair.reference is not None and pair.candidate is not None
        if (diff.problem is not None and diff.problem.kind is not Kind.SHAPES) or len(pair.reference.shape) < _LEAST:
            return None
        if pair.reference.source.sketched or pair.candidate.source.sketched:
            # Sketches are compared by what no order changes.
            if pair.reference.shape != pair.candidate.shape and "reshape" not in pair.layout.steps:
                return None
            site = pair.anchor.layer, pair.anchor.call, pair.anchor.slot
            if pair.stage == "backward" and not chosen and site not in self._sketched:
                return None
            if self._holds_batch(pair):
                return None
            sketched = self._measure(replace(pair, layout=_other_order(pair.layout)))
            if not chosen and _error(sketched) > limit:
                return None
            self._sketched.add(site)
            return sketched
        if len(set(counts := [_count(record.shape) for record in (pair.reference, pair.candidate)])) > 1 and not (
            chosen and max(counts) in self._batches
        ):
            return None
        best, least = None, _BETTER * min(_error(diff), 1.0)
        # Where samples chose otherwise, some rows are those of others.
        for find in (self._known, partial(_order_of, others=chosen)):
            order = find(pair) if least > _SURE else None
            again = self._measured(pair, order) if order is not None else None
            if order is None or again is None:
                continue
            mostly = chosen and best is None and not _is_mostly_equal(diff, limit)
            if _error(again) < least or (mostly and _is_mostly_equal(again, limit)):
                best, least = again, _error(again)
                if pair.stage == "forward":
                    self._orders[pair.anchor.layer, pair.anchor.call, pair.anchor.slot] = order
        return best

    def _holds_batch(self, pair: Pair) -> bool:
        """Return True if a tensor has a row for each row of which calls choose several places: these are in order."""
        assert pair.reference is not None and pair.candidate is not None
        return any(_count(record.shape) in self._several for record in (pair.reference, pair.candidate))

    def _known(self, pair: Pair) -> Both[np.ndarray] | None:
        """Return the order that was found for the same call of the layer, of one beside it, or of one inside of it."""
        layer, call = pair.anchor.layer, pair.anchor.call
        if pair.stage == "backward":
            return self._orders.get((layer, call, pair.anchor.slot))
        parent = _parent(layer)
        for (other, number, _), order in reversed(self._orders.items()):
            if number == call and (is_below(other, layer) or _parent(other) == parent):
                return order
        return None

    def _measured(self, pair: Pair, order: Both[np.ndarray]) -> Diff | None:
        counts = [_count(record.shape) for record in pair.sides if record is not None]
        if any(numbers.max(initial=-1) >= count for numbers, count in zip(order, counts)) or max(
            map(len, order)
        ) != min(counts):
            return None
        flat = len(set(counts)) > 1
        sides = [_chosen(record, numbers, flat) for record, numbers in zip(pair.sides, order) if record is not None]
        again = replace(pair, reference=sides[0], candidate=sides[1], layout=_other_order(pair.layout))
        return self._measure(again)


def _order_of(pair: Pair, others: bool) -> Both[np.ndarray] | None:
    """Return the rows of each side that are the same rows; `None` unless one side holds all rows of the other."""
    assert pair.reference is not None and pair.candidate is not None
    tables = Both(pair.reference.value, pair.candidate.value).map(row_table).zip(pair.scales)
    reference, candidate = (table.reshape(len(table), -1).astype(np.float64) / scale for table, scale in tables)
    if reference.shape[1] != candidate.shape[1] or not 0 < min(len(reference), len(candidate)) <= _MOST:
        return None
    if not (np.isfinite(reference).all() and np.isfinite(candidate).all()):
        return None
    few, many = (reference, candidate) if len(reference) <= len(candidate) else (candidate, reference)
    numbers = _places(few, many, len(few) // 2 if others else 0)
    if numbers is None:
        return None
    every = np.arange(len(few))
    return Both(every, numbers) if few is reference else Both(numbers, every)


def _places(few: np.ndarray, many: np.ndarray, most: int) -> np.ndarray | None:
    """Return for each row of one table the place of its own row in another table; `None` if too many claim the same.

    Args:
        most: number of rows that may have no place of their own: their samples chose otherwise.
    """
    directions = np.random.default_rng(0).standard_normal((few.shape[1], min(_PROJECTIONS, few.shape[1])))
    points = [table @ directions for table in (few, many)]
    width = min(_NEIGHBOURS, len(many))
    distances, neighbours = (table.reshape(len(few), width) for table in _nearest(points[0], points[1], width))
    sizes = np.linalg.norm(points[0], axis=1)
    numbers, taken = np.full(len(few), -1), np.zeros(len(many), np.bool_)
    for row in np.argsort(distances[:, 0], kind="stable").tolist():
        near = neighbours[row][distances[row] <= distances[row, 0] + _EQUAL * sizes[row]]
        free = np.sort(near[~taken[near]])
        if len(free):
            numbers[row] = free[0]
            taken[free[0]] = True
    missing = numbers < 0
    if missing.sum() > most:
        return None
    numbers[missing] = np.flatnonzero(~taken)[: int(missing.sum())]
    return numbers


def _nearest(points: np.ndarray, others: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the distances and the numbers of the nearest other points of each point, nearest first."""
    if len(points) * len(others) > _AT_ONCE:
        from scipy.spatial import cKDTree  # takes a tenth of a second to import

        distances, numbers = cKDTree(others).query(points, k=count)
        return np.asarray(distances), np.asarray(numbers)
    apart = np.linalg.norm(points[:, None] - others[None], axis=2)
    numbers = np.argsort(apart, axis=1, kind="stable")[:, :count]
    return np.take_along_axis(apart, numbers, 1), numbers


def _is_mostly_equal(diff: Diff, limit: float) -> bool:
    """Return True if most rows of two tensors agree: the others may be of samples that chose otherwise."""
    assert diff.pair.reference is not None and diff.pair.candidate is not None
    values = Both(diff.pair.reference.value, diff.pair.candidate.value).map(row_table).zip(diff.pair.scales)
    reference, candidate = (table.reshape(len(table), -1).astype(np.float64) / scale for table, scale in values)
    if reference.shape != candidate.shape:
        return False
    errors, sizes = np.linalg.norm(candidate - reference, axis=1), np.linalg.norm(reference, axis=1)
    return bool((errors <= limit * sizes).mean() > _BETTER)


def _chosen(record: Record, numbers: np.ndarray, flat: bool) -> Record:
    shape = (len(numbers), *row_shape(record.shape)) if flat else record.shape
    return replace(record, source=Rows(record.source, numbers, shape), shape=shape)


def row_table(array: np.ndarray) -> np.ndarray:
    """Return an array as a table of its rows."""
    return array.reshape(-1, *row_shape(array.shape))


def row_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a row: that of the last axis for features (rows, or batch and sequence, first), else of all
    axes but the first.
    """
    return tuple(shape[-1:] if len(shape) <= 3 else shape[1:])


def _count(shape: Sequence[int]) -> int:
    return math.prod(shape[: len(shape) - len(row_shape(shape))])


def _other_order(layout: Layout) -> Layout:
    return layout if "rows" in layout.steps else Layout((*layout.steps, "rows"))


def _parent(layer: str) -> str:
    return layer.rpartition(".")[0] or ROOT


def _error(diff: Diff | None) -> float:
    if diff is None or diff.problem is not None or diff.figures is None:
        return math.inf
    return diff.figures.rel_l2


# Least relative error that a different boundary explains, of a container's outputs and of other outputs. A missing
# activation changes a tensor by far more than the first share, unless a normalisation leaves few negative values.
_GROSS, _VISIBLE = 0.05, 1e-3
# Largest relative error of a loss that is computed from the same outputs in another form.
_SAME_LOSS = 1e-5
# Classes of layers of both frameworks.
_LIBRARY = frozenset().union(*LAYERS.values())


def other_boundaries(
    diffs: StepDiffs, alignment: Alignment, values: bool = True, steps: Both[Step] | None = None
) -> frozenset[tuple[str, str]]:
    """Return pairs of layers, by path, whose outputs differ although later outputs agree.

    Only layers that are built differently are candidates: their sublayers differ, or the models have different numbers
    of their kind. The model itself and pairs from the user's layer map are never candidates. Outputs that differ by
    little, or right before the first other diff, are not returned.

    Args:
        values: True to also consider outputs that have the same shape on both sides.
        steps: the compared step; its traces show what is computed inside of a layer with several outputs.
    """
    places = diffs.sites.places["forward"]
    if (diffs.rows["passed"] & ~diffs.troubled)[places].all():
        return frozenset()
    built = _Built(alignment)
    forward = [d for d in (diffs[place] for place in places.tolist()) if d.compared]
    mapped = {_pair_paths(p) for p in alignment.pairs if p.reason == "given"}
    returned = _returned_otherwise([d for d in forward if _paths(d) not in mapped], diffs, steps) if values else []
    forward = [d for d in forward if _paths(d) not in returned]
    doubtful = {_paths(d) for d in forward if _has_other_shape(d)}  # also if choices excuse the difference
    if values:
        doubtful |= {_pair_paths(p) for p in alignment.pairs if built.differently(p)}
    doubtful -= {_pair_paths(p) for p in alignment.pairs if _is_fixed(p)}
    sure = [d for d in forward if _paths(d) not in doubtful]
    # A smaller error comes from a fault or from rounding, not from a different boundary.
    containers = {_pair_paths(p) for p in alignment.pairs if p.reference.children}
    wide = [
        d
        for d in forward
        if (not d.passed or _has_other_shape(d)) and _paths(d) in doubtful
        if _boundary_error(d) >= (_GROSS if _paths(d) in containers else _VISIBLE)
    ]
    first = min((_order(d) for d in sure if not d.passed and _boundary_error(d) >= _VISIBLE / 2), default=math.inf)
    agreeing = [d for d in sure if _agrees(d) and _order(d) < first]
    last = max(map(_order, agreeing), default=-1)
    # Two kinds of the frameworks' layers that give other shapes compute other quantities: a bag of embeddings, and
    # embeddings. A user's own class may compute what the other layer does.
    kinds = {
        _pair_paths(p)
        for p in alignment.pairs
        if len({*p.map(equivalents.kind)}) > 1 and all(p.map(lambda layer: layer.type in _LIBRARY))
    }
    other_kinds = [d for d in wide if _has_other_shape(d) and _paths(d) in kinds]
    further = _ending_inside([d for d in wide if _order(d) >= last], steps) if steps is not None and values else []
    whole = _trains_equally(diffs)
    earlier = [d for d in wide if _order(d) < last and _leads_to(d, agreeing, sure, steps, whole)]
    if steps is not None and values:
        known = {_paths(d) for d in [*earlier, *further]} | mapped
        gross = [d for d in forward if not d.passed and _paths(d) in containers and _boundary_error(d) >= _GROSS]
        further += _ending_before(
            [d for d in {id(d): d for d in wide + gross}.values() if _paths(d) not in known], steps
        )
        known |= {_paths(d) for d in further}
        further += [d for d in wide if _has_other_shape(d) and _paths(d) not in known and _makes_the_same(d, steps)]
    strangers = _of_other_inputs(forward, alignment, steps) if steps is not None else set()
    return frozenset([*(_paths(d) for d in [*earlier, *further, *other_kinds]), *returned, *strangers])


def _returned_otherwise(forward: Sequence[Diff], diffs: StepDiffs, steps: Both[Step] | None) -> set[tuple[str, str]]:
    """Return pairs of models, by path, that return other tensors of the same computation.

    One author's model returns its loss, or joins its outputs in one tensor; the other's loop does so. The records of
    the step show it: the scalar that one side returns is its loss, the other side computes all that one side returns,
    or the loss and all gradients agree.
    """
    called = [d for d in forward if _is_called_by_the_loop(d, diffs)]
    ends = {_paths(d): d for d in called if _has_other_shape(d)}
    by_model: dict[tuple[str, str], list[Diff]] = {}
    for d in called:
        by_model.setdefault(_paths(d), []).append(d)
    # One author's model takes the last function, such as a tanh, the other's loop.
    apart = {
        paths: diffs_of_model
        for paths, diffs_of_model in by_model.items()
        if any(_boundary_error(d) >= _VISIBLE for d in diffs_of_model)
    }
    if not ends and not apart:
        return set()
    if _trains_equally(diffs):
        return set(ends)
    if steps is None:
        return set()
    try:
        returned = {
            paths
            for paths, diff in ends.items()
            if _returns_loss(diff, steps) or _is_part(diff, steps) or _is_joined(diff, steps)
        }
        return returned | {
            paths
            for paths, diffs_of_model in apart.items()
            if all(_goes_on(d, steps) for d in diffs_of_model) or _all_meet_again(diffs_of_model, steps)
        }
    except (RunFolderError, SketchOnlyError):
        return set()  # a trace is damaged, or the values can no longer be read; the figures stay valid


def _trains_equally(diffs: StepDiffs) -> bool:
    """Return True if both sides have a loss and gradients, and all of these agree."""
    later = np.concatenate([diffs.sites.places[stage] for stage in ("loss", "grad")])
    later = later[diffs.sites.complete[later]]
    stages = {diffs.sites.stages[place] for place in later.tolist()}
    return len(stages) == 2 and bool((diffs.rows["passed"] & ~diffs.troubled)[later].all())


def _is_called_by_the_loop(diff: Diff, diffs: StepDiffs) -> bool:
    layer = diff.pair.anchor.layer
    return any(diffs.sites.layers[place] == layer for place in diffs.sites.places["input"].tolist())


def _returns_loss(diff: Diff, steps: Both[Step]) -> bool:
    """Return True if one side's model returns a scalar, and that scalar is a loss of the step."""
    for record, step in zip(diff.pair.sides, steps):
        losses = [r for r in step.records if r.stage == "loss" and r.layer == LOOP and r.shape == ()]
        scalar = record if record is not None and record.shape == () else None
        if scalar is not None and (any(_same_number(scalar, loss) for loss in losses) or _is_term(scalar, step)):
            return True
    return False


def _is_term(record: Record, step: Step) -> bool:
    """Return True if the loop computes the loss of a backward from a scalar, with scalars only on the way."""
    calls = [call for call in step.trace.calls if call.layer == LOOP and call.function]
    makers = {operand.tensor: call for call in calls for operand in call.outputs}
    site = record.layer, record.call
    terms = {o.tensor for c in step.trace.calls if not c.function and (c.layer, c.call) == site for o in c.outputs}
    waiting = [operand.tensor for call in calls if call.function == "backward" for operand in call.inputs]
    seen: set[int] = set()
    while waiting:
        tensor = waiting.pop()
        if tensor in terms:
            return True
        if tensor not in seen and tensor in makers and step.trace.tensors[tensor].shape == ():
            seen.add(tensor)
            waiting += [operand.tensor for operand in makers[tensor].inputs]
    return False


def _of_other_inputs(forward: Sequence[Diff], alignment: Alignment, steps: Both[Step]) -> set[tuple[str, str]]:
    """Return pairs of layers without parameters, by path, that get and give tensors of other sizes.

    One author's activations are layers, the other's are functions here and layers there: they stand at other places.
    """
    bare = {
        _pair_paths(p)
        for p in alignment.pairs
        if p.reason != "given" and not any(layer.parameters or layer.children for layer in p)
    }
    pairs: dict[tuple[str, str], list[bool]] = {}
    for diff in forward:
        if _paths(diff) in bare:
            reference, candidate = diff.pair.sides.zip(steps).map(lambda side: _sizes(*side))
            pairs.setdefault(_paths(diff), []).append(_are_other(reference, candidate))
    return {paths for paths, others in pairs.items() if all(others)}


def _sizes(record: Record | None, step: Step) -> tuple[int, int]:
    """Return the numbers of elements of what a layer's call gets and gives; zeros where the trace lacks the call."""
    if record is None:
        return 0, 0
    site, tensors = (record.layer, record.call), step.trace.tensors
    calls = (c for c in step.trace.calls if not c.function and (c.layer, c.call) == site and c.inputs)
    given = next((math.prod(tensors[call.inputs[0].tensor].shape) for call in calls), 0)
    return given, math.prod(record.shape)


def _are_other(reference: tuple[int, int], candidate: tuple[int, int]) -> bool:
    """Return True if no size is a multiple of its partner: parts of a batch are."""
    return all(a and b and max(a, b) % min(a, b) for a, b in zip(reference, candidate))


def _same_number(record: Record, loss: Record) -> bool:
    return loss.dtype == record.dtype and bool(np.array_equal(record.value, loss.value))


def _is_part(diff: Diff, steps: Both[Step]) -> bool:
    """Return True if one side computes all the tensors that the other side's call of the model returns."""
    for record, step, other in zip(diff.pair.sides, steps, steps.swapped()):
        if record is None or not other.trace.functions:
            continue
        site = record.layer, record.call
        returned = [r for r in step.records if r.stage == "forward" and (r.layer, r.call) == site]
        if returned and all(_is_computed_by(each, other, diff.pair.step) for each in returned):
            return True
    return False


def _is_joined(diff: Diff, steps: Both[Step]) -> bool:
    """Return True if one side's call of the model returns, in one tensor, all parts that the other side's returns."""
    outputs = [
        [
            r
            for r in step.records
            if record and r.stage == "forward" and (r.layer, r.call) == (record.layer, record.call)
        ]
        for record, step in zip(diff.pair.sides, steps)
    ]
    parts, single = sorted(outputs, key=len, reverse=True)
    if len(single) != 1 or len(parts) < _LEAST or any(r.source.sketched for r in (*parts, *single)):
        return False
    joined, pieces = np.asarray(single[0].value), [np.asarray(r.value) for r in parts]
    if joined.size != sum(piece.size for piece in pieces):
        return False
    for axis, extent in enumerate(joined.shape):
        shape = [*joined.shape[:axis], -1, *joined.shape[axis + 1 :]]
        if all(piece.size % (joined.size // extent) == 0 for piece in pieces):
            together = np.concatenate([piece.reshape(shape) for piece in pieces], axis)
            if np.linalg.norm(joined - together) <= allowed("float32", "forward") * np.linalg.norm(joined):
                return True
    return False


def _goes_on(diff: Diff, steps: Both[Step], anywhere: bool = False) -> bool:
    """Return True if one side's loop computes, from what its own model returns and on the way to the loss, what the
    other's model returns, or all parts that the other's loop takes of that.

    Args:
        diff: the diff of an output.
        steps: the step.
        anywhere: True for the output of any layer, and any code after it, with other tensors too (a residual).
    """
    if _boundary_error(diff) < _VISIBLE:
        return True
    graphs = steps.map(lambda step: Graph(step.trace))
    for record, graph, partner, other in zip(diff.pair.sides, graphs, diff.pair.sides.swapped(), graphs.swapped()):
        if record is None or partner is None or math.prod(record.shape) != math.prod(partner.shape):
            return False
        source, returned = graph.tensor_of(record), other.tensor_of(partner)
        if source is None or returned is None:
            return False
        users = [call for call in other.trace.calls if returned in {operand.tensor for operand in call.inputs}]
        parts = [call.outputs[0].tensor for call in users if is_looking(call) and call.outputs]
        derived = [(k, graph.record(k, record)) for k in _derived(graph, source, anywhere)]
        if any(_is_made(partner, each, diff) for k, each in derived if k != source) or (
            len(parts) == len(users) > 0
            and all(any(_is_made(other.record(part, partner), each, diff) for _, each in derived) for part in parts)
        ):
            return True
    return False


def _all_meet_again(diffs: Sequence[Diff], steps: Both[Step]) -> bool:
    """Return True if both loops compute the same loss from each output of a model that differs, in one of its calls."""
    by_slot: dict[str, list[Diff]] = {}
    for diff in diffs:
        if _boundary_error(diff) >= _VISIBLE:
            by_slot.setdefault(diff.pair.anchor.slot, []).append(diff)
    return all(any(_meets_again(diff, steps) for diff in calls) for calls in by_slot.values())


def _meets_again(diff: Diff, steps: Both[Step]) -> bool:
    """Return True if both loops compute the same loss from the two tensors: probabilities, and their logarithms.

    One of them may take the mean of several terms at once.
    """
    sizes = _computed(diff, steps, LOOP).map(lambda tensors: [(abs(float(t.mean())), t.size == 1) for t in tensors])
    return any(
        first and (is_loss or is_partner_loss) and math.isclose(first, second, rel_tol=_SAME_LOSS)
        for (first, is_loss), (second, is_partner_loss) in product(*sizes)
    )


def _makes_the_same(diff: Diff, steps: Both[Step]) -> bool:
    """Return True if both sides compute, from the two tensors and on the way to the loss, one tensor of features."""
    features = _computed(diff, steps).map(lambda tensors: [t.ravel() for t in tensors if t.size > 1 and np.ptp(t) > 0])
    return any(
        first.size == second.size and np.allclose(first, second, rtol=0, atol=_SAME_LOSS * float(np.abs(first).max()))
        for first, second in product(*features)
    )


def _computed(diff: Diff, steps: Both[Step], layer: str | None = None) -> Both[list[np.ndarray]]:
    """Return each side's tensor of a diff, and the finite ones that it computes from that on the way to the loss.

    Args:
        layer: the only layer whose calls count.
    """
    computed: Both[list[np.ndarray]] = Both([], [])
    for record, step, tensors in zip(diff.pair.sides, steps, computed):
        graph = Graph(step.trace)
        source = None if record is None else graph.tensor_of(record)
        for k in [] if source is None else _derived(graph, source, True, layer):
            values = graph.values(k) if "float" in step.trace.tensors[k].dtype else None
            if values is not None and values.size and np.isfinite(values).all():
                tensors.append(values)
    return computed


def _derived(graph: Graph, source: int, anywhere: bool, layer: str | None = None) -> list[int]:
    """Return the tensors on the way to the loss that the loop computes from one tensor alone, or any code from it.

    All of these where the trace does not show a way of the tensor to the loss: the loop writes it into another one.

    Args:
        anywhere: True for calls in any layer that take other tensors, too.
        layer: the only layer whose calls count.
    """
    derived = {source}
    for call in graph.trace.calls:
        inputs = {operand.tensor for operand in call.inputs}
        of_the_loop_alone = call.layer == LOOP and inputs <= derived
        if inputs & derived and (anywhere or of_the_loop_alone) and layer in (None, call.layer):
            derived |= {operand.tensor for operand in call.outputs}
    ends = graph.noted.get("backward", [])
    needed = {operand.tensor for end in ends for call in graph.back(end, lambda _: False) for operand in call.inputs}
    needed |= {*ends}
    return sorted(derived & needed if source in needed else derived)


def _is_made(record: Record | None, computed: Record | None, diff: Diff) -> bool:
    """Return True if a tensor of a trace has the values of another one of the other side's."""
    if record is None or computed is None or math.prod(record.shape) != math.prod(computed.shape):
        return False
    laid = record.shape == computed.shape and len(record.shape) == len(diff.pair.anchor.shape)
    layout = (diff.pair.layout or SAME) if laid else RESHAPED
    return _agrees(measure_pair(Pair(diff.pair.step, computed, record, layout)))


def _is_computed_by(record: Record, step: Step, number: int) -> bool:
    """Return True if a tensor of a step's trace has the values of a record."""
    for tensor in step.trace.tensors:
        if tensor.source is None or math.prod(tensor.shape) != math.prod(record.shape) or tensor.dtype != record.dtype:
            continue
        other = replace(record, source=tensor.source, shape=tensor.shape, dtype=tensor.dtype)
        layout = SAME if tensor.shape == record.shape else RESHAPED
        if _agrees(measure_pair(Pair(number, record, other, layout)), record.dtype):
            return True
    return False


def _leads_to(
    diff: Diff, agreeing: Sequence[Diff], later: Sequence[Diff], steps: Both[Step] | None, whole: bool
) -> bool:
    """Return False if the reference's trace shows that no agreeing output depends on this one.

    Args:
        diff: the diff of an output.
        agreeing: the outputs that agree.
        later: all outputs that show if layers after it agree.
        steps: the step; `None` if there are no traces.
        whole: True to follow all that the call returns.
    """
    trace = steps.reference.trace if steps is not None else None
    if trace is None or not trace.functions:
        return True
    positions = {(call.layer, call.call): k for k, call in enumerate(trace.calls) if not call.function}
    if not all(_site(each) in positions for each in (diff, *later)):
        return True
    later = [each for each in later if _order(each) > _order(diff)]
    called = trace.calls[positions[_site(diff)]]
    after = {operand.tensor for operand in called.outputs if operand.slot == diff.pair.anchor.slot}
    used = any(operand.tensor in after for call in trace.calls for operand in call.inputs)
    if not whole and used and len(called.outputs) > 1:  # the others of its outputs say nothing of this one
        for call in trace.calls[positions[_site(diff)] + 1 :]:
            if any(operand.tensor in after for operand in call.inputs):
                after.update(operand.tensor for operand in call.outputs)
        sites = {_site(each) for each in agreeing if _order(each) > _order(diff)}
        return any(o.tensor in after for site in sites for o in trace.calls[positions[site]].outputs)
    for by_value in (True, False):
        after = reached(trace, {positions[_site(diff)]}, by_value)
        depending = [
            each
            for each in later
            if any(operand.tensor in after for operand in trace.calls[positions[_site(each)]].outputs)
        ]
        if depending:
            return any(each is other for each in depending for other in agreeing)
    return False


def _site(diff: Diff) -> tuple[str, int]:
    return ("", 0) if diff.pair.reference is None else (diff.pair.reference.layer, diff.pair.reference.call)


def _ending_inside(diffs: Sequence[Diff], steps: Both[Step]) -> list[Diff]:
    """Return the diffs of outputs that the other side's layer computes on its way to outputs of its own.

    One side's router returns scores, the other's the chosen places and their weights, too.
    """
    try:
        calls = steps.map(lambda step: step.trace.calls)
        outputs = calls.map(lambda side: {(c.layer, c.call): len(c.outputs) for c in side if not c.function})
        return [diff for diff in diffs if _several(diff, outputs) and _is_computed_inside(diff, steps)]
    except RunFolderError:
        return []  # a trace is damaged; the figures stay valid


def _ending_before(diffs: Sequence[Diff], steps: Both[Step]) -> list[Diff]:
    """Return the diffs of layers' outputs from which the other side computes, after the layer, its layer's output.

    One author's encoder takes the norm of what it gives, the other's model does so.
    """
    try:
        stray = {_paths(diff) for diff in diffs if not _goes_on(diff, steps, anywhere=True)}
    except (RunFolderError, SketchOnlyError):
        return []  # a trace is damaged, or the values can no longer be read; the figures stay valid
    return [diff for diff in diffs if _paths(diff) not in stray]


def _several(diff: Diff, outputs: Both[dict[tuple[str, int], int]]) -> bool:
    counts = [
        side.get((record.layer, record.call), 1) for side, record in zip(outputs, diff.pair.sides) if record is not None
    ]
    return counts[0] != counts[-1]


def _is_computed_inside(diff: Diff, steps: Both[Step]) -> bool:
    reference, candidate = diff.pair.reference, diff.pair.candidate
    assert reference is not None and candidate is not None
    for record, other, step in ((reference, candidate, steps.candidate), (candidate, reference, steps.reference)):
        for call in step.trace.calls:
            if (call.layer, call.call) != (other.layer, other.call):
                continue
            for tensor in (step.trace.tensors[operand.tensor] for operand in call.outputs):
                if tensor.source is None or math.prod(tensor.shape) != math.prod(record.shape):
                    continue
                inner = replace(other, source=tensor.source, shape=tensor.shape, dtype=tensor.dtype)
                layout = SAME if tensor.shape == record.shape else RESHAPED
                if _agrees(measure_pair(Pair(diff.pair.step, record, inner, layout)), tensor.dtype):
                    return True
    return False


def _has_other_shape(diff: Diff) -> bool:
    return diff.problem is not None and diff.problem.kind is Kind.SHAPES


def _boundary_error(diff: Diff) -> float:
    if diff.problem or diff.figures is None:
        return math.inf
    return diff.figures.rel_l2 if diff.figures.l2 else 0.0


def _agrees(diff: Diff, dtype: str = "") -> bool:
    """Return True if an output differs by no more than a dtype rounds. Default: its own.

    Rows that chose otherwise do not count if the others agree to far better than the coarse dtypes round.
    """
    judged = diff.judgement
    if judged is not None and diff.passed and judged.figure is Figure.OTHER_ROWS and judged.value < _VISIBLE / 2:
        return True
    dtype = coarse(dtype or diff.pair.anchor.dtype)
    rounding = allowed(dtype, "forward") if dtype in COARSENESS else 0.0
    return _boundary_error(diff) < max(_VISIBLE / 2, rounding)


class _Built:
    """Test for pairs of layers that are built differently although they hold the same parameters."""

    def __init__(self, alignment: Alignment) -> None:
        layers = alignment.layers.map(lambda side: sorted(side, key=lambda layer: layer.path))
        self._kinds = layers.map(lambda side: Counter(equivalents.kind(x) for x in side if _is_plain(x)))
        self._inside = layers.map(_leaves_inside)
        #: Layers of each side that hold a parameter which no partner of theirs holds: a bias that the model adds.
        self._parted: Both[set[str]] = Both(set(), set())
        pairs = set(map(_pair_paths, alignment.pairs))
        for parameters in alignment.parameters:
            paths = parameters.map(lambda slices: {each.layer for each in slices})
            if not pairs.isdisjoint(product(*paths)):
                continue
            for parted, layers_of in zip(self._parted, paths):
                parted |= layers_of

    def differently(self, pair: LayerPair) -> bool:
        if any(path in parted for path, parted in zip(_pair_paths(pair), self._parted)):
            return True
        if any(layer.children for layer in pair):
            inside = self._inside.zip(pair).map(lambda side: side[0].get(side[1].path))
            built: Both[object] = inside.zip(pair).map(lambda side: (side[0], _is_own_class(side[1])))
        elif _is_plain(pair.reference):
            kinds = pair.map(equivalents.kind)
            built = self._kinds.zip(kinds).map(lambda side: (side[1], side[0][side[1]]))
        else:
            # A layer of the user's own class may contain what the other side calls after it: a normalisation the
            # activation, a router softmax and choice.
            built = pair.map(lambda layer: (equivalents.kind(layer), _is_own_class(layer), layer.settings.get("act")))
        return built.reference != built.candidate


def _leaves_inside(layers: Sequence[Layer]) -> dict[str, Counter[str]]:
    """Count the kinds of the leaf layers inside each container."""
    inside: dict[str, Counter[str]] = {}
    for layer in layers:
        if layer.children:
            continue
        for above in containers_of(layer.path):
            inside.setdefault(above, Counter())[equivalents.kind(layer)] += 1
    return inside


def _is_plain(layer: Layer) -> bool:
    return not layer.parameters and not layer.children


def _is_own_class(layer: Layer) -> bool:
    return layer.type.lower() != layer.kind


def _is_fixed(pair: LayerPair) -> bool:
    return pair.reason == "given" or ROOT in _pair_paths(pair)


def _pair_paths(pair: LayerPair) -> tuple[str, str]:
    return pair.reference.path, pair.candidate.path


def _paths(diff: Diff) -> tuple[str, str]:
    reference, candidate = diff.pair.reference, diff.pair.candidate
    return (reference.layer if reference else "", candidate.layer if candidate else "")


def _order(diff: Diff) -> int:
    return diff.pair.anchor.order
