"""Edits of losses: masks and labels, divisors of means, label smoothing, terms, functions of an error."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from padiff.compare.diagnose.computing.divergence import Number, scaled
from padiff.compare.diagnose.computing.edit import (
    SIDES_OF_EDITS,
    UNNAMED,
    Edit,
    FormulaView,
    dropped_terms,
    instead,
    put,
)
from padiff.compare.diagnose.computing.formula import MADE, Change, Node
from padiff.compare.diagnose.computing.operations import OPERATIONS, reduced
from padiff.frameworks.catalog import GRAD
from padiff.records import Both

_SIDE, _OTHER = SIDES_OF_EDITS
# Usual exponents of focal losses.
_EXPONENTS = (2.0, 1.0, 3.0, 0.5)
# Functions with a parameter for element weights.
_WEIGHING = frozenset({"binary_cross_entropy", "binary_cross_entropy_with_logits"})
# Relative difference of a loss and its slopes that is no change.
_NO_CHANGE = 1e-5
# Operations that broadcast, and the most numbers of an operand that each meet each other one.
_ELEMENTWISE = frozenset({"add", "sub", "mul", "div"})
_BROADCAST = 500
# The most classes whose weights a text lists.
_WRITTEN = 8


def loss_edits(sheet: FormulaView) -> Iterator[Edit]:
    """Yield edits that compute a loss in another way."""
    for k in range(len(sheet.nodes) - 1):
        yield from _mask(sheet, k)
        yield from _even(sheet, k)
        yield from _labels(sheet, k)
        yield from _mean(sheet, k)
        yield from _error(sheet, k)
        yield from _rows(sheet, k)
        yield from _divergence(sheet, k)
        yield from _broadcast(sheet, k)


def _broadcast(sheet: FormulaView, k: int) -> Iterator[Edit]:
    """Yield edits that take each number of one operand with each of the other: ``(n, 1)`` against ``(n,)``."""
    node, shape = sheet.nodes[k], sheet.shape(k)
    count = math.prod(shape)
    if node.operation not in _ELEMENTWISE or any(sheet.shape(operand) != shape for operand in node.given):
        return
    if not sheet.is_float(k) or count != max(shape, default=0) or not 1 < count <= _BROADCAST:
        return
    operation = OPERATIONS[node.operation]
    for place in range(2):
        order = (-1, 1), (1, -1)
        shapes = order if place == 0 else order[::-1]
        names = [sheet.named(operand) for operand in node.given]
        text = (
            f"{_SIDE} broadcasts {names[place]} with shape ({count}, 1) against {names[1 - place]} with shape "
            f"({count},) ({sheet.where(k)}): each number meets each other one"
        )
        each: Change = lambda get, own, shapes=shapes: np.asarray(  # type: ignore[misc]  # noqa: E731
            operation(*(get(operand).reshape(size) for operand, size in zip(node.given, shapes)))
        )
        yield Edit("loss_shapes", "shapes that are broadcast", text, {k: each}, 1, at=k)


def loss_left_out(sheet: FormulaView) -> Iterator[Edit]:
    """Yield edits that leave out a part of a loss, class weights and activations before the others.

    An operand that is left out of a scalar sum is called a term of the loss here, not a branch.
    """
    yield from _detached(sheet)
    yield from _all_rows(sheet)
    for k, node in enumerate(sheet.nodes[:-1]):
        if node.operation == "mul":
            yield from _class_weights(sheet, k)
            yield from _weights(sheet, k)
        elif node.operation == "act":
            function, operand = node.how["function"], node.given[0]
            text = (
                f"{_SIDE} takes no {function} of {sheet.named(operand)} for its loss, {_OTHER} does ({sheet.where(k)})"
            )
            yield Edit("activation_missing", "an activation", text, {k: instead(operand)}, 1, at=k)
    for edit in dropped_terms(sheet):
        node = sheet.nodes[edit.at] if edit.at >= 0 else Node("")
        if node.operation == "sub" and sheet.function(edit.at) in _WEIGHING:
            continue  # the function's own arithmetic: no code that somebody leaves out
        if node.operation == "add" and sheet.function(edit.at) in _WEIGHING:
            text = f"{_SIDE} does not weigh positive targets (pos_weight), {_OTHER} does ({sheet.where(edit.at)})"
            yield replace(edit, kind="loss_weight", name="weights", text=text, rank=1, telling=True)
        elif node.operation in ("add", "sub") and sheet.shape(edit.at) == ():
            at, sum_edit = edit.at, edit
            names = " or ".join(sheet.named(operand) for operand in node.given if _is_left(sheet, edit, operand))
            text = f"{_SIDE} does not add {names} to its loss ({sheet.where(at)}), {_OTHER} does"
            yield replace(
                sum_edit, kind="loss_term_missing", name="a term of the loss", text=text, rank=1, telling=True
            )
        elif edit.kind == "division_missing" and "the sum for the mean" in edit.text:
            yield replace(edit, kind="reduction", name="a reduction", rank=1, telling=True)
        elif edit.kind == "scale_missing" and (output := _of_model(sheet, edit.at)) is not None:
            size = float(sheet.formula.values[next(g for g in node.given if sheet.is_number(g))])
            how = "divide" if node.operation == "div" else "multiply"
            what = f"{sheet.named(output)} by {size:.6g} for its loss (a temperature)"
            text = f"{_SIDE} does not {how} {what}, {_OTHER} does"
            yield replace(edit, kind="temperature", name="a temperature", text=text)
        elif node.operation == "where" and not sheet.is_float(edit.at):
            continue  # not a mask of scores: other edits are about the labels that count
        else:
            # A scale of the whole loss is an effect, not a reason.
            scaled = edit.kind == "scale_missing" and sheet.shape(edit.at) == ()
            yield replace(edit, telling=edit.telling and not scaled)


def _all_rows(sheet: FormulaView) -> Iterator[Edit]:
    """Yield edits that take all rows of predictions and labels, for those that one index picks of both."""
    picks: dict[int, list[int]] = {}
    for k, node in enumerate(sheet.nodes):
        if node.operation in ("indexed", "rows") and len(node.given) == 2 and node.how.get("axes", (0,)) == (0,):
            picks.setdefault(node.given[1], []).append(k)
    for nodes in picks.values():
        changes = {k: instead(sheet.nodes[k].given[0]) for k in nodes}
        kept, rows = sheet.shape(nodes[0])[0], sheet.shape(sheet.nodes[nodes[0]].given[0])[0]
        text = f"{_SIDE} takes all {rows} rows for its loss, {_OTHER} the {kept} that {sheet.where(nodes[0])} picks"
        yield Edit("rows_missing", "rows", text, changes, 1, at=nodes[0])


def _detached(sheet: FormulaView) -> Iterator[Edit]:
    """Yield edits that let gradients pass through calls of detach: all of them, and each alone."""
    cut = [k for k, node in enumerate(sheet.nodes) if node.operation == "detach"]
    for group in ([cut] if len(cut) > 1 else []) + [[k] for k in cut]:
        names = " and ".join(dict.fromkeys(sheet.named(sheet.nodes[k].given[0]) for k in group))
        text = f"{_SIDE} does not detach {names} for its loss, {_OTHER} does ({sheet.where(group[0])})"
        changes = {k: instead(sheet.nodes[k].given[0]) for k in group}
        yield Edit("detached", "a detached tensor", text, changes, 0, at=group[0])


def loss_cut_off(sheet: FormulaView) -> Iterator[Edit]:
    """Yield edits that detach a tensor of a loss: its value stays, and no gradient passes through."""
    outputs = [k for k, node in enumerate(sheet.nodes) if not node.operation and sheet.is_float(k) and not node.name]
    for k in sorted(sheet.formula.below(outputs)):
        if sheet.nodes[k].operation not in ("detach", "slopes") and sheet.is_float(k) and sheet.users(k):
            text = f"{_SIDE} detaches {sheet.named(k)} for its loss, {_OTHER} does not"
            yield Edit("detached", "a detached tensor", text, {k: put(sheet.formula.values[k])}, 1, at=k)


def _of_model(sheet: FormulaView, k: int) -> int | None:
    """Return the input of a product or quotient that is an output of a layer; `None` if there is none."""
    node = sheet.nodes[k]
    if node.operation not in ("mul", "div"):
        return None
    return next((operand for operand in node.given if _is_output(sheet, operand)), None)


def _is_output(sheet: FormulaView, k: int) -> bool:
    """Return True if a node is an output of a layer."""
    call = sheet.producer(k)
    return not sheet.nodes[k].operation and call is not None and not call.function


def _is_left(sheet: FormulaView, edit: Edit, operand: int) -> bool:
    """Return True if an edit that hands on one operand leaves out this operand."""
    change = edit.changes[edit.at]
    value = change(lambda k: sheet.formula.values[k], lambda k: sheet.formula.values[k])
    return not np.array_equal(value, sheet.formula.values[operand])


def loss_numbers(sheet: FormulaView, leaves: Sequence[int], loss: int) -> Iterator[Number]:
    """Yield numbers that a loss may contain: label smoothing, a temperature, a scale, further terms of the model's
    outputs.

    Args:
        sheet: the formula of the loss.
        leaves: the nodes of the model's outputs.
        loss: the node of the loss.
    """
    for k, node in enumerate(sheet.nodes):
        if node.operation == "targets":
            smoothing, what = node.how["smoothing"], f"the label smoothing of {sheet.where(k)}"
            make = _how(node, k, "smoothing")
            yield Number("smoothing", "smoothing", what, smoothing, make, k, (0.0,) if smoothing else (0.1,), rank=0)
        elif node.operation == "add" and (smoothed := _smoothed(sheet, k)) is not None:
            hot, smoothing = smoothed
            what = f"the label smoothing ({sheet.where(k)})"
            yield Number("smoothing", "smoothing", what, smoothing, _of_hot(sheet, k, hot), k, (0.0,), rank=0)
        elif node.operation == "picked":
            what = f"the label smoothing (of what {sheet.where(k)} picks)"
            yield Number("smoothing", "smoothing", what, 0.0, _mixed(node, k), k, rank=1)
        elif node.operation == "log_softmax":
            what = f"the temperature: what {sheet.where(k)} is taken of is multiplied by a number, which"
            yield Number("temperature", "a temperature", what, 1.0, scaled(node.given[0]), k, (0.5,), rank=1)
        elif node.operation == "huber":
            what = f"beta (delta) of {sheet.where(k)}"
            yield Number("loss_beta", "beta", what, node.how["beta"], _how(node, k, "beta"), k, (0.5,), rank=0)
    yield from temperatures(sheet)
    yield from in_several_places(sheet)
    what = "the loss is multiplied by a number, which"
    yield Number("loss_scale", "a scale of the loss", what, 1.0, scaled(loss), loss, rank=2)
    for leaf in leaves:
        for name, term in _TERMS.items():
            what = f"the share of a further term of the loss, {name} of {sheet.named(leaf)},"
            yield Number("loss_term", "a further term", what, 0.0, _term(leaf, loss, term), loss, rank=3)


def in_several_places(sheet: FormulaView) -> Iterator[Number]:
    """Yield each number that scales one tensor in several places, with either sign, as one number."""
    places: dict[tuple[float, int], list[int]] = {}
    for k, node in enumerate(sheet.nodes):
        users = sheet.users(k) if node.name and sheet.is_number(k) else []
        for user in users[:1]:
            others = [operand for operand in sheet.nodes[user].given if operand != k]
            if sheet.nodes[user].operation in ("mul", "div") and others:
                places.setdefault((abs(float(sheet.formula.values[k])), others[0]), []).append(k)
    for (size, _), constants in places.items():
        if len(constants) < 2 or size in (0.0, 1.0):
            continue
        signs = {k: math.copysign(1.0, float(sheet.formula.values[k])) for k in constants}
        first = sheet.users(constants[0])[0]
        more = "another place" if len(constants) == 2 else f"{len(constants) - 1} other places"
        what = f"the number in {sheet.where(first)}, and in {more},"
        make = partial(_signed, signs)
        yield Number("scale", "a scale", what, size, make, first, (0.5 * size, 2.0 * size), rank=0)


def _signed(signs: Mapping[int, float], value: float) -> dict[int, Change]:
    return {k: put(np.asarray(sign * value)) for k, sign in signs.items()}


def temperatures(sheet: FormulaView) -> Iterator[Number]:
    """Yield a temperature that several softmaxes are taken at, with its square as the weight of the term."""
    divisors: dict[float, list[int]] = {}
    numbers = [k for k, node in enumerate(sheet.nodes) if node.name and sheet.is_number(k)]
    values = {k: float(sheet.formula.values[k]) for k in numbers}
    for node in sheet.nodes:
        if node.operation == "div" and sheet.is_number(node.given[1]):
            size = float(sheet.formula.values[node.given[1]])
            divisors.setdefault(size, []).append(node.given[1])
    for size, places in divisors.items():
        softened = [k for k in places if sheet.feeds(k, frozenset({"softmax", "log_softmax"}))]
        if len(softened) < 2 or size in (0.0, 1.0):
            continue
        squares = [k for k, value in values.items() if math.isclose(value, size * size) and "mul" in _uses(sheet, k)]
        # Code multiplies by the square, or twice.
        twice = [k for k, value in values.items() if math.isclose(value, size) and "mul" in _uses(sheet, k)]
        twice = twice if len(twice) == 2 else []
        for squared, again in dict.fromkeys(((tuple(squares), ()), ((), tuple(twice)), ((), ()))):
            square = ", whose square multiplies the term," if squared or again else ""
            what = f"the temperature of the softmaxes in the loss{square}"
            make = _together([*softened, *again], squared)
            at = sheet.users(softened[0])[0]
            yield Number("temperature", "a temperature", what, size, make, at, (1.0, 2 * size), rank=0)


def _uses(sheet: FormulaView, k: int) -> set[str]:
    """Return the operations that take a node."""
    return {sheet.nodes[user].operation for user in sheet.users(k)}


def _together(places: Sequence[int], squared: Sequence[int]) -> Any:
    def make(value: float) -> dict[int, Change]:
        changes: dict[int, Change] = {k: put(np.asarray(value)) for k in places}
        return changes | {k: put(np.asarray(value * value)) for k in squared}

    return make


def _how(node: Node, k: int, name: str) -> Any:
    operation = OPERATIONS[node.operation]

    def make(value: float) -> dict[int, Change]:
        return {k: lambda get, own: np.asarray(operation(*(get(g) for g in node.given), **{**node.how, name: value}))}

    return make


def _smoothed(sheet: FormulaView, k: int) -> tuple[int, float] | None:
    """Return the one-hot labels and the smoothing of ``hot * (1 - s) + s / classes``; `None` for another sum."""
    product, uniform = sheet.nodes[k].given
    if not sheet.is_number(uniform) or sheet.nodes[product].operation != "mul":
        return None
    hot, share = sheet.nodes[product].given
    labels = sheet.nodes[hot].given[0] if sheet.nodes[hot].operation == "cast" else hot
    if sheet.nodes[labels].operation != "targets" or not sheet.is_number(share):
        return None
    smoothing = float(sheet.formula.values[uniform]) * sheet.shape(hot)[-1]
    return (hot, smoothing) if abs(smoothing + float(sheet.formula.values[share]) - 1.0) < 1e-6 else None


def _of_hot(sheet: FormulaView, k: int, hot: int) -> Any:
    classes = sheet.shape(hot)[-1]
    return lambda value: {k: lambda get, own: get(hot) * (1 - value) + value / classes}


def _mixed(node: Node, k: int) -> Any:
    """Return a function of a smoothing that mixes the picked values with their mean over all classes."""
    source, axis = node.given[0], node.how["axis"]

    def make(value: float) -> dict[int, Change]:
        return {k: lambda get, own: (1 - value) * own(k) + value * get(source).mean(axis, keepdims=True)}

    return make


def _term(leaf: int, loss: int, term: Callable[[np.ndarray], float]) -> Any:
    return lambda value: {loss: lambda get, own: own(loss) + value * term(get(leaf))}


_TERMS: dict[str, Callable[[np.ndarray], float]] = {
    "the mean square": lambda z: float(np.mean(np.square(z))),
    "the mean square of the logsumexp (a z-loss)": lambda z: float(np.mean(np.square(reduced(z, "logsumexp", -1)))),
    "half the sum of squares": lambda z: 0.5 * float(np.sum(np.square(z))),
}


# -- masks and labels ----------------------------------------------------------------------------------------------


def _mask(sheet: FormulaView, k: int) -> Iterator[Edit]:
    """Yield edits that invert, shift or drop a mask of zeros and ones."""
    values, node = sheet.formula.values[k], sheet.nodes[k]
    if values.size < 2 or values.dtype.kind not in "fb" or sheet.is_parameter(k) or node.operation == "targets":
        return
    users = {sheet.nodes[u].operation for u in sheet.users(k)}
    if not node.operation and not users & {"mul", "reduced", "where"} and _is_mask(values) and values.any():
        # The code takes parts of it, or 1 minus it.
        for number in (0.0, 1.0):
            text = f"the zeros and ones of {sheet.named(k)} are not used in the loss, as if all were {number:g}"
            constant = put(np.full(values.shape, number))
            yield Edit("mask_missing", "no mask", text, {k: constant}, 1, at=k)
    if not users & {"mul", "reduced", "where"} or not ((values == 0) | (values == 1)).all() or values.all():
        return
    if not values.any():
        return
    what, count = f"the mask ({sheet.named(k)})", int((values == 0).sum())
    text = f"{what} is inverted in the loss: what the reference leaves out counts, what it counts is left out"
    if users == {"where"}:
        text = f"{what} is inverted in the loss, or what it chooses between is exchanged"
    inverted: Change = lambda get, own: np.where(own(k) == 0, 1.0, 0.0)  # noqa: E731
    if any(sheet.function(user) in _WEIGHING for user in sheet.users(k)):
        text = f"the labels of {sheet.where(sheet.users(k)[0])} are inverted: ones for zeros, and zeros for ones"
        yield Edit("labels", "inverted labels", text, {k: inverted}, 0, at=k)
        return
    yield Edit("mask_inverted", "an inverted mask", text, {k: inverted}, 0, at=k)
    text = (
        f"{what} is not used in the loss: the {count} of {values.size} places count that it leaves out (ignored, pads)"
    )
    yield Edit("mask_missing", "no mask", text, {k: put(np.ones(values.shape))}, 0, at=k)
    for shift in (1, -1):
        if not _cut(values, shift).any():
            continue  # another number of places tells more
        text = f"{what} is shifted by {'one' if shift > 0 else 'minus one'} along its last axis, in the loss"
        rolled: Change = lambda get, own, shift=shift: np.roll(own(k), shift, -1)  # type: ignore[misc]  # noqa: E731
        yield Edit("mask_shifted", "a shifted mask", text, {k: rolled}, 1, at=k)
        cut: Change = lambda get, own, shift=shift: _cut(own(k), shift)  # type: ignore[misc]  # noqa: E731
        last = "last" if shift < 0 else "first"
        text = f"{what} is shifted by one in the loss, so that the {last} place that it keeps is left out"
        yield Edit("mask_shifted", "a shifted mask", text, {k: cut}, 1, at=k)


def _even(sheet: FormulaView, k: int) -> Iterator[Edit]:
    """Yield an edit that puts the mean of some weights in the place of each of them."""
    values, node, weighing = sheet.formula.values[k], sheet.nodes[k], sheet.users(k)
    is_softmax = node.operation == "softmax"
    if node.name or (node.operation and not is_softmax) or (not is_softmax and _is_output(sheet, k)):
        return
    if values.size < 2 or values.dtype.kind != "f" or values.min() < 0 or _is_mask(values) or not np.ptp(values):
        return
    weighing = [
        n for user in weighing for n in (sheet.users(user) if sheet.nodes[user].operation == "detach" else [user])
    ]
    at = next((user for user in weighing if sheet.nodes[user].operation == "mul"), None)
    if at is None or not any(sheet.nodes[user].operation == "reduced" for user in sheet.users(at)):
        return
    even = values.mean(node.how["axis"] if is_softmax else None, keepdims=True)
    text = f"{_SIDE} counts all alike, {_OTHER} weighs them ({_operand(sheet, k)})"
    yield Edit("loss_weight", "even weights", text, {k: put(np.broadcast_to(even, values.shape))}, 0, at=at)


def _cut(values: np.ndarray, shift: int) -> np.ndarray:
    """Return values shifted along the last axis, with zeros in the free places."""
    shifted = np.roll(values, shift, -1).astype(np.float64)
    shifted[..., 0 if shift > 0 else -1] = 0.0
    return shifted


def _labels(sheet: FormulaView, k: int) -> Iterator[Edit]:
    values = sheet.formula.values[k]
    if sheet.nodes[k].operation or values.dtype.kind not in "iu" or values.ndim < 1 or values.size < 3:
        return
    if not sheet.feeds(k, frozenset({"targets", "picked"})):
        return
    for shift, which in ((-1, "after"), (1, "before")):
        rolled: Change = lambda get, own, shift=shift: np.roll(own(k), shift, -1)  # type: ignore[misc]  # noqa: E731
        text = f"the labels are shifted: each place has the label of the one {which} it"
        yield Edit("labels", "shifted labels", text, {k: rolled}, 1, at=k)
        masks = [n for n, value in enumerate(sheet.formula.values) if value.shape == values.shape and _masks(sheet, n)]
        if masks:
            cut: Change = lambda get, own, n=masks[0], shift=shift: _cut(own(n), shift)  # type: ignore[misc]  # noqa: E731
            yield Edit("labels", "shifted labels", f"{text}, and so has the mask", {k: rolled, masks[0]: cut}, 1, at=k)


# -- sums and their divisors ---------------------------------------------------------------------------------------


def _mean(sheet: FormulaView, k: int) -> Iterator[Edit]:
    node, where = sheet.nodes[k], sheet.where(k)
    if node.operation == "reduced" and node.how["by"] == "mean" and node.how.get("axis") is None:
        x = node.given[0]
        shape = sheet.shape(x)
        if len(shape) > 1:
            total: Change = lambda get, own: np.asarray(get(x).sum() / shape[0])  # noqa: E731
            text = f"the sum is divided by the {shape[0]} samples of the batch, for the mean over all ({where})"
            yield Edit("reduction", "a reduction", text, {k: total}, 0, at=k)
        return
    if node.operation != "div" or sheet.shape(k) != ():
        return
    above, below = (sheet.nodes[operand] for operand in node.given)
    sign = 1.0
    if above.operation == "neg":
        sign, above = -1.0, sheet.nodes[above.given[0]]
    if above.operation != "reduced" or above.how["by"] != "sum":
        return
    x = above.given[0]
    shape, own_count = sheet.shape(x), float(sheet.formula.values[node.given[1]])
    masked = any(_masks(sheet, n) and not sheet.formula.values[n].all() for n in range(len(sheet.nodes)))
    places = "places, also those that the mask leaves out" if masked else "places"
    counts = {float(np.prod(shape)): places, float((*shape, 0)[0]): "samples"}
    for number, what in counts.items():
        if number and number != own_count:
            divided: Change = lambda get, own, number=number: np.asarray(sign * get(x).sum() / number)  # type: ignore[misc]  # noqa: E731
            text = f"the sum is divided by all {number:g} {what}, for the reference's {own_count:g} ({where})"
            yield Edit("reduction", "a reduction", text, {k: divided}, 0, at=k)
    if below.operation == "reduced" and below.how["by"] == "sum":
        summed: Change = lambda get, own: get(node.given[0])  # noqa: E731
        text = f"the sum for the mean: {where}, which divides it by {own_count:g}, is left out"
        yield Edit("reduction", "a reduction", text, {k: summed}, 0, at=k)
        if sheet.shape(below.given[0]) == shape and len(shape) > 1:
            mask = below.given[0]
            rows: Change = lambda get, own: np.asarray(sign * np.mean(get(x).sum(-1) / get(mask).sum(-1)))  # noqa: E731
            text = f"the mean over samples of each sequence's mean, for the mean over all that the mask keeps ({where})"
            yield Edit("reduction", "a reduction", text, {k: rows}, 0, at=k)
        if sheet.nodes[x].operation == "mul" and _is_mask(sheet.formula.values[below.given[0]]):
            yield from _unmasked(sheet, k, x, sign)


def _unmasked(sheet: FormulaView, k: int, product: int, sign: float) -> Iterator[Edit]:
    """Yield edits that take the mean over all places instead of the places that the mask keeps."""
    for operand in sheet.nodes[product].given:
        if sheet.shape(operand) == sheet.shape(product) and not _is_mask(sheet.formula.values[operand]):
            plain: Change = lambda get, own, operand=operand: np.asarray(sign * get(operand).mean())  # type: ignore[misc]  # noqa: E731
            count = np.prod(sheet.shape(operand))
            text = f"the mean is over all {count} places, also those that the mask leaves out (ignored, pads)"
            yield Edit("mean_over_pads", "a mean over pads", text, {k: plain}, 0, at=k)


def _masks(sheet: FormulaView, k: int) -> bool:
    """Return True if a node is a mask in a product."""
    values = sheet.formula.values[k]
    floats = values.dtype.kind in "fb" and not sheet.is_parameter(k)
    return floats and _is_mask(values) and any(sheet.nodes[user].operation == "mul" for user in sheet.users(k))


def _is_mask(values: np.ndarray) -> bool:
    return bool(((values == 0) | (values == 1)).all())


# -- functions of an error -----------------------------------------------------------------------------------------


def _error(sheet: FormulaView, k: int) -> Iterator[Edit]:
    node, where = sheet.nodes[k], sheet.where(k)
    squared = node.operation == "mul" and node.given[0] == node.given[1]
    if node.operation == "pow":
        squared = sheet.is_number(node.given[1]) and float(sheet.formula.values[node.given[1]]) == 2.0
    if node.operation not in ("huber", "square", "abs") and not squared:
        return
    error = node.given[0]
    beta = float(node.how.get("beta", 1.0))
    others: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "the absolute error (L1)": np.abs,
        "the squared error (MSE)": np.square,
        "half the squared error": lambda e: 0.5 * np.square(e),
        "the squared error, not half of it, of small ones": lambda e: np.where(
            np.abs(e) < beta, np.square(e), np.abs(e) - 0.5 * beta
        ),
        "the Huber loss (delta 1)": lambda e: OPERATIONS["huber"](e, beta=1.0, divided=False),
    }
    if (squared or node.operation == "square") and sheet.formula.values[error].min(initial=0.0) >= 0:
        # Of numbers that are not negative, the absolute value is the number itself: no loss of another kind.
        del others["the absolute error (L1)"]
        text = f"{_SIDE} does not square {sheet.named(error)} ({where}), {_OTHER} does"
        yield Edit("square_missing", "a square", text, {k: instead(error)}, 0, at=k)
    for name, function in others.items():
        change: Change = lambda get, own, function=function: np.asarray(function(get(error)))  # type: ignore[misc]  # noqa: E731
        text = f"the loss is of {name}, for what the reference's {where} takes"
        yield Edit("loss_function", "another loss function", text, {k: change}, 0, at=k)


def _rows(sheet: FormulaView, k: int) -> Iterator[Edit]:
    """Yield edits of each sample's loss: a focal loss, a power, probabilities instead of their logarithms."""
    values, node = sheet.formula.values[k], sheet.nodes[k]
    if node.operation not in ("neg", "picked") or values.size < 2 or values.dtype.kind != "f":
        return
    # The picked values are log probabilities: losses with the other sign.
    sign = 1.0 if node.operation == "neg" else -1.0
    if (sign * values).min() < -1e-6:
        return
    where = sheet.where(k)
    for exponent in _EXPONENTS:
        focal: Change = lambda get, own, e=exponent: own(k) * np.power(-np.expm1(-np.abs(own(k))), e)  # type: ignore[misc]  # noqa: E731
        text = f"a focal loss: each sample's ({where}) is multiplied by (1 - p) to the {exponent:g}"
        yield Edit("focal", "a focal loss", text, {k: focal}, 1, at=k)
    square: Change = lambda get, own: sign * np.square(own(k))  # noqa: E731
    yield Edit("loss_power", "a power", f"the square of each sample's loss is taken ({where})", {k: square}, 1, at=k)
    if node.operation == "picked":
        shares: Change = lambda get, own: np.exp(own(k))  # noqa: E731
        text = f"the loss is of probabilities (of a softmax), for the reference's logarithms of them ({where})"
        yield Edit("log_softmax_missing", "no logarithm", text, {k: shares}, 0, at=k)


