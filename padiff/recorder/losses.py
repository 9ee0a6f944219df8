"""Records of a step's loss functions (inputs, outputs, settings) and of gradient clipping.

Only loss functions of the framework are recorded. A call is recorded if it is made outside of the model, or where a
model computes its loss itself: in the outermost layer that is called, in a layer that holds most of the model, or in
a layer without parameters (a loss layer) that one of these layers calls.
"""

from __future__ import annotations

import itertools
import math
import threading
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from padiff.frameworks.base import Framework
from padiff.frameworks.losses import ClipCall, LossCall
from padiff.model.nested import flatten
from padiff.model.selection import Node
from padiff.recorder.calls import Call
from padiff.recorder.copying import COPYING, LevelOf
from padiff.recorder.options import FULL, NOTHING
from padiff.recorder.record_buffer import RecordBuffer
from padiff.recorder.tensor_copy import PendingCopy, SeenTensors, SkippedTensor, TensorCopy
from padiff.records import LOOP

#: Prefixes of integer dtypes. Integers are recorded in full at every level of detail: labels are small, and a sketch
#: does not show them.
_INTEGERS = ("int", "uint", "bool")
# Class weights up to this number are written out; longer lists become a checksum.
_FEW = 16
# Largest number of elements of a class weight tensor that is recorded in full.
_SMALL = 1 << 16
# Number of model outputs that are remembered, and of operations that are searched between a loss and these outputs.
_OUTPUTS, _OPERATIONS = 64, 256
# Relative tolerance for a scaled loss, which may be rounded to 16 bits.
_SCALED = 1e-2
# Numbers the calls of all models recorded in this process, to find the model that was called last.
_turns = itertools.count(1)


@dataclass(slots=True)
class _Seen:
    """A call of a loss function that may have computed the step's loss.

    Attributes:
        place: index in the record buffer at which the step's loss would be inserted.
        taken: copy of the output.
        alive: weak reference to the output.
        version: version of the output's values: another one if the loop has written it since (``loss += penalty``).
        training: True if the model was in training mode.
        backwards: number of backward passes that began at the output.
    """

    place: int
    taken: TensorCopy | PendingCopy | SkippedTensor
    alive: weakref.ref[Any]
    version: int
    training: bool
    backwards: int = 0


