"""Hypotheses on the code: recompute the reference's calls with one edit, and compare with the candidate's tensor.

The calls between tensors that agree and a tensor that differs are computed again from their inputs, first unchanged,
then with one edit. An edit that gives the candidate's tensor is the difference in the code.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import partial
from itertools import combinations

import numpy as np

from padiff.compare.declared.layers import loss_fix
from padiff.compare.diagnose.computing.divergence import (
    Number,
    agreeing_nodes,
    divergences,
    numbers,
    read_numbers,
    solved,
)
from padiff.compare.diagnose.computing.edit import (
    CHOICE,
    SIDES_OF_EDITS,
    Argument,
    Edit,
    FormulaView,
    Target,
    dropped_terms,
)
from padiff.compare.diagnose.computing.formula import MADE, UnknownError
from padiff.compare.diagnose.computing.operation_edits import (
    COMPARED,
    exchanged_operations,
    of_all_turns,
    operation_edits,
    other_numbers,
    other_reductions,
    rotary,
)
from padiff.compare.diagnose.computing.writer import Writer
from padiff.compare.diagnose.hypotheses.diff_context import DiffContext, whole_of
from padiff.compare.diagnose.hypotheses.hypothesis import CLOSE, NEAR, Hypothesis, Prediction, explains, weigh
from padiff.compare.diagnose.hypotheses.outputs import noise_level, root
from padiff.compare.diagnose.settings import cause_of
from padiff.compare.diagnose.traced import Graph
from padiff.compare.judge.limits import ROUNDING
from padiff.compare.measure.operands import Sketches, operands
from padiff.errors import PadiffError
from padiff.frameworks.catalog import SPELLINGS
from padiff.pair.joined_calls import cut_of
from padiff.records import Both, Layout, Pair
from padiff.records.compared import UNKNOWN_LINES
from padiff.records.traces import TracedCall
from padiff.sketches.sketch import sketch_of
from padiff.system.code import literal
from padiff.system.frames import Frame

# Most seconds of computing for the edits of one side, and again for the numbers in its calls.
_SECONDS = 1.2
#: Largest relative error of a recomputed tensor; with a larger error the formula is not the code that ran.
AGREES = 1e-3
# Size of terms, relative to what they add up to, whose rounding counts.
_CANCELLED = 100.0
# Most operations between two places that belong together.
_TOGETHER = 6
# Most numbers of the candidate's code whose products are tried.
_FEW_NUMBERS = 12
#: Most elements to compute with.
_MOST = 8_000_000
# An edit at the level of rounding still explains less than the nearest one if its error is so many times larger, and
# larger than this share of the noise.
_NEARER, _ROUNDED = 3.0, 0.5
_OF_REFERENCE, _OF_CANDIDATE = "in the candidate, ", "the values agree if, in the candidate, "

# Kinds of edits of a call's operands: the other side has to compute what the edited call gives.
_OF_OPERANDS = frozenset({"parts_order", "axes_order", "comparison"})

# Added to the rank of a number that the candidate's code has not.
_UNWRITTEN = 5
# Kinds of edits that the other side's code may contradict: it shows what it computes there.
_CONTRADICTED = frozenset({"operands", "comparison", "loss_shapes"})

# Kinds of edits that put another function in the place of one.
_OTHER_FUNCTIONS = frozenset({"activation", "axis", "reduction_form", "softmax_axis"})

# Names of an axis in either framework.
_AXES = ("dim", "axis")

Look = Callable[[np.ndarray], np.ndarray]
Maker = Callable[[FormulaView], Iterable[Edit]]


@dataclass(frozen=True)
class Case:
    """The tensor that differs.

    Attributes:
        sides: both tensors in the reference's layout, or the projections of their sketches.
        looks: function for each side that brings a recomputed tensor to the form of ``sides``.
        noise: rounding error of an element.
        graphs: the traces of both sides.
        sheets: the formulas of both sides, if known.
    """

    scene: DiffContext
    sides: Both[np.ndarray]
    looks: Both[Look]
    noise: float = 1e-300
    graphs: Both[Graph] | None = None
    sheets: Both[FormulaView | None] = field(default_factory=lambda: Both(None, None))

    def hypothesis(self, found: Found, head: str) -> Hypothesis:
        pair, edit = self.scene.diff.pair, found.edit
        without, actual = self.sides.swapped(found.surplus)
        other = self.sheets.swapped(found.surplus).candidate

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
            fix="" if found.surplus else lambda: self._fix(found),
            telling=edit.telling
            and (edit.argument is None or self._is_called(found))
            and (edit.kind not in _OF_OPERANDS or other is None or _computes(other, found)),
            code=True,
            lines=self._lines(found),
            values=None if edit.values is None else edit.values.swapped(found.surplus),
            read=edit.other >= 0 and other is not None,
        )

    def _lines(self, found: Found) -> Both[Frame | None]:
        """Return the lines of both sides' code that an edit is about; `None` where not known."""
        other = self.sheets.swapped(found.surplus).candidate
        at = found.edit.at if found.edit.at >= 0 else found.sheet.last
        lines = Both(found.sheet.maker(at), None if other is None else self._other_line(found, other))
        partner = None if other is None else self._partner(found, other)
        if other is not None and partner is not None and found.edit.at >= 0:
            # A layer of the framework's for a function that the other side calls is shown where it is made.
            calls = Both(
                (found.sheet.function(at), found.sheet.layer(at)), (other.function(partner), other.layer(partner))
            )
            made = (
                self.scene.runs.swapped(found.surplus)
                .zip(calls)
                .map(lambda side: None if side[1][0] else side[0].info.lines.get(side[1][1]))
            )
            is_mixed = bool(calls.reference[0]) != bool(calls.candidate[0])
            lines = made.zip(lines).map(lambda side: side[0] or side[1]) if is_mixed else lines
        return lines.swapped(found.surplus)

    def _other_line(self, found: Found, other: FormulaView) -> Frame | None:
        """Return the other side's line that belongs to an edited node: of the partner's call; if the other side makes
        no such call, the line that goes on with what the call takes, or that makes it: that which the edited line does,
        too, or what is more like the edited line. A partner that hands on what it takes, such as a dropout that drops
        nothing, is no node.
        """
        edit, sheet = found.edit, found.sheet
        partner = self._partner(found, other)
        if partner is not None:
            return other.maker(partner)
        followers = {node.operation for node in sheet.nodes if edit.at in node.given}
        operands, equal = sheet.nodes[edit.at].given if edit.at >= 0 else (), list[int]()
        if edit.kind == "mask_missing":  # the other side goes on with what the mask is for
            operands = tuple(g for user in sheet.users(edit.at) for g in sheet.nodes[user].given if g != edit.at)
        operands = tuple(g for g in operands if not sheet.is_number(g)) or operands
        given = operands
        while given and not (equal := [k for g in given for k in other.equal(sheet.formula.values[g])]):
            followers |= {sheet.nodes[g].operation for g in given}  # the other side takes it in another order
            given = tuple(above for g in given for above in sheet.nodes[g].given)
        equal += [k for k, node in enumerate(other.nodes) if node.operation == "cast" and node.given[0] in equal]
        if given != operands:  # it computes what the call takes in a way of its own, and then goes on
            alike = (k for k in sorted(other.formula.below(equal)) if _is_alike(sheet, edit.at, other, k))
            line = next(filter(None, map(other.line, alike)), None)
            if line is not None:
                return line
        tensors = {other.tensor(k) for k in equal} - {None}
        for call in other.graph.trace.calls if edit.at >= 0 and given == operands else ():
            if call.function == sheet.function(edit.at) != "" and tensors & {each.tensor for each in call.inputs}:
                return call.line
        takers = [k for k, node in enumerate(other.nodes) if {*equal} & {*node.given}]
        following = [
            k
            for k in takers
            if followers & {other.nodes[k].operation, *(other.nodes[user].operation for user in other.users(k))}
        ]
        taking = [line for line in map(other.line, following or takers) if line is not None]
        if not takers:  # what the formula ends at goes on into other calls
            users = (call for call in other.graph.trace.calls if tensors & {each.tensor for each in call.inputs})
            taking = [call.line for call in users if call.line is not None]
        making = [line for line in map(other.maker, equal) if line is not None]
        edited = sheet.line(edit.at)
        is_taken = edit.at >= 0 and edited in map(sheet.line, sheet.users(edit.at))
        is_made = edit.at >= 0 and edited in map(sheet.maker, given)
        if is_taken != is_made:
            lines = (taking or making) if is_taken else (making or taking)
        else:
            lines = [line for line in making if line in taking] or [*taking, *making]
        code = "" if edited is None else edited.code
        return max(
            lines, key=lambda line: SequenceMatcher(None, line.code, code).ratio(), default=other.line(other.last)
        )

    def _partner(self, found: Found, other: FormulaView) -> int | None:
        """Return the other side's node that belongs to an edited node: of the same call, of what the edit gives, or of
        the same kind of operation on the same tensor; `None` if there is none.
        """
        edit, sheet = found.edit, found.sheet
        if edit.other >= 0 and not found.surplus:
            return edit.other
        node = sheet.nodes[edit.at] if edit.at >= 0 else None
        if node is None or node.about < 0:
            return other.last
        taken = [g for g in node.given if sheet.formula.values[g].size > 1]
        equal = {k for g in taken for k in other.equal(sheet.formula.values[g])}
        edited = sheet.formula.changed(edit.changes, edit.at)
        for k in [] if edited is None else other.equal(edited):
            if k not in equal and equal & {*other.nodes[k].given}:
                return k
        call = sheet.graph.trace.calls[node.about]
        key = self._layer(call.layer, found.surplus) or call.layer, call.function, call.nth
        called = None
        for k, theirs in enumerate(other.nodes):
            is_kind = theirs.operation == node.operation or {theirs.operation, node.operation} <= COMPARED.keys()
            if theirs.about >= 0 and is_kind and equal & {*theirs.given}:
                return k
            about = other.graph.trace.calls[theirs.about] if theirs.about >= 0 else None
            alike = [other.formula.values[g].size for g in theirs.given] == [
                sheet.formula.values[g].size for g in node.given
            ]
            if called is None and about is not None and (about.layer, about.function, about.nth) == key and alike:
                called = k
        # A call of that name and number on other tensors is another call.
        return None if equal else called

    def _layer(self, path: str, of_candidate: bool = False) -> str | None:
        """Return the path of a layer's partner; `None` if it has none.

        Args:
            path: the path of the layer.
            of_candidate: True if the layer is the candidate's.
        """
        for pair in self.scene.alignment.pairs:
            own, other = Both(pair.reference.path, pair.candidate.path).swapped(of_candidate)
            if own == path:
                return other
        return None

    def _is_called(self, found: Found) -> bool:
        """Return False if an edit is of an argument in one of several calls of which the candidate makes fewer."""
        function, layer = found.sheet.function(found.edit.at), found.sheet.layer(found.edit.at)
        if not function or self.graphs is None:
            return True
        own, other = (
            sum(call.function == function and call.layer == path for call in graph.trace.calls)
            for graph, path in zip(self.graphs, (layer, self._layer(layer) or layer))
        )
        return not 0 < other < own

    def _fix(self, found: Found) -> str:
        """Return the candidate's call with the reference's argument, and the lines to change if there are several.

        Empty unless each of the candidate's calls that has the other value has a partner with the reference's.
        """
        if found.edit.kind == "loss_function" and found.edit.values is not None:
            return loss_fix(self.scene.frameworks.candidate, found.edit.values.reference, {})
        argument = found.edit.argument or self._read_argument(found)
        spelling, frameworks = SPELLINGS.get(self.scene.frameworks.candidate), self.scene.frameworks
        if argument is None or spelling is None or self.graphs is None:
            return ""
        if not argument.names.keys() >= {frameworks.reference, frameworks.candidate}:
            return ""
        edit = found.edit
        layer, function = found.sheet.layer(edit.at), found.sheet.function(edit.at)
        calls = self.graphs.zip(Both(layer, self._layer(layer) or layer)).map(
            lambda side: _calls(side[0], function, side[1])
        )
        wrong = calls.zip(frameworks).map(
            lambda side: [argument.is_wrong_in(call.arguments, side[1], axes) for call, axes in side[0]]
        )
        lines = [call.stack[-1].line if call.stack else 0 for call, _ in calls.candidate]
        changed = {line for line, is_wrong in zip(lines, wrong.candidate) if is_wrong}
        right = {line for line, is_wrong in zip(lines, wrong.candidate) if not is_wrong}
        alike = len(wrong.reference) == len(wrong.candidate) and not any(wrong.reference)
        if not changed or (len(calls.candidate) > 1 and (not alike or changed & right or 0 in changed)):
            return ""  # which of several calls to change cannot be said
        value = f"{argument.names[frameworks.candidate]}={literal(argument.right)}"
        noun = "lines" if len(changed) > 1 else "line"
        where = f"  # {noun} {' and '.join(map(str, sorted(changed)))}" if len(calls.candidate) > 1 else ""
        module = spelling.layers + ".functional" if edit.argument is not None else frameworks.candidate
        return f"{module}.{function}(..., {value}){where}"

    def _read_argument(self, found: Found) -> Argument | None:
        """Return the argument that differs between an edited node's call and its partner's, if it is the only one and
        means the same in both frameworks; else `None`.
        """
        edit, other = found.edit, self.sheets.candidate
        about = -1 if other is None or edit.other < 0 or found.surplus else other.nodes[edit.other].about
        if other is None or about < 0 or found.sheet.nodes[edit.at].about < 0 or len(edit.changes) != 1:
            return None
        frameworks = self.scene.frameworks
        calls = found.sheet.graph.trace.calls[found.sheet.nodes[edit.at].about], other.graph.trace.calls[about]
        is_ported = frameworks.reference != frameworks.candidate
        sides = [
            {("axis" if is_ported and name in _AXES else name): (name, value) for name, value in call.arguments.items()}
            for call in calls
        ]
        if calls[0].function != calls[1].function or sides[0].keys() != sides[1].keys():
            return None
        differing = [name for name in sides[0] if sides[0][name][1] != sides[1][name][1]]
        if len(differing) != 1 or (is_ported and differing != ["axis"]):
            return None
        (right_name, right), (wrong_name, wrong) = (side[differing[0]] for side in sides)
        return Argument({frameworks.reference: right_name, frameworks.candidate: wrong_name}, right, wrong, None)