def _divergence(sheet: FormulaView, k: int) -> Iterator[Edit]:
    """Yield edits of the divergence ``t * (log t - x)``: the other direction, or without the entropy of the targets."""
    node = sheet.nodes[k]
    if node.operation != "mul" or sheet.nodes[node.given[1]].operation != "sub":
        return
    targets, logs, own_logs = node.given[0], *sheet.nodes[node.given[1]].given
    t, above = sheet.formula.values[targets], sheet.formula.values[logs]
    if t.shape != above.shape or not np.allclose(np.exp(above), t, atol=1e-4):
        return
    where = sheet.where(k)
    swapped: Change = lambda get, own: np.exp(get(own_logs)) * (get(own_logs) - get(logs))  # noqa: E731
    text = f"the divergence is taken the other way round: of the model's from the targets' ({where})"
    yield Edit("loss_function", "another direction", text, {k: swapped}, 0, at=k)
    shares: Change = lambda get, own: get(targets) * (get(logs) - np.exp(get(own_logs)))  # noqa: E731
    text = f"the divergence is of probabilities (of a softmax), for the reference's logarithms of them ({where})"
    yield Edit("log_softmax_missing", "no logarithm", text, {k: shares}, 0, at=k)
    bare: Change = lambda get, own: -get(targets) * get(own_logs)  # noqa: E731
    text = f"a cross entropy for the divergence: the entropy of the targets is not in it ({where})"
    yield Edit("loss_function", "another loss function", text, {k: bare}, 0, at=k)


