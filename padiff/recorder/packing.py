"""Collect the batches and the replay pack of a step: the data that is needed to repeat the step elsewhere."""

from __future__ import annotations

import math
import random
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from padiff.errors import PadiffError
from padiff.frameworks.base import Framework, UncopiedError
from padiff.frameworks.feeding import DropoutCall
from padiff.frameworks.hooking import Handle
from padiff.frameworks.losses import LossCall
from padiff.model.selection import Node
from padiff.recorder.calls import Call
from padiff.recorder.copying import COPYING, own_calls
from padiff.recorder.options import Schedule
from padiff.recorder.record_buffer import RecordBuffer
from padiff.records import InMemory, TensorSource, bytes_text
from padiff.records.traces import Batch, Drawn, Mask, OptimizerState, Pack, Unkept
from padiff.system.guard import Guard, Tolerated, reraise_from_signal_handler
from padiff.system.terminal import say

_DEEPEST = 16
# Largest item size, by numpy's kind, of arrays that a pack holds: no number is wider than float64.
_WIDEST = {"b": 1, "i": 8, "u": 8, "f": 8, "c": 16}
# Bits of the largest integer that readers other than Python can read from a pack.
_BITS = 63
_PLAIN = (bool, int, float, str, type(None))


@dataclass
class _Given:
    """A batch as declared by the user or by a host.

    Attributes:
        inputs: positional and named arguments of the model; None if not declared.
        labels: further inputs of the loss; None if not declared.
        whole: the complete batch as passed by a host.
        parts: weak references to the tensors of the complete batch, with their copies.
    """

    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    labels: tuple[Any, ...] | None = None
    whole: Any = None
    parts: list[tuple[weakref.ref[Any], TensorSource]] = field(default_factory=list)


