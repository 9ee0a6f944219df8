"""Weights, the gradients that the optimizer consumed, and what it did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from padiff.model.selection import Node
from padiff.recorder.detail import NOTHING, SKETCH
from padiff.recorder.layers import FixedLayers, Layers
from padiff.recorder.left_out import Left
from padiff.recorder.record_buffer import LevelOf, RecordBuffer, Sampled, Taken, Whole
from padiff.records import LOOP
from padiff.sketches.sketch import Cut, cut_of

# How many parameters are looked at to see whether something stepped, or holds gradients.
_LOOKED_AT = 8
# Elements of a gradient that are looked at.
_ELEMENTS = 4096
_EXCHANGED = "the optimizer steps with another tensor than the one that the layer was called with"
_SHARDED = "FSDP spreads them over the processes: this one holds a part of each"


class View(NamedTuple):
    """A parameter's own memory.

    Attributes:
        tensor: the parameter.
        memory: what `Tensors.memory` said when this was made; it is of no use any more when that says something else.
        dtype, shape: of the parameter.
        transposed: whether its sketch is of the transposed matrix.
        cut: where its sample is, if it is plain memory of the CPU.
    """

    tensor: Any
    memory: Any
    dtype: str
    shape: tuple[int, ...]
    transposed: bool
    cut: Cut | None


class Parameters:
    """Records what the chosen layers own, over one step.

    Without an optimizer, gradients are what the parameters hold at the end of the step or, where they were cleared,
    what the backwards of the step added up to.

    Args:
        records: where records go.
        layers: the model's layers, and which of them own what is recorded.
        optimizers: those whose gradients and updates are recorded.
        levels: how much is kept of each.
        views: where parameters' memory is, known from the steps before and kept for those to come.
    """

    def __init__(
        self,
        records: RecordBuffer,
        layers: Layers | FixedLayers,
        optimizers: Sequence[Any],
        levels: LevelOf,
        views: dict[int, View] | None,
    ) -> None:
        self._records = records
        self._framework, self._tensors = layers.framework, layers.framework.tensors
        self._optimizers = optimizers
        self._levels = levels
        self._views = {} if views is None else views
        self._before: dict[int, Taken] = {}
        self._consumed: dict[int, Taken | Left | None] = {}
        self._sums: dict[int, Taken | Left] = {}
        #: Which had gradients of which nothing is kept.
        self._unseen: set[int] = set()
        self._steps: Counter[int] = Counter()
        self._rates_seen: set[int] = set()
        self._snapped = self._late = self._closed = False
        #: Whether parameters of the optimizers are others than before, though none of these took a step.
        self.moved_unseen = False
        self._stepped = False
        #: How often each optimizer has stepped.
        self._taken: Counter[int] = Counter()
        self._nodes, self._owning = layers.nodes, layers.owning

    @cached_property
    def _owners(self) -> dict[int, tuple[Node, str, Any, str]]:
        """By identity: a tied parameter once, under the first path that reaches it.

        As they are when they are first asked for, in the step's first call: between two steps they may become others.
        """
        owners: dict[int, tuple[Node, str, Any, str]] = {}
        for node in self._nodes:
            if node.path not in self._owning:
                continue
            sharded = self._framework.layers.sharded(node.layer)
            for slot, tensor, role in self._framework.layers.parameters(node.layer):
                if not (sharded and role == "parameter"):
                    owners.setdefault(id(tensor), (node, slot, tensor, role))
        return owners

    @property
    def steps_taken(self) -> int:
        """How often the optimizer that stepped most often did."""
        return max(self._taken.values(), default=0)

    def look_again(self) -> bool:
        """Record what came into being in the step's first call; whether anything did."""
        if not self._snapped:
            return False
        known = self.__dict__.pop("_owners")
        new = [key for key in self._owners if key not in known]
        for key in new:
            self._snapshot_of(key)
        return bool(new)

    def follow(self, layers: Layers | FixedLayers) -> None:
        """Go on with other layers; nothing was recorded yet."""
        self._nodes, self._owning = layers.nodes, layers.owning
        self.__dict__.pop("_owners", None)
        self._consumed = {key: taken for key, taken in self._consumed.items() if key in self._owners}

    def trainable(self) -> list[tuple[int, Any]]:
        """The parameters that a backward gives gradients, with their identities."""
        return [
            (key, tensor)
            for key, (_, _, tensor, role) in self._owners.items()
            if role == "parameter" and self._tensors.trainable(tensor)
        ]

    def gradients_left(self) -> bool:
        """Whether parameters hold gradients that are not zero, as the step's first backward begins; some of them tell.

        Not where several optimizers step: each may clear its own gradients later.
        """
        if len(self._optimizers) != 1:
            return False
        optimized = self._framework.optimizers.optimized(self._optimizers[0])
        held = [tensor for tensor in optimized if tensor.grad is not None]
        for tensor in held[:: max(1, len(held) // _LOOKED_AT)]:
            try:
                if bool((tensor.grad.reshape([-1])[:_ELEMENTS] != 0).any()):
                    return True
            except Exception:  # of a kind that has no values to look at
                continue
        return False

    def snapshot_later(self) -> None:
        """Record weights and buffers before an optimizer steps, if `snapshot` is not called before."""
        self._late = True

    def snapshot(self) -> None:
        """Record weights and buffers as they are, once a step."""
        if self._snapped:
            return
        self._snapped = True
        self._note_sharded()
        for key in self._owners:
            self._snapshot_of(key)

    def _snapshot_of(self, key: int) -> None:
        node, slot, tensor, role = self._owners[key]
        level, later = self._levels(node.path, "weight"), self._levels(node.path, "update")
        taken = self._take(key, level) if level != NOTHING else None
        if taken is not None:
            self._records.write(node, "weight", slot, taken, 0)
        if role == "parameter" and later != NOTHING and self._tensors.trainable(tensor):
            # Compared as it is kept: a sample with a sample.
            before = taken if taken is not None and taken.level == later else self._take(key, later)
            if not isinstance(before, Left):
                self._before[key] = before

    def _note_sharded(self) -> None:
        for node in self._nodes:
            wanted = any(self._levels(node.path, stage) != NOTHING for stage in ("weight", "grad", "update"))
            if wanted and node.path in self._owning and self._framework.layers.sharded(node.layer):
                for _, _, role in self._framework.layers.parameters(node.layer):
                    if role == "parameter":
                        self._records.left_out.add(node.path, _SHARDED, training=True, what="parameter")

    def finish(self, updates: bool = True) -> None:
        """Record what is not recorded yet; without ``updates`` no optimizer has stepped."""
        if not self._optimizers:
            self._take_what_is_there()
        if not updates:
            self._before.clear()
        if self._optimizers and not self._stepped:
            self.moved_unseen = self._moved()
        self._record(self._consumed)
        self._before.clear()
        self._closed = True

    # -- hooks ---------------------------------------------------------------------------------------------

    def add(self, key: int, gradient: Any) -> None:
        if self._closed or gradient is None or key not in self._owners:
            return
        level = self._level(key, "grad")
        if level == NOTHING:
            self._unseen.add(key)
        else:
            taken = self._take(key, level, gradient)
            known = self._sums.get(key)
            if known is None or isinstance(taken, Left):
                self._sums[key] = taken
            elif not isinstance(known, Left):
                known.add(taken)

    def consume(self, optimizer: Any, pairs: Iterable[tuple[Any, Any]]) -> None:
        self._stepped = True
        if self._late:
            self.snapshot()
        unknown = set()
        for parameter, gradient in pairs:
            key = id(parameter)
            if gradient is None:
                continue
            if key in self._owners:
                level = self._level(key, "grad")
                self._consumed[key] = self._take(key, level, gradient) if level != NOTHING else None
            else:
                unknown.add(key)
        if unknown:
            self._note_exchanged(unknown)
        if id(optimizer) not in self._rates_seen:
            self._rates_seen.add(id(optimizer))
            for rate in self._framework.optimizers.learning_rates(optimizer):
                known = self._records.count(LOOP, "update")
                self._records.scalar("update", f"learning_rate.{known}" if known else "learning_rate", rate, 0)

    def stepped(self, optimizer: Any) -> None:
        self._stepped = True
        self._taken[id(optimizer)] += 1
        its = {id(parameter) for parameter in self._framework.optimizers.optimized(optimizer)}
        self._record([key for key in self._consumed if key in its])

    def _note_exchanged(self, keys: Collection[int]) -> None:
        """Note which of an optimizer's parameters stand now where others stood in the step's first call."""
        kept = (owner for key, owner in self._owners.items() if self._level(key, "grad") != NOTHING)
        known = {(node.path, slot) for node, slot, _, _ in kept}
        for node in self._nodes:
            for slot, tensor, _ in self._framework.layers.parameters(node.layer):
                if id(tensor) in keys and (node.path, slot) in known:
                    self._records.left_out.add(node.path, _EXCHANGED, training=True, what="gradient")

    def _moved(self) -> bool:
        """Whether parameters of the optimizers have changed since the step began; some of them tell."""
        optimized = self._framework.optimizers.optimized
        stepping = {id(parameter) for optimizer in self._optimizers for parameter in optimized(optimizer)}
        keys = [key for key in self._before if key in stepping]
        some = keys[:: max(1, len(keys) // _LOOKED_AT)]
        now = {key: self._take(key, self._before[key].level) for key in some}
        return any(not isinstance(taken, Left) and not _same(taken, self._before[key]) for key, taken in now.items())

    # -- records -------------------------------------------------------------------------------------------

    def _level(self, key: int, stage: str) -> str:
        return self._levels(self._owners[key][0].path, stage)

    def _take(self, key: int, level: str, tensor: Any = None) -> Taken | Left:
        """Copy a parameter, or a tensor of its shape; samples of matrices lie as (out, in) in both frameworks."""
        node, slot, parameter, _ = self._owners[key]
        tensor = parameter if tensor is None else tensor
        if level != SKETCH:
            return self._records.take(tensor, level)
        view = self._views.get(key)
        try:
            if view is None or view.tensor is not parameter or view.memory != self._tensors.memory(parameter):
                view = self._views[key] = self._view(node, slot, parameter)
        except Exception:  # of a kind that has no memory, or no shape; `take` says what to make of it
            return self._records.take(tensor, level)
        if view.cut is not None and tensor is parameter:
            return self._records.take_cut(view.dtype, view.shape, view.cut, view.transposed)
        return self._records.take(tensor, level, view.transposed)

    def _view(self, node: Node, slot: str, parameter: Any) -> View:
        tensors = self._tensors
        transposed = self._framework.layers.layout(node.layer, slot) == "in_out"
        live = tensors.live(parameter)
        cut = cut_of(live, transposed) if live is not None and live.dtype.kind != "c" else None
        about = tensors.dtype(parameter), tensors.shape(parameter)
        return View(parameter, tensors.memory(parameter), *about, transposed, cut)

    def _record(self, keys: Iterable[int]) -> None:
        """Turn consumed gradients, and what the step then did to the parameters, into records."""
        for key in list(keys):
            taken = self._consumed.pop(key)
            node, slot, tensor, _ = self._owners[key]
            call = self._steps[key]
            self._steps[key] += 1
            if taken is not None:
                self._records.write(node, "grad", slot, taken, call)
            before = self._before.get(key)
            if before is not None and before.shape == self._tensors.shape(tensor):
                after = self._take(key, before.level)
                if isinstance(after, Left):
                    del self._before[key]
                    self._records.write(node, "update", slot, after, call)
                    continue
                self._before[key] = after
                dtype = after.dtype if tensor.element_size() >= 4 else "float32"
                self._records.put(node, "update", slot, after.less(before), dtype, after.shape, call)

    def _take_what_is_there(self) -> None:
        for key, tensor in self.trainable():
            gradient = tensor.grad
            level = self._level(key, "grad")
            if level == NOTHING:
                if gradient is not None or key in self._unseen:
                    self._consumed[key] = None  # its update is recorded
                continue
            taken = None if gradient is None else self._take(key, level, gradient)
            if taken is None or taken.zero:
                taken = self._sums.get(key, taken)  # cleared already
            if taken is not None:
                self._consumed[key] = taken
        self._sums.clear()


def _same(one: Taken, other: Taken) -> bool:
    """Whether two copies of a parameter hold the same values."""
    if isinstance(one, Sampled) and isinstance(other, Sampled):
        return one.samples.equal(one.number, other.number)
    assert isinstance(one, Whole) and isinstance(other, Whole)
    return one.values.tobytes() == other.values.tobytes()
