"""What layers own, and where it is: found once, and again when something of it is another."""

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
from padiff.recorder.left_out import Left
from padiff.recorder.several import Owner, Several

# Orders of tensors that are kept in mind.
_MOST = 16


class Owned:
    """The parameters and buffers of layers, a tied one once, under the first path that reaches it.

    Args:
        nodes: the model's layers.
        owning: paths of those whose parameters are recorded.

    Attributes:
        owners: by the identities of the tensors.
        tensors: these, in the same order.
        index: by identity, the place in that order.
        is_parameter: of each, True for a parameter, False for a buffer.
        transposed: of each, whether its samples are of the transposed matrix: they lie as (out, in) in both frameworks.
        sharded: the layers that hold parts of parameters of which nothing is known; these are not among the owners.
        pieces: by the identity of a tensor that optimizers step, the keys of the parameters inside of it, each with
            where it begins there and how long it is.
        unplaced: layers with parameters of which it can't be said what this process holds, and why.
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
            held = framework.spread.held(node.layer)
            sharded = not held and layers.sharded(node.layer)
            if sharded:
                self.sharded.append(node)
            for one in held:
                self._own_part(node, one)
            elsewhere = {one.slot for one in held}
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
        #: By the keys, in their order.
        self._several: dict[tuple[int, ...], Several] = {}
        self.all = self._some(tuple(self.owners))
        self._levels: tuple[Any, bool] | None = None

    def training(self) -> list[bool]:
        """Which of them are parameters that a backward gives gradients now."""
        return self._training(self._framework.tensors.all_trainable(self.tensors))

    def gathered_training(self) -> list[bool]:
        """`training`, as of when all of them were last gathered."""
        assert self.all.trains is not None
        return self._training(self.all.trains)

    def _training(self, trains: list[bool]) -> list[bool]:
        if self._held:
            held = [owner.held for owner in self.owners.values()]
            trains = [each if one is None else one.trainable for each, one in zip(trains, held)]
        return [each and parameter for each, parameter in zip(trains, self.is_parameter)]

    def trains(self, key: int) -> bool:
        """Whether one of them is a parameter that a backward gives gradients now."""
        owner = self.owners[key]
        if owner.role != "parameter":
            return False
        return self._framework.tensors.trainable(owner.tensor) if owner.held is None else owner.held.trainable

    def keys_of(self, parameters: Iterable[Any]) -> set[int]:
        """The keys of what tensors that an optimizer steps are, or hold."""
        return {*self.apart(list(parameters))[0]}

    def apart(self, parameters: Sequence[Any], gradients: Sequence[Any] = ()) -> tuple[list[int], Sequence[Any]]:
        """The keys of parameters that an optimizer steps, and their gradients where there are any; of one that holds
        several parameters, those of these.
        """
        pieces = self.pieces
        if gradients:
            there = [gradient is not None for gradient in gradients]
            if not all(there):
                parameters, gradients = list(compress(parameters, there)), list(compress(gradients, there))
        keys = list(map(id, parameters))
        if not pieces or pieces.keys().isdisjoint(keys):
            return keys, gradients
        inside = [pieces.get(key, [(key, 0, 0)]) for key in keys]
        if gradients:
            gradients = [
                gradient[start : start + count] if key in pieces else gradient
                for key, gradient, some in zip(keys, gradients, inside)
                for _, start, count in some
            ]
        return [one for some in inside for one, _, _ in some], gradients

    def several(self, keys: Sequence[int]) -> Several | None:
        """Those with these keys, in this order; `None` where one of them is not known, or is there twice."""
        keys = tuple(keys)
        found = self._several.get(keys)
        if found is None:
            distinct = {*keys}
            if len(distinct) < len(keys) or not self.owners.keys() >= distinct:
                return None
            if len(self._several) >= _MOST:  # ever other parameters take part
                self._several.clear()
            found = self._several[keys] = self._some(keys)
        return found

    def _some(self, keys: tuple[int, ...]) -> Several:
        places, owners = [self.index[key] for key in keys], [self.owners[key] for key in keys]
        return Several(keys, places, owners, [self.transposed[place] for place in places], self._framework)

    def _own_part(self, node: Node, held: Held) -> None:
        """Take what this process holds of a parameter among the owners; nothing of one that it holds nothing of."""
        if held.key in self._seen:
            return
        self._seen.add(held.key)
        try:
            tensor, part = held.local()
        except Exception as error:  # whatever kind of spreading this is, the training goes on
            self.unplaced.append((node, Left.because(error).reason))
            return
        if tensor is None:
            return
        # A tensor of its own is known by its identity; those inside of another one by a number that is no identity.
        key = id(held.stepped) if held.within is None else -(id(held.stepped) << 32) - held.number
        self.owners[key] = Owner(node, held.slot, tensor, "parameter", part, held)
        if held.within is not None:
            self.pieces.setdefault(id(held.stepped), []).append((key, *held.within))

    def all_sketched(self, levels: LevelOf) -> bool:
        """Whether of all of these, and of their gradients and updates, sketches are kept."""
        if self._levels is None or self._levels[0] is not levels:
            paths = {owner.node.path for owner in self.owners.values()}
            stages = "weight", "grad", "update"
            self._levels = levels, all(levels[path, stage] == SKETCH for path in paths for stage in stages)
        return self._levels[1]


def _itself(slot: str, tensor: Any, framework: Framework) -> Held:
    """A parameter that stands on its layer and is spread over processes by its own kind."""
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


class LastOwned:
    """What was owned in the step before."""

    def __init__(self) -> None:
        self._stamp: Any = None
        self._owned: Owned | None = None

    def of(self, stamp: Any, nodes: Sequence[Node], owning: Collection[str], framework: Framework) -> Owned:
        """What is owned now.

        Args:
            stamp: another value once it may be something else (`padiff.recorder.layers.Layers.stamp`, and the paths).
        """
        if self._owned is None or self._stamp != stamp or self._owned.spread:
            self._stamp, self._owned = stamp, Owned(nodes, owning, framework)
        return self._owned

    def clear(self) -> None:
        """Let go of it: it keeps the parameters."""
        self._stamp = self._owned = None
