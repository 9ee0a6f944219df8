"""Parameters and buffers of layers, cached from step to step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from itertools import compress
from typing import Any

from padiff.frameworks.base import Framework
from padiff.frameworks.spreading import Held
from padiff.model.selection import Node
from padiff.recorder.copying import LevelOf
from padiff.recorder.detail import SKETCH
from padiff.recorder.parameter_batch import Owner, ParameterBatch
from padiff.recorder.skip_log import SkippedTensor

# Maximum number of cached `ParameterBatch`, one for each sequence of keys.
_MOST = 16


class ParameterMap:
    """Parameters and buffers of layers. A tied tensor has one entry, under the first path that reaches the tensor.

    Args:
        nodes: the model's layers.
        owning: paths of the layers whose parameters are recorded.

    Attributes:
        owners: owners by key, the identity of the tensor. A parameter inside of a larger tensor has a negative key.
        tensors: the tensors, in the order of ``owners``.
        index: position in that order, by key.
        is_parameter: for each tensor, True for a parameter, False for a buffer.
        transposed: for each tensor, True if its samples are samples of the transposed matrix, so that they lie as
            (out, in) in both frameworks.
        parts: for each tensor, the part of the parameter that this process holds; `None`: all of it.
        sharded: layers whose parameters are sharded in an unknown way; their parameters have no owners.
        pieces: for each tensor that optimizers step and that contains several parameters, by identity: the key, start
            and length of each of these parameters.
        unplaced: layers with parameters whose local part could not be determined, and the reasons.
    """

    def __init__(self, nodes: Sequence[Node], owning: Collection[str], framework: Framework) -> None:
        self._framework = framework
        self.owners: dict[int, Owner] = {}
        self.sharded: list[Node] = []
        self.pieces: dict[int, list[tuple[int, int, int]]] = {}
        self.unplaced: list[tuple[Node, str]] = []
        self._seen: set[tuple[int, int]] = set()
        layers = framework.layers
        for node in nodes:
            if node.path not in owning:
                continue
            held_here = framework.spread.held(node.layer)
            sharded = not held_here and layers.sharded(node.layer)
            if sharded:
                self.sharded.append(node)
            for piece in held_here:
                self._own_part(node, piece)
            elsewhere = {piece.slot for piece in held_here}
            for slot, tensor, role in layers.parameters(node.layer):
                if slot in elsewhere or (sharded and role == "parameter"):
                    continue
                if role == "parameter" and framework.spread.is_spread(tensor):
                    self._own_part(node, _itself(slot, tensor, framework))
                else:
                    self.owners.setdefault(id(tensor), Owner(node, slot, tensor, role))
        self.spread = any(owner.part is not None for owner in self.owners.values())
        self._held = any(owner.held is not None for owner in self.owners.values())
        self.is_parameter = [owner.role == "parameter" for owner in self.owners.values()]
        self.tensors = [owner.tensor for owner in self.owners.values()]
        self.index = {key: place for place, key in enumerate(self.owners)}
        self.transposed = [layers.layout(owner.node.layer, owner.slot) == "in_out" for owner in self.owners.values()]
        self.parts = [owner.part for owner in self.owners.values()]
        #: Groups of tensors by their keys, in order.
        self._several: dict[tuple[int, ...], ParameterBatch] = {}
        self.all = self._some(tuple(self.owners))
        self._levels: tuple[Any, bool] | None = None

    def training(self) -> list[bool]:
        """Return a flag per tensor: True for a parameter that receives gradients from backward now."""
        return self._training(self._framework.tensors.all_trainable(self.tensors))

    def gathered_training(self) -> list[bool]:
        """Return the flags of `training` as of the last gathering of all tensors."""
        assert self.all.trains is not None
        return self._training(self.all.trains)

    def _training(self, trains: list[bool]) -> list[bool]:
        if self._held:
            shards = [owner.held for owner in self.owners.values()]
            trains = [each if shard is None else shard.trainable for each, shard in zip(trains, shards)]
        return [each and parameter for each, parameter in zip(trains, self.is_parameter)]

    def trains(self, key: int) -> bool:
        """Return True if a tensor is a parameter that receives gradients from backward now."""
        owner = self.owners[key]
        if owner.role != "parameter":
            return False
        return self._framework.tensors.trainable(owner.tensor) if owner.held is None else owner.held.trainable

    def keys_of(self, parameters: Iterable[Any]) -> set[int]:
        """Return the keys of the tensors that an optimizer steps, or of the parameters inside of these tensors."""
        return {*self.apart(list(parameters))[0]}

    def apart(self, parameters: Sequence[Any], gradients: Sequence[Any] = ()) -> tuple[list[int], Sequence[Any]]:
        """Return the keys and gradients of parameters that an optimizer steps.

        A tensor that contains several parameters is replaced by these, and its gradient is cut accordingly. If
        ``gradients`` is not empty, parameters whose gradient is `None` are left out.
        """
        pieces = self.pieces
        if gradients:
            present = [gradient is not None for gradient in gradients]
            if not all(present):
                parameters, gradients = list(compress(parameters, present)), list(compress(gradients, present))
        keys = list(map(id, parameters))
        if not pieces or pieces.keys().isdisjoint(keys):
            return keys, gradients
        inside = [pieces.get(key, [(key, 0, 0)]) for key in keys]
        if gradients:
            gradients = [
                gradient[start : start + count] if key in pieces else gradient
                for key, gradient, spans in zip(keys, gradients, inside)
                for _, start, count in spans
            ]
        return [span_key for spans in inside for span_key, _, _ in spans], gradients

    def several(self, keys: Sequence[int]) -> ParameterBatch | None:
        """Return the tensors with these keys, in this order, or None if a key is unknown or repeated."""
        keys = tuple(keys)
        group = self._several.get(keys)
        if group is None:
            distinct = {*keys}
            if len(distinct) < len(keys) or not self.owners.keys() >= distinct:
                return None
            if len(self._several) >= _MOST:  # the set of parameters keeps changing
                self._several.clear()
            group = self._several[keys] = self._some(keys)
        return group

    def _some(self, keys: tuple[int, ...]) -> ParameterBatch:
        places, owners = [self.index[key] for key in keys], [self.owners[key] for key in keys]
        return ParameterBatch(keys, places, owners, [self.transposed[place] for place in places], self._framework)

    def _own_part(self, node: Node, shard: Held) -> None:
        """Add the local part of a parameter to the owners, if this process holds any of the parameter."""
        if shard.key in self._seen:
            return
        self._seen.add(shard.key)
        try:
            tensor, part = shard.local()
        except Exception as error:  # an unknown kind of sharding must not stop the training
            self.unplaced.append((node, SkippedTensor.because(error).reason))
            return
        if tensor is None:
            return
        # The key of a separate tensor is its identity; a parameter inside of another tensor gets a negative key.
        key = id(shard.stepped) if shard.within is None else -(id(shard.stepped) << 32) - shard.number
        self.owners[key] = Owner(node, shard.slot, tensor, "parameter", part, shard)
        if shard.within is not None:
            self.pieces.setdefault(id(shard.stepped), []).append((key, *shard.within))

    def all_sketched(self, levels: LevelOf) -> bool:
        """Return True if all weights, gradients and updates are recorded as sketches."""
        if self._levels is None or self._levels[0] is not levels:
            paths = {owner.node.path for owner in self.owners.values()}
            stages = "weight", "grad", "update"
            self._levels = levels, all(levels[path, stage] == SKETCH for path in paths for stage in stages)
        return self._levels[1]


def _itself(slot: str, tensor: Any, framework: Framework) -> Held:
    """Return the shard of a parameter that is a distributed tensor set on its layer."""
    tensors = framework.tensors
    return Held(
        slot,
        tensors.shape(tensor),
        tensors.dtype(tensor),
        tensors.trainable(tensor),
        tensor,
        None,
        partial(framework.spread.local, tensor),
        lambda: tensor.grad,
        heard=True,
    )


class ParameterMapCache:
    """Cache of the parameter map of the previous step."""

    def __init__(self) -> None:
        self._stamp: Any = None
        self._owned: ParameterMap | None = None

    def current(self, stamp: Any, nodes: Sequence[Node], owning: Collection[str], framework: Framework) -> ParameterMap:
        """Return the current parameter map: the cached one if the stamp is unchanged and no parameter is distributed.

        Args:
            stamp: value that changes when the map may change (`padiff.recorder.layers.Layers.stamp`, and the paths).
        """
        if self._owned is None or self._stamp != stamp or self._owned.spread:
            self._stamp, self._owned = stamp, ParameterMap(nodes, owning, framework)
        return self._owned

    def clear(self) -> None:
        """Drop the cached map, which holds references to the parameters."""
        self._stamp = self._owned = None
