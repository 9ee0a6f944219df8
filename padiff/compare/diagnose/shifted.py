"""Batches that belong to another step, and calls that only one run makes in evaluation mode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from padiff.align import Alignment
from padiff.compare.declared.layers import has_modes, modes_of
from padiff.compare.diagnose.hypotheses.diff_context import DiffContext
from padiff.compare.diagnose.place import graphs_of
from padiff.compare.judge.limits import COARSENESS, allowed, coarse
from padiff.compare.judge.missing_records import whole_stage_missing
from padiff.compare.measure.pairs import measure_pair
from padiff.errors import PadiffError
from padiff.pair.joined_calls import without_evaluations
from padiff.pair.tokens import TokenAlignment
from padiff.records import (
    SAME,
    SIDES,
    Both,
    Cause,
    Diff,
    Difference,
    FirstDiff,
    Pair,
    Record,
    Run,
    Step,
    TensorSource,
    settings_at,
)

# The most recorded steps that are compared before and after a step.
_NEARBY = 4
# Batches with at least this many numbers are not equal by chance.
_MANY = 8
_EVIDENCE = "they are equal"


def shift_cause(diff: Diff, runs: Both[Run]) -> Cause | None:
    """Return a cause if an input that differs is the reference's input of a neighbouring step; else `None`."""
    pair = diff.pair
    if pair.stage != "input" or pair.derived or pair.reference is None or pair.candidate is None or diff.problem:
        return None
    reference = runs.reference
    call = _call_with(pair, runs)
    if call is not None:
        text = (
            f"the layer gets in call {pair.anchor.call} of the candidate's step what it gets in call {call} of the "
            "reference's: a call is missing, comes in another order, or is one of another model"
        )
        return Cause("other_call", text)
    others = sorted((n for n in reference.numbers() if n != pair.step), key=lambda n: abs(n - pair.step))
    for number in others[: 2 * _NEARBY]:
        if _is_batch_of(pair, pair.candidate, reference, number):
            away = number - pair.step
            # A few numbers may be equal by chance.
            proven = math.prod(pair.anchor.shape) >= _MANY
            if _goes_on(pair, runs, away):
                return replace(_shifted(pair.step, number), proven=proven, evidence=_EVIDENCE if proven else "")
            return Cause(
                "batch_order",
                f"the candidate's batch is the reference's of step {number}: the batches come in another order, or the "
                "runs number their steps differently (start_step)",
                proven,
                _EVIDENCE if proven else "",
            )
    return None


def repeated_cause(diff: Diff, runs: Both[Run]) -> Cause | None:
    """Return a cause if one side begins again with its first batches where the other side goes on; else `None`."""
    pair = diff.pair
    numbers = [n for n in runs.reference.numbers() if n in {*runs.candidate.numbers()}]
    if pair.stage != "input" or pair.derived or not pair.complete or diff.problem or pair.step not in numbers[2:]:
        return None
    again = Both(*(_begins_again(side, run, pair, numbers) for side, run in pair.sides.zip(runs)))
    if again.reference == again.candidate:
        return None
    side, other_side = SIDES if again.reference else SIDES.swapped()
    text = (
        f"from step {pair.step} on the {side}'s batches are those from step {numbers[0]} on, in the same order, and "
        f"the {other_side} shuffles anew: an epoch that repeats the order (a sampler without set_epoch, or a generator "
        "that is seeded again)"
    )
    return Cause("epoch_repeated", text, math.prod(pair.anchor.shape) >= _MANY, "the batches of one run are equal")


def _begins_again(record: Record | None, run: Run, pair: Pair, numbers: list[int]) -> bool:
    """Return True if a run's batches from a step on are its batches from the first step on."""
    assert record is not None
    later = [n for n in numbers if n >= pair.step][:2]
    for first, number in zip(numbers, later):
        sides = [_record_of(record, run, n) for n in (first, number)]
        if sides[0] is None or sides[1] is None:
            return False
        if not _same(measure_pair(replace(pair, reference=sides[0], candidate=sides[1], layout=SAME))):
            return False
    return True


