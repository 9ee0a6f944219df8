"""Parameters and buffers of layers, cached from step to step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

from padiff.frameworks.base import Framework, Held
from padiff.model.selection import Node
from padiff.recorder.copying import Gather, LevelOf, Lies, Pieces, gather_of
from padiff.recorder.options import SKETCH
from padiff.recorder.tensor_copy import SkippedTensor, StepCache
from padiff.records.recorded import Part
from padiff.records.step_schema import Site
from padiff.system.guard import Tolerated

#: Minimum element size, in bytes, for which updates have the dtype of the parameter; smaller ones are in float32.
WIDE = 4
# Maximum number of cached lists of sites.
_BATCH_MOST = 64


class Owner(NamedTuple):
    """A parameter or buffer, and the first layer that reaches it.

    Attributes:
        node, slot: first layer that reaches the tensor, and its slot there.
        tensor: the tensor; for a distributed parameter, the local part as a plain tensor.
        role: ``"parameter"``, or another role for a buffer.
        part: part of the whole parameter that the tensor is; `None`: all of it.
        held: distribution of the parameter over processes; `None` if it is not distributed.
    """

    node: Node
    slot: str
    tensor: Any
    role: str
    part: Part | None = None
    held: Held | None = None


class ParameterBatch:
    """A sequence of parameters and buffers that are sampled together.

    Args:
        keys, places: keys and positions of the tensors in `padiff.recorder.parameter_map.ParameterMap`.
        owners: owner of each tensor.
        transposed: for each tensor, True if its samples are samples of the transposed matrix.

    Attributes:
        keys, places, transposed: the arguments.
        trains: for each tensor, True if it was trainable at the last call of `gathered`; `None` before the first call.
    """

    def __init__(
        self,
        keys: Sequence[int],
        places: Sequence[int],
        owners: Sequence[Owner],
        transposed: Sequence[bool],
        framework: Framework,
    ) -> None:
        self.keys, self.places, self.transposed = keys, places, transposed
        self._owners, self._tensors = owners, framework.tensors
        self._given = [owner.tensor for owner in owners]
        self.trains: list[bool] | None = None
        self._memories: list[Any] = [None] * len(owners)
        self._lies: list[Lies | None] = [None] * len(owners)
        self._gathered: Gather | None = None
        self._watch = self._tensors.watch(self._given)
        #: Cached sites, valid as long as the memory of the tensors is unchanged.
        self._of_weights: list[Site] | None = None
        self._of_steps: dict[tuple[int, ...], list[Site]] = {}

    def gathered(self) -> Gather | None:
        """Return the current memory layout of the samples, or None if the tensors cannot be sampled together."""
        if self.trains is not None and self._watch.same():
            return self._gathered
        changed = self.trains is None
        for place, (tensor, before) in enumerate(zip(self._given, self._memories)):
            memory = self._memory(tensor)
            if memory is None or memory != before:
                self._memories[place], self._lies[place], changed = memory, self._where(place), True
        trains = self._tensors.all_trainable(self._given)
        self._watch.note(unchanged=not changed and trains == self.trains)
        self.trains = trains
        if changed:
            self._of_weights = None
            self._of_steps.clear()
            self._gathered = gather_of(self._lies, self._tensors, self.transposed, self._given)
        return self._gathered

    def gathered_before(self) -> Gather | None:
        """Return the memory layout of the last call of `gathered`, which is called if it never was."""
        return self.gathered() if self.trains is None else self._gathered

    def weight_sites(self, known: StepCache) -> list[Site]:
        """Return the sites of the weights, with the dtypes and shapes of the last call of `gathered`."""
        if self._of_weights is None:
            self._of_weights = [
                self._site(place, "weight", lies.dtype, 0, known)
                for place, lies in enumerate(self._lies)
                if lies is not None
            ]
        return self._of_weights

    def stepped_sites(self, calls: tuple[int, ...], known: StepCache) -> list[Site]:
        """Return the sites of gradients and updates, in turn. Gradients have the dtypes and shapes of the parameters.

        Args:
            calls: for each tensor, number of the optimizer's step within the recorded step.
        """
        sites = self._of_steps.get(calls)
        if sites is None:
            sites = []
            for place, (lies, call) in enumerate(zip(self._lies, calls)):
                assert lies is not None
                # Updates of 16-bit weights are stored in float32, as the difference of neighbours would be rounded.
                dtype = "float32" if lies.itemsize < WIDE else lies.dtype
                sites.append(self._site(place, "grad", lies.dtype, call, known))
                sites.append(self._site(place, "update", dtype, call, known))
            if len(self._of_steps) >= _BATCH_MOST:
                self._of_steps.clear()
            self._of_steps[calls] = sites
        return sites

    def _site(self, place: int, stage: str, dtype: str, call: int, cache: StepCache) -> Site:
        (node, slot, *_), lies, transposed = self._owners[place], self._lies[place], self.transposed[place]
        assert lies is not None
        return cache.site(
            Site(node.path, type(node.layer).__name__, stage, slot, dtype, lies.shape, call, True, transposed)
        )

    def _memory(self, tensor: Any) -> Any:
        with Tolerated():
            return self._tensors.memory(tensor)
        return None

    def _where(self, place: int) -> Lies | None:
        if self._owners[place].part is not None:
            return None  # the shape of a part does not determine which of its elements are sampled
        tensors, tensor, transposed = self._tensors, self._given[place], self.transposed[place]
        with Tolerated():
            cut = tensors.cut(tensor, transposed)
            if cut is not None or not tensors.JOINS or tensors.device(tensor) == "cpu":
                return cut
            itemsize = int(tensor.element_size())
            return Pieces(tensors.dtype(tensor), tensors.shape(tensor), itemsize, tensors.pieces(tensor, transposed))
        return None


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
