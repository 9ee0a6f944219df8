"""Plan of a transfer of weights: new values for each tensor of the raw model, computed without changing a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from padiff.align import Alignment, ParameterPair, Slice
from padiff.align.matching.parameter_pairing import is_transposed, stored_as
from padiff.align.matching.parameter_units import tie_targets
from padiff.model import equivalents
from padiff.model.given_map import GivenMap
from padiff.model.tree import LiveModel
from padiff.records import Both, Layer, Parameter
from padiff.system.terminal import first_few
from padiff.weights.carried_state import special_init
from padiff.weights.stored import StoredModel

#: Parts of names of the statistics of a normalisation.
_STATISTICS = {"mean": ("mean", "mu", "avg"), "variance": ("var", "sigma2"), "deviation": ("std", "sigma")}
_FLOATS = ("float", "bfloat")


def buffers_of(layer: Layer) -> list[Parameter]:
    """Return the buffers of a layer that both frameworks have."""
    return [
        p
        for p in layer.parameters
        if p.role == "buffer" and not p.tied_to and equivalents.slot(p.slot) not in equivalents.ONE_SIDED
    ]


def pair_buffers(layers: Both[Layer], buffers: Both[list[Parameter]]) -> list[ParameterPair]:
    """Pair buffers of two layers that have no partner of their name.

    Buffers of one statistic and shape are pairs, and buffers of one shape that share a word of their names; else
    buffers of one shape and kind of numbers, in the order of definition, if both layers have equally many of them;
    last a matrix and its transpose (a queue of columns, a bank of rows).
    """
    waiting = buffers.map(list)
    pairs: list[Both[Parameter]] = []
    words = {word for p in waiting.reference for word in p.slot.lower().split("_")}
    keys_of: list[Callable[[Parameter], tuple[object, ...] | None]] = [_statistic]
    keys_of += [partial(_with_word, word) for word in sorted(words)]
    for key in (*keys_of, _form):
        keys = {key(p) for side in waiting for p in side} - {None}
        for value in sorted(keys, key=str):
            members = waiting.map(lambda side, key=key, value=value: [p for p in side if key(p) == value])  # type: ignore[misc]
            if len(members.reference) == len(members.candidate):
                pairs += [Both(*both) for both in zip(*members)]
        paired = {id(p) for pair in pairs for p in pair}
        waiting = waiting.map(lambda side, paired=paired: [p for p in side if id(p) not in paired])  # type: ignore[misc]
    across = [Both(a, b) for a in waiting.reference for b in waiting.candidate if _are_transposes(a, b)]
    counts = Counter(id(p) for pair in across for p in pair)
    straight = [(pair, False) for pair in pairs]
    turned = [(pair, True) for pair in across if all(counts[id(p)] == 1 for p in pair)]
    return [ParameterPair(*stored_as(layers.map(lambda x: x.path).zip(p), turn)) for p, turn in straight + turned]


def _are_transposes(one: Parameter, other: Parameter) -> bool:
    return is_transposed(Both(one.shape, other.shape)) and _form(one)[1:] == _form(other)[1:]


def _statistic(parameter: Parameter) -> tuple[object, ...] | None:
    """Return the statistic that a buffer's name says, with the buffer's form; `None` if the name says none."""
    name = parameter.slot.lower()
    statistics = [key for key, parts in _STATISTICS.items() if any(part in name for part in parts)]
    return (statistics[-1], *_form(parameter)) if statistics else None


def _with_word(word: str, parameter: Parameter) -> tuple[object, ...] | None:
    """Return a buffer's form if its name has a word; else `None`."""
    return _form(parameter) if word in parameter.slot.lower().split("_") else None


def _form(parameter: Parameter) -> tuple[object, ...]:
    """Return the shape and the kind of numbers of a buffer."""
    return parameter.shape, parameter.dtype.startswith(_FLOATS), "bool" in parameter.dtype


def names_of(layer: Layer, buffers: Sequence[Parameter]) -> list[str]:
    """Return buffers with their shapes, as ``layer/slot [shape]``."""
    return [f"{layer.path}/{p.slot} {list(p.shape)}" for p in buffers]


#: The source of weights may be a recorded model; the target is a live one.
Model = LiveModel | StoredModel


# Relative difference per element up to which buffers that both frameworks compute are equal. Chosen: some units in
# float32's last place, the rounding of powers and divisions.
_SAME = 1e-5


class TransferError(Exception):
    """Weights can't be carried over; the text holds the reason, ``paths`` the layers."""

    def __init__(self, what: str, paths: Both[str | None]) -> None:
        super().__init__(what)
        self.paths = paths