def _computes(other: FormulaView, found: Found) -> bool:
    """Return True if the other side's code computes what an edited node gives."""
    value = found.sheet.formula.changed(found.edit.changes, found.edit.at)
    return value is not None and bool(other.equal(value))


def _contradicts(other: FormulaView, sheet: FormulaView, edit: Edit) -> bool:
    """Return True if the other side's code makes such a call, and gets what a node gives without an edit of it; or has
    no tensor of the shape that the edit makes.
    """
    values = sheet.formula.values[edit.at], sheet.formula.changed(edit.changes, edit.at)
    name = sheet.function(edit.at)
    if edit.kind == "loss_shapes":
        return values[1] is not None and all(each.shape != values[1].shape for each in other.formula.values)
    calls = [value is not None and any(other.function(k) == name for k in other.equal(value)) for value in values]
    return calls == [True, False]


def _calls(graph: Graph, function: str, layer: str | None) -> list[tuple[TracedCall, int]]:
    """Return a function's calls in a layer, each with the number of axes of its first tensor."""
    calls = [call for call in graph.trace.calls if function and (call.function, call.layer) == (function, layer)]
    return [(call, len(graph.trace.tensors[call.inputs[0].tensor].shape)) for call in calls if call.inputs]


def hypotheses(scene: DiffContext) -> Iterator[Hypothesis]:
    """Yield hypotheses on a first diff in an output or input of a layer, if the calls before it are traced."""
    place, steps = scene.place, scene.sides(scene.number)
    if place is None or place.ends is None or place.graphs is None or steps is None:
        return
    case = case_of(scene)
    if case is None:
        return
    infos = scene.runs.map(lambda run: run.info)
    written: list[FormulaView | None] = []
    # Integers are not rounded, and the formulas that make them are.
    sizes, shares = case.sides.map(root), [0.0]
    parts = zip(place.graphs, steps, infos, place.ends, place.computed, case.sides, case.looks)
    for graph, step, info, end, open_, side, look in parts:
        writer = Writer(graph, step, info)
        try:
            formula = writer.write(end, open_)
            result = look(formula.values[formula.end])
        except (UnknownError, ValueError, IndexError, PadiffError):
            written.append(None)
            continue
        off = root(result - side) if result.shape == side.shape else np.inf
        if off > AGREES * root(side) or sum(value.size for value in formula.values) > _MOST:
            written.append(None)
            continue
        shares.append(off / (root(side) or math.inf))
        written.append(FormulaView(writer, graph, case.looks.reference is not same))
    # Terms of which the larger tensor is made may cancel in the smaller one.
    level = max(noise_level(scene) or ROUNDING["float32"], *shares)
    noises = sizes.map(lambda size: max(level * min(max(sizes), _CANCELLED * size), 1e-300))
    case = replace(case, noise=noises.candidate, graphs=place.graphs, sheets=Both(*written))
    reference, candidate = written
    trials: list[Found] = []
    if reference is not None:
        declared = _declared(case, reference)
        if declared is not None:
            yield declared
            if explains(weigh(declared.predict()), declared):
                return
        target = Target(case.sides.candidate, reference.shape(reference.formula.end), case.looks.reference)
        makers: list[Maker] = [of_all_turns, dropped_terms, operation_edits]
        if candidate is not None:
            makers.insert(1, partial(read_numbers, other=candidate))
            makers += [partial(other_numbers, candidate=candidate), partial(divergences, candidate=candidate)]
        if scene.stage == "input":
            makers = [partial(_of_calls, make) for make in makers]
        trials += tried(case, reference, makers, target, False)
    if candidate is not None:
        trials = [_if_undone(_as_written(trial, candidate), candidate) for trial in trials]
        target = Target(case.sides.reference, candidate.shape(candidate.formula.end), case.looks.candidate)
        written_there = partial(read_numbers, other=place.graphs.reference, surplus=True)
        of_reference = replace(case, noise=noises.reference)
        makers = [dropped_terms, rotary, written_there, exchanged_operations, other_reductions]
        surplus = tried(of_reference, candidate, makers, target, True)
        trials += [replace(trial, case=of_reference) for trial in surplus]
    yield from reported(case, trials)


