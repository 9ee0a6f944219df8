"""``batches``: the recorded inputs and labels of a run, as tensors of a framework."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, SupportsIndex, overload

from padiff.dump import open_run
from padiff.errors import UsageError
from padiff.frameworks import framework_called, framework_like
from padiff.frameworks.base import Framework
from padiff.records import Step, TensorSource
from padiff.records.pack import Pack, unkept, with_leaves
from padiff.records.recorded_batches import recorded_batches
from padiff.system.naming import first_few
from padiff.system.switches import say

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
