"""Hypotheses on weights that no optimizer moves: at the start, running statistics, rows of buffers, writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations

import numpy as np

from padiff.compare.diagnose.hypotheses import transforms
from padiff.compare.diagnose.hypotheses.averages import averages
from padiff.compare.diagnose.hypotheses.diff_context import (
    DiffContext,
    PairPlace,
    alike,
    is_elements,
    place_of,
    rounding_of,
    whole_of,
)
from padiff.compare.diagnose.hypotheses.hypothesis import NEAR, WORST, Hypothesis, Prediction
from padiff.compare.judge.limits import is_running
from padiff.frameworks.catalog import LAYERS
from padiff.model import equivalents
from padiff.records import ROOT, SIDES, Both, Cause, Diff, Pair
from padiff.system.terminal import first_few

# Most steps before this one whose weights are compared, and most elements of each weight.
_BEFORE, _ELEMENTS = 8, 1024
# Most steps whose weights a loop may mix, and least share, or difference of shares, that counts.
_MIXED, _SHARE = 24, 2e-3
# Rounding error of the sum of a weight and its update, in rounding units.
_ADDED = 4.0


@dataclass(frozen=True)
class _Weight:
    """A parameter's weight in consecutive steps.

    Attributes:
        now: the weights of both sides in the step of the first diff.
        before: the weights of both sides in the steps before, the latest first.
        expected: the sum of the weights and updates of the step before.
        elements: True for elements, False for projections.
    """

    place: PairPlace
    now: Both[np.ndarray]
    before: tuple[Both[np.ndarray], ...]
    expected: Both[np.ndarray]
    noise: float
    elements: bool
    limit: float


def write_hypotheses(scene: DiffContext) -> Iterator[Hypothesis]:
    """Yield hypotheses on a first diff in a weight of a later step, if the step before is recorded."""
    if scene.number - 1 not in scene.numbers:
        return
    steps = scene.earlier[::-1][:_BEFORE]
    weights = list(_weights(scene, steps))
    if not weights:
        return
    for side in ("candidate", "reference"):
        if not _left_alone(weights, side):
            yield from _changed(scene, weights, steps, side)
    if not any(_left_alone(weights, side) for side in SIDES):
        yield from _mixed_otherwise(scene)


def unrecorded(scene: DiffContext) -> Iterator[Cause]:
    """Yield the cause of a first diff in a weight that no hypothesis explains: a gap in the recorded steps, or which
    elements each side's loop writes.
    """
    last = max(scene.earlier, default=None)
    if last is None:
        return
    if last == scene.number - 1:
        yield from _written_elements(scene)
        return
    gap = f"{last + 1} to {scene.number - 1}" if last + 2 < scene.number else str(last + 1)
    yield Cause(
        "unknown",
        f"unknown; the weights differ by more than the update of step {last} explains: the cause is in step {gap}, of "
        "which nothing is recorded: record every step from there on",
    )


def _written_elements(scene: DiffContext) -> Iterator[Cause]:
    """Yield the cause that the loops write elements of the weight that differs, besides their optimizers."""
    place = place_of(scene.diff.pair)
    weight = next((each for each in _weights(scene, [scene.number - 1]) if each.place == place), None)
    if weight is None or not weight.elements:
        return
    written = weight.now.zip(weight.expected).map(lambda side: np.abs(side[0] - side[1]) > WORST * weight.noise)
    counts = written.map(lambda side: int(np.count_nonzero(side)))
    if not any(counts):
        return
    record, size = scene.diff.pair.candidate if counts.candidate else scene.diff.pair.reference, written.reference.size
    if record is None:
        return
    name = record.slot if record.layer == ROOT else record.layer
    if not all(counts):
        side, count = ("candidate", counts.candidate) if counts.candidate else ("reference", counts.reference)
        text = (
            f"between steps {scene.number - 1} and {scene.number} only the {side}'s loop writes `{name}`, besides its "
            f"optimizer: {count} of {size} elements"
        )
    else:
        text = (
            f"between steps {scene.number - 1} and {scene.number} both loops write `{name}`, besides their optimizers, "
            f"and write other values: the candidate {counts.candidate} of {size} elements, the reference "
            f"{counts.reference}"
        )
    yield Cause("weights_written", text)


def _weights(scene: DiffContext, steps: Sequence[int]) -> Iterator[_Weight]:
    for place, update in scene.pairs(scene.number - 1, "update").items():
        pair = scene.pairs(scene.number, "weight").get(place)
        rows = [scene.pairs(number, "weight").get(place) for number in steps]
        values = alike((pair, update, *rows), _ELEMENTS)
        now, added, *before = values
        earlier = [sides for sides in before if sides is not None]
        if pair is None or now is None or added is None or before[0] is None or len(earlier) != len(before):
            continue
        if any(sides.reference.shape != now.reference.shape for sides in (added, *earlier)):
            continue
        expected = earlier[0].zip(added).map(lambda side: np.asarray(side[0] + side[1]))
        root = max(float(np.sqrt(np.mean(np.square(side)))) for side in now)
        noise = max(_ADDED * rounding_of(pair) * root, 1e-300)
        yield _Weight(place, now, tuple(earlier), expected, noise, is_elements(pair), scene.limit(pair))


# Least number of elements at a limit, and their least share.
_AT_LIMIT, _SHARE_AT_LIMIT = 3, 0.02


def clamped_within_step(scene: DiffContext) -> Iterator[Cause]:
    """Yield the cause of other weights in a later call of a step that the loops clamp them to other limits in between.

    The weights of the next step show the limits: many elements have the largest absolute value.
    """
    anchor = scene.diff.pair.anchor
    places = scene.pairs(scene.number + 1, "weight") if anchor.call and anchor.stage == "forward" else {}
    earlier = scene.pairs(scene.number, "weight")
    for place in (place for place in places if place in earlier):
        after, before = (whole_of(pairs[place]) for pairs in (places, earlier))
        if place[0] != anchor.layer or after is None or before is None:
            continue
        limits = after.zip(before).map(lambda side: _limit_of(*side))
        if limits.reference == limits.candidate:
            continue
        texts = limits.map(lambda limit: f"{limit:.6g}" if limit else "no limit")
        text = (
            f"the loops clamp the weights between the calls: the candidate to {texts.candidate}, the reference to "
            f"{texts.reference}"
        )
        yield Cause(
            "weights_clamped",
            text,
            all(limits),
            "many weights of the next step have these largest values",
        )
        return


def _limit_of(values: np.ndarray, before: np.ndarray) -> float:
    """Return the largest absolute value if many elements have it that began apart; else 0.

    Elements that began equal, such as zeros, stay equal where an optimizer takes the sign of a gradient.
    """
    sizes = np.abs(values)
    largest = float(sizes.max(initial=0.0))
    count = len(np.unique(np.abs(before[sizes == largest])))
    return transforms.round_limit(largest) if count >= max(_AT_LIMIT, _SHARE_AT_LIMIT * sizes.size) else 0.0


def _left_alone(weights: Sequence[_Weight], side: str) -> bool:
    """Return True if a side's weights are the sums of the weights and updates of the step before."""
    return all(
        np.sqrt(np.mean(np.square(getattr(weight.now, side) - getattr(weight.expected, side)))) <= 3 * weight.noise
        for weight in weights
    )


