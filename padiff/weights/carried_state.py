"""Transfer of recorded optimizer state to another model, and rules of the user for single layers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from padiff.align import Alignment, ParameterPair, Slice, align
from padiff.align.matching.parameter_units import tie_targets
from padiff.errors import UsageError
from padiff.frameworks.settings import FRAMEWORKS
from padiff.model import equivalents
from padiff.model.given_map import GivenMap
from padiff.model.tree import LiveModel, layers_at
from padiff.records import ROOT, Both, InMemory, Layer, OptimizerState, ParameterState, RunInfo, TensorSource
from padiff.records.traces import MASTER_WEIGHT, rates_of
from padiff.weights.stored import StoredModel

#: ``init(base_layer, raw_layer)`` copies the base layer's weights into the raw layer.
Init = Callable[[Any, Any], None]
#: Framework and class name of the source layer and of the target layer.
Key = Both[tuple[str, str]]

# Replaced, never edited: readers see a consistent mapping, and each thread has its own registrations.
_RULES: ContextVar[MappingProxyType[Key, Init]] = ContextVar("padiff_special_init", default=MappingProxyType({}))


def add_special_init(*args: Any, **kwargs: Any) -> None:
    """Register a function that copies the weights of one class of layers to another.

    The form is ``add_special_init(base_framework, base_model_name, raw_framework, raw_model_name, func)`` with
    ``func(base_layer, raw_layer)``. The first generation's form is ``add_special_init(paddle_name, torch_name, func)``
    with ``func(paddle_layer, torch_module)``, which copies from torch to paddle. Frameworks are ``"torch"`` and
    ``"paddle"``, names are class names. A rule applies to all pairs of layers of these two classes, and has priority
    over the built-in rules.

    Raises:
        UsageError: a wrong number of arguments, an unknown framework, or ``func`` is not callable.
    """
    key, func = _key(args, kwargs)
    if not callable(func):
        raise UsageError(f"add_special_init: func has to be a function of two layers, got {func!r}")
    _RULES.set(MappingProxyType({**_RULES.get(), key: func}))


def special_init(frameworks: Both[str], layers: Both[Any]) -> Init | None:
    """Return the user's rule for copying the reference layer into the candidate layer, or `None`."""
    rules = _RULES.get()
    for reference in type(layers.reference).__mro__:
        for candidate in type(layers.candidate).__mro__:
            rule = rules.get(frameworks.zip(Both(reference.__name__, candidate.__name__)))
            if rule is not None:
                return rule
    return None


def ruled(frameworks: Both[str]) -> frozenset[tuple[str, str]]:
    """Return the class names (reference, candidate) of the user's rules between two frameworks."""
    sides = ((key.reference, key.candidate) for key in _RULES.get())
    return frozenset((a, b) for (source, a), (target, b) in sides if Both(source, target) == frameworks)


def ruled_either_way(frameworks: Both[str]) -> frozenset[tuple[str, str]]:
    """Return the class names of the user's rules between two frameworks, in this order, for both copy directions."""
    return ruled(frameworks) | {names[::-1] for names in ruled(frameworks.swapped())}


def wholes(layers: Iterable[Layer], ruled: Collection[str]) -> dict[str, str]:
    """Return the path and kind of each layer to map: composite layers (attention, recurrent) and layers with a rule.

    Layers inside such a layer are not listed.

    Args:
        ruled: paths of the layers with a rule of the user.
    """
    kinds: dict[str, str] = {}
    for layer in layers:
        if any(path == ROOT or layer.path.startswith(f"{path}.") for path in kinds):
            continue
        if layer.path in ruled:
            kinds[layer.path] = layer.type
        elif equivalents.is_composite(layer.kind):
            kinds[layer.path] = equivalents.kind(layer)
    return kinds


def ruled_kinds(framework: str, place: str) -> frozenset[str]:
    """Return the class names in the user's rules for one framework, for the base or the raw model."""
    sides = (key.reference if place == "base" else key.candidate for key in _RULES.get())
    return frozenset(name for of, name in sides if of == framework)


