"""Edits of order: swapped parts, rotary embeddings of another form, shifted, flipped or transposed tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, permutations

import numpy as np

from padiff.compare.diagnose.computing.edit import Edit, FormulaView
from padiff.compare.diagnose.computing.formula import Change
from padiff.compare.diagnose.computing.operations import cast

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
    for name, make in (("interleaved (each with its neighbour), for the reference's halves", _neighbours),
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
    text = "the rotary embeddings are interleaved (each with its neighbour), for the reference's halves"
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
