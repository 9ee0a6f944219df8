"""What the hooks of one due step write down.

A capture keeps copies, never tensors (only weak references to them): nothing it holds can keep a graph alive,
and there is no cycle between it and the model.
"""

from __future__ import annotations

import traceback
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from padiff.frameworks.base import Empty, Framework, Handle
from padiff.records import LOOP, InMemory, Record, Step, TensorSource
from padiff.selection import Node
from padiff.structure import flatten, flatten_inputs
from padiff.switches import Switches


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor source: one array less another, worked out when read (on the writer's thread)."""

    after: np.ndarray
    before: np.ndarray

    def read(self) -> np.ndarray:
        if self.after.dtype.itemsize < 4 and self.after.dtype.kind not in "iub":
            # 16-bit weights: the difference of two neighbours would be rounded away.
            return np.asarray(self.after.astype(np.float32) - self.before.astype(np.float32))
        return np.asarray(self.after - self.before)


@dataclass(slots=True)
class _Call:
    """A layer's call that is under way."""

    node: Node
    number: int
    training: bool
    recomputed: bool


@dataclass(slots=True)
class _Tensor:
    """A tensor seen in forward: its copy, and every site at which it was seen unchanged."""

    alive: weakref.ref[Any]
    version: int
    array: np.ndarray | None
    dtype: str
    sites: list[tuple[Node, str, int, bool]] = field(default_factory=list)


def _wrappers(nodes: Sequence[Node], framework: Framework) -> frozenset[str]:
    """Paths of the layers that own nothing and hold one layer."""
    return frozenset(
        node.path
        for node in nodes[1:]
        if not any(framework.parameters(node.layer)) and len(list(framework.children(node.layer))) == 1
    )


class Capture:
    """Collects the records of one step of one model.

    Args:
        number: the step's number.
        framework: the model's framework.
        nodes: all of the model's layers, the model itself first.
        chosen: paths of the layers whose tensors are recorded.
        parameters: whether weights, gradients and updates are recorded too.
        stacks: whether to keep each call's Python stack, as `stacks`.
        switches: what the environment switched on. Default: as it stands now.
        empty: makes the arrays that tensors are copied into.
        optimizers: those whose gradients and updates are recorded; without any, gradients are what backward left.
    """

    def __init__(
        self,
        number: int,
        framework: Framework,
        nodes: Sequence[Node],
        chosen: frozenset[str],
        optimizers: Sequence[Any] = (),
        empty: Empty = np.empty,
        parameters: bool = True,
        stacks: bool = False,
        switches: Switches | None = None,
    ) -> None:
        self.number = number
        self._framework = framework
        self._nodes = nodes
        self._switches = switches if switches is not None else Switches.from_environment()
        self._chosen = chosen - _wrappers(nodes, framework) if self._switches.skip_wrappers else chosen
        self._optimizers = optimizers
        self._keep_stacks = stacks
        #: Python stack of each layer's call, outermost frame first, by path and number of the call; a
        #: functional call's by ``path/name()``.
        self.stacks: dict[tuple[str, int], traceback.StackSummary] = {}
        self._empty = empty
        self._handles: list[Handle] = []
        self._attached = False
        self._records: list[tuple[Record, bool]] = []
        self._running: list[_Call] = []
        self._calls: Counter[tuple[str, bool]] = Counter()
        self._recalls: Counter[tuple[str, bool]] = Counter()
        self._outermost: Counter[tuple[str, bool]] = Counter()
        self._tensors: dict[int, _Tensor] = {}
        self._fired: Counter[tuple[str, str, int, bool]] = Counter()
        self._before: dict[int, np.ndarray] = {}
        self._pending: dict[int, tuple[np.ndarray, str]] = {}
        self._backward_sums: dict[int, np.ndarray] = {}
        self._functional: Counter[tuple[str, str, bool, bool]] = Counter()
        self._copying = False
        self._losses = 0
        self._stepped: Counter[int] = Counter()
        self._rates_seen: set[int] = set()
        self._snapped = False
        self._closed = False
        # Parameters that are recorded, by identity: a tied one once, under the first path that reaches it.
        self._owners: dict[int, tuple[Node, str, Any, str]] = {}
        for node in nodes:
            for slot, tensor, role in framework.parameters(node.layer):
                if parameters and node.path in chosen:
                    self._owners.setdefault(id(tensor), (node, slot, tensor, role))

    # -- hooks on and off ---------------------------------------------------------------------------------

    def attach(self) -> None:
        """Put the hooks on, if they are not. In a step that is not due they can do nothing: then they are not there."""
        if self._attached:
            return
        self._attached = True
        for node in self._nodes:
            self._handles += self._framework.hook_calls(
                node.layer, partial(self._before_call, node), partial(self._after_call, node)
            )
        if self._switches.api_check:
            self._handles.append(self._framework.see_calls(self._after_function, self._switches.third_party))
        for optimizer in self._optimizers:
            self._handles += self._framework.hook_optimizer(
                optimizer, partial(self._consumed, optimizer), partial(self._optimizer_stepped, optimizer)
            )
        if not self._optimizers:
            for key, (_, _, tensor, role) in self._owners.items():
                if role == "parameter" and self._framework.trainable(tensor):
                    handle = self._framework.hook_gradient(tensor, partial(self._add_gradient, key))
                    self._handles += [handle] if handle is not None else []

    def detach(self) -> None:
        """Take every hook off again; may be called twice."""
        self._attached = False
        while self._handles:
            self._handles.pop().remove()
        self._running.clear()

    # -- forward and backward -----------------------------------------------------------------------------

    def _before_call(self, node: Node, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recomputed = self._framework.recomputing()
        training = self._running[0].training if self._running else self._framework.training(self._nodes[0].layer)
        counter = self._recalls if recomputed else self._calls
        number = counter[node.path, training]
        counter[node.path, training] += 1
        outermost = not self._running
        self._running.append(_Call(node, number, training, recomputed))
        if self._keep_stacks and not recomputed:
            self.stacks[node.path, number] = traceback.extract_stack()
        if self._switches.path_log:
            print(f"[padiff] {node.path} ({type(layer).__name__}), call {number}")
        if not outermost or recomputed:
            return
        if not self._snapped:
            self._snapped = True
            self._snapshot()
        self._outermost[node.path, training] += 1
        if node.path in self._chosen:
            for slot, tensor in flatten_inputs(layer.forward, args, kwargs, self._framework.is_tensor):
                self._add(node, "input", slot, tensor, number, training)

    def _after_call(self, node: Node, layer: Any, output: Any, failed: bool) -> None:
        call = None
        while self._running:
            # A call that ended in an exception which the model itself caught may still lie above ours.
            call = self._running.pop()
            if call.node is node:
                break
        if call is None or call.node is not node or failed or node.path not in self._chosen:
            return
        for slot, tensor in flatten(output, "output", self._framework.is_tensor):
            self._see(call, slot, tensor)

    def _after_function(self, name: str, output: Any) -> None:
        """A functional call inside of a layer is a record of that layer, in a slot of its own: ``softmax().0``."""
        if self._copying or not self._running or self._running[-1].node.path not in self._chosen:
            return
        inside = self._running[-1]
        key = (inside.node.path, name, inside.training, inside.recomputed)
        call = replace(inside, number=self._functional[key])
        self._functional[key] += 1
        if self._keep_stacks and not inside.recomputed:
            self.stacks[f"{inside.node.path}/{name}()", call.number] = traceback.extract_stack()
        for slot, tensor in flatten(output, f"{name}()", self._framework.is_tensor):
            self._see(call, slot, tensor)

    def _see(self, call: _Call, slot: str, tensor: Any) -> None:
        framework = self._framework
        version = framework.version_of(tensor)
        seen = self._tensors.get(id(tensor))
        if seen is None or seen.alive() is not tensor or seen.version != version or version < 0:
            array = None if call.recomputed else self._copy(tensor)
            seen = _Tensor(weakref.ref(tensor), version, array, framework.dtype(tensor))
            self._tensors[id(tensor)] = seen
            # A tensor hook, not a module's backward hook: paddle has none, and torch's full backward hook breaks
            # before in-place layers. The hook goes with the graph, so it needs no handle - but for a leaf, a parameter
            # or an input that a layer hands on, which lives on.
            handle = framework.hook_gradient(tensor, partial(self._gradient, seen))
            if handle is not None and tensor.is_leaf:
                self._handles.append(handle)
        seen.sites.append((call.node, slot, call.number, call.training))
        if not call.recomputed and seen.array is not None:
            source = InMemory(seen.array)
            self._put(call.node, "forward", slot, source, seen.dtype, seen.array.shape, call.number, call.training)

    def _gradient(self, seen: _Tensor, gradient: Any) -> None:
        if self._closed or gradient is None:
            return
        array = self._copy(gradient)
        dtype = self._framework.dtype(gradient)
        for node, slot, call, training in seen.sites:
            again = self._fired[node.path, slot, call, training]
            self._fired[node.path, slot, call, training] += 1
            # A second backward through the same graph is a quantity of its own.
            name = f"{slot}@{again}" if again else slot
            self._put(node, "backward", name, InMemory(array), dtype, array.shape, call, training)

    # -- weights, gradients, updates ----------------------------------------------------------------------

    def _snapshot(self) -> None:
        for key, (node, slot, tensor, role) in self._owners.items():
            array = self._copy(tensor)
            if role == "parameter":
                self._before[key] = array
            dtype = self._framework.dtype(tensor)
            self._put(node, "weight", slot, InMemory(array), dtype, array.shape, 0, True)

    def _add_gradient(self, key: int, gradient: Any) -> None:
        if not self._closed and gradient is not None:
            array = self._copy(gradient)
            known = self._backward_sums.get(key)
            self._backward_sums[key] = array if known is None else known + array

    def _consumed(self, optimizer: Any, pairs: Iterable[tuple[Any, Any]]) -> None:
        for parameter, gradient in pairs:
            if id(parameter) in self._owners and gradient is not None:
                array = self._copy(gradient)
                self._pending[id(parameter)] = (array, self._framework.dtype(gradient))
        self._note_rates(optimizer)

    def _note_rates(self, optimizer: Any) -> None:
        if id(optimizer) in self._rates_seen:
            return
        self._rates_seen.add(id(optimizer))
        for rate in self._framework.learning_rates(optimizer):
            index = sum(1 for record, _ in self._records if record.layer == LOOP and record.stage == "update")
            slot = f"learning_rate.{index}" if index else "learning_rate"
            self._put_scalar("update", slot, rate, 0)

    def _optimizer_stepped(self, optimizer: Any) -> None:
        mine = {id(p) for p in self._framework.optimized(optimizer)}
        self._flush_gradients([key for key in self._pending if key in mine])

    def _flush_gradients(self, keys: Iterable[int]) -> None:
        """Turn consumed gradients, and what the step then did to the parameters, into records."""
        for key in list(keys):
            array, dtype = self._pending.pop(key)
            node, slot, _, _ = self._owners[key]
            call = self._stepped[key]
            self._stepped[key] += 1
            self._put(node, "grad", slot, InMemory(array), dtype, array.shape, call, True)
            self._put_update(key, call)

    def _put_update(self, key: int, call: int) -> None:
        node, slot, tensor, _ = self._owners[key]
        before = self._before.get(key)
        if before is None or before.shape != self._framework.shape(tensor):
            return
        after = self._copy(tensor)
        self._before[key] = after
        difference = Difference(after, before)
        dtype = "float32" if after.dtype.itemsize < 4 else str(after.dtype)
        self._put(node, "update", slot, difference, dtype, after.shape, call, True)

    # -- the end of the step ------------------------------------------------------------------------------

    def log_loss(self, value: Any) -> None:
        """Note the loss of a micro-batch: a number, or a tensor of one element."""
        if self._framework.is_tensor(value):
            array = self._copy(value)
        else:
            array = np.asarray(value, dtype=np.float64)
        self._put_scalar("loss", "loss", float(array.astype(np.float64).mean()), self._losses, str(array.dtype))
        self._losses += 1

    @property
    def empty(self) -> bool:
        """Whether no layer was called and nothing was noted."""
        return not self._records

    @property
    def called(self) -> frozenset[str]:
        """Paths of the layers that were called."""
        return frozenset(path for path, _ in self._calls)

    def finish(self, rank: int = 0, loss_scale: float = 1.0, updates: bool = True) -> Step:
        """Take the hooks off and hand the step over; the capture is empty afterwards.

        ``updates=False`` if no optimizer has stepped yet.
        """
        if not self._optimizers:
            self._gradients_without_optimizer()
        if not updates:
            self._before.clear()
        self._flush_gradients(self._pending)
        self.detach()
        self._closed = True
        step = self.peek(rank, loss_scale)
        self._tensors.clear()
        self._before.clear()
        self._records.clear()
        return step

    def parameters_now(self) -> Step:
        """A step of weights, buffers and gradients, as they are now."""
        self._snapshot()
        self._gradients_without_optimizer()
        self._before.clear()
        self._flush_gradients(self._pending)
        return self.peek()

    def weights(self) -> Step:
        """A step of the weights and buffers alone, as they are now."""
        self._snapshot()
        return self.peek()

    def peek(self, rank: int = 0, loss_scale: float = 1.0) -> Step:
        """What was recorded so far; the capture goes on."""
        kept, notes = self._training_calls()
        # As for the records: evaluation in between is no micro-batch.
        modes = {training for _, training in self._outermost}
        counts = [count for (_, training), count in self._outermost.items() if training or len(modes) < 2]
        return Step(
            number=self.number,
            records=tuple(replace(record, order=order) for order, record in enumerate(kept)),
            rank=rank,
            loss_scale=loss_scale,
            micro_batches=max(counts, default=1),
            notes=tuple(notes),
        )

    def _gradients_without_optimizer(self) -> None:
        for key, (_, _, tensor, role) in self._owners.items():
            if role != "parameter" or not self._framework.trainable(tensor):
                continue
            gradient = self._framework.gradient(tensor)
            array = None if gradient is None else self._copy(gradient)
            if array is None or not array.any():
                # Cleared already: what the backwards of this step added up to.
                array = self._backward_sums.get(key, array)
            if array is not None:
                self._pending[key] = (array, str(array.dtype))
        self._backward_sums.clear()

    def _training_calls(self) -> tuple[list[Record], list[str]]:
        """Leave out evaluation in between: calls in eval mode, where the step has calls in training mode too."""
        modes = {training for _, training in self._outermost}
        if len(modes) < 2:
            return [record for record, _ in self._records], []
        left_out = sum(count for (_, training), count in self._outermost.items() if not training)
        note = f"{left_out} call(s) in evaluation mode within the step are not recorded"
        return [record for record, training in self._records if training], [note]

    def _copy(self, tensor: Any) -> np.ndarray:
        # What copying itself calls is not the model's.
        self._copying = True
        try:
            return self._framework.to_numpy(tensor, self._empty)
        finally:
            self._copying = False

    # -- writing down -------------------------------------------------------------------------------------

    def _add(self, node: Node, stage: str, slot: str, tensor: Any, call: int, training: bool) -> None:
        array = self._copy(tensor)
        dtype = self._framework.dtype(tensor)
        self._put(node, stage, slot, InMemory(array), dtype, array.shape, call, training)

    def _put(
        self,
        node: Node,
        stage: str,
        slot: str,
        source: TensorSource,
        dtype: str,
        shape: tuple[int, ...],
        call: int,
        training: bool,
    ) -> None:
        kind = type(node.layer).__name__
        record = Record(node.path, stage, slot, source, dtype, tuple(shape), call, 0, kind)
        self._records.append((record, training))

    def _put_scalar(self, stage: str, slot: str, value: float, call: int, dtype: str = "float64") -> None:
        source = InMemory(np.asarray(value, dtype=np.float64))
        self._records.append((Record(LOOP, stage, slot, source, dtype, (), call), True))
