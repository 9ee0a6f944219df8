"""Edits that change an operation: another function, axis, order, form, statistic, mask or layer setting."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import combinations, permutations
from typing import Any

import numpy as np

from padiff.compare.diagnose.computing.edit import (
    SIDES_OF_EDITS,
    Argument,
    Edit,
    FormulaView,
    dropped_terms,
    given,
    is_mask,
    put,
)
from padiff.compare.diagnose.computing.formula import MADE, Change, Get
from padiff.compare.diagnose.computing.operations import OPERATIONS, cast
from padiff.compare.diagnose.kernels import ACTIVATION_NUMBERS, FUNCTIONS
from padiff.frameworks.settings import FRAMEWORKS, conventions_of
from padiff.records import Both
from padiff.system.terminal import first_few

_FEW = 4


def exchanged(sheet: FormulaView) -> Iterator[Edit]:
    """Yield edits that swap two tensors of the same shape: two parts of one tensor, or two recorded tensors."""
    parts: dict[object, list[int]] = {}
    for k, node in enumerate(sheet.nodes):
        if node.operation == "getitem" and sheet.is_float(k):
            parts.setdefault((node.given, sheet.shape(k)), []).append(k)
        elif not node.operation and sheet.is_float(k) and not node.name and sheet.users(k):
            parts.setdefault(("given", sheet.shape(k)), []).append(k)
    rows = [group for group in parts.values() if 2 <= len(group) <= _FEW + 2]
    # Parts of one parameter, such as a matrix with query, key and value; the parts of its bias are swapped too.
    both = [
        group
        for group in rows
        if all(sheet.is_parameter(sheet.nodes[k].given[0]) for k in group if sheet.nodes[k].given)
    ]
    both = [group for group in both if sheet.nodes[group[0]].given]
    for group in rows:
        with_it = (
            [partner for partner in both if partner is not group and len(partner) == len(group)]
            if group in both
            else []
        )
        for (n, first), (m, partner) in combinations(enumerate(group), 2):
            if sheet.is_earlier_turn(first, partner) or sheet.is_earlier_turn(partner, first):
                continue
            changes = _swapped(first, partner)
            for bias in with_it:
                changes |= _swapped(bias[n], bias[m])
            names = f"{sheet.named(first)} and {sheet.named(partner)}"
            if sheet.nodes[first].operation:
                source = sheet.named(sheet.nodes[first].given[0])
                names = f"parts {n} and {m} of {source} (of {len(group)}: query, key and value, gates or halves)"
            text = f"{names} are swapped: they are in another order"
            yield Edit("parts_order", "parts in another order", text, changes, 2, at=first)


def _swapped(first: int, second: int) -> dict[int, Change]:
    return {first: lambda get, own: own(second), second: lambda get, own: own(first)}


def rotary(sheet: FormulaView) -> Iterator[Edit]:
    """Yield edits of rotary embeddings: rotated neighbours instead of halves, or the other direction.

    The edits are of all rotary embeddings together, and of each alone.
    """
    halves = [(k, x) for k in range(len(sheet.nodes)) if (x := _half_rotated(sheet, k)) is not None]
    if not halves:
        return
    for name, make in (("interleaved (each with its neighbour), not in halves", _neighbours),
                       ("turned the other way (the sign of the sine)", _other_way)):  # fmt: skip
        for group in (halves, *[[half] for half in halves]):
            changes: dict[int, Change] = {}
            for k, x in group:
                changes[k] = lambda get, own, k=k, x=x, make=make: make(get(x), own(k))  # type: ignore[misc]
            which = "" if len(group) == len(halves) else f" of {sheet.named(group[0][1])} alone"
            text = f"the rotary embeddings{which} are {name} ({sheet.where(group[0][0])})"
            yield Edit("rotary_form", "another form of rotary embedding", text, changes, 1, at=group[0][0])
    ends = [(x, end) for k, x in halves for end in _ends(sheet, k, x)]
    changes = {}
    for x, end in ends:
        size = sheet.shape(x)[-1]
        order = np.concatenate([np.arange(0, size, 2), np.arange(1, size, 2)])
        back = np.argsort(order)
        changes[x] = lambda get, own, x=x, order=order: own(x)[..., order]  # type: ignore[misc]
        changes[end] = lambda get, own, end=end, back=back: own(end)[..., back]  # type: ignore[misc]
    text = "the rotary embeddings are interleaved (each with its neighbour), not in halves"
    yield Edit("rotary_form", "another form of rotary embedding", f"{text} ({sheet.where(halves[0][0])})", changes, 1,
               at=halves[0][0])  # fmt: skip


def _half_rotated(sheet: FormulaView, k: int) -> int | None:
    """Return the node whose halves a node swaps with the sign of the second half flipped; `None` for other nodes."""
    node = sheet.nodes[k]
    if node.operation != "cat" or len(node.given) != 2:
        return None
    negated, first_half = (sheet.nodes[g] for g in node.given)
    if negated.operation != "neg" or first_half.operation != "getitem":
        return None
    second = sheet.nodes[negated.given[0]]
    if second.operation != "getitem" or second.given != first_half.given:
        return None
    x = first_half.given[0]
    return x if sheet.shape(x) == sheet.shape(k) else None


def _neighbours(x: np.ndarray, own: np.ndarray) -> np.ndarray:
    return np.stack([-x[..., 1::2], x[..., 0::2]], -1).reshape(x.shape)


def _other_way(x: np.ndarray, own: np.ndarray) -> np.ndarray:
    return -own


def _ends(sheet: FormulaView, k: int, x: int) -> Iterator[int]:
    """Yield the sums at the end of a rotary embedding.

    Args:
        k: the node with the rotated halves.
        x: the node that is embedded.
    """
    for product in sheet.users(k):
        for total in sheet.users(product):
            if sheet.nodes[total].operation == "add" and sheet.shape(total) == sheet.shape(x):
                yield total


def as_a_whole(sheet: FormulaView, k: int) -> Iterator[Edit]:
    """Yield edits of a whole tensor: a coarser precision, a shift, another order or direction of an axis."""
    values = sheet.formula.values[k]
    if not sheet.is_float(k) or values.ndim == 0 or sheet.is_number(k):
        return
    name = sheet.named(k)

    def after(make: Callable[[np.ndarray], np.ndarray]) -> dict[int, Change]:
        return {k: lambda get, own: make(own(k))}

    if not sheet.is_parameter(k):
        for dtype in ("bfloat16", "float16", "float8_e4m3fn"):
            if np.ptp(cast(values, dtype)) == 0 < np.ptp(values):
                continue  # noise about one number, which is left out
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
    for axis_a, axis_b in combinations(range(values.ndim), 2):
        if values.shape[axis_a] == values.shape[axis_b] > 1 and not sheet.is_parameter(k):
            text = f"{name} has axes {axis_a} and {axis_b} transposed"
            yield Edit("axes_order", "another order of axes", text,
                       after(lambda v, a=axis_a, b=axis_b: np.swapaxes(v, a, b)), 3, at=k)  # type: ignore[misc]  # fmt: skip


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
        yield _corners(sheet, k)
    mode = "linear" if node.how["mode"] == "nearest" else "nearest"
    text = f"{mode} interpolation for the reference's {node.how['mode']} ({where})"
    yield Edit("interpolation", "another interpolation", text, {k: given(sheet, k, mode=mode)}, 0, at=k)


def _sampled(sheet: FormulaView, k: int) -> Iterator[Edit]:
    how, where = sheet.nodes[k].how, sheet.where(k)
    yield _corners(sheet, k, {name: conventions_of(name).samples_corners for name in FRAMEWORKS})
    mode = "border" if how["padding"] == "zeros" else "zeros"
    text = f"padding_mode {mode} for the reference's {how['padding']} ({where})"
    yield Edit("padding_mode", "another padding mode", text, {k: given(sheet, k, padding=mode)}, 0, at=k)


def _corners(sheet: FormulaView, k: int, usual: bool | Mapping[str, bool] = False) -> Edit:
    corners = not sheet.nodes[k].how["corners"]
    text = f"align_corners={corners} for the reference's {not corners} ({sheet.where(k)})"
    argument = Argument(dict.fromkeys(FRAMEWORKS, "align_corners"), not corners, corners, usual)
    change = {k: given(sheet, k, corners=corners)}
    function = sheet.function(k)
    values = Both(*(((function, {"align_corners": each}),) for each in (not corners, corners)))
    return Edit("align_corners", "align_corners", text, change, 0, at=k, argument=argument, values=values)


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
    "sampled": _sampled,
    "looked_up": _looked_up,
    "lstm": _recurrent,
    "gru": _recurrent,
    "rnn": _recurrent,
}


_NONE = "no activation"


def operation_edits(sheet: FormulaView) -> Iterator[Edit]:
    """Yield edits that change an operation or a whole tensor, single operations first."""
    yield from other_operations(sheet)
    yield from exchanged(sheet)
    yield from rotary(sheet)
    yield from exchanged_operations(sheet)
    for k in range(len(sheet.nodes)):
        if sheet.may_be_edited(k):
            yield from as_a_whole(sheet, k)


def other_operations(sheet: FormulaView) -> Iterator[Edit]:
    """Yield edits that change a single operation."""
    for k, node in enumerate(sheet.nodes):
        edits = _BY_OPERATION.get(node.operation)
        if edits is not None:
            yield from edits(sheet, k)


def other_reductions(sheet: FormulaView) -> Iterator[Edit]:
    """Yield edits that reduce in another way, with the sides in their texts, so that they are about either side."""
    side, other = SIDES_OF_EDITS
    for k, node in enumerate(sheet.nodes):
        if node.operation == "reduced" and node.how["by"] in ("mean", "sum"):
            by, reduction = ("mean", "sum") if node.how["by"] == "mean" else ("sum", "mean")
            text = f"{other} takes the {by}, {side} the {reduction} ({sheet.where(k)})"
            yield Edit("reduction_form", "another reduction", text, {k: given(sheet, k, by=reduction)}, 0, at=k)


_RESULTS = {"add": "a sum", "sub": "a difference", "mul": "a product", "div": "a quotient"}


def exchanged_operations(sheet: FormulaView) -> Iterator[Edit]:
    """Yield edits that put a sum, a difference, a product or a quotient of two tensors in the place of another one."""
    for k, node in enumerate(sheet.nodes):
        if node.operation in _RESULTS and len(node.given) == 2 and not any(map(sheet.is_number, node.given)):
            for operation in (each for each in _RESULTS if each != node.operation):
                result, where = _RESULTS[operation], sheet.where(k)
                text = f"{result} stands in the place of {where}"
                yield Edit("operation", "another operation", text, {k: _of_operands(operation, *node.given)}, 3, at=k)


def _of_operands(operation: str, first: int, second: int) -> Change:
    return lambda get, own: np.asarray(OPERATIONS[operation](get(first), get(second)))


def of_all_turns(sheet: FormulaView) -> Iterator[Edit]:
    """Yield edits that change several operations at once: one line's in all turns of a loop, or all reads of a tensor.

    There are few of them, so that they come first.
    """
    lines: dict[object, list[int]] = {}
    dropped: dict[int, list[Edit]] = {}
    for edit in dropped_terms(sheet):
        dropped.setdefault(edit.at, []).append(edit)
    for k, node in enumerate(sheet.nodes):
        if (node.operation in _BY_OPERATION or k in dropped) and sheet.line(k) is not None:
            lines.setdefault((node.operation, sheet.function(k), sheet.line(k)), []).append(k)
    for turns in (turns for together in lines.values() for turns in _by_place(sheet, together)):
        if not 1 < len(turns) <= _TURNS:
            continue
        shapes = {sheet.shape(k): [other for other in turns if sheet.shape(other) == sheet.shape(k)] for k in turns}
        # One line may make several tensors in each turn: weights and biases.
        for group in [turns, *shapes.values()] if len(shapes) > 1 else [turns]:
            if len(group) > 1:
                yield from _in_all_turns(sheet, group, [_changed(sheet, k) for k in group])
                yield from _in_all_turns(sheet, group, [dropped.get(k, []) for k in group])
    yield from _exchanged_indices(sheet)
    yield from _other_index(sheet)
    yield from _other_parameter(sheet)
    yield from _transposed(sheet)
    yield from _repeats(sheet)
    yield from _reshaped(sheet)
    yield from _but_one_part(sheet)


# Operators of code, by the function that they call.
_OPERATORS = {"add": ast.Add, "sub": ast.Sub, "mul": ast.Mult, "div": ast.Div, "pow": ast.Pow, "matmul": ast.MatMult}


def _by_place(sheet: FormulaView, nodes: list[int]) -> list[list[int]]:
    """Return the nodes of one function in one line, by the places in the line that call the function."""
    line, operator = sheet.line(nodes[0]), _OPERATORS.get(sheet.function(nodes[0]))
    try:
        tree = ast.parse("" if line is None else line.code)
    except SyntaxError:
        return [nodes]
    count = sum(isinstance(node, ast.BinOp) and operator is type(node.op) for node in ast.walk(tree))
    return [nodes[k::count] for k in range(count)] if count > 1 and len(nodes) % count == 0 else [nodes]


def _reshaped(sheet: FormulaView) -> Iterator[Edit]:
    """Yield edits that reshape where axes are exchanged: in one call, or in all that exchange the same axes, on one
    line or anywhere.
    """
    groups: dict[object, list[int]] = {}
    for k, node in enumerate(sheet.nodes):
        if node.operation == "transpose" and len(node.given) == 1 and not sheet.is_parameter(node.given[0]):
            for key in (str(node.how), (str(node.how), sheet.line(k)), k):
                groups.setdefault(key, []).append(k)
    for group in dict.fromkeys(map(tuple, groups.values())):
        # Before a reshape alone, the call is as good as left out.
        users = {sheet.nodes[user].operation for k in group for user in sheet.users(k)}
        if users != {"reshape"} and any(sheet.shape(k) != sheet.shape(sheet.nodes[k].given[0]) for k in group):
            names = first_few([sheet.where(k) for k in group], _FEW)
            text = f"a reshape stands for {names}: the shape is the same, and the axes are not exchanged"
            changes = {k: _as_reshape(sheet, k) for k in group}
            yield Edit("flatten_order", "a reshape for another order of axes", text, changes, 1, at=group[0])


def _but_one_part(sheet: FormulaView) -> Iterator[Edit]:
    """Yield edits that scale all but one part of a tensor that is put together: a temperature of the negatives only."""
    for k, node in enumerate(sheet.nodes):
        if node.operation not in ("mul", "div") or len(node.given) != 2 or not sheet.is_number(node.given[1]):
            continue
        joined = sheet.nodes[node.given[0]]
        if joined.operation != "cat" or not 1 < len(joined.given) <= _FEW:
            continue
        axis = int(joined.how.get("axis", 0))
        ends = np.cumsum([sheet.shape(part)[axis] for part in joined.given])
        for part, stop in zip(joined.given, ends):
            rows = slice(int(stop) - sheet.shape(part)[axis], int(stop))
            text = f"{sheet.where(k)} is applied to all but one part: {sheet.named(part)} is left as it is"
            yield Edit("scale", "a scale of one part", text, {k: _spared(k, node.given[0], rows, axis)}, 1, at=part)


def _spared(k: int, source: int, rows: slice, axis: int) -> Change:
    def change(get: Callable[[int], np.ndarray], own: Callable[[int], np.ndarray]) -> np.ndarray:
        values, parts = np.moveaxis(own(k).copy(), axis, 0), np.moveaxis(get(source), axis, 0)
        values[rows] = parts[rows]
        return np.moveaxis(values, 0, axis)

    return change


def _as_reshape(sheet: FormulaView, k: int) -> Change:
    source, shape = sheet.nodes[k].given[0], sheet.shape(k)
    return lambda get, own: get(source).reshape(shape)


_HUGE = 1e6
# The most turns of a loop whose operations are changed together.
_TURNS = 64


def _changed(sheet: FormulaView, k: int) -> list[Edit]:
    make = _BY_OPERATION.get(sheet.nodes[k].operation)
    return [] if make is None else [*make(sheet, k)]


def _in_all_turns(sheet: FormulaView, turns: list[int], edits: list[list[Edit]]) -> Iterator[Edit]:
    if len({tuple((edit.kind, edit.name) for edit in some) for some in edits}) > 1:
        return
    for together in zip(*edits):
        changes = {k: change for edit in together for k, change in edit.changes.items()}
        text = f"{together[0].text}, in all {len(turns)} turns of the loop"
        yield replace(together[0], text=text, changes=changes)


# Operations that pick or add up rows, by an index that is their second input.
_BY_INDEX = frozenset({"indexed", "rows_added", "elements_added", "elements_reduced"})


def _other_index(sheet: FormulaView) -> Iterator[Edit]:
    """Yield edits that pick or add up rows by another index of the formula: the source of an edge for its target."""
    users: dict[int, list[int]] = {}
    for k, node in enumerate(sheet.nodes):
        if node.operation in _BY_INDEX and node.how.get("axes", (0,)) == (0,) and not node.how.get("axis"):
            index = _index_of(sheet, node.given[1])
            if index is not None:
                users.setdefault(index, []).append(k)
    for index, places in users.items():
        # A softmax over groups adds up by an index, and reads the sums by the same one.
        sums = [k for k in places if sheet.nodes[k].operation != "indexed"]
        together = [[k, *(n for n in places if sheet.source(sheet.nodes[n].given[0]) == k)] for k in sums]
        together = [some for some in together if len(some) > 1]
        # It also takes the largest ones off before.
        together += [[k for some in together for k in some]] if len(together) > 1 else []
        for group in (*together, *([k] for k in places)):
            for other in users:
                if other == index or sheet.shape(other) != sheet.shape(index):
                    continue
                names = " and ".join(sheet.where(k) for k in group)
                text = f"rows are taken by the index of {sheet.where(users[other][0])} in {names}"
                changes = {k: _by_index(sheet, k, other) for k in group}
                yield Edit("indices_exchanged", "another index", text, changes, 0, at=group[0])


def _other_parameter(sheet: FormulaView) -> Iterator[Edit]:
    """Yield edits of a call that takes another parameter of its layer, of the same shape."""
    parameters = [k for k in range(len(sheet.nodes)) if sheet.is_parameter(k)]
    for node, partner in permutations(parameters[:_TURNS], 2):
        first, second = (sheet.nodes[k].name for k in (node, partner))
        if sheet.shape(node) != sheet.shape(partner) or first.rpartition("/")[0] != second.rpartition("/")[0]:
            continue
        put_in = partial(_replaced, node, partner)
        for k in sheet.users(node):
            if sheet.function(k):
                text = f"`{second}` takes the place of `{first}` ({sheet.where(k)})"
                yield Edit("other_parameter", "another parameter", text, {k: _with_operands(sheet, k, put_in)}, 0, at=k)


def _replaced(node: int, partner: int, get: Get, operand: int) -> np.ndarray:
    return get(partner if operand == node else operand)


def _turned(node: int, get: Get, operand: int) -> np.ndarray:
    return get(operand).T if operand == node else get(operand)


def _transposed(sheet: FormulaView) -> Iterator[Edit]:
    """Yield edits that transpose a square parameter where a loop reads it, and not where it is indexed."""
    for parameter in range(len(sheet.nodes)):
        shape = sheet.shape(parameter)
        if not sheet.is_parameter(parameter) or len(shape) != 2 or shape[0] != shape[1]:
            continue
        reads: dict[str, list[int]] = {}
        for k in sheet.users(parameter):
            if sheet.function(k):
                reads.setdefault(sheet.nodes[k].operation, []).append(k)
        for places in reads.values():
            turned = partial(_turned, parameter)
            changes = {k: _with_operands(sheet, k, turned) for k in places}
            more = f", and in {len(places) - 1} more calls" if len(places) > 1 else ""
            text = f"`{sheet.nodes[parameter].name}` is transposed ({sheet.where(places[0])}{more})"
            yield Edit("axes_order", "a transposed matrix", text, changes, 1, at=places[0])


def _with_operands(sheet: FormulaView, k: int, operand: Callable[[Get, int], np.ndarray]) -> Change:
    """Return a change that computes a node of other operands."""
    node = sheet.nodes[k]
    return lambda get, _: np.asarray(OPERATIONS[node.operation](*(operand(get, g) for g in node.given), **node.how))


def _index_of(sheet: FormulaView, k: int) -> int | None:
    """Return the index of rows that a node is a view of; `None` if the node is no such view."""
    views = "reshape", "expand", "cast", "getitem"
    while sheet.nodes[k].operation in views and len(sheet.shape(k)) > 1:
        k = sheet.nodes[k].given[0]
    return k if len(sheet.shape(k)) == 1 and not sheet.is_float(k) else None


def _by_index(sheet: FormulaView, k: int, other: int) -> Change:
    node = sheet.nodes[k]
    shape, operation = sheet.shape(node.given[1]), OPERATIONS[node.operation]

    def change(get: Callable[[int], np.ndarray], own: Callable[[int], np.ndarray]) -> np.ndarray:
        index = np.broadcast_to(get(other).reshape(-1, *[1] * (len(shape) - 1)), shape)
        first, *sources = (get(number) for n, number in enumerate(node.given) if n != 1)
        return np.asarray(operation(first, index, *sources, **node.how))

    return change


def _exchanged_indices(sheet: FormulaView) -> Iterator[Edit]:
    """Yield edits that exchange the two indices of a matrix: row and column, in all calls that read the matrix."""
    matrices: dict[int, list[int]] = {}
    for k, node in enumerate(sheet.nodes):
        if node.operation == "indexed" and len(node.given) == 3 and not node.how.get("parts"):
            matrices.setdefault(node.given[0], []).append(k)
    for matrix, reads in matrices.items():
        if len({*sheet.shape(matrix)[:2]}) > 1:
            continue
        changes = {k: _of_indices(matrix, sheet.nodes[k].given[:0:-1], sheet.nodes[k].how) for k in reads}
        text = f"the two indices of {sheet.named(matrix)} are exchanged, rows for columns ({sheet.where(reads[0])})"
        yield Edit("indices_exchanged", "exchanged indices", text, changes, 0, at=reads[0])


def _of_indices(matrix: int, indices: tuple[int, ...], how: Mapping[str, Any]) -> Change:
    return lambda get, own: np.asarray(OPERATIONS["indexed"](get(matrix), *map(get, indices), **how))


def _repeats(sheet: FormulaView) -> Iterator[Edit]:
    """Yield edits of the order in which parts are repeated: all parts again and again, for each part several times."""
    groups: dict[object, list[int]] = {}
    for k, node in enumerate(sheet.nodes):
        if node.operation == "repeat" and node.how["axis"] is not None and node.how["count"] > 1:
            groups.setdefault((node.how["count"], node.how["axis"], sheet.shape(k)), []).append(k)
    for reads in groups.values():
        changes: dict[int, Change] = {}
        for k in reads:
            count, axis = sheet.nodes[k].how["count"], sheet.nodes[k].how["axis"]
            changes[k] = lambda get, own, x=sheet.nodes[k].given[0], n=count, axis=axis: np.concatenate(  # type: ignore[misc]
                [get(x)] * n, axis
            )
        text = (
            f"{sheet.where(reads[0])} repeats all parts as a whole (0, 1, 0, 1), for the reference's each (0, 0, 1, 1)"
        )
        yield Edit("repeat_order", "another order of repeats", text, changes, 0, at=reads[0])


def other_numbers(sheet: FormulaView, candidate: FormulaView) -> Iterator[Edit]:
    """Yield edits that put a tensor of numbers that the candidate's code makes in the place of the reference's."""
    others = [k for k in _made_of_numbers(candidate) if not sheet.equal(candidate.formula.values[k])]
    for k in _made_of_numbers(sheet):
        for other in others:
            if candidate.shape(other) == sheet.shape(k) and not candidate.equal(sheet.formula.values[k]):
                yield from _of_numbers(sheet, k, candidate, other, 1)
    end, other = sheet.formula.end, candidate.formula.end
    if sheet.nodes[end].operation and end in _numbers_alone(sheet):
        yield from _of_numbers(sheet, end, candidate, other, 5)


def _of_numbers(sheet: FormulaView, k: int, candidate: FormulaView, other: int, rank: int) -> Iterator[Edit]:
    """Yield the edit that puts the candidate's numbers in the place of a node's, if as many are there and differ."""
    values, constants = sheet.formula.values[k], candidate.formula.values[other]
    if values.size != constants.size:
        return
    # Numbers that stand for infinity hide what is added to them, whatever their size.
    constants = constants.reshape(values.shape)
    differ = ~np.isclose(np.clip(constants, -_HUGE, _HUGE), np.clip(values, -_HUGE, _HUGE), rtol=1e-6)
    if differ.any():
        place = np.flatnonzero(differ)[0]
        count, size = int(differ.sum()), values.size
        nodes = Both((sheet, sheet.source(k)), (candidate, candidate.source(other)))
        makers = nodes.map(lambda side: _maker(*side))
        text = (
            f"{sheet.named(nodes.reference[1])} has other numbers: {count} of {size} differ, the first is "
            f"{constants.flat[place]:.6g} for the reference's {values.flat[place]:.6g}"
        )
        if len({*makers} - {""}) > 1:
            text = (
                f"the candidate calls {candidate.where(other)}, where the reference calls {sheet.where(k)}: "
                f"{count} of {size} numbers differ"
            )
        at, at_other = (node for _, node in nodes)
        yield Edit("other_numbers", "other numbers", text, {k: put(constants)}, rank, at=at, other=at_other)


def _maker(sheet: FormulaView, k: int) -> str:
    """Return the function that computes a node, or makes it of numbers; empty for data."""
    call = sheet.producer(k) if sheet.nodes[k].name == MADE else None
    return sheet.function(k) if call is None else call.function


def _made_of_numbers(sheet: FormulaView) -> list[int]:
    """Return the nodes with tensors that depend on numbers of the code alone, and go into what depends on others."""
    nodes = _numbers_alone(sheet)
    return [
        k
        for k in sorted(nodes)
        if sheet.formula.values[k].size > 1 and sheet.is_float(k) and not nodes.issuperset(sheet.users(k))
    ]


def _numbers_alone(sheet: FormulaView) -> set[int]:
    """Return the nodes that depend on numbers of the code alone."""
    constants: set[int] = set()
    for k, node in enumerate(sheet.nodes):
        call = sheet.producer(k)
        if node.operation:
            is_made = constants.issuperset(node.given)
        else:
            # Zeros and one other number are a mask, which may be drawn.
            is_written = call is not None and not call.inputs and not call.parameters and bool(call.function)
            count = len(np.unique(sheet.formula.values[k]))
            is_made = sheet.is_number(k) or (is_written and count > 2) or (node.name == MADE and count == 1)
        if is_made:
            constants.add(k)
    return constants


def _of(sheet: FormulaView, k: int, operation: str, place: int = 0, **how: Any) -> Change:
    """Return a change that computes another operation on one of a node's operands."""
    operand = sheet.nodes[k].given[place]
    return lambda get, own: np.asarray(OPERATIONS[operation](get(operand), **how))


