"""Record weights, the gradients that optimizers consume, and the updates of the weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from typing import Any

from padiff.frameworks.base import Framework
from padiff.recorder.copying import Kinds, LevelOf
from padiff.recorder.layers import FixedLayers, Layers
from padiff.recorder.options import NOTHING, SKETCH
from padiff.recorder.parameter_map import WIDE, Owner, ParameterBatch, ParameterMap, ParameterMapCache
from padiff.recorder.record_buffer import RecordBuffer
from padiff.recorder.tensor_copy import Sampled, SkippedTensor, TensorCopy, Whole
from padiff.records.recorded import Part
from padiff.system.guard import reraise_from_signal_handler


@dataclass(slots=True)
class Batch:
    """Samples of all parameters and buffers, copied together. Each attribute has one item per tensor.

    Attributes:
        numbers: numbers of the samples.
        dtypes, shapes: dtypes and shapes of the tensors at the time of the copy.
        trains: True for parameters that an optimizer may change.
    """

    numbers: list[int]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    trains: list[bool]

    def kinds_at(self, places: Sequence[int]) -> Kinds:
        """Return the dtypes and shapes of the tensors at some places."""
        dtypes, shapes = self.dtypes, self.shapes
        return [dtypes[k] for k in places], [shapes[k] for k in places]


class Copies:
    """Copier of parameters and buffers, and of tensors with the same shapes, such as gradients."""

    def __init__(self, records: RecordBuffer, framework: Framework) -> None:
        self._records, self._spread = records, framework.spread

    def copy(self, owned: ParameterMap, key: int, level: str, tensor: Any = None) -> TensorCopy | SkippedTensor:
        """Copy a parameter, or a tensor of the same shape.

        Samples of matrices are in (out, in) order in both frameworks.

        Args:
            owned: the parameters and buffers.
            key: key of the parameter.
            level: level of detail of the copy.
            tensor: tensor to copy in place of the parameter.
        """
        records, place = self._records, owned.index[key]
        parameter, part, transposed = owned.tensors[place], owned.parts[place], owned.transposed[place]
        source = parameter if tensor is None else tensor
        if part is not None:
            return self._take_part(source, part, level, transposed)
        if records.copier.resolved(parameter, level) != SKETCH:
            return records.copier.copy_at_level(source, level)
        return records.copier.copy_at_level(source, SKETCH, transposed)

    def _take_part(self, tensor: Any, part: Part, level: str, transposed: bool) -> TensorCopy | SkippedTensor:
        """Copy this process's part of a parameter, or of a tensor with the same layout."""
        if self._spread.is_spread(tensor):
            return self._records.copier.copy_at_level(
                tensor, level, transposed
            )  # a gradient may be spread in another way
        return self._records.copier.take_part(tensor, part, level, transposed)


@dataclass(slots=True)
class Together:
    """Samples of gradients, copied together. Each gradient has the memory layout of its parameter.

    Attributes:
        several: the parameters.
        numbers: numbers of the samples.
        kinds: dtypes and shapes of the gradients.
    """

    several: ParameterBatch
    numbers: list[int]
    kinds: Kinds


