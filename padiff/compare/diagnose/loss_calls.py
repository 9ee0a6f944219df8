"""Recorded calls of loss functions, computed in float64, and the outputs that a loss is computed from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from padiff.compare.declared.layers import loss_fix
from padiff.compare.diagnose.computing.recorded_losses import RecordedLoss, loss_of, loss_settings, recorded_losses
from padiff.compare.diagnose.hypotheses import transforms
from padiff.compare.diagnose.hypotheses.diff_context import DiffContext
from padiff.compare.measure.operands import operands
from padiff.errors import RunFolderError, SketchOnlyError
from padiff.frameworks.catalog import SPELLINGS
from padiff.records import Both, Cause, Diff, Problem, Record, RunInfo, Step, is_loss, is_of_loss, settings_at

# A computed loss counts as the other side's if it is this many times nearer than the recorded one, and at most this
# relative error away. Chosen.
_NEARER, _NEAR = 30.0, 2e-3
#: Roles of inputs that weigh the classes of a loss.
WEIGHTS = ("weight", "pos_weight")


@dataclass(frozen=True)
class LossCall:
    """One side's call of a loss function.

    Attributes:
        framework: the framework of the run.
        loss: the records of the call.
        settings: the settings of the function.
        inputs: the inputs by role; `None` if they can't be read.
        output: the recorded output; `None` if it can't be read.
    """

    framework: str
    loss: RecordedLoss
    settings: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, np.ndarray] | None = None
    output: np.ndarray | None = None

    def computed(self, **other: Any) -> np.ndarray | None:
        """Return the output computed in float64; `None` without inputs.

        Args:
            other: attributes of the call to replace, by name.
        """
        call = replace(self, **other)
        if call.inputs is None:
            return None
        return loss_of(
            str(call.settings.get("function", call.loss.function)), call.inputs, call.settings, call.framework
        )

    def gives(self, expected: np.ndarray | None, **other: Any) -> bool:
        """Return True if the call gives the expected output only with some attributes replaced.

        Args:
            expected: the output of the other side.
            other: attributes of the call to replace, by name.
        """
        loss, recorded = self.computed(**other), self.output
        if loss is None or expected is None or recorded is None or loss.size != expected.size:
            return False
        size = float(np.linalg.norm(expected))
        error = float(np.linalg.norm(loss.ravel() - expected.ravel()))
        recorded_error = (
            float(np.linalg.norm(recorded.ravel() - expected.ravel())) if recorded.size == expected.size else np.inf
        )
        return error <= _NEAR * size and error * _NEARER <= recorded_error


def calls_of(scene: DiffContext) -> Both[LossCall] | None:
    """Return the two calls that a scene's diff belongs to; `None` if a side does not have exactly one such call."""
    sides = scene.sides(scene.number)
    if sides is None:
        return None
    calls = []
    for record, step, run in zip(scene.diff.pair.sides, sides, scene.runs):
        losses = recorded_losses(step.records)
        if record is None:
            return None
        if is_of_loss(record):
            function = record.slot.partition("()")[0]
            losses = [loss for loss in losses if (loss.function, loss.call) == (function, record.call)]
        elif len(losses) > sum(is_loss(each) for each in step.records):
            return None  # a loss of several calls: of each step of a sequence, say
        else:
            losses = [loss for loss in losses if loss.call == record.call]
        if len(losses) != 1:
            return None
        calls.append(_read(losses[0], step, run.info))
    return Both(*calls)


def loss_calls(step: Step, info: RunInfo) -> list[LossCall]:
    """Return all calls of loss functions in a step."""
    return [_read(loss, step, info) for loss in recorded_losses(step.records)]


def _read(loss: RecordedLoss, step: Step, info: RunInfo) -> LossCall:
    call = LossCall(info.framework, loss)
    try:
        output = loss.records["0"].value.astype(np.float64) if "0" in loss.records else None
        call = replace(call, output=output)
        call = replace(call, inputs=loss.inputs())
    except (SketchOnlyError, RunFolderError):
        pass
    options = loss_settings(settings_at(info.settings, step.settings), loss.function)
    fitting = [settings for settings in options if is_near(call.computed(settings=settings), call.output)]
    return replace(call, settings=next(iter(fitting or options), {"function": loss.function}))


