"""Hypotheses on the input of a step: another step's samples, another order, scale or axis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from padiff.compare.diagnose.causes import other_network
from padiff.compare.diagnose.hypotheses import transforms
from padiff.compare.diagnose.hypotheses.diff_context import DiffContext, rounding_of, whole_of
from padiff.compare.diagnose.hypotheses.hypothesis import NUMBERS, Hypothesis, Prediction
from padiff.compare.diagnose.place import graphs_of
from padiff.errors import PadiffError
from padiff.records import SIDES, Both, Cause

# Count of steps before and after this one whose samples are compared.
_AROUND = 6
_HEAD = "the candidate's input is"
# Least share of a batch's samples that shows the same data, and most bytes to read for them.
_SHARE, _BYTES = 0.1, 200_000_000
# Least size of a sample that is not equal by chance, of floats and of integers.
_FLOATS, _INTEGERS = 4, 8
# Least size of a sample of which two factors are solved for.
_MIXED = 6
# Least length of a sequence that is shifted.
_SEQUENCE = 3
# Largest shift along one axis and along each of two, and the number of windows that count as tried.
_FAR_WINDOW, _NEAR_WINDOW, _TRIED_WINDOWS = 256, 8, 500


def hypotheses(scene: DiffContext) -> Iterator[Hypothesis | Cause]:
    """Yield hypotheses on a first diff in an input, the simplest first."""
    pair = scene.diff.pair
    sides = whole_of(pair)
    if sides is None or np.iscomplexobj(sides.reference) or sides.reference.shape != sides.candidate.shape:
        return
    if not all(np.isfinite(side).all() for side in sides):
        return
    rounding, limit = rounding_of(pair), scene.limit(pair)
    yield from _of_other_networks(scene, sides)
    yield from _numbered_otherwise(scene, sides)
    yield from _orders(scene, sides, rounding, limit)
    yield from _mixed(scene, sides, rounding, limit)
    few = Both(*transforms.cropped(*sides))
    for transform in transforms.orders(few.reference.shape):
        yield transforms.hypothesis(transform, _HEAD, "input", pair.anchor.site, tuple(few), rounding, limit)
    for transform in transforms.affine(*few):
        if rounding or transform.kind == "offset":
            yield transforms.hypothesis(transform, _HEAD, "input", pair.anchor.site, tuple(few), rounding, limit)
    grid = transforms.grid_of(few.candidate) if rounding else ""
    if grid and grid != transforms.grid_of(few.reference):
        transform = transforms.Transform(
            "precision",
            f"{grid}",
            f"in {grid}'s precision, the reference's is not",
            lambda v: transforms.on_grid(v, grid),
        )
        yield transforms.hypothesis(transform, _HEAD, "input", pair.anchor.site, tuple(few), rounding, limit)
    yield from _moved(scene, sides, rounding)
    yield from _elsewhere(scene, sides)


def _elsewhere(scene: DiffContext, sides: Both[np.ndarray]) -> Iterator[Cause]:
    """Yield the cause that the candidate gives the same values, to the bit, as another input of a call."""
    values, first = sides.reference, scene.diff.pair
    if len(np.unique(values)) < _INTEGERS:
        return
    try:
        pairs = scene.pairs(scene.number, "input").values()
    except PadiffError:
        return  # the step is damaged
    for pair in pairs:
        if pair is first or pair.candidate is None or pair.candidate.shape != values.shape:
            continue
        tensors = whole_of(pair)
        if tensors is not None and np.array_equal(tensors.candidate, values):
            call = "" if pair.anchor.call == first.anchor.call else f" of call {pair.anchor.call}"
            text = (
                f"the candidate gives as `{pair.candidate.slot.rpartition('.')[2]}`{call} what the reference gives as "
                f"`{first.anchor.slot.rpartition('.')[2]}`"
            )
            yield Cause("input_elsewhere", text)
            return


def _of_other_networks(scene: DiffContext, sides: Both[np.ndarray]) -> Iterator[Cause]:
    """Yield the cause that the candidate calls one network where the reference calls another one: of a network and its
    target, one for the other.
    """
    steps, anchor = scene.sides(scene.number), scene.diff.pair.anchor
    record = scene.diff.pair.candidate
    if steps is None or record is None or sides.candidate.size < 2 or not sides.candidate.any():
        return
    partners = {pair.reference.path: pair.candidate.path for pair in scene.alignment.pairs}
    inputs = steps.map(lambda step: [each for each in step.records if each.stage == "input"])
    for elsewhere in inputs.reference:
        partner = partners.get(elsewhere.layer)
        if elsewhere.layer == anchor.layer or partner is None or elsewhere.shape != sides.reference.shape:
            continue
        times = (
            Both(elsewhere.layer, partner)
            .zip(inputs)
            .map(lambda side: len({each.call for each in side[1] if each.layer == side[0]}))
        )
        if times.candidate >= times.reference or not np.array_equal(elsewhere.value, sides.candidate):
            continue
        counts = f"`{partner}` is called {times.candidate} times for the reference's {times.reference}"
        called = graphs_of(steps, scene.runs.map(lambda run: run.info)).zip(Both(elsewhere, record))
        lines = called.map(lambda side: call.line if (call := side[0].of_record(side[1])) is not None else None)
        yield other_network(Both(elsewhere.layer, record.layer), lines, f"the values are equal, and {counts}")
        return


def _numbered_otherwise(scene: DiffContext, sides: Both[np.ndarray]) -> Iterator[Cause]:
    """Yield the cause that the same tokens or classes have other numbers, which are ids or stand as one-hot vectors."""
    dtype = scene.diff.pair.anchor.dtype
    if not _ids(sides.reference, dtype).size:
        return
    batches = [near.map(lambda side: _ids(side, dtype).ravel()) for *_, near in _of_near_steps(scene)]
    if not batches:
        return
    ids = Both(*map(np.concatenate, zip(*batches)))
    if ids.reference.size != ids.candidate.size:
        return
    numbers = ids.map(np.unique)
    mapping = np.unique(np.stack(list(ids)), axis=1)
    moved, repeats = mapping[:, mapping[0] != mapping[1]], ids.reference.size - mapping.shape[1]
    if {mapping.shape[1]} != {len(side) for side in numbers} or moved.shape[1] < 2:
        return
    # Each repeated id maps by chance as it did before once in so many times as there are numbers.
    digits = repeats * math.log10(mapping.shape[1])
    if digits >= 1:
        first = ", ".join(f"{before} -> {after}" for before, after in moved[:, :3].T)
        text = (
            f"the candidate's ids are the reference's under other numbers ({first}): the list of words or classes is "
            "in another order, as that of a set() is in each process"
        )
        proven = digits >= NUMBERS
        evidence = f"{repeats:,} repeated ids of {mapping.shape[1]:,} follow one table" if proven else ""
        yield Cause("numbered_otherwise", text, proven, evidence, "sorted(set(...)) for list(set(...))")


def _ids(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return integers, or the places of the ones in one-hot vectors; empty if the values are neither."""
    if dtype.startswith(("int", "uint")):
        return values.astype(np.int64)
    is_one_hot = values.ndim > 1 and np.isin(values, (0, 1)).all() and (values.sum(-1) == 1).all()
    return values.argmax(-1) if is_one_hot else np.empty(0, np.int64)