def _act(sheet: FormulaView, k: int) -> Iterator[Edit]:
    function, number = sheet.nodes[k].how["function"], sheet.nodes[k].how.get("number")
    if number is not None and (function not in FUNCTIONS or number != 1.0):
        function = f"{function} of {ACTIVATION_NUMBERS[function]} {number:g}"
    where = sheet.where(k)
    text = f"the candidate has no activation, the reference {function} ({where})"
    change = {k: _of(sheet, k, "act", function=_NONE)}
    yield Edit("activation_missing", "no activation", text, change, 0, at=k, values=Both(function, ""))
    for name in FUNCTIONS:
        if name != function:
            text = f"the candidate uses {name} for the reference's {function} ({where})"
            change = {k: _of(sheet, k, "act", function=name)}
            yield Edit("activation", "another activation", text, change, 0, at=k, values=Both(function, name))
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
    if own_axis == 1 and ndim > 2:
        source, (rows, count, *places) = node.given[0], sheet.shape(k)
        scrambled: Change = lambda get, own: OPERATIONS[node.operation](  # noqa: E731
            np.moveaxis(get(source).reshape(rows, *places, count), -1, 1), **node.how
        )
        text = f"the channels are not moved last before a reshape to rows of {count}, of which {where} is taken"
        yield Edit("flatten_order", "another order of flattening", text, {k: scrambled}, 1, at=k)
    text = f"the candidate uses a sigmoid for the reference's softmax ({where})"
    change, names = {k: _of(sheet, k, "act", function="sigmoid")}, Both("softmax", "sigmoid")
    yield Edit("activation", "another activation", text, change, 0, at=k, values=names)


