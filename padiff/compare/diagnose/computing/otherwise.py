"""Edits that do something in another way: another function, axis, order, form, statistic, mask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, permutations
from typing import Any

import numpy as np

from padiff.compare.diagnose.computing.edit import Edit, Sheet
from padiff.compare.diagnose.computing.formula import Change
from padiff.compare.diagnose.computing.operations import OPERATIONS, cast
from padiff.compare.diagnose.hypotheses.activations import FUNCTIONS

_NONE = "no activation"
_GATES = {"lstm": "input, forget, cell, output", "gru": "reset, update, new"}
_FEW = 4


def otherwise(sheet: Sheet) -> Iterator[Edit]:
    """Each operation in other ways, the plainest first."""
    for k, node in enumerate(sheet.nodes):
        found = _BY_OPERATION.get(node.operation)
        if found is not None:
            yield from found(sheet, k)
    yield from _exchanged(sheet)
    yield from _rotary(sheet)
    for k in range(len(sheet.nodes)):
        yield from _values(sheet, k)


def _with(sheet: Sheet, k: int, **how: Any) -> Change:
    """An operation given something else."""
    node = sheet.nodes[k]

    def change(get: Callable[[int], np.ndarray], own: Any) -> np.ndarray:
        return np.asarray(OPERATIONS[node.operation](*(get(g) for g in node.given), **{**node.how, **how}))

    return change


def _of(sheet: Sheet, k: int, operation: str, place: int = 0, **how: Any) -> Change:
    """Another operation on one of a node's operands."""
    given = sheet.nodes[k].given[place]
    return lambda get, own: np.asarray(OPERATIONS[operation](get(given), **how))


def _act(sheet: Sheet, k: int) -> Iterator[Edit]:
    own = sheet.nodes[k].how["function"]
    where = sheet.where(k)
    text = f"no activation for the reference's {own} ({where})"
    yield Edit("activation_missing", "no activation", text, {k: _of(sheet, k, "act", function=_NONE)}, 0, at=k)
    for name in FUNCTIONS:
        if name != own:
            text = f"{name} for the reference's {own} ({where})"
            yield Edit("activation", "another activation", text, {k: _of(sheet, k, "act", function=name)}, 0, at=k)
    total = sheet.nodes[sheet.nodes[k].given[0]]
    if total.operation == "add" and sheet.shape(total.given[0]) == sheet.shape(total.given[1]):
        act, how = OPERATIONS["act"], sheet.nodes[k].how
        for one, other in (total.given, total.given[::-1]):
            text = f"{own} is taken of {sheet.named(one)} before the sum, for the reference's of the sum ({where})"
            before: Change = lambda get, own, one=one, other=other: act(get(one), **how) + get(other)  # type: ignore[misc]  # noqa: E731
            yield Edit("activation_order", "another order of activation and sum", text, {k: before}, 1, at=k)


def _softmax(sheet: Sheet, k: int) -> Iterator[Edit]:
    node, ndim, where = sheet.nodes[k], len(sheet.shape(k)), sheet.where(k)
    own = node.how.get("axis", -1) % ndim
    for axis in range(ndim):
        if axis != own:
            text = f"the softmax of {where} is over axis {axis - ndim} for the reference's {own - ndim}"
            yield Edit("softmax_axis", "softmax over another axis", text, {k: _with(sheet, k, axis=axis)}, 0, at=k)
    text = f"a sigmoid for the reference's softmax ({where})"
    yield Edit("activation", "another activation", text, {k: _of(sheet, k, "act", function="sigmoid")}, 0, at=k)


def _reduced(sheet: Sheet, k: int) -> Iterator[Edit]:
    node, where = sheet.nodes[k], sheet.where(k)
    by, axis = node.how["by"], node.how.get("axis")
    for other in ("mean", "sum", "max"):
        if other != by and by in ("mean", "sum", "max", "min"):
            text = f"the {other} for the reference's {by} ({where})"
            yield Edit("reduction_form", "another reduction", text, {k: _with(sheet, k, by=other)}, 0, at=k)
    if by in ("var", "std"):
        ddof = 1 - node.how.get("ddof", 0)
        form = "unbiased (over n - 1)" if ddof else "biased (over n)"
        yield Edit(
            "variance", "variance", f"the variance of {where} is {form}", {k: _with(sheet, k, ddof=ddof)}, 0, at=k
        )
    ndim = len(sheet.shape(node.given[0]))
    for one in range(ndim) if isinstance(axis, int) else ():
        if one != axis % ndim:
            text = f"the {by} of {where} is over axis {one} for the reference's {axis % ndim}"
            yield Edit("axis", "another axis", text, {k: _with(sheet, k, axis=one)}, 1, at=k)