def _class_weights(sheet: FormulaView, k: int) -> Iterator[Edit]:
    """Yield an edit that leaves out class weights: a factor that is the same for all samples of a class."""
    node = sheet.nodes[k]
    for place, weights in enumerate(node.given):
        factor, losses = sheet.formula.values[weights], node.given[1 - place]
        if factor.dtype.kind != "f" or factor.size < 3 or sheet.shape(losses) != factor.shape or np.ptp(factor) == 0:
            continue
        for labels in (v for n, v in enumerate(sheet.formula.values) if not sheet.nodes[n].operation):
            if labels.dtype.kind not in "iu" or labels.shape != factor.shape:
                continue
            classes = {c: factor[labels == c] for c in np.unique(labels) if c >= 0}
            if len(classes) < labels.size and all(np.ptp(class_factors) == 0 for class_factors in classes.values()):
                listed = ", ".join(f"{c}: {class_factors[0]:.4g}" for c, class_factors in [*classes.items()][:_WRITTEN])
                text = f"{_SIDE} does not weigh the classes of its loss, {_OTHER} does (class weights {listed})"
                yield Edit("loss_weight", "class weights", text, {k: instead(losses)}, 0, at=k)
                break


def _weights(sheet: FormulaView, k: int) -> Iterator[Edit]:
    """Yield an edit that leaves out the element weights of a loss function."""
    node = sheet.nodes[k]
    losses, weights = node.given
    if sheet.function(k) not in _WEIGHING or sheet.shape(losses) != sheet.shape(k):
        return
    if any(_is_output(sheet, n) for n in sheet.formula.above(weights)):
        return  # a part of the loss itself
    text = f"{_SIDE} does not weigh its loss, {_OTHER} does (weight of {sheet.where(k)})"
    yield Edit("loss_weight", "weights", text, {k: instead(losses)}, 0, at=k)


