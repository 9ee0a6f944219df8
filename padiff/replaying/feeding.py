"""The reference's batches, dropout masks and choices, given to the candidate."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import permutations
from math import prod
from typing import Any, Generic, SupportsIndex, TypeVar, overload

import numpy as np

from padiff.compare.judge.limits import SINGLE, allowed
from padiff.dump import open_run
from padiff.errors import RunFolderError, SketchOnlyError, UsageError
from padiff.frameworks import framework_called, framework_like
from padiff.frameworks.base import Framework, Tensors
from padiff.frameworks.feeding import DropoutCall
from padiff.recorder.calls import Ranks, Seen, picked, plain_arguments, ranks_of
from padiff.records import LOOP, Step, TensorSource, TracedCall, is_below
from padiff.records.recorded import recorded_batches
from padiff.records.traces import Mask, Pack, unkept, with_leaves
from padiff.system.terminal import first_few, say

# Largest number of axes for which permutations are tried.
_MOST_AXES = 5


_Fed = TypeVar("_Fed")


class CallFeeder(Generic[_Fed]):
    """Gives recorded things to the calls that a model makes; a call that is recomputed gets its own thing again.

    Args:
        partners: the reference's layer path by the candidate's layer path.
        running: returns the paths of the candidate's running layer calls, outermost first.
        recomputing: returns True inside a forward that is repeated during backward (activation checkpointing).
    """

    def __init__(
        self, partners: Mapping[str, str], running: Callable[[], Sequence[str]], recomputing: Callable[[], bool]
    ) -> None:
        self._partners, self._running, self._recomputing = partners, running, recomputing
        #: By layer, what its calls were given, and the number of recomputed calls.
        self._fed: dict[str, list[_Fed | None]] = defaultdict(list)
        self._again: Counter[str] = Counter()

    def is_active(self) -> bool:
        """Return True if a call made now belongs to the model."""
        return bool(self._running())

    def _feed(self, search: Callable[[], _Fed | None]) -> _Fed | None:
        inside = self._running()[-1]
        fed = self._fed[inside]
        if self._recomputing():
            number = self._again[inside]
            self._again[inside] += 1
            return fed[number % len(fed)] if fed else None
        fed.append(search())
        return fed[-1]

    def _partners_around(self) -> list[str]:
        return [self._partners[path] for path in reversed(self._running()) if path in self._partners]


class MaskFeeder(CallFeeder[np.ndarray]):
    """Source of the recorded masks for the candidate's dropout calls.

    A call takes the next unused mask of its micro-batch from the partner of the innermost enclosing layer that has a
    partner, then from the partners of the layers around. Masks of reference layers whose own partner is elsewhere in
    the candidate are skipped at first, and used only if no other mask is left. So dropout can be a layer in one model
    and a function in the other, or one layer can stand for several.

    Args:
        masks: the reference's masks of the step, in order.
        partners: the reference's layer path by the candidate's layer path.
        running: returns the paths of the candidate's running layer calls, outermost first.
        recomputing: returns True inside a forward that is repeated during backward (activation checkpointing).
        batch: returns the index of the current micro-batch; `None` if unknown.
        draws: True if dropout also draws random numbers of its own, to advance the generators.

    Attributes:
        unanswered: calls without a mask, as ``layer (function)``.
    """

    def __init__(
        self,
        masks: Sequence[Mask],
        partners: Mapping[str, str],
        running: Callable[[], Sequence[str]],
        recomputing: Callable[[], bool],
        batch: Callable[[], int | None] = lambda: None,
        draws: bool = False,
    ) -> None:
        super().__init__(partners, running, recomputing)
        self.draws = draws
        self._batch = batch
        self._waiting = list(masks)
        self._back = {reference: candidate for candidate, reference in partners.items()}
        self.unanswered: dict[str, None] = {}
        #: The masks of all calls, in order.
        self.log: list[np.ndarray | None] = []
        self._rerun: list[np.ndarray | None] | None = None

    @contextmanager
    def again(self, start: int) -> Iterator[None]:
        """Repeat the masks from an index of the log on for calls made inside the block."""
        self._rerun = self.log[start:]
        try:
            yield
        finally:
            self._rerun = None

    @property
    def left(self) -> list[Mask]:
        """Return the masks that no call of the candidate used."""
        return list(self._waiting)

    def is_active(self) -> bool:
        """Return True if a dropout call made now belongs to the model."""
        return super().is_active() or self._rerun is not None

    def mask(self, call: DropoutCall) -> np.ndarray | None:
        """Return the mask for a call, True for kept elements; `None` if no recorded mask fits."""
        if self._rerun is not None:
            return self._rerun.pop(0) if self._rerun else None
        return self._feed(lambda: self._unused(call))

    def _unused(self, call: DropoutCall) -> np.ndarray | None:
        running = self._running()
        mask = self._next(call, running)
        if mask is None:
            self.unanswered[f"{running[-1]} ({call.function}, rate {call.rate:g})"] = None
        self.log.append(mask)
        return mask

    def _next(self, call: DropoutCall, running: Sequence[str]) -> np.ndarray | None:
        batch = self._batch()
        waiting = [mask for mask in self._waiting if batch is None or mask.batch == batch]
        partners = self._partners_around()
        for reference in partners:
            # Skip masks whose layer has another partner in the candidate: that layer will ask for them.
            candidates = (mask for mask in waiting if self._back.get(mask.layer, running[-1]) in running)
            mask_array = self._first(call, (mask for mask in candidates if _within(mask.layer, reference)))
            if mask_array is not None:
                return mask_array
        # One model's dropout layer can be a function or another layer in the other model: match by order.
        inside = ([mask for mask in waiting if _within(mask.layer, reference)] for reference in partners)
        return self._first(call, next((masks[:1] for masks in inside if masks), ()))

    def _first(self, call: DropoutCall, masks: Iterable[Mask]) -> np.ndarray | None:
        for mask in masks:
            array = fitted(mask, call.shape)
            if array is not None:
                self._waiting = [unused for unused in self._waiting if unused is not mask]
                return array
        return None


def _within(layer: str, above: str) -> bool:
    return layer == above or is_below(layer, above)


def fitted(mask: Mask, shape: tuple[int, ...]) -> np.ndarray | None:
    """Return a mask in the given shape; `None` if it does not fit.

    Axes may be merged or permuted.
    """
    if mask.shape == shape:
        return mask.kept()
    if prod(mask.shape) != prod(shape):
        return None
    if any(mask.shape[len(mask.shape) - k :] == shape[len(shape) - k :] for k in _tails(mask.shape, shape)):
        return mask.kept().reshape(shape)
    for order in _orders(len(mask.shape)):
        if tuple(mask.shape[axis] for axis in order) == shape:
            return np.ascontiguousarray(mask.kept().transpose(order))
    return None


def _tails(first: tuple[int, ...], second: tuple[int, ...]) -> range:
    """Return the numbers of trailing axes to compare, if one shape merges leading axes of the other."""
    return range(1, min(len(first), len(second)) + 1) if len(first) != len(second) else range(0)


def _orders(axes: int) -> Iterator[tuple[int, ...]]:
    """Yield permutations of axes, usual ones first: batch and sequence exchanged, channels last, channels first."""
    if not 2 <= axes <= _MOST_AXES:
        return
    trailing = tuple(range(2, axes))
    yield (1, 0, *trailing)
    yield (0, *trailing, 1)
    yield (0, axes - 1, *range(1, axes - 1))
    yield from permutations(range(axes))


@dataclass(frozen=True)
class RecordedChoice:
    """What a call of the reference chose.

    Attributes:
        layer: path of the layer.
        function: the function's common name.
        places: the chosen places of each row, of shape (rows, chosen).
    """

    layer: str
    function: str
    places: np.ndarray


def choices_of(step: Step) -> list[RecordedChoice]:
    """Return the choices of a recorded step that can be given to another model, in order."""
    try:
        calls = [call for call in step.trace.calls if call.choice is not None and call.layer != LOOP]
    except RunFolderError:
        return []
    choices = []
    for call in calls:
        choice = call.choice
        assert choice is not None
        source = step.trace.tensors[choice.picked].source
        if not _can_be_given(step, call) or source is None or source.sketched:
            continue
        try:
            places = np.atleast_2d(source.read())
        except (RunFolderError, SketchOnlyError):
            continue
        if places.shape == (choice.rows, choice.chosen):
            choices.append(RecordedChoice(call.layer, call.function, places.astype(np.int64)))
    return choices


# Functions whose places another call can take.
_GIVEN = frozenset({"topk", "argmax", "argmin", "sort", "argsort", "max", "min"})


def _can_be_given(step: Step, call: TracedCall) -> bool:
    choice = call.choice
    known = choice is not None and choice.chosen > 0 and choice.every == 1
    return known and call.function in _GIVEN and not _gives_values(step, call)


def _gives_values(step: Step, call: TracedCall) -> bool:
    """Return True if a call that ranks returns values only: it chooses where gradients go."""
    dtypes = [step.trace.tensors[operand.tensor].dtype for operand in call.outputs]
    return bool(call.choice and call.choice.chosen) and not any(dtype.startswith("int") for dtype in dtypes)


def unpinned(step: Step) -> list[str]:
    """Return the calls that choose, and whose choice can't be given to another model, as ``layer (function)``."""
    try:
        calls = [call for call in step.trace.calls if call.chooses]
    except RunFolderError:
        return []
    left = [call for call in calls if not _can_be_given(step, call) and not _gives_values(step, call)]
    return list(dict.fromkeys(f"{call.layer} ({call.function})" for call in left))