def _divided(sheet: Sheet, k: int) -> Iterator[Edit]:
    """The mean over what a mask keeps, taken over all."""
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


def _getitem(sheet: Sheet, k: int) -> Iterator[Edit]:
    node = sheet.nodes[k]
    key = node.how["key"] if isinstance(node.how["key"], list) else [node.how["key"]]
    where, shape = sheet.where(k), sheet.shape(node.given[0])
    for place, index in enumerate(key):
        if not isinstance(index, int) or isinstance(index, bool) or place >= len(shape) or "..." in key[:place]:
            continue
        last = index in (-1, shape[place] - 1)
        for other in dict.fromkeys((0, -1, 1, -2)):
            if other % shape[place] != index % shape[place]:
                changed = [*key[:place], other, *key[place + 1 :]]
                said = {0: "the first", -1: "the last"}.get(other, f"number {other}")
                own = "last" if last else "first" if index == 0 else f"number {index}"
                text = f"{said} of axis {place} is taken for the reference's {own} ({where})"
                yield Edit("position", "another position", text, {k: _with(sheet, k, key=changed)}, 0, at=k)
        for by in ("mean", "max", "sum"):
            text = f"the {by} over axis {place} is taken for the reference's {'last' if last else index} ({where})"
            if len(key) == place + 1:
                change = _of(sheet, k, "reduced", by=by, axis=place)
                yield Edit("reduction_form", "another reduction", text, {k: change}, 0, at=k)


def _cat(sheet: Sheet, k: int) -> Iterator[Edit]:
    node = sheet.nodes[k]
    if len(node.given) == 2:
        text = f"the parts of {sheet.where(k)} are in the other order"
        given, how = node.given, node.how
        change: Change = lambda get, own: np.concatenate([get(g) for g in given[::-1]], how["axis"])  # noqa: E731
        if node.operation == "cat":
            yield Edit("parts_order", "parts in another order", text, {k: change}, 1, at=k)


def _normalised(sheet: Sheet, k: int) -> Iterator[Edit]:
    node, where = sheet.nodes[k], sheet.where(k)
    if node.operation == "normalised":
        centred, ndim = node.how.get("centred", True), len(sheet.shape(k))
        text = f"the mean is {'not ' if centred else ''}taken out ({where}): " + (
            "an RMS norm for a layer norm" if centred else "a LayerNorm for an RMS norm"
        )
        yield Edit("norm_form", "another form of the norm", text, {k: _with(sheet, k, centred=not centred)}, 0, at=k)
        text = f"the variance of {where} is unbiased (over n - 1)"
        yield Edit("norm_unbiased", "an unbiased variance", text, {k: _with(sheet, k, unbiased=True)}, 0, at=k)
        text = f"the root of the variance is missing in {where}"
        yield Edit("norm_root", "no root of the variance", text, {k: _with(sheet, k, root=False)}, 1, at=k)
        for axis in range(1, ndim):
            if (axis,) != tuple(node.how["axes"]):
                text = f"the normalisation of {where} is over axis {axis} alone"
                yield Edit("norm_axes", "other axes of the norm", text, {k: _with(sheet, k, axes=(axis,))}, 2, at=k)
    elif node.operation == "grouped":
        count = sheet.shape(k)[1]
        for groups in (n for n in range(1, count + 1) if count % n == 0 and n != node.how["groups"]):
            text = f"{groups} groups for the reference's {node.how['groups']} ({where})"
            yield Edit("norm_groups", "another number of groups", text, {k: _with(sheet, k, groups=groups)}, 0, at=k)
    else:
        train = not node.how["train"]
        said = "those of the batch (train mode)" if train else "the running ones (eval mode)"
        own = "the running ones (eval mode)" if train else "those of the batch (train mode)"
        text = f"the statistics are {said} for the reference's {own} ({where})"
        yield Edit("norm_statistics", "other statistics", text, {k: _with(sheet, k, train=train)}, 0, at=k)