class Losses:
    """Recorder of the loss function calls of one step.

    Args:
        records: buffer that receives the records.
        levels: level of detail per layer and stage; integers are recorded in full unless the level is ``nothing``.
        nodes: the model's layers, the model itself first.
        chosen: paths of the layers whose tensors are recorded.
        tensors: index of the tensors that are already recorded.
        running: stack of the running layer calls, the outermost first.
        heard: callback that receives each recorded call.
    """

    def __init__(
        self,
        records: RecordBuffer,
        framework: Framework,
        levels: LevelOf,
        nodes: Sequence[Node],
        chosen: frozenset[str],
        tensors: SeenTensors,
        running: Sequence[Call],
        heard: Callable[[LossCall], None] | None = None,
    ) -> None:
        self._heard = heard
        #: True if the loop's last call of the model was evaluation.
        self.evaluating = False
        self._records, self._framework, self._levels = records, framework, levels
        self._nodes, self._chosen, self._tensors, self._running = nodes, chosen, tensors, running
        self._calls: Counter[tuple[str, bool]] = Counter()
        self._outputs: deque[weakref.ref[Any]] = deque(maxlen=_OUTPUTS)
        self._turn = 0
        #: Ids of the threads that train: the thread of the loop, and the threads that call the model.
        self._threads = {threading.get_ident()}
        self._own: dict[str, bool] = {}
        self._seen: list[_Seen] = []
        #: Scalars at which a backward pass began, other than outputs of loss functions, with their place in the buffer.
        self._elsewhere: list[tuple[int, Any]] = []
        #: All scalars of this model at which a backward pass began, with their place in the buffer.
        self._starts: list[tuple[int, Any]] = []
        # Number of records before the running backward.
        self._before = 0
        self._scales: set[float] = set()
        self._set: dict[tuple[tuple[str, Any], ...], None] = {}
        self._clips: dict[tuple[tuple[str, Any], ...], None] = {}
        #: Numbers of backwards after which an optimizer has stepped.
        self._stepped: set[int] = set()

    def follow(self, nodes: Sequence[Node], chosen: frozenset[str]) -> None:
        """Replace the model's layers and the paths of the recorded ones."""
        self._nodes, self._chosen = nodes, chosen
        self._own.clear()

    def called(self, output: Any) -> None:
        """Remember the output of an outermost call, and the calling thread."""
        self._turn = next(_turns)
        self._threads.add(threading.get_ident())
        for _, tensor in flatten(output, "", self._framework.tensors.is_tensor):
            self._outputs.append(weakref.ref(tensor))

    def is_listening(self) -> bool:
        """Return True if a loss function call that begins now may have to be recorded."""
        if COPYING.now or self._framework.hooks.recomputing():
            return False
        if self.evaluating and not self._framework.hooks.learning():
            return False
        # Another thread may evaluate at the same time.
        return threading.get_ident() in self._threads and self._counts()

    def _counts(self) -> bool:
        """Return True if the running layers are a place where losses are computed (see the module's docstring)."""
        if any(call.transformed for call in self._running):
            return False
        inside = [call.node for call in self._running]
        while len(inside) > 1 and not self._owns_any(inside[-1]):
            inside.pop()
        return len(inside) <= 1 or self._holds_most(inside[-1])

    def _below(self, node: Node) -> Sequence[Node]:
        path = node.path
        if node is self._nodes[0]:
            return self._nodes
        return [each for each in self._nodes if each.path == path or each.path.startswith(f"{path}.")]

    def _owns_any(self, node: Node) -> bool:
        if node.path not in self._own:
            parameters = self._framework.layers.parameters
            self._own[node.path] = any(True for each in self._below(node) for _ in parameters(each.layer))
        return self._own[node.path]

    def _holds_most(self, node: Node) -> bool:
        return 2 * len(self._below(node)) > len(self._nodes)

    def loss(self, call: LossCall, rivals: Sequence[Losses]) -> None:
        """Record a loss function call, unless a rival has a better claim to the call.

        Args:
            rivals: recorders of other models that observe the same call.
        """
        tensors = list(call.inputs.values())
        if rivals and any(rival.claim(tensors) < self.claim(tensors) for rival in rivals):
            return
        try:
            self._record(call)
        except Exception as error:
            self._records.left_out.add(LOOP, SkippedTensor.because(error).reason, training=True)

    def claim(self, tensors: Sequence[Any]) -> tuple[int, int]:
        """Return this model's claim to a loss with these input tensors; the smallest claim wins.

        The claim is the number of operations between the model's outputs and the tensors. Between equal numbers the
        model that was called last wins.
        """
        outputs = [tensor for tensor in (alive() for alive in self._outputs) if tensor is not None]
        nearest = _OPERATIONS
        for tensor in tensors:
            if any(tensor is output for output in outputs):
                return 0, -self._turn
        producers = [node for output in outputs for node, _ in self._framework.hooks.behind(output, 1)]
        for tensor in tensors:
            for node, distance in self._framework.hooks.behind(tensor, _OPERATIONS):
                if any(node is producer for producer in producers):
                    nearest = min(nearest, distance + 1)
                    break
        return nearest, -self._turn

    def clip(self, call: ClipCall, rivals: Sequence[Losses]) -> None:
        """Note the settings of a clipping call, and record the total norm.

        The call is assigned to the model that was called last: its parameters may be a generator, which can't be
        inspected.
        """
        if any(rival._turn > self._turn for rival in rivals):
            return
        facts = {"kind": call.kind, "limit": call.limit, "norm_type": call.norm_type}
        self._clips[tuple((name, value) for name, value in facts.items() if value is not None)] = None
        if self._framework.tensors.is_tensor(call.total_norm):
            self.clipping(call.total_norm)

    def clipping(self, norm: Any) -> None:
        """Record the norm of all gradients before clipping."""
        if self._levels[LOOP, "grad"] != NOTHING:
            number = self._calls["clip_grad_norm", True]
            self._calls["clip_grad_norm", True] += 1
            copy = self._records.copier.take_later(norm)
            self._records.loop("grad", "clip_grad_norm().0", copy, number)

    def stepped(self) -> None:
        """Note that an optimizer has stepped: the settings then report clipping as ``none`` if nothing was clipped."""
        self._stepped.add(len(self._starts))

    # -- records -------------------------------------------------------------------------------------------

    def _record(self, call: LossCall) -> None:
        training = bool(self._nodes[0].layer.training)
        outputs = list(flatten(call.output, f"{call.function}()", self._framework.tensors.is_tensor))
        trains = any(self._framework.tensors.trainable(tensor) for _, tensor in outputs)
        if training and not trains:
            return  # a metric: no gradient flows through it
        if self._heard is not None:
            self._heard(call)
        level = self._levels[LOOP, "loss"]
        number = self._calls[call.function, training]
        self._calls[call.function, training] += 1
        self._note(call)
        if level == NOTHING:
            return
        for role, tensor in (*call.inputs.items(), *call.weights.items()):
            copy = self._take(role, tensor, level)
            if copy is not None:
                self._records.loop("loss", f"{call.function}().input.{role}", copy, number, training)
        for slot, tensor in outputs[:1]:
            copy = self._records.copier.take_later(tensor)
            self._records.loop("loss", slot, copy, number, training)
            if trains:
                version = self._framework.tensors.version_of(tensor)
                self._seen.append(_Seen(len(self._records), copy, weakref.ref(tensor), version, training))

    def _take(self, role: str, tensor: Any, level: str) -> TensorCopy | PendingCopy | SkippedTensor | None:
        tensors = self._framework.tensors
        if tensors.dtype(tensor).startswith(_INTEGERS) or (
            role in ("weight", "pos_weight") and tensor.numel() <= _SMALL
        ):
            return self._records.copier.take_later(tensor)
        recorded = self._tensors.taken(tensor, level)
        if recorded is not None:
            return recorded
        # Lists that exclude the model's output also exclude the tensors computed from it.
        return self._records.copier.copy_at_level(tensor, level) if self._nodes[0].path in self._chosen else None

    # -- settings ------------------------------------------------------------------------------------------

    def _note(self, call: LossCall) -> None:
        facts: dict[str, Any] = {"function": call.function, **call.settings}
        for name, tensor in call.weights.items():
            if len(self._framework.tensors.shape(tensor)) <= 1:
                facts[name] = _digest(self._records.copier.copy(tensor))
        self._set[tuple(facts.items())] = None

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings of the step's losses and of its clipping, under names common to both frameworks."""
        clips = list(self._clips) or ([(("kind", "none"),)] if self._stepped else [])
        return {**_numbered("loss", list(self._set)), **_numbered("clip", clips)}

    # -- the step's loss -----------------------------------------------------------------------------------

    def backward_begins(self) -> None:
        """Note that a backward pass begins."""
        self._before = len(self._records)

    def backward(self, tensor: Any) -> None:
        """Note that a backward pass that began at a tensor has ended."""
        version = self._framework.tensors.version_of(tensor)
        loss = next((each for each in self._seen if each.alive() is tensor and each.version == version), None)
        if loss is not None:
            loss.backwards += 1
        if math.prod(self._framework.tensors.shape(tensor)) != 1:
            return
        start = len(self._records), tensor.detach().clone()
        if loss is None:
            self._elsewhere.append(start)
        if len(self._records) > self._before:  # gradients came to this model, not only to another one
            self._starts.append(start)

    def scaled(self, scale: float) -> None:
        """Note that a scaler of mixed precision multiplied a loss by this scale."""
        self._scales.add(scale)

    @property
    def scale(self) -> float:
        """Return the scale of the step's losses; 1 without a scaler, or with several scales."""
        return next(iter(self._scales)) if len(self._scales) == 1 else 1.0

    @property
    def last_begun(self) -> float | None:
        """Return the last scalar at which backward began without being a loss function's output, or None."""
        return self._begun()[-1] if self._elsewhere else None

    def _begun(self) -> list[float]:
        """Return the scalars at which backward began without being a loss function's output."""
        return [float(self._records.copier.copy(tensor).reshape(())) for _, tensor in self._elsewhere]

    def finish(self, micro_batches: int, loss_scale: float, evaluated: bool) -> None:
        """Record the loss of each micro-batch, if the loss is known.

        The loss is known if each micro-batch has exactly one scalar loss and backward began at this scalar, or at
        the scalar times the loss scale. In a step of one micro-batch it is the sum of all scalars at which a backward
        began. If one backward began in the step, its scalar is the loss of all calls of the model: a sum of terms, or
        one loss of several. Of several backwards with an update each, the scalar of each is a loss.

        Args:
            evaluated: True if the step has calls in evaluation mode with gradients, besides those in training mode.
                Their outputs are not recorded, and such a sum may be of them.
        """
        backwards = len(self._elsewhere) + sum(each.backwards for each in self._seen)
        if self._elsewhere and backwards == loss_scale == 1 and not evaluated:
            place, tensor = self._elsewhere[0]
            self._records.loop("loss", "loss", self._records.copier.take_later(tensor), 0, place=place)
            return
        if micro_batches == loss_scale == 1 < backwards == len(self._starts) and not evaluated:
            self._add_up()
            return
        begun = [each for each in self._seen if each.backwards and not isinstance(each.taken, SkippedTensor)]
        if len(begun) == backwards == loss_scale == 1 and len(self._seen) > 1 and not evaluated:
            self._records.loop("loss", "loss", begun[0].taken, 0, place=begun[0].place)
            return
        # If there are losses in training mode, losses in evaluation mode are ignored.
        losses = [each for each in self._seen if each.training] or self._seen
        scalars = [
            each for each in losses if not isinstance(each.taken, SkippedTensor) and math.prod(each.taken.shape) == 1
        ]
        if len(scalars) == micro_batches == len(losses) and all(
            each.backwards == 1 for each in scalars
        ) | self._is_scaled(scalars, loss_scale):
            for number, each in reversed(list(enumerate(scalars))):
                self._records.loop("loss", "loss", each.taken, number, place=each.place)
        elif loss_scale == 1 and len(self._starts) == backwards and not evaluated and self._is_apart():
            for number, (place, tensor) in reversed(list(enumerate(self._starts))):
                self._records.loop("loss", "loss", self._records.copier.take_later(tensor), number, place=place)

    def _is_apart(self) -> bool:
        """Return True if an optimizer has stepped between each two backwards: they are no parts of one update."""
        return {*range(1, len(self._starts))} <= self._stepped

    def _add_up(self) -> None:
        """Record the sum of all scalars at which a backward pass began."""
        copies = [self._records.copier.copy_at_level(tensor, FULL) for _, tensor in self._starts]
        total, *others = (copy for copy in copies if not isinstance(copy, SkippedTensor))
        for other in others:
            total.add(other)
        if len(others) == len(copies) - 1:
            self._records.loop("loss", "loss", total, 0, place=self._starts[-1][0])

    def _is_scaled(self, losses: Sequence[_Seen], scale: float) -> bool:
        """Return True if backward began at these losses times the scale."""
        if scale == 1 or len(self._elsewhere) != len(losses) or any(each.backwards for each in losses):
            return False
        values = [
            float(each.taken.source.read().reshape(())) for each in losses if not isinstance(each.taken, SkippedTensor)
        ]
        return all(math.isclose(start, scale * value, rel_tol=_SCALED) for start, value in zip(self._begun(), values))

    def close(self) -> None:
        """Drop all references to the step's tensors."""
        self._seen.clear()
        self._elsewhere.clear()
        self._starts.clear()
        self._outputs.clear()


def _digest(array: np.ndarray) -> Any:
    """Return class weights as a setting: a tuple if there are few weights, else their number and a checksum."""
    values = [float(f"{value:.6g}") for value in array.astype(np.float64).ravel()]
    if len(values) <= _FEW:
        return tuple(values)
    return f"{len(values)} values, checksum {zlib.crc32(np.asarray(values, np.float64).tobytes()):08x}"


def _numbered(what: str, facts: Sequence[Sequence[tuple[str, Any]]]) -> Mapping[str, Any]:
    """Return facts under flat names: ``loss.reduction``, or ``loss.0.reduction`` if there are several losses."""
    numbers: Callable[[int], str] = (lambda number: f"{what}.{number}") if len(facts) > 1 else lambda number: what
    return {f"{numbers(k)}.{name}": _plain(value) for k, group in enumerate(facts) for name, value in group}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
