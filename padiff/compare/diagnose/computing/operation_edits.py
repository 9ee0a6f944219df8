"""Edits that change an operation: another function, axis, order, form, statistic or mask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any

import numpy as np

from padiff.compare.diagnose.computing.arranged import as_a_whole, exchanged, rotary
from padiff.compare.diagnose.computing.edit import Argument, Edit, FormulaView, given
from padiff.compare.diagnose.computing.formula import Change
from padiff.compare.diagnose.computing.in_layers import BY_OPERATION
from padiff.compare.diagnose.computing.operations import OPERATIONS
from padiff.compare.diagnose.kernels.activations import FUNCTIONS

_NONE = "no activation"


def operation_edits(sheet: FormulaView) -> Iterator[Edit]:
    """Yield edits that change an operation or a whole tensor, single operations first."""
    yield from other_operations(sheet)
    yield from exchanged(sheet)
    yield from rotary(sheet)
    for k in range(len(sheet.nodes)):
        if sheet.may_be_edited(k):
            yield from as_a_whole(sheet, k)


def other_operations(sheet: FormulaView) -> Iterator[Edit]:
    """Yield edits that change a single operation."""
    for k, node in enumerate(sheet.nodes):
        edits = _BY_OPERATION.get(node.operation)
        if edits is not None:
            yield from edits(sheet, k)


def _of(sheet: FormulaView, k: int, operation: str, place: int = 0, **how: Any) -> Change:
    """Return a change that computes another operation on one of a node's operands."""
    operand = sheet.nodes[k].given[place]
    return lambda get, own: np.asarray(OPERATIONS[operation](get(operand), **how))


def _act(sheet: FormulaView, k: int) -> Iterator[Edit]:
    function = sheet.nodes[k].how["function"]
    where = sheet.where(k)
    text = f"the candidate has no activation, the reference {function} ({where})"
    yield Edit("activation_missing", "no activation", text, {k: _of(sheet, k, "act", function=_NONE)}, 0, at=k)
    for name in FUNCTIONS:
        if name != function:
            text = f"the candidate uses {name} for the reference's {function} ({where})"
            yield Edit("activation", "another activation", text, {k: _of(sheet, k, "act", function=name)}, 0, at=k)
    total = sheet.nodes[sheet.nodes[k].given[0]]
    if total.operation == "add" and sheet.shape(total.given[0]) == sheet.shape(total.given[1]):
        act, how = OPERATIONS["act"], sheet.nodes[k].how
        for first, second in (total.given, total.given[::-1]):
            text = (
                f"{function} is taken of {sheet.named(first)} before the sum, for the reference's of the sum ({where})"
            )
            before: Change = lambda get, own, first=first, second=second: act(get(first), **how) + get(second)  # type: ignore[misc]  # noqa: E731
            yield Edit("activation_order", "another order of activation and sum", text, {k: before}, 1, at=k)


def _softmax(sheet: FormulaView, k: int) -> Iterator[Edit]:
    node, ndim, where = sheet.nodes[k], len(sheet.shape(k)), sheet.where(k)
    own_axis = node.how.get("axis", -1) % ndim
    for axis in range(ndim):
        if axis != own_axis:
            text = f"the candidate takes the softmax over axis {axis} for the reference's {own_axis} ({where})"
            argument = Argument({"torch": "dim", "paddle": "axis"}, own_axis, axis, -1, axis=True)
            change = {k: given(sheet, k, axis=axis)}
            yield Edit("softmax_axis", "softmax over another axis", text, change, 0, at=k, argument=argument)
    text = f"the candidate uses a sigmoid for the reference's softmax ({where})"
    yield Edit("activation", "another activation", text, {k: _of(sheet, k, "act", function="sigmoid")}, 0, at=k)