def _moved(scene: DiffContext, sides: Both[np.ndarray], rounding: float) -> Iterator[Hypothesis]:
    """Yield the hypothesis that samples are shifted, as another window of each, with other values where it comes in."""
    shape, site = sides.reference.shape, scene.diff.pair.anchor.site
    if len(np.unique(sides.reference)) < 3:
        return
    by_one = [{axis: shift} for axis in range(1, min(len(shape), 3)) for shift in (1, -1)]
    windows = [each for each in _windows(sides) if each not in by_one]
    for shifts in (*by_one, *windows):
        parts = _window(shape, shifts)
        if not parts:
            continue
        values, actual, without = sides.reference[parts[0]], sides.candidate[parts[1]], sides.reference[parts[1]]

        def predict(
            actual: np.ndarray = actual, values: np.ndarray = values, without: np.ndarray = without
        ) -> Iterator[Prediction]:
            yield Prediction(site, actual, values, without, transforms.noise_of(values, rounding))

        (axis, shift), *others = shifts.items()
        count, direction = "one" if abs(shift) == 1 else abs(shift), "forward" if shift > 0 else "back"
        end = "first" if shift > 0 else "last"
        text = f"the reference's shifted by {count} along axis {axis}, {direction}: its {end} values are others"
        for other_axis, other_shift in others:
            text = f"another window of the reference's: by {shift:+d} along axis {axis}"
            text = f"{text} and by {other_shift:+d} along axis {other_axis}"
        yield Hypothesis(
            "input_moved", "a shift", f"{_HEAD} {text}", predict, tried=_TRIED_WINDOWS if shifts in windows else 4,
            changes=2, values=Both(None, (*shifts.values(),)),
        )  # fmt: skip


