"""Built-in rules: how the tensors of one layer become those of a layer that answers to it.

Everything is numpy here. A rule gets what the base layer and all below it own, by relative path and slot, and the
shapes that the raw layer wants, likewise; it gives what to write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from padiff import equivalents
from padiff.records import Layer, Parameter


class NoRuleError(Exception):
    """Two layers that answer to each other own different things; the text says what."""


@dataclass(frozen=True)
class Own:
    """What one layer owns itself, ready to be carried over."""

    layer: Layer
    values: Mapping[str, np.ndarray]


def same_slots(base: Own, raw: Layer) -> dict[str, np.ndarray]:
    """Carry over slot by slot, under common names; a linear layer's matrix is transposed where the layouts differ.

    Raises:
        NoRuleError: a parameter has no counterpart, or one of another shape.
    """
    wanted = {equivalents.slot(p.slot): p for p in raw.parameters}
    written: dict[str, np.ndarray] = {}
    for parameter in base.layer.parameters:
        name = equivalents.slot(parameter.slot)
        target = wanted.pop(name, None)
        if target is None:
            if parameter.slot in equivalents.ONE_SIDED or parameter.role == "buffer":
                continue
            if equivalents.stands_for_none(base.layer, parameter) and not base.values[parameter.slot].any():
                continue
            raise NoRuleError(f"the raw layer has no parameter for `{parameter.slot}` {list(parameter.shape)}")
        value = base.values[parameter.slot]
        if parameter.layout and target.layout and parameter.layout != target.layout:
            value = value.T
        written[target.slot] = _fitted(value, parameter, target)
    zeros = [p for p in wanted.values() if equivalents.stands_for_none(raw, p)]
    written |= {p.slot: np.zeros(p.shape) for p in zeros}
    missing = [p for p in wanted.values() if p.role == "parameter" and p not in zeros]
    if missing:
        slots = ", ".join(f"`{p.slot}` {list(p.shape)}" for p in missing)
        raise NoRuleError(f"the base layer has nothing for the raw layer's {slots}")
    return written


def _fitted(value: np.ndarray, parameter: Parameter, target: Parameter) -> np.ndarray:
    if value.shape == target.shape:
        return value
    if equivalents.same_values(value.shape, target.shape):
        return value.reshape(target.shape)
    raise NoRuleError(
        f"shapes of `{parameter.slot}` and `{target.slot}` are not the same: {list(value.shape)} against "
        f"{list(target.shape)}"
    )


_PARTS = {"q": "the query", "k": "the key", "v": "the value", "o": "the output"}

#: Tensors by relative path and slot: ``("", "in_proj_weight")``, ``("out_proj", "weight")``.
Tensors = dict[tuple[str, str], np.ndarray]


def attention(base: Tensors, layouts: Mapping[str, str], raw: Mapping[tuple[str, str], str]) -> Tensors:
    """Multi-head attention, packed (torch) or as separate projections (paddle), in either direction.

    torch packs the query's, key's and value's matrices, each ``(embed, in)``, below each other into ``in_proj_weight``
    ``(3 embed, embed)`` and their biases into ``in_proj_bias``; where key or value have another width it keeps
    ``q_proj_weight``, ``k_proj_weight``, ``v_proj_weight``. paddle has layers ``q_proj``, ``k_proj``, ``v_proj`` with
    ``(in, embed)``.

    Args:
        base: what the base layer and all below it own.
        layouts: layout of the base's and the raw's linear matrices: ``{"base": "out_in", "raw": "in_out"}``.
        raw: what the raw layer wants (values are not looked at).

    Raises:
        NoRuleError: one side is of neither form, or wants what the other has not (``bias_k``, say).
    """
    parts = _apart(base, layouts["base"])
    wanted: Tensors = {}
    for key in raw:
        path, slot = key
        if (path, slot) in (("", "in_proj_weight"), ("", "in_proj_bias")):
            kind = slot.removeprefix("in_proj_")
            pieces = [parts.get((name, kind)) for name in "qkv"]
            if any(piece is None for piece in pieces):
                raise NoRuleError(f"the base layer has no {kind} for all of query, key and value")
            wanted[key] = np.concatenate([piece for piece in pieces if piece is not None])
        elif path == "" and slot.endswith("_proj_weight"):
            wanted[key] = _part(parts, slot[0], "weight")
        elif path in ("q_proj", "k_proj", "v_proj", "out_proj"):
            value = _part(parts, path[0], slot)
            wanted[key] = value.T if slot == "weight" and layouts["raw"] == "in_out" else value
        else:
            raise NoRuleError(f"the base layer has nothing for the raw layer's `{slot}`")
    spare = sorted(f"{name}'s {kind}" for name, kind in parts.keys() - _names(raw))
    if spare:
        raise NoRuleError(f"the raw layer has no place for {', '.join(spare)}")
    return wanted


def _apart(base: Tensors, layout: str) -> dict[tuple[str, str], np.ndarray]:
    """Query, key, value and output, each with weight ``(out, in)`` and bias."""
    parts: dict[tuple[str, str], np.ndarray] = {}
    for (path, slot), value in base.items():
        if path == "" and slot in ("in_proj_weight", "in_proj_bias"):
            for name, piece in zip("qkv", np.split(value, 3)):
                parts[name, slot.removeprefix("in_proj_")] = piece
        elif path == "" and slot.endswith("_proj_weight"):
            parts[slot[0], "weight"] = value
        elif path in ("q_proj", "k_proj", "v_proj", "out_proj"):
            parts[path[0], slot] = value.T if slot == "weight" and layout == "in_out" else value
        else:
            raise NoRuleError(f"no rule for the base layer's `{slot}`")
    return parts


def _part(parts: Mapping[tuple[str, str], np.ndarray], name: str, kind: str) -> np.ndarray:
    if (name, kind) not in parts:
        raise NoRuleError(f"the base layer has no {kind} for {_PARTS[name]}")
    return parts[name, kind]


def _names(raw: Mapping[tuple[str, str], str]) -> set[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    for path, slot in raw:
        if slot in ("in_proj_weight", "in_proj_bias"):
            found |= {(name, slot.removeprefix("in_proj_")) for name in "qkv"}
        elif path == "" and slot.endswith("_proj_weight"):
            found.add((slot[0], "weight"))
        else:
            found.add((path[:1], slot))
    return found