@dataclass
class _Pinned:
    """How often a layer's calls were given places, and in how many rows they chose otherwise themselves."""

    rows: int = 0
    otherwise: int = 0
    layers: dict[str, None] = field(default_factory=dict)


class ChoiceFeeder(CallFeeder[RecordedChoice]):
    """Source of the reference's choices for the candidate's functions that choose.

    A call takes the next unused choice among as many places of as many rows, from the partner of the innermost
    enclosing layer that has one, then from the partners of the layers around. It keeps its own choice if no choice
    fits, or if its scores say that rounding does not explain the other one: then the difference is to be seen.

    Args:
        choices: the reference's choices of the step, in order.
        partners: the reference's layer path by the candidate's layer path.
        running: returns the paths of the candidate's running layer calls, outermost first.
        recomputing: returns True inside a forward that is repeated during backward.
        tensors: the candidate's framework.
        unheard: context for calls that are not the user's.
    """

    def __init__(
        self,
        choices: Sequence[RecordedChoice],
        partners: Mapping[str, str],
        running: Callable[[], Sequence[str]],
        recomputing: Callable[[], bool],
        tensors: Tensors,
        unheard: Callable[[], AbstractContextManager[None]],
    ) -> None:
        super().__init__(partners, running, recomputing)
        self._waiting = list(choices)
        self._tensors, self._unheard = tensors, unheard
        self._pinned: dict[str, _Pinned] = defaultdict(_Pinned)
        self._refused: dict[str, None] = {}

    def notes(self) -> Iterator[str]:
        """Yield what was pinned, and what was not."""
        for function, pinned in self._pinned.items():
            layers = len(pinned.layers)
            where, counts = f"{layers} layer{'s' * (layers > 1)}", f"{pinned.otherwise:,} of {pinned.rows:,} rows"
            yield f"{function}() of {where} takes the reference's places: {counts} choose otherwise, within rounding"
        for call in self._refused:
            yield f"{call} keeps its own choice, which is not the reference's"
        left = list(dict.fromkeys(f"{choice.layer} ({choice.function})" for choice in self._waiting))
        if left:
            yield f"choices of the reference that no call here took: {first_few(left, 4)}"

    def places(self, name: str, arguments: Mapping[str, Any], output: Any) -> tuple[int | None, np.ndarray] | None:
        """Return the axis and the reference's places for a call; `None` to leave the call its own."""
        scores = next(iter(arguments.values()))
        if not self._tensors.is_tensor(scores):
            return None
        ranks = ranks_of(name, plain_arguments(arguments), self._tensors.shape(scores))
        if ranks is None:
            return None
        with self._unheard(), self._tensors.without_grad():
            table = self._tensors.rows(scores, ranks.axis)
            rows = self._tensors.shape(table)[0]
            outputs = list(output) if isinstance(output, (tuple, list)) else [output]
            own = picked(self._tensors, Seen(ranks, rows, 1, None, None), outputs)
            if own is None:
                return None
            own, table = (self._tensors.copy(tensor) for tensor in (own, table))
        choice = self._choice(name, own.shape)
        if choice is None or int(choice.places.max(initial=0)) >= table.shape[1]:
            return None
        layer = self._running()[-1]
        otherwise = (own != choice.places).any(axis=1)
        if otherwise.any() and not _explained(table, own, choice.places, self._tensors.dtype(scores)):
            self._refused[f"{layer} ({name}, beyond rounding)"] = None
            return None
        pinned = self._pinned[name]
        pinned.rows, pinned.otherwise = pinned.rows + rows, pinned.otherwise + int(otherwise.sum())
        pinned.layers[layer] = None
        if not otherwise.any():
            return None
        shape = self._tensors.shape(next(each for each in reversed(outputs) if self._is_places(each)))
        return ranks.axis, _shaped(choice.places, ranks, self._tensors.shape(scores), tuple(shape))

    def refuse(self, name: str) -> None:
        """Note that a call keeps its own choice, in a form that is not known."""
        self._refused[f"{self._running()[-1]} ({name}, in a form that padiff does not know)"] = None

    def _is_places(self, tensor: Any) -> bool:
        return self._tensors.dtype(tensor).startswith("int")

    def _choice(self, name: str, shape: tuple[int, ...]) -> RecordedChoice | None:
        return self._feed(lambda: self._next(name, shape))

    def _next(self, name: str, shape: tuple[int, ...]) -> RecordedChoice | None:
        fitting = [choice for choice in self._waiting if choice.places.shape == shape]
        partners = self._partners_around()
        for alike in (True, False):
            for reference in partners:
                for choice in fitting:
                    within = choice.layer == reference or is_below(choice.layer, reference)
                    if within and (not alike or choice.function == name):
                        self._waiting = [each for each in self._waiting if each is not choice]
                        return choice
        return None