# -- inputs and gradients of the other side ----------------------------------------------------------------------------


def other_inputs(sheet: FormulaView, candidate: FormulaView | None, learned: Both[set[int]]) -> Iterator[Edit]:
    """Yield edits that replace an input of the loss (labels, targets, weights) by the candidate's.

    Args:
        learned: the tensors of either side that the loss is to change: outputs of models, which are no inputs.
    """
    if candidate is None:
        return
    others = [(k, v) for k, v in enumerate(candidate.formula.values) if _goes_in(candidate, k, learned.candidate)]
    yield from _all_other_inputs(sheet, others, learned.reference)
    for k, values in enumerate(sheet.formula.values):
        if not _goes_in(sheet, k, learned.reference) or any(
            v.shape == values.shape and np.allclose(v, values, 1e-5) for _, v in others
        ):
            continue
        for _, replacement in others:
            if replacement.size == values.size and (replacement.dtype.kind in "iub") == (values.dtype.kind in "iub"):
                labels = values.dtype.kind in "iu" and sheet.feeds(k, frozenset({"targets", "picked"}))
                differ = int((replacement.reshape(values.shape) != values).sum())
                what = "labels" if labels else f"numbers of the loop, {_operand(sheet, k)}"
                text = f"the loss is of other {what}: {differ} of {values.size} differ from the reference's"
                if values.min() == values.max() and replacement.min() == replacement.max():
                    text += f", {replacement.flat[0]:.6g} for {values.flat[0]:.6g}"
                if np.array_equal(np.sort(values, axis=None), np.sort(replacement, axis=None)):
                    text += ", which are in another order"
                kind = "labels" if labels else "loss_input"
                yield Edit(kind, "other labels", text, {k: put(replacement.reshape(values.shape))}, 0, at=k)