def _as_written(trial: Found, candidate: FormulaView) -> Found:
    """Return an edit of a number, as telling only if the candidate's code, which is known, has the number."""
    edit, put = trial.edit, trial.number
    is_factor = put is None and edit.kind == "scale" and edit.values is not None
    put = edit.values.candidate if is_factor and edit.values is not None else put
    if put is None or len(edit.changes) != 1:
        return trial
    neutral = {"mul": 1.0, "div": 1.0, "add": 0.0, "sub": 0.0}
    left_out = None if is_factor else neutral.get(trial.sheet.nodes[edit.at].operation)
    leaves = (v for v, node in zip(candidate.formula.values, candidate.nodes) if not node.operation and v.size == 1)
    values = [float(np.ravel(v)[0]) for v in leaves]
    if any(math.isclose(put, form, rel_tol=1e-5) for value in values if value for form in (value, 1 / value)):
        return replace(trial, edit=replace(edit, telling=True))
    values += [first * second for first, second in combinations(values[:_FEW_NUMBERS], 2)]
    forms = [form for value in values for form in _forms(value)]
    written = put == left_out or any(math.isclose(put, form, rel_tol=1e-3, abs_tol=1e-12) for form in forms)
    return trial if written else replace(trial, edit=replace(edit, telling=False, rank=edit.rank + _UNWRITTEN))


