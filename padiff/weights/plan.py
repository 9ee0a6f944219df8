"""What will be written where, given which parameters answer to each other. Nothing is changed here."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from padiff import equivalents
from padiff.align import Alignment, ParameterPair, Part
from padiff.align.units import homes_of
from padiff.layer_map import LayerMap
from padiff.records import Layer, Parameter
from padiff.weights.live import LiveModel
from padiff.weights.special_init import special_init


class NoPlanError(Exception):
    """The weights can't be carried over; the text says what, the attributes where."""

    def __init__(self, what: str, base: str | None = None, raw: str | None = None) -> None:
        super().__init__(what)
        self.base, self.raw = base, raw


@dataclass
class Plan:
    """Tensors of the raw model with their new values, and the user's rules to call."""

    writes: list[tuple[Any, np.ndarray]] = field(default_factory=list)
    calls: list[Callable[[], None]] = field(default_factory=list)


@dataclass
class _Target:
    """A parameter of the raw model that is being put together."""

    tensor: Any
    values: np.ndarray
    filled: np.ndarray


def planned(base: LiveModel, raw: LiveModel, alignment: Alignment, layer_map: LayerMap) -> Plan:
    """Plan the transfer of all weights.

    Args:
        layer_map: what it says answers to nothing stays as it is.

    Raises:
        NoPlanError: a parameter has no partner, or one of another shape, or would need two values at once.
    """
    return _Planning(base, raw, alignment, layer_map).result()


