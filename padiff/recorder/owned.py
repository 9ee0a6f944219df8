"""What layers own, and where it is: found once, and again when something of it is another."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from padiff.frameworks.base import Framework
from padiff.frameworks.spreading import Held
from padiff.model.selection import Node
from padiff.recorder.copying import LevelOf
from padiff.recorder.detail import SKETCH
from padiff.recorder.gathered import Gathered, Lies, Pieces, gathered_of
from padiff.recorder.known import Known
from padiff.recorder.left_out import Left
from padiff.records.alike import Site
from padiff.records.parts import Part

#: What a record of something owned is: the stage, its place, the dtype, the shape and the number of the call.
About = tuple[str, int, str, tuple[int, ...], int]

#: Bytes of an element from which on updates are kept in the dtype of the parameter.
WIDE = 4
# Lists of sites that are kept in mind.
_MOST = 64
# Tensors that are asked at a time: so many answers that the garbage collector is not called because of them.
_AT_ONCE = 100


class Owner(NamedTuple):
    """A parameter or buffer, and the first layer that reaches it.

    Attributes:
        tensor: of one that is spread over processes, what this one holds, as a plain tensor.
        part: which part of the whole that is; `None`: all of it.
        held: how it is spread; `None`: it is not.
    """

    node: Node
    slot: str
    tensor: Any
    role: str
    part: Part | None = None
    held: Held | None = None


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
        self._parameters = [owner.role == "parameter" for owner in self.owners.values()]
        self.tensors = [owner.tensor for owner in self.owners.values()]
        self.index = {key: place for place, key in enumerate(self.owners)}
        self.transposed = [layers.layout(owner.node.layer, owner.slot) == "in_out" for owner in self.owners.values()]
        self.parts = [owner.part for owner in self.owners.values()]
        self._memories: list[Any] = [None] * len(self.tensors)
        self._lies: list[Lies | None] = [None] * len(self.tensors)
        #: As long as dtypes and shapes are what they were.
        self._of_weights: list[Site] | None = None
        self._of_steps: dict[Any, list[Site]] = {}
        self._gathered: dict[tuple[int, ...], Gathered | None] = {}
        self._all = tuple(range(len(self.tensors)))
        self._levels: tuple[Any, bool] | None = None

    def training(self) -> list[bool]:
        """Which of them are parameters that a backward gives gradients now."""
        trains = self._framework.tensors.all_trainable(self.tensors)
        if self._held:
            held = [owner.held for owner in self.owners.values()]
            trains = [each if one is None else one.trainable for each, one in zip(trains, held)]
        return [each and parameter for each, parameter in zip(trains, self._parameters)]

    def trains(self, key: int) -> bool:
        """Whether one of them is a parameter that a backward gives gradients now."""
        owner = self.owners[key]
        if owner.role != "parameter":
            return False
        return self._framework.tensors.trainable(owner.tensor) if owner.held is None else owner.held.trainable

    def keys_of(self, parameters: Iterable[Any]) -> set[int]:
        """The keys of what tensors that an optimizer steps are, or hold."""
        pieces = self.pieces
        found: set[int] = set()
        for parameter in parameters:
            found.update([key for key, _, _ in pieces[id(parameter)]] if id(parameter) in pieces else [id(parameter)])
        return found

    def apart(self, pairs: Iterable[tuple[Any, Any]]) -> Iterable[tuple[Any, Any]]:
        """Parameters that an optimizer steps, with their gradients; one that holds several, as keys of these."""
        pieces = self.pieces
        if not pieces:
            return pairs
        return (
            one
            for parameter, gradient in pairs
            for one in (
                [(key, gradient[start : start + count]) for key, start, count in pieces[id(parameter)]]
                if gradient is not None and id(parameter) in pieces
                else [(parameter, gradient)]
            )
        )

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

    def gathered(self, places: Sequence[int] | None = None) -> Gathered | None:
        """Where the samples of these are now; of all by default. `None` where that can't be said."""
        places = self._all if places is None else tuple(places)
        for start in range(0, len(places), _AT_ONCE):
            self._look(places[start : start + _AT_ONCE])
        return self.gathered_before(places)

    def gathered_before(self, places: tuple[int, ...]) -> Gathered | None:
        """Where they were when they were last looked for."""
        if places not in self._gathered:
            if len(self._gathered) >= _MOST:  # ever other parameters take part
                self._gathered.clear()
            transposed, tensors = [self.transposed[k] for k in places], [self.tensors[k] for k in places]
            lies = [self._lies[k] for k in places]
            self._gathered[places] = gathered_of(lies, self._framework.tensors, transposed, tensors)
        return self._gathered[places]

    def _look(self, places: Sequence[int]) -> None:
        """See where the memory of these is now."""
        known, tensors = self._memories, [self.tensors[k] for k in places]
        try:
            now = self._framework.tensors.memories(tensors)
        except Exception:  # of a kind that has no memory, or no shape
            now = [self._memory(tensor) for tensor in tensors]
        if now == [known[k] for k in places] and None not in now:
            return
        for place, memory in zip(places, now):
            if known[place] != memory or memory is None:
                known[place], self._lies[place] = memory, self._where(place)
                self._of_weights = None
                self._of_steps.clear()
                self._gathered.clear()

    def weight_sites(self, known: Known) -> list[Site]:
        """The sites of the weights, all of them as they are where they were last looked for (`gathered`)."""
        if self._of_weights is None:
            about = [("weight", k, lies.dtype, lies.shape, 0) for k, lies in enumerate(self._lies) if lies is not None]
            self._of_weights = self._made(about, known)
        return self._of_weights

    def stepped_sites(self, places: Sequence[int], calls: Sequence[int], known: Known) -> list[Site]:
        """The sites of gradients that are as their parameters, and of updates, in turn.

        Args:
            places, calls: whose, and which of its steps within the step.
        """
        key = tuple(places), tuple(calls)
        kept = self._of_steps.get(key)
        if kept is None:
            about: list[About] = []
            for place, call in zip(places, calls):
                lies = self._lies[place]
                assert lies is not None
                about.append(("grad", place, lies.dtype, lies.shape, call))
                # The difference of two neighbours in 16 bits is kept in more.
                dtype = "float32" if lies.itemsize < WIDE else lies.dtype
                about.append(("update", place, dtype, lies.shape, call))
            kept = self._made(about, known)
            if len(self._of_steps) >= _MOST:  # ever other parameters take part
                self._of_steps.clear()
            self._of_steps[key] = kept
        return kept

    def _made(self, about: Sequence[About], known: Known) -> list[Site]:
        owners, sites = list(self.owners.values()), []
        for stage, place, dtype, shape, call in about:
            node, slot = owners[place][:2]
            kind = type(node.layer).__name__
            transposed = self.transposed[place]
            sites.append(known.site(Site(node.path, kind, stage, slot, dtype, shape, call, True, transposed)))
        return sites

    def _memory(self, tensor: Any) -> Any:
        with suppress(Exception):
            return self._framework.tensors.memory(tensor)
        return None

    def _where(self, place: int) -> Lies | None:
        if self.parts[place] is not None:
            return None  # where the whole's sample lies in a part, its shape does not tell
        tensors, tensor, transposed = self._framework.tensors, self.tensors[place], self.transposed[place]
        with suppress(Exception):
            cut = tensors.cut(tensor, transposed)
            if cut is not None or not tensors.JOINS or tensors.device(tensor) == "cpu":
                return cut
            itemsize = int(tensor.element_size())
            return Pieces(tensors.dtype(tensor), tensors.shape(tensor), itemsize, tensors.pieces(tensor, transposed))
        return None


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
            stamp: another value once it may be something else (`padiff.frameworks.base.Layers.stamp`, and the paths).
        """
        if self._owned is None or self._stamp != stamp or self._owned.spread:
            self._stamp, self._owned = stamp, Owned(nodes, owning, framework)
        return self._owned

    def clear(self) -> None:
        """Let go of it: it keeps the parameters."""
        self._stamp = self._owned = None