def _goes_on(pair: Pair, runs: Both[Run], away: int) -> bool:
    """Return True if the candidate's next step also has the batch of the reference's step at the same distance.

    Args:
        pair: the inputs that differ.
        runs: the reference and the candidate run.
        away: the distance, in steps, of the reference's step with the same batch.
    """
    assert pair.candidate is not None
    numbers = {*runs.reference.numbers()}
    step = next((n for n in runs.candidate.numbers() if n > pair.step and n + away in numbers), None)
    if step is None:
        return False
    batch = _record_of(pair.candidate, runs.candidate, step)
    return batch is not None and _is_batch_of(pair, batch, runs.reference, step + away)


def _is_batch_of(pair: Pair, batch: Record, reference: Run, number: int) -> bool:
    """Return True if a batch of the candidate is equal to the reference's input at the pair's place in another step.

    Args:
        pair: the inputs that differ.
        batch: the batch of the candidate.
        reference: the reference run.
        number: the number of the reference's step.
    """
    assert pair.reference is not None
    record = _record_of(pair.reference, reference, number)
    return record is not None and _same(measure_pair(replace(pair, step=number, reference=record, candidate=batch)))


def _record_of(record: Record, run: Run, number: int) -> Record | None:
    """Return the record of another step at the same site, with the same shape and call; `None` if there is none."""
    try:
        for step in run.steps(number):
            for neighbour in step.records:
                if (neighbour.site, neighbour.shape, neighbour.call) == (record.site, record.shape, record.call):
                    return neighbour
    except PadiffError:  # an unreadable step explains nothing here; the comparison of that step reports it
        pass
    return None


def _call_with(pair: Pair, runs: Both[Run]) -> int | None:
    """Return the call of the same step in which the reference's layer gets the candidate's input; `None` if in none.

    Calls in evaluation mode that only one side makes are another cause.
    """
    own = pair.reference
    assert own is not None and pair.candidate is not None
    if any(pair.step not in run.numbers() for run in runs):
        return None
    try:
        steps = runs.map(lambda run: run.steps(pair.step))
        if any(step.evaluations for side in steps for step in side):
            return None
        for step in steps.reference:
            for other in step.records:
                if (other.layer, other.slot, other.stage, other.shape) == (own.layer, own.slot, own.stage, own.shape):
                    measured = replace(pair, reference=other)
                    if other.call != own.call and math.prod(own.shape) >= _MANY and _same(measure_pair(measured)):
                        return other.call
    except PadiffError:  # see `_record_of`
        pass
    return None


def _same(diff: Diff) -> bool:
    figures = diff.figures
    if figures is None or diff.problem or not figures.reference_l2:
        return False
    dtype = coarse(diff.pair.anchor.dtype)
    return figures.rel_l2 <= (allowed(dtype, "input") if dtype in COARSENESS else 0.0)


def _shifted(step: int, number: int) -> Cause:
    away = abs(number - step)
    count = "one step" if away == 1 else f"{away} steps"
    when, how = (f"{count} later", "left a batch out") if number > step else (f"{count} earlier", "used a batch twice")
    return Cause(
        "batch_shift",
        f"the candidate's batches are the reference's of {when} (here that of step {number}): the runs number "
        f"their steps differently (start_step), or the candidate {how}",
    )


# Largest relative difference of equal inputs.
_EQUAL = 1e-6


