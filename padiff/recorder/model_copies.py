"""Search for the copies of a model that a loop keeps: averages (EMA), target networks, teachers, frozen references.

No optimizer trains a copy, but what it holds decides the training or its outcome. A copy is a layer with the shapes of
a trained one, or a dict or list of tensors that holds a trained layer's parameters.
"""

from __future__ import annotations

import copy
import math
import sys
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

import numpy as np

from padiff.frameworks import framework_of
from padiff.model.tree import walk
from padiff.records import ROOT
from padiff.system.frames import is_of_user, locals_of, user_frames, variables
from padiff.system.guard import reraise_from_signal_handler

# Largest tensor whose values are kept to see whether a copy changes, in elements.
_KEPT = 1 << 20
# How deep in a model the layers lie that may have copies of their own.
_DEEPEST = 2
#: Containers whose tensors may be a copy of a model.
CONTAINERS = (dict, OrderedDict, list, tuple)
# A layer with fewer parameters is too small to be told from others by its shapes.
_LEAST = 2
# Tensors with equal values that vary (zeros equal zeros), from which on all are taken to be equal.
_ENOUGH = 2


class Copy(NamedTuple):
    """A copy of a model.

    Attributes:
        layer: the layer that holds the copy's parameters.
        current: returns the layer that the script's variable holds now: loops copy the whole model anew, too.
    """

    layer: Any
    current: Callable[[], Any]


def children_attribute(framework: str) -> str:
    """Return the attribute in which a framework's layers hold their children, by name."""
    return "_modules" if framework == "torch" else "_sub_layers"


def named_models(models: Mapping[str, Any], frame: FrameType | None) -> dict[str, Any]:
    """Return models by name; one without a name gets that of its variable."""
    labels = {id(value): label for label, value in reversed(list(variables(frame)))}
    return {name or labels.get(id(value)) or "model": value for name, value in models.items()}


def copies_of(models: Mapping[str, Any], frame: FrameType | None, owned: Collection[int]) -> dict[str, Copy]:
    """Return the copies of models among the variables of a script, by the variables' names.

    Args:
        models: the layers that optimizers train, by name.
        frame: the loop's innermost frame.
        owned: identities of tensors that optimizers own; what holds one of them is no copy.
    """
    if not models:
        return {}
    framework = framework_of(next(iter(models.values())))
    trained = [node for model in models.values() for node in walk(model, framework)]
    sources = {}
    for node in reversed(trained):  # the outermost layer of several with the same shapes
        parameters = list(parameters_of(node.layer, framework)) if node.path.count(".") < _DEEPEST else []
        if len(parameters) >= _LEAST:
            sources[_shapes(parameters, framework)] = node.layer, parameters
    taken, inner = set(owned), {id(node.layer) for node in trained}
    values = list(_values(frame))
    for _, value in values:
        if framework.layers.is_model(value) and id(value) not in inner:
            inner |= _parts_of_another(value, sources, taken, framework)
    copies: dict[str, Copy] = {}
    for name, value in values:
        twin = None
        if framework.layers.is_model(value):
            layer = _inside(value, framework)
            if id(layer) not in inner and _shapes(parameters_of(layer, framework), framework) in sources:
                twin = Copy(layer, _Followed(_variable(value, frame), layer, framework))
        elif type(value) in CONTAINERS and len(value) >= _LEAST:
            held = _variable(value, frame)
            tried = (layer_of_tensors(value, *source, framework, held) for source in sources.values())
            ghost = next((each for each in tried if each is not None), None)
            twin = None if ghost is None else Copy(ghost, partial(_same, ghost))
        if twin is None:
            continue
        tensors = {id(tensor) for _, tensor in parameters_of(twin.layer, framework)}
        if tensors.isdisjoint(taken):
            taken |= tensors
            while name in copies or name in models:
                name += "_copy"
            copies[name] = twin
    return copies


def _parts_of_another(
    model: Any, sources: Collection[tuple[Any, ...]], owned: Collection[int], framework: Any
) -> set[int]:
    """Return the ids of the layers inside of a model that is no copy, if few of its parameters are those of copies."""
    parameters = list(parameters_of(model, framework))
    if _shapes(parameters, framework) in sources or not {id(tensor) for _, tensor in parameters}.isdisjoint(owned):
        return set()
    layers = [node.layer for node in walk(model, framework) if node.path != ROOT]
    layers_parameters = [list(parameters_of(layer, framework)) for layer in layers]
    alike = {id(tensor) for each in layers_parameters if _shapes(each, framework) in sources for _, tensor in each}
    sizes = {id(tensor): math.prod(framework.tensors.shape(tensor)) for _, tensor in parameters}
    few = 2 * sum(sizes[key] for key in alike) < sum(sizes.values())
    return set(map(id, layers)) if few else set()