def _all_other_inputs(
    sheet: FormulaView, others: Sequence[tuple[int, np.ndarray]], learned: Collection[int]
) -> Iterator[Edit]:
    """Yield the edit that replaces all inputs of the loss that differ by the candidate's, if there are several."""
    own = [(k, v) for k, v in enumerate(sheet.formula.values) if _goes_in(sheet, k, learned)]
    if len(own) != len(others) or any(a.shape != b.shape for (_, a), (_, b) in zip(own, others)):
        return
    differ = [(k, other) for (k, a), (_, other) in zip(own, others) if not np.allclose(a, other, 1e-5)]
    if len(differ) > 1:
        text = f"the loss is of other numbers of the loop, {' and '.join(_operand(sheet, k) for k, _ in differ)}"
        before = dict(own)
        if all(any(_are_close(other, before[k]) for k, _ in differ) for _, other in differ):
            text = f"inputs of the loss are exchanged: {' and '.join(_into(sheet, k) for k, _ in differ)}"
        changes = {k: put(values) for k, values in differ}
        yield Edit("loss_input", "other inputs", text, changes, 0, at=differ[0][0])


def _are_close(values: np.ndarray, others: np.ndarray) -> bool:
    return values.shape == others.shape and np.allclose(values, others, 1e-5)