def _root(sheet: Sheet, k: int) -> Iterator[Edit]:
    given = sheet.nodes[k].given[0]
    text = f"the root is missing: {sheet.where(k)}"
    power = -1 if sheet.nodes[k].operation == "rsqrt" else 1
    change: Change = lambda get, own: np.power(get(given), power)  # noqa: E731
    yield Edit("root_missing", "a root", text, {k: change}, 1, at=k)


def _conv(sheet: Sheet, k: int) -> Iterator[Edit]:
    node, where = sheet.nodes[k], sheet.where(k)
    padded = any(n for one in node.how["padding"] for n in one)
    for mode in ("zeros", "reflect", "replicate", "circular"):
        if padded and mode != node.how.get("mode", "zeros"):
            text = f"padding_mode {mode} for the reference's {node.how.get('mode', 'zeros')} ({where})"
            yield Edit("padding_mode", "another padding mode", text, {k: _with(sheet, k, mode=mode)}, 0, at=k)
    for shift in (1, -1) if padded else ():
        moved = [
            (max(a - shift, 0), b + min(shift, a)) if shift > 0 else (a - shift, b + shift)
            for a, b in node.how["padding"]
        ]
        text = f"the padding is shifted by one: {moved[0]} for {tuple(node.how['padding'][0])} ({where})"
        yield Edit("padding_shifted", "shifted padding", text, {k: _with(sheet, k, padding=moved)}, 1, at=k)
    x, weight = node.given[:2]
    axes = tuple(range(2, len(sheet.shape(weight))))
    text = f"the kernel is flipped ({where}): a convolution for the frameworks' correlation"
    how = node.how
    change: Change = lambda get, own: np.asarray(OPERATIONS["conv"](get(x), np.flip(get(weight), axes), **how))  # noqa: E731
    yield Edit("kernel_flipped", "a flipped kernel", text, {k: change}, 1, at=k)


def _pad(sheet: Sheet, k: int) -> Iterator[Edit]:
    node, where = sheet.nodes[k], sheet.where(k)
    for mode in ("constant", "reflect", "replicate", "circular"):
        if mode != node.how["mode"]:
            text = f"padding mode {mode} for the reference's {node.how['mode']} ({where})"
            yield Edit("padding_mode", "another padding mode", text, {k: _with(sheet, k, mode=mode)}, 0, at=k)
    turned = [(b, a) for a, b in node.how["pads"]]
    if turned != [tuple(one) for one in node.how["pads"]]:
        text = f"the padding is on the other side ({where})"
        yield Edit("padding_shifted", "shifted padding", text, {k: _with(sheet, k, pads=turned)}, 1, at=k)


def _pool(sheet: Sheet, k: int) -> Iterator[Edit]:
    node, where = sheet.nodes[k], sheet.where(k)
    other = "mean" if node.how["by"] == "max" else "max"
    names = {"max": "maximum (max pooling)", "mean": "mean (average pooling)"}
    text = f"the {names[other]} of each window for the reference's {names[node.how['by']]} ({where})"
    for exclusive in (False, True) if other == "mean" else (False,):
        yield Edit("pooling", "another pooling", text, {k: _with(sheet, k, by=other, exclusive=exclusive)}, 0, at=k)
    if node.how["by"] == "mean":
        exclusive = not node.how["exclusive"]
        text = f"what is padded is {'not ' if exclusive else ''}counted in the mean ({where}): exclusive, count_include_pad"
        yield Edit("pooling_exclusive", "padding in the mean", text, {k: _with(sheet, k, exclusive=exclusive)}, 0, at=k)


def _resized(sheet: Sheet, k: int) -> Iterator[Edit]:
    node, where = sheet.nodes[k], sheet.where(k)
    if node.how["mode"] != "nearest":
        corners = not node.how["corners"]
        text = f"align_corners={corners} for the reference's {not corners} ({where})"
        yield Edit("align_corners", "align_corners", text, {k: _with(sheet, k, corners=corners)}, 0, at=k)
    mode = "linear" if node.how["mode"] == "nearest" else "nearest"
    text = f"{mode} interpolation for the reference's {node.how['mode']} ({where})"
    yield Edit("interpolation", "another interpolation", text, {k: _with(sheet, k, mode=mode)}, 0, at=k)


