"""Execution of one packed step: set the model to the recorded state, replay or perturb it, and record it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from padiff.compare.judge.limits import MOST_UNITS, ROUNDING
from padiff.errors import UsageError
from padiff.frameworks.hooking import Handle
from padiff.model.tree import LiveModel
from padiff.recorder import Recorder
from padiff.records import Step, TensorSource
from padiff.records.traces import Batch, Pack, unkept, with_leaves
from padiff.replaying.checks import StateRestorer, StateSnapshot, draw_like
from padiff.replaying.feeding import ChoiceFeeder, MaskFeeder, RecordedChoice


@dataclass(frozen=True)
class ReplayBatch:
    """A micro-batch of the reference. Each access creates new tensors.

    Args:
        batch: the recorded micro-batch.
        make: creates a tensor of the candidate's framework on the model's device.
        where: name of the micro-batch for messages.
        asked: called on each access of tensors, because the loop then trains on this micro-batch.
        make_label: creates tensors of labels; `None` to use `make`.
    """

    batch: Batch
    make: Callable[[TensorSource], Any]
    where: str
    asked: Callable[[], None] = lambda: None
    make_label: Callable[[TensorSource], Any] | None = None

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Return the positional arguments of the model's call.

        Raises:
            UsageError: the arguments were not recorded, or contain an object that a pack can't store.
        """
        return tuple(self._made(self._known().args))

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """Return the keyword arguments of the model's call.

        Raises:
            UsageError: the arguments were not recorded, or contain an object that a pack can't store.
        """
        arguments: dict[str, Any] = self._made(dict(self._known().kwargs))
        return arguments

    @property
    def labels(self) -> tuple[Any, ...]:
        """Return the arguments of the loss functions other than the model's outputs, in order.

        Raises:
            UsageError: no loss function was recorded, or the labels contain an object that a pack can't store.
        """
        if self.batch.labels is None:
            raise UsageError(
                f"{self.where}: no loss function of the framework was called there outside of the model, so the labels "
                "are not known: record the reference with rec.log_batch(inputs, labels) in its loop"
            )
        return tuple(self._made(self.batch.labels, self.make_label))

    @property
    def whole(self) -> Any:
        """Return the batch as the reference's host passed it to the loop; `None` if no host did."""
        return self._made(self.batch.whole)

    def _known(self) -> Batch:
        if not self.batch.seen:
            raise UsageError(
                f"{self.where}: what the model was called with is not known: record the reference with "
                "rec.log_batch(inputs, labels) in its loop"
            )
        return self.batch

    def _made(self, value: Any, make: Callable[[TensorSource], Any] | None = None) -> Any:
        self.asked()
        blank = next(unkept(value), None)
        if blank is not None:
            raise UsageError(
                f"{self.where} holds a {blank.kind}, which a pack can't hold (tensors, numbers, texts, tuples, lists "
                "and dicts it can): say with rec.log_batch(inputs, labels) what the model is called with"
            )
        return with_leaves(value, make or self.make)


@dataclass(frozen=True)
class ReplayStep:
    """A packed step to repeat.

    Attributes:
        pack: the recorded pack.
        batches: the micro-batches, in order.
        moved: True for a repetition that measures floors, with weights and inputs perturbed, or in float64.
        exact: True if the step runs in float64.
    """

    pack: Pack
    batches: tuple[ReplayBatch, ...]
    moved: bool = False
    exact: bool = False

    @property
    def number(self) -> int:
        """Return the step's number in the reference."""
        return self.pack.step

    @property
    def loss_scale(self) -> float:
        """Return the factor that scaled the reference's loss."""
        return self.pack.loss_scale

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Return the positional arguments of the model's call, for a step with a single micro-batch."""
        return self._only.inputs

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """Return the keyword arguments of the model's call, for a step with a single micro-batch."""
        return self._only.kwargs

    @property
    def labels(self) -> tuple[Any, ...]:
        """Return the labels, for a step with a single micro-batch."""
        return self._only.labels

    @property
    def _only(self) -> ReplayBatch:
        if len(self.batches) != 1:
            raise UsageError(
                f"step {self.number} of the reference has {len(self.batches)} micro-batches: go through step.batches, "
                "each with .inputs and .labels, and step the optimizer once afterwards"
            )
        return self.batches[0]


#: Number of perturbed repetitions of a step: half of them change by one unit in the last place, half by `MOST_UNITS`,
#: so that values cross a kink (ReLU, max pooling) as with larger noise. Chosen: the largest error of so many runs is
#: seldom small by chance, even for a tensor of one element.
RUNS = 8
#: Seed of the random signs.
SEED = 20240229

