"""Edits of convolutions, padding, pooling, interpolation, embeddings and recurrent layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any

import numpy as np

from padiff.compare.diagnose.computing.edit import Argument, Edit, FormulaView, given
from padiff.compare.diagnose.computing.formula import Change
from padiff.compare.diagnose.computing.operations import OPERATIONS
from padiff.compare.diagnose.kernels.activations import FUNCTIONS

_NONE = "no activation"
_GATES = {"lstm": "input, forget, cell, output", "gru": "reset, update, new"}


def _conv(sheet: FormulaView, k: int) -> Iterator[Edit]:
    node, where = sheet.nodes[k], sheet.where(k)
    padded = any(n for axis_padding in node.how["padding"] for n in axis_padding)
    for mode in ("zeros", "reflect", "replicate", "circular"):
        if padded and mode != node.how.get("mode", "zeros"):
            text = f"padding_mode {mode} for the reference's {node.how.get('mode', 'zeros')} ({where})"
            yield Edit("padding_mode", "another padding mode", text, {k: given(sheet, k, mode=mode)}, 0, at=k)
    for shift in (1, -1) if padded else ():
        moved = [
            (max(a - shift, 0), b + min(shift, a)) if shift > 0 else (a - shift, b + shift)
            for a, b in node.how["padding"]
        ]
        text = f"the padding is shifted by one: {moved[0]} for {tuple(node.how['padding'][0])} ({where})"
        yield Edit("padding_shifted", "shifted padding", text, {k: given(sheet, k, padding=moved)}, 1, at=k)
    x, weight = node.given[:2]
    axes = tuple(range(2, len(sheet.shape(weight))))
    text = f"the kernel is flipped ({where}): a convolution for the frameworks' correlation"
    how = node.how
    change: Change = lambda get, own: np.asarray(OPERATIONS["conv"](get(x), np.flip(get(weight), axes), **how))  # noqa: E731
    yield Edit("kernel_flipped", "a flipped kernel", text, {k: change}, 1, at=k)


def _pad(sheet: FormulaView, k: int) -> Iterator[Edit]:
    node, where = sheet.nodes[k], sheet.where(k)
    for mode in ("constant", "reflect", "replicate", "circular"):
        if mode != node.how["mode"]:
            text = f"padding mode {mode} for the reference's {node.how['mode']} ({where})"
            yield Edit("padding_mode", "another padding mode", text, {k: given(sheet, k, mode=mode)}, 0, at=k)
    swapped = [(b, a) for a, b in node.how["pads"]]
    if swapped != [tuple(pair) for pair in node.how["pads"]]:
        text = f"the padding is on the other side ({where})"
        yield Edit("padding_shifted", "shifted padding", text, {k: given(sheet, k, pads=swapped)}, 1, at=k)


def _pool(sheet: FormulaView, k: int) -> Iterator[Edit]:
    node, where = sheet.nodes[k], sheet.where(k)
    by = "mean" if node.how["by"] == "max" else "max"
    names = {"max": "maximum (max pooling)", "mean": "mean (average pooling)"}
    text = f"the {names[by]} of each window for the reference's {names[node.how['by']]} ({where})"
    for exclusive in (False, True) if by == "mean" else (False,):
        yield Edit("pooling", "another pooling", text, {k: given(sheet, k, by=by, exclusive=exclusive)}, 0, at=k)
    if node.how["by"] == "mean":
        exclusive = not node.how["exclusive"]
        counted = "not counted" if exclusive else "counted"
        text = f"what is padded is {counted} in the mean ({where}): exclusive, count_include_pad"
        yield Edit("pooling_exclusive", "padding in the mean", text, {k: given(sheet, k, exclusive=exclusive)}, 0, at=k)


def _resized(sheet: FormulaView, k: int) -> Iterator[Edit]:
    node, where = sheet.nodes[k], sheet.where(k)
    if node.how["mode"] != "nearest":
        corners = not node.how["corners"]
        text = f"align_corners={corners} for the reference's {not corners} ({where})"
        argument = Argument(dict.fromkeys(("torch", "paddle"), "align_corners"), not corners, corners, False)
        change = {k: given(sheet, k, corners=corners)}
        yield Edit("align_corners", "align_corners", text, change, 0, at=k, argument=argument)
    mode = "linear" if node.how["mode"] == "nearest" else "nearest"
    text = f"{mode} interpolation for the reference's {node.how['mode']} ({where})"
    yield Edit("interpolation", "another interpolation", text, {k: given(sheet, k, mode=mode)}, 0, at=k)


def _looked_up(sheet: FormulaView, k: int) -> Iterator[Edit]:
    node = sheet.nodes[k]
    if node.how.get("zero") is None:
        rows = sheet.shape(node.given[1])[0]
        for index in dict.fromkeys((0, 1, rows - 1)):
            text = f"row {index} of {sheet.named(node.given[1])} gives zeros ({sheet.where(k)}): padding_idx={index}"
            yield Edit("padding_idx", "padding_idx", text, {k: given(sheet, k, zero=index)}, 1, at=k)


def _recurrent(sheet: FormulaView, k: int) -> Iterator[Edit]:
    node, where = sheet.nodes[k], sheet.where(k)
    text = f"the sequence is gone through in reverse, from its last step to its first ({where})"
    yield Edit("direction", "another direction", text, {k: given(sheet, k, backward=True)}, 0, at=k)

    def back(get: Any, own: Any) -> np.ndarray:
        axis = 0 if node.how.get("time_first") else 1
        output = OPERATIONS[node.operation](*(get(g) for g in node.given), **{**node.how, "backward": True})
        return np.flip(output, axis)

    text = f"the sequence is gone through in reverse ({where}), and the states are left in that order"
    yield Edit("direction", "another direction", text, {k: back}, 0, at=k)
    gates = _GATES.get(node.operation)
    if gates:
        count = 4 if node.operation == "lstm" else 3
        names = gates.split(", ")
        for order in permutations(range(count)):
            if order != tuple(range(count)):
                order_text = ", ".join(names[order.index(n)] for n in range(count))
                text = f"the gates are in the order {order_text} for the reference's {gates} ({where})"
                yield Edit("gate_order", "gates in another order", text, {k: given(sheet, k, order=order)}, 1, at=k)
    for which in ("inner", "outer") if node.operation == "lstm" else ("inner",):
        what = "the cell gate" if which == "inner" else "the state that comes out"
        for function in (_NONE, *FUNCTIONS):
            if function != "tanh":
                text = f"{function} for the reference's tanh of {what} ({where})"
                name = "another activation"
                yield Edit("activation", name, text, {k: given(sheet, k, **{which: function})}, 1, at=k)
    for bias in node.given[3:]:
        text = f"bias {sheet.named(bias)} is not added ({where})"
        zeros: Change = lambda get, own, bias=bias: np.zeros_like(own(bias))  # type: ignore[misc]  # noqa: E731
        yield Edit("bias_missing", "a bias", text, {bias: zeros}, 1, at=k)
    if node.operation in _GATES:
        for function in ("Hardsigmoid", "tanh", _NONE):
            text = f"{function} for the reference's sigmoid of the gates ({where})"
            yield Edit("activation", "another activation", text, {k: given(sheet, k, gate=function)}, 1, at=k)
    if node.operation == "gru":
        for reset, what in (
            ("before", "resets the state before its matrix product, the reference after it"),
            ("never", "does not reset the state, the reference does (the reset gate is not used)"),
        ):
            text = f"the candidate {what}: {where}"
            yield Edit("gate_reset", "another reset gate", text, {k: given(sheet, k, reset=reset)}, 1, at=k)
        text = f"the share of the state before, which the update gate keeps, is left out ({where})"
        yield Edit("state_missing", "no state before", text, {k: given(sheet, k, keeps=False)}, 1, at=k)
        yield Edit("gate_order", "update gate turned", f"the update gate keeps what the reference's replaces ({where})",
                   {k: given(sheet, k, swapped=True)}, 1, at=k)  # fmt: skip


#: The edits of an operation, by its name.
BY_OPERATION: dict[str, Callable[[FormulaView, int], Iterator[Edit]]] = {
    "conv": _conv,
    "pad": _pad,
    "pool": _pool,
    "resized": _resized,
    "looked_up": _looked_up,
    "lstm": _recurrent,
    "gru": _recurrent,
    "rnn": _recurrent,
}