def evaluated_calls(first: FirstDiff, runs: Both[Run], alignment: Alignment) -> list[tuple[int, Difference]]:
    """Return the difference of modes that makes a run's recorded calls fewer than the other's, with its step.

    A step with calls in training mode records no call in evaluation mode. If one side evaluates what the other side
    trains, the next call gets the number of the call that is missing, and its inputs are another call's.

    Args:
        first: the first tensor that differs; only inputs show such calls.
        runs: the reference and the candidate.
        alignment: the pairs of layers.
    """
    diff = first.diff
    if diff is None or first.stage != "input" or not diff.pair.complete:
        return []
    try:
        ranks = list(zip(*runs.map(lambda run: run.steps(first.step))))
        steps = Both(*ranks[first.rank or 0])
        inputs = steps.zip(diff.pair.sides).map(lambda side: _inputs(*side))
        evaluating, training = SIDES.swapped() if len(inputs.reference) > len(inputs.candidate) else SIDES
        fewer, more = getattr(inputs, evaluating), getattr(inputs, training)
        missing = _missing(fewer, more)
    except (PadiffError, OSError, KeyError, IndexError):
        return []  # deleted meanwhile, or damaged
    evaluated = sum(calls.calls for calls in getattr(steps, evaluating).evaluations)
    if not missing or evaluated < len(missing):
        return []
    return _of_modes(first.step, Both(evaluating, training), missing, alignment)


def calls_in_training_mode(steps: Both[Step], alignment: Alignment) -> list[tuple[int, Difference]]:
    """Return the difference of modes of a step in which one loop evaluates in training mode; empty if neither does."""
    try:
        left_out = without_evaluations(steps)[1]
    except PadiffError:
        return []  # the values can no longer be read
    if not any(left_out):
        return []
    evaluating, training = SIDES.swapped() if left_out.reference else SIDES
    records: list[Record] = getattr(left_out, training)
    calls = sorted({record.call for record in records if record.stage == "input"})
    return _of_modes(steps.reference.number, Both(evaluating, training), calls, alignment)


def _of_modes(
    step: int, sides: Both[str], numbers: Sequence[int], alignment: Alignment
) -> list[tuple[int, Difference]]:
    """Return the difference of a step's calls of which one side makes some in evaluation mode, the other in training
    mode.

    Args:
        sides: the side that evaluates, and the side that trains.
        numbers: numbers of the calls.
    """
    calls = ", ".join(str(k + 1) for k in numbers)
    evaluating, training = sides
    note = f"the {evaluating} makes call {calls} of the step in evaluation mode, the {training} in training mode"
    layers = next((pair for pair in alignment.pairs if any(has_modes(layer) for layer in pair)), None)
    if layers is None:
        return []
    values = Both("eval", "train").swapped(evaluating == "candidate")
    about = " against ".join(f"{layer.path} ({layer.type})" for layer in layers)
    paths = layers.map(lambda layer: (layer.path,))
    fix = f"model.{values.reference}()"
    return [(step, Difference("mode", values, "forward", "mode", about, fix=fix, layers=paths, note=note))]


def evaluation_cause(diff: Diff, step: Sequence[Diff], runs: Both[Run]) -> Cause | None:
    """Return the cause of a step without outputs if that side trains in evaluation mode; else `None`.

    The calls of a recording's first step are not recorded in evaluation mode: they may be those of a validation. The
    next step shows that the loop trains with them.

    Args:
        diff: the first diff.
        step: the diffs of its step.
        runs: the reference and the candidate.
    """
    pair = diff.pair
    if pair.complete or pair.stage != "forward" or not whole_stage_missing(diff, step):
        return None
    side, other = SIDES.swapped() if pair.candidate is None else SIDES
    try:
        later = next((number for number in getattr(runs, side).numbers() if number > pair.step), None)
        trains = [later is None or _trains(getattr(runs, side), later), _trains(getattr(runs, other), pair.step)]
    except (PadiffError, OSError, IndexError):
        return None
    if trains != [False, True]:
        return None
    text = f"the {side}'s model trains in evaluation mode, the {other}'s in training mode"
    return Cause("mode", text, fix="model.train()" if side == "candidate" else "model.eval()")


def _trains(run: Run, number: int) -> bool | None:
    """Return the mode of a run's model in a step; `None` if not recorded."""
    modes = modes_of(settings_at(run.info.settings, run.steps(number)[0].settings))
    return None if modes is None else modes[0]


