"""Execution of one packed step: set the model to the recorded state, replay its dropout, and record it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from padiff.errors import UsageError
from padiff.frameworks.hooking import Handle
from padiff.model.live_model import LiveModel
from padiff.recorder import Recorder
from padiff.records import Step, TensorSource
from padiff.records.pack import Pack
from padiff.replaying.feeding import MaskFeeder
from padiff.replaying.perturbation import AS_IT_IS, Perturbation, move_weights
from padiff.replaying.pinning import ChoiceFeeder, RecordedChoice
from padiff.replaying.restore_state import StateRestorer
from padiff.replaying.state_snapshot import StateSnapshot, draw_again, draw_like, drawn_now
from padiff.replaying.step import ReplayBatch, ReplayStep


def _no_choices(_: int) -> Sequence[RecordedChoice]:
    return ()


class StepRunner:
    """Runner of packed steps with the candidate, one at a time.

    Args:
        model: the candidate.
        optimizers: the candidate's optimizers.
        recorder: the recorder of the candidate.
        carrying: transfer of weights and optimizer states.
        choices: returns the reference's choices of a step, by the step's number.

    Attributes:
        kept: snapshot of the user's state, which restores the model at the end.
        feeder: source of dropout masks; `None` outside of a step.
        notes: messages about masks that could not be replayed or were not used.
        begun: pack of the step that was begun last, and True if it runs in float64; `None` after the step.
    """

    def __init__(
        self,
        model: LiveModel,
        optimizers: Sequence[Any],
        recorder: Recorder,
        carrying: StateRestorer,
        choices: Callable[[int], Sequence[RecordedChoice]] = _no_choices,
    ) -> None:
        self._choices = choices
        self._pinning: tuple[Handle, ChoiceFeeder] | None = None
        self._model, self._optimizers, self._recorder, self._carrying = model, optimizers, recorder, carrying
        self.kept: StateSnapshot | None = None
        self.feeder: MaskFeeder | None = None
        self.notes: dict[str, None] = {}
        self.begun: tuple[Pack, bool] | None = None
        self._feeding: Handle | None = None
        self._batch: int | None = None
        self._drawn: Any = None
        self._narrow: Callable[[], None] | None = None
        self._unmove: Callable[[], None] | None = None

    def start_step(
        self,
        pack: Pack,
        move: Perturbation = AS_IT_IS,
        put: Callable[[], None] | None = None,
        masks: tuple[Pack, Mapping[str, str]] | None = None,
    ) -> ReplayStep:
        """Set the model to the recorded state before a packed step, and start recording.

        Args:
            pack: the pack of the step.
            move: perturbation of weights and inputs.
            put: a function that sets weights and states instead.
            masks: another pack for masks and seeds, and its layer paths by the candidate's.

        Raises:
            UsageError: the step can't be run with this model.
        """
        assert self.kept is not None
        self._check_same()
        self.begun = pack, move.exact
        framework = self._model.framework
        if move.exact:
            self._widen()
        if put is not None:
            put()
        else:
            self._carrying.carry(pack.step, self.kept.undo)
        if move.units:
            self._unmove = move_weights(self._model, move)
        framework.layers.clear_gradients(self._model.model)
        drawing, partners = (pack, self._carrying.partners) if masks is None else masks
        if move is AS_IT_IS:
            draw_like(self._model, drawing.seeds)
            self._drawn = drawn_now(self._model)
        else:
            # Random numbers that can't be replayed are drawn again from the state that the unperturbed run had.
            draw_again(self._model, self._drawn)
        self._recorder.step = pack.step
        self._batch = None
        self._recorder.attach()
        self.feeder = MaskFeeder(
            drawing.masks,
            partners,
            lambda: self._recorder.running,
            framework.hooks.recomputing,
            self._micro_batch,
            # Other random numbers come from the same generator state, so dropout must advance it as well.
            draws=bool(drawing.unseen) and drawing.framework == framework.name,
        )
        if not any(framework.layers.compiled(node.layer) for node in self._model.nodes):
            self._feeding = framework.masks.feed(self.feeder)
            choices = self._choices(pack.step) if masks is None else ()
            if choices:
                self._pin(choices)
        return self.batches(pack, move)

    def _pin(self, choices: Sequence[RecordedChoice]) -> None:
        """Give the candidate's functions that choose the reference's choices."""
        framework = self._model.framework
        feeder = ChoiceFeeder(
            choices,
            self._carrying.partners,
            lambda: self._recorder.running,
            framework.hooks.recomputing,
            framework.tensors,
            self._recorder.unheard,
        )
        self._pinning = framework.choosing.feed(feeder), feeder

    def batches(self, pack: Pack, move: Perturbation = AS_IT_IS) -> ReplayStep:
        """Return the batches of a pack as tensors of the candidate's framework."""
        framework = self._model.framework
        near = next((tensor for _, tensor in self._model.tensors()), None)
        numbers: dict[Any, int] = {}

        def make(source: TensorSource) -> Any:
            array = source.read()
            if move.units or move.exact:
                array = move.moved(array, 1, numbers.setdefault(source.identity, len(numbers)))
            with self._recorder.unheard():  # padiff creates it, not the user's loop
                return framework.tensors.make(array, near)

        def make_label(source: TensorSource) -> Any:
            array = source.read()
            # Labels are not perturbed: they are targets, not computed values.
            exact = move.exact and array.dtype.kind == "f"
            with self._recorder.unheard():
                return framework.tensors.make(array.astype(np.float64) if exact else array, near)

        several = len(pack.batches) > 1
        return ReplayStep(
            pack,
            tuple(
                ReplayBatch(
                    batch,
                    make,
                    f"{f'micro-batch {k} of ' if several else ''}step {pack.step}",
                    self._asked(k),
                    make_label,
                )
                for k, batch in enumerate(pack.batches)
            ),
            moved=bool(move.units or move.exact),
            exact=move.exact,
        )

    def stop(self) -> None:
        """End or abandon the step: stop replaying masks, and note the masks that did not match."""
        handle, self._feeding = self._feeding, None
        if handle is not None:
            handle.remove()
        feeder, self.feeder = self.feeder, None
        pinning, self._pinning = self._pinning, None
        if pinning is not None:
            pinning[0].remove()
        if pinning is not None and self._recorder.recorded_anything:
            self.notes.update(dict.fromkeys(pinning[1].notes()))
        if feeder is None or not self._recorder.recorded_anything:
            return
        for call in feeder.unanswered:
            self.notes[f"{call} has no mask of the reference's: it used its own random mask"] = None
        for mask in feeder.left:
            self.notes[f"the reference drops in {mask.layer} ({mask.function}); nothing here took that mask"] = None

    def end_step(self) -> Step | None:
        """End a repeated step and return its records, which are written nowhere; `None` if nothing was recorded."""
        self.begun = None
        self.stop()
        try:
            return self._recorder.pop_step()
        finally:
            self.narrow()

    def discard(self) -> None:
        """Abandon the step, and discard its records."""
        self.stop()
        try:
            self._recorder.discard()
        finally:
            self.narrow()

    def narrow(self) -> None:
        """Restore the model's dtype and undo the perturbation. Call this after the step's tensors were copied."""
        unmove, self._unmove = self._unmove, None
        if unmove is not None:
            unmove()
        narrow, self._narrow = self._narrow, None
        if narrow is not None:
            self._model.framework.layers.clear_gradients(self._model.model)
            narrow()

    def _widen(self) -> None:
        framework = self._model.framework
        framework.layers.clear_gradients(self._model.model)
        undo = [framework.tensors.in_float64([tensor for _, tensor in self._model.tensors()])]
        undo += [framework.optimizers.in_float64(optimizer) for optimizer in self._optimizers]

        def narrow() -> None:
            for back in reversed(undo):
                back()

        self._narrow = narrow

    def _asked(self, number: int) -> Callable[[], None]:
        def asked() -> None:
            self._batch = number

        return asked

    def _micro_batch(self) -> int | None:
        """Return the index of the current micro-batch; `None` if unknown.

        Calls of the whole model are counted; without such calls, the micro-batch accessed last is the current one.
        """
        counted = self._recorder.micro_batch
        return counted if counted is not None else self._batch

    def _check_same(self) -> None:
        """Refuse a model whose layers were replaced since the replay began: the alignment is for the old layers."""
        now = {node.path: node.layer for node in LiveModel(self._model.model).nodes}
        before = {node.path: node.layer for node in self._model.nodes}
        changed = [path for path in {**before, **now} if before.get(path) is not now.get(path)]
        if changed:
            raise UsageError(
                f"the model has other layers than when the replay began ({', '.join(changed[:4])}): a replay does the "
                "steps of one model. Leave it as it is in the loop"
            )
