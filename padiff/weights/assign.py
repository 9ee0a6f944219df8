"""``assign_weight``: all of one model's weights into another, or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from padiff import equivalents
from padiff.align import Alignment, LayerPair, align
from padiff.errors import UsageError
from padiff.layer_map import LayerMap
from padiff.records import ROOT, Layer, inner_path
from padiff.tree_text import tree_text
from padiff.weights.live import LiveModel, frameworks_name
from padiff.weights.rules import NoRuleError, Own, Tensors, attention, same_slots
from padiff.weights.special_init import ruled, special_init


class AssignError(UsageError):
    """The weights of one model can't be carried to the other; the text shows both trees and the place."""


@dataclass
class _Plan:
    """What will be written where, and the user's rules to call."""

    writes: list[tuple[Any, np.ndarray]]
    calls: list[Callable[[], None]]


def assign_weight(*args: Any, **kwargs: Any) -> bool:
    """Copy the weights of one model into another: ``assign_weight(base_model, raw_model)``.

    The first generation's form is ``assign_weight(layer, module, layer_map=LayerMap())``: a paddle layer and a torch
    module, and torch's weights go to paddle. Parameters and buffers are carried over, dtype and device stay, tied
    parameters are written once, no memory is shared. Either all of it happens or nothing.

    Returns:
        True; or False, after printing where it failed in both trees, why, and what to try.

    Raises:
        UsageError: a model is of neither framework, or the arguments are of neither form.
    """
    base, raw, layer_map = _arguments(args, kwargs)
    try:
        carry_over(base, raw, layer_map)
    except AssignError as error:
        print(f"[AutoDiff] Assign weight Failed !!!\n\n{error}")
        return False
    print("[AutoDiff] Assign weight success !!!")
    return True


def carry_over(base_model: Any, raw_model: Any, layer_map: Any = None) -> Alignment:
    """As `assign_weight`, without printing; returns which layers answered to which.

    Raises:
        AssignError: the weights can't be carried over; nothing was changed.
    """
    base, raw = LiveModel.of(base_model), LiveModel.of(raw_model)
    pairs = LayerMap.resolve(layer_map, base.nodes, raw.nodes)
    rules = ruled(base.framework.name, raw.framework.name)
    alignment = align(base.info, raw.info, pairs, whole=rules)
    plan = _planned(base, raw, alignment, pairs)
    before = [(tensor, raw.framework.to_numpy(tensor)) for _, tensor in raw.tensors()]
    try:
        for tensor, array in plan.writes:
            raw.framework.write(tensor, array)
        for call in plan.calls:
            call()
    except BaseException as error:
        for tensor, array in before:
            raw.framework.write(tensor, array)
        if isinstance(error, Exception):
            raise AssignError(f"a rule failed, and the raw model is as it was: {error!r}") from error
        raise
    return alignment


def _planned(base: LiveModel, raw: LiveModel, alignment: Alignment, pairs: LayerMap) -> _Plan:
    plan = _Plan([], [])
    # What the map says answers to nothing stays as it is.
    done = {ours for ours, theirs in pairs if theirs is None}, {theirs for ours, theirs in pairs if ours is None}
    written: dict[int, np.ndarray] = {}
    for pair in alignment.pairs:
        if pair.reference.path in done[0] or pair.candidate.path in done[1]:
            continue
        rule = special_init(
            base.framework.name, base.layer(pair.reference.path), raw.framework.name, raw.layer(pair.candidate.path)
        )
        if rule is not None:
            layers = base.layer(pair.reference.path), raw.layer(pair.candidate.path)
            plan.calls.append(lambda rule=rule, layers=layers: rule(*layers))  # type: ignore[misc]
            _note_all(pair, base, raw, done)
            continue
        try:
            values = _values(pair, base, raw, done)
        except NoRuleError as error:
            raise AssignError(_explain(str(error), pair.reference, pair.candidate, base, raw)) from None
        for (path, slot), value in values.items():
            tensor = raw.tensor(path, slot)
            if id(tensor) not in written:
                written[id(tensor)] = value
                plan.writes.append((tensor, value))
            elif not np.array_equal(written[id(tensor)], value):
                what = f"the raw model ties `{path}/{slot}` to another parameter, the base model has two different ones"
                raise AssignError(_explain(what, pair.reference, pair.candidate, base, raw))
    _check_nothing_left(base, raw, done)
    return plan