def _key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Key, Init]:
    first = ("paddle_name", "torch_name", "func")
    second = ("base_framework", "base_model_name", "raw_framework", "raw_model_name", "func")
    names = first if len(args) + len(kwargs) == len(first) else second
    unknown = [name for name in kwargs if name not in names]
    if unknown or len(args) + len(kwargs) != len(names):
        raise UsageError(
            f"add_special_init takes ({', '.join(second)}), or ({', '.join(first)}); "
            f"got {len(args)} arguments" + (f" and {', '.join(kwargs)}" if kwargs else "")
        )
    # Positional arguments fill the names without a keyword, in order, as in add_special_init(paddle_name=..., func).
    positional = iter(args)
    values = {name: kwargs[name] if name in kwargs else next(positional) for name in names}
    if names is first:
        func = values["func"]

        def torch_to_paddle(module: Any, layer: Any) -> None:
            func(layer, module)

        if not callable(func):
            raise UsageError(f"add_special_init: func has to be a function of two layers, got {func!r}")
        return Both(("torch", values["torch_name"]), ("paddle", values["paddle_name"])), torch_to_paddle
    for name in ("base_framework", "raw_framework"):
        if values[name] not in FRAMEWORKS:
            raise UsageError(f"add_special_init: {name} is 'torch' or 'paddle', got {values[name]!r}")
    base, raw = ((values[f"{model}_framework"], values[f"{model}_model_name"]) for model in ("base", "raw"))
    return Both(base, raw), values["func"]


# Two biases that are added have the same gradients, so their moments differ by rounding only.
_SAME = 1e-4

#: Dtypes for which an optimizer may keep a float32 copy of the parameters (master weights).
SHORT = frozenset({"bfloat16", "float16"})

_Site = tuple[str, str]


@dataclass
class _Target:
    """The state of one parameter while its parts are collected.

    Attributes:
        sources: the recorded parameters that contribute to this one.
        filled: for each tensor, a mask of the elements that have a value.
    """

    shape: tuple[int, ...]
    sources: list[_Site] = field(default_factory=list)
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    filled: dict[str, np.ndarray] = field(default_factory=dict)


