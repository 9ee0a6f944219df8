"""Writes down loss functions, as operations of a formula; and what losses written by hand are made of."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from padiff.compare.diagnose.computing.formula import Formula, UnknownError
from padiff.compare.diagnose.computing.given import Given
from padiff.compare.diagnose.computing.writing import AXIS, CONSTANT, Add, Writing, constant
from padiff.frameworks.known import known


def _two(given: Given) -> tuple[int, int]:
    """Predictions, and what they should be."""
    nodes = given.all
    if len(nodes) < 2:
        raise UnknownError(given.function)
    return nodes[0], nodes[1]


def _reduced(add: Add, formula: Formula, rows: int, given: Given) -> int:
    how = given.argument(("reduction",), -1, "mean")
    if how == "batchmean":
        count = formula.leaf(constant(formula.values[rows].shape[0]), CONSTANT)
        return add("div", add("reduced", rows, by="sum"), count)
    return rows if how == "none" else add("reduced", rows, by=str(how))


def _cross_entropy(add: Add, formula: Formula, given: Given, framework: str) -> int:
    logits, labels = _two(given)
    ndim = formula.values[logits].ndim
    usual = -1 if known(framework).classes_last or ndim <= 2 else 1
    axis = int(given.argument(AXIS, -1, usual)) % ndim
    use_softmax = given.argument(("use_softmax",), -1, True)
    logs = add("log_softmax", logits, axis=axis) if use_softmax else add("log", logits)
    if axis != ndim - 1:
        logs = add("transpose", logs, order=[*(k for k in range(ndim) if k != axis), axis])
    smoothing = float(given.argument(("label_smoothing",), -1, 0.0))
    shape = formula.values[logs].shape
    weights = given.nodes.get(2)
    if formula.values[labels].dtype.kind == "f":
        if smoothing or weights is not None or formula.values[labels].shape != shape:
            raise UnknownError("cross_entropy of probabilities")
        return _reduced(add, formula, _of_targets(add, labels, logs), given)
    if formula.values[labels].shape != shape[:-1]:
        labels = add("reshape", labels, shape=shape[:-1])
    if weights is not None and smoothing:
        raise UnknownError("cross_entropy with weights and smoothing")
    targets = add("targets", labels, classes=shape[-1], smoothing=smoothing)
    rows = _of_targets(add, targets, logs)
    ignored = int(given.argument(("ignore_index",), -1, -100))
    counted: int | None = None
    if bool((formula.values[labels] == ignored).any()):
        counted = add("ne", labels, formula.leaf(np.asarray(ignored), CONSTANT))
        counted = add("cast", counted, dtype="float32")
    if weights is not None:
        own = add("of_classes", weights, labels)
        counted = own if counted is None else add("mul", own, counted)
    if counted is None:
        return _reduced(add, formula, rows, given)
    rows = add("mul", rows, counted)
    all_count = weights is None and known(framework).counts_ignored and ignored < 0
    if given.argument(("reduction",), -1, "mean") != "mean" or all_count:
        return _reduced(add, formula, rows, given)
    return add("div", add("reduced", rows, by="sum"), add("reduced", counted, by="sum"))


def _of_targets(add: Add, targets: int, logs: int) -> int:
    return add("neg", add("reduced", add("mul", targets, logs), by="sum", axis=-1))


def _nll(add: Add, formula: Formula, given: Given, framework: str) -> int:
    logs, labels = _two(given)
    shape = formula.values[logs].shape
    if len(shape) != 2 or len(given.nodes) > 2 or (formula.values[labels] < 0).any():
        raise UnknownError("nll_loss")
    targets = add("targets", labels, classes=shape[-1], smoothing=0.0)
    return _reduced(add, formula, _of_targets(add, targets, logs), given)


def _squares(add: Add, formula: Formula, given: Given, framework: str) -> int:
    return _reduced(add, formula, add("square", add("sub", *_two(given))), given)


def _absolute(add: Add, formula: Formula, given: Given, framework: str) -> int:
    return _reduced(add, formula, add("abs", add("sub", *_two(given))), given)


def _smooth(add: Add, formula: Formula, given: Given, framework: str) -> int:
    beta = float(given.argument(("beta", "delta"), -1, 1.0))
    divided = not known(framework).smooth_undivided and given.function != "huber_loss"
    rows = add("huber", add("sub", *_two(given)), beta=beta, divided=divided)
    return _reduced(add, formula, rows, given)


def _with_logits(add: Add, formula: Formula, given: Given, framework: str) -> int:
    logits, targets = _two(given)
    soft = add("act", logits, function="softplus", number=1.0)
    rows = add("sub", soft, add("mul", targets, logits))
    if 3 in given.nodes:
        # A positive one's is weighed: by as much more than once.
        once = formula.leaf(constant(1.0), CONSTANT)
        lacking = add("act", add("neg", logits), function="softplus", number=1.0)
        more = add("mul", add("sub", given.node(3), once), add("mul", targets, lacking))
        rows = add("add", rows, more)
    return _reduced(add, formula, _weighed(add, rows, given), given)


def _weighed(add: Add, rows: int, given: Given) -> int:
    return add("mul", rows, given.node(2)) if 2 in given.nodes else rows


def _binary(add: Add, formula: Formula, given: Given, framework: str) -> int:
    shares, targets = _two(given)
    one = formula.leaf(constant(1.0), CONSTANT)
    rows = add("mul", targets, add("log", shares))
    others = add("mul", add("sub", one, targets), add("log", add("sub", one, shares)))
    return _reduced(add, formula, _weighed(add, add("neg", add("add", rows, others)), given), given)


def _divergence(add: Add, formula: Formula, given: Given, framework: str) -> int:
    logs, targets = _two(given)
    if given.argument(("log_target",), -1, False) or (formula.values[targets] <= 0).any():
        raise UnknownError("kl_div")
    return _reduced(add, formula, add("mul", targets, add("sub", add("log", targets), logs)), given)


def _picked(add: Add, formula: Formula, given: Given, framework: str) -> int:
    x, index = _two(given)
    if given.function == "gather" and known(framework).gathers_rows:
        raise UnknownError("gather")
    return add("picked", x, index, axis=int(given.argument(AXIS, 1, given.argument((), 2, -1))))


def _one_hot(add: Add, formula: Formula, given: Given, framework: str) -> int:
    classes = given.argument(("num_classes",), 1)
    return add("targets", given.first, classes=int(classes), smoothing=0.0)


def _log_sigmoid(add: Add, formula: Formula, given: Given, framework: str) -> int:
    return add("neg", add("act", add("neg", given.first), function="softplus", number=1.0))


#: By the names of the functions.
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