def _operand(sheet: FormulaView, k: int) -> str:
    """Return what messages call an input of the loss that no recorded call gives: by the call that it goes into."""
    text = sheet.named(k)
    return _into(sheet, k) if text == UNNAMED else text


def _into(sheet: FormulaView, k: int) -> str:
    text = sheet.named(k)
    users: list[str] = []
    left = [k]
    while left and not users:  # a call may have several nodes
        left = [user for node in left for user in sheet.users(node)]
        users = [name for user in left if (name := sheet.named(user)) != UNNAMED]
    calls = [user.removeprefix("what ").removesuffix(" gives") for user in users if user.endswith(" gives")]
    return f"what goes into {calls[0]}" if calls else text


def asked_gradients(sheet: FormulaView, candidate: FormulaView) -> dict[int, Change]:
    """Return changes that put the gradients that the candidate's loop asked for in the place of the reference's."""
    nodes, others_nodes = map(_asked_nodes, (sheet, candidate))
    changes: dict[int, Change] = {}
    for key in nodes.keys() & others_nodes.keys():
        values, others = sheet.formula.values[nodes[key]], candidate.formula.values[others_nodes[key]]
        others = others.T if others.shape != values.shape else others
        if others.shape != values.shape:
            return {}
        if not np.allclose(values, others, 1e-3, 1e-4 * math.sqrt(np.mean(np.square(values)))):
            changes[nodes[key]] = put(others)
    return changes