def _reduced(sheet: FormulaView, k: int) -> Iterator[Edit]:
    node, where = sheet.nodes[k], sheet.where(k)
    by, axis = node.how["by"], node.how.get("axis")
    for reduction in ("mean", "sum", "max"):
        if reduction != by and by in ("mean", "sum", "max", "min"):
            text = f"the {reduction} for the reference's {by} ({where})"
            yield Edit("reduction_form", "another reduction", text, {k: given(sheet, k, by=reduction)}, 0, at=k)
    if by in ("var", "std"):
        ddof = 1 - node.how.get("ddof", 0)
        form = "unbiased (over n - 1)" if ddof else "biased (over n)"
        yield Edit(
            "variance", "variance", f"the variance of {where} is {form}", {k: given(sheet, k, ddof=ddof)}, 0, at=k
        )
    ndim = len(sheet.shape(node.given[0]))
    own_axis = axis % ndim if isinstance(axis, int) else None
    for other_axis in range(ndim) if own_axis is not None else ():
        if other_axis != own_axis:
            text = f"the {by} of {where} is over axis {other_axis} for the reference's {own_axis}"
            yield Edit("axis", "another axis", text, {k: given(sheet, k, axis=other_axis)}, 1, at=k)


def _divided(sheet: FormulaView, k: int) -> Iterator[Edit]:
    """Yield edits that reduce over all places instead of averaging over the places that a mask keeps."""
    above = sheet.nodes[sheet.nodes[k].given[0]]
    if above.operation != "reduced" or above.how["by"] != "sum":
        return
    product = sheet.nodes[above.given[0]]
    if product.operation != "mul":
        return
    for place in range(2):
        x = product.given[place]
        for by, what in (("mean", "mean"), ("max", "maximum")):
            text = (
                f"the {what} is over all places, also those that the mask leaves out (padding), where the reference's "
                f"{sheet.where(k)} takes the mean over those that it keeps"
            )
            yield Edit("mean_over_pads", f"a {what} over pads", text, {k: _whole(x, by, above.how)}, 0, at=k)


def _whole(x: int, by: str, how: Any) -> Change:
    return lambda get, own: np.asarray(OPERATIONS["reduced"](get(x), **{**how, "by": by}))


def _getitem(sheet: FormulaView, k: int) -> Iterator[Edit]:
    node = sheet.nodes[k]
    key = node.how["key"] if isinstance(node.how["key"], list) else [node.how["key"]]
    where, shape = sheet.where(k), sheet.shape(node.given[0])
    for place, index in enumerate(key):
        if not isinstance(index, int) or isinstance(index, bool) or place >= len(shape) or "..." in key[:place]:
            continue
        last = index in (-1, shape[place] - 1)
        for position in dict.fromkeys((0, -1, 1, -2)):
            if position % shape[place] != index % shape[place]:
                changed = [*key[:place], position, *key[place + 1 :]]
                position_text = {0: "the first", -1: "the last"}.get(position, f"number {position}")
                own_text = "last" if last else "first" if index == 0 else f"number {index}"
                text = f"{position_text} of axis {place} is taken for the reference's {own_text} ({where})"
                yield Edit("position", "another position", text, {k: given(sheet, k, key=changed)}, 0, at=k)
        for by in ("mean", "max", "sum"):
            text = f"the {by} over axis {place} is taken for the reference's {'last' if last else index} ({where})"
            if len(key) == place + 1:
                change = _of(sheet, k, "reduced", by=by, axis=place)
                yield Edit("reduction_form", "another reduction", text, {k: change}, 0, at=k)


def _cat(sheet: FormulaView, k: int) -> Iterator[Edit]:
    node = sheet.nodes[k]
    if len(node.given) == 2:
        text = f"the parts of {sheet.where(k)} are in the other order"
        operands, how = node.given, node.how
        change: Change = lambda get, own: np.concatenate([get(g) for g in operands[::-1]], how["axis"])  # noqa: E731
        if node.operation == "cat":
            yield Edit("parts_order", "parts in another order", text, {k: change}, 1, at=k)


