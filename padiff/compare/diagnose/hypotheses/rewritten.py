"""Hypotheses on the code: what the reference's calls would have given, had one thing in them been written otherwise.

The calls between tensors that agree and one that does not are computed again from what went into them, first as they
are, then with one edit. An edit that gives the candidate's tensor is what is other in its code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from padiff.compare.diagnose.computing.edit import Edit, Sheet, Target
from padiff.compare.diagnose.computing.formula import UnknownError
from padiff.compare.diagnose.computing.leaving_out import SIDES_OF_EDITS, left_out
from padiff.compare.diagnose.computing.otherwise import otherwise
from padiff.compare.diagnose.computing.solving import Number, numbers, solved
from padiff.compare.diagnose.computing.writer import Writer
from padiff.compare.diagnose.hypotheses.hypothesis import Hypothesis, Prediction
from padiff.compare.diagnose.hypotheses.layer_output import noise_level, root
from padiff.compare.diagnose.hypotheses.proof import NEAR, explains, weigh
from padiff.compare.diagnose.hypotheses.scene import Scene, whole_of
from padiff.compare.diagnose.settings import cause_of
from padiff.compare.measure.operands import Sketches, operands
from padiff.errors import PadiffError
from padiff.records import Both, Layout, Pair
from padiff.sketches.sketch import sketch_of

# Seconds that are spent on edits of one side, and on the numbers in them.
_SECONDS = 1.2
#: Share of itself that a recomputed tensor may be off by: more of it, and its code is not what was computed.
AGREES = 1e-3
# Operations between two places that belong together.
_TOGETHER = 6
#: Elements that are computed with, at most.
_MOST = 8_000_000
# Of edits that come to the level of rounding, those that are so many times further off than the nearest explain less,
# but for this share of the noise.
_NEARER, _ROUNDED = 3.0, 0.5
_OF_REFERENCE, _OF_CANDIDATE = "in the candidate, ", "the reference's comes out where, of the candidate's calls, "

Look = Callable[[np.ndarray], np.ndarray]
Maker = Callable[[Sheet], Iterable[Edit]]


@dataclass(frozen=True)
class Case:
    """The tensor that differs.

    Attributes:
        sides: what is known of it: both sides in the reference's layout, or the projections of their sketches.
        looks: what is looked at of either side's tensor, to be held against that.
        noise: what rounding makes of an element.
    """

    scene: Scene
    sides: Both[np.ndarray]
    looks: Both[Look]
    noise: float = 1e-300

    def hypothesis(self, found: Found, head: str) -> Hypothesis:
        pair, edit = self.scene.diff.pair, found.edit
        without, actual = self.sides.swapped(found.surplus)

        def predict() -> Iterator[Prediction]:
            yield Prediction(
                pair.anchor.site, actual, found.target.look(found.made), without, self.noise, self.scene.limit(pair)
            )

        kind = edit.kind.replace("_missing", "_added") if found.surplus else edit.kind
        return Hypothesis(
            kind,
            edit.name,
            head + edit.text,
            predict,
            "outputs",
            edit.free,
            found.tried,
            telling=edit.telling,
            code=True,
        )


def hypotheses(scene: Scene) -> Iterator[Hypothesis]:
    """Of a first diff in an output, or in what goes into a layer, where the calls before it are traced."""
    place, steps = scene.place, scene.sides(scene.number)
    if place is None or place.ends is None or place.graphs is None or steps is None:
        return
    case = case_of(scene)
    if case is None:
        return
    infos = scene.runs.map(lambda run: run.info)
    written: list[Sheet | None] = []
    noise = noise_level(scene) * max(root(side) for side in case.sides)
    parts = zip(place.graphs, steps, infos, place.ends, place.computed, case.sides, case.looks)
    for graph, step, info, end, open_, side, look in parts:
        writer = Writer(graph, step, info)
        try:
            formula = writer.write(end, open_)
            made = look(formula.values[formula.end])
        except (UnknownError, ValueError, IndexError, PadiffError):
            written.append(None)
            continue
        off = root(made - side) if made.shape == side.shape else np.inf
        if off > AGREES * root(side) or sum(value.size for value in formula.values) > _MOST:
            written.append(None)
            continue
        noise = max(noise, off)
        written.append(Sheet(writer, graph, case.looks.reference is not same))
    case = replace(case, noise=max(noise, 1e-300))
    reference, candidate = written
    found: list[Found] = []
    if reference is not None:
        declared = _declared(case, reference)
        if declared is not None:
            yield declared
            if explains(weigh(declared.predict()), declared):
                return
        target = Target(case.sides.candidate, reference.shape(reference.formula.end), case.looks.reference)
        found += tried(case, reference, (left_out, otherwise), target, False)
    if candidate is not None:
        target = Target(case.sides.reference, candidate.shape(candidate.formula.end), case.looks.candidate)
        found += tried(case, candidate, (left_out,), target, True)
    yield from reported(case, found)


def case_of(scene: Scene) -> Case | None:
    """What is known of the tensor; `None` where it is not known, or says too little."""
    pair = scene.diff.pair
    sides = whole_of(pair)
    looks: Both[Look]
    if sides is not None:
        looks = Both(same, partial(_laid, pair.layout, sides.reference.shape))
    elif (last := _last_place(pair)) is not None:
        sides, looks = last
    else:
        found = operands(pair)
        if not isinstance(found, Sketches) or found.scales != Both(1.0, 1.0) or not found.aligned:
            return None
        sides = found.values()
        looks = Both(found.reference, found.candidate).map(lambda sketch: partial(_projected, sketch.transposed))
    if sides is None or np.iscomplexobj(sides.reference) or sides.reference.shape != sides.candidate.shape:
        return None
    if sides.reference.size < 2 or not all(np.isfinite(side).all() for side in sides):
        return None
    return Case(scene, sides, looks)


def _last_place(pair: Pair) -> tuple[Both[np.ndarray], Both[Look]] | None:
    """Of a recurrent layer one side may give what each place has, and the other what the last one has."""
    arrays = []
    for record in pair.sides:
        if record is None or record.source.sketched:
            return None
        arrays.append(np.asarray(record.value, np.float64))
    found: list[np.ndarray] = []
    looks: list[Look] = []
    for own, other in (arrays, arrays[::-1]):
        longer = own.ndim == 3 and other.shape == (own.shape[0], own.shape[2])
        looks.append(_at_the_end if longer else same)
        found.append(looks[-1](own))
    if looks[0] is looks[1]:
        return None
    return Both(*found), Both(*looks)


def _at_the_end(values: np.ndarray) -> np.ndarray:
    return np.asarray(values[:, -1]) if values.ndim == 3 else values


def same(values: np.ndarray) -> np.ndarray:
    return values


def _laid(layout: Layout, shape: tuple[int, ...], values: np.ndarray) -> np.ndarray:
    return np.asarray(layout.apply(values, shape))


def _projected(transposed: bool, values: np.ndarray) -> np.ndarray:
    return sketch_of(np.ascontiguousarray(values, np.float64), transposed).projection


# -- what is declared ----------------------------------------------------------------------------------------------


def _declared(case: Case, sheet: Sheet) -> Hypothesis | None:
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
        return None
    writer = Writer(place.graphs.reference, steps.reference, scene.runs.reference.info, settings)
    try:
        formula = writer.write(place.ends.reference, place.computed.reference)
    except (UnknownError, ValueError, IndexError):
        return None
    made = formula.values[formula.end]
    target = Target(case.sides.candidate, made.shape, case.looks.reference)
    if (case.looks.reference is same and made.shape != case.sides.reference.shape) or not np.isfinite(made).all():
        return None
    edit = Edit("layer_setting", "what is declared differently", cause.sentence, {})
    return replace(case.hypothesis(Found(edit, made, 0.0, 1, False, sheet, target), ""), fix=cause.fix)


# -- edits ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """An edit that was tried.

    Attributes:
        made: what it gives.
        off: how far from what was recorded that is.
        tried: how many were.
        surplus: whether it is of the candidate's calls.
        sheet: whose edit it is.
        target: what it should give.
        head: what the sentence begins with; `None`: whose calls they are.
        case: what it is held against, where that is not what all are.
    """

    edit: Edit
    made: np.ndarray
    off: float
    tried: int
    surplus: bool
    sheet: Sheet
    target: Target
    head: str | None = None
    case: Case | None = None


def tried(
    case: Case,
    sheet: Sheet,
    makers: Sequence[Maker],
    target: Target,
    surplus: bool,
    some: Iterable[Number] | None = None,
) -> list[Found]:
    """One side's calls with an edit: those that explain the other's tensor, and the nearest of each other kind.

    Args:
        some: numbers that are solved for. Default: those of the reference's calls.
    """
    explaining: list[Found] = []
    nearest: dict[str, Found] = {}
    own, count = sheet.formula.values[sheet.formula.end], 0
    if some is None:
        some = () if surplus else numbers(sheet)

    def look(edit: Edit) -> None:
        nonlocal count
        made = sheet.formula.changed(edit.changes)
        if made is None or made.shape != target.shape or np.array_equal(made, own):
            return
        count += 1
        found = Found(edit, made, target.off(made), count, surplus, sheet, target)
        if found.off <= NEAR * case.noise:
            explaining.append(found)
        elif edit.name not in nearest or found.off < nearest[edit.name].off:
            nearest[edit.name] = found

    until = time.monotonic() + _SECONDS
    for edit in (edit for maker in makers for edit in maker(sheet)):
        if time.monotonic() > until:
            break
        look(edit)
    until = time.monotonic() + _SECONDS
    for number in sorted(some, key=lambda one: one.rank):
        if time.monotonic() > until:
            break
        solution = solved(sheet, number, target, case.noise)
        if solution is not None:
            look(solution)
    return [replace(one, tried=count) for one in (*explaining, *nearest.values())]


def reported(case: Case, found: Sequence[Found]) -> Iterator[Hypothesis]:
    """Of what explains it the plainest, and the first that is about another place: these can't be distinguished."""
    explaining = [one for one in found if one.off <= NEAR * case.noise]
    names = {one.edit.name for one in explaining}
    least = min((one.off for one in explaining), default=0.0)
    explaining = [one for one in explaining if one.off <= max(_NEARER * least, _ROUNDED * case.noise)]
    explaining.sort(key=lambda one: (not one.edit.telling, one.edit.rank, one.surplus, one.edit.free))
    reported = explaining[:1]
    reported += [one for one in explaining[1:] if reported and _apart(one, reported[0])][:1]
    for one in (*(_as_order(case, one) for one in reported), *(one for one in found if one.edit.name not in names)):
        usual = _OF_CANDIDATE if one.surplus else _OF_REFERENCE
        if one.edit.text.startswith(("the candidate ", SIDES_OF_EDITS[0])):
            sides = ("the reference", "the candidate") if one.surplus else ("the candidate", "the reference")
            text = one.edit.text
            for mark, name in zip(SIDES_OF_EDITS, sides):
                text = text.replace(mark, name)
            one = replace(one, edit=replace(one.edit, text=text), head="")
        yield (one.case or case).hypothesis(one, usual if one.head is None else one.head)