def _if_undone(trial: Found, candidate: FormulaView) -> Found:
    """Return an edit of one tensor, as telling only if the candidate's code gives what the edit makes, or has not the
    tensor as it is: a call that the candidate makes rightly, and uses elsewhere, is not its fault.
    """
    at = next(iter(trial.edit.changes), -1)
    if not trial.edit.telling or len(trial.edit.changes) != 1 or trial.edit.other >= 0 or not trial.sheet.is_float(at):
        return trial
    unedited, edited = trial.sheet.formula.values[at], trial.sheet.formula.changed(trial.edit.changes, at)
    if edited is None or unedited.size < 2 or np.ptp(unedited) == 0:
        return trial
    equal = candidate.equal(edited)
    if trial.edit.kind == "mask_missing" and any(candidate.function(k) == trial.sheet.function(at) for k in equal):
        return replace(trial, edit=replace(trial.edit, telling=False))  # the candidate's mask is another one
    if equal:
        return trial
    is_held = candidate.graph.holds(unedited)
    return replace(trial, edit=replace(trial.edit, telling=False)) if is_held else trial


def _forms(value: float) -> Iterator[float]:
    """Yield the numbers that code written otherwise has in the place of a number."""
    root = math.sqrt(abs(value))
    yield from (value, -value, value * value, root)
    if value:
        yield from (1 / value, -1 / value, 1 / (value * value), 1 / root)