def _looked_up(sheet: Sheet, k: int) -> Iterator[Edit]:
    node = sheet.nodes[k]
    if node.how.get("zero") is None:
        rows = sheet.shape(node.given[1])[0]
        for index in dict.fromkeys((0, 1, rows - 1)):
            text = f"row {index} of {sheet.named(node.given[1])} gives zeros ({sheet.where(k)}): padding_idx={index}"
            yield Edit("padding_idx", "padding_idx", text, {k: _with(sheet, k, zero=index)}, 1, at=k)


def _recurrent(sheet: Sheet, k: int) -> Iterator[Edit]:
    node, where = sheet.nodes[k], sheet.where(k)
    text = f"the sequence is gone through in reverse, from its last step to its first ({where})"
    yield Edit("direction", "another direction", text, {k: _with(sheet, k, backward=True)}, 0, at=k)

    def back(get: Any, own: Any) -> np.ndarray:
        axis = 0 if node.how.get("time_first") else 1
        found = OPERATIONS[node.operation](*(get(g) for g in node.given), **{**node.how, "backward": True})
        return np.flip(found, axis)

    text = f"the sequence is gone through in reverse ({where}), and the states are left in that order"
    yield Edit("direction", "another direction", text, {k: back}, 0, at=k)
    gates = _GATES.get(node.operation)
    if gates:
        count = 4 if node.operation == "lstm" else 3
        names = gates.split(", ")
        for order in permutations(range(count)):
            if order != tuple(range(count)):
                own = ", ".join(names[order.index(n)] for n in range(count))
                text = f"the gates are in the order {own} for the reference's {gates} ({where})"
                yield Edit("gate_order", "gates in another order", text, {k: _with(sheet, k, order=order)}, 1, at=k)
    for which in ("inner", "outer") if node.operation == "lstm" else ("inner",):
        what = "the cell gate" if which == "inner" else "the state that comes out"
        for function in (_NONE, *FUNCTIONS):
            if function != "tanh":
                text = f"{function} for the reference's tanh of {what} ({where})"
                name = "another activation"
                yield Edit("activation", name, text, {k: _with(sheet, k, **{which: function})}, 1, at=k)
    for bias in node.given[3:]:
        text = f"bias {sheet.named(bias)} is not added ({where})"
        zeros: Change = lambda get, own, bias=bias: np.zeros_like(own(bias))  # type: ignore[misc]  # noqa: E731
        yield Edit("bias_missing", "a bias", text, {bias: zeros}, 1, at=k)
    if node.operation == "gru":
        yield Edit("gate_order", "update gate turned", f"the update gate keeps what the reference's replaces ({where})",
                   {k: _with(sheet, k, turned=True)}, 1, at=k)  # fmt: skip


def _causal(sheet: Sheet, k: int) -> Iterator[Edit]:
    for diagonal, text in ((2, "shows each place the one after it, too"), (0, "hides each place from itself, too")):
        said = f"the causal mask is shifted by one: it {text} ({sheet.where(k)})"
        yield Edit("mask_shifted", "a shifted mask", said, {k: _with(sheet, k, diagonal=diagonal)}, 0, at=k)


def _triu(sheet: Sheet, k: int) -> Iterator[Edit]:
    own = sheet.nodes[k].how.get("diagonal", 0)
    for diagonal in (own + 1, own - 1):
        text = f"the mask is shifted by one: diagonal {diagonal} for the reference's {own} ({sheet.where(k)})"
        yield Edit("mask_shifted", "a shifted mask", text, {k: _with(sheet, k, diagonal=diagonal)}, 1, at=k)