def _changed(scene: DiffContext, weights: Sequence[_Weight], steps: Sequence[int], side: str) -> Iterator[Hypothesis]:
    """Yield hypotheses on the origin of weights that differ from the sum of the side's weights and updates."""
    head = (
        f"between steps {scene.number - 1} and {scene.number} something else than the {side}'s optimizer changed its "
        "weights: they are"
    )
    for k, number in enumerate(steps):
        yield Hypothesis(
            "weights_reloaded",
            f"weights of step {number}",
            f"{head} those of the start of step {number} again (a checkpoint was loaded, or the step undone)",
            partial(_predicted, weights, side, partial(_earlier, side=side, back=k)),
            "weights",
            tried=len(steps),
        )
    with_elements = [weight for weight in weights if weight.elements]
    largest = max((float(np.max(np.abs(getattr(weight.now, side)))) for weight in with_elements), default=0.0)
    if largest:
        limit = transforms.round_limit(largest)
        yield Hypothesis(
            "weights_clamped",
            "clamped weights",
            f"{head} clamped to {limit:.6g}",
            partial(_predicted, with_elements, side, partial(_clamped, side=side, limit=limit)),
            "weights",
            free=1,
        )
    zeros = Both(*([_zeros(weight, each) for weight in with_elements] for each in SIDES))
    if any((first != second).any() for first, second in zip(*zeros)):
        counts = zeros.map(lambda side: sum(int(each.sum()) for each in side))
        yield Hypothesis(
            "weights_masked",
            "masked weights",
            f"between steps {scene.number - 1} and {scene.number}, after the optimizer's step, the candidate sets "
            f"{counts.candidate} elements of its weights to zero, the reference {counts.reference} (a mask of weights)",
            partial(_predicted, with_elements, side, partial(_masked, side=side)),
            "weights",
        )
    for count in range(len(steps) + 1):
        parts = _fitted(weights, side, count)
        if parts is None:
            continue
        shares = ", ".join(f"{part:.3g}" for part in parts)
        many = "the step before" if count == 1 else f"the {count} steps before"
        if count:
            text = f"{head} an average of what they would be and of the weights of {many} (shares {shares})"
        else:
            text = f"{head} {float(parts[0]):.6g} times what its updates come to"
        yield Hypothesis(
            "weights_averaged" if count else "weights_scaled",
            "averaged weights" if count else "scaled weights",
            text,
            partial(_predicted, weights, side, partial(_mixed, side=side, parts=parts)),
            "weights",
            free=count + 1,
            tried=len(steps) + 1,
            changes=1 + count,
        )


