"""Hypotheses on a whole tensor: another order or layout, or a constant ratio that numbers of the run explain."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, permutations, product
from typing import Any

import ml_dtypes
import numpy as np

from padiff.compare.diagnose.computing.recorded_losses import RecordedLoss, loss_of, loss_settings, recorded_losses
from padiff.compare.diagnose.hypotheses.diff_context import DiffContext
from padiff.compare.diagnose.hypotheses.hypothesis import Hypothesis, Prediction
from padiff.errors import PadiffError
from padiff.records import LOOP, Both, Record, RunInfo, Step, is_of_loss, loss_role, settings_at
from padiff.system.terminal import first_few

# Rounding error of a few operations, in rounding units of a number.
_OPERATIONS = 8.0
# Noise of integers: much smaller than any difference.
_INTEGERS = 0.01
#: Longest axis that may be channels, for which every order is tried.
CHANNELS = 4
# Most elements that are compared: of larger tensors the first samples.
_MOST = 2_000_000
# Shifts along an axis that are tried.
_SHIFTS = (1, -1, 2, -2)
# Usual means and deviations for normalising images, by name.
_IMAGES = {
    "ImageNet's": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "CIFAR-10's": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "CLIP's": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
}


@dataclass(frozen=True)
class Transform:
    """A change of the reference's tensor that may give the candidate's tensor.

    Attributes:
        kind: machine-readable name, to follow the name of the changed tensor.
        name: the change in one or two words.
        words: the end of a sentence that begins with "the candidate's ... is".
        make: function from the reference's tensor to the changed one.
        free: count of numbers that were solved for.
        tried: count of alternatives that were tried.
        changes: see `Hypothesis`.
        value: the axis of a flip; rows of scale and offset, one for each channel or for all; `None` for other changes.
        fix: the call that fixes the change; empty if not known.
    """

    kind: str
    name: str
    words: str
    make: Callable[[np.ndarray], np.ndarray]
    free: int = 0
    tried: int = 1
    changes: int = 1
    value: Any = None
    fix: str = ""


def hypothesis(
    one: Transform, head: str, prefix: str, site: str, sides: Sequence[np.ndarray], rounding: float, limit: float
) -> Hypothesis:
    """Return the hypothesis that a transform explains one tensor.

    Args:
        head: the beginning of the sentence, e.g. ``the candidate's input is``.
        prefix: the beginning of the hypothesis's kind, e.g. ``input``.
        sides: the reference's and the candidate's tensor.
        rounding: the relative error of rounding one number; 0 for integers.
    """
    reference, candidate = sides

    def predict() -> Iterator[Prediction]:
        predicted = one.make(reference)
        yield Prediction(site, candidate, predicted, reference, noise_of(predicted, rounding), limit)

    return Hypothesis(
        f"{prefix}_{one.kind}",
        one.name,
        f"{head} {one.words}",
        predict,
        free=one.free,
        tried=one.tried,
        changes=one.changes,
        fix=one.fix,
        values=None if one.value is None else Both(None, one.value),
    )


def noise_of(values: np.ndarray, rounding: float) -> np.ndarray:
    """Return the rounding error of each element of a result of a few operations; a constant for integers."""
    if not rounding:
        return np.full(values.shape, _INTEGERS)
    size = np.abs(values)
    root = math.sqrt(float(np.mean(np.square(size)))) if size.size else 0.0
    return np.asarray(np.maximum(_OPERATIONS * rounding * (size + root), 1e-300))


def cropped(reference: np.ndarray, candidate: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return both tensors, or the first samples of large ones."""
    if reference.size <= _MOST or reference.ndim < 2:
        return reference, candidate
    rows = max(1, _MOST * len(reference) // reference.size)
    return reference[:rows], candidate[:rows]


# -- another order -------------------------------------------------------------------------------------------------


def orders(shape: Sequence[int], first: int = 1) -> Iterator[Transform]:
    """Yield flips, shifts, other orders of channels and exchanges of axes, for the axes from ``first`` on."""
    axes = [axis for axis in range(first, len(shape)) if shape[axis] > 1]
    tried = len(axes) * (1 + len(_SHIFTS))
    for axis in axes:
        text = f"flipped along axis {axis}"
        text += " (RGB against BGR, where these are channels)" if shape[axis] == 3 else ""
        yield Transform("flipped", "a flip", text, partial(np.flip, axis=axis), tried=tried, value=axis)
        for shift in _SHIFTS:
            if shape[axis] > 2 * abs(shift):
                text = f"shifted by {abs(shift)} along axis {axis}, {'forward' if shift > 0 else 'back'}"
                yield Transform("shifted", "a shift", text, partial(np.roll, shift=shift, axis=axis), tried=tried)
        if 2 < shape[axis] <= CHANNELS:
            plain = tuple(range(shape[axis]))
            for order in permutations(plain):
                if order not in (plain, plain[::-1]):
                    text = f"the same with axis {axis} in the order {', '.join(map(str, order))}"
                    make = partial(np.take, indices=order, axis=axis)
                    many = math.factorial(shape[axis])
                    yield Transform("channels", "another order of channels", text, make, tried=many)
    for axis_a, axis_b in combinations(axes, 2):
        if shape[axis_a] == shape[axis_b]:
            text = f"the same with axes {axis_a} and {axis_b} exchanged"
            make = partial(np.swapaxes, axis1=axis_a, axis2=axis_b)
            yield Transform("transposed", "axes exchanged", text, make, tried=len(axes), value=(axis_a, axis_b))


def row_order(reference: np.ndarray, candidate: np.ndarray, axis: int = 0) -> np.ndarray | None:
    """Return the order of the reference's rows in the candidate, or `None` if the candidate has another row.

    Equal rows are paired in ascending order.
    """
    rows = [np.moveaxis(side, axis, 0).reshape(side.shape[axis], -1) for side in (reference, candidate)]
    places: dict[bytes, list[int]] = {}
    for k, key in reversed(list(enumerate(map(_key, rows[0])))):
        places.setdefault(key, []).append(k)
    order = []
    for key in map(_key, rows[1]):
        rows_left = places.get(key)
        if not rows_left:
            return None
        order.append(rows_left.pop())
    return np.array(order)


def row_keys(values: np.ndarray) -> list[bytes]:
    """Return a key for each row; equal rows have equal keys."""
    return [_key(row) for row in values.reshape(len(values), -1)]


def order_text(order: np.ndarray) -> str:
    """Return a permutation as text: a name, or the first indices."""
    count = len(order)
    if np.array_equal(order, np.arange(count)[::-1]):
        return "in reverse"
    shift = int(order[0])
    if np.array_equal(order, np.roll(np.arange(count), -shift)):
        return f"shifted by {min(shift, count - shift)}"
    if count % 2 == 0 and np.array_equal(order, np.arange(count).reshape(2, -1).T.ravel()):
        return "interleaved: the first half and the second in turn"
    if count % 2 == 0 and np.array_equal(order, np.arange(count).reshape(-1, 2).T.ravel()):
        return "the even ones before the odd ones"
    shown = ", ".join(map(str, order[:8]))
    return f"in the order {shown}{', ...' if count > 8 else ''}"


def _key(row: np.ndarray) -> bytes:
    # Rows that differ by rounding, or by the sign of zero, have the same key.
    if row.dtype.kind == "f":
        with np.errstate(all="ignore"):
            return np.asarray(row.astype(np.float32) + np.float32(0)).astype(ml_dtypes.bfloat16).tobytes()
    return row.tobytes()


# Largest share of a constant that the rounding of its mean leaves to a scale, in float64.
_NOTHING = 1e-9
# Largest distance of a scale from 1, and of an offset from 0, that rounding leaves.
_SAME = 1e-6
# Most values of a standard deviation: the factors of more are too near each other.
_MOST_DEVIATED = 300


# -- another scale -------------------------------------------------------------------------------------------------


def affine(reference: np.ndarray, candidate: np.ndarray) -> Iterator[Transform]:
    """Yield a scale, an offset, and both, solved for the whole tensor; then both for each channel."""
    factor, offset = _line(reference.ravel(), candidate.ravel())
    if not (math.isfinite(factor) and math.isfinite(offset)):
        return
    yield from _of_line(reference, candidate, factor, offset)
    for axis in dict.fromkeys((1, reference.ndim - 1)):
        if (
            0 < axis < reference.ndim
            and 1 < reference.shape[axis] <= 64
            and reference.size >= 16 * reference.shape[axis]
        ):
            moved = [np.moveaxis(side, axis, 0).reshape(side.shape[axis], -1) for side in (reference, candidate)]
            lines = np.array([_line(r, c) for r, c in zip(*moved)])
            if not lines[:, 0].any():
                continue  # constants, which follow from no reference
            shape = [-1 if k == axis else 1 for k in range(reference.ndim)]
            zeros = lines[:, 0] == 0.0
            ones = (np.abs(lines - [1.0, 0.0]) <= _SAME).all(1)
            if zeros.any() and (ones | (zeros & (np.abs(lines[:, 1]) <= _SAME))).all():
                where = first_few([str(k) for k in np.flatnonzero(zeros)], 4)
                text = f"the reference's, and zero at {where} of axis {axis}"
                make = partial(_line_of, factors=ones.astype(float).reshape(shape), offsets=0.0)
                yield Transform("zeroed", "zeros", text, make, int(zeros.sum()), 2, 3)
                continue
            factors, offsets = lines[:, 0].reshape(shape), lines[:, 1].reshape(shape)
            text = f"scaled and offset by channel (axis {axis}): {_lines_text(lines)}"
            make = partial(_line_of, factors=factors, offsets=offsets)
            yield Transform(
                "normalised",
                "scale and offset by channel",
                text,
                make,
                2 * len(lines),
                2,
                3,
                (*map(tuple, lines.tolist()),),
            )


def _line_of(values: np.ndarray, factors: np.ndarray, offsets: np.ndarray | float) -> np.ndarray:
    return np.asarray(values * factors + offsets)


def _of_line(reference: np.ndarray, candidate: np.ndarray, factor: float, offset: float) -> Iterator[Transform]:
    square = float(np.vdot(reference, reference))
    alone = float(np.vdot(reference, candidate)) / square if square else 0.0
    mean = float(np.mean(candidate - reference))
    scale = _written(alone)
    if abs(alone - 1) > 1e-6 and alone:
        yield Transform(
            "scaled", "a scale", f"{scale:.6g} times the reference's{_known(scale)}", lambda v: v * scale, 1,
            value=((scale, 0.0),), fix=_deviation(scale)[1],
        )  # fmt: skip
    if mean:
        off = _written(mean)
        yield Transform("offset", "an offset", f"the reference's {off:+.6g}", lambda v: v + off, 1, value=((1.0, off),))
    a, b = _written(factor), _written(offset)
    if a and b and abs(a - 1) > 1e-6:
        text = f"{a:.6g} times the reference's {b:+.6g}{_known(a)}"
        yield Transform("normalised", "scale and offset", text, lambda v: v * a + b, 2, 1, 2, ((a, b),))


def _line(reference: np.ndarray, candidate: np.ndarray) -> tuple[float, float]:
    """Return the scale and offset that fit the candidate to the reference by least squares."""
    r, c = reference - reference.mean(), candidate - candidate.mean()
    square = float(np.vdot(r, r))
    factor = float(np.vdot(r, c)) / square if square else 0.0
    if abs(factor) * np.linalg.norm(r) <= _NOTHING * np.linalg.norm(candidate):
        factor = 0.0
    return factor, float(candidate.mean() - factor * reference.mean())


def _written(value: float) -> float:
    """Return the round number within a relative 1e-6 of the value, or the value itself."""
    for digits in (1, 2, 3, 4):
        rounded = float(f"{value:.{digits}g}")
        if abs(rounded - value) <= 1e-6 * abs(value):
            return rounded
    for usual in (255.0, 1 / 255, 127.5, 1 / 127.5, 256.0, 1 / 256):
        if abs(value - usual) <= 1e-6 * usual:
            return usual
    return value


def round_limit(value: float) -> float:
    """Return the number of two digits within a relative 1e-6 of the value, or the value itself."""
    rounded = float(f"{value:.2g}")
    return rounded if abs(rounded - value) <= 1e-6 * abs(value) else value


def _known(factor: float) -> str:
    for value, text in ((255.0, " (0 to 255 against 0 to 1)"), (1 / 255, " (0 to 1 against 0 to 255)")):
        if abs(factor - value) <= 1e-6 * value:
            return text
    return _deviation(factor)[0]


def _deviation(factor: float) -> tuple[str, str]:
    """Return what a factor says of standard deviations of n values, divided by n on one side and by n - 1 on the other,
    and the call that fixes this; empty texts if it says nothing.
    """
    larger = max(factor, 1 / factor) ** 2 if factor > 0 else 1.0
    count = round(larger / (larger - 1)) if larger > 1 else 0
    if not 2 < count <= _MOST_DEVIATED or abs(larger * (count - 1) / count - 1) > 2 * _SAME:
        return "", ""
    is_biased = factor > 1  # what is divided by the smaller deviation
    root, divisors = (f"sqrt({count} / {count - 1})", ("n", "n - 1")) if is_biased else (
        f"sqrt({count - 1} / {count})", ("n - 1", "n"))  # fmt: skip
    text = f"the candidate's variance of {count} values divides by {divisors[0]}, the reference's by {divisors[1]}"
    text = f" ({root}: {text})"
    return text, f"std(..., ddof={int(is_biased)}), or unbiased={is_biased} of a tensor"


def _lines_text(lines: np.ndarray) -> str:
    for name, (mean, deviation) in _IMAGES.items():
        if len(lines) == len(mean):
            expected = np.stack([1 / np.array(deviation), -np.array(mean) / np.array(deviation)], axis=1)
            if np.allclose(lines, expected, rtol=1e-4, atol=1e-5):
                return f"normalised with {name} mean and deviation, which the reference's is not"
            back = np.stack([np.array(deviation), np.array(mean)], axis=1)
            if np.allclose(lines, back, rtol=1e-4, atol=1e-5):
                return f"not normalised with {name} mean and deviation, which the reference's is"
    shown = ", ".join(f"{a:.4g} x {b:+.4g}" for a, b in lines[:3])
    return f"{shown}{', ...' if len(lines) > 3 else ''}"


# -- a coarser grid ------------------------------------------------------------------------------------------------

# Share of values that need a type's last bit, at least.
_LAST_BIT = 0.2
_GRIDS = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def grid_of(values: np.ndarray) -> str:
    """Return the 16-bit dtype that holds all values exactly; empty if none does, or if there are too few values."""
    finite = values[np.isfinite(values) & (values != 0)]
    if len(np.unique(finite)) < 16:
        return ""
    with np.errstate(all="ignore"):
        for name, kind in _GRIDS.items():
            rounded = finite.astype(kind)
            # About half of all rounded values need the last bit of the type; whole numbers rarely do.
            last = float(np.mean(rounded.view(np.uint16) & 1))
            if last > _LAST_BIT and np.array_equal(rounded.astype(np.float64), finite.astype(np.float64)):
                return name
    return ""


def on_grid(values: np.ndarray, name: str) -> np.ndarray:
    """Return values rounded to a coarser dtype, as float64."""
    return np.asarray(values.astype(np.float32).astype(_GRIDS[name]).astype(np.float64))


# Roles of the inputs of a loss that have gradients.
_DERIVED = ("logits", "probabilities", "log_probabilities", "prediction")
# The step of a central difference in float64, relative to the largest input, and the tolerance of a divisor.
_STEP, _NEAR = 1e-4, 1e-3


def divisors(scene: DiffContext) -> Both[float] | None:
    """Return the divisor of each side's loss.

    `None` unless the first diff is the gradient of an input of a loss that this module can compute.
    """
    pair, sides = scene.diff.pair, scene.sides(scene.number)
    if pair.stage != "backward" or not pair.complete or sides is None:
        return None
    assert pair.reference is not None and pair.candidate is not None
    infos = scene.runs.map(lambda run: run.info)
    try:
        quotients = Both(
            _divisor(pair.reference, sides.reference, infos.reference),
            _divisor(pair.candidate, sides.candidate, infos.candidate),
        )
    except (PadiffError, FloatingPointError):
        return None
    if quotients.reference is None or quotients.candidate is None:
        return None
    return Both(quotients.reference, quotients.candidate)


def _divisor(gradient: Record, step: Step, info: RunInfo) -> float | None:
    """Return the computed gradient of the loss divided by the recorded one; `None` if not computable."""
    out = next((r for r in step.records if r.stage == "forward" and _place(r) == _place(gradient)), None)
    if out is None or out.source.sketched or gradient.source.sketched:
        return None
    settings = settings_at(info.settings, step.settings)
    for loss in recorded_losses(step.records):
        role = next((name for name in _DERIVED if name in loss.records), "")
        if not role or loss.records[role].source.sketched:
            continue
        x, g = np.asarray(out.value, np.float64), np.asarray(gradient.value, np.float64) / step.loss_scale
        calls = loss_settings(settings, loss.function)
        if len(calls) == 1 and x.size == g.size and np.array_equal(x.ravel(), np.ravel(loss.records[role].value)):
            return _ratio(loss, role, g.ravel(), calls[0], info.framework)
    return None


def _ratio(loss: RecordedLoss, role: str, g: np.ndarray, settings: dict[str, object], framework: str) -> float | None:
    inputs = loss.inputs()
    x, norm = np.asarray(inputs[role], np.float64), float(np.linalg.norm(g))
    if not norm or not np.isfinite(norm):
        return None
    width = _STEP * max(float(np.abs(x).max()), 1.0)
    moved = (g / norm * width).reshape(x.shape)
    ends = [loss_of(loss.function, {**inputs, role: x + way * moved}, settings, framework) for way in (1, -1)]
    if ends[0] is None or ends[1] is None or ends[0].size != 1:
        return None
    slope = float(ends[0].sum() - ends[1].sum()) / (2 * width)
    return slope / norm if np.isfinite(slope) and slope > 0 else None


def _place(record: Record) -> tuple[str, str, int]:
    return record.layer, record.slot, record.call


def division_text(count: int, found: Both[float] | None) -> str:
    """Return text on the divisors of both sides if these are different powers of ``count``; else empty text."""
    if found is None:
        return ""
    powers = found.map(lambda divisor: next((k for k in range(4) if abs(divisor / count**k - 1) <= _NEAR), None))
    if None in (powers.reference, powers.candidate) or powers.reference == powers.candidate:
        return ""
    texts = powers.map(lambda power: _said(count, int(power or 0)))
    return f"the reference divides {texts.reference}, the candidate {texts.candidate}"


def _said(count: int, power: int) -> str:
    if power < 2:
        return f"by {count}" if power else "not at all"
    return f"by {count**power} = {' times '.join([str(count)] * power)}"


#: Largest relative difference of a ratio from a number of the run; ratios are measured more exactly than this.
NEAR = 2e-5
# Usual loss scales (powers of two), and the one from which on a ratio can only be a loss scale.
_SCALES, _SURELY = tuple(2.0**k for k in range(7, 25)), 1024.0


@dataclass(frozen=True)
class Fact:
    """A number of the run that a ratio may be equal to.

    Attributes:
        value: the number.
        kind: machine-readable name of the cause for such a ratio.
        times: explanation of a candidate that is the reference times this number.
        share: explanation of a candidate that is the reference divided by this number; empty if it explains none.
    """

    value: float
    kind: str
    times: str
    share: str


@dataclass(frozen=True)
class Recognised:
    """A ratio that is equal to a number of the run.

    Attributes:
        ratio: the exact number.
        kind: machine-readable name of the cause.
        text: the explanation of the ratio.
        sure: True if the number has no other likely meaning.
    """

    ratio: float
    kind: str
    text: str
    sure: bool = True


def facts(scene: DiffContext) -> list[Fact]:
    """Return the numbers of the run that gradients and losses may be multiplied by."""
    numbers: list[Fact] = []
    sides = scene.sides(scene.number)
    if sides is not None:
        # Several calls that one backward learns from are no micro-batches.
        several = sorted({step.micro_batches for step in sides if step.trace.backwards != 1} - {0, 1})
        divided = divisors(scene) if several else None
        for count in several:
            division = division_text(count, divided)
            numbers.append(
                Fact(
                    count,
                    "accumulation",
                    f"{count} micro-batches are accumulated: "
                    + (division or "the candidate does not divide by their number, or the reference does so twice"),
                    f"{count} micro-batches are accumulated: "
                    + (division or "the candidate divides by their number, the reference not, or once less"),
                )
            )
            square = f"{count} micro-batches are accumulated, and {count * count} is {count} times {count}"
            twice = "divides by their number twice, the"
            numbers.append(
                Fact(
                    count * count,
                    "accumulation",
                    f"{square}: {division or f'the reference {twice} candidate not at all'}",
                    f"{square}: {division or f'the candidate {twice} reference not at all'}",
                )
            )
        # A host that divides gradients by the count of micro-batches after backward declares the count as loss scale.
        counts = {float(step.micro_batches) for step in sides}
        for scale in sorted({step.loss_scale for step in sides} - {1.0} - counts):
            text = f"it is the loss scale, {scale:g}"
            numbers.append(Fact(scale, "loss_scale", f"{text}: not undone in the candidate", f"{text}: undone twice"))
        for size in sorted({r.shape[0] for step in sides for r in step.records if r.stage == "input" and r.shape}):
            if size > 1 and _may_be_off(scene, size):
                numbers.append(
                    Fact(
                        size,
                        "loss_reduction",
                        f"the batch has {size} samples: the candidate's loss is their sum, the reference's their mean",
                        f"the batch has {size} samples: the candidate's loss is their mean, the reference's their sum",
                    )
                )
        for reference, candidate in product(*(_loss_divisors(step) for step in sides)):
            if reference != candidate:
                text = f"the loop divides its loss by {candidate:g}, the reference's by {reference:g}"
                numbers.append(Fact(reference / candidate, "loss_divisor", text, ""))
    for size in sorted({run.info.world_size for run in scene.runs} - {1}):
        text = f"{size} processes train"
        numbers.append(Fact(size, "world_size", f"{text}: summed over, not averaged", f"{text}: averaged, not summed"))
    return numbers


def _loss_divisors(step: Step) -> set[float]:
    """Return the numbers, themselves computed by the loop, by which the loop divides numbers."""
    operands = [
        [step.trace.tensors[operand.tensor] for operand in call.inputs]
        for call in step.trace.calls
        if call.layer == LOOP and call.function == "div" and len(call.inputs) == 2
    ]
    small = [pair for pair in operands if all(math.prod(tensor.shape) == 1 for tensor in pair)]
    sources = [pair[1].source for pair in small if pair[1].source is not None and not pair[1].source.sketched]
    return {value for source in sources if (value := float(np.ravel(source.read())[0])) > 0}


# Relative difference of the ratio of two losses from a factor.
_OFF = 1e-2


def _may_be_off(scene: DiffContext, factor: float) -> bool:
    """Return True unless recorded losses agree, or none of them is a factor off, in either direction."""
    losses = [diff for diff in scene.step if diff.pair.stage == "loss" and diff.compared]
    figures = [diff.figures for diff in losses if diff.pair.anchor.slot == "loss"]
    norms = [(each.reference_l2, each.candidate_l2) for each in figures if each is not None]
    is_off = not norms or any(
        math.isclose(one, factor * other, rel_tol=_OFF) for pair in norms for one, other in (pair, pair[::-1])
    )
    return is_off and not (losses and all(diff.passed for diff in losses))


def recognised(ratio: float, known: Sequence[Fact], near: float = NEAR) -> Recognised | None:
    """Return the number of the run that a ratio is equal to, or `None`.

    Args:
        known: the numbers of the run.
        near: largest relative difference of the ratio from the number.
    """
    matches: list[Recognised] = []
    for fact in known:
        for value, text in ((fact.value, fact.times), (1 / fact.value, fact.share)):
            if text and _is(ratio, value, near):
                matches.append(Recognised(value, fact.kind, f"{_share(fact.value, value)} = {text}"))
    if not matches:
        for scale in _SCALES:
            if _is(ratio, scale, near) or _is(ratio, 1 / scale, near):
                how = "not undone in the candidate" if ratio > 1 else "not undone in the reference"
                return Recognised(ratio, "loss_scale", f"{ratio:.6g} = a loss scale, {how}", scale >= _SURELY)
        if _is(ratio, -1.0, near):
            return Recognised(-1.0, "sign", "-1: the sign is flipped")
        return None
    # Divisors that were recorded explain a ratio that is by chance the number of samples.
    matches = [match for match in matches if match.kind == "loss_divisor"] or matches
    kinds = {match.kind for match in matches}
    text = "; or ".join(dict.fromkeys(match.text for match in matches))
    # Two of anything, such as terms, views or halves of a square, make a factor of two beside a batch of two.
    sure = kinds != {"loss_reduction"} or matches[0].ratio not in (0.5, 2.0)
    return Recognised(matches[0].ratio, matches[0].kind, text, len(kinds) == 1 and sure)


def counts(scene: DiffContext) -> frozenset[int]:
    """Return counts of the run: of samples, of labels, and of labels that are not ignored."""
    sizes: set[int] = set()
    for step in scene.sides(scene.number) or ():
        for record in step.records:
            if record.stage == "input" and record.shape:
                sizes.add(record.shape[0])
            elif is_of_loss(record) and loss_role(record.slot) == "labels" and not record.source.sketched:
                labels = record.value
                sizes |= {labels.size, int((labels >= 0).sum())}
    return frozenset(sizes - {0, 1})


def fraction(ratio: float, known: Collection[int]) -> str:
    """Return a ratio as text, with the fraction of two counts that equals the ratio, if any: ``0.8333 = 5 / 6``."""
    for below in sorted(known):
        above = round(ratio * below)
        if above in known and above != below and _is(ratio, above / below):
            return f"{ratio:.5g} = {above} / {below}"
    return f"{ratio:.5g}"


def ratio_of(tensors: Iterable[Prediction]) -> float | None:
    """Return the factor from the tensors without fault to the recorded ones, by least squares; `None` if undefined."""
    square = product = 0.0
    for tensor in tensors:
        noise = np.asarray(tensor.noise)
        square += float(np.sum(np.square(tensor.without / noise)))
        product += float(np.sum(tensor.without * tensor.actual / np.square(noise)))
    return product / square if square > 0 and math.isfinite(product) else None


def scaled(tensors: Sequence[Prediction], ratio: float) -> Iterator[Prediction]:
    """Yield the predictions that all tensors are multiplied by a ratio."""
    for tensor in tensors:
        # Numbers that are far smaller than the reference's have smaller rounding errors.
        noise = tensor.noise * min(1.0, abs(ratio))
        yield Prediction(tensor.site, tensor.actual, ratio * tensor.without, tensor.without, noise, tensor.limit)


def ratio_hypotheses(
    tensors: Sequence[Prediction],
    what: str,
    kind: str,
    known: Sequence[Fact],
    counted: Collection[int] = (),
    near: float = NEAR,
) -> Iterator[Hypothesis]:
    """Yield the hypothesis that all tensors are multiplied by the same number, named if it is a number of the run.

    Args:
        tensors: tensors of the step; `Prediction.without` holds the reference's.
        what: plural noun for the tensors.
        kind: kind of the cause if the ratio is no number of the run.
        known: the numbers of the run.
        counted: the counts of the run.
        near: largest relative difference of the ratio from a number of the run; larger for coarse dtypes.
    """
    ratio = ratio_of(tensors)
    if ratio is None or ratio == 0 or abs(ratio - 1) < 1e-4:
        return
    number = recognised(ratio, known, near)
    if number is not None:
        yield Hypothesis(
            number.kind,
            "a number of the run",
            f"{what} are {number.ratio:.5g} times the reference's: {number.text}",
            lambda: scaled(tensors, number.ratio),
            what,
            tried=2 * len(known) + 2 * len(_SCALES),
            telling=number.sure,
            values=Both(1.0, float(number.ratio)),
        )
    else:
        text, times = f"{what} are {fraction(ratio, counted)} times the reference's", Both(1.0, float(ratio))
        yield Hypothesis(
            kind, "a constant ratio", text, lambda: scaled(tensors, ratio), what, free=1, telling=False, values=times
        )


def _is(ratio: float, value: float, near: float = NEAR) -> bool:
    return abs(ratio - value) <= near * abs(value)


def _share(fact: float, value: float) -> str:
    return f"{fact:g}" if value == fact else f"{value:.5g} = 1 / {fact:g}"
