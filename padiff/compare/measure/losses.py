"""Recomputation of a recorded loss in float64, from the loss function's recorded inputs and settings."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from padiff.frameworks.settings import conventions_of
from padiff.records import Record, is_of_loss, loss_role

#: Tensors by their role in a loss function (`padiff.frameworks.losses.ROLES`, ``weight``, ``pos_weight``).
Inputs = Mapping[str, np.ndarray]
Settings = Mapping[str, Any]


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
    compute = _LOSSES.get(function)
    if compute is None:
        return None
    wide = {role: np.asarray(a, np.float64) if a.dtype.kind not in "iub" else a for role, a in inputs.items()}
    try:
        with np.errstate(all="ignore"):
            return np.asarray(compute(wide, settings, framework), np.float64)
    except (KeyError, ValueError, IndexError):
        return None  # a tensor is missing, or shapes do not fit


def _counts_ignored(framework: str) -> bool:
    return conventions_of(framework).counts_ignored


def _reduced(losses: np.ndarray, settings: Settings, among: float | None = None) -> np.ndarray:
    """Return the reduced losses; the mean is the sum divided by ``among``. Default: the number of losses."""
    reduction = settings.get("reduction", "mean")
    if reduction == "none":
        return losses.ravel()
    if reduction == "sum":
        return np.asarray(losses.sum())
    if reduction != "mean":
        raise ValueError(reduction)
    return np.asarray(losses.sum() / (losses.size if among is None else among))


# -- classes -----------------------------------------------------------------------------------------------------------


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))


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


def _cross_entropy(inputs: Inputs, settings: Settings, framework: str) -> np.ndarray:
    soft = bool(settings.get("soft_label", False))
    plain = settings.get("use_softmax", True)
    scores = inputs["logits"] if plain else inputs["probabilities"]
    rows, labels = _rows(scores, inputs["labels"], settings, soft)
    logs = _log_softmax(rows) if plain else np.log(rows)
    smoothing = float(settings.get("label_smoothing", 0.0))
    return _of_classes(logs, labels, soft, smoothing, inputs.get("weight"), settings, framework)


def _of_classes(
    logs: np.ndarray,
    labels: np.ndarray,
    soft: bool,
    smoothing: float,
    weight: np.ndarray | None,
    settings: Settings,
    framework: str,
) -> np.ndarray:
    """Return the cross-entropy of rows of log-probabilities."""
    ignored = int(settings.get("ignore_index", -100))
    count = logs.shape[-1]
    if _counts_ignored(framework) and (soft or smoothing):
        return _of_soft_rows(logs, labels, soft, smoothing, weight, ignored, settings)
    each = np.ones(count) if weight is None else weight.ravel()
    if soft:
        targets = labels * (1 - smoothing) + smoothing / count
        return _reduced(-(each * targets * logs).sum(-1), settings)
    is_counted = labels != ignored
    places = np.where(is_counted, labels, 0)
    row_weights = each[places] * is_counted
    losses = -(1 - smoothing) * row_weights * np.take_along_axis(logs, places[:, None], -1)[:, 0]
    losses -= smoothing / count * is_counted * (each * logs).sum(-1)
    if _counts_ignored(framework) and ignored < 0 and weight is None:
        return _reduced(losses, settings)
    among = float(row_weights.sum())
    return _reduced(losses, settings, among or (1.0 if _counts_ignored(framework) else math.nan))


def _of_soft_rows(
    logs: np.ndarray,
    labels: np.ndarray,
    soft: bool,
    smoothing: float,
    weight: np.ndarray | None,
    ignored: int,
    settings: Settings,
) -> np.ndarray:
    """Return the cross-entropy of soft or smoothed labels as paddle computes it.

    A row has one weight for all of its classes. With an ``ignore_index`` of 0 or more, the mean divides by the
    (weighted) number of elements of the targets that differ from the index.
    """
    count = logs.shape[-1]
    targets = (labels if soft else np.eye(count)[labels]) * (1 - smoothing) + smoothing / count
    losses, among = -(targets * logs).sum(-1), float(len(logs))
    if weight is not None:
        row_weights = targets @ weight.ravel()
        losses, among = losses * row_weights, float(row_weights.sum())
    if ignored >= 0:
        mask = targets != ignored
        among = float(mask.sum() if weight is None else (mask * row_weights[:, None]).sum())
    return _reduced(losses, settings, among or 1.0)


def _nll(inputs: Inputs, settings: Settings, framework: str) -> np.ndarray:
    axis = 1 if inputs["labels"].ndim > 1 else -1
    logs, labels = _rows(inputs["log_probabilities"], inputs["labels"], {"axis": axis}, soft=False)
    is_counted = labels != int(settings.get("ignore_index", -100))
    places = np.where(is_counted, labels, 0)
    weight = inputs.get("weight")
    row_weights = (np.ones(logs.shape[-1]) if weight is None else weight.ravel())[places] * is_counted
    losses = -row_weights * np.take_along_axis(logs, places[:, None], -1)[:, 0]
    return _reduced(losses, settings, float(row_weights.sum()) or math.nan)


# -- yes or no ---------------------------------------------------------------------------------------------------------


def _binary(inputs: Inputs, settings: Settings, framework: str) -> np.ndarray:
    p, y = inputs["probabilities"], inputs["labels"]
    yes, no = (np.maximum(np.log(probability), -100.0) for probability in (p, 1 - p))  # both frameworks have this bound
    return _reduced(-(y * yes + (1 - y) * no) * inputs.get("weight", np.ones(())), settings)


def _binary_with_logits(inputs: Inputs, settings: Settings, framework: str) -> np.ndarray:
    x, y = inputs["logits"], inputs["labels"]
    more = (inputs.get("pos_weight", np.ones(())) - 1) * y + 1
    losses = (1 - y) * x + more * (np.log1p(np.exp(-np.abs(x))) + np.maximum(-x, 0))
    return _reduced(losses * inputs.get("weight", np.ones(())), settings)


# -- numbers -----------------------------------------------------------------------------------------------------------


def _distance(of: Callable[[np.ndarray, Settings], np.ndarray]) -> Callable[[Inputs, Settings, str], np.ndarray]:
    def compute(inputs: Inputs, settings: Settings, framework: str) -> np.ndarray:
        losses, weight = of(inputs["prediction"] - inputs["target"], settings), inputs.get("weight")
        if weight is None:
            return _reduced(losses, settings)
        return _reduced(losses * weight, settings, None if of is _huber else float(weight.sum()))

    return compute


def _huber(error: np.ndarray, settings: Settings) -> np.ndarray:
    delta, size = float(settings.get("delta", 1.0)), np.abs(error)
    return np.asarray(np.where(size <= delta, 0.5 * error**2, delta * (size - 0.5 * delta)))


def _smooth_l1(error: np.ndarray, settings: Settings) -> np.ndarray:
    beta, size = float(settings.get("beta", 1.0)), np.abs(error)
    return size if beta == 0 else np.asarray(np.where(size < beta, 0.5 * error**2 / beta, size - 0.5 * beta))


def _kl(inputs: Inputs, settings: Settings, framework: str) -> np.ndarray:
    logs, target = inputs["log_probabilities"], inputs["target"]
    if settings.get("log_target", False):
        losses = np.exp(target) * (target - logs)
    else:
        losses = np.where(target > 0, target * (np.log(np.where(target > 0, target, 1.0)) - logs), 0.0)
    if settings.get("reduction") == "batchmean":
        return np.asarray(losses.sum() / (len(logs) if logs.ndim else 1))
    return _reduced(losses, settings)


_LOSSES: dict[str, Callable[[Inputs, Settings, str], np.ndarray]] = {
    "cross_entropy": _cross_entropy,
    "nll_loss": _nll,
    "binary_cross_entropy": _binary,
    "binary_cross_entropy_with_logits": _binary_with_logits,
    "mse_loss": _distance(lambda error, _: error**2),
    "l1_loss": _distance(lambda error, _: np.abs(error)),
    "huber_loss": _distance(_huber),
    "smooth_l1_loss": _distance(_smooth_l1),
    "kl_div": _kl,
}