# -- variables -------------------------------------------------------------------------------------------------------


def _variable(value: Any, frame: FrameType | None) -> Callable[[], Any]:
    """Return a function that returns what the script's variable or attribute holds that holds a value now."""
    main = sys.modules.get("__main__")
    for scope in [vars(main)] if main is not None else []:
        for name, each in list(scope.items()):
            if each is value:
                return partial(scope.get, name)
    for user in user_frames(frame):
        for name, each in locals_of(user).items():
            if each is value:
                return partial(_local, user.f_code, name)
    for _, holder in variables(frame):
        if type(holder) is dict:
            for name, each in list(holder.items()):
                if each is value:
                    return partial(holder.get, name)
        elif is_of_user(holder):
            inner = {**vars(holder), **vars(holder).get("_modules", {}), **vars(holder).get("_sub_layers", {})}
            for name, each in inner.items():
                if each is value:
                    return partial(_attribute, weakref.ref(holder), name)
    return partial(_same, value)


def _local(code: CodeType, name: str) -> Any:
    frame = next((each for each in user_frames(sys._getframe(1)) if each.f_code is code), None)
    return None if frame is None else locals_of(frame).get(name)


def _attribute(alive: Callable[[], Any], name: str) -> Any:
    return getattr(alive(), name, None)


class _Followed:
    """The layer that a variable holds, as long as its shapes are those of a first one.

    Args:
        variable: returns what the variable holds now.
        layer: the first layer.
    """

    def __init__(self, variable: Callable[[], Any], layer: Any, framework: Any) -> None:
        self._variable, self._framework = variable, framework
        self._shapes = _shapes(parameters_of(layer, framework), framework)
        self._latest = weakref.ref(layer)

    def __call__(self) -> Any:
        value = self._variable()
        layer = _inside(value, self._framework) if self._framework.layers.is_model(value) else None
        if layer is None or layer is self._latest():
            return layer
        if _shapes(parameters_of(layer, self._framework), self._framework) != self._shapes:
            return None
        self._latest = weakref.ref(layer)
        return layer


def is_copy(layer: Any, optimized: Sequence[Any], framework: Any) -> bool:
    """Return True if a layer has the shapes of some of an optimizer's tensors, and none of these."""
    # A tied parameter counts once, and so do those that paddle's recurrent layers and their cells share.
    parameters = {id(tensor): tensor for _, tensor in parameters_of(layer, framework)}
    shape, others = framework.tensors.shape, {id(tensor) for tensor in optimized}
    if len(parameters) < _LEAST or not others.isdisjoint(parameters):
        return False
    return Counter(map(shape, parameters.values())) <= Counter(map(shape, optimized))


class LeftOut:
    """The copies of a model that its loop keeps and nobody records: those that change while the model is recorded.

    Args:
        model: the recorded model.
        optimizers: its optimizers.
        frame: a frame of the loop.
    """

    def __init__(self, model: Any, optimizers: Collection[Any], frame: FrameType | None) -> None:
        self._framework = framework_of(model)
        owned = {id(t) for each in optimizers for t in self._framework.optimizers.optimized(each)}
        owned |= {id(tensor) for _, tensor in parameters_of(model, self._framework)}
        copies = copies_of({"model": model}, frame, owned)
        self._copies = [(name, twin.current, self._kept(twin.layer)) for name, twin in copies.items()]

    def _kept(self, layer: Any) -> dict[str, np.ndarray]:
        tensors = self._framework.tensors
        small = [
            (name, tensor)
            for name, tensor in parameters_of(layer, self._framework)
            if math.prod(tensors.shape(tensor)) <= _KEPT
        ]
        small.sort(key=lambda item: math.prod(tensors.shape(item[1])))
        return {name: tensors.copy(tensor).copy() for name, tensor in small[-_ENOUGH:]}

    def changed(self) -> list[str]:
        """Return the names of the copies that have changed since."""
        names = []
        for name, current, before in self._copies:
            if (layer := current()) is not None:
                now = self._kept(layer)
                if any(name in now and not np.array_equal(now[name], values) for name, values in before.items()):
                    names.append(name)
        return names


def left_out_of(model: Any, optimizers: Collection[Any], frame: FrameType | None) -> LeftOut | None:
    """Return the copies that nobody records; `None` if the search fails: the recording does without."""
    try:
        return LeftOut(model, optimizers, frame)
    except Exception as error:
        reraise_from_signal_handler(error)
        return None


def _same(value: Any) -> Any:
    return value