def _values(
    pair: LayerPair, base: LiveModel, raw: LiveModel, done: tuple[set[str], set[str]]
) -> dict[tuple[str, str], np.ndarray]:
    """What to write for a pair, by the raw model's path and slot; notes the layers that it covers."""
    ours, theirs = pair.reference, pair.candidate
    if equivalents.kind(ours) in equivalents.COMPOSITE and _inside(base, ours) != _inside(raw, theirs):
        tensors: Tensors = {key: base.value(_join(ours.path, key[0]), key[1]) for key in _inside(base, ours)}
        layouts = {"base": _layout(base), "raw": _layout(raw)}
        found = attention(tensors, layouts, dict.fromkeys(_inside(raw, theirs), ""))
        _note_all(pair, base, raw, done)
        return {(_join(theirs.path, path), slot): value for (path, slot), value in found.items()}
    done[0].add(ours.path)
    done[1].add(theirs.path)
    own = Own(ours, {p.slot: base.value(ours.path, p.slot) for p in ours.parameters})
    return {(theirs.path, slot): value for slot, value in same_slots(own, theirs).items()}


def _inside(model: LiveModel, layer: Layer) -> list[tuple[str, str]]:
    return [(inner_path(x.path, layer.path), p.slot) for x in model.below(layer.path) for p in x.parameters]


def _join(path: str, inner: str) -> str:
    if not inner:
        return path
    return inner if path == ROOT else f"{path}.{inner}"


def _layout(model: LiveModel) -> str:
    return "in_out" if model.framework.name == "paddle" else "out_in"


def _note_all(pair: LayerPair, base: LiveModel, raw: LiveModel, done: tuple[set[str], set[str]]) -> None:
    done[0].update(layer.path for layer in base.below(pair.reference.path))
    done[1].update(layer.path for layer in raw.below(pair.candidate.path))


def _check_nothing_left(base: LiveModel, raw: LiveModel, done: tuple[set[str], set[str]]) -> None:
    """Weights are never skipped silently: every parameter of either side has to be covered."""
    left = [_uncovered(model.info.layers, covered) for model, covered in ((base, done[0]), (raw, done[1]))]
    if any(left):
        sides = [
            f"the {name} model's {', '.join(f'{x.path}/{p.slot} {list(p.shape)}' for x, p in rest[:6])}"
            for name, rest in zip(("base", "raw"), left)
            if rest
        ]
        places = [rest[0][0] if rest else None for rest in left]
        raise AssignError(_explain(f"no partner for {' and for '.join(sides)}", places[0], places[1], base, raw))


def _uncovered(layers: Sequence[Layer], covered: set[str]) -> list[tuple[Layer, Any]]:
    return [
        (layer, p)
        for layer in layers
        if layer.path not in covered
        for p in layer.parameters
        if p.role == "parameter" and not p.tied_to
    ]


def _explain(what: str, ours: Layer | None, theirs: Layer | None, base: LiveModel, raw: LiveModel) -> str:
    places = [
        f"    {name} ({model.framework.name}): `{layer.type}` at `{layer.path}`"
        for name, model, layer in (("base", base, ours), ("raw ", raw, theirs))
        if layer is not None
    ]
    trees = [
        f"{name} model ({model.framework.name})\n=========================\n"
        + tree_text(model.info.layers, layer.path if layer is not None else None)
        for name, model, layer in (("Base", base, ours), ("Raw", raw, theirs))
    ]
    hints = [
        "Hint:",
        "    1. define layers and parameters in the same order in both models,",
        "    2. or say which layers answer to each other (set_layer_map, LayerMap),",
        "    3. or register how such a layer is carried over (add_special_init).",
    ]
    return "\n".join(["Error occurred between:", *places, "", f"{what[:1].upper()}{what[1:]}.", "", *trees, "", *hints])


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
    names: tuple[str, ...] = ("base_model", "raw_model")
    old = bool(kwargs.keys() & {"layer", "module", "layer_map"}) or len(args) > 2
    if old:
        names = ("layer", "module", "layer_map")
    unknown = [name for name in kwargs if name not in names]
    given = dict(zip(names, args))
    if unknown or len(args) > len(names) or given.keys() & kwargs.keys() or not {*names[:2]} <= {*given, *kwargs}:
        raise UsageError(
            "assign_weight takes (base_model, raw_model), or (layer, module, layer_map) as in the first generation; "
            f"got {len(args)} positional arguments" + (f" and {', '.join(kwargs)}" if kwargs else "")
        )
    given |= kwargs
    if not old:
        return given["base_model"], given["raw_model"], None
    # The first generation copies from the torch module to the paddle layer, whichever stands first.
    turned = [frameworks_name(given[name]) for name in names[:2]] == ["torch", "paddle"]
    base, raw = ("layer", "module") if turned else ("module", "layer")
    return given[base], given[raw], given.get("layer_map")