@dataclass(frozen=True)
class _Mixture:
    """One side's weights as a sum of its earlier weights, equal for all parameters.

    Attributes:
        columns: the earlier weights, one column each, in units of the rounding noise.
        now: the weights, in the same unit.
        shares: the factor of each column.
    """

    columns: np.ndarray
    now: np.ndarray
    shares: np.ndarray


def _mixed_otherwise(scene: DiffContext) -> Iterator[Hypothesis]:
    """Yield the hypothesis that both loops write sums of earlier weights, with other shares: averages of clients, a
    momentum of their mean.
    """
    steps = scene.earlier[-_MIXED:]
    if steps != [*range(scene.number - len(steps), scene.number)]:
        return
    rows: list[Both[np.ndarray]] = []
    nows: list[Both[np.ndarray]] = []
    noises: list[np.ndarray] = []
    for place in scene.pairs(scene.number - 1, "update"):
        pair = scene.pairs(scene.number, "weight").get(place)
        starts = [scene.pairs(step, "weight").get(place) for step in steps]
        updates = [scene.pairs(step, "update").get(place) for step in steps]
        now, *values = alike((pair, *starts, *updates), _ELEMENTS)
        known = [each for each in values if each is not None]
        if pair is None or now is None or len(known) != len(values):
            continue
        if any(each.reference.shape != now.reference.shape for each in known):
            continue
        before, moves = known[: len(steps)], known[len(steps) :]
        ends = [Both(*(w + u for w, u in zip(start, move))) for start, move in zip(before, moves)]
        columns = [each for both in zip(before, ends) for each in both]
        root = max(float(np.sqrt(np.mean(np.square(side)))) for side in now)
        noise = max(_ADDED * rounding_of(pair) * root, 1e-300)
        # What a mask holds at zero is no sum.
        unmasked = (now.reference != 0) | (now.candidate != 0)
        rows.append(Both(*(np.stack([[*each][k] for each in columns], axis=1)[unmasked] / noise for k in range(2))))
        nows.append(Both(now.reference[unmasked] / noise, now.candidate[unmasked] / noise))
        noises.append(np.full(int(unmasked.sum()), noise))
    if not rows:
        return
    names = [name for step in steps for name in (f"before step {step}", f"after step {step}")]
    tables = Both(*(np.concatenate([[*each][k] for each in rows]) for k in range(2)))
    distinct: list[int] = []
    for k in range(len(names)):
        if not any(np.abs(side[:, k] - side[:, j]).max() <= 2 * WORST for j in distinct for side in tables):
            distinct.append(k)
    now_of = Both(*(np.concatenate([[*each][k] for each in nows]) for k in range(2)))
    sides = tables.zip(now_of).map(lambda side: _as_mixture(side[0][:, distinct], side[1]))
    reference, candidate = sides
    if reference is None or candidate is None:
        return
    differ = np.flatnonzero(np.abs(candidate.shares - reference.shares) > _SHARE)
    if not differ.size:
        return
    parts = [
        f"{candidate.shares[k]:.3g} of those {names[distinct[k]]} for the reference's {reference.shares[k]:.3g}"
        for k in differ
    ]
    text = (
        f"between steps {scene.number - 1} and {scene.number} both loops write sums of earlier weights, the candidate "
        f"{first_few(parts, 4)}"
    )
    units = np.concatenate(noises)

    def predict() -> Iterator[Prediction]:
        predicted, without = (candidate.columns @ side.shares for side in (candidate, reference))
        yield Prediction("the weights", candidate.now * units, predicted * units, without * units, units)

    free = int(np.count_nonzero(candidate.shares))
    yield Hypothesis("weights_mixed", "sums of earlier weights", text, predict, "weights", free=free)


def _as_mixture(columns: np.ndarray, now: np.ndarray) -> _Mixture | None:
    """Return weights as a sum of some columns; `None` if no sum gives them to rounding."""
    used = [*range(columns.shape[1])]
    for _ in range(3):  # without the columns that have no share
        if not used or len(now) < 4 * len(used):
            return None
        shares = np.linalg.lstsq(columns[:, used], now, rcond=1e-12)[0]
        if (np.abs(shares) > _SHARE).all():
            break
        used = [k for k, share in zip(used, shares) if abs(share) > _SHARE]
    else:
        return None
    if not np.isfinite(shares).all() or np.sqrt(np.mean(np.square(columns[:, used] @ shares - now))) > NEAR:
        return None
    whole = np.zeros(columns.shape[1])
    whole[used] = shares
    return _Mixture(columns, now, whole)


def _predicted(weights: Sequence[_Weight], side: str, make: Callable[[_Weight], np.ndarray]) -> Iterator[Prediction]:
    for weight in weights:
        now, expected = getattr(weight.now, side), getattr(weight.expected, side)
        yield Prediction(
            f"{weight.place[0]}/weight/{weight.place[1]}", now, make(weight), expected, weight.noise, weight.limit
        )