def _asked_nodes(sheet: FormulaView) -> dict[tuple[int, str], int]:
    """Return the nodes of the gradients that the loop asked for, by the number of the call and the slot."""
    nodes = {}
    for tensor, node in sheet.writer.nodes.items():
        call = sheet.graph.producers.get(tensor)
        if call is not None and call.function == GRAD:
            nodes[call.nth, next(o.slot for o in call.outputs if o.tensor == tensor)] = node
    return nodes


def with_gradients(
    sheet: FormulaView, make: Callable[[FormulaView], Iterable[Edit]], slopes: Mapping[int, Change]
) -> Iterator[Edit]:
    """Yield edits with the gradients that the other side's loop asked for, if they change more than these do."""
    base = sheet.formula.changed(slopes)
    for edit in make(sheet):
        changes = {**slopes, **edit.changes}
        if slopes.keys() & edit.changes.keys() or base is None:
            continue
        result = sheet.formula.changed(changes)
        if result is not None and result.shape == base.shape and not np.allclose(result, base, _NO_CHANGE):
            yield replace(edit, changes=changes)


def made_with(value: float, make: Callable[[float], Mapping[int, Change]], slopes: Mapping[int, Change]) -> object:
    """Return the changes of a number's edit, with gradients that the other side's loop asked for."""
    return {**slopes, **make(value)}


def _goes_in(sheet: FormulaView, k: int, learned: Collection[int]) -> bool:
    """Return True if a tensor is labels, comes from outside of the model, or from a model that the loss does not
    change.
    """
    node, values = sheet.nodes[k], sheet.formula.values[k]
    if values.size < 2 or node.name not in ("", MADE) or sheet.tensor(k) is None:
        return False
    if values.dtype.kind in "iu" and any(sheet.nodes[u].operation in ("targets", "picked") for u in sheet.users(k)):
        return True
    call = sheet.producer(k)
    outside = call is None or not (call.inputs or call.parameters)
    target = call is not None and not call.function and bool(learned) and sheet.tensor(k) not in learned
    return not node.operation and (outside or target)