def _inputs(step: Step, record: Record | None) -> list[Record]:
    """Return the inputs of a step at a record's site, by call."""
    assert record is not None
    site = record.layer, record.stage, record.slot
    return sorted((r for r in step.records if (r.layer, r.stage, r.slot) == site), key=lambda r: r.call)


def _missing(fewer: Sequence[Record], more: Sequence[Record]) -> list[int]:
    """Return the places of the inputs that one side lacks; empty unless all its inputs are the other's, in order."""
    missing, waiting = [], list(fewer)
    for place, record in enumerate(more):
        if waiting and _equal(record, waiting[0]):
            waiting.pop(0)
        else:
            missing.append(place)
    return [] if waiting or not fewer else missing


def _equal(first: Record, second: Record) -> bool:
    diff = measure_pair(Pair(0, first, second, SAME)) if first.shape == second.shape else None
    return diff is not None and diff.problem is None and diff.figures is not None and diff.figures.rel_l2 <= _EQUAL


def token_cause(first: FirstDiff, alignment: TokenAlignment, differing: np.ndarray | None) -> Cause | None:
    """Return the cause of a first diff that its tokens show; `None` if they show none.

    Args:
        first: the first diff.
        alignment: the tokens of its step.
        differing: tokens at which the first diff's tensor exceeds its limit; `None` if it has no rows of tokens.
    """
    if first.stage == "input" and alignment.holes:
        return _surplus(alignment)
    if first.stage != "forward" or differing is None or not len(differing):
        return None
    return _positions(alignment, differing) or _packed(alignment, differing) or _cached(alignment, differing)


def _surplus(alignment: TokenAlignment) -> Cause:
    """Return the cause that one side gets tokens that the other side does not get."""
    side, sequence, index, token = alignment.holes[0]
    other = SIDES.candidate if side == SIDES.reference else SIDES.reference
    alike = [hole for hole in alignment.holes if hole[:2] == (side, sequence)]
    all_ids = {hole[3] for hole in alignment.holes if hole[0] == side}
    if len(all_ids) == 1 and len(alignment.holes) > 1 and index == 0:
        return Cause(
            "mask",
            f"the {side} computes {len(alike)} tokens before sequence {sequence} that the {other} leaves out "
            f"(id {token}): padding without a mask",
        )
    return Cause("tokens", f"the {other} never gets token {index} of sequence {sequence} (id {token})")


def _positions(alignment: TokenAlignment, differing: np.ndarray) -> Cause | None:
    positions = alignment.positions
    apart = (positions.reference != positions.candidate) & (positions.reference >= 0) & (positions.candidate >= 0)
    token = next((token for token in differing if apart[token]), None)
    # Tokens whose positions agree have to agree, too, up to those that see others.
    if token is None or not apart[differing[0]]:
        return None
    return Cause(
        "positions",
        f"the candidate computes token {alignment.index[token]} of sequence {alignment.sequence[token]} at position "
        f"{positions.candidate[token]}, the reference at position {positions.reference[token]}",
    )


def _packed(alignment: TokenAlignment, differing: np.ndarray) -> Cause | None:
    """Return the cause that tokens see those of another sequence in their row."""
    behind = alignment.places.map(lambda places: _are_behind(places, alignment.sequence))
    for side, flags in Both(*SIDES).zip(behind):
        other = behind.candidate if side == SIDES.reference else behind.reference
        if flags[differing].all() and not flags.all() and not other.any():
            return Cause(
                "mask",
                f"only tokens differ whose sequence is packed behind another one in the {side}: they see the tokens "
                "before them",
            )
    return None


def _are_behind(places: np.ndarray, sequence: np.ndarray) -> np.ndarray:
    """Return for each token if another sequence stands before its own in the row."""
    first: dict[tuple[int, int], tuple[int, int]] = {}
    for (call, row, time), number in zip(places.tolist(), sequence.tolist()):
        first[call, row] = min(first.get((call, row), (time, number)), (time, number))
    return np.array([first[call, row][1] != number for (call, row, _), number in zip(places.tolist(), sequence)], bool)