class StateCarrier:
    """Transfer of recorded optimizer states to the parameters of a live model.

    Args:
        stored: the recorded model.
        raw: the live model.
        alignment: the pairs of layers and parameters.
        states: states of the recorded optimizers.
    """

    def __init__(
        self, stored: StoredModel, raw: LiveModel, alignment: Alignment, states: Sequence[OptimizerState]
    ) -> None:
        self._stored, self._raw, self._states = stored, raw, states
        self._homes = Both(tie_targets(stored.info.layers), tie_targets(raw.info.layers))
        self._targets: dict[_Site, _Target] = {}
        ruled = [pair for pair in alignment.pairs if self._rule(pair.reference, pair.candidate) is not None]
        inside = Both(_below(stored.info, [p.reference for p in ruled]), _below(raw.info, [p.candidate for p in ruled]))
        for pair in alignment.parameters:
            if not any(part.layer in inside.reference for part in pair.reference):
                self._carry(pair)
        for layers in ruled:
            self._carry_by_rule(layers.reference, layers.candidate)

    def state_for(self, sites: Iterable[str]) -> OptimizerState:
        """Return the state of an optimizer that steps these parameters of the live model.

        Raises:
            UsageError: several recorded optimizers step these parameters, or the parts of one parameter were stepped
                differently.
        """
        targets = {site: self._targets.get(_split(site)) for site in sites}
        owners: dict[str, OptimizerState] = {}
        for target in targets.values():
            for source in target.sources if target is not None else ():
                owner = self._state_of(source)
                if owner is not None:
                    owners[owner.rule] = owner
        if len(owners) > 1:
            raise UsageError(
                f"the recorded run steps the parameters of one optimizer here by several rules: {', '.join(owners)}"
            )
        if not owners:
            raise UsageError("the recorded optimizers step none of the parameters that this optimizer steps")
        states: dict[str, ParameterState] = {}
        rates: list[tuple[str, float]] = []
        for site, target in targets.items():
            if target is None:
                continue
            rate = self._rate(site, target)
            if rate is not None:
                rates.append((site, rate))
            state = self._state(site, target)
            if state is not None:
                states[site] = state
        return OptimizerState(next(iter(owners)), states, rates_of(rates))

    def _rate(self, site: str, target: _Target) -> float | None:
        rates = {rate for rate in (self._rate_of(source) for source in target.sources) if rate is not None}
        if len(rates) > 1:
            raise UsageError(f"{site} is made of parameters that are stepped at {sorted(rates)}: it can have one rate")
        return next(iter(rates), None)

    def _rate_of(self, source: _Site) -> float | None:
        state = self._state_of(source)
        return None if state is None else state.rate("/".join(source))

    def _state(self, site: str, target: _Target) -> ParameterState | None:
        states = [self._held(source) for source in target.sources]
        present = [state for state in states if state is not None]
        if not present:
            return None
        numbers = [dict(state.numbers) for state in present]
        if len(present) < len(states) or any(each != numbers[0] for each in numbers):
            raise UsageError(
                f"{site} is made of {_names(target.sources)}, which were not stepped as often: it can have one count"
            )
        for name, filled in target.filled.items():
            if not filled.all():
                raise UsageError(f"{site}: the recorded {name.replace('_', ' ')} is that of a part of it only")
        return ParameterState(target.tensors, numbers[0])

    def _state_of(self, source: _Site) -> OptimizerState | None:
        name = "/".join(source)
        return next((state for state in self._states if name in state.parameters or state.rate(name) is not None), None)

    def _held(self, source: _Site) -> ParameterState | None:
        state = self._state_of(source)
        return None if state is None else state.parameters.get("/".join(source))

    # -- by the alignment ----------------------------------------------------------------------------------------

    def _carry(self, pair: ParameterPair) -> None:
        sources = [
            self._homes.reference.get((part.layer, part.slot), (part.layer, part.slot)) for part in pair.reference
        ]
        states = [self._held(source) for source in sources]
        if len(pair.reference) == len(pair.candidate) == 1 and self._is_short(pair.candidate[0]):
            states = [self._with_all_digits(source, state) for source, state in zip(sources, states)]
        names = {name: None for state in states if state is not None for name in state.tensors}
        for part in pair.candidate:
            target = self._target(part.layer, part.slot)
            target.sources += [source for source in sources if source not in target.sources]
            for name in names:
                if any(state is not None and name in state.tensors for state in states):
                    self._put(target, part, name, self._value(pair.reference, states, name))

    def _is_short(self, part: Slice) -> bool:
        return self._raw.framework.tensors.dtype(self._raw.tensor(part.layer, part.slot)) in SHORT

    def _with_all_digits(self, source: _Site, state: ParameterState | None) -> ParameterState | None:
        """Return the state with the recorded float32 weight added, for optimizers that keep master weights."""
        if state is None or MASTER_WEIGHT in state.tensors:
            return state
        value = self._stored.value(*source)
        return replace(state, tensors={**state.tensors, MASTER_WEIGHT: value}) if value.itemsize >= 4 else state

    def _value(self, parts: Sequence[Slice], states: Sequence[ParameterState | None], name: str) -> np.ndarray:
        values = [
            part.read(state.tensors[name])
            for part, state in zip(parts, states)
            if state is not None and name in state.tensors
        ]
        for value in values[1:]:
            if not np.allclose(value, values[0], rtol=_SAME, atol=_SAME * float(np.abs(values[0]).max(initial=0.0))):
                raise UsageError(
                    f"{_names([(part.layer, part.slot) for part in parts])} are one parameter here, but their "
                    f"{name.replace('_', ' ')} are not the same: start without the optimizer"
                )
        return values[0]

    def _put(self, target: _Target, part: Slice, name: str, value: np.ndarray) -> None:
        if name not in target.tensors:
            target.tensors[name] = np.zeros(target.shape, value.dtype)
            target.filled[name] = np.zeros(target.shape, bool)
        part.write(target.tensors[name], value.reshape(part.result_shape))
        part.write(target.filled[name], np.ones(part.result_shape, bool))

    def _target(self, layer: str, slot: str) -> _Target:
        site = self._homes.candidate.get((layer, slot), (layer, slot))
        if site not in self._targets:
            shape = self._raw.framework.tensors.shape(self._raw.tensor(*site))
            self._targets[site] = _Target(tuple(shape))
        return self._targets[site]

    # -- by rules of the user ------------------------------------------------------------------------------------

    def _rule(self, reference: Layer, candidate: Layer) -> object:
        return special_init(
            Both(self._stored.info.framework, self._raw.info.framework),
            Both(self._stored.layer(reference.path), self._raw.layer(candidate.path)),
        )

    def _carry_by_rule(self, reference: Layer, candidate: Layer) -> None:
        """Copy the moments of a layer with the user's rule that copies its weights.

        Moments have the layout of their weights, so the rule is called with the moments in place of the weights. The
        live layer's weights are restored afterwards.
        """
        sources = [(layer.path, p.slot) for layer in self._stored.below(reference.path) for p in layer.parameters]
        states = {source: self._held(source) for source in sources}
        names = {name: None for state in states.values() if state is not None for name in state.tensors}
        owned = [
            (layer.path, p.slot)
            for layer in self._raw.below(candidate.path)
            for p in layer.parameters
            if p.role == "parameter"
        ]
        learned = [source for source in sources if self._held(source) is not None or self._rate_of(source) is not None]
        for site in owned:
            target = self._target(*site)
            target.sources += [source for source in learned if source not in target.sources]
        for name in names:
            values = {
                s: state.tensors[name] for s, state in states.items() if state is not None and name in state.tensors
            }
            for site, value in self._ruled(reference, candidate, values, owned).items():
                target = self._target(*site)
                target.tensors[name], target.filled[name] = value, np.ones(target.shape, bool)

    def _ruled(
        self, reference: Layer, candidate: Layer, values: Mapping[_Site, np.ndarray], owned: Sequence[_Site]
    ) -> dict[_Site, np.ndarray]:
        tensors = self._raw.framework.tensors
        before = {site: self._raw.value(*site) for site in owned}
        weights: dict[_Site, TensorSource] = {**self._stored.weights}
        weights |= {site: InMemory(np.asarray(value)) for site, value in values.items()}
        stored = self._stored.with_values(weights)
        layers = Both(stored.layer(reference.path), self._raw.layer(candidate.path))
        rule = special_init(Both(self._stored.info.framework, self._raw.info.framework), layers)
        assert rule is not None
        try:
            rule(layers.reference, layers.candidate)
            results = {site: self._raw.value(*site) for site in owned}
        finally:
            for site, value in before.items():
                tensors.write(self._raw.tensor(*site), value)
        sides = [np.sort(np.concatenate([a.ravel() for a in side.values()])) for side in (values, results)]
        if sides[0].shape != sides[1].shape or not np.array_equal(sides[0], sides[1]):
            raise UsageError(
                f"the rule for {reference.path} (add_special_init) does more than put values elsewhere, so it can't "
                "carry the optimizer's moments: start without the optimizer"
            )
        return results


