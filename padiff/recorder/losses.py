"""What went into the loss functions of a step, what they gave, what they were set to; and how gradients are clipped.

A loss function is one of the framework's. A call counts that is made outside of the model, or where a model computes
its loss itself: in the outermost layer that is called, in one that holds most of the model, or in a layer without
parameters (a loss layer) that one of these calls.
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
from padiff.recorder.detail import NOTHING
from padiff.recorder.left_out import Left
from padiff.recorder.record_buffer import RecordBuffer
from padiff.recorder.seen_tensors import SeenTensors
from padiff.recorder.taken import OnItsWay, Taken
from padiff.records import LOOP

#: What integers are, however much detail is asked for: labels are small, and of a sketch they can't be read.
_INTEGERS = ("int", "uint", "bool")
# Weights of classes that are written out; of more there is a checksum.
_FEW = 16
# Elements of a tensor of weights up to which it is kept in full.
_SMALL = 1 << 16
# Outputs of the model that are remembered, and operations between them and a loss that are looked at.
_OUTPUTS, _OPERATIONS = 64, 256
# A loss times its scale may be rounded to 16 bits.
_SCALED = 1e-2
# Says which model was called last, of all that are recorded in this process.
_turns = itertools.count(1)


@dataclass(slots=True)
class _Seen:
    """A loss function's call that may be the step's loss.

    Attributes:
        place: where among the records its loss would be.
        taken: its output.
        alive: the output, as long as the training has it.
        backwards: how many began there.
    """

    place: int
    taken: Taken | OnItsWay | Left
    alive: weakref.ref[Any]
    training: bool
    backwards: int = 0


class Losses:
    """Records the calls of loss functions of one step.

    Args:
        records: where records go.
        levels: how much is kept; of integers everything is, unless nothing is kept of the stage.
        nodes: the model's layers, the model itself first.
        chosen: paths of those whose tensors are recorded.
        tensors: knows which tensors are recorded already.
        running: the calls that are under way, the outermost first.
        heard: called with each call that counts.
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
        #: Whether the loop's last call of the model was evaluation.
        self.evaluating = False
        self._records, self._framework, self._levels = records, framework, levels
        self._nodes, self._chosen, self._tensors, self._running = nodes, chosen, tensors, running
        self._calls: Counter[tuple[str, bool]] = Counter()
        self._outputs: deque[weakref.ref[Any]] = deque(maxlen=_OUTPUTS)
        self._turn = 0
        #: The threads that train: the loop's, and those that call the model.
        self._threads = {threading.get_ident()}
        self._own: dict[str, bool] = {}
        self._seen: list[_Seen] = []
        #: Where backward began besides.
        self._elsewhere: list[Any] = []
        self._set: dict[tuple[tuple[str, Any], ...], None] = {}
        self._clips: dict[tuple[tuple[str, Any], ...], None] = {}
        self._stepped = False

    def follow(self, nodes: Sequence[Node], chosen: frozenset[str]) -> None:
        """Go on with other layers."""
        self._nodes, self._chosen = nodes, chosen
        self._own.clear()

    def called(self, output: Any) -> None:
        """The outermost layer that was called has given this."""
        self._turn = next(_turns)
        self._threads.add(threading.get_ident())
        for _, tensor in flatten(output, "", self._framework.tensors.is_tensor):
            self._outputs.append(weakref.ref(tensor))

    def wants(self) -> bool:
        """Whether a call that begins now may be one that counts."""
        if COPYING.now or self._framework.hooks.recomputing():
            return False
        if self.evaluating and not self._framework.hooks.learning():
            return False
        # Another thread may evaluate.
        return threading.get_ident() in self._threads and self._counts()

    def _counts(self) -> bool:
        """Whether a call that is made now is made where losses are computed."""
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
        """A loss function was called, of which these others hear, too."""
        tensors = list(call.inputs.values())
        if rivals and any(rival.claim(tensors) < self.claim(tensors) for rival in rivals):
            return
        try:
            self._record(call)
        except Exception as error:
            self._records.left_out.add(LOOP, Left.because(error).reason, training=True)

    def claim(self, tensors: Sequence[Any]) -> tuple[int, int]:
        """How well a loss of these tensors fits this model, the least being the best: how many operations lie between
        its outputs and them; and how long ago it was called.
        """
        outputs = [tensor for tensor in (alive() for alive in self._outputs) if tensor is not None]
        nearest = _OPERATIONS
        for tensor in tensors:
            if any(tensor is output for output in outputs):
                return 0, -self._turn
        made_by = [node for output in outputs for node, _ in self._framework.hooks.behind(output, 1)]
        for tensor in tensors:
            for node, distance in self._framework.hooks.behind(tensor, _OPERATIONS):
                if any(node is made for made in made_by):
                    nearest = min(nearest, distance + 1)
                    break
        return nearest, -self._turn

    def clip(self, call: ClipCall, rivals: Sequence[Losses]) -> None:
        """Gradients were clipped. Whose they are is not known: a generator of parameters can't be looked into."""
        if any(rival._turn > self._turn for rival in rivals):
            return
        facts = {"kind": call.kind, "limit": call.limit, "norm_type": call.norm_type}
        self._clips[tuple((name, value) for name, value in facts.items() if value is not None)] = None
        if self._framework.tensors.is_tensor(call.total_norm):
            self.clipping(call.total_norm)

    def clipping(self, norm: Any) -> None:
        """Record the norm of all gradients before they are clipped by it."""
        if self._levels[LOOP, "grad"] != NOTHING:
            number = self._calls["clip_grad_norm", True]
            self._calls["clip_grad_norm", True] += 1
            taken = self._records.copier.take_later(norm)
            self._records.loop("grad", "clip_grad_norm().0", taken, number)

    def stepped(self) -> None:
        """An optimizer has stepped: whatever clips has done so."""
        self._stepped = True

    # -- records -------------------------------------------------------------------------------------------

    def _record(self, call: LossCall) -> None:
        training = bool(self._nodes[0].layer.training)
        outputs = list(flatten(call.output, f"{call.function}()", self._framework.tensors.is_tensor))
        trains = any(self._framework.tensors.trainable(tensor) for _, tensor in outputs)
        if training and not trains:
            return  # a figure that is only looked at
        if self._heard is not None:
            self._heard(call)
        level = self._levels[LOOP, "loss"]
        number = self._calls[call.function, training]
        self._calls[call.function, training] += 1
        self._note(call)
        if level == NOTHING:
            return
        for role, tensor in (*call.inputs.items(), *call.weights.items()):
            taken = self._take(role, tensor, level)
            if taken is not None:
                self._records.loop("loss", f"{call.function}().input.{role}", taken, number, training)
        for slot, tensor in outputs[:1]:
            taken = self._records.copier.take_later(tensor)
            self._records.loop("loss", slot, taken, number, training)
            if trains:
                self._seen.append(_Seen(len(self._records), taken, weakref.ref(tensor), training))

    def _take(self, role: str, tensor: Any, level: str) -> Taken | OnItsWay | Left | None:
        tensors = self._framework.tensors
        if tensors.dtype(tensor).startswith(_INTEGERS) or (
            role in ("weight", "pos_weight") and tensor.numel() <= _SMALL
        ):
            return self._records.copier.take_later(tensor)
        known = self._tensors.taken(tensor, level)
        if known is not None:
            return known
        # Lists that leave the model's own output out leave out what is made of it.
        return self._records.copier.take(tensor, level) if self._nodes[0].path in self._chosen else None

    # -- settings ------------------------------------------------------------------------------------------

    def _note(self, call: LossCall) -> None:
        facts: dict[str, Any] = {"function": call.function, **call.settings}
        for name, tensor in call.weights.items():
            if len(self._framework.tensors.shape(tensor)) <= 1:
                facts[name] = _digest(self._records.copier.copy(tensor))
        self._set[tuple(facts.items())] = None

    @property
    def settings(self) -> dict[str, Any]:
        """What the step's losses and its clipping were set to, under names that frameworks share."""
        clips = list(self._clips) or ([(("kind", "none"),)] if self._stepped else [])
        return {**_numbered("loss", list(self._set)), **_numbered("clip", clips)}

    # -- the step's loss -----------------------------------------------------------------------------------

    def backward(self, tensor: Any) -> None:
        """A backward began at a tensor."""
        seen = next((each for each in self._seen if each.alive() is tensor), None)
        if seen is not None:
            seen.backwards += 1
        elif math.prod(self._framework.tensors.shape(tensor)) == 1:
            self._elsewhere.append(tensor.detach())

    @property
    def last_begun(self) -> float | None:
        """The value at which backward began last, where that is not what a loss function gave; else `None`."""
        return float(self._records.copier.copy(self._elsewhere[-1]).reshape(())) if self._elsewhere else None

    def finish(self, micro_batches: int, loss_scale: float) -> None:
        """Record the loss of each micro-batch where nobody else has, and it is known: each has one, a scalar, that
        backward began at, but for the loss scale.
        """
        # Beside losses in training mode those in evaluation mode are left out.
        losses = [each for each in self._seen if each.training] or self._seen
        seen = [each for each in losses if not isinstance(each.taken, Left) and math.prod(each.taken.shape) == 1]
        if len(seen) != micro_batches or len(seen) != len(losses):
            return
        if any(each.backwards != 1 for each in seen) and not self._is_scaled(seen, loss_scale):
            return
        for number, each in reversed(list(enumerate(seen))):
            self._records.loop("loss", "loss", each.taken, number, place=each.place)

    def _is_scaled(self, seen: Sequence[_Seen], scale: float) -> bool:
        """Whether backward began at these losses times the scale."""
        if scale == 1 or len(self._elsewhere) != len(seen) or any(each.backwards for each in seen):
            return False
        began = [float(self._records.copier.copy(tensor).reshape(())) for tensor in self._elsewhere]
        values = [float(each.taken.source.read().reshape(())) for each in seen if not isinstance(each.taken, Left)]
        return all(math.isclose(one, scale * value, rel_tol=_SCALED) for one, value in zip(began, values))

    def close(self) -> None:
        """The step is over: nothing is kept of it."""
        self._seen.clear()
        self._elsewhere.clear()
        self._outputs.clear()


def _digest(array: np.ndarray) -> Any:
    """Weights of classes as a setting: as they are where they are few, else how many there are and a checksum."""
    values = [float(f"{value:.6g}") for value in array.astype(np.float64).ravel()]
    if len(values) <= _FEW:
        return tuple(values)
    return f"{len(values)} values, checksum {zlib.crc32(np.asarray(values, np.float64).tobytes()):08x}"


def _numbered(what: str, facts: Sequence[Sequence[tuple[str, Any]]]) -> Mapping[str, Any]:
    """Facts by flat names: ``loss.reduction``, or ``loss.0.reduction`` where there are several."""
    numbers: Callable[[int], str] = (lambda number: f"{what}.{number}") if len(facts) > 1 else lambda number: what
    return {f"{numbers(k)}.{name}": _plain(value) for k, some in enumerate(facts) for name, value in some}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