class _Planning:
    def __init__(self, base: LiveModel, raw: LiveModel, alignment: Alignment, layer_map: LayerMap) -> None:
        self._sides = (base, raw)
        self._alignment = alignment
        self._plan = Plan()
        self._left_out = (
            {path for ours, theirs in layer_map.named() if not theirs for path in ours},
            {path for ours, theirs in layer_map.named() if not ours for path in theirs},
        )
        self._ruled: tuple[set[str], set[str]] = (set(), set())
        self._targets: dict[int, _Target] = {}
        self._used: set[tuple[str, str]] = set()
        self._homes = homes_of(base.info.layers)

    def result(self) -> Plan:
        self._find_rules()
        for pair in self._alignment.parameters:
            if not self._is_left_out(pair):
                self._carry(pair)
        self._fill_zeros()
        self._check_nothing_left()
        self._plan.writes = [(target.tensor, target.values) for target in self._targets.values()]
        return self._plan

    def _find_rules(self) -> None:
        base, raw = self._sides
        for pair in self._alignment.pairs:
            if pair.reference.path in self._left_out[0] or pair.candidate.path in self._left_out[1]:
                continue
            layers = base.layer(pair.reference.path), raw.layer(pair.candidate.path)
            rule = special_init(base.framework.name, layers[0], raw.framework.name, layers[1])
            if rule is not None:
                self._plan.calls.append(lambda rule=rule, layers=layers: rule(*layers))  # type: ignore[misc]
                self._ruled[0].update(layer.path for layer in base.below(pair.reference.path))
                self._ruled[1].update(layer.path for layer in raw.below(pair.candidate.path))

    def _is_left_out(self, pair: ParameterPair) -> bool:
        return any(
            part.layer in self._left_out[k] or part.layer in self._ruled[k]
            for k, parts in enumerate((pair.reference, pair.candidate))
            for part in parts
        )

    def _carry(self, pair: ParameterPair) -> None:
        base = self._sides[0]
        values = [part.take(base.value(part.layer, part.slot)) for part in pair.reference]
        self._used.update(self._homes.get((part.layer, part.slot), (part.layer, part.slot)) for part in pair.reference)
        # What is added up on the one side is, on the other, one that has it all and others that are zeros.
        value = values[0] if len(values) == 1 else np.sum(values, axis=0, dtype=values[0].dtype)
        for number, part in enumerate(pair.candidate):
            self._put(pair.reference[0], part, value if number == 0 else np.zeros_like(value))

    def _put(self, source: Part, part: Part, value: np.ndarray) -> None:
        target = self._target(part)
        if not fits(value.shape, part.size):
            stored = [list(p.shape) for p in (source, part)]
            raise NoPlanError(
                f"shapes of `{source.slot}` and `{part.slot}` are not the same: {stored[0]} against {stored[1]}",
                source.layer,
                part.layer,
            )
        value = value.reshape(part.size)
        known = part.take(target.filled)
        if known.any():
            if np.array_equal(part.take(target.values)[known], value[known]):
                return
            raise NoPlanError(
                f"the raw model ties `{part.layer}/{part.slot}` to another parameter, the base model has two "
                "different ones",
                source.layer,
                part.layer,
            )
        part.put(target.values, value)
        part.put(target.filled, np.ones(value.shape, bool))

    def _target(self, part: Part) -> _Target:
        tensor = self._sides[1].tensor(part.layer, part.slot)
        if id(tensor) not in self._targets:
            values = self._sides[1].value(part.layer, part.slot)
            self._targets[id(tensor)] = _Target(tensor, values.copy(), np.zeros(values.shape, bool))
        return self._targets[id(tensor)]

    def _fill_zeros(self) -> None:
        """Frozen zeros say that a recurrent cell has no bias: they stay zeros, and the base's have to be zeros."""
        base, raw = self._sides
        for layer in base.info.layers:
            for p in layer.parameters:
                if equivalents.stands_for_none(layer, p) and not base.value(layer.path, p.slot).any():
                    self._used.add((layer.path, p.slot))
        for layer in raw.info.layers:
            for p in layer.parameters:
                if equivalents.stands_for_none(layer, p):
                    target = self._target(Part(layer.path, p.slot, p.shape))
                    if not target.filled.any():
                        target.values[...] = 0
                        target.filled[...] = True

    def _check_nothing_left(self) -> None:
        """Weights are never skipped silently: every parameter of either side has to be covered."""
        left: tuple[list[tuple[Layer, Parameter]], list[tuple[Layer, Parameter]]] = ([], [])
        for k, model in enumerate(self._sides):
            for layer in model.info.layers:
                if layer.path in self._left_out[k] or layer.path in self._ruled[k]:
                    continue
                for p in layer.parameters:
                    if p.role == "parameter" and not p.tied_to and not self._covered(k, model, layer.path, p.slot):
                        left[k].append((layer, p))
        if not any(left):
            return
        partner = {p.reference.path: p.candidate.path for p in self._alignment.pairs}
        back = {theirs: ours for ours, theirs in partner.items()}
        places = [rest[0][0].path if rest else None for rest in left]
        if left[0] and not left[1] and places[0] in partner:
            what = f"the raw layer has no parameter for {_told(left[0], False)}"
            raise NoPlanError(what, places[0], partner[places[0]])
        if left[1] and not left[0] and places[1] in back:
            raise NoPlanError(
                f"the base layer has nothing for the raw layer's {_told(left[1], False)}", back[places[1]], places[1]
            )
        sides = []
        for k, (name, rest) in enumerate(zip(("base", "raw"), left)):
            whole = self._alignment.surplus(k)
            where = f"{', '.join(whole[:4])}{' and more' if len(whole) > 4 else ''}: " if whole else ""
            if rest:
                sides.append(f"the {name} model's {where}{_told(rest, True)}")
        raise NoPlanError(f"no partner for {' and for '.join(sides)}", places[0], places[1])

    def _covered(self, side: int, model: LiveModel, path: str, slot: str) -> bool:
        if side == 0:
            return (path, slot) in self._used
        target = self._targets.get(id(model.tensor(path, slot)))
        return target is not None and bool(target.filled.all())


def fits(ours: tuple[int, ...], theirs: tuple[int, ...]) -> bool:
    """Whether one shape's values, row by row, are another's."""
    if ours == theirs or equivalents.same_values(ours, theirs):
        return True
    return bool(ours) and bool(theirs) and ours[0] == theirs[0] and math.prod(ours) == math.prod(theirs)


def _told(left: Collection[tuple[Layer, Parameter]], where: bool) -> str:
    shown = [f"{f'{layer.path}/' if where else ''}{p.slot}" for layer, p in left]
    texts = [
        f"`{name}` {list(p.shape)}" if not where else f"{name} {list(p.shape)}" for name, (_, p) in zip(shown, left)
    ]
    return ", ".join(texts[:6]) + (f" and {len(texts) - 6} more" if len(texts) > 6 else "")