def _earlier(weight: _Weight, side: str, back: int) -> np.ndarray:
    return np.asarray(getattr(weight.before[back], side))


def _clamped(weight: _Weight, side: str, limit: float) -> np.ndarray:
    return np.asarray(np.clip(getattr(weight.expected, side), -limit, limit))


def _zeros(weight: _Weight, side: str) -> np.ndarray:
    """Return a mask of the elements that a side sets to zero, which its optimizer did not."""
    now, expected = getattr(weight.now, side), getattr(weight.expected, side)
    return np.asarray((now == 0) & (np.abs(expected) > WORST * weight.noise))


def _masked(weight: _Weight, side: str) -> np.ndarray:
    return np.asarray(np.where(_zeros(weight, side), 0.0, getattr(weight.expected, side)))


def _columns(weight: _Weight, side: str, count: int) -> list[np.ndarray]:
    """Return the expected weights, and the weights of the last ``count`` steps before."""
    return [getattr(weight.expected, side), *(getattr(before, side) for before in weight.before[:count])]


def _mixed(weight: _Weight, side: str, parts: np.ndarray) -> np.ndarray:
    return np.asarray(np.stack(_columns(weight, side, len(parts) - 1), axis=1) @ parts)


def _fitted(weights: Sequence[_Weight], side: str, count: int) -> np.ndarray | None:
    """Return the factors of `_columns`, equal for all parameters, that fit a side's weights; `None` if not finite."""
    rows = [np.stack(_columns(weight, side, count), axis=1) / weight.noise for weight in weights]
    target = np.concatenate([getattr(weight.now, side) / weight.noise for weight in weights])
    factors = np.linalg.lstsq(np.concatenate(rows), target, rcond=1e-10)[0]
    return np.asarray(factors) if np.isfinite(factors).all() else None


# Largest distance from 1 of a factor that is none.
_SAME = 1e-3
# Rounding error of a written row, in rounding units: a layer's output may differ so much.
_ROUNDINGS = 32.0


@dataclass(frozen=True)
class _Written:
    """What one side wrote into a buffer in a step.

    Attributes:
        rows: the rows that changed.
        columns: True if the buffer holds a sample in each column.
        source: the layer output in these rows; `None` if it is not recorded.
    """

    rows: np.ndarray
    columns: bool = False
    source: PairPlace | None = None


def row_hypotheses(scene: DiffContext) -> Iterator[Hypothesis]:
    """Yield hypotheses on a first diff in a buffer of which both steps, and the outputs in between, are full."""
    place = place_of(scene.diff.pair)
    before = scene.pairs(scene.number - 1, "weight").get(place)
    trained = scene.pairs(scene.number - 1, "update")
    if before is None or place in trained or is_running(place[1]):
        return
    yield from _scaled(scene, before)
    yield from _shares(scene, place)
    now, was = whole_of(scene.diff.pair), whole_of(before)
    if now is None or was is None or now.reference.ndim != 2 or {side.shape for side in was} != {now.reference.shape}:
        return
    outputs = scene.pairs(scene.number - 1, "forward")
    values = {where: whole for where, pair in outputs.items() if (whole := whole_of(pair)) is not None}
    noise = max(_ROUNDINGS * rounding_of(scene.diff.pair) * float(np.sqrt(np.mean(np.square(now.candidate)))), 1e-300)
    elsewhere = _elsewhere(scene, now, was, noise)
    if elsewhere is not None:
        yield elsewhere
        return
    sides = Both(*(_written(k, now, was, values, noise) for k in range(2)))
    text = _text(scene, sides)
    if text is None:
        return
    kind, sentence = text

    def predict() -> Iterator[Prediction]:
        predicted = np.array(was.candidate)
        written = sides.candidate
        if written.source is not None:
            rows = values[written.source].candidate.reshape(len(written.rows), -1)
            if written.columns:
                predicted[:, written.rows] = rows.T
            else:
                predicted[written.rows] = rows
        yield Prediction(scene.diff.pair.anchor.site, now.candidate, predicted, now.reference, noise)

    yield Hypothesis(kind, "written rows", sentence, predict, "rows", tried=len(values))


def _elsewhere(scene: DiffContext, now: Both[np.ndarray], was: Both[np.ndarray], noise: float) -> Hypothesis | None:
    """Return the hypothesis that both sides write the same rows or columns at other places of a buffer."""
    slot = scene.diff.pair.anchor.slot
    for what in ("rows", "columns"):
        tables, before = (both if what == "rows" else both.map(np.transpose) for both in (now, was))
        places = tables.zip(before).map(lambda side: np.flatnonzero((side[0] != side[1]).any(1)))
        (first, second), written = places, tables.zip(places).map(lambda side: side[0][side[1]])
        if not 0 < len(first) == len(second) < len(tables.reference) or np.array_equal(first, second):
            continue
        if np.abs(written.reference - written.candidate).max() > noise:
            continue

        def predict(
            old: np.ndarray = before.candidate,
            second: np.ndarray = second,
            rows: np.ndarray = written.reference,
            what: str = what,
        ) -> Iterator[Prediction]:
            made = np.array(old)
            made[second] = rows
            yield Prediction(
                scene.diff.pair.anchor.site, now.candidate, made if what == "rows" else made.T, now.reference, noise
            )

        text = f"the candidate writes {what} {_range(second)} of `{slot}`, the reference {what} {_range(first)}"
        return Hypothesis("rows_place", "written rows", text, predict, "rows", tried=2)
    return None