def _normalised(sheet: FormulaView, k: int) -> Iterator[Edit]:
    node, where = sheet.nodes[k], sheet.where(k)
    if node.operation == "normalised":
        centred, ndim = node.how.get("centred", True), len(sheet.shape(k))
        text = f"the mean is {'not ' if centred else ''}taken out ({where}): " + (
            "an RMS norm for a layer norm" if centred else "a LayerNorm for an RMS norm"
        )
        yield Edit("norm_form", "another form of the norm", text, {k: given(sheet, k, centred=not centred)}, 0, at=k)
        text = f"the variance of {where} is unbiased (over n - 1)"
        yield Edit("norm_unbiased", "an unbiased variance", text, {k: given(sheet, k, unbiased=True)}, 0, at=k)
        text = f"the root of the variance is missing in {where}"
        yield Edit("norm_root", "no root of the variance", text, {k: given(sheet, k, root=False)}, 1, at=k)
        for axis in range(1, ndim):
            if (axis,) != tuple(node.how["axes"]):
                text = f"the normalisation of {where} is over axis {axis} alone"
                yield Edit("norm_axes", "other axes of the norm", text, {k: given(sheet, k, axes=(axis,))}, 2, at=k)
    elif node.operation == "grouped":
        count = sheet.shape(k)[1]
        for groups in (n for n in range(1, count + 1) if count % n == 0 and n != node.how["groups"]):
            text = f"{groups} groups for the reference's {node.how['groups']} ({where})"
            yield Edit("norm_groups", "another number of groups", text, {k: given(sheet, k, groups=groups)}, 0, at=k)
    else:
        train = not node.how["train"]
        statistics = "those of the batch (train mode)" if train else "the running ones (eval mode)"
        own_statistics = "the running ones (eval mode)" if train else "those of the batch (train mode)"
        text = f"the statistics are {statistics} for the reference's {own_statistics} ({where})"
        yield Edit("norm_statistics", "other statistics", text, {k: given(sheet, k, train=train)}, 0, at=k)


def _root(sheet: FormulaView, k: int) -> Iterator[Edit]:
    operand = sheet.nodes[k].given[0]
    text = f"the root is missing: {sheet.where(k)}"
    power = -1 if sheet.nodes[k].operation == "rsqrt" else 1
    change: Change = lambda get, own: np.power(get(operand), power)  # noqa: E731
    yield Edit("root_missing", "a root", text, {k: change}, 1, at=k)


def _causal(sheet: FormulaView, k: int) -> Iterator[Edit]:
    for diagonal, text in ((2, "shows each place the one after it, too"), (0, "hides each place from itself, too")):
        sentence = f"the causal mask is shifted by one: it {text} ({sheet.where(k)})"
        yield Edit("mask_shifted", "a shifted mask", sentence, {k: given(sheet, k, diagonal=diagonal)}, 0, at=k)


def _triu(sheet: FormulaView, k: int) -> Iterator[Edit]:
    own_diagonal = sheet.nodes[k].how.get("diagonal", 0)
    for diagonal in (own_diagonal + 1, own_diagonal - 1):
        text = f"the mask is shifted by one: diagonal {diagonal} for the reference's {own_diagonal} ({sheet.where(k)})"
        yield Edit("mask_shifted", "a shifted mask", text, {k: given(sheet, k, diagonal=diagonal)}, 1, at=k)


def _masked(sheet: FormulaView, k: int) -> Iterator[Edit]:
    """Yield edits that invert or shift a mask."""
    node, where = sheet.nodes[k], sheet.where(k)
    mask = node.given[0] if node.operation == "where" else node.given[1]
    values = sheet.formula.values[mask]
    low, high = (values.min(), values.max()) if values.size else (0, 0)
    if low == high or not ((values == low) | (values == high)).all():
        return
    inverted: Change = lambda get, own: np.where(own(mask) == low, high, low)  # noqa: E731
    text = f"the mask is inverted: what the reference hides is kept, what it keeps is hidden ({where})"
    yield Edit("mask_inverted", "an inverted mask", text, {mask: inverted}, 0, at=k)
    for shift in (1, -1):
        rolled: Change = lambda get, own, shift=shift: np.roll(own(mask), shift, -1)  # type: ignore[misc]  # noqa: E731
        text = f"the mask is shifted by {'one' if shift > 0 else 'minus one'} along its last axis ({where})"
        yield Edit("mask_shifted", "a shifted mask", text, {mask: rolled}, 1, at=k)