def _apart(one: Found, other: Found) -> bool:
    """Whether two edits of one side's calls are about places that have nothing to do with each other."""
    if one.surplus != other.surplus or one.edit.kind == other.edit.kind or min(one.edit.at, other.edit.at) < 0:
        return False
    above = one.sheet.formula.above
    return one.edit.at not in above(other.edit.at, _TOGETHER) and other.edit.at not in above(one.edit.at, _TOGETHER)


def _as_order(case: Case, one: Found) -> Found:
    """That a norm is given the sum with a branch, where the other side's is given what goes into the branch."""
    if one.edit.kind != "branch_missing" or not _feeds_the_branch(case, one):
        return one
    pair = case.scene.diff.pair
    side, other = ("candidate", "reference") if one.surplus else ("reference", "candidate")
    text = (
        f"the order of the norm and the residual: the {side}'s `{getattr(pair, side).layer}` normalises the sum with "
        f"what the branch gives (post-norm), the {other}'s what goes into the branch (pre-norm). So "
    )
    head = _OF_CANDIDATE if one.surplus else _OF_REFERENCE
    return replace(
        one, edit=replace(one.edit, kind="norm_order", telling=True, text=f"{text}{head}{one.edit.text}"), head=""
    )


def _feeds_the_branch(case: Case, one: Found) -> bool:
    """Whether the other side's norm goes into the very branch that is added before this side's."""
    scene, pair = case.scene, case.scene.diff.pair
    place, reference, candidate = scene.place, pair.reference, pair.candidate
    if place is None or place.graphs is None or reference is None or candidate is None:
        return False
    own, there = Both(reference, candidate).swapped(one.surplus)
    graph, others = place.graphs.swapped(one.surplus)
    paths = {reference.layer, candidate.layer}
    kinds = [layer.kind for run in scene.runs for layer in run.info.layers if layer.path in paths]
    call = others.of_record(there)
    if not pair.anchor.slot.startswith("input") or not any("norm" in kind for kind in kinds) or call is None:
        return False
    partner = {p.candidate.path: p.reference.path for p in scene.alignment.pairs}
    start = next((o.tensor for o in (graph.of_record(own) or call).inputs), -1)
    branch = {c.layer for c in graph.back(start, lambda _: False) if not c.function}
    partner = partner if one.surplus else {reference: candidate for candidate, reference in partner.items()}
    for path in {partner.get(path, "") for path in branch} - {""}:
        fed = others.layers.get((path, there.call))
        outputs = fed.outputs if fed is not None else ()
        if any(before is call for o in outputs for before in others.back(o.tensor, lambda _: False)):
            return True
    return False