class Gradients:
    """Copies of the gradients that optimizers use, by parameter, in the order of their arrival.

    The copies are held until the updates of the parameters are recorded, too.

    Args:
        records: buffer that holds the samples.
        copies: copier of the gradients.
        levels: level of detail by layer path and stage.

    Attributes:
        together: all gradients, if they were copied together; None if each has its own copy.
    """

    def __init__(self, records: RecordBuffer, copies: Copies, levels: LevelOf) -> None:
        self._records, self._copies, self._levels = records, copies, levels
        #: Copies by key of the parameter; None if the level is ``nothing``.
        self._taken: dict[int, TensorCopy | SkippedTensor | None] = {}
        self.together: Together | None = None

    def separated(self) -> list[int]:
        """Return the keys of the parameters that have gradients; split `together` into a copy for each."""
        together, self.together = self.together, None
        if together is not None:
            samples, several = self._records.copier.samples, together.several
            for key, number, dtype, shape, transposed in zip(
                several.keys, together.numbers, *together.kinds, several.transposed
            ):
                self._taken[key] = Sampled(dtype, shape, samples, number, transposed)
        return list(self._taken)

    def keep(self, keys: Collection[int]) -> None:
        """Drop the gradients of all other parameters."""
        for key in self.separated():
            if key not in keys:
                del self._taken[key]

    def add(self, key: int, taken: TensorCopy | SkippedTensor | None) -> None:
        """Add an existing copy of a gradient."""
        self._taken[key] = taken

    def pop(self, key: int) -> TensorCopy | SkippedTensor | None:
        """Remove and return the copy of a gradient."""
        return self._taken.pop(key)

    def consume(
        self, owned: ParameterMap, parameters: Sequence[Any], gradients: Sequence[Any], batch: Batch | None
    ) -> set[int]:
        """Copy the gradients that an optimizer is about to use.

        Args:
            owned: the parameters and buffers.
            parameters, gradients: parameters and gradients of the optimizer; a gradient may be None.
            batch: samples of the parameters, if all levels are ``sketch``.

        Returns:
            The identities of parameters that no layer owns.
        """
        before = self.separated()
        keys, gradients = owned.apart(parameters, gradients)
        several = owned.several(keys)
        unowned: set[int] = set()
        if several is None:
            unowned = {*keys} - owned.index.keys()
            is_owned = [key not in unowned for key in keys]
            keys, gradients = list(compress(keys, is_owned)), list(compress(gradients, is_owned))
            several = owned.several(keys)
        if several is not None and batch is not None:
            self.together = self._sample(several, gradients, batch)
        if self.together is not None:
            if before:
                self.separated()
            return unowned
        for key, gradient in zip(keys, gradients):
            level = SKETCH if batch is not None else self._levels[owned.owners[key].node.path, "grad"]
            self._taken[key] = self._copies.copy(owned, key, level, gradient) if level != NOTHING else None
        return unowned

    def _sample(self, several: ParameterBatch, gradients: Sequence[Any], batch: Batch) -> Together | None:
        """Copy the gradients together, or return None if the layout of a gradient differs from its parameter's."""
        kinds, gathered = batch.kinds_at(several.places), several.gathered_before()
        if gathered is None or gathered.kinds != kinds:
            gathered = several.gathered()
        if gathered is None or gathered.kinds != kinds:
            return None
        numbers = gathered.take_like(self._records.copier, gradients)
        return None if numbers is None else Together(several, numbers, kinds)


# Number of parameters that are checked to find out if weights changed or if gradients are left over.
_LOOKED_AT = 8
# Number of elements of a gradient that are checked for being zero.
_ELEMENTS = 4096
_EXCHANGED = "the optimizer steps with another tensor than the one that the layer was called with"
_UNHEARD = "FSDP reduces them out of sight, and they were cleared before the step ended: give record() the optimizer"
_SHARDED = "they are spread over the processes, and nothing here tells which part of each this one holds"