def _reshape(sheet: FormulaView, k: int) -> Iterator[Edit]:
    """Yield edits that permute axes before a reshape, or interleave the parts that the reshape makes."""
    source, where = sheet.nodes[k].given[0], sheet.where(k)
    before, after = sheet.shape(source), sheet.shape(k)
    if 3 <= len(before) <= 4:
        for order in permutations(range(1, len(before))):
            if order != tuple(range(1, len(before))):
                axes = (0, *order)
                change: Change = lambda get, own, axes=axes: get(source).transpose(axes).reshape(after)  # type: ignore[misc]  # noqa: E731
                text = f"the values are flattened in another order: axes {axes} before {where}"
                yield Edit("flatten_order", "another order of flattening", text, {k: change}, 2, at=k)
    if len(after) > len(before) and len(after) >= 3:
        swapped = (*after[:-2], after[-1], after[-2])
        swap = _interleaved(source, swapped)
        text = f"the parts that {where} makes are interleaved: each takes every {after[-2]}th channel, as of heads"
        yield Edit("heads_interleaved", "interleaved heads", text, {k: swap}, 2, at=k)
        alike = [n for n, item in enumerate(sheet.nodes) if item.operation == "reshape" and sheet.shape(n) == after
                 and sheet.shape(item.given[0]) == before]  # fmt: skip
        if len(alike) > 1 and alike[0] == k:
            changes = {n: _interleaved(sheet.nodes[n].given[0], swapped) for n in alike}
            yield Edit(
                "heads_interleaved", "interleaved heads", f"{text}, as all {len(alike)} of this shape", changes, 1, at=k
            )


def _interleaved(source: int, swapped: tuple[int, ...]) -> Change:
    return lambda get, own: np.swapaxes(get(source).reshape(swapped), -1, -2)


def _matmul(sheet: FormulaView, k: int) -> Iterator[Edit]:
    """Yield edits that transpose a square parameter matrix of a product."""
    for place, operand in enumerate(sheet.nodes[k].given):
        node = sheet.nodes[operand]
        source = node.given[0] if node.operation == "transpose" else operand
        shape = sheet.shape(operand)
        if sheet.is_parameter(source) and len(shape) == 2 and shape[0] == shape[1]:
            text = f"the matrix `{sheet.nodes[source].name}` is transposed in the product ({sheet.where(k)})"
            others = sheet.nodes[k].given

            def change(get: Any, own: Any, place: int = place, others: tuple[int, ...] = others) -> np.ndarray:
                sides = [get(g) for g in others]
                sides[place] = sides[place].T
                return np.asarray(sides[0] @ sides[1])

            yield Edit("weight_transposed", "a transposed matrix", text, {k: change}, 0, at=k)


def _swapped_operands(sheet: FormulaView, k: int) -> Iterator[Edit]:
    first, second = sheet.nodes[k].given
    operation = OPERATIONS[sheet.nodes[k].operation]
    if sheet.shape(first) == sheet.shape(second) and not sheet.is_number(first) and not sheet.is_number(second):
        text = f"the operands of {sheet.where(k)} are exchanged"
        yield Edit(
            "operands", "exchanged operands", text, {k: lambda get, own: operation(get(second), get(first))}, 1, at=k
        )
    sign = {"add": "sub", "sub": "add"}.get(sheet.nodes[k].operation)
    if sign and not sheet.is_number(second):
        opposite = OPERATIONS[sign]
        text = f"the sign of {sheet.named(second)} is flipped ({sheet.where(k)})"
        if sheet.of_operations(k, frozenset({"sin", "cos"})) or sheet.turns(k):
            text += ": rotary embeddings turn the other way"
        yield Edit("sign", "a sign", text, {k: lambda get, own: opposite(get(first), get(second))}, 2, at=k)


def _product(sheet: FormulaView, k: int) -> Iterator[Edit]:
    if sheet.nodes[k].operation == "div":
        yield from _divided(sheet, k)
        yield from _swapped_operands(sheet, k)


_BY_OPERATION: dict[str, Callable[[FormulaView, int], Iterator[Edit]]] = {
    **BY_OPERATION,
    "act": _act,
    "softmax": _softmax,
    "log_softmax": _softmax,
    "reduced": _reduced,
    "div": _product,
    "sub": _swapped_operands,
    "add": _swapped_operands,
    "getitem": _getitem,
    "cat": _cat,
    "stack": _cat,
    "normalised": _normalised,
    "grouped": _normalised,
    "by_statistics": _normalised,
    "sqrt": _root,
    "rsqrt": _root,
    "causal": _causal,
    "triu": _triu,
    "tril": _triu,
    "masked": _masked,
    "where": _masked,
    "reshape": _reshape,
    "matmul": _matmul,
}