def _of_calls(make: Maker, sheet: FormulaView) -> Iterator[Edit]:
    """Yield the edits of calls, and of numbers that the loop makes: the numbers that it starts from are data."""
    for edit in make(sheet):
        sources = [sheet.nodes[sheet.source(k)] for k in edit.changes if not sheet.is_number(k)]
        if all(source.operation or source.name == MADE for source in sources):
            yield edit


def case_of(scene: DiffContext) -> Case | None:
    """Return the tensor of the first diff as a case; `None` if it can't be compared or has too few elements."""
    pair = scene.diff.pair
    sides = whole_of(pair)
    looks: Both[Look]
    if sides is not None:
        looks = Both(same, partial(_laid, pair.layout, sides.reference.shape))
        cuts = pair.sides.map(cut_of)
        looks = Both(*(look if cut is None else partial(_after, look, cut) for look, cut in zip(looks, cuts)))
    elif (last := _last_place(pair)) is not None:
        sides, looks = last
    else:
        sketches = operands(pair)
        if not isinstance(sketches, Sketches) or sketches.scales != Both(1.0, 1.0) or not sketches.aligned:
            return None
        sides = sketches.values()
        looks = Both(sketches.reference, sketches.candidate).map(lambda sketch: partial(_projected, sketch.transposed))
    if sides is None or np.iscomplexobj(sides.reference) or sides.reference.shape != sides.candidate.shape:
        return None
    if sides.reference.size < 2 or not all(np.isfinite(side).all() for side in sides):
        return None
    return Case(scene, sides, looks)


def _last_place(pair: Pair) -> tuple[Both[np.ndarray], Both[Look]] | None:
    """Return the last states of a recurrent layer that outputs all states on one side and the last on the other.

    `None` if the shapes are of another kind, or a tensor is missing or sketched.
    """
    arrays = []
    for record in pair.sides:
        if record is None or record.source.sketched:
            return None
        arrays.append(np.asarray(record.value, np.float64))
    values: list[np.ndarray] = []
    looks: list[Look] = []
    for array, partner in (arrays, arrays[::-1]):
        longer = array.ndim == 3 and partner.shape == (array.shape[0], array.shape[2])
        looks.append(_at_the_end if longer else same)
        values.append(looks[-1](array))
    if looks[0] is looks[1]:
        return None
    return Both(*values), Both(*looks)