def _window(shape: Sequence[int], shifts: Mapping[int, int]) -> tuple[tuple[slice, ...], ...]:
    """Return the places of the reference's and the candidate's values that a shift leaves; empty if they are few."""
    if any(shape[axis] - abs(shift) < max(_SEQUENCE, shape[axis] // 2) for axis, shift in shifts.items()):
        return ()
    ends = [(slice(0, -abs(shift)), slice(abs(shift), None))[:: 1 if shift > 0 else -1] if shift else
            (slice(None), slice(None)) for shift in (shifts.get(axis, 0) for axis in range(len(shape)))]  # fmt: skip
    return tuple(zip(*ends))


def _windows(sides: Both[np.ndarray]) -> Iterator[dict[int, int]]:
    """Yield the shifts, by axis, by which the first sample is about the reference's: along one axis, or two."""
    first = sides.map(lambda side: side[:1])
    shape = first.reference.shape
    alone = [
        {axis: sign * k}
        for axis in range(1, len(shape))
        for k in range(1, min(shape[axis] // 2, _FAR_WINDOW) + 1)
        for sign in (1, -1)
    ]
    near = [*range(-_NEAR_WINDOW, 0), *range(1, _NEAR_WINDOW + 1)]
    pairs = [(1, 2), (2, 3)] if len(shape) == 4 else []
    both = [{a: shift, b: other} for a, b in pairs for shift in near for other in near]
    for shifts in alone + both:
        parts = _window(shape, shifts)
        if parts and np.allclose(first.reference[parts[0]], first.candidate[parts[1]], rtol=1e-3, atol=1e-6):
            yield shifts


def _mixed(scene: DiffContext, sides: Both[np.ndarray], rounding: float, limit: float) -> Iterator[Hypothesis]:
    """Yield the hypothesis that each sample is a mix of the reference's and of the loss's target, as of noise.

    Features that agree, such as a time that goes in beside the sample, are left out.
    """
    shape, site = sides.reference.shape, scene.diff.pair.anchor.site
    if len(shape) < 2 or not rounding:
        return
    features = np.any(np.moveaxis(sides.reference != sides.candidate, 1, 0).reshape(shape[1], -1), axis=1)
    parts = sides.map(lambda side: side[:, features])
    for (_, slot, _), pair in scene.pairs(scene.number, "loss").items():
        targets = whole_of(pair) if slot.endswith(".target") else None
        if targets is None or targets.reference.shape != parts.reference.shape or parts.reference[0].size < _MIXED:
            continue
        if not np.allclose(targets.reference, targets.candidate, rtol=1e-5):
            continue
        rows = [values.reshape(len(values), -1) for values in (parts.reference, targets.reference, parts.candidate)]
        for shown, how in (("", "another factor"), ("{} times ", "other factors, as by another schedule")):
            factors = np.array([_factors(not shown, *sample) for sample in zip(*rows)])
            mixed = np.einsum("ik,kij->ij", factors, np.stack(rows[:2])).reshape(parts.reference.shape)
            times, share = (f"{side.min():.3g} to {side.max():.3g}" for side in factors.T)
            text = (
                f"for each sample {shown.format(times)}the reference's plus {share} times the loss's target: noise is "
                f"mixed in with {how}"
            )

            def predict(values: np.ndarray = mixed) -> Iterator[Prediction]:
                noise = transforms.noise_of(values, rounding)
                yield Prediction(site, parts.candidate, values, parts.reference, noise, limit)

            free = len(rows[0]) * (2 if shown else 1)
            yield Hypothesis("noise_mix", "a mix with the loss's target", f"{_HEAD} {text}", predict, free=free)


def _factors(is_whole: bool, reference: np.ndarray, target: np.ndarray, candidate: np.ndarray) -> tuple[float, float]:
    """Return the factors of a reference's and a target's sample that come nearest to the candidate's sample.

    Args:
        is_whole: the reference's factor is 1.
    """
    if is_whole:
        return 1.0, float(np.vdot(target, candidate - reference) / max(float(np.vdot(target, target)), 1e-300))
    factors = np.linalg.lstsq(np.stack([reference, target], axis=1), candidate, rcond=None)[0]
    return float(factors[0]), float(factors[1])


def _orders(scene: DiffContext, sides: Both[np.ndarray], rounding: float, limit: float) -> Iterator[Hypothesis | Cause]:
    """Yield hypotheses on the same samples in another order, or on samples of steps around this one."""
    if sides.reference.ndim < 1 or len(sides.reference) < 2:
        return
    order = transforms.row_order(*sides)
    if order is not None and sides.reference[0].size > 1:
        transform = transforms.Transform(
            "permuted",
            "another order of the samples",
            f"the same samples {transforms.order_text(order)}",
            lambda v: v[order],
            free=len(order),
        )
        site = scene.diff.pair.anchor.site
        yield transforms.hypothesis(transform, _HEAD, "input", site, tuple(sides), rounding, limit)
    else:
        near: list[Hypothesis | Cause] = [*_of_other_steps(scene, sides, rounding, limit)]
        yield from near or [*_of_the_run(scene, sides.candidate)] or _evaluated(scene)


def _evaluated(scene: DiffContext) -> Iterator[Cause]:
    """Yield the cause that one loop evaluates before this step, and the other does not: its batches move on."""
    steps = scene.sides(scene.number)
    if steps is None:
        return
    times = steps.map(lambda step: sum(each.calls for each in step.evaluations))
    if times.reference == times.candidate or all(times):
        return
    side, other = SIDES if times.reference else SIDES.swapped()
    text = (
        f"the {side}'s loop evaluates in this step ({max(times)} calls), the {other}'s does not: what evaluation draws "
        "from the same random numbers, or takes from the same loader, training gets no more"
    )
    yield Cause("evaluation", text)


def _of_other_steps(scene: DiffContext, sides: Both[np.ndarray], rounding: float, limit: float) -> Iterator[Hypothesis]:
    """Yield the hypothesis that all samples come from the reference's steps around this one."""
    pair = scene.diff.pair
    anchor = pair.anchor
    rows, origins = [], []
    for number, call, values in [*_of_near_steps(scene), (scene.number, anchor.call, sides)]:
        is_another = (number, call) != (scene.number, anchor.call) or values is sides
        if is_another and values.reference.shape[1:] == sides.reference.shape[1:]:
            rows.append(values.reference)
            origins += [(number, call)] * len(values.reference)
    if len(rows) < 2 or sides.reference[0].size < 2:
        return
    pool = np.concatenate(rows)
    order = transforms.row_order(pool, sides.candidate) if len(pool) >= len(sides.candidate) else None
    if order is None:
        return
    used = sorted({origins[k] for k in order})
    # Places of samples in the run, if all batches are of one size.
    size = len(sides.reference)
    starts = np.array([number * size for number, _ in origins]) + np.arange(len(origins)) % size
    shifts = (
        {*(starts[order] - starts[-size:])} if {len(each) for each in rows} == {size} and not used[-1][1] else set()
    )
    shift = int(shifts.pop()) if len(shifts) == 1 else 0
    if shift and len(used) > 1:
        places = f"{abs(shift)} place{'s' if abs(shift) > 1 else ''} {'later' if shift > 0 else 'earlier'}"
        text = (
            f"for each sample the reference's {places}: it begins with another one, or with another window of the data"
        )
    elif len(used) == 1:
        (number, call), micro = used[0], any(call for _, call in origins)
        text = f"the reference's of step {number}{f', micro-batch {call}' if micro else ''}: batches in another order"
    else:
        steps = sorted({number for number, _ in used})
        text = f"made of samples that the reference has in steps {', '.join(map(str, steps))}: another shuffling"

    def predict() -> Iterator[Prediction]:
        predicted = pool[order]
        noise = transforms.noise_of(predicted, rounding)
        yield Prediction(pair.anchor.site, sides.candidate, predicted, sides.reference, noise, limit)

    yield Hypothesis(
        "batch_order", "samples of other steps", f"{_HEAD} {text}", predict, free=len(order),
        values=Both(None, (-shift,)) if shift else None,
    )  # fmt: skip


def _of_near_steps(scene: DiffContext) -> Iterator[tuple[int, int, Both[np.ndarray]]]:
    """Yield step, call and both sides' whole tensors of this input, in this step and those around it."""
    anchor = scene.diff.pair.anchor
    for number in sorted(scene.numbers, key=lambda n: abs(n - scene.number))[: 2 * _AROUND]:
        for (layer, slot, call), batch in scene.pairs(number, "input").items():
            values = whole_of(batch) if (layer, slot) == (anchor.layer, anchor.slot) else None
            if values is not None:
                yield number, call, values


def _of_the_run(scene: DiffContext, batch: np.ndarray) -> Iterator[Cause]:
    """Yield the cause that samples of the candidate's batch are the reference's of any other steps."""
    anchor = scene.diff.pair.anchor
    waiting = {key: k for k, key in enumerate(transforms.row_keys(batch))}
    count, width, steps, read = len(waiting), batch[0].size, set(), 0
    floats = anchor.dtype.startswith(("float", "bfloat"))
    if width < (_FLOATS if floats else _INTEGERS) or count < 2:
        return
    for number in sorted(scene.numbers, key=lambda n: abs(n - scene.number)):
        pairs = scene.pairs(number, "input").items()
        for values in [
            whole_of(pair) for (layer, slot, _), pair in pairs if (layer, slot) == (anchor.layer, anchor.slot)
        ]:
            if values is None or values.reference.shape[1:] != batch.shape[1:]:
                continue
            read += values.reference.nbytes
            for key in transforms.row_keys(values.reference):
                if waiting.pop(key, None) is not None:
                    steps.add(number)
        if not waiting or read > _BYTES:
            break
    matches = count - len(waiting)
    if matches < max(2, _SHARE * count) or steps <= {scene.number}:
        return
    text = (
        f"the same samples in another order, over the epoch: {matches} of this batch's {count} samples are the "
        f"reference's of {len(steps)} step{'s' if len(steps) > 1 else ''}: another shuffling"
    )
    # Integers may be few, so that samples are equal by chance.
    proven = floats or width >= 2 * _INTEGERS
    yield Cause("batch_order", text, proven, "the samples are equal" if proven else "")
