"""Formulas of loss functions, and of the functions that handwritten losses call."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from padiff.compare.diagnose.computing.formula import Formula, UnknownError
from padiff.compare.diagnose.computing.known_inputs import KnownInputs
from padiff.compare.diagnose.computing.writing import AXIS, CONSTANT, Add, Writing, constant
from padiff.frameworks.conventions import conventions_of


def _two(inputs: KnownInputs) -> tuple[int, int]:
    """Return the nodes of predictions and targets.

    Raises:
        UnknownError: the call has fewer than two operands.
    """
    nodes = inputs.all
    if len(nodes) < 2:
        raise UnknownError(inputs.function)
    return nodes[0], nodes[1]


def _reduced(add: Add, formula: Formula, rows: int, inputs: KnownInputs) -> int:
    how = inputs.argument(("reduction",), -1, "mean")
    if how == "batchmean":
        count = formula.leaf(constant(formula.values[rows].shape[0]), CONSTANT)
        return add("div", add("reduced", rows, by="sum"), count)
    return rows if how == "none" else add("reduced", rows, by=str(how))


def _cross_entropy(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    logits, labels = _two(inputs)
    ndim = formula.values[logits].ndim
    usual = -1 if conventions_of(framework).classes_last or ndim <= 2 else 1
    axis = int(inputs.argument(AXIS, -1, usual)) % ndim
    use_softmax = inputs.argument(("use_softmax",), -1, True)
    logs = add("log_softmax", logits, axis=axis) if use_softmax else add("log", logits)
    if axis != ndim - 1:
        logs = add("transpose", logs, order=[*(k for k in range(ndim) if k != axis), axis])
    smoothing = float(inputs.argument(("label_smoothing",), -1, 0.0))
    shape = formula.values[logs].shape
    weights = inputs.nodes.get(2)
    if inputs.argument(("reduction",), -1, "mean") == "none" and formula.values[labels].shape == (*shape[:-1], 1):
        # Labels with an axis for the class give losses with such an axis.
        flat = KnownInputs(
            inputs.function, {**inputs.nodes, 1: add("reshape", labels, shape=shape[:-1])}, inputs.arguments
        )
        return add("reshape", _cross_entropy(add, formula, flat, framework), shape=(*shape[:-1], 1))
    if formula.values[labels].dtype.kind == "f":
        if smoothing or weights is not None or formula.values[labels].shape != shape:
            raise UnknownError("cross_entropy of probabilities")
        return _reduced(add, formula, _of_targets(add, labels, logs), inputs)
    if formula.values[labels].shape != shape[:-1]:
        labels = add("reshape", labels, shape=shape[:-1])
    if weights is not None and smoothing:
        raise UnknownError("cross_entropy with weights and smoothing")
    targets = add("targets", labels, classes=shape[-1], smoothing=smoothing)
    rows = _of_targets(add, targets, logs)
    ignored = int(inputs.argument(("ignore_index",), -1, -100))
    counted: int | None = None
    if bool((formula.values[labels] == ignored).any()):
        counted = add("ne", labels, formula.leaf(np.asarray(ignored), CONSTANT))
        counted = add("cast", counted, dtype="float32")
    if weights is not None:
        class_weights = add("of_classes", weights, labels)
        counted = class_weights if counted is None else add("mul", class_weights, counted)
    if counted is None:
        return _reduced(add, formula, rows, inputs)
    rows = add("mul", rows, counted)
    all_count = weights is None and conventions_of(framework).counts_ignored and ignored < 0
    if inputs.argument(("reduction",), -1, "mean") != "mean" or all_count:
        return _reduced(add, formula, rows, inputs)
    return add("div", add("reduced", rows, by="sum"), add("reduced", counted, by="sum"))


def _of_targets(add: Add, targets: int, logs: int) -> int:
    return add("neg", add("reduced", add("mul", targets, logs), by="sum", axis=-1))


def _nll(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    logs, labels = _two(inputs)
    shape = formula.values[logs].shape
    if len(shape) != 2 or len(inputs.nodes) > 2 or (formula.values[labels] < 0).any():
        raise UnknownError("nll_loss")
    targets = add("targets", labels, classes=shape[-1], smoothing=0.0)
    return _reduced(add, formula, _of_targets(add, targets, logs), inputs)


def _squares(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    return _reduced(add, formula, add("square", add("sub", *_two(inputs))), inputs)


def _absolute(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    return _reduced(add, formula, add("abs", add("sub", *_two(inputs))), inputs)


def _smooth(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    beta = float(inputs.argument(("beta", "delta"), -1, 1.0))
    divided = not conventions_of(framework).smooth_undivided and inputs.function != "huber_loss"
    rows = add("huber", add("sub", *_two(inputs)), beta=beta, divided=divided)
    return _reduced(add, formula, rows, inputs)


def _with_logits(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    logits, targets = _two(inputs)
    soft = add("act", logits, function="softplus", number=1.0)
    rows = add("sub", soft, add("mul", targets, logits))
    if 3 in inputs.nodes:
        # The loss of positive targets is added (pos_weight - 1) more times.
        once = formula.leaf(constant(1.0), CONSTANT)
        lacking = add("act", add("neg", logits), function="softplus", number=1.0)
        more = add("mul", add("sub", inputs.node(3), once), add("mul", targets, lacking))
        rows = add("add", rows, more)
    return _reduced(add, formula, _weighed(add, rows, inputs), inputs)


def _weighed(add: Add, rows: int, inputs: KnownInputs) -> int:
    return add("mul", rows, inputs.node(2)) if 2 in inputs.nodes else rows


def _binary(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    shares, targets = _two(inputs)
    unit = formula.leaf(constant(1.0), CONSTANT)
    rows = add("mul", targets, add("log", shares))
    others = add("mul", add("sub", unit, targets), add("log", add("sub", unit, shares)))
    return _reduced(add, formula, _weighed(add, add("neg", add("add", rows, others)), inputs), inputs)


def _divergence(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    logs, targets = _two(inputs)
    if inputs.argument(("log_target",), -1, False) or (formula.values[targets] <= 0).any():
        raise UnknownError("kl_div")
    return _reduced(add, formula, add("mul", targets, add("sub", add("log", targets), logs)), inputs)


def _picked(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    x, index = _two(inputs)
    if inputs.function == "gather" and conventions_of(framework).gathers_rows:
        return add("rows", x, index, axis=int(inputs.argument(AXIS, 2, 0)))
    return add("picked", x, index, axis=int(inputs.argument(AXIS, 1, inputs.argument((), 2, -1))))


def _one_hot(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    classes = inputs.argument(("num_classes",), 1)
    return add("targets", inputs.first, classes=int(classes), smoothing=0.0)


def _log_sigmoid(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    return add("neg", add("act", add("neg", inputs.first), function="softplus", number=1.0))


#: Writers of formulas, by the function's common name.
OF_LOSSES: Mapping[str, Writing] = {
    "cross_entropy": _cross_entropy,
    "nll_loss": _nll,
    "mse_loss": _squares,
    "l1_loss": _absolute,
    "smooth_l1_loss": _smooth,
    "huber_loss": _smooth,
    "binary_cross_entropy": _binary,
    "binary_cross_entropy_with_logits": _with_logits,
    "kl_div": _divergence,
    "gather": _picked,
    "take_along_axis": _picked,
    "one_hot": _one_hot,
    "logsigmoid": _log_sigmoid,
}
