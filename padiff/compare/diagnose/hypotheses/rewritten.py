"""Hypotheses on the code: what the reference's calls would have given, had one thing in them been written otherwise.

The calls between tensors that agree and one that does not are computed again from what went into them, first as they
are, then with one edit. An edit that gives the candidate's tensor is what is other in its code.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from padiff.compare.diagnose.computing.edit import Edit, Sheet
from padiff.compare.diagnose.computing.formula import UnknownError
from padiff.compare.diagnose.computing.leaving_out import left_out
from padiff.compare.diagnose.computing.otherwise import otherwise
from padiff.compare.diagnose.computing.solving import numbers, solved
from padiff.compare.diagnose.computing.writer import Writer
from padiff.compare.diagnose.hypotheses.hypothesis import Hypothesis, Prediction
from padiff.compare.diagnose.hypotheses.layer_output import noise_level, root
from padiff.compare.diagnose.hypotheses.proof import NEAR
from padiff.compare.diagnose.hypotheses.scene import Scene, whole_of
from padiff.compare.diagnose.settings import cause_of
from padiff.records import Both

# Seconds that are spent on edits of one side, and on the numbers in them.
_SECONDS = 1.2
# Share of itself that a recomputed tensor may be off by: more of it, and its code is not what was computed.
_AGREES = 1e-3
# Operations between two places that belong together.
_TOGETHER = 6
#: Elements that are computed with, at most.
_MOST = 8_000_000


@dataclass(frozen=True)
class _Case:
    """The tensor that differs, as either side recorded it, in the reference's layout.

    Attributes:
        noise: what rounding makes of an element.
    """

    scene: Scene
    sides: Both[np.ndarray]
    noise: float

    def hypothesis(self, edit: Edit, made: np.ndarray, tried: int, swapped: bool = False, head: str = "") -> Hypothesis:
        pair = self.scene.diff.pair
        reference, candidate = self.sides.swapped(swapped)

        def predict() -> Iterator[Prediction]:
            yield Prediction(pair.anchor.site, candidate, made, reference, self.noise, self.scene.limit(pair))

        kind = edit.kind.replace("_missing", "_added") if swapped else edit.kind
        return Hypothesis(kind, edit.name, head + edit.text, predict, "outputs", edit.free, tried)


def hypotheses(scene: Scene) -> Iterator[Hypothesis]:
    """Of a first diff in an output, or in what goes into a layer, where the calls before it are traced."""
    place, steps = scene.place, scene.sides(scene.number)
    if place is None or place.ends is None or place.graphs is None or steps is None:
        return
    sides = whole_of(scene.diff.pair)
    if sides is None or not _is_usual(sides):
        return
    infos = scene.runs.map(lambda run: run.info)
    written: list[Sheet | None] = []
    noise = noise_level(scene) * max(root(side) for side in sides)
    for graph, step, info, end, open_, side in zip(place.graphs, steps, infos, place.ends, place.computed, sides):
        writer = Writer(graph, step, info)
        try:
            formula = writer.write(end, open_)
        except (UnknownError, ValueError, IndexError):
            written.append(None)
            continue
        made = formula.values[formula.end]
        off = root(made.ravel() - _recorded(writer, end, side)) if made.size == side.size else np.inf
        if off > _AGREES * root(side) or sum(value.size for value in formula.values) > _MOST:
            written.append(None)
            continue
        noise = max(noise, off)
        written.append(Sheet(writer, graph))
    case = _Case(scene, sides, max(noise, 1e-300))
    reference, candidate = written
    found = False
    if reference is not None and reference.shape(reference.formula.end) == sides.reference.shape:
        for one in (*_declared(case, reference), *_edited(case, reference)):
            found = found or one.tried > 0
            yield one
    if candidate is not None and candidate.shape(candidate.formula.end) == sides.candidate.shape:
        yield from _surplus(case, candidate)


def _recorded(writer: Writer, end: int, side: np.ndarray) -> np.ndarray:
    value = writer.value(end)
    return np.ravel(side if value is None else np.asarray(value, np.float64))


def _is_usual(sides: Both[np.ndarray]) -> bool:
    one, other = sides
    if np.iscomplexobj(one) or one.shape != other.shape or one.size < 2:
        return False
    return all(bool(np.isfinite(side).all()) for side in sides)


# -- what is declared ----------------------------------------------------------------------------------------------


def _declared(case: _Case, sheet: Sheet) -> Iterator[Hypothesis]:
    """The reference's calls with what the candidate's layers declare."""
    scene, place = case.scene, case.scene.place
    assert place is not None and place.graphs is not None and place.ends is not None
    called = {call.layer for call in sheet.writer.calls.values()}
    settings: dict[str, dict[str, object]] = {}
    said = []
    for one in scene.declared:
        paths = called & {*one.layers.reference}
        if one.kind == "layer_setting" and one.changes and paths:
            said.append(one)
            for path in paths:
                settings.setdefault(path, {})[one.name] = one.values.candidate
    steps = scene.sides(scene.number)
    cause = cause_of(said)
    if cause is None or steps is None:
        return
    writer = Writer(place.graphs.reference, steps.reference, scene.runs.reference.info, settings)
    try:
        formula = writer.write(place.ends.reference, place.computed.reference)
    except (UnknownError, ValueError, IndexError):
        return
    made = formula.values[formula.end]
    if made.shape == case.sides.reference.shape and np.isfinite(made).all():
        edit = Edit("layer_setting", "what is declared differently", cause.sentence, {})
        yield replace(case.hypothesis(edit, made, 1), fix=cause.fix)


# -- edits ---------------------------------------------------------------------------------------------------------


def _edited(case: _Case, sheet: Sheet) -> list[Hypothesis]:
    """The reference's calls with an edit: those that explain the candidate's, else the nearest of each kind."""
    return _best_of(case, sheet, [left_out, otherwise], case.sides.candidate, True, "in the candidate, ")


def _surplus(case: _Case, sheet: Sheet) -> list[Hypothesis]:
    """The candidate's calls without one of them."""
    head = "the reference's comes out where, of the candidate's calls, "
    made = _in_layout(case, sheet)
    return [] if made is None else _best_of(case, sheet, [left_out], made, False, head)