def _cached(alignment: TokenAlignment, differing: np.ndarray) -> Cause | None:
    """Return the cause that tokens are computed from a cache."""
    for side, places in Both(*SIDES).zip(alignment.places):
        starts = {int(s): int(c) for s, c in zip(alignment.sequence[::-1], places[::-1, 0])}
        cached = np.array([starts[int(s)] != c for s, c in zip(alignment.sequence, places[:, 0])])
        if cached[differing].all() and not cached.all():
            return Cause(
                "cache",
                f"only tokens differ that the {side} computes with a cache: the cache, or what is computed of it",
            )
    return None


# -- states that are handed on from call to call -------------------------------------------------------------------


def state_cause(scene: DiffContext) -> Cause | None:
    """Return the cause of a layer that begins from another state, or of an input that is another state; else `None`.

    A loop hands on the state of the step before (truncated backpropagation), or begins each step from zeros.
    """
    pair, steps = scene.diff.pair, scene.sides(scene.number)
    if pair.stage == "input" and pair.complete:
        values = [_values(record.source) for record in pair.sides if record is not None]
        return _of_states(scene, Both(*([value] if value is not None else [] for value in values)))
    if pair.stage != "forward" or not pair.complete or steps is None:
        return None
    try:
        graphs = graphs_of(steps, scene.runs.map(lambda run: run.info))
    except PadiffError:  # a damaged trace
        return None
    calls = [graph.of_record(record) for graph, record in zip(graphs, pair.sides) if record is not None]
    if calls[0] is None or calls[1] is None or len(calls[0].inputs) != len(calls[1].inputs):
        return None
    states: Both[list[np.ndarray]] = Both([], [])
    for operands in zip(calls[0].inputs[1:], calls[1].inputs[1:]):
        makers = [graph.producers.get(operand.tensor) for graph, operand in zip(graphs, operands)]
        if all(maker is not None and not maker.function for maker in makers):
            continue  # an output of a layer, which agrees: this diff is the first
        values = [_values(graph.trace.tensors[operand.tensor].source) for graph, operand in zip(graphs, operands)]
        if values[0] is None or values[1] is None or values[0].shape != values[1].shape:
            return None
        if not np.array_equal(values[0], values[1]):
            states.reference.append(values[0])
            states.candidate.append(values[1])
    return _of_states(scene, states)


def _of_states(scene: DiffContext, states: Both[list[np.ndarray]]) -> Cause | None:
    assert scene.diff.pair.reference is not None and scene.diff.pair.candidate is not None
    layers = Both(scene.diff.pair.reference.layer, scene.diff.pair.candidate.layer)
    origins = Both(*(_origin(*side, scene) for side in zip(states, scene.runs)))
    if not all(origins) or origins.reference == origins.candidate:
        return None
    text = (
        f"the candidate's `{layers.candidate}` begins from {origins.candidate}, the reference's `{layers.reference}` "
        f"from {origins.reference}: a state that the loop hands on"
    )
    return Cause("state", text, True, "the values are equal")


def _values(source: TensorSource | None) -> np.ndarray | None:
    """Return the values of a tensor, or its sketch as numbers; `None` if neither can be read."""
    try:
        return None if source is None else source.sketch.row() if source.sketch is not None else source.read()
    except PadiffError:
        return None


def _origin(states: Sequence[np.ndarray], run: Run, scene: DiffContext) -> str:
    """Return where states come from, as text: zeros, or outputs of the step before; empty if unknown."""
    if states and not any(state.any() for state in states):
        return "zeros"
    number = max((n for n in run.numbers() if n < scene.number), default=-1)
    try:
        records = [record for record in run.steps(number)[scene.rank].records if record.stage == "forward"]
    except (PadiffError, OSError, KeyError, IndexError):
        return ""
    shapes = {state.shape for state in states}
    given = [v for record in records if (v := _values(record.source)) is not None and v.shape in shapes]
    is_equal = all(any(np.array_equal(state, values) for values in given) for state in states)
    return f"what step {number} gave" if states and is_equal else ""