def is_near(found: np.ndarray | None, expected: np.ndarray | None) -> bool:
    """Return True if a computed output agrees with the recorded one."""
    if found is None or expected is None or found.size != expected.size:
        return False
    return bool(np.linalg.norm(found.ravel() - expected.ravel()) <= _NEAR * np.linalg.norm(expected))


def are_exchangeable(calls: Both[LossCall]) -> bool:
    """Return True if the other side's function gives a side's loss of its inputs, too: of the logarithms of
    probabilities two functions give the same, though not of logits.
    """
    exchanged = zip(calls, reversed([*calls]))
    return any(is_near(call.computed(settings=other.settings), call.output) for call, other in exchanged)


def sides_of(diff: Diff) -> Both[np.ndarray] | None:
    """Return both tensors of a diff in one layout; `None` if their layouts do not fit."""
    tensors = operands(diff.pair)
    return None if isinstance(tensors, Problem) else tensors.values()


# -- words -------------------------------------------------------------------------------------------------------------


def number_text(output: np.ndarray | None) -> str:
    """Return a loss as text."""
    if output is None:
        return "unknown"
    return f"{float(output.ravel()[0]):.6g}" if output.size == 1 else "element by element"


def functions_of(framework: str) -> str:
    """Return the module of a framework's functions, with a trailing dot; empty for an unknown framework."""
    spelling = SPELLINGS.get(framework)
    return f"{spelling.layers}.functional." if spelling is not None else ""


def spelled(framework: str, function: str) -> str:
    """Return a framework's name of a loss function."""
    spelling = SPELLINGS.get(framework)
    return function if spelling is None else spelling.losses.get(function, (function, ""))[0]


def fixed(calls: Both[LossCall], settings: Mapping[str, Any], function: str = "") -> str:
    """Return the candidate's call as code, with settings of the reference."""
    candidate = calls.candidate
    return loss_fix(candidate.framework, function or candidate.loss.function, settings)


# Least count of numbers that are not equal by chance, and most elements of an output that is read.
_NUMBERS, _MOST = 8, 4_000_000
# Most places that labels are shifted by.
_SHIFTS = 3
_LABELS = ("labels", "target")


@dataclass(frozen=True)
class _Source:
    """What an input of a loss function was made from.

    Attributes:
        records: the outputs that have these values; several if layers hand them on.
        values: the values of the output.
        rows: the rows of the output that the input has, in its order; `None` if it has all values.
    """

    records: tuple[Record, ...]
    values: np.ndarray
    rows: np.ndarray | None

    @property
    def words(self) -> str:
        """Return the innermost layer that gave the output, in words."""
        record = max(self.records, key=lambda record: len(record.layer))
        output = record.slot.partition(".")[2]
        return f"output {output} of {record.layer}" if output not in ("", "0") else f"the output of {record.layer}"


def source_cause(scene: DiffContext, calls: Both[LossCall] | None) -> Cause | None:
    """Return the cause that a loss function is given another output, or other rows of it; `None` if it is not."""
    steps = scene.sides(scene.number)
    if calls is None or steps is None or any(call.inputs is None for call in calls):
        return None
    names = calls.map(lambda call: [role for role, values in (call.inputs or {}).items() if values.size >= _NUMBERS])
    roles = [role for role in names.reference if role in names.candidate]
    sources = calls.zip(steps).map(lambda side: {role: _source(side[0], role, side[1]) for role in roles})
    links = _links(scene)
    for role in roles:
        reference, candidate = sources.reference[role], sources.candidate[role]
        if reference is not None and candidate is not None and not _is_linked(reference, candidate, links):
            return _other_output(scene, calls, sources, links)
    for role in roles:
        sides = Both(sources.reference[role], sources.candidate[role])
        if sides.reference is not None and sides.candidate is not None and role not in _LABELS:
            return _other_rows(calls, Both(sides.reference, sides.candidate))
    return None