def _explained(scores: np.ndarray, own: np.ndarray, places: np.ndarray, dtype: str) -> bool:
    """Return True if the scores of both choices are so near that rounding can exchange them."""
    wide = scores.astype(np.float64)
    gaps = np.abs(np.take_along_axis(wide, own, 1) - np.take_along_axis(wide, places, 1))
    finite = wide[np.isfinite(wide)]
    size = math.sqrt(float((finite**2).mean())) if finite.size else 0.0
    return bool(np.nan_to_num(gaps, nan=np.inf).max() <= SINGLE * allowed(dtype, "forward") * size)


def _shaped(places: np.ndarray, ranks: Ranks, scores: Sequence[int], shape: tuple[int, ...]) -> np.ndarray:
    """Return places of rows in the shape in which a function returns them."""
    if ranks.axis is None:
        return places.reshape(shape)
    axis = ranks.axis % len(scores)
    lead = [extent for k, extent in enumerate(scores) if k != axis]
    return np.moveaxis(places.reshape(*lead, places.shape[1]), -1, axis).reshape(shape)


# Number of steps that a message names.
_NAMED = 6


@dataclass(frozen=True)
class RunBatch:
    """A micro-batch of a recorded run. Each access creates new tensors.

    Iteration yields the inputs and then the labels: ``for *inputs, labels in padiff.batches(run)``. The labels are a
    tensor if there is one, else a tuple.

    Attributes:
        step: number of the step.
        micro_batch: index of the micro-batch in the step, from 0.
    """

    step: int
    micro_batch: int
    _inputs: tuple[Any, ...] = field(repr=False)
    _kwargs: Mapping[str, Any] = field(repr=False)
    _named: Mapping[str, Any] = field(repr=False)
    _labels: tuple[Any, ...] | None = field(repr=False)
    _make: Callable[[TensorSource], Any] = field(repr=False)

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Return the positional arguments of the model's call, in order.

        Without a pack, keyword arguments are not known as such: then all recorded input tensors are here.
        """
        return tuple(with_leaves(value, self._make) for value in self._inputs)

    @property
    def kwargs(self) -> dict[str, Any]:
        """Return the keyword arguments of the model's call, if a pack recorded them; else an empty dict."""
        return {name: with_leaves(value, self._make) for name, value in self._kwargs.items()}

    @property
    def named(self) -> dict[str, Any]:
        """Return the inputs by the parameter names of the recorded model's forward, as far as the names are known."""
        return {name: with_leaves(value, self._make) for name, value in {**self._named, **self._kwargs}.items()}

    @property
    def labels(self) -> tuple[Any, ...]:
        """Return the arguments of the loss functions other than the model's outputs, in order.

        A tensor that several loss functions received is listed once if a pack was recorded, else once per loss
        function.
        """
        return tuple(with_leaves(value, self._make) for value in self._labels or ())

    def __iter__(self) -> Iterator[Any]:
        yield from self.inputs
        yield from self.kwargs.values()
        labels = self.labels
        yield labels[0] if len(labels) == 1 else labels