def _scaled(scene: DiffContext, before: Pair) -> Iterator[Hypothesis]:
    """Yield hypotheses that the loop moves a buffer further, or that it writes a multiple of the reference's rows."""
    was, now = alike((before, scene.diff.pair))
    if was is None or now is None or was.reference.shape != now.reference.shape:
        return
    slot, site = scene.diff.pair.anchor.slot, scene.diff.pair.anchor.site
    noise = max(_ROUNDINGS * rounding_of(scene.diff.pair) * float(np.sqrt(np.mean(np.square(now.candidate)))), 1e-300)
    moves = now.zip(was).map(lambda side: side[0] - side[1])
    # What changed is a sum of old and new values (an average), or the new values alone (some rows of a queue).
    changed = moves.reference != 0
    forms = {"buffer_share": (was.candidate, moves)}
    if not changed.all():
        written = now.map(lambda side: np.where(changed, side, 0.0))
        forms["rows_scaled"] = np.where(changed, 0.0, was.candidate), written
    for kind, (base, own) in forms.items():
        square = float(np.vdot(own.reference, own.reference))
        factor = float(np.vdot(own.reference, own.candidate)) / square if square else 1.0
        if not np.isfinite(factor) or abs(factor - 1) <= _SAME or not factor:
            continue
        text = f"`{slot}` moves {factor:.4g} times as far in a step as the reference's: the share of an average"
        if kind == "rows_scaled":
            text = (
                f"what the candidate writes into `{slot}` is {factor:.4g} times what the reference writes: a scale, or "
                "no normalisation"
            )

        def predict(base: np.ndarray = base, move: np.ndarray = factor * own.reference) -> Iterator[Prediction]:
            yield Prediction(site, now.candidate, base + move, now.reference, noise)

        # After the causes that say why: these only say how far.
        yield Hypothesis(kind, "a share", text, predict, "elements", 1, changes=2, telling=False)


def _shares(scene: DiffContext, place: PairPlace) -> Iterator[Hypothesis]:
    """Yield hypotheses that a buffer beside the first diff is an average of another share: that one is made from it.

    Entries of a codebook follow the rows that choose them: their sum moves alike whatever the rows choose.
    """
    trained, earlier = scene.pairs(scene.number - 1, "update"), scene.pairs(scene.number - 1, "weight")
    for other, pair in scene.pairs(scene.number, "weight").items():
        before = earlier.get(other)
        if other[0] != place[0] or other in trained or is_running(other[1]) or before is None:
            continue
        now, was = whole_of(pair), whole_of(before)
        if now is None or was is None or now.reference.ndim != 2 or now.reference.shape != was.reference.shape:
            continue
        sizes = [np.abs(side).sum(0) for side in (*now, *was)]
        noise = np.maximum(_ROUNDINGS * rounding_of(pair) * np.maximum.reduce(sizes), 1e-300)
        sums, old = (sides.map(lambda side: side.sum(0)) for sides in (now, was))
        moves = sums.zip(old).map(lambda side: side[0] - side[1])
        square = float(np.vdot(moves.reference, moves.reference))
        factor = float(np.vdot(moves.reference, moves.candidate)) / square if square else 1.0
        if not np.isfinite(factor) or abs(factor - 1) <= _SAME or not factor:
            continue
        text = (
            f"the sum of the entries of `{other[1]}` moves {factor:.4g} times as far in a step as the reference's, "
            "whatever is chosen: the share of an average"
        )

        def predict(
            site: str = pair.anchor.site,
            sums: Both[np.ndarray] = sums,
            made: np.ndarray = old.candidate + factor * moves.reference,
            noise: np.ndarray = noise,
        ) -> Iterator[Prediction]:
            yield Prediction(site, sums.candidate, made, sums.reference, noise)

        yield Hypothesis("buffer_share", "a share", text, predict, "sums", 1, changes=2, telling=False)


def _written(
    side: int, now: Both[np.ndarray], was: Both[np.ndarray], values: Mapping[PairPlace, Both[np.ndarray]], noise: float
) -> _Written:
    """Return the rows, or the columns, of a buffer that a side replaced by a layer's output."""
    current, earlier = [*now][side], [*was][side]
    changed = _Written(np.flatnonzero((current != earlier).any(1)))
    for columns in (False, True):
        table, old = (current.T, earlier.T) if columns else (current, earlier)
        rows = np.flatnonzero((table != old).any(1))
        for place, whole in values.items():
            output = [*whole][side]
            fits = len(rows) and output.size == rows.size * table.shape[1]
            if fits and np.abs(output.reshape(len(rows), -1) - table[rows]).max() <= noise:
                return _Written(rows, columns, place)
    return changed


