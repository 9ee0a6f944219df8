"""Doing a packed step: the model is put where the reference was before it, and its dropout is fed."""

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
from padiff.replaying.carrying import Carrying
from padiff.replaying.feeding import MaskFeeder
from padiff.replaying.kept import Kept, draw_again, draw_like, drawn_now
from padiff.replaying.moving import AS_IT_IS, Move, move_weights
from padiff.replaying.step import ReplayBatch, ReplayStep


class Doing:
    """Does packed steps, one at a time.

    Args:
        model: the candidate.
        optimizers: its optimizers.
        recorder: what records it.
        carrying: what brings weights and states over.

    Attributes:
        kept: what the user had; what is changed is put back by it.
        feeder: what gives dropout its masks; `None` outside of a step.
        notes: what could not be fed or was not used, in words.
        begun: the pack of the step that was begun last, and whether in float64; `None` once it was done.
    """

    def __init__(self, model: LiveModel, optimizers: Sequence[Any], recorder: Recorder, carrying: Carrying) -> None:
        self._model, self._optimizers, self._recorder, self._carrying = model, optimizers, recorder, carrying
        self.kept: Kept | None = None
        self.feeder: MaskFeeder | None = None
        self.notes: dict[str, None] = {}
        self.begun: tuple[Pack, bool] | None = None
        self._feeding: Handle | None = None
        self._batch: int | None = None
        self._drawn: Any = None
        self._narrow: Callable[[], None] | None = None
        self._unmove: Callable[[], None] | None = None

    def begin(
        self,
        pack: Pack,
        move: Move = AS_IT_IS,
        put: Callable[[], None] | None = None,
        masks: tuple[Pack, Mapping[str, str]] | None = None,
    ) -> ReplayStep:
        """Put the model where the reference was before a packed step, and record from now on.

        Args:
            move: how weights and inputs are moved.
            put: puts weights and states there instead.
            masks: a pack that the masks and the seeds are of, if not this one, and its layers by the candidate's.

        Raises:
            UsageError: the step can't be done with this model.
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
            # What can't be fed is drawn again as it was in the step itself.
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
            # What is drawn besides comes from the same state of the generators, after the same draws.
            draws=bool(drawing.unseen) and drawing.framework == framework.name,
        )
        if not any(framework.layers.compiled(node.layer) for node in self._model.nodes):
            self._feeding = framework.masks.feed(self.feeder)
        return self.batches(pack, move)

    def batches(self, pack: Pack, move: Move = AS_IT_IS) -> ReplayStep:
        """A pack's batches as tensors of the candidate's framework."""
        framework = self._model.framework
        near = next((tensor for _, tensor in self._model.tensors()), None)
        numbers: dict[Any, int] = {}

        def make(source: TensorSource) -> Any:
            array = source.read()
            if move.units or move.exact:
                array = move.moved(array, 1, numbers.setdefault(source.identity, len(numbers)))
            with self._recorder.unheard():  # it is made in the loop, and no call of the loop's
                return framework.tensors.make(array, near)

        def make_label(source: TensorSource) -> Any:
            array = source.read()
            # Labels are what is asked for, not what is computed: they stay.
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
        """The step is done, or left: nothing is fed any more, and the model is of its own dtype again."""
        handle, self._feeding = self._feeding, None
        if handle is not None:
            handle.remove()
        feeder, self.feeder = self.feeder, None
        if feeder is None or not self._recorder.recorded_anything:
            return
        for call in feeder.unanswered:
            self.notes[f"{call} has no mask of the reference's: it used its own random mask"] = None
        for mask in feeder.left:
            self.notes[f"the reference drops in {mask.layer} ({mask.function}); nothing here took that mask"] = None

    def take(self) -> Step | None:
        """The step was done once more: what was recorded of it, which goes nowhere else."""
        self.begun = None
        self.stop()
        try:
            return self._recorder.take()
        finally:
            self.narrow()

    def discard(self) -> None:
        """The step is left: what was recorded of it is forgotten."""
        self.stop()
        try:
            self._recorder.discard()
        finally:
            self.narrow()

    def narrow(self) -> None:
        """The model is of its own dtype again, and nothing is moved; once the step's tensors were taken."""
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
        undo += [framework.optimizers.in_float64(one) for one in self._optimizers]

        def narrow() -> None:
            for back in reversed(undo):
                back()

        self._narrow = narrow

    def _asked(self, number: int) -> Callable[[], None]:
        def asked() -> None:
            self._batch = number

        return asked

    def _micro_batch(self) -> int | None:
        """Which micro-batch is under way: counted where the model is called as a whole, else the one asked for last."""
        counted = self._recorder.micro_batch
        return counted if counted is not None else self._batch

    def _check_same(self) -> None:
        """Refuse a model that has become another one: what was carried to it is of the one that it was."""
        now = {node.path: node.layer for node in LiveModel(self._model.model).nodes}
        before = {node.path: node.layer for node in self._model.nodes}
        other = [path for path in {**before, **now} if before.get(path) is not now.get(path)]
        if other:
            raise UsageError(
                f"the model has other layers than when the replay began ({', '.join(other[:4])}): a replay does the "
                "steps of one model. Leave it as it is in the loop"
            )