def _source(call: LossCall, role: str, step: Step) -> _Source | None:
    """Return the output that an input was made from; `None` if no output of the step has its values."""
    assert call.inputs is not None
    values = call.inputs[role]
    if values.dtype.kind != "f" or not values.ndim:
        return None
    matches: dict[bool, list[tuple[Record, np.ndarray, np.ndarray | None]]] = {True: [], False: []}
    for record in step.records:
        size = int(np.prod(record.shape))
        rows_fit = len(record.shape) > 1 and record.shape[-1] == values.shape[-1] > 1
        if record.stage != "forward" or record.source.sketched or not record.shape or size > _MOST:
            continue
        if size != values.size and (size < values.size or not rows_fit):
            continue  # before the tensor is read
        output = record.value
        if size == values.size and np.array_equal(output.ravel(), values.ravel()):
            matches[True].append((record, output, None))
        elif not matches[True] and rows_fit:
            rows = _rows(output, values)
            if rows is not None:
                matches[False].append((record, output, rows))
    matching = matches[True] or matches[False]
    if not matching:
        return None
    _, output, rows = matching[-1]
    alike = [record for record, other, _ in matching if other.size == output.size]
    return _Source(tuple(alike), output, rows)


def _rows(output: np.ndarray, values: np.ndarray) -> np.ndarray | None:
    """Return the indices of the output's rows that are the rows of other values, equal ones in order; `None` if they
    are not.
    """
    part = _slice(output, values)
    if part is not None:
        return part
    return transforms.row_order(output.reshape(-1, output.shape[-1]), values.reshape(-1, values.shape[-1]))


def _slice(output: np.ndarray, values: np.ndarray) -> np.ndarray | None:
    """Return the indices of the output's rows if the values are those of a range of places of each sequence."""
    rows, lead = values.reshape(-1, values.shape[-1]), output.shape[:-1]
    if len(lead) != 2 or not 0 < len(rows) < lead[0] * lead[1] or len(rows) % lead[0]:
        return None
    indices, length = np.arange(lead[0] * lead[1]).reshape(lead), len(rows) // lead[0]
    for start in range(lead[1] - length + 1):
        if np.array_equal(output[:, start : start + length].reshape(rows.shape), rows):
            return np.asarray(indices[:, start : start + length].ravel())
    return None


def _links(scene: DiffContext) -> set[tuple[tuple[str, int], tuple[str, int]]]:
    """Return the outputs of both sides that correspond, as pairs of site and call."""
    pairs = [diff.pair for diff in scene.step if diff.pair.stage == "forward" and diff.pair.complete]
    return {
        ((pair.reference.site, pair.reference.call), (pair.candidate.site, pair.candidate.call))
        for pair in pairs
        if pair.reference is not None and pair.candidate is not None
    }


def _is_linked(reference: _Source, candidate: _Source, links: set[tuple[tuple[str, int], tuple[str, int]]]) -> bool:
    keys = Both(reference, candidate).map(lambda source: [(record.site, record.call) for record in source.records])
    return any((one, other) in links for one in keys.reference for other in keys.candidate)


def _other_output(
    scene: DiffContext,
    calls: Both[LossCall],
    sources: Both[dict[str, _Source | None]],
    links: set[tuple[tuple[str, int], tuple[str, int]]],
) -> Cause | None:
    """Return the cause that a loss function is given other outputs of the model."""
    steps, texts, inputs = scene.sides(scene.number), [], dict(calls.candidate.inputs or {})
    assert steps is not None and calls.reference.inputs is not None
    of_candidate = {(record.site, record.call): record for record in steps.candidate.records}
    for role in sources.reference:
        reference, candidate = sources.reference[role], sources.candidate[role]
        if reference is not None and candidate is not None and _is_linked(reference, candidate, links):
            continue
        if reference is None and candidate is None:
            inputs[role] = calls.reference.inputs[role]
            continue
        sides = [source.words if source is not None else "no output of the model" for source in (reference, candidate)]
        texts.append(f"{sides[1]} as {role.replace('_', ' ')}, where the reference is given {sides[0]}")
        inputs[role] = calls.reference.inputs[role]
        if reference is not None:
            keys = [(record.site, record.call) for record in reference.records]
            partner = next((of_candidate.get(other) for one, other in links if one in keys), None)
            if partner is None or partner.source.sketched:
                return None
            flat = partner.value.reshape(-1, partner.shape[-1]) if reference.rows is not None else partner.value
            values = flat if reference.rows is None else flat[reference.rows]
            if values.size != calls.reference.inputs[role].size:
                return None
            inputs[role] = values.reshape(calls.reference.inputs[role].shape)
    proven = calls.candidate.gives(calls.reference.output, inputs=inputs)
    text = f"{calls.candidate.loss.function}() is given {', and '.join(texts)}"
    shown = "the values are equal to the bit"
    if proven:
        shown += f"; with the reference's the candidate's loss is {number_text(calls.reference.output)}"
    return Cause("loss_source", text, proven, shown)