class Batches(Sequence[RunBatch]):
    """The micro-batches of a recorded run, in order.

    Args:
        places: step number and micro-batch index of each batch.
        read: a function that reads the batches of a step.
        framework: framework of the tensors.
        label: name of the run for messages.
    """

    def __init__(
        self, places: Sequence[tuple[int, int]], read: Callable[[int], list[RunBatch]], framework: Framework, label: str
    ) -> None:
        self._places, self._read, self._framework, self._label = places, read, framework, label
        self._last: tuple[int, list[RunBatch]] = (-1, [])

    @property
    def steps(self) -> list[int]:
        """Return the numbers of the steps that these batches belong to."""
        return list(dict.fromkeys(step for step, _ in self._places))

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: SupportsIndex) -> RunBatch: ...

    @overload
    def __getitem__(self, index: slice) -> Batches: ...

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Batches(self._places[index], self._read, self._framework, self._label)
        step, number = self._places[index]
        if self._last[0] != step:
            self._last = step, self._read(step)
        return self._last[1][number]

    def dataset(self) -> Any:
        """Return a torch ``Dataset`` or a ``paddle.io.Dataset`` whose items are whole batches, ``(*inputs, labels)``.

        Use the dataset with ``DataLoader(dataset, batch_size=None, shuffle=False)``.
        """
        return self._framework.data.dataset(_Items(self))

    def __repr__(self) -> str:
        return f"<Batches of {self._label}: {len(self)} in {len(self.steps)} steps, as {self._framework.name} tensors>"