def _text(scene: DiffContext, sides: Both[_Written]) -> tuple[str, str] | None:
    """Return the kind and the sentence of a difference; `None` if a side's output is not known, or all is equal."""
    slot = scene.diff.pair.anchor.slot
    reference, candidate = sides
    for written, others, side, other in ((candidate, reference, *SIDES.swapped()), (reference, candidate, *SIDES)):
        if not len(written.rows) and others.source is not None:
            return "rows_missing", f"the {side} writes nothing into `{slot}` in this step, the {other} does"
    if reference.source is None or candidate.source is None:
        return None
    names = {layers.reference.path: layers.candidate.path for layers in scene.alignment.pairs}
    layers = reference.source[0], names.get(candidate.source[0], candidate.source[0])
    if reference.source != candidate.source:
        text = f"the candidate writes what `{layers[1]}` gives into `{slot}`, the reference what `{layers[0]}` gives"
        return "rows_source", text
    if not np.array_equal(reference.rows, candidate.rows):
        what = "columns" if reference.columns else "rows"
        texts = [_range(side.rows) for side in sides]
        return "rows_place", f"the candidate writes {what} {texts[1]} of `{slot}`, the reference {what} {texts[0]}"
    return None


def _range(rows: np.ndarray) -> str:
    """Return row numbers as text."""
    if len(rows) > 1 and np.array_equal(rows, np.arange(rows[0], rows[-1] + 1)):
        return f"{rows[0]} to {rows[-1]}"
    return ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")


# Largest relative difference of a share from a round number.
_NEAR = 1e-4


@dataclass(frozen=True)
class _Statistic:
    """A running statistic before and after the step that led to the first diff.

    Attributes:
        momentum: weight of a batch's statistic in the reference's layer, if recorded (torch's convention).
        mean: True for a mean, False for a variance (torch uses the unbiased estimate, paddle the biased one).
    """

    site: str
    layer: str
    before: Both[np.ndarray]
    after: Both[np.ndarray]
    noise: float
    momentum: float | None
    mean: bool


def statistic_hypotheses(scene: DiffContext) -> Iterator[Hypothesis]:
    """Yield hypotheses on a first diff in a running statistic, if the step before is recorded."""
    if not is_running(scene.diff.pair.anchor.slot) or averages(scene, place_of(scene.diff.pair)) is not None:
        return
    statistics = list(_statistics(scene))
    means = [statistic for statistic in statistics if statistic.mean]
    wrong = {d.pair.anchor.layer for d in scene.step if d.pair.stage == "weight" and not d.passed}
    # Layers whose statistics agree are left out.
    means = [statistic for statistic in means if statistic.layer in wrong] or means
    statistics = [statistic for statistic in statistics if statistic.layer in wrong] or statistics
    if not means:
        return
    for side, partner in (("candidate", "reference"), ("reference", "candidate")):
        text = (
            f"the {side}'s running statistics do not move, the {partner}'s do: eval mode, or momentum 0 (torch's count)"
        )
        yield Hypothesis(
            "running_statistics_frozen",
            "running statistics that stay",
            text,
            lambda side=side, partner=partner: _kept(statistics, side, partner),  # type: ignore[misc]
            "running statistics",
            tried=2,
        )
    factor = _factor(means)
    if factor is None:
        return
    momentum = next((statistic.momentum for statistic in means if statistic.momentum), None)
    yield Hypothesis(
        "running_momentum",
        "momentum of running statistics",
        _statistics_text(factor, momentum),
        lambda: _moved(means, factor),
        "running means",
        free=1,
        telling=momentum is not None,
    )


def _statistics(scene: DiffContext) -> Iterator[_Statistic]:
    layers = {layer.path: layer for layer in scene.runs.reference.info.layers}
    earlier = scene.pairs(scene.number - 1, "weight")
    for place, pair in scene.pairs(scene.number, "weight").items():
        if not is_running(pair.anchor.slot) or place not in earlier:
            continue
        before, after = alike((earlier[place], pair))
        if before is None or after is None or before.reference.shape != after.reference.shape:
            continue
        layer = layers.get(pair.anchor.layer)
        momentum = layer.settings.get("momentum") if layer is not None else None
        size = max(float(np.sqrt(np.mean(np.square(side)))) for side in (*before, *after))
        share = float(momentum) if isinstance(momentum, (int, float)) else None
        mean = equivalents.slot(pair.anchor.slot) == "running_mean"
        if mean:
            # A mean near zero of a wide batch is as exact as the values that it is of.
            size = max(size, (share or 0.0) * _spread(scene, place))
        noise = max(_ROUNDINGS * rounding_of(pair) * size, 1e-300)
        yield _Statistic(pair.anchor.site, pair.anchor.layer, before, after, noise, share, mean)


