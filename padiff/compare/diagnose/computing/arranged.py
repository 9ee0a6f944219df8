"""Edits of the order of things: parts that are exchanged, rotary embeddings of another form, tensors turned round."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, permutations

import numpy as np

from padiff.compare.diagnose.computing.edit import Edit, Sheet
from padiff.compare.diagnose.computing.formula import Change
from padiff.compare.diagnose.computing.operations import cast

_FEW = 4


def exchanged(sheet: Sheet) -> Iterator[Edit]:
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


def rotary(sheet: Sheet) -> Iterator[Edit]:
    """Rotary embeddings of neighbours in place of halves, or turned the other way; of all at once."""
    halves = [(k, x) for k in range(len(sheet.nodes)) if (x := _half_rotated(sheet, k)) is not None]
    if not halves:
        return
    for name, make in (("interleaved (each with its neighbour), for the reference's halves", _neighbours),
                       ("turned the other way (the sign of the sine)", _other_way)):  # fmt: skip
        for some in (halves, *[[one] for one in halves]):
            changes: dict[int, Change] = {}
            for k, x in some:
                changes[k] = lambda get, own, k=k, x=x, make=make: make(get(x), own(k))  # type: ignore[misc]
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


def _half_rotated(sheet: Sheet, k: int) -> int | None:
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


def as_a_whole(sheet: Sheet, k: int) -> Iterator[Edit]:
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