def _masked(sheet: Sheet, k: int) -> Iterator[Edit]:
    """A mask that is turned over, or shifted."""
    node, where = sheet.nodes[k], sheet.where(k)
    mask = node.given[0] if node.operation == "where" else node.given[1]
    values = sheet.formula.values[mask]
    low, high = (values.min(), values.max()) if values.size else (0, 0)
    if low == high or not ((values == low) | (values == high)).all():
        return
    turned: Change = lambda get, own: np.where(own(mask) == low, high, low)  # noqa: E731
    text = f"the mask is inverted: what the reference hides is kept, what it keeps is hidden ({where})"
    yield Edit("mask_inverted", "an inverted mask", text, {mask: turned}, 0, at=k)
    for shift in (1, -1):
        rolled: Change = lambda get, own, shift=shift: np.roll(own(mask), shift, -1)  # type: ignore[misc]  # noqa: E731
        text = f"the mask is shifted by {'one' if shift > 0 else 'minus one'} along its last axis ({where})"
        yield Edit("mask_shifted", "a shifted mask", text, {mask: rolled}, 1, at=k)


def _reshape(sheet: Sheet, k: int) -> Iterator[Edit]:
    """Values that are laid out in another order before, or after, their axes are put together or taken apart."""
    given, where = sheet.nodes[k].given[0], sheet.where(k)
    before, after = sheet.shape(given), sheet.shape(k)
    if 3 <= len(before) <= 4:
        for order in permutations(range(1, len(before))):
            if order != tuple(range(1, len(before))):
                axes = (0, *order)
                change: Change = lambda get, own, axes=axes: get(given).transpose(axes).reshape(after)  # type: ignore[misc]  # noqa: E731
                text = f"the values are flattened in another order: axes {axes} before {where}"
                yield Edit("flatten_order", "another order of flattening", text, {k: change}, 2, at=k)
    if len(after) > len(before) and len(after) >= 3:
        turned = (*after[:-2], after[-1], after[-2])
        swap = _interleaved(given, turned)
        text = f"the parts that {where} makes are interleaved (heads: each takes every {after[-2]}th channel)"
        yield Edit("heads_interleaved", "interleaved heads", text, {k: swap}, 1, at=k)
        alike = [n for n, one in enumerate(sheet.nodes) if one.operation == "reshape" and sheet.shape(n) == after
                 and sheet.shape(one.given[0]) == before]  # fmt: skip
        if len(alike) > 1 and alike[0] == k:
            changes = {n: _interleaved(sheet.nodes[n].given[0], turned) for n in alike}
            yield Edit(
                "heads_interleaved", "interleaved heads", f"{text}, as all {len(alike)} of this shape", changes, 1, at=k
            )


def _interleaved(given: int, turned: tuple[int, ...]) -> Change:
    return lambda get, own: np.swapaxes(get(given).reshape(turned), -1, -2)


def _matmul(sheet: Sheet, k: int) -> Iterator[Edit]:
    """A square matrix that is transposed."""
    for place, given in enumerate(sheet.nodes[k].given):
        node = sheet.nodes[given]
        source = node.given[0] if node.operation == "transpose" else given
        shape = sheet.shape(given)
        if sheet.is_parameter(source) and len(shape) == 2 and shape[0] == shape[1]:
            text = f"the matrix `{sheet.nodes[source].name}` is transposed in the product ({sheet.where(k)})"
            others = sheet.nodes[k].given

            def change(get: Any, own: Any, place: int = place, others: tuple[int, ...] = others) -> np.ndarray:
                sides = [get(g) for g in others]
                sides[place] = sides[place].T
                return np.asarray(sides[0] @ sides[1])

            yield Edit("weight_transposed", "a transposed matrix", text, {k: change}, 0, at=k)


def _turned_operands(sheet: Sheet, k: int) -> Iterator[Edit]:
    one, other = sheet.nodes[k].given
    operation = OPERATIONS[sheet.nodes[k].operation]
    if sheet.shape(one) == sheet.shape(other) and not sheet.is_number(one) and not sheet.is_number(other):
        text = f"the operands of {sheet.where(k)} are exchanged"
        yield Edit(
            "operands", "exchanged operands", text, {k: lambda get, own: operation(get(other), get(one))}, 1, at=k
        )
    sign = {"add": "sub", "sub": "add"}.get(sheet.nodes[k].operation)
    if sign and not sheet.is_number(other):
        turned = OPERATIONS[sign]
        text = f"the sign of {sheet.named(other)} is turned over ({sheet.where(k)})"
        if sheet.of_operations(k, frozenset({"sin", "cos"})) or sheet.turns(k):
            text += ": rotary embeddings turn the other way"
        yield Edit("sign", "a sign", text, {k: lambda get, own: turned(get(one), get(other))}, 2, at=k)