def _in_layout(case: _Case, sheet: Sheet) -> np.ndarray | None:
    """The reference's tensor, as the candidate's lies."""
    own = sheet.formula.values[sheet.formula.end]
    usual = case.scene.diff.pair.layout
    same = own.shape == case.sides.candidate.shape and np.allclose(own, case.sides.candidate, rtol=1e-3, atol=1e-4)
    return case.sides.reference if same or usual is None else None


def _best_of(
    case: _Case, sheet: Sheet, makers: Sequence[object], target: np.ndarray, with_numbers: bool, head: str
) -> list[Hypothesis]:
    swapped = not with_numbers
    explaining: list[tuple[Edit, np.ndarray]] = []
    nearest: dict[str, tuple[float, Edit, np.ndarray]] = {}
    own, tried, until = sheet.formula.values[sheet.formula.end], 0, time.monotonic() + _SECONDS
    for maker in makers:
        for edit in maker(sheet):  # type: ignore[operator]
            if time.monotonic() > until:
                break
            made = sheet.formula.changed(edit.changes)
            if made is None or made.shape != target.shape or np.array_equal(made, own):
                continue
            tried += 1
            off = root(made - target)
            if off <= NEAR * case.noise:
                explaining.append((edit, made))
            elif edit.name not in nearest or off < nearest[edit.name][0]:
                nearest[edit.name] = (off, edit, made)
    until = time.monotonic() + _SECONDS
    for number in sorted(numbers(sheet), key=lambda one: one.rank) if with_numbers else ():
        if time.monotonic() > until or any(edit.rank <= number.rank for edit, _ in explaining):
            break
        tried += 1
        found = solved(sheet, number, target, case.noise)
        made = sheet.formula.changed(found.changes) if found is not None else None
        if found is None or made is None:
            continue
        off = root(made - target)
        if off <= NEAR * case.noise:
            explaining.append((found, made))
        elif found.name not in nearest or off < nearest[found.name][0]:
            nearest[found.name] = (off, found, made)
    told = _told(sheet, [edit for edit, _ in explaining])
    hypotheses_ = [case.hypothesis(e, m, tried, swapped, head) for e, m in explaining if any(e is one for one in told)]
    names = {edit.name for edit, _ in explaining}
    rest = [case.hypothesis(e, m, tried, swapped, head) for name, (_, e, m) in nearest.items() if name not in names]
    return [*hypotheses_, *rest]


def _told(sheet: Sheet, edits: Sequence[Edit]) -> list[Edit]:
    """The plainest of the edits that explain it, and the first that is about another place: these can't be told apart."""
    ranked = sorted(edits, key=lambda edit: (edit.rank, edit.free))
    if not ranked:
        return []
    first = ranked[0]
    others = [edit for edit in ranked[1:] if edit.kind != first.kind and not _together(sheet, edit, first)]
    return [first, *others[:1]]


def _together(sheet: Sheet, one: Edit, other: Edit) -> bool:
    if one.at < 0 or other.at < 0:
        return True
    formula = sheet.formula
    return one.at in formula.above(other.at, _TOGETHER) or other.at in formula.above(one.at, _TOGETHER)