def _values(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """Yield names and values of the script's variables, and what objects of libraries hold."""
    seen: set[int] = set()
    for name, value in list(variables(frame)):
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield name, value
        if isinstance(value, (type, ModuleType)) or is_of_user(value):
            continue  # what objects of the user's hold are variables, too
        if type(getattr(value, "__dict__", None)) is dict:
            yield from ((name, each) for each in list(vars(value).values()) if type(each) in CONTAINERS)


def _inside(layer: Any, framework: Any) -> Any:
    """Return the layer that wrappers without parameters of their own hold (torch's ``AveragedModel``)."""
    while True:
        children = [child for _, child in framework.layers.children(layer)]
        roles = [role for _, _, role in framework.layers.parameters(layer) if role == "parameter"]
        if roles or len(children) != 1 or not any(True for _ in framework.layers.children(children[0])):
            return layer
        layer = children[0]


def parameters_of(layer: Any, framework: Any) -> Iterator[tuple[str, Any]]:
    for node in walk(layer, framework):
        for slot, tensor, role in framework.layers.parameters(node.layer):
            if role == "parameter":
                yield _full(node.path, slot), tensor


def _full(path: str, slot: str) -> str:
    return slot if path == ROOT else f"{path}.{slot}"


def _shapes(parameters: Iterable[tuple[str, Any]], framework: Any) -> tuple[Any, ...]:
    return tuple(tuple(framework.tensors.shape(tensor)) for _, tensor in parameters)


# -- tensors in a dict or list ---------------------------------------------------------------------------------------


def layer_of_tensors(
    values: Any,
    layer: Any,
    parameters: Sequence[tuple[str, Any]],
    framework: Any,
    variable: Callable[[], Any] | None = None,
) -> Any:
    """Return a layer whose parameters are the tensors in a dict or list, if these are a layer's parameters; or None.

    Args:
        values: tensors by the names of the layer's parameters, or in their order.
        parameters: the layer's parameters, by name.
        variable: returns the dict or list of now, for one with the values of the layer's parameters; `None` for one
            that is given, with any values.
    """
    if isinstance(values, dict):
        names = [name for name, _ in parameters]
        before = next((each for each in ("", "module.") if all(each + name in values for name in names)), None)
        keys: list[Any] = [] if before is None else [before + name for name in names]
    else:
        keys = list(range(len(values)))
    pairs = [(values[key], tensor) for key, (_, tensor) in zip(keys, parameters)]
    if len(keys) != len(parameters) or not _are_alike(pairs, framework, variable is not None):
        return None
    places = {name: key for key, (name, _) in zip(keys, parameters)}
    latest = [values]

    def held(names: Iterable[str]) -> list[Any]:
        now = variable() if variable is not None else values
        if type(now) is type(latest[0]) and len(now) == len(latest[0]):
            latest[0] = now
        return [latest[0][places[name]] for name in names]

    return _ghost(layer, "", held, places, framework, {})


def _are_alike(pairs: Sequence[tuple[Any, Any]], framework: Any, same_values: bool) -> bool:
    """Return True if other tensors have a layer's shapes, and the values of the smallest of its tensors that vary."""
    tensors = framework.tensors
    if not all(
        tensors.is_tensor(value) and tensors.shape(value) == tensors.shape(tensor) for value, tensor in pairs
    ) or any(value is tensor or tensors.same_values(value, tensor) for value, tensor in pairs):
        return False
    if not same_values:
        return True
    equal = 0
    for value, tensor in sorted(pairs, key=lambda pair: math.prod(tensors.shape(pair[1]))):
        values = tensors.copy(tensor)
        if not np.array_equal(tensors.copy(value), values):
            return False
        equal += bool(values.size) and bool((values != values.flat[0]).any())
        if equal == _ENOUGH:
            break
    return equal > 0


def _ghost(
    layer: Any,
    prefix: str,
    held: Callable[[Iterable[str]], list[Any]],
    names: Collection[str],
    framework: Any,
    made: dict[int, Any],
) -> Any:
    """Return a layer like another one, which is never called, and whose parameters are looked up when they are read."""
    if id(layer) in made:
        return made[id(layer)]
    slots = [slot for slot, _, _ in framework.layers.parameters(layer) if prefix + slot in names]
    parameters = property(lambda _: dict(zip(slots, held([prefix + slot for slot in slots]))) if slots else {})
    kind = type(layer)
    ghost: Any = object.__new__(
        type(kind.__name__, (kind,), {"_parameters": parameters, "__module__": kind.__module__})
    )
    made[id(layer)] = ghost
    state = vars(ghost)
    state.update({name: copy.copy(each) if isinstance(each, dict) else each for name, each in vars(layer).items()})
    state["_buffers"] = {}
    state[children_attribute(framework.name)] = {
        name: _ghost(child, f"{prefix}{name}.", held, names, framework, made)
        for name, child in framework.layers.children(layer)
    }
    return ghost