@dataclass
class _Called:
    """A call of the whole model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Batches:
    """Collector of the micro-batches of one step.

    Args:
        copy: function that copies a tensor's values.
    """

    def __init__(self, framework: Framework, copy: Callable[[Any], np.ndarray]) -> None:
        self._tensors, self._copy = framework.tensors, copy
        self._given: list[_Given] = []
        #: Calls of the model; the key is True for training mode.
        self._calls: dict[bool, list[_Called]] = {True: [], False: []}
        #: Inputs without gradient of loss functions outside of the model, by (training mode, micro-batch).
        self._labels: dict[tuple[bool, int], list[Any]] = {}
        self._copies: dict[tuple[int, int], tuple[weakref.ref[Any], TensorSource]] = {}

    @property
    def number(self) -> int:
        """Return the index of the current micro-batch."""
        return max(len(self._given), len(self._called), 1) - 1

    @property
    def _called(self) -> list[_Called]:
        """Return the model's calls in training mode, or in evaluation mode if there are none."""
        return self._calls[True] or self._calls[False]

    def give(self, inputs: Any, labels: Any) -> None:
        """Add a batch declared by the user: the model's inputs, and the labels (None if not declared)."""
        args = (*inputs,) if isinstance(inputs, (tuple, list)) else () if isinstance(inputs, Mapping) else (inputs,)
        named = self._kept(inputs) if isinstance(inputs, Mapping) else {}
        several = labels if isinstance(labels, (tuple, list)) else (labels,)
        stored_labels = None if labels is None else tuple(map(self._kept, several))
        self._given.append(_Given((tuple(map(self._kept, args)), named), stored_labels))

    def give_whole(self, batch: Any) -> None:
        """Add a complete batch passed by a host."""
        entry = _Given(whole=self._kept(batch))
        entry.parts = [(weakref.ref(tensor), self._kept(tensor)) for tensor in self._tensors_of(batch)]
        self._given.append(entry)

    def called(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool) -> None:
        """Add a call of the whole model."""
        self._calls[training].append(_Called(tuple(map(self._kept, args)), self._kept(dict(kwargs))))

    def loss(self, call: LossCall, inside: bool, training: bool) -> None:
        """Add the inputs without gradient of a loss function as labels.

        Args:
            inside: True if the call is made inside of the model, which then has the labels among its own inputs.
        """
        labels = self._labels.setdefault((training, self.number), [])
        if inside:
            return
        for tensor in call.inputs.values():
            if not self._tensors.trainable(tensor):
                source = self._part(tensor)
                if all(source is not label for label in labels):
                    labels.append(source)

    def finish(self) -> tuple[Batch, ...]:
        """Return the batches of the step."""
        called = self._called
        if self._given and len(self._given) != len(called):
            called = []  # calls can't be assigned to batches: the model is called several times per batch
        number = max(len(self._given), len(called))
        return tuple(
            self._batch(k, self._given[k] if self._given else _Given(), called[k] if called else None)
            for k in range(number)
        )

    def _batch(self, number: int, entry: _Given, called: _Called | None) -> Batch:
        labels = entry.labels
        if labels is None:
            trains = any(training for training, _ in self._labels)
            loss_inputs = self._labels.get((trains, number))
            labels = None if loss_inputs is None else tuple(loss_inputs)
        if entry.inputs is not None:
            inputs = entry.inputs
        elif called is not None:
            inputs = called.args, called.kwargs
        elif entry.whole is not None and labels is not None:
            inputs = _without(entry.whole, labels)
        else:
            return Batch(labels=labels, whole=entry.whole, seen=False)
        return Batch(*inputs, labels, entry.whole)

    def _part(self, tensor: Any) -> TensorSource:
        """Return the copy of a tensor, or the copy of the batch's tensor with the same values in another shape."""
        for alive, source in self._given[-1].parts if self._given else ():
            part = alive()
            if part is not None and (part is tensor or self._tensors.same_values(part, tensor)):
                return source
        copy = self._kept(tensor)
        assert isinstance(copy, TensorSource)
        return copy

    def _kept(self, value: Any, depth: int = 0) -> Any:
        if self._tensors.is_tensor(value):
            key = id(value), self._tensors.version_of(value)
            entry = self._copies.get(key)
            if entry is None or entry[0]() is not value:
                entry = self._copies[key] = weakref.ref(value), InMemory(self._copy(value))
            return entry[1]
        if isinstance(value, _PLAIN) and not (isinstance(value, int) and value.bit_length() > _BITS):
            return value
        if isinstance(value, np.generic) and isinstance(value.item(), _PLAIN):
            return value.item()
        if isinstance(value, np.ndarray) and value.itemsize <= _WIDEST.get(value.dtype.kind, -1):
            return InMemory(np.array(value, value.dtype.newbyteorder("="), order="C"))
        if depth < _DEEPEST and isinstance(value, Mapping):
            return {str(key): self._kept(inner, depth + 1) for key, inner in value.items()}
        if depth < _DEEPEST and isinstance(value, (tuple, list)):
            kind = tuple if isinstance(value, tuple) else list
            return kind(self._kept(inner, depth + 1) for inner in value)
        return Unkept(f"{type(value).__module__}.{type(value).__qualname__}")

    def _tensors_of(self, value: Any, depth: int = 0) -> Iterator[Any]:
        if self._tensors.is_tensor(value):
            yield value
        elif depth < _DEEPEST and isinstance(value, (Mapping, tuple, list)):
            for inner in value.values() if isinstance(value, Mapping) else value:
                yield from self._tensors_of(inner, depth + 1)