class _Items(Sequence[tuple[Any, ...]]):
    """Sequence of the batches as tuples ``(*inputs, labels)``."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: Any) -> Any:
        return tuple(self._batches[index])


def batches(
    source: Any,
    *,
    steps: Sequence[int] | None = None,
    like: Any = None,
    framework: str | None = None,
    missing: str = "error",
) -> Batches:
    """Return the batches of a recorded run, in order, as tensors.

    All micro-batches of each recorded step are returned, from the step's pack if there is one, else from the recorded
    inputs of the model and of the loss functions.

    Args:
        source: a run folder.
        steps: numbers of steps. Default: all recorded steps.
        like: a model or a tensor; the tensors are created in its framework and on its device.
        framework: name of the framework, instead of `like`. Default: the framework that this process has imported.
        missing: handling of steps whose batch is incomplete: ``"error"`` names them, ``"skip"`` leaves them out and
            prints one line on standard error.

    Raises:
        RunFolderError: the run can't be read.
        UsageError: a step's batch is incomplete, or the framework is ambiguous.
    """
    if missing not in ("error", "skip"):
        raise UsageError(f"missing is 'error' or 'skip', got {missing!r}")
    if like is not None and framework is not None:
        raise UsageError("batches: give like= or framework=, not both")
    target, near = framework_like(like) if like is not None else (framework_called(framework), None)
    run, label = open_run(source), str(source)
    numbers = sorted({*run.numbers(), *run.packs})
    unknown = [step for step in steps or () if step not in numbers]
    if unknown:
        raise UsageError(f"{label} has no step {unknown[0]}: recorded are {first_few(numbers, _NAMED)}")

    def make(tensor: TensorSource) -> Any:
        return target.data.tensor(tensor.read(), near)

    def read(step: int) -> tuple[list[RunBatch], str]:
        if step in run.packs:
            items, problem = _of_pack(run.packs[step], make)
            if not problem:
                return items, ""
        if step in run.numbers():
            return _of_step(run.steps(step)[0], make)
        return items, problem

    places, problems = [], {}
    for step in numbers if steps is None else steps:
        items, problem = read(step)
        if problem:
            problems[step] = problem
        else:
            places += [(step, number) for number in range(len(items))]
    if problems:
        step, why = next(iter(problems.items()))
        which = f"step{'s' if len(problems) > 1 else ''} {first_few([*problems], _NAMED)}"
        if missing == "error" or not places:
            skip = " (missing='skip' leaves them out)" if places else ""
            raise UsageError(f"{label} does not hold the batch of {which}{skip}. Of step {step}: {why}")
        say(f"the batches of {label} are without {which}: of step {step}, {why}")
    if not places:
        raise UsageError(f"{label} holds no step yet")
    return Batches(places, lambda step: read(step)[0], target, label)


def _of_step(step: Step, make: Callable[[TensorSource], Any]) -> tuple[list[RunBatch], str]:
    recorded = recorded_batches(step)
    items = [
        RunBatch(step.number, number, tuple(batch.inputs.values()), {}, batch.inputs, batch.labels, make)
        for number, batch in enumerate(recorded)
    ]
    return items, next((batch.problem for batch in recorded if batch.problem), "")


def _of_pack(pack: Pack, make: Callable[[TensorSource], Any]) -> tuple[list[RunBatch], str]:
    items = [
        RunBatch(pack.step, number, batch.args, batch.kwargs, {}, batch.labels, make)
        for number, batch in enumerate(pack.batches)
    ]
    if not pack.batches or not all(batch.seen for batch in pack.batches):
        return (
            items,
            "what the model was called with was not seen: say it in the loop with rec.log_batch(inputs, labels)",
        )
    lacking = next((u for batch in pack.batches for u in unkept((batch.args, batch.kwargs, batch.labels))), None)
    if lacking is not None:
        return (
            items,
            f"it holds a {lacking.kind}, which a pack can't hold: say in the loop with rec.log_batch what it is",
        )
    return items, ""