def _reduced(sheet: FormulaView, k: int) -> Iterator[Edit]:
    node, where = sheet.nodes[k], sheet.where(k)
    by, axis = node.how["by"], node.how.get("axis")
    for reduction in ("mean", "sum", "max"):
        if reduction != by and (by in ("mean", "sum", "max", "min") or (by, reduction) == ("logsumexp", "max")):
            text = f"the {reduction} for the reference's {by} ({where})"
            change = {k: given(sheet, k, by=reduction)}
            names = Both(by, reduction)
            yield Edit("reduction_form", "another reduction", text, change, 0, at=k, values=names)
    if by in ("var", "std"):
        ddof = 1 - node.how.get("ddof", 0)
        form = "unbiased (over n - 1)" if ddof else "biased (over n)"
        yield Edit(
            "variance", "variance", f"the variance of {where} is {form}", {k: given(sheet, k, ddof=ddof)}, 0, at=k
        )
    ndim = len(sheet.shape(node.given[0]))
    own_axis = axis % ndim if isinstance(axis, int) else None
    for other_axis in (*range(ndim), None) if own_axis is not None and ndim > 1 else ():
        if other_axis != own_axis:
            text = f"the {by} of {where} is over axis {other_axis} for the reference's {own_axis}"
            if other_axis is None:
                text = f"the {by} of {where} is over all axes for the reference's {own_axis}"
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
            if not is_mask(sheet.formula.values[product.given[1 - place]]):
                text = f"the {what} counts all alike, where the reference's {sheet.where(k)} weighs them"
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
            if len(key) == place + 1 and sheet.is_float(k):
                change = _of(sheet, k, "reduced", by=by, axis=place)
                values: Both[Any] = Both((place, index), (place, by))
                yield Edit("reduction_form", "another reduction", text, {k: change}, 0, at=k, values=values)


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
        powers = {
            1.0: f"the root of the variance is missing in {where}",
            2.0: f"the variance is squared in {where}, in the place of its root",
            -0.5: f"{where} is multiplied by the root of the variance, and not divided by it",
        }
        for power, text in powers.items():
            yield Edit("norm_root", "no root of the variance", text, {k: given(sheet, k, power=power)}, 1, at=k)
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