@dataclass
class Transfer:
    """New values for tensors of the raw model, and the user's rules to call.

    Attributes:
        writes: pairs of a tensor and its new values.
        calls: calls of the user's rules.
        parameters, buffers: number of parameters and of buffers among the written tensors.
        not_carried: parameters of the base model without a place in the raw model, as ``layer/slot [shape]``.
        left_as_is: parameters of the raw model without a source in the base model, as ``layer/slot [shape]``.
        left_wholes: pairs of layers that stay unchanged with all their parameters.
        computed: buffers that the raw model computes with values that differ from the recorded ones. These buffers are
            never written: the settings they are computed from differ between the models.
        unpaired_buffers: buffers of paired layers that differ in names and shapes, so that none is carried over, as
            ``layer/slot [shape]``.
    """

    writes: list[tuple[Any, np.ndarray]] = field(default_factory=list)
    calls: list[Callable[[], None]] = field(default_factory=list)
    parameters: int = 0
    buffers: int = 0
    not_carried: tuple[str, ...] = ()
    left_as_is: tuple[str, ...] = ()
    left_wholes: tuple[tuple[str, str], ...] = ()
    computed: tuple[str, ...] = ()
    unpaired_buffers: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Return True if all weights are carried over."""
        return not (self.not_carried or self.left_as_is or self.left_wholes)


#: Parameters without a partner, with their layers.
_Left = list[tuple[Layer, Parameter]]


@dataclass
class _Target:
    """A parameter of the raw model while its values are collected; ``filled`` marks the elements with a value."""

    tensor: Any
    role: str
    values: np.ndarray
    filled: np.ndarray


def live(model: Model) -> LiveModel:
    """Return the model, which must be a `LiveModel`."""
    assert isinstance(model, LiveModel)
    return model


def plan_transfer(
    models: Both[Model],
    alignment: Alignment,
    layer_map: GivenMap,
    partial: bool = False,
    may_stay: Collection[tuple[str, str]] = (),
) -> Transfer:
    """Plan the transfer of all weights.

    Args:
        layer_map: the user's layer map; layers that it maps to nothing stay unchanged.
        partial: True to carry over the weights that fit and list the others.
        may_stay: pairs of layers that stay unchanged as wholes if some of their parameters can't be carried over.

    Raises:
        TransferError: a parameter has no partner, a partner of another shape, or would need two values.
    """
    stay: list[tuple[str, str]] = []
    while True:
        planner = _Planner(models, alignment, layer_map, stay)
        transfer = planner.result()
        error = planner.error()
        if error is None or partial:
            return transfer
        more = [pair for pair in planner.pairs_in_the_way(may_stay) if pair not in stay]
        if not more:
            raise error
        stay += more


class _Planner:
    def __init__(
        self,
        models: Both[Model],
        alignment: Alignment,
        layer_map: GivenMap,
        stay: Collection[tuple[str, str]],
    ) -> None:
        self._models, self._raw = models, live(models.candidate)
        self._alignment = alignment
        self._transfer = Transfer(left_wholes=tuple(stay))
        #: Layers whose parameters are not paired here: unchanged ones, and layers with a rule of the user.
        self._left_out: Both[set[str]] = Both(
            {path for reference, candidate in layer_map.named() if not candidate for path in reference},
            {path for reference, candidate in layer_map.named() if not reference for path in candidate},
        )
        for pair in stay:
            self._leave_out(Both(*pair))
        #: One error for each pair of parameters that can't be carried over.
        self._misfits: list[TransferError] = []
        self._left: Both[_Left] = Both([], [])
        self._targets: dict[int, _Target] = {}
        self._used: set[tuple[str, str]] = set()
        self._homes = tie_targets(models.reference.info.layers)

    def result(self) -> Transfer:
        self._find_rules()
        for pair in self._alignment.parameters:
            if not self._is_left_out(pair):
                self._carry(pair)
        self._carry_other_buffers()
        self._fill_zeros()
        self._find_left()
        targets = [target for target in self._targets.values() if target.filled.any()]
        self._transfer.writes = [(target.tensor, target.values) for target in targets]
        self._transfer.buffers = sum(target.role == "buffer" for target in targets)
        self._transfer.parameters = len(targets) - self._transfer.buffers
        self._transfer.not_carried, self._transfer.left_as_is = (
            tuple(_names(unmatched, True)) for unmatched in self._left
        )
        return self._transfer

    def _leave_out(self, paths: Both[str]) -> None:
        for left_out, (model, path) in self._left_out.zip(self._models.zip(paths)):
            left_out.update(layer.path for layer in model.below(path))

    def _find_rules(self) -> None:
        excluded = self._left_out.map(frozenset)
        for pair in self._alignment.pairs:
            paths = Both(pair.reference.path, pair.candidate.path)
            if any(path in left_out for path, left_out in paths.zip(excluded)):
                continue
            layers = Both(self._models.reference.layer(paths.reference), self._raw.layer(paths.candidate))
            rule = special_init(self._models.map(lambda model: model.info.framework), layers)
            if rule is not None:
                self._transfer.calls.append(lambda rule=rule, layers=layers: rule(*layers))  # type: ignore[misc]
                self._leave_out(paths)

    def _is_left_out(self, pair: ParameterPair) -> bool:
        sides = self._left_out.zip(Both(pair.reference, pair.candidate))
        return any(part.layer in left_out for left_out, parts in sides for part in parts)

    def _carry(self, pair: ParameterPair) -> None:
        base = self._models.reference
        computed = isinstance(base, StoredModel) and all(self._is_computed(part) for part in pair.candidate)
        values = [part.read(base.value(part.layer, part.slot)) for part in pair.reference]
        # A sum of several biases on one side goes into the first bias of the other side; its other biases are zero.
        value = values[0] if len(values) == 1 else np.sum(values, axis=0, dtype=values[0].dtype)
        if computed:
            self._compare(pair, value)
            return
        try:
            for number, part in enumerate(pair.candidate):
                self._put(pair.reference[0], part, value if number == 0 else np.zeros_like(value))
        except TransferError as error:
            self._misfits.append(error)
            return
        self._used.update(self._homes.get((part.layer, part.slot), (part.layer, part.slot)) for part in pair.reference)

    def _carry_other_buffers(self) -> None:
        """Carry over the buffers of paired layers that the alignment leaves without a partner."""
        taken = Both(
            {(part.layer, part.slot) for pair in self._alignment.parameters for part in pair.reference},
            {(part.layer, part.slot) for pair in self._alignment.parameters for part in pair.candidate},
        )
        base = self._models.reference
        for layers in self._alignment.pairs:
            left = layers.zip(taken).map(
                lambda side: [p for p in buffers_of(side[0]) if (side[0].path, p.slot) not in side[1]]
            )
            if isinstance(base, StoredModel):
                path = layers.reference.path
                left = Both([p for p in left.reference if base.source(path, p.slot) is not None], left.candidate)
            left_out = any(layer.path in paths for layer, paths in layers.zip(self._left_out))
            if left_out or not all(left):
                continue
            pairs = pair_buffers(layers, left)
            for pair in pairs:
                self._carry(pair)
            for layer, buffers, parts in zip(layers, left, Both(*zip(*pairs)) if pairs else Both((), ())):
                slots = {part.slot for slices in parts for part in slices}
                self._transfer.unpaired_buffers += tuple(names_of(layer, [p for p in buffers if p.slot not in slots]))

    def _is_computed(self, part: Slice) -> bool:
        return part.slot in self._raw.framework.layers.computed(self._raw.layer(part.layer))

    def _compare(self, pair: ParameterPair, value: np.ndarray) -> None:
        """Note the buffers that the raw model computes with values other than the recorded ones."""
        for part in pair.candidate:
            computed = part.read(self._raw.value(part.layer, part.slot)).astype(np.float64)
            same = computed.size == value.size and np.allclose(computed.ravel(), value.ravel(), rtol=_SAME, atol=0)
            if not same:
                self._transfer.computed += (f"{part.layer}/{part.slot}",)

    def _put(self, source: Slice, part: Slice, value: np.ndarray) -> None:
        if not equivalents.same_rows(value.shape, part.result_shape):
            shapes = " against ".join(str(list(p.shape)) for p in (source, part))
            what = f"shapes of `{source.slot}` and `{part.slot}` are not the same: {shapes}"
            raise TransferError(what, Both(source.layer, part.layer))
        target = self._target(part)
        value = value.reshape(part.result_shape)
        filled = part.read(target.filled)
        if filled.any():
            if np.array_equal(part.read(target.values)[filled], value[filled]):
                return
            raise TransferError(
                f"the raw model ties `{part.layer}/{part.slot}` to another parameter, the base model has two "
                "different ones",
                Both(source.layer, part.layer),
            )
        part.write(target.values, value)
        part.write(target.filled, np.ones(value.shape, bool))

    def _target(self, part: Slice) -> _Target:
        raw = self._raw
        tensor, role = raw.owned(part.layer, part.slot)
        if id(tensor) not in self._targets:
            values = raw.value(part.layer, part.slot)
            self._targets[id(tensor)] = _Target(tensor, role, values.copy(), np.zeros(values.shape, bool))
        return self._targets[id(tensor)]

    def _fill_zeros(self) -> None:
        """Set biases that stand for a missing bias of a recurrent cell to zero in the raw model.

        Such biases of the base model need no partner if all their elements are zero.
        """
        base, raw = self._models.reference, self._raw
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
        """Collect the parameters of both models that nothing covers, so that no weight is skipped silently."""
        covered = Both(self._is_used, self._is_filled)
        for unmatched, (is_covered, (model, left_out)) in self._left.zip(covered.zip(self._models.zip(self._left_out))):
            unmatched += [
                (layer, p)
                for layer in model.info.layers
                if layer.path not in left_out
                for p in layer.parameters
                if p.role == "parameter" and not p.tied_to and not is_covered(layer.path, p.slot)
            ]
        # A table that nothing trains is computed in the code of the other side, and a copy is made there.
        copies = self._copies() if self._left.reference and not self._left.candidate else set()
        for unmatched, others in (tuple(self._left), tuple(self._left.swapped())):
            if not others and all(not p.trainable or _top(layer) in copies for layer, p in unmatched):
                self._transfer.unpaired_buffers += tuple(_names(unmatched, True))
                unmatched.clear()

    def _copies(self) -> set[str]:
        """Return the base's outermost layers without partners that begin as copies of others: target networks."""
        base = self._models.reference
        shapes = {p.shape for _, p in self._left.reference}
        used: dict[tuple[int, ...], list[np.ndarray]] = {}
        for layer in base.info.layers:
            for p in layer.parameters:
                if p.shape in shapes and self._is_used(layer.path, p.slot):
                    used.setdefault(p.shape, []).append(base.value(layer.path, p.slot))
        others, copied = set(), set()
        for layer, p in self._left.reference:
            value = base.value(layer.path, p.slot)
            if not any(np.array_equal(value, each) for each in used.get(p.shape, [])):
                others.add(_top(layer))
            elif (value != value.flat[0]).any():  # zeros equal zeros
                copied.add(_top(layer))
        return copied - others

    def pairs_in_the_way(self, pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        """Return the pairs of layers that contain the parameters which can't be carried over.

        Empty if a parameter outside of these pairs can't be carried over either.
        """
        places = self._left.map(lambda left: {layer.path for layer, _ in left})
        for misfit in self._misfits:
            for side, path in places.zip(misfit.paths):
                side |= {path} if path is not None else set()
        blocking = []
        for pair in pairs:
            inside = [{layer.path for layer in model.below(path)} for model, path in zip(self._models, pair)]
            if any(side & within for side, within in zip(places, inside)):
                blocking.append(pair)
                for side, within in zip(places, inside):
                    side -= within
        return [] if any(places) else blocking

    def error(self) -> TransferError | None:
        """Return the reason why some weights are not carried over, or `None`."""
        if self._misfits:
            return self._misfits[0]
        unmatched = self._left
        if not any(unmatched):
            return None
        partner = {p.reference.path: p.candidate.path for p in self._alignment.pairs}
        back = {candidate: reference for reference, candidate in partner.items()}
        places = unmatched.map(lambda parameters: parameters[0][0].path if parameters else None)
        if unmatched.reference and not unmatched.candidate and places.reference in partner:
            what = f"the raw layer has no parameter for {_listed(unmatched.reference, False)}"
            return TransferError(what, Both(places.reference, partner[places.reference]))
        if unmatched.candidate and not unmatched.reference and places.candidate in back:
            what = f"the base layer has nothing for the raw layer's {_listed(unmatched.candidate, False)}"
            return TransferError(what, Both(back[places.candidate], places.candidate))
        sides = []
        for name, parameters, surplus in zip(("base", "raw"), unmatched, self._alignment.surplus):
            where = f"{', '.join(surplus[:4])}{' and more' if len(surplus) > 4 else ''}: " if surplus else ""
            if parameters:
                sides.append(f"the {name} model's {where}{_listed(parameters, True)}")
        return TransferError(f"no partner for {' and for '.join(sides)}", places)

    def _is_used(self, path: str, slot: str) -> bool:
        return (path, slot) in self._used

    def _is_filled(self, path: str, slot: str) -> bool:
        target = self._targets.get(id(self._raw.tensor(path, slot)))
        return target is not None and bool(target.filled.all())


def _top(layer: Layer) -> str:
    return layer.path.partition(".")[0]


def _listed(unmatched: _Left, where: bool) -> str:
    return first_few(_names(unmatched, where), 6)


def _names(owned: _Left, where: bool) -> list[str]:
    """Return the parameters with their shapes; with ``where``, also the paths of their layers."""
    return [f"{layer.path}/{p.slot} {list(p.shape)}" if where else f"`{p.slot}` {list(p.shape)}" for layer, p in owned]