def _spread(scene: DiffContext, place: PairPlace) -> float:
    """Return the standard deviation that a layer's running variance shows; 0 if it has none."""
    for (layer, slot, _), pair in scene.pairs(scene.number, "weight").items():
        if layer == place[0] and equivalents.slot(slot) == "running_var" and (values := alike((pair,))[0]) is not None:
            return max(float(np.sqrt(np.abs(side).mean())) for side in values)
    return 0.0


def _kept(statistics: Sequence[_Statistic], side: str, partner: str) -> Iterator[Prediction]:
    for statistic in statistics:
        yield Prediction(
            statistic.site,
            getattr(statistic.after, side),
            getattr(statistic.before, side),
            getattr(statistic.after, partner),
            statistic.noise,
        )


def _moved(means: Sequence[_Statistic], factor: float) -> Iterator[Prediction]:
    for statistic in means:
        step = statistic.after.reference - statistic.before.reference
        yield Prediction(
            statistic.site,
            statistic.after.candidate,
            statistic.before.candidate + factor * step,
            statistic.before.candidate + step,
            statistic.noise,
        )


def _factor(means: Sequence[_Statistic]) -> float | None:
    """Return the candidate's change of the statistics divided by the reference's; `None` if about 1 or not positive."""
    steps = [
        (statistic.after.zip(statistic.before).map(lambda side: side[0] - side[1]), statistic.noise)
        for statistic in means
    ]
    square = sum(float(np.sum(np.square(step.reference / noise))) for step, noise in steps)
    product = sum(float(np.sum(step.reference * step.candidate / noise**2)) for step, noise in steps)
    factor = product / square if square else 0.0
    return factor if np.isfinite(factor) and factor > 0 and abs(factor - 1) > _NEAR else None


def _statistics_text(factor: float, momentum: float | None) -> str:
    if momentum is None:
        return (
            f"the candidate's running statistics move {factor:.5g} times as far in a step as the reference's: momentum"
        )
    if abs(factor - (2 - momentum)) <= _NEAR * factor:
        return (
            "the candidate's running statistics take in each batch twice (its forward runs twice in a step), or their "
            f"momentum is {factor * momentum:.4g} for {momentum:.4g}"
        )
    share = factor * momentum
    share = float(f"{share:.2g}") if abs(float(f"{share:.2g}") - share) <= _NEAR * share else share
    text = (
        f"the candidate's running statistics take {share:.4g} of each batch's, the reference's {momentum:.4g}: "
        "momentum, counted as torch does"
    )
    return f"{text} (paddle's own is 1 minus it)" if abs(share + momentum - 1) <= _NEAR else text


# Count of gates of recurrent cells, whose rows follow one another in a weight, by kind of layer.
_GATES = {"lstm": 4, "lstmcell": 4, "gru": 3, "grucell": 3}
# Most parameters of other layers that are compared.
_OTHERS = 200
#: Most places that a text names.
_NAMED = 3


def start_hypotheses(scene: DiffContext) -> Iterator[Hypothesis | Cause]:
    """Yield hypotheses on a first diff in a weight or buffer of the first step, the simplest first.

    For a weight, the last item is the general cause that the start weights differ.
    """
    pair = scene.diff.pair
    if scene.number != 0:
        return
    sides = whole_of(pair)
    if sides is not None and sides.reference.shape == sides.candidate.shape and np.isfinite(sides.candidate).all():
        yield from _changed_start(scene, sides)
    if not _is_buffer(scene, scene.diff):
        filled = None if sides is None else _filled(scene, sides)
        text = _others(scene) if filled is None else (
            f"the start value of {scene.diff.pair.anchor.slot} is {filled.candidate:.6g} for the reference's "
            f"{filled.reference:.6g}"
        )  # fmt: skip
        fix = _MEND if filled is None else ""
        yield Cause("start_weights", text, True, "they differ before the first step", fix, values=filled)


_MEND = "padiff.start_from(reference_run, candidate_model), or one checkpoint for both, before training"