def _at_the_end(values: np.ndarray) -> np.ndarray:
    return np.asarray(values[:, -1]) if values.ndim == 3 else values


def same(values: np.ndarray) -> np.ndarray:
    return values


def _after(look: Look, cut: Look, values: np.ndarray) -> np.ndarray:
    return look(cut(values))


def _laid(layout: Layout, shape: tuple[int, ...], values: np.ndarray) -> np.ndarray:
    return np.asarray(layout.apply(values, shape))


def _projected(transposed: bool, values: np.ndarray) -> np.ndarray:
    return sketch_of(np.ascontiguousarray(values, np.float64), transposed).projection


# -- declared settings ---------------------------------------------------------------------------------------------


def _declared(case: Case, sheet: FormulaView) -> Hypothesis | None:
    """Return the hypothesis that differently declared settings of layers explain the diff; `None` if none differ."""
    scene, place = case.scene, case.scene.place
    assert place is not None and place.graphs is not None and place.ends is not None
    called = {call.layer for call in sheet.writer.calls.values()}
    settings: dict[str, dict[str, object]] = {}
    differences = []
    for difference in scene.declared:
        paths = called & {*difference.layers.reference}
        if difference.kind == "layer_setting" and difference.changes and paths:
            differences.append(difference)
            for path in paths:
                settings.setdefault(path, {})[difference.name] = difference.values.candidate
    steps = scene.sides(scene.number)
    cause = cause_of(differences)
    if cause is None or steps is None:
        return None
    writer = Writer(place.graphs.reference, steps.reference, scene.runs.reference.info, settings)
    try:
        formula = writer.write(place.ends.reference, place.computed.reference)
    except (UnknownError, ValueError, IndexError):
        return None
    result = formula.values[formula.end]
    target = Target(case.sides.candidate, result.shape, case.looks.reference)
    if (case.looks.reference is same and result.shape != case.sides.reference.shape) or not np.isfinite(result).all():
        return None
    edit = Edit("layer_setting", "what is declared differently", cause.sentence, {})
    # What is declared is written where a layer is made, which the calls do not show.
    return replace(
        case.hypothesis(Found(edit, result, 0.0, 1, False, sheet, target), ""), fix=cause.fix, lines=UNKNOWN_LINES
    )


# -- edits ---------------------------------------------------------------------------------------------------------


def _is_alike(sheet: FormulaView, k: int, other: FormulaView, n: int) -> bool:
    """Return True if two nodes are of one operation, both with a number or both without one."""
    has_number = [any(map(view.is_number, view.nodes[each].given)) for view, each in ((sheet, k), (other, n))]
    return sheet.nodes[k].operation == other.nodes[n].operation and has_number[0] == has_number[1]


@dataclass(frozen=True)
class Found:
    """An edit that was tried.

    Attributes:
        edit: the edit.
        made: the tensor that the edited calls give.
        off: difference of this tensor from the target.
        tried: count of edits that were tried.
        surplus: True for an edit of the candidate's calls, False for one of the reference's.
        sheet: the formula that was edited.
        target: the tensor that the edit should give.
        head: beginning of the sentence; by default the side whose calls are edited.
        case: the case to compare with, if not the common one.
    """

    edit: Edit
    made: np.ndarray
    off: float
    tried: int
    surplus: bool
    sheet: FormulaView
    target: Target
    head: str | None = None
    case: Case | None = None

    @property
    def number(self) -> float | None:
        """Return the number that was solved for and stands in the place of another one; `None` of other edits."""
        node = next(iter(self.edit.changes), -1)
        if not self.edit.free or not self.sheet.is_number(node):
            return None
        return float(np.ravel(self.sheet.formula.getter(self.edit.changes)(node))[0])


def tried(
    case: Case,
    sheet: FormulaView,
    makers: Sequence[Maker],
    target: Target,
    surplus: bool,
    some: Iterable[Number] | None = None,
) -> list[Found]:
    """Return the edits of one side's calls that give the other side's tensor, and the nearest edit of each other name.

    Args:
        some: numbers to solve for. Default: the numbers in the reference's calls, none for the candidate's.
    """
    explaining: list[Found] = []
    nearest: dict[str, Found] = {}
    unchanged, counts = sheet.formula.values[sheet.formula.end], Counter[bool]()
    if some is None:
        some = () if surplus else numbers(sheet)

    partner = case.sheets.swapped(surplus).candidate

    def look(edit: Edit) -> None:
        result = sheet.formula.changed(edit.changes)
        if result is None or result.shape != target.shape or np.array_equal(result, unchanged):
            return
        if edit.kind in _OTHER_FUNCTIONS and _flattens(sheet, edit):
            return
        if partner is not None and edit.kind in _CONTRADICTED and _contradicts(partner, sheet, edit):
            return
        # Edits that the code of both sides shows are few; the others are guesses.
        counts[edit.other >= 0] += 1
        trial = Found(edit, result, target.off(result), 1, surplus, sheet, target)
        if trial.off <= NEAR * case.noise:
            explaining.append(trial)
        elif edit.name not in nearest or trial.off < nearest[edit.name].off:
            nearest[edit.name] = trial

    until = time.thread_time() + _SECONDS
    # What both sides compute equally is edited last: a long formula leaves no time for all edits.
    agreeing = set() if partner is None else agreeing_nodes(sheet, partner)
    for edit in _last(agreeing, (edit for maker in makers for edit in maker(sheet))):
        if time.thread_time() > until:
            break
        look(edit)
    until = time.thread_time() + _SECONDS
    for number in sorted(some, key=lambda one: one.rank):
        if time.thread_time() > until:
            break
        solution = solved(sheet, number, target, case.noise)
        if solution is not None:
            look(solution)
    return [
        replace(trial, tried=counts[True] if trial.edit.other >= 0 else counts.total())
        for trial in (*explaining, *nearest.values())
    ]