def _mask_product(sheet: FormulaView, k: int) -> Iterator[Edit]:
    """Yield edits that invert a mask in one product, as others may take the mask, too."""
    for mask, operand in zip(sheet.nodes[k].given, sheet.nodes[k].given[::-1]):
        if is_mask(sheet.formula.values[mask]):
            change: Change = lambda get, own, m=mask, o=operand: get(o) * (1 - get(m))  # type: ignore[misc]  # noqa: E731
            text = f"the mask is inverted: what the reference hides is kept, what it keeps is hidden ({sheet.where(k)})"
            yield Edit("mask_inverted", "an inverted mask", text, {k: change}, 1, at=k)


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
    alike = len(sheet.shape(first)) == len(sheet.shape(second))
    if alike and not sheet.is_number(first) and not sheet.is_number(second):
        text = f"the operands of {sheet.where(k)} are exchanged"
        yield Edit(
            "operands", "exchanged operands", text, {k: lambda get, own: operation(get(second), get(first))}, 1, at=k
        )
    sign = {"add": "sub", "sub": "add"}.get(sheet.nodes[k].operation)
    if sign and not sheet.is_number(second):
        opposite = OPERATIONS[sign]
        text = f"the sign of {sheet.named(second)} is flipped ({sheet.where(k)})"
        if all(sheet.of_operations(k, frozenset({name})) for name in ("sin", "cos")) or sheet.turns(k):
            text += ": rotary embeddings turn the other way"
        yield Edit("sign", "a sign", text, {k: lambda get, own: opposite(get(first), get(second))}, 2, at=k)