def _changed_start(scene: DiffContext, sides: Both[np.ndarray]) -> Iterator[Hypothesis]:
    """Yield hypotheses on changes that happened to the weight when it was copied to the candidate."""
    pair = scene.diff.pair
    name = f"{pair.anchor.layer}/{pair.anchor.slot}"
    head = f"the candidate's {name} is at the start"
    rounding, limit, shape = rounding_of(pair), scene.limit(pair), sides.reference.shape

    def of(transform: transforms.Transform) -> Hypothesis:
        return transforms.hypothesis(transform, head, "weight", pair.anchor.site, tuple(sides), rounding, limit)

    if len(shape) == 2 and shape[0] == shape[1]:
        text = "transposed: carried over without regard to (in, out) against (out, in)"
        yield of(transforms.Transform("transposed", "transposed", text, np.transpose))
    kind = equivalents.kind(scene.layers.reference) if scene.layers is not None else ""
    gates = _GATES.get(kind, 0)
    if gates and shape and shape[0] % gates == 0:
        yield from (of(transform) for transform in _gates(gates))
    order = transforms.row_order(*sides) if shape and sides.reference[0].size > 1 else None
    if order is not None and not np.array_equal(order, np.arange(len(order))):
        text = f"the same with its rows {transforms.order_text(order)}"
        yield of(transforms.Transform("rows_permuted", "rows in another order", text, lambda v: v[order], len(order)))
    columns = transforms.row_order(sides.reference, sides.candidate, 1) if len(shape) == 2 else None
    if columns is not None and not np.array_equal(columns, np.arange(len(columns))):
        text = f"the same with its columns {transforms.order_text(columns)}"
        yield of(
            transforms.Transform(
                "columns_permuted", "columns in another order", text, lambda v: v[:, columns], len(columns)
            )
        )
    for transform in transforms.orders(shape, first=0):
        yield of(transform)
    for transform in transforms.affine(*sides):
        if transform.kind == "scaled":
            yield of(transform)
    grid = transforms.grid_of(sides.candidate)
    if grid and not transforms.grid_of(sides.reference):
        text = f"rounded to {grid}: carried over by way of a checkpoint in {grid}"
        yield of(transforms.Transform("precision", grid, text, lambda v: transforms.on_grid(v, grid)))
    yield from _of_another(scene, sides, head)


def _gates(count: int) -> Iterator[transforms.Transform]:
    for order in permutations(range(count)):
        if order != tuple(range(count)):
            text = f"the same with its {count} gates in the order {', '.join(map(str, order))}"

            def make(values: np.ndarray, order: tuple[int, ...] = order) -> np.ndarray:
                return np.concatenate([np.split(values, count)[k] for k in order])

            yield transforms.Transform("gates_permuted", "gates in another order", text, make, tried=24)


def _of_another(scene: DiffContext, sides: Both[np.ndarray], head: str) -> Iterator[Hypothesis]:
    """Yield hypotheses that the weight is the reference's weight of another layer."""
    pair = scene.diff.pair
    size = 0
    for (layer, slot, _), weight in scene.pairs(scene.number, "weight").items():
        if weight is pair or weight.anchor.shape != pair.anchor.shape:
            continue
        size += 1
        values = whole_of(weight) if size <= _OTHERS else None
        if values is None or not np.allclose(
            values.reference.ravel()[:64], sides.candidate.ravel()[:64], rtol=1e-5, atol=0
        ):
            continue

        def predict(other_values: np.ndarray = values.reference) -> Iterator[Prediction]:
            noise = transforms.noise_of(other_values, rounding_of(pair))
            yield Prediction(pair.anchor.site, sides.candidate, other_values, sides.reference, noise, scene.limit(pair))

        text = f"{head} the reference's {layer}/{slot}: layers in another order"
        yield Hypothesis("weight_of_another_layer", "another layer's weight", text, predict, tried=size)


def _filled(scene: DiffContext, sides: Both[np.ndarray]) -> Both[float] | None:
    """Return the numbers with which both runs fill a weight of a class of the user's, where all other weights are
    equal; else `None`.
    """
    wrong = [each for each in scene.diffs("weight") if each.compared and not each.passed]
    kinds = {name.lower() for names in LAYERS.values() for name in names}
    is_own = scene.layers is not None and all(
        layer.kind not in kinds for layer in (scene.layers.reference, scene.layers.candidate)
    )
    if not is_own or len(wrong) > 1 or not all(side.size and side.min() == side.max() for side in sides):
        return None
    return sides.map(lambda side: float(side.flat[0]))


def _others(scene: DiffContext) -> str:
    """Return text on the start weights that differ, and the count of those that agree."""
    weights = [d for d in scene.diffs("weight") if d.compared and not _is_buffer(scene, d)]
    wrong = [d for d in weights if not d.passed]
    # Weights of all ones or zeros are usual initial values: their agreement shows nothing.
    weights = [d for d in weights if not d.passed or not _is_constant(d)]
    names = [f"{d.pair.anchor.layer}/{d.pair.anchor.slot}" for d in wrong]
    if len(wrong) == len(weights):
        return "the runs start from different weights: copy them over (or load one checkpoint) before training"
    return (
        f"the runs start from different weights in {first_few(names, _NAMED)}, and from equal ones in "
        f"{len(weights) - len(wrong)} others: not all were carried over"
    )


def _is_constant(diff: Diff) -> bool:
    """Return True if all elements have the same absolute value."""
    figures = diff.figures
    return figures is not None and figures.mean_reference * figures.size**0.5 >= figures.reference_l2 * (1 - 1e-6)


def _is_buffer(scene: DiffContext, diff: Diff) -> bool:
    anchor = diff.pair.anchor
    return any(
        layer.path == anchor.layer and any(p.slot == anchor.slot and p.role == "buffer" for p in layer.parameters)
        for layer in scene.runs.reference.info.layers
    )
