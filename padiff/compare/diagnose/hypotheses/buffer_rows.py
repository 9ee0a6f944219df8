"""Hypotheses on a buffer whose rows the loop writes: a queue, a memory bank, a table of prototypes.

In a step, some rows are replaced by the output of a layer. The sides may write another output, or other rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from padiff.compare.diagnose.hypotheses.diff_context import DiffContext, Place, alike, place_of, rounding_of, whole_of
from padiff.compare.diagnose.hypotheses.hypothesis import Hypothesis, Prediction
from padiff.compare.judge.limits import is_running
from padiff.records import SIDES, Both, Pair

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
    source: Place | None = None


def hypotheses(scene: DiffContext) -> Iterator[Hypothesis]:
    """Yield hypotheses on a first diff in a buffer of which both steps, and the outputs in between, are full."""
    place = place_of(scene.diff.pair)
    before = scene.pairs(scene.number - 1, "weight").get(place)
    trained = scene.pairs(scene.number - 1, "update")
    if before is None or place in trained or is_running(place[1]):
        return
    yield from _scaled(scene, before)
    now, was = whole_of(scene.diff.pair), whole_of(before)
    if now is None or was is None or now.reference.ndim != 2 or {side.shape for side in was} != {now.reference.shape}:
        return
    outputs = scene.pairs(scene.number - 1, "forward")
    values = {where: whole for where, pair in outputs.items() if (whole := whole_of(pair)) is not None}
    noise = max(_ROUNDINGS * rounding_of(scene.diff.pair) * float(np.sqrt(np.mean(np.square(now.candidate)))), 1e-300)
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


def _written(
    side: int, now: Both[np.ndarray], was: Both[np.ndarray], values: Mapping[Place, Both[np.ndarray]], noise: float
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