#: Comparisons: with exchanged operands, and the opposite.
COMPARED = {"lt": ("gt", "ge"), "gt": ("lt", "le"), "le": ("ge", "gt"), "ge": ("le", "lt")}


def _comparison(sheet: FormulaView, k: int) -> Iterator[Edit]:
    first, second = sheet.nodes[k].given
    for name in COMPARED[sheet.nodes[k].operation]:
        text = f"{name}() stands in the place of {sheet.where(k)}"
        change = partial(_compared, OPERATIONS[name], first, second)
        yield Edit("comparison", "a comparison", text, {k: change}, 1, at=k)


def _compared(compare: Callable[..., Any], first: int, second: int, get: Get, own: Any) -> np.ndarray:
    return np.asarray(compare(get(first), get(second)))


def _product(sheet: FormulaView, k: int) -> Iterator[Edit]:
    if sheet.nodes[k].operation == "div":
        yield from _divided(sheet, k)
        yield from _swapped_operands(sheet, k)


_BY_OPERATION: dict[str, Callable[[FormulaView, int], Iterator[Edit]]] = {
    **dict.fromkeys(COMPARED, _comparison),
    **BY_OPERATION,
    "act": _act,
    "softmax": _softmax,
    "log_softmax": _softmax,
    "reduced": _reduced,
    "div": _product,
    "mul": _mask_product,
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