def _product(sheet: Sheet, k: int) -> Iterator[Edit]:
    if sheet.nodes[k].operation == "div":
        yield from _divided(sheet, k)
        yield from _turned_operands(sheet, k)


_BY_OPERATION: dict[str, Callable[[Sheet, int], Iterator[Edit]]] = {
    "act": _act,
    "softmax": _softmax,
    "log_softmax": _softmax,
    "reduced": _reduced,
    "div": _product,
    "sub": _turned_operands,
    "add": _turned_operands,
    "getitem": _getitem,
    "cat": _cat,
    "stack": _cat,
    "normalised": _normalised,
    "grouped": _normalised,
    "by_statistics": _normalised,
    "sqrt": _root,
    "rsqrt": _root,
    "conv": _conv,
    "pad": _pad,
    "pool": _pool,
    "resized": _resized,
    "looked_up": _looked_up,
    "lstm": _recurrent,
    "gru": _recurrent,
    "rnn": _recurrent,
    "causal": _causal,
    "triu": _triu,
    "tril": _triu,
    "masked": _masked,
    "where": _masked,
    "reshape": _reshape,
    "matmul": _matmul,
}


def _exchanged(sheet: Sheet) -> Iterator[Edit]:
    """Two tensors of one shape that are taken for each other: parts of one, or what two layers gave."""
    parts: dict[object, list[int]] = {}
    for k, node in enumerate(sheet.nodes):
        if node.operation == "getitem" and sheet.is_float(k):
            parts.setdefault((node.given, sheet.shape(k)), []).append(k)
        elif not node.operation and sheet.is_float(k) and not node.name and sheet.users(k):
            parts.setdefault(("given", sheet.shape(k)), []).append(k)
    rows = [some for some in parts.values() if 2 <= len(some) <= _FEW + 2]
    # Parts of a matrix that holds several, each with its part of the bias.
    both = [
        some for some in rows if all(sheet.is_parameter(sheet.nodes[k].given[0]) for k in some if sheet.nodes[k].given)
    ]
    both = [some for some in both if sheet.nodes[some[0]].given]
    for some in rows:
        with_it = [other for other in both if other is not some and len(other) == len(some)] if some in both else []
        for (n, one), (m, other) in combinations(enumerate(some), 2):
            changes = _swapped(one, other)
            for bias in with_it:
                changes |= _swapped(bias[n], bias[m])
            names = f"{sheet.named(one)} and {sheet.named(other)}"
            if sheet.nodes[one].operation:
                source = sheet.named(sheet.nodes[one].given[0])
                names = f"parts {n} and {m} of {source} (of {len(some)}: query, key and value, gates or halves)"
            text = f"{names} are swapped: they are in another order"
            yield Edit("parts_order", "parts in another order", text, changes, 2, at=one)


def _swapped(one: int, other: int) -> dict[int, Change]:
    return {one: lambda get, own: own(other), other: lambda get, own: own(one)}


def _rotary(sheet: Sheet) -> Iterator[Edit]:
    """Rotary embeddings of neighbours in place of halves, or turned the other way; of all at once."""
    halves = [(k, x) for k in range(len(sheet.nodes)) if (x := _half_turned(sheet, k)) is not None]
    if not halves:
        return
    for name, make in (("interleaved (each with its neighbour), for the reference's halves", _neighbours),
                       ("turned the other way (the sign of the sine)", _other_way)):  # fmt: skip
        for some in (halves, *[[one] for one in halves]):
            changes: dict[int, Change] = {}
            for k, x in some:
                changes[k] = lambda get, own, k=k, x=x: make(get(x), own(k))  # type: ignore[misc]
            which = "" if len(some) == len(halves) else f" of {sheet.named(some[0][1])} alone"
            text = f"the rotary embeddings{which} are {name} ({sheet.where(some[0][0])})"
            yield Edit("rotary_form", "another form of rotary embedding", text, changes, 1, at=some[0][0])
    ends = [(x, end) for k, x in halves for end in _ends(sheet, k, x)]
    changes = {}
    for x, end in ends:
        size = sheet.shape(x)[-1]
        order = np.concatenate([np.arange(0, size, 2), np.arange(1, size, 2)])
        back = np.argsort(order)
        changes[x] = lambda get, own, x=x, order=order: own(x)[..., order]  # type: ignore[misc]
        changes[end] = lambda get, own, end=end, back=back: own(end)[..., back]  # type: ignore[misc]
    text = "the rotary embeddings are interleaved (each with its neighbour), for the reference's halves"
    yield Edit("rotary_form", "another form of rotary embedding", f"{text} ({sheet.where(halves[0][0])})", changes, 1,
               at=halves[0][0])  # fmt: skip


