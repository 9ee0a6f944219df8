"""What will be written where, given which parameters answer to each other. Nothing is changed here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from padiff.align import Alignment, ParameterPair, Slice
from padiff.align.matching.parameter_units import tie_targets
from padiff.model import equivalents
from padiff.model.layer_map import LayerMap
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
    """Tensors of the raw model with their new values, and the user's rules to call.

    Attributes:
        writes: the tensors and their values.
        calls: the user's rules.
        parameters, buffers: how many of the tensors are parameters, and buffers.
        not_carried: parameters of the base that have no place in the raw model, as ``layer/slot [shape]``.
        left_as_is: parameters of the raw model that nothing of the base is for, likewise.
        left_wholes: pairs of layers that are left as they are, with all that they hold.
    """

    writes: list[tuple[Any, np.ndarray]] = field(default_factory=list)
    calls: list[Callable[[], None]] = field(default_factory=list)
    parameters: int = 0
    buffers: int = 0
    not_carried: tuple[str, ...] = ()
    left_as_is: tuple[str, ...] = ()
    left_wholes: tuple[tuple[str, str], ...] = ()

    @property
    def whole(self) -> bool:
        """Whether all weights are carried over."""
        return not (self.not_carried or self.left_as_is or self.left_wholes)


#: Parameters that have no partner, with their layers.
_Left = list[tuple[Layer, Parameter]]


@dataclass
class _Target:
    """A parameter of the raw model that is being put together."""

    tensor: Any
    role: str
    values: np.ndarray
    filled: np.ndarray


def planned(
    base: LiveModel,
    raw: LiveModel,
    alignment: Alignment,
    layer_map: LayerMap,
    partial: bool = False,
    may_stay: Collection[tuple[str, str]] = (),
) -> Plan:
    """Plan the transfer of all weights.

    Args:
        layer_map: what it says answers to nothing stays as it is.
        partial: whether what fits is carried over, and the rest listed.
        may_stay: pairs of layers that stay as they are, as wholes, where not all that they hold can be carried over.

    Raises:
        NoPlanError: a parameter has no partner, or one of another shape, or would need two values at once.
    """
    stay: list[tuple[str, str]] = []
    while True:
        planning = _Planning(base, raw, alignment, layer_map, stay)
        plan = planning.result()
        error = planning.error()
        if error is None or partial:
            return plan
        more = [pair for pair in planning.pairs_in_the_way(may_stay) if pair not in stay]
        if not more:
            raise error
        stay += more


class _Planning:
    def __init__(
        self,
        base: LiveModel,
        raw: LiveModel,
        alignment: Alignment,
        layer_map: LayerMap,
        stay: Collection[tuple[str, str]],
    ) -> None:
        self._sides = (base, raw)
        self._alignment = alignment
        self._plan = Plan(left_wholes=tuple(stay))
        self._left_out = (
            {path for ours, theirs in layer_map.named() if not theirs for path in ours},
            {path for ours, theirs in layer_map.named() if not ours for path in theirs},
        )
        for pair in stay:
            for k, (model, path) in enumerate(zip(self._sides, pair)):
                self._left_out[k].update(layer.path for layer in model.below(path))
        #: Pairs of parameters that can't be carried over, by what is in the way.
        self._misfits: list[NoPlanError] = []
        self._left: tuple[_Left, _Left] = ([], [])
        self._ruled: tuple[set[str], set[str]] = (set(), set())
        self._targets: dict[int, _Target] = {}
        self._used: set[tuple[str, str]] = set()
        self._homes = tie_targets(base.info.layers)

    def result(self) -> Plan:
        self._find_rules()
        for pair in self._alignment.parameters:
            if not self._is_left_out(pair):
                self._carry(pair)
        self._fill_zeros()
        self._find_left()
        targets = [target for target in self._targets.values() if target.filled.any()]
        self._plan.writes = [(target.tensor, target.values) for target in targets]
        self._plan.buffers = sum(target.role == "buffer" for target in targets)
        self._plan.parameters = len(targets) - self._plan.buffers
        self._plan.not_carried, self._plan.left_as_is = (tuple(_names(rest, True)) for rest in self._left)
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
        # What is added up on the one side is, on the other, one that has it all and others that are zeros.
        value = values[0] if len(values) == 1 else np.sum(values, axis=0, dtype=values[0].dtype)
        try:
            for number, part in enumerate(pair.candidate):
                self._put(pair.reference[0], part, value if number == 0 else np.zeros_like(value))
        except NoPlanError as error:
            self._misfits.append(error)
            return
        self._used.update(self._homes.get((part.layer, part.slot), (part.layer, part.slot)) for part in pair.reference)

    def _put(self, source: Slice, part: Slice, value: np.ndarray) -> None:
        if not equivalents.same_rows(value.shape, part.size):
            stored = [list(p.shape) for p in (source, part)]
            raise NoPlanError(
                f"shapes of `{source.slot}` and `{part.slot}` are not the same: {stored[0]} against {stored[1]}",
                source.layer,
                part.layer,
            )
        target = self._target(part)
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

    def _target(self, part: Slice) -> _Target:
        tensor, role = self._sides[1].owned(part.layer, part.slot)
        if id(tensor) not in self._targets:
            values = self._sides[1].value(part.layer, part.slot)
            self._targets[id(tensor)] = _Target(tensor, role, values.copy(), np.zeros(values.shape, bool))
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
                    target = self._target(Slice(layer.path, p.slot, p.shape))
                    if not target.filled.any():
                        target.values[...] = 0
                        target.filled[...] = True

    def _find_left(self) -> None:
        """Weights are never skipped silently: every parameter of either side has to be covered, or is listed."""
        for k, model in enumerate(self._sides):
            for layer in model.info.layers:
                if layer.path in self._left_out[k] or layer.path in self._ruled[k]:
                    continue
                for p in layer.parameters:
                    if p.role == "parameter" and not p.tied_to and not self._covered(k, model, layer.path, p.slot):
                        self._left[k].append((layer, p))

    def pairs_in_the_way(self, pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        """Those of the pairs of layers that hold all that can't be carried over; none where they do not hold it all."""
        places = [{layer.path for layer, _ in rest} for rest in self._left]
        for misfit in self._misfits:
            for side, path in zip(places, (misfit.base, misfit.raw)):
                side |= {path} if path is not None else set()
        found = []
        for pair in pairs:
            inside = [{layer.path for layer in model.below(path)} for model, path in zip(self._sides, pair)]
            if any(side & within for side, within in zip(places, inside)):
                found.append(pair)
                places = [side - within for side, within in zip(places, inside)]
        return [] if any(places) else found

    def error(self) -> NoPlanError | None:
        """Why not all weights are carried over, if they are not."""
        if self._misfits:
            return self._misfits[0]
        left = self._left
        if not any(left):
            return None
        partner = {p.reference.path: p.candidate.path for p in self._alignment.pairs}
        back = {theirs: ours for ours, theirs in partner.items()}
        places = [rest[0][0].path if rest else None for rest in left]
        if left[0] and not left[1] and places[0] in partner:
            what = f"the raw layer has no parameter for {_told(left[0], False)}"
            return NoPlanError(what, places[0], partner[places[0]])
        if left[1] and not left[0] and places[1] in back:
            return NoPlanError(
                f"the base layer has nothing for the raw layer's {_told(left[1], False)}", back[places[1]], places[1]
            )
        sides = []
        for name, rest, whole in zip(("base", "raw"), left, self._alignment.surplus):
            where = f"{', '.join(whole[:4])}{' and more' if len(whole) > 4 else ''}: " if whole else ""
            if rest:
                sides.append(f"the {name} model's {where}{_told(rest, True)}")
        return NoPlanError(f"no partner for {' and for '.join(sides)}", places[0], places[1])

    def _covered(self, side: int, model: LiveModel, path: str, slot: str) -> bool:
        if side == 0:
            return (path, slot) in self._used
        target = self._targets.get(id(model.tensor(path, slot)))
        return target is not None and bool(target.filled.all())


def _told(left: _Left, where: bool) -> str:
    texts = _names(left, where)
    return ", ".join(texts[:6]) + (f" and {len(texts) - 6} more" if len(texts) > 6 else "")


def _names(left: _Left, where: bool) -> list[str]:
    """The parameters with their shapes; ``where``: with the paths of their layers."""
    return [f"{layer.path}/{p.slot} {list(p.shape)}" if where else f"`{p.slot}` {list(p.shape)}" for layer, p in left]