class Parameters:
    """Recorder of the parameters and buffers of the chosen layers, over one step.

    Without an optimizer, a recorded gradient is the one that the parameter holds at the end of the step or, if that
    was cleared, the sum over the backward passes of the step.

    Args:
        records: buffer that the records are added to.
        layers: the model's layers, and the paths of those whose parameters are recorded.
        optimizers: optimizers whose gradients and updates are recorded.
        levels: recording level of each layer and stage.
        last: cache of the parameters of the previous step.

    Attributes:
        stamp: value that changes when layers may own other parameters; `None` if it is unknown.
    """

    def __init__(
        self,
        records: RecordBuffer,
        layers: Layers | FixedLayers,
        optimizers: Sequence[Any],
        levels: LevelOf,
        last: ParameterMapCache | None = None,
    ) -> None:
        self._records = records
        self._framework, self._tensors = layers.framework, layers.framework.tensors
        self._optimizers = optimizers
        self._levels = levels
        self._last = ParameterMapCache() if last is None else last
        self.stamp: Any = None
        #: Copies of the trainable parameters from before the step, by identity. If all were sampled at once, `_batch`
        #: holds the samples instead.
        self._before: dict[int, TensorCopy] = {}
        self._batch: Batch | None = None
        self._copies = Copies(records, self._framework)
        self._consumed = Gradients(records, self._copies, levels)
        self._sums: dict[int, TensorCopy | SkippedTensor] = {}
        #: Keys of the parameters that had a gradient whose level is nothing.
        self._unseen: set[int] = set()
        self._steps: Counter[int] = Counter()
        self._rates_seen: set[int] = set()
        self._rates = 0
        self._snapped = self._closed = False
        #: True if parameters of the optimizers changed although no recorded optimizer stepped.
        self.moved_unseen = False
        #: True once an optimizer has stepped in this step.
        self.has_stepped = False
        #: Number of steps of each optimizer, by identity.
        self._taken: Counter[int] = Counter()
        self._nodes, self._owning = layers.nodes, layers.owning

    @cached_property
    def _owned(self) -> ParameterMap:
        """Return the parameter map as of the step's first call, as the parameters may change between two steps."""
        if self.stamp is None:
            return ParameterMap(self._nodes, self._owning, self._framework)
        return self._last.current((self.stamp, self._owning), self._nodes, self._owning, self._framework)

    @property
    def _owners(self) -> dict[int, Owner]:
        return self._owned.owners

    @property
    def steps_taken(self) -> int:
        """Return the largest number of steps that one optimizer has taken."""
        return max(self._taken.values(), default=0)

    def look_again(self) -> bool:
        """Record parameters that the step's first call created; return True if there are any."""
        if not self._snapped:
            return False
        owners_before = self._owners
        slots = {(owner.node.path, owner.slot) for owner in owners_before.values() if owner.role != "parameter"}
        if any(map(self._is_substituted, owners_before.values())):
            return False
        self._leave_batch()
        self._last.clear()
        self.stamp = None
        self.__dict__.pop("_owned")
        self.__dict__.pop("_stepping", None)
        # A buffer that the call put in the place of another one was recorded before the call, with the step's value.
        new = [
            key
            for key, owner in self._owners.items()
            if key not in owners_before and (owner.node.path, owner.slot) not in slots
        ]
        for key in new:
            self._snapshot_of(key)
        return bool(new)

    def _is_substituted(self, owner: Owner) -> bool:
        """Return True if another tensor stands in a parameter's place, as in a functional call."""
        if owner.role != "parameter" or owner.part is not None or owner.held is not None:
            return False
        slots = {slot: tensor for slot, tensor, _ in self._framework.layers.parameters(owner.node.layer)}
        return slots.get(owner.slot, owner.tensor) is not owner.tensor

    def follow(self, layers: Layers | FixedLayers) -> None:
        """Switch to other layers, before anything of the step is recorded."""
        self._nodes, self._owning = layers.nodes, layers.owning
        self.__dict__.pop("_owned", None)
        self.__dict__.pop("_stepping", None)
        self._consumed.keep(self._owners.keys())

    def trainable(self) -> list[tuple[int, Any]]:
        """Return the keys and tensors of the parameters that receive gradients from backward."""
        trains = self._owned.training()
        return [
            (key, owner.tensor if owner.held is None else owner.held.stepped)
            for (key, owner), each in zip(self._owners.items(), trains)
            if each and (owner.held is None or owner.held.heard)
        ]

    def gradients_left(self) -> bool:
        """Return True if some parameters hold nonzero gradients as the step's first backward begins.

        At most about `_LOOKED_AT` parameters are checked. With several optimizers the result is False, as each of them
        may clear its gradients later.
        """
        if len(self._optimizers) != 1:
            return False
        optimized = self._framework.optimizers.optimized(self._optimizers[0])
        with_gradient = [tensor for tensor in optimized if tensor.grad is not None]
        for tensor in with_gradient[:: max(1, len(with_gradient) // _LOOKED_AT)]:
            try:
                # Only the local part of a distributed gradient: reading all of it would make processes wait.
                gradient, _ = self._framework.spread.local(tensor.grad)
                if bool((gradient.reshape([-1])[:_ELEMENTS] != 0).any()):
                    return True
            except Exception as error:  # a gradient without readable values
                reraise_from_signal_handler(error)
                continue
        return False

    def snapshot(self) -> None:
        """Record the current weights and buffers, once in a step."""
        if self._snapped:
            return
        self._snapped = True
        self._note_sharded()
        if not self._owned.all_sketched(self._levels) or not self._snapshot_together():
            for key in self._owners:
                self._snapshot_of(key)

    def _snapshot_together(self) -> bool:
        """Record samples of all weights and buffers in one operation; return True if that was possible."""
        owned, records = self._owned, self._records
        gathered = owned.all.gathered()
        numbers = None if gathered is None else gathered.copy(records.copier)
        if gathered is None or numbers is None:
            return False
        records.write_all(owned.all.weight_sites(records.known), numbers)
        self._batch = Batch(list(numbers), *gathered.kinds, self._changing(owned.gathered_training()))
        return True

    @cached_property
    def _stepping(self) -> set[int]:
        """Return the keys of the parameters that the optimizers hold.

        A frozen parameter may be trainable by the time its optimizer steps, e.g. in the discriminator of a GAN.
        """
        optimized = self._framework.optimizers.optimized
        return {key for optimizer in self._optimizers for key in self._owned.keys_of(optimized(optimizer))}

    def _changing(self, trains: list[bool]) -> list[bool]:
        """Return a flag per parameter: True if the step may change it. ``trains`` flags those trainable now."""
        if not self._optimizers or trains == self._owned.is_parameter:
            return trains
        return [each or key in self._stepping for each, key in zip(trains, self._owners)]

    def _snapshot_of(self, key: int) -> None:
        node, slot = self._owners[key][:2]
        level, later = self._levels[node.path, "weight"], self._levels[node.path, "update"]
        copy = self._take(key, level) if level != NOTHING else None
        if copy is not None:
            self._records.write(node, "weight", slot, copy, 0)
        if later != NOTHING and (self._owned.trains(key) or key in self._stepping):
            # At the level of the update: samples are compared with samples.
            before = copy if copy is not None and level == later else self._take(key, later)
            if not isinstance(before, SkippedTensor):
                self._before[key] = before

    def _note_sharded(self) -> None:
        for node in self._owned.sharded:
            if any(self._levels[node.path, stage] != NOTHING for stage in ("weight", "grad", "update")):
                for _, _, role in self._framework.layers.parameters(node.layer):
                    if role == "parameter":
                        self._records.left_out.add(node.path, _SHARDED, training=True, what="parameter")
        for node, reason in self._owned.unplaced:
            self._records.left_out.add(node.path, reason, training=True, what="parameter")

    def finish(self, updates: bool = True) -> None:
        """Record the remaining gradients and updates; with ``updates=False`` no optimizer has stepped."""
        if not self._optimizers:
            self._take_what_is_there()
        if not updates:
            self._leave_batch()
            self._before.clear()
        if self._optimizers and not self.has_stepped:
            self.moved_unseen = self._moved()
        self._record()
        self._before.clear()
        self._batch = None
        self._closed = True

    # -- hooks ---------------------------------------------------------------------------------------------

    def add(self, key: int, gradient: Any) -> None:
        if self._closed or gradient is None or key not in self._owners:
            return
        level = self._level(key, "grad")
        if level == NOTHING:
            self._unseen.add(key)
        else:
            total = self._sums.get(key)
            copy = self._take(key, total.level if isinstance(total, (Whole, Sampled)) else level, gradient)
            if total is None or isinstance(copy, SkippedTensor):
                self._sums[key] = copy
            elif not isinstance(total, SkippedTensor):
                total.add(copy)

    def consume(self, optimizer: Any, parameters: Sequence[Any], gradients: Sequence[Any]) -> None:
        self.has_stepped = True
        self.snapshot()  # where no layer was called, or inside of function transforms alone
        unknown = self._consumed.consume(self._owned, parameters, gradients, self._batch)
        if unknown:
            self._note_exchanged(unknown)
        if id(optimizer) not in self._rates_seen:
            self._rates_seen.add(id(optimizer))
            for rate in self._framework.optimizers.learning_rates(optimizer):
                number, self._rates = self._rates, self._rates + 1
                self._records.scalar("update", f"learning_rate.{number}" if number else "learning_rate", rate, 0)

    def stepped(self, optimizer: Any) -> None:
        self.has_stepped = True
        self._taken[id(optimizer)] += 1
        self._record(self._owned.apart(self._framework.optimizers.optimized(optimizer))[0])

    def _note_exchanged(self, keys: Collection[int]) -> None:
        """Note parameters of an optimizer that have replaced other parameters of a layer since the first call."""
        owners = (owner for key, owner in self._owners.items() if self._level(key, "grad") != NOTHING)
        recorded = {(owner.node.path, owner.slot) for owner in owners}
        for node in self._nodes:
            for slot, tensor, _ in self._framework.layers.parameters(node.layer):
                if id(tensor) in keys and (node.path, slot) in recorded:
                    self._records.left_out.add(node.path, _EXCHANGED, training=True, what="gradient")

    def _moved(self) -> bool:
        """Return True if parameters of the optimizers changed since the step began; only some are checked."""
        self._leave_batch()
        keys = [key for key in self._before if key in self._stepping]
        checked = keys[:: max(1, len(keys) // _LOOKED_AT)]
        now = {key: self._take(key, self._before[key].level) for key in checked}
        return any(
            not isinstance(copy, SkippedTensor) and not _same(copy, self._before[key]) for key, copy in now.items()
        )

    # -- records -------------------------------------------------------------------------------------------

    def _level(self, key: int, stage: str) -> str:
        return self._levels[self._owners[key][0].path, stage]

    def _take(self, key: int, level: str, tensor: Any = None) -> TensorCopy | SkippedTensor:
        return self._copies.copy(self._owned, key, level, tensor)

    def _record(self, its: Sequence[int] | None = None) -> None:
        """Write records of the consumed gradients and of the updates, for the keys ``its`` (`None`: all keys)."""
        together = self._consumed.together
        if together is not None and _hold(its, together.several.keys) and self._record_together(together):
            return
        stepped = None if its is None else {*its}
        keys = [key for key in self._consumed.separated() if stepped is None or key in stepped]
        if keys:
            self._leave_batch()
        for key in keys:
            gradient = self._consumed.pop(key)
            node, slot, tensor = self._owners[key][:3]
            call = self._steps[key]
            self._steps[key] += 1
            if gradient is not None:
                self._records.write(node, "grad", slot, gradient, call)
            before = self._before.get(key)
            if before is not None and before.shape == self._tensors.shape(tensor):
                after = self._take(key, before.level)
                if isinstance(after, SkippedTensor):
                    del self._before[key]
                    self._records.write(node, "update", slot, after, call)
                    continue
                self._before[key] = after
                dtype = after.dtype if tensor.element_size() >= WIDE else "float32"
                source = after.less(before)
                self._records.add(node, "update", slot, source, dtype, after.shape, call, part=after.part)

    def _record_together(self, gradients: Together) -> bool:
        """Write the records of sampled gradients and updates in one operation; return True if that was possible."""
        records, batch, several = self._records, self._batch, gradients.several
        if batch is None:
            return False
        places, gathered = several.places, several.gathered()
        if gathered is None or gathered.kinds != gradients.kinds or False in [batch.trains[k] for k in places]:
            return False
        after = gathered.copy(records.copier)
        if after is None:
            return False
        difference = records.copier.samples.differences(after, [batch.numbers[place] for place in places])
        steps, keys = self._steps, several.keys
        calls = tuple([steps.get(key, 0) for key in keys]) if steps else (0,) * len(keys)
        numbers = [0] * (2 * len(places))
        numbers[::2], numbers[1::2] = gradients.numbers, range(difference, difference + len(places))
        for place, number in zip(places, after):
            batch.numbers[place] = number
        dict.update(steps, zip(keys, [call + 1 for call in calls]) if steps else dict.fromkeys(keys, 1))
        self._consumed.together = None
        records.write_all(several.stepped_sites(calls, records.known), numbers)
        return True

    def _leave_batch(self) -> None:
        """Split the batch of samples, so that from now on each parameter is recorded on its own."""
        batch, self._batch = self._batch, None
        if batch is None:
            return
        for place, (key, owner) in enumerate(self._owners.items()):
            if batch.trains[place]:
                dtype, is_transposed = self._tensors.dtype(owner.tensor), self._owned.transposed[place]
                self._before[key] = Sampled(
                    dtype, batch.shapes[place], self._records.copier.samples, batch.numbers[place], is_transposed
                )

    def _take_what_is_there(self) -> None:
        trains = self._owned.training()
        for (key, owner), each in zip(self._owners.items(), trains):
            if not each:
                continue
            gradient = owner.tensor.grad if owner.held is None else owner.held.gradient()
            level = self._level(key, "grad")
            if level == NOTHING:
                if gradient is not None or key in self._unseen:
                    self._consumed.add(key, None)  # without a gradient, so that the update is recorded
                continue
            copy = None if gradient is None else self._take(key, level, gradient)
            if copy is None or copy.zero:
                copy = self._sums.get(key, copy)  # cleared already
            if copy is not None:
                self._consumed.add(key, copy)
            elif owner.held is not None and not owner.held.heard:
                self._records.left_out.add(owner.node.path, _UNHEARD, training=True, what="gradient")
        self._sums.clear()


def _same(first: TensorCopy, second: TensorCopy) -> bool:
    """Return True if two copies of a parameter hold the same values."""
    if isinstance(first, Sampled) and isinstance(second, Sampled):
        return first.samples.equal(first.number, second.number)
    assert isinstance(first, Whole) and isinstance(second, Whole)
    return first.values.tobytes() == second.values.tobytes()


def _hold(its: Sequence[int] | None, keys: Sequence[int]) -> bool:
    """Return True if ``its`` contains all keys; `None` stands for every key."""
    return its is None or tuple(its) == tuple(keys) or {*its}.issuperset(keys)