def _last(nodes: set[int], edits: Iterable[Edit]) -> Iterator[Edit]:
    """Yield edits, those that change only some of the nodes after the others."""
    later = []
    for edit in edits:
        if edit.changes.keys() <= nodes:
            later.append(edit)
        else:
            yield edit
    yield from later


def _flattens(sheet: FormulaView, edit: Edit) -> bool:
    """Return True if another function gives a constant: it says no more than that its term is left out."""
    node = next(iter(edit.changes))
    values, own = sheet.formula.getter(edit.changes)(node), sheet.formula.values[node]
    return values.size > 1 and bool((values == values.flat[0]).all()) and not bool((own == own.flat[0]).all())


def named(case: Case, found: Iterable[Found]) -> bool:
    """Return True if an edit with a name of its own explains the diff, so that the difference of the code says less."""
    found = [trial for trial in found if trial.edit.telling]
    by_code = any(trial.edit.kind == "code" and trial.off <= NEAR * case.noise for trial in found)
    near = NEAR if by_code else CLOSE
    return any(trial.edit.kind != "code" and trial.off <= near * (trial.case or case).noise for trial in found)


def reported(case: Case, found: Sequence[Found]) -> Iterator[Hypothesis]:
    """Yield the simplest explaining edit, one at an unrelated place if it explains as well, then all other edits."""
    if named(case, found):
        found = [trial for trial in found if trial.edit.kind != "code"]
    ratios = {id(trial): trial.off / (trial.case or case).noise for trial in found}
    explaining = [trial for trial in found if ratios[id(trial)] <= NEAR]
    names = {trial.edit.name for trial in explaining}
    # A number that is solved for fits the rounding, too: edits without one are held against each other.
    exact = [ratios[id(trial)] for trial in explaining if not trial.edit.free and ratios[id(trial)] <= 1]
    least = min((ratios[id(trial)] for trial in explaining), default=0.0)
    limits = {k: max(_NEARER * each, _ROUNDED) for k, each in ((0, min(exact, default=least)), (1, least))}
    explaining = [trial for trial in explaining if ratios[id(trial)] <= limits[min(trial.edit.free, 1)]]
    explaining.sort(key=lambda trial: (not trial.edit.telling, trial.edit.rank, trial.surplus, trial.edit.free))
    reported = explaining[:1]
    reported += [trial for trial in explaining[1:] if reported and _apart(trial, reported[0])][:1]
    limited = (_as_limit(case, _as_order(case, trial)) for trial in reported)
    for trial in (
        *(trial for trial in limited if not _choose_both(case, trial)),
        *(trial for trial in found if trial.edit.name not in names),
    ):
        usual = _OF_CANDIDATE if trial.surplus else _OF_REFERENCE
        if trial.edit.text.startswith(("the candidate ", _OF_REFERENCE, *SIDES_OF_EDITS)):
            sides = ("the reference", "the candidate") if trial.surplus else ("the candidate", "the reference")
            text = trial.edit.text
            for mark, name in zip(SIDES_OF_EDITS, sides):
                text = text.replace(mark, name)
            trial = replace(trial, edit=replace(trial.edit, text=text), head="")
        yield (trial.case or case).hypothesis(trial, usual if trial.head is None else trial.head)


def _apart(first: Found, second: Found) -> bool:
    """Return True if two edits of one side's calls are at unrelated places."""
    if first.surplus != second.surplus or first.edit.kind == second.edit.kind or min(first.edit.at, second.edit.at) < 0:
        return False
    above = first.sheet.formula.above
    if second.edit.kind == CHOICE and first.edit.at in above(second.edit.at):
        return False  # of what is not taken, any edit explains as much
    return first.edit.at not in above(second.edit.at, _TOGETHER) and second.edit.at not in above(
        first.edit.at, _TOGETHER
    )


