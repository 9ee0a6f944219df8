"""The records of one step: its hooks, on and off, and the step that they make."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from padiff.recorder.aside import aside
from padiff.recorder.copying import EVERYTHING, Copier, LevelOf, own_calls
from padiff.recorder.evaluation import TrainingHistory
from padiff.recorder.layers import FixedLayers, Layers
from padiff.recorder.left_out import Left
from padiff.recorder.losses import Losses
from padiff.recorder.owned import LastOwned
from padiff.recorder.packing import Packing
from padiff.recorder.parameters import Parameters
from padiff.recorder.record_buffer import RecordBuffer
from padiff.recorder.step_observer import StepObserver
from padiff.recorder.wanted import Wanted
from padiff.records import LOOP, Step
from padiff.system.guard import RAISING, Guard


class Capture:
    """Collects the records of one step of one model.

    A capture keeps copies, never tensors (only weak references to them): nothing it holds can keep a graph alive,
    and there is no cycle between it and the model.

    Args:
        number: the step's number.
        layers: the model's layers, followed where they change.
        optimizers: those whose gradients and updates are recorded; without any, gradients are what backward left.
        records: where records go. Default: a buffer of its own.
        levels: how much is kept of each layer's tensors at each stage. Default: everything.
        owned: what the layers owned, as earlier captures of the model found it.
        stepped: called when an optimizer has stepped, with how often it did within this step.
        stacks: whether to keep each call's Python stack, as `stacks`.
        consuming: called with an optimizer that is about to step.
        functions: whether the step's trace is to have the functions and operators that layers' code calls.
        losses: whether to record what loss functions are called with.
        packing: whether to keep what the step needs to be done again.
        whole: whether the trace is to have tensors in full.
        loss_logged: whether losses are logged, so that a scalar ``loss`` that the model itself gives is no activation.
        guard: stops errors where the training calls a hook. Default: errors are raised.
        history: what earlier captures of the model have shown of whether it is trained.
    """

    def __init__(
        self,
        number: int,
        layers: Layers | FixedLayers,
        optimizers: Sequence[Any] = (),
        records: RecordBuffer | None = None,
        levels: LevelOf = EVERYTHING,
        owned: LastOwned | None = None,
        stepped: Callable[[int], None] | None = None,
        stacks: bool = False,
        consuming: Callable[[Any], None] | None = None,
        functions: bool = False,
        losses: bool = False,
        packing: bool = False,
        whole: bool = False,
        loss_logged: bool = False,
        guard: Guard = RAISING,
        history: TrainingHistory | None = None,
    ) -> None:
        self.number = number
        history = TrainingHistory() if history is None else history
        wanted = Wanted(stepped, stacks, consuming, functions, losses, packing, whole, loss_logged, history)
        records = RecordBuffer(Copier(layers.framework)) if records is None else records
        self._framework, self._records = layers.framework, records
        self._observer = StepObserver(number, layers, optimizers, records, levels, owned, wanted, guard)
        self._calls, self._tracer = self._observer.calls, self._observer.tracer
        self._logged = 0

    @property
    def settings(self) -> dict[str, Any]:
        """What the step showed of how the training is set (`padiff.records.settings`)."""
        return self._observer.settings

    @property
    def stacks(self) -> dict[tuple[str, int], traceback.StackSummary]:
        """Python stack of each layer's call (`StepObserver.stacks`)."""
        return self._observer.stacks

    @property
    def parameters(self) -> Parameters:
        """What the layers own."""
        return self._observer.parameters

    @property
    def autocast(self) -> dict[str, Any]:
        """The autocast that the model was called in; empty before."""
        return self._observer.autocast

    @property
    def packing(self) -> Packing | None:
        """What keeps what the step needs to be done again; `None` where nothing does."""
        return self._observer.packing

    @property
    def losses(self) -> Losses | None:
        """What hears of loss functions; `None` where nothing does."""
        return self._observer.losses

    # -- hooks on and off ---------------------------------------------------------------------------------

    def attach(self) -> None:
        """Put the hooks on, if they are not. In a step that is not due they can do nothing: then they are not there."""
        self._observer.attach()

    def take_over(self, before: Capture) -> None:
        """Go on with the hooks of the capture of the step before, instead of taking them off and putting them on."""
        self._observer.take_over(before._observer)

    def detach(self) -> None:
        """Take every hook off again; may be called twice."""
        self._observer.detach()

    def raise_interrupt(self) -> None:
        """Raise a Ctrl-C that was kept."""
        self._observer.interrupts.raise_kept()

    # -- the end of the step ------------------------------------------------------------------------------

    @aside
    def log_loss(self, value: Any) -> None:
        """Note the loss of a micro-batch: a number, or a tensor of one element."""
        if self._framework.tensors.is_tensor(value):
            if self._tracer.functions:
                self._tracer.noted("log_loss", value)
            try:
                array = self._records.copier.copy(value)
            except Exception as error:
                self._records.left_out.add(LOOP, Left.because(error).reason, training=True)
                return
        else:
            array = np.asarray(value, dtype=np.float64)
        self._records.scalar("loss", "loss", float(array.astype(np.float64).mean()), self._logged, str(array.dtype))
        self._logged += 1

    @property
    def running(self) -> list[str]:
        """Paths of the layers whose calls are under way, the outermost first."""
        return [call.node.path for call in self._calls.running]

    @contextmanager
    def unheard(self) -> Iterator[None]:
        """What is called inside is not recorded."""
        hooks = self._observer.hooks
        observer, hooks.observer = hooks.observer, None
        try:
            with own_calls():
                yield
        finally:
            hooks.observer = observer

    @property
    def micro_batch(self) -> int | None:
        """Which call of the whole model, in training mode, is under way or was the last; `None` before the first."""
        calls = self._calls.trained(self._observer.watched.nodes[0].path)
        return calls - 1 if calls else None

    @property
    def empty(self) -> bool:
        """Whether no layer was called and nothing was noted."""
        return not len(self._records) and not self._calls.any

    @property
    def called(self) -> frozenset[str]:
        """Paths of the layers that were called."""
        self._observer.planning.write()
        return self._calls.paths

    def finish(self, rank: int = 0, loss_scale: float = 1.0, updates: bool = True, detach: bool = True) -> Step:
        """Take the hooks off and hand the step over; the capture is empty afterwards.

        Args:
            updates: false if no optimizer has stepped yet.
            detach: false to leave the layers' hooks on for the capture of the next step (`take_over`).
        """
        self._observer.planning.settle()
        self.parameters.finish(updates)
        if self.losses is not None:
            if not self._logged:
                self.losses.finish(self._calls.micro_batches, loss_scale)
            self.settings.update(self.losses.settings)
            self.losses.close()
        if detach:
            self.detach()
        self._observer.end()
        self._records.copier.fetch()
        step = self._whole(rank, loss_scale) or self.peek(rank, loss_scale)
        self._observer.clear()
        return step

    def _whole(self, rank: int, loss_scale: float) -> Step | None:
        """The step as one that nothing is left out of; `None` where something is."""
        if self._calls.mixed or self._calls.recomputed:
            return None
        records, trace = self._tracer.finished()
        calls = self._calls
        return Step(
            self.number,
            records,
            rank,
            loss_scale,
            calls.micro_batches,
            self._notes,
            trace=trace,
            evaluations=calls.evaluated,
        )

    @aside
    def parameters_now(self) -> Step:
        """A step of weights, buffers and gradients, as they are now."""
        self.parameters.snapshot()
        self.parameters.finish(updates=False)
        return self.peek()

    @aside
    def weights(self) -> Step:
        """A step of the weights and buffers alone, as they are now."""
        self.parameters.snapshot()
        return self.peek()

    @property
    def left_out(self) -> tuple[str, ...]:
        """What could not be recorded, in words, but for calls in evaluation mode within the step."""
        return self._records.left_out.notes(training_only=self._calls.in_both_modes)

    @property
    def evaluations(self) -> int:
        """How many calls in evaluation mode are left out."""
        return self._calls.evaluations

    @property
    def _notes(self) -> tuple[str, ...]:
        count = self._calls.evaluations
        evaluated = f"{count} call(s) in evaluation mode within the step are not recorded"
        return (*((evaluated,) if count else ()), *self.left_out)

    def peek(self, rank: int = 0, loss_scale: float = 1.0) -> Step:
        """What was recorded so far; the capture goes on."""
        self._observer.planning.leave()
        # Evaluation in between is left out: calls in eval mode, where the step has calls in training mode too.
        training_only = self._calls.in_both_modes
        return Step(
            number=self.number,
            records=self._records.records(training_only, self._calls.recomputed),
            rank=rank,
            loss_scale=loss_scale,
            micro_batches=self._calls.micro_batches,
            notes=self._notes,
            evaluations=self._calls.evaluated,
            trace=self._tracer.trace(training_only),
        )
