"""Layers of paddle; see `padiff.frameworks.base.Layers`."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import paddle
from paddle.jit.dy2static.program_translator import ASTStaticFunction, StaticFunction

from padiff.frameworks.base import MATRICES, Each, compared, evaluating_in
from padiff.frameworks.settings import plain_settings, warn_of_compiled

#: An attribute of parameters whose memory the third stage of group sharding releases between the layer's calls.
_SLICED = "fw_storage"
# paddle keeps a BatchNorm's running statistics among the layer's parameters; they are buffers in every other respect.
_STATISTICS = frozenset({"_mean", "_variance"})


def is_model(value: Any) -> bool:
    return isinstance(value, paddle.nn.Layer)


#: Class name of a wrapper -> the attribute with the wrapped layer. Names, so that nothing has to be imported.
_INSIDE = {
    "DataParallel": "_layers",
    "TensorParallel": "_layers",
    "ShardingParallel": "_layers",
    "SegmentParallel": "_layers",
    "GroupShardedStage2": "_layer",
    "GroupShardedStage3": "_layer",
}


def _inside(layer: Any) -> Any:
    """Return the user's own layer inside a wrapper; any other layer itself."""
    name = _INSIDE.get(type(layer).__name__)
    if name is None or not type(layer).__module__.startswith("paddle."):
        return layer
    inner = layer._sub_layers.get(name)
    return layer if inner is None else inner


def unwrap(model: Any) -> Any:
    while (inside := _inside(model)) is not model:
        model = inside
    # With full_graph=False (the default) paddle calls hooks of sublayers with values, so all layers are recorded.
    paths = [
        path
        for path, layer in model.named_sublayers(include_self=True)
        if isinstance(vars(layer).get("forward"), ASTStaticFunction) and any(True for _ in layer.children())
    ]
    warn_of_compiled(paths, "to_static(full_graph=True)", "call paddle.jit.enable_to_static(False) before it")
    return model


def children(layer: Any) -> Iterator[tuple[str, Any]]:
    # Not named_children(): it omits repeats, but a shared layer is recorded under all of its paths.
    for name, child in layer._sub_layers.items():
        if child is not None:
            yield name, _inside(child)


def parameters(layer: Any) -> Iterator[tuple[str, Any, str]]:
    normalisation = "norm" in kind(layer)
    for slot, tensor in layer._parameters.items():
        if tensor is not None and (tensor._is_initialized() or hasattr(tensor, _SLICED)):
            statistics = normalisation and slot in _STATISTICS
            yield slot, tensor, "buffer" if statistics else "parameter"
    for slot, tensor in layer._buffers.items():
        # An RNN holds an uninitialised buffer for cuDNN's dropout state.
        if tensor is not None and tensor._is_initialized():
            yield slot, tensor, "buffer"


def computed(layer: Any) -> Collection[str]:
    return layer._non_persistable_buffer_names_set


def watch(layers: Sequence[Any]) -> Each:
    return compared(_held, layers)


def _held(layers: Sequence[Any]) -> Any:
    names: list[Any] = []
    members: list[Any] = []
    about: list[Any] = []
    for layer in layers:
        parameters, buffers, children = layer._parameters, layer._buffers, layer._sub_layers
        names += children
        names.append(len(parameters))
        names += parameters
        names.append(len(buffers))
        names += buffers
        members += children.values()
        members += parameters.values()
        members += buffers.values()
        about += [None if t is None else t._is_initialized() and tuple(t.shape) for t in parameters.values()]
        about += [None if t is None else t._is_initialized() for t in buffers.values()]
    return names, list(map(id, members)), list(map(type, members)), about


def is_builtin(layer: Any) -> bool:
    if "forward" in vars(layer):
        return isinstance(vars(layer)["forward"], StaticFunction)
    return str(getattr(layer.forward, "__module__", "")).startswith("paddle.")


def sharded(layer: Any) -> bool:
    return any(hasattr(tensor, _SLICED) for tensor in layer._parameters.values() if tensor is not None)


def compiled(layer: Any) -> bool:
    return isinstance(vars(layer).get("forward"), StaticFunction)


def kind(layer: Any) -> str:
    for cls in type(layer).__mro__:
        if cls.__module__.startswith("paddle.") and cls is not paddle.nn.Layer:
            return cls.__name__.lower()
    return type(layer).__name__.lower()


def layout(layer: Any, slot: str) -> str:
    # Linear of `paddle.compat`, which imitates torch's, has the matrix in torch's layout.
    compat = getattr(sys.modules.get("paddle.compat.nn"), "Linear", None)
    if slot not in MATRICES:
        return ""
    if compat is not None and isinstance(layer, compat):
        return "out_in"
    return "in_out" if isinstance(layer, paddle.nn.Linear) else ""


def settings(layer: Any) -> dict[str, Any]:
    values = plain_settings(vars(layer), type(layer))
    if isinstance(getattr(layer, "exclusive", None), bool) and "pool" in kind(layer):
        values["count_include_pad"] = not layer.exclusive
    index = values.get("padding_idx")
    if isinstance(index, int) and index < 0:
        values["padding_idx"] = index + layer._num_embeddings
    if "norm" in kind(layer) and isinstance(values.get("momentum"), float):
        # paddle: running = momentum * running + (1 - momentum) * batch; torch: the other way round.
        values["momentum"] = round(1.0 - values["momentum"], 12)
    if isinstance(values.get("approximate"), bool):
        values["approximate"] = "tanh" if values["approximate"] else "none"
    return values


def evaluating(layers: Iterable[Any]) -> AbstractContextManager[None]:
    return evaluating_in(layers, paddle.no_grad())


def clear_gradients(model: Any) -> None:
    for parameter in model.parameters():
        # Release, not zero: an optimizer skips a parameter without gradient, but steps one with a zero gradient.
        parameter.clear_gradient(False)