def _other_rows(calls: Both[LossCall], sources: Both[_Source]) -> Cause | None:
    """Return the cause that a loss function is given other rows of an output, or labels of other rows."""
    leads = sources.map(lambda source: source.values.shape[:-1])
    labels = calls.map(lambda call: _labels_of(call))
    if leads.reference != leads.candidate or labels.reference is None or labels.candidate is None:
        return None
    count = int(np.prod(leads.reference))
    rows = sources.map(lambda source: np.arange(count) if source.rows is None else source.rows)
    of_rows = rows.zip(Both(labels.reference, labels.candidate))
    if any(len(side) != values.size for side, values in of_rows):
        return None
    known = of_rows.map(lambda side: dict(zip(side[0].tolist(), side[1].ravel().tolist())))
    if known.reference.keys() == known.candidate.keys():
        return None
    sentence = _shift(known, leads.reference[-1], calls) or _more_rows(known, leads.reference)
    if not sentence or calls.reference.inputs is None or calls.candidate.inputs is None:
        return None
    flat = sources.candidate.values.reshape(-1, sources.candidate.values.shape[-1])
    inputs = dict(calls.candidate.inputs)
    for role, values in calls.reference.inputs.items():
        inputs[role] = flat[rows.reference].reshape(values.shape) if role not in _LABELS else values
    proven = calls.candidate.gives(calls.reference.output, inputs=inputs)
    shown = f"of the reference's rows, the candidate's loss is {number_text(calls.reference.output)}" * proven
    return Cause("loss_rows", sentence, proven, shown)


def _labels_of(call: LossCall) -> np.ndarray | None:
    role = next((role for role in _LABELS if role in (call.inputs or {})), None)
    values = None if role is None or call.inputs is None else call.inputs[role]
    return values if values is not None and values.dtype.kind in "iu" else None


def _shift(known: Both[Mapping[int, int]], length: int, calls: Both[LossCall]) -> str:
    """Return a sentence on labels that are shifted against the predictions; empty if they are not."""
    ignored = int(calls.candidate.settings.get("ignore_index", -100))
    shared = known.reference.keys() & known.candidate.keys()
    if all(known.reference[row] == known.candidate[row] for row in shared):
        return ""
    for shift in (sign * away for away in range(1, _SHIFTS + 1) for sign in (1, -1)):
        places = [row for row in known.candidate if row - shift in known.reference]
        places = [row for row in places if (row - shift) // length == row // length]
        counted = [row for row in places if known.candidate[row] != ignored]
        if len(counted) >= _NUMBERS and all(known.candidate[row] == known.reference[row - shift] for row in places):
            other = f"{abs(shift)} place{'s' * (abs(shift) > 1)} {'before' if shift > 0 else 'after'} it"
            return (
                f"the labels are shifted against the predictions: the candidate compares each prediction with the "
                f"label that the reference compares with that {other}"
            )
    return ""


def _more_rows(known: Both[Mapping[int, int]], lead: Sequence[int]) -> str:
    """Return a sentence on rows that only one side's loss has; empty if the rows of both have other labels, too."""
    shared = known.reference.keys() & known.candidate.keys()
    if not shared or any(known.reference[row] != known.candidate[row] for row in shared):
        return ""
    texts = [
        f"{len(rows)} rows{_places(rows, lead)} that the {other}'s leaves out"
        for rows, other in (
            (known.candidate.keys() - known.reference.keys(), "reference"),
            (known.reference.keys() - known.candidate.keys(), "candidate"),
        )
        if rows
    ]
    return f"the loss is of other rows of the predictions: {', and '.join(texts)}"


def _places(rows: Iterator[int] | set[int], lead: Sequence[int]) -> str:
    """Return where rows of a sequence lie, in words; empty if they lie at different places."""
    places = {row % lead[-1] for row in rows}
    if len(lead) < 2 or len(places) > 1:
        return ""
    place = places.pop()
    return ", the last of each sequence," if place == lead[-1] - 1 else f", place {place} of each sequence,"