# Integer type to read a floating-point number's bits as, by its size in bytes.
_INTEGERS = {2: np.int16, 4: np.int32, 8: np.int64}


@dataclass(frozen=True)
class Perturbation:
    """The perturbation of one repetition.

    Attributes:
        run: index of the repetition, from 0.
        units: size of the change in units in the last place; 0 for no change.
        dtype: dtype that defines the unit.
        exact: True to run in float64 without a change.
    """

    run: int = 0
    units: int = 0
    dtype: str = "float32"
    exact: bool = False

    def moved(self, array: np.ndarray, *place: int) -> np.ndarray:
        """Return the array with each number changed up or down by the units; zeros and non-finite numbers stay.

        Args:
            place: numbers that identify the array; the random signs derive from them.
        """
        if not is_floating(array):
            return array
        if self.exact:
            return array.astype(np.float64)
        return _moved(array, self.units, self.dtype, np.random.default_rng([SEED, self.run, *place]))


#: No perturbation.
AS_IT_IS = Perturbation()


def moves(runs: int, dtype: str, exact: bool) -> list[Perturbation]:
    """Return the perturbations that measure a step's floors."""
    perturbed = [Perturbation(run, 1 if run % 2 == 0 else MOST_UNITS, dtype) for run in range(runs)]
    return [*perturbed, Perturbation(runs, exact=True)] if exact else perturbed


def is_floating(array: np.ndarray) -> bool:
    """Return True if the array has a floating-point dtype with a known unit in the last place."""
    return array.dtype.name in ROUNDING


def move_weights(model: LiveModel, move: Perturbation) -> Callable[[], None]:
    """Perturb all parameters and buffers of a model.

    Returns:
        A function that restores the buffers which the model computes itself. No transfer overwrites these buffers, so
        that they would stay perturbed in the next step.
    """
    tensors, layers = model.framework.tensors, model.framework.layers
    computed = {
        id(tensor)
        for node in model.nodes
        for slot, tensor, _ in layers.parameters(node.layer)
        if slot in layers.computed(node.layer)
    }
    before: list[tuple[Any, np.ndarray]] = []
    for number, (_, tensor) in enumerate(model.tensors()):
        if not move.exact and tensors.dtype(tensor) in ROUNDING:
            array = tensors.copy(tensor)
            if id(tensor) in computed:
                before.append((tensor, array))
            tensors.write(tensor, move.moved(array, 0, number))

    def restore() -> None:
        for tensor, array in before:
            tensors.write(tensor, array)

    return restore


def _moved(array: np.ndarray, units: int, dtype: str, random: Any) -> np.ndarray:
    # Units of the dtype of the computation: smaller changes would vanish when values are rounded to it.
    dtype_name = array.dtype.name
    bits = round(np.log2(max(ROUNDING[dtype] / ROUNDING[dtype_name], 1.0)))
    kind: Any = _INTEGERS[array.dtype.itemsize]
    flat = np.ascontiguousarray(array).reshape(-1)
    integers = flat.view(kind)
    by = kind(min(units << bits, np.iinfo(kind).max >> 2))
    signs = random.integers(0, 2, flat.size, dtype=np.int8).astype(kind) * kind(2) - kind(1)
    magnitude = integers & np.iinfo(kind).max
    with np.errstate(over="ignore", invalid="ignore"):
        moved = (integers + signs * by).view(array.dtype)
        fits = np.isfinite(flat) & (magnitude > by) & np.isfinite(moved)
    return np.where(fits, moved, flat).reshape(array.shape)


#: Names a run's move of its weights: number, units and dtype. `padiff golden record` sets it.
MOVE_VARIABLE = "PADIFF_GOLDEN_MOVE"


#: Makes compiled code draw the random numbers of eager code, if it is set. `padiff golden check` sets it.
RANDOM_VARIABLE = "PADIFF_GOLDEN_RANDOM"


def change_as_asked(model: Any) -> None:
    """Move a model's weights, and let compiled code draw as eager code does, as environment variables ask."""
    if os.environ.get(RANDOM_VARIABLE):
        LiveModel.from_model(model).framework.randomness.draw_as_eager()
    text = os.environ.get(MOVE_VARIABLE)
    if text:
        run, units, dtype = text.split()
        move_weights(LiveModel.from_model(model), Perturbation(int(run), int(units), dtype))


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
        self._draw_again: Callable[[], None] = lambda: None
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
            self._draw_again = self._model.draws()
        else:
            # Random numbers that can't be replayed are drawn again from the state that the unperturbed run had.
            self._draw_again()
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