def _without(batch: Any, labels: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the model's positional and named arguments: a host's batch without the labels."""

    def is_input(value: Any) -> bool:
        return all(value is not label for label in labels)

    if isinstance(batch, Mapping):
        return (), {key: value for key, value in batch.items() if is_input(value)}
    if isinstance(batch, (tuple, list)):
        return tuple(value for value in batch if is_input(value)), {}
    return ((batch,) if is_input(batch) else ()), {}


_PARTS_ARE_CALLED = (
    "the loop calls parts of the model, not the model: the batch is not "
    "known. Log it with rec.log_batch(inputs, labels) before"
)


class Packing:
    """Collector of the replay pack of one step.

    Args:
        step: number of the step.
        optimizers: optimizers whose states are stored.
        records: record buffer of the step.
        running: calls that have not returned yet, the outermost first.
        guard: guard that stops errors in callbacks of dropout.
    """

    def __init__(
        self,
        step: int,
        framework: Framework,
        optimizers: Sequence[Any],
        records: RecordBuffer,
        running: Sequence[Call],
        guard: Guard,
    ) -> None:
        self.guard = guard
        self._step, self._framework, self._optimizers = step, framework, optimizers
        self._records, self._running = records, running
        self.batches = Batches(framework, framework.tensors.copy)
        self._nodes: Sequence[Node] = ()
        self._weights: dict[tuple[str, str], TensorSource] = {}
        self._names: dict[int, str] = {}
        self._states: list[OptimizerState] = []
        self._rates: list[list[float]] = []
        self._seeds: dict[str, TensorSource] = {}
        self._masks: list[Mask] = []
        self._unseen: dict[Drawn, None] = {}
        self._notes: dict[str, None] = {}
        self._stamp: Hashable = None
        self._parts = False
        self._handle: Handle | None = None

    # -- hooks on and off ----------------------------------------------------------------------------------

    def record_masks(self, nodes: Sequence[Node]) -> None:
        """Start recording dropout masks, unless a layer is compiled: the hook would cause a recompilation."""
        if self._handle is None and not any(self._framework.layers.compiled(node.layer) for node in nodes):
            self._handle = self._framework.masks.see(self)

    def detach(self) -> None:
        """Stop recording dropout masks."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = None

    # -- calls by the capture ------------------------------------------------------------------------------

    def begin(self, nodes: Sequence[Node]) -> None:
        """Store random states, weights and optimizer states at the step's first call, before the step changes any."""
        self._nodes = nodes
        with self._noted("random states are"), self.aside():
            self._seeds = self._all_seeds()
        self.look_again()
        for optimizer in self._optimizers:
            with self._noted(f"the state of {type(optimizer).__name__} is"), self.aside():
                self._states.append(self._framework.optimizers.state(optimizer, self._names))
                self._rates.append(self._framework.optimizers.learning_rates(optimizer))
        if len(self._states) < len(self._optimizers):
            self._states.clear()  # all of them, or none

    def give(self, inputs: Any, labels: Any) -> None:
        """Set inputs and labels of the next batch, as logged by the loop."""
        with self._noted("what the loop says of a batch is"), self.aside():
            self.batches.give(inputs, labels)

    def give_whole(self, batch: Any) -> None:
        """Set the next batch, as passed by a host (trainer)."""
        with self._noted("a batch of the host's is"), self.aside():
            self.batches.give_whole(batch)

    def look_again(self) -> None:
        """Store parameters and buffers that are new: lazy layers create theirs in their first call."""
        layers, stored = self._framework.layers, {id(tensor) for tensor in self._alive}
        for node in self._nodes:
            for slot, tensor, _ in layers.parameters(node.layer):
                if id(tensor) in stored:
                    continue
                stored.add(id(tensor))
                self._names.setdefault(id(tensor), f"{node.path}/{slot}")
                if layers.sharded(node.layer):
                    self._notes["parameters that are spread over processes are not kept"] = None
                elif (node.path, slot) not in self._weights:
                    with self._noted(f"{node.path}/{slot} is"), self.aside():
                        self._weights[node.path, slot] = InMemory(self._framework.tensors.copy(tensor))

    @property
    def _alive(self) -> Iterator[Any]:
        """Yield the current parameters and buffers whose values are stored."""
        for node in self._nodes:
            for slot, tensor, _ in self._framework.layers.parameters(node.layer):
                if (node.path, slot) in self._weights:
                    yield tensor

    def layer_begins(self, node: Node, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool) -> None:
        """Note the beginning of a layer call, before the call is added to the running ones."""
        if self._running:
            self._look()
            return
        self._stamp = self._framework.randomness.stamp()
        if node is self._nodes[0]:
            with self._noted("what the model is called with is"), self.aside():
                self.batches.called(args, kwargs, training)
        else:
            self._parts = True

    def layer_ended(self) -> None:
        """Note the end of the innermost layer call, while the call is still among the running ones."""
        self._look()

    def loss(self, call: LossCall) -> None:
        """Add a call of a loss function, whose arguments include the labels."""
        if not self._nodes:
            return
        with self._noted("a label is"), self.aside():
            self.batches.loss(call, inside=bool(self._running), training=bool(self._nodes[0].layer.training))

    def consumed(self, optimizer: Any) -> None:
        """Update the stored learning rates of an optimizer that is about to step.

        A schedule may have changed the rates since the step began.
        """
        number = next((k for k, stored in enumerate(self._optimizers) if stored is optimizer), None)
        if number is None or number >= len(self._states):
            return
        rates = self._framework.optimizers.learning_rates(optimizer)
        if rates != self._rates[number]:
            with self._noted("a learning rate is"), self.aside():
                now = self._framework.optimizers.state(optimizer, self._names).rates
                self._rates[number], self._states[number] = rates, replace(self._states[number], rates=now)

    def finish(self, rank: int, loss_scale: float) -> Pack | None:
        """Return the pack, or None if no layer of the model was called."""
        if not self._nodes:
            return None
        batches = self.batches.finish()
        if self._parts and not batches:
            self._notes[_PARTS_ARE_CALLED] = None
        return Pack(
            step=self._step,
            framework=self._framework.name,
            framework_version=self._framework.version,
            weights=self._weights,
            optimizers=tuple(self._states),
            batches=batches,
            masks=tuple(self._masks),
            loss_scale=loss_scale,
            unseen=tuple(self._unseen),
            seeds=self._seeds,
            rank=rank,
            notes=tuple(self._notes),
        )

    # -- random numbers ------------------------------------------------------------------------------------

    def is_active(self) -> bool:
        """Return True if a dropout call belongs to the step: the model's code makes it, and not as recomputation."""
        hooks = self._framework.hooks
        return bool(self._running) and not COPYING.now and not hooks.recomputing() and not hooks.transforming()

    def begins(self) -> None:
        """Note the beginning of a dropout call."""
        self._look()

    @contextmanager
    def _noted(self, what: str) -> Iterator[None]:
        """Suppress errors inside the context, and note in the pack that ``what`` is not stored.

        Raises:
            MemoryError: memory is short.
        """
        try:
            yield
        except MemoryError:
            raise
        except Exception as error:
            reraise_from_signal_handler(error)
            text = str(error) if isinstance(error, (PadiffError, UncopiedError)) else f"{type(error).__name__}: {error}"
            self._notes[f"{what} not kept: {text}"] = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Enter a context whose calls are not recorded as the model's, and are hidden from the user's modes."""
        with own_calls(), self._framework.hooks.aside():
            yield

    def ended(self, call: DropoutCall | None, kept: np.ndarray | None) -> None:
        """Add the mask of a dropout call that has returned; ``kept`` is `None` if the mask is unknown."""
        self._stamp = self._framework.randomness.stamp()
        if call is None or not self._running:
            return
        inside = self._running[-1].node.path
        if kept is None:
            self._unseen[Drawn(inside, call.function)] = None
            return
        bits = InMemory(np.packbits(kept))
        self._masks.append(Mask(inside, self.batches.number, call.function, call.rate, call.shape, bits))

    def _look(self) -> None:
        """Note the innermost layer as unrecorded if random numbers were drawn outside of the recorded dropout calls."""
        hooks = self._framework.hooks
        if not self._running or hooks.recomputing() or hooks.transforming():
            return
        stamp = self._framework.randomness.stamp()
        if stamp != self._stamp:
            node = self._running[-1].node
            self._unseen[Drawn(node.path, type(node.layer).__name__)] = None
            self._stamp = stamp

    def _all_seeds(self) -> dict[str, TensorSource]:
        randomness = self._framework.randomness
        states = {"python": np.array(random.getstate()[1], np.uint32)}
        _, words, position, *_ = np.random.get_state()
        states["numpy"] = np.array([*words, position], np.uint32)
        states |= randomness.as_arrays(randomness.state())
        return {name: InMemory(array) for name, array in states.items()}


def bytes_owned(framework: Framework, nodes: Sequence[Node]) -> int:
    """Return the size of a model's parameters and buffers in bytes."""
    total = 0
    with framework.hooks.aside():
        tensors = {id(t): t for node in nodes for _, t, _ in framework.layers.parameters(node.layer)}
        for tensor in tensors.values():
            with Tolerated():  # a tensor without a size
                total += math.prod(framework.tensors.shape(tensor)) * int(tensor.element_size())
    return total


def say_size(packs: Schedule, framework: Framework, nodes: Sequence[Node], optimizers: Sequence[Any]) -> None:
    """Print the expected size of a pack to standard error."""
    size = bytes_owned(framework, nodes)
    when = f"every {packs.every} steps" if packs.steps is None else "at chosen steps"
    state = ", the optimizer's state (as much again for each moment that it keeps)" if optimizers else ""
    say(
        f"keeps a replay pack {when}, each of {bytes_text(size)} for weights and buffers{state}, the batches "
        "and the masks of dropout"
    )