def _half_turned(sheet: Sheet, k: int) -> int | None:
    """Of what a node is the second half with its sign turned, before the first; `None` if of nothing."""
    node = sheet.nodes[k]
    if node.operation != "cat" or len(node.given) != 2:
        return None
    one, other = (sheet.nodes[g] for g in node.given)
    if one.operation != "neg" or other.operation != "getitem":
        return None
    second = sheet.nodes[one.given[0]]
    if second.operation != "getitem" or second.given != other.given:
        return None
    x = other.given[0]
    return x if sheet.shape(x) == sheet.shape(k) else None


def _neighbours(x: np.ndarray, own: np.ndarray) -> np.ndarray:
    return np.stack([-x[..., 1::2], x[..., 0::2]], -1).reshape(x.shape)


def _other_way(x: np.ndarray, own: np.ndarray) -> np.ndarray:
    return -own


def _ends(sheet: Sheet, k: int, x: int) -> Iterator[int]:
    """The sum that a rotary embedding ends with."""
    for product in sheet.users(k):
        for total in sheet.users(product):
            if sheet.nodes[total].operation == "add" and sheet.shape(total) == sheet.shape(x):
                yield total


def _values(sheet: Sheet, k: int) -> Iterator[Edit]:
    """A tensor on the way as a whole: in another precision, order or direction."""
    values = sheet.formula.values[k]
    if not sheet.is_float(k) or values.ndim == 0 or sheet.is_number(k):
        return
    name = sheet.named(k)

    def after(make: Callable[[np.ndarray], np.ndarray]) -> dict[int, Change]:
        return {k: lambda get, own: make(own(k))}

    if not sheet.is_parameter(k):
        for dtype in ("bfloat16", "float16", "float8_e4m3fn"):
            text = f"{name} is rounded to {dtype}'s precision there"
            yield Edit("precision", "a coarser precision", text, after(lambda v, d=dtype: cast(v, d)), 2, at=k)  # type: ignore[misc]
    for axis in range(1 if values.ndim > 1 and not sheet.is_parameter(k) else 0, values.ndim):
        if values.shape[axis] < 2:
            continue
        for shift in (1, -1):
            text = f"{name} is shifted by one along axis {axis} (rolled {'forward' if shift > 0 else 'back'})"
            yield Edit("shifted", "a shift", text, after(lambda v, s=shift, a=axis: np.roll(v, s, a)), 3, at=k)  # type: ignore[misc]
        if values.shape[axis] > 2:
            text = f"{name} is flipped: in reverse order along axis {axis}"
            yield Edit("flipped", "a flip", text, after(lambda v, a=axis: np.flip(v, a)), 3, at=k)  # type: ignore[misc]
        if 2 < values.shape[axis] <= _FEW and values.ndim == 4:
            for order in permutations(range(values.shape[axis])):
                if list(order) not in (sorted(order), sorted(order)[::-1]):
                    text = (
                        f"{name} has axis {axis} in the order {', '.join(map(str, order))} (heads or channels permuted)"
                    )
                    yield Edit("permuted", "another order of heads", text,
                               after(lambda v, o=order, a=axis: np.take(v, o, a)), 4, at=k)  # type: ignore[misc]  # fmt: skip
    for one, other in combinations(range(values.ndim), 2):
        if values.shape[one] == values.shape[other] > 1 and not sheet.is_parameter(k):
            text = f"{name} has axes {one} and {other} transposed"
            yield Edit("axes_order", "another order of axes", text,
                       after(lambda v, a=one, b=other: np.swapaxes(v, a, b)), 3, at=k)  # type: ignore[misc]  # fmt: skip
