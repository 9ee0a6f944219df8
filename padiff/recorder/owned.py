"""What layers own, and where it is: found once, and again when something of it is another."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from padiff.frameworks.base import Framework
from padiff.model.selection import Node
from padiff.recorder.detail import SKETCH
from padiff.recorder.record_buffer import Known, LevelOf
from padiff.records.alike import Site
from padiff.sketches.sketch import Cut

#: What a record of something owned is: the stage, its place, the dtype, the shape and the number of the call.
About = tuple[str, int, str, tuple[int, ...], int]

# Lists of sites that are kept in mind.
_MOST = 64


class Owner(NamedTuple):
    """A parameter or buffer, and the first layer that reaches it."""

    node: Node
    slot: str
    tensor: Any
    role: str


class Owned:
    """The parameters and buffers of layers, a tied one once, under the first path that reaches it.

    Args:
        nodes: the model's layers.
        owning: paths of those whose parameters are recorded.

    Attributes:
        owners: by the identities of the tensors.
        tensors: these, in the same order.
        index: by identity, the place in that order.
        transposed: of each, whether its samples are of the transposed matrix: they lie as (out, in) in both frameworks.
        sharded: the layers that hold parts of parameters, which are not among these.
    """

    def __init__(self, nodes: Sequence[Node], owning: Collection[str], framework: Framework) -> None:
        self._framework = framework
        self.owners: dict[int, Owner] = {}
        self.sharded: list[Node] = []
        layers = framework.layers
        for node in nodes:
            if node.path not in owning:
                continue
            sharded = layers.sharded(node.layer)
            if sharded:
                self.sharded.append(node)
            for slot, tensor, role in layers.parameters(node.layer):
                if not (sharded and role == "parameter"):
                    self.owners.setdefault(id(tensor), Owner(node, slot, tensor, role))
        self.tensors = [owner.tensor for owner in self.owners.values()]
        self.index = {key: place for place, key in enumerate(self.owners)}
        self.transposed = [layers.layout(owner.node.layer, owner.slot) == "in_out" for owner in self.owners.values()]
        self._memories: list[Any] = [None] * len(self.tensors)
        self._cuts: list[Cut | None] = [None] * len(self.tensors)
        self._sites: dict[tuple[About, ...], list[Site]] = {}
        self._levels: tuple[Any, bool] | None = None

    def training(self) -> list[bool]:
        """Which of them are parameters that a backward gives gradients now."""
        trains = self._framework.tensors.all_trainable(self.tensors)
        return [each and owner.role == "parameter" for each, owner in zip(trains, self.owners.values())]

    def all_sketched(self, levels: LevelOf) -> bool:
        """Whether of all of these, and of their gradients and updates, sketches are kept."""
        if self._levels is None or self._levels[0] is not levels:
            paths = {owner.node.path for owner in self.owners.values()}
            stages = "weight", "grad", "update"
            self._levels = levels, all(levels[path, stage] == SKETCH for path in paths for stage in stages)
        return self._levels[1]

    def cuts(self, places: Sequence[int] | None = None) -> list[Cut | None]:
        """Where the samples of these are now; of all by default. `None` where that is no plain memory of the CPU."""
        tensors, known = self.tensors, self._memories
        if places is None:
            places = range(len(tensors))
        try:
            now = self._framework.tensors.memories([tensors[k] for k in places])
        except Exception:  # of a kind that has no memory, or no shape
            now = [self._memory(tensors[k]) for k in places]
        cuts = self._cuts
        for place, memory in zip(places, now):
            if known[place] != memory or memory is None:
                known[place], cuts[place] = memory, self._cut(place)
        return [cuts[k] for k in places]

    def sites(self, about: Sequence[About], known: Known) -> list[Site]:
        """The sites of records that are made together."""
        key = tuple(about)
        kept = self._sites.get(key)
        if kept is None:
            if len(self._sites) >= _MOST:  # ever other parameters take part
                self._sites.clear()
            owners = list(self.owners.values())
            kept = self._sites[key] = []
            for stage, place, dtype, shape, call in about:
                node, slot, _, _ = owners[place]
                turned, kind = self.transposed[place], type(node.layer).__name__
                kept.append(known.site(Site(node.path, kind, stage, slot, dtype, shape, call, True, turned)))
        return kept

    def _memory(self, tensor: Any) -> Any:
        with suppress(Exception):
            return self._framework.tensors.memory(tensor)
        return None

    def _cut(self, place: int) -> Cut | None:
        with suppress(Exception):
            return self._framework.tensors.cut(self.tensors[place], self.transposed[place])
        return None


class LastOwned:
    """What was owned in the step before."""

    def __init__(self) -> None:
        self._stamp: Any = None
        self._owned: Owned | None = None

    def of(self, stamp: Any, nodes: Sequence[Node], owning: Collection[str], framework: Framework) -> Owned:
        """What is owned now.

        Args:
            stamp: another value once it may be something else (`padiff.frameworks.base.Layers.stamp`, and the paths).
        """
        if self._owned is None or self._stamp != stamp:
            self._stamp, self._owned = stamp, Owned(nodes, owning, framework)
        return self._owned

    def clear(self) -> None:
        """Let go of it: it keeps the parameters."""
        self._stamp = self._owned = None