def _below(info: RunInfo, layers: Sequence[Layer]) -> set[str]:
    return {
        each.path
        for layer in layers
        for each in info.layers
        if each.path == layer.path or each.path.startswith(f"{layer.path}.")
    }


def _split(site: str) -> _Site:
    layer, _, slot = site.rpartition("/")
    return layer, slot


def _names(sites: Sequence[_Site]) -> str:
    return " and ".join("/".join(site) for site in sites)


class LayerMap(GivenMap):
    __doc__ = GivenMap.__doc__

    def auto(self, first: Any, second: Any) -> LayerMap:
        """Find, pair and print the layers of two models that the frameworks build differently inside.

        These are multi-head attentions and recurrent layers of either model, and layers that have a rule of the user
        (`add_special_init`). The alignment of the two models pairs these layers; other layers need no map. Returns this
        map.

        Raises:
            UsageError: such a layer has no partner.
        """
        models = Both(first, second).map(LiveModel.from_model)
        frameworks = models.map(lambda model: model.framework.name)
        rules = ruled_either_way(frameworks)
        alignment = align(models.reference.info, models.candidate.info, whole=rules)
        candidates = [Both(pair.reference.path, pair.candidate.path) for pair in alignment.pairs]
        by_rule = [
            paths for paths in candidates if ROOT not in paths and _is_ruled(frameworks, layers_at(models, paths))
        ]
        composites = Both(
            wholes(models.reference.info.layers, {paths.reference for paths in by_rule}),
            wholes(models.candidate.info.layers, {paths.candidate for paths in by_rule}),
        )
        pairs = [
            paths
            for paths in candidates
            if paths.reference in composites.reference or paths.candidate in composites.candidate
        ]
        paired = Both({paths.reference for paths in pairs}, {paths.candidate for paths in pairs})
        if any(side.keys() - partners for side, partners in composites.zip(paired)):
            sides = (", ".join(f"{path} ({kind})" for path, kind in side.items()) or "none" for side in composites)
            raise UsageError(
                "LayerMap.auto: the models do not have the same layers to map: "
                f"{' against '.join(sides)}; set the map by hand"
            )
        for paths in pairs:
            kind = composites.reference.get(paths.reference) or composites.candidate[paths.candidate]
            print(f"[AutoDiff] LayerMap.auto: `{paths.reference}` answers to `{paths.candidate}` ({kind})")
            layers = layers_at(models, paths)
            self.pairs += ((layers.reference, layers.candidate),)
        if not pairs:
            print("[AutoDiff] LayerMap.auto: no layer of these models needs a map")
        return self


def _is_ruled(frameworks: Both[str], layers: Both[Any]) -> bool:
    """Return True if the user has a rule for these two layers, in either direction."""
    return bool(special_init(frameworks, layers) or special_init(frameworks.swapped(), layers.swapped()))