def _as_order(case: Case, trial: Found) -> Found:
    """Return a missing branch as another order of norm and residual, if the other side's norm feeds the branch."""
    if trial.edit.kind != "branch_missing" or not _feeds_the_branch(case, trial):
        return trial
    pair = case.scene.diff.pair
    side, other_side = ("candidate", "reference") if trial.surplus else ("reference", "candidate")
    text = (
        f"the order of the norm and the residual: the {side}'s `{getattr(pair, side).layer}` normalises the sum with "
        f"what the branch gives (post-norm), the {other_side}'s what goes into the branch (pre-norm). So "
    )
    head = _OF_CANDIDATE if trial.surplus else _OF_REFERENCE
    return replace(
        trial, edit=replace(trial.edit, kind="norm_order", telling=True, text=f"{text}{head}{trial.edit.text}"), head=""
    )


def _as_limit(case: Case, trial: Found) -> Found:
    """Return a choice that only one side's code makes as another limit, if the other side's code limits it, too."""
    sheet, other = trial.sheet, case.sheets.swapped(trial.surplus).candidate
    if trial.edit.kind != CHOICE or other is None:
        return trial
    choice = sheet.nodes[trial.edit.at]
    at = trial.edit.at
    made = sheet.formula.changed(trial.edit.changes, at)
    kept = next((g for g in choice.given if made is not None and np.array_equal(made, sheet.formula.values[g])), None)
    limit = None if kept is None else _limit(sheet, at, kept)
    for k, node in enumerate(other.nodes):
        if kept is None or node.operation not in (choice.operation, "clamp") or not node.given:
            continue
        operand = next((g for g in node.given if g in other.equal(sheet.formula.values[kept])), None)
        theirs = None if operand is None else _limit(other, k, operand)
        if limit is not None and theirs is not None:
            numbers = Both(theirs, limit).swapped(not trial.surplus)
            text = (
                f"in the candidate, the limit of {sheet.named(kept)} is {numbers.candidate:.6g} for the reference's "
                f"{numbers.reference:.6g} ({sheet.where(at)})"
            )
            edit = replace(
                trial.edit, kind="limit", name="a limit", text=text, other=k, values=Both(limit, theirs)
            )  # fmt: skip
            return replace(trial, edit=edit, head="")
    return trial


def _choose_both(case: Case, trial: Found) -> bool:
    """Return True if a choice that only one side's code should make is made as often by the other side's.

    Where one of its operands is not taken anywhere, any fault in that operand looks like a missing choice.
    """
    partner = case.sheets.swapped(trial.surplus).candidate
    if trial.edit.kind != CHOICE or partner is None:
        return False
    counts = [sum(node.operation in ("maximum", "minimum") for node in view.nodes) for view in (trial.sheet, partner)]
    return counts[0] <= counts[1]


def _limit(sheet: FormulaView, k: int, operand: int) -> float | None:
    """Return the number that an operation limits an operand to; `None` if it is no single number."""
    node = sheet.nodes[k]
    if node.operation == "clamp":
        limits = [float(node.how[name]) for name in ("low", "high") if name in node.how]
        return limits[0] if len(limits) == 1 else None
    others = [sheet.formula.values[g] for g in node.given if g != operand]
    return float(others[0].flat[0]) if len(others) == 1 and others[0].size and not np.ptp(others[0]) else None


def _feeds_the_branch(case: Case, trial: Found) -> bool:
    """Return True if the other side's norm feeds the branch that is added before this side's norm."""
    scene, pair = case.scene, case.scene.diff.pair
    place, reference, candidate = scene.place, pair.reference, pair.candidate
    if place is None or place.graphs is None or reference is None or candidate is None:
        return False
    record, other_record = Both(reference, candidate).swapped(trial.surplus)
    graph, other_graph = place.graphs.swapped(trial.surplus)
    paths = {reference.layer, candidate.layer}
    kinds = [layer.kind for run in scene.runs for layer in run.info.layers if layer.path in paths]
    call = other_graph.of_record(other_record)
    if not pair.anchor.slot.startswith("input") or not any("norm" in kind for kind in kinds) or call is None:
        return False
    partner = {p.candidate.path: p.reference.path for p in scene.alignment.pairs}
    start = next((o.tensor for o in (graph.of_record(record) or call).inputs), -1)
    branch = {c.layer for c in graph.back(start, lambda _: False) if not c.function}
    partner = partner if trial.surplus else {reference: candidate for candidate, reference in partner.items()}
    for path in {partner.get(path, "") for path in branch} - {""}:
        fed = other_graph.layers.get((path, other_record.call))
        outputs = fed.outputs if fed is not None else ()
        if any(before is call for o in outputs for before in other_graph.back(o.tensor, lambda _: False)):
            return True
    return False
