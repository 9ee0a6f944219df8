"""Recomputation of a recorded loss in float64, from the loss function's recorded inputs and settings."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from padiff.compare.diagnose.computing.call_formulas import OF_LOSSES, written
from padiff.compare.diagnose.computing.formula import Formula, KnownInputs, UnknownError
from padiff.records import Record, is_of_loss, loss_role

#: Tensors by their role in a loss function (`padiff.frameworks.losses.ROLES`, ``weight``, ``pos_weight``).
Inputs = Mapping[str, np.ndarray]
Settings = Mapping[str, Any]
# Roles of scores, and the positions of all roles among the operands of a loss function.
_SCORES = ("logits", "probabilities", "log_probabilities")
_PLACES = {**dict.fromkeys((*_SCORES, "prediction"), 0), "labels": 1, "target": 1, "weight": 2, "pos_weight": 3}


@dataclass(frozen=True)
class RecordedLoss:
    """Recorded call of a loss function.

    Attributes:
        function: common name of the function.
        call: 0 for the function's first call in its step, 1 for the second, ...
        records: records of the call by role; role ``0`` is the result.
    """

    function: str
    call: int
    records: Mapping[str, Record]

    def inputs(self) -> dict[str, np.ndarray]:
        """Return the inputs of the loss function by role.

        Raises:
            SketchOnlyError: only a sketch of some tensor was recorded.
            RunFolderError: a tensor can no longer be read.
        """
        return {role: record.value for role, record in self.records.items() if role != "0"}


def recorded_losses(records: Iterable[Record]) -> list[RecordedLoss]:
    """Return the calls of loss functions among a step's records, in order."""
    records_by_call: dict[tuple[str, int], dict[str, Record]] = defaultdict(dict)
    for record in records:
        if is_of_loss(record) and record.stage == "loss":
            records_by_call[record.slot.partition("()")[0], record.call][loss_role(record.slot)] = record
    return [RecordedLoss(function, call, roles) for (function, call), roles in records_by_call.items()]


def loss_settings(settings: Settings, function: str) -> list[dict[str, Any]]:
    """Return the settings of a loss function, by names without prefix, from a run's or a step's ``settings``.

    The list has several entries, in the order of first calls, if the step calls the function with different settings.
    """
    several: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, value in settings.items():
        what, _, path = name.partition(".")
        if what == "loss":
            number, _, key = path.partition(".")
            several[number if key else ""][key or number] = value
    return [entry for entry in several.values() if entry.get("function") == function]


def loss_of(function: str, inputs: Inputs, settings: Settings, framework: str) -> np.ndarray | None:
    """Return the result of a loss function in float64; `None` if this module can't compute the function.

    Without a reduction the losses are in the order of the function's result, but flat.

    Args:
        function: common name of the function.
        inputs: the function's inputs.
        settings: the function's settings; a missing setting has the default of both frameworks.
        framework: framework of the function: some frameworks reduce differently
            (`padiff.frameworks.settings.Conventions`).
    """
    if function not in OF_LOSSES:
        return None
    arguments = {name: value for name, value in settings.items() if name != "function"}
    try:
        if function in ("cross_entropy", "nll_loss"):
            inputs = _of_rows(inputs, settings)
            arguments["axis"] = -1
        formula = Formula()
        nodes = {_PLACES[role]: formula.leaf(values) for role, values in inputs.items()}
        # A smooth L1 that divides is torch's, whichever framework computes it.
        code = "torch" if function == "smooth_l1_loss" else framework
        node = written(formula, KnownInputs(function, nodes, arguments), -1, code)
    except (KeyError, ValueError, IndexError, UnknownError):
        return None  # a tensor is missing, or shapes do not fit
    assert isinstance(node, int)  # a loss has one output
    return formula.values[node].ravel() if settings.get("reduction") == "none" else formula.values[node]


def _of_rows(inputs: Inputs, settings: Settings) -> dict[str, np.ndarray]:
    """Return inputs with a row of scores for each label.

    Raises:
        ValueError: the shapes do not fit, or labels are no classes.
    """
    role = next((role for role in _SCORES if role in inputs), "")
    labels, soft = inputs["labels"], bool(settings.get("soft_label", False))
    if role == "log_probabilities":
        settings = {**settings, "axis": 1 if labels.ndim > 1 else -1}
    scores, labels = _rows(inputs[role], labels, settings, soft)
    is_class = (labels >= 0) & (labels < scores.shape[-1]) | (labels == int(settings.get("ignore_index", -100)))
    if not soft and not is_class.all():
        raise ValueError("labels")
    return {**inputs, role: scores, "labels": labels}


def _rows(scores: np.ndarray, labels: np.ndarray, settings: Settings, soft: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return scores with a row for each label, classes last; and the labels, flat, or in rows of classes if soft.

    The recorded tensors may be another view of the elements than the function's arguments.
    """
    axis = int(settings.get("axis", -1))
    if soft:
        scores = scores.reshape(labels.shape)
        labels = np.moveaxis(labels, axis, -1)
        scores = np.moveaxis(scores, axis, -1)
        return scores.reshape(-1, scores.shape[-1]), labels.reshape(-1, labels.shape[-1])
    sizes = [length for length in scores.shape if length != 1] if axis == -1 else scores.shape[: axis + 1]
    classes = sizes[-1] if len(sizes) else 1
    if axis != -1 and labels.ndim:
        before, after = math.prod(labels.shape[:axis]), math.prod(labels.shape[axis:])
        scores = np.moveaxis(scores.reshape(before, classes, after), 1, -1)
    return scores.reshape(labels.size, classes), labels.ravel()
