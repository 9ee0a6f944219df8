"""The types that flow through every room: records, pairs, diffs, and their containers.

Numpy only. Everything here is frozen: a room makes new values, it does not edit the ones it was given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

#: Where in a step, in causal order.
STAGES = ("input", "weight", "forward", "loss", "backward", "grad", "update")

#: The stages whose tensors are those of a parameter.
PARAMETER_STAGES = frozenset({"weight", "grad", "update"})

#: The path of the recorded model itself.
ROOT = "(root)"

#: The path that step-wide scalars (loss, learning rate) are recorded under.
LOOP = "(loop)"


def inner_path(path: str, above: str) -> str:
    """Path of a layer from the layer ``above`` it; empty for that layer itself."""
    if path == above:
        return ""
    return path if above == ROOT else path[len(above) + 1 :]


class TensorSource(Protocol):
    """Something that gives a tensor's values when asked: an array in memory, or a file."""

    def read(self) -> np.ndarray: ...


@dataclass(frozen=True, slots=True)
class InMemory:
    """A tensor source whose values are in memory already."""

    array: np.ndarray

    def read(self) -> np.ndarray:
        return self.array


@dataclass(frozen=True, slots=True)
class Record:
    """One tensor seen at a site.

    Attributes:
        layer: dotted path of the layer from the recorded model; `ROOT` for the model itself.
        stage: one of `STAGES`.
        slot: which tensor of the layer: ``output.0``, ``input.x``, a parameter's own name.
        call: 0 for the layer's first call within the step, 1 for its second, ...
        order: position among all records of the step, in the order they came into being.
        layer_type: class name of the layer, as the framework's user wrote it.
        dtype: the tensor's true dtype (``bfloat16`` also where numpy has none).
        shape: the tensor's shape as recorded.
        source: where the values are; `value` reads them.
    """

    layer: str
    stage: str
    slot: str
    source: TensorSource
    dtype: str
    shape: tuple[int, ...]
    call: int = 0
    order: int = 0
    layer_type: str = ""

    @property
    def site(self) -> str:
        """The tensor's address, e.g. ``encoder.0.linear/forward/output.0#1``."""
        return f"{self.layer}/{self.stage}/{self.slot}" + (f"#{self.call}" if self.call else "")

    @property
    def value(self) -> np.ndarray:
        """The tensor's values (read on every access, nothing is kept)."""
        return self.source.read()


def is_functional(slot: str) -> bool:
    """Whether a slot is a functional call's inside of a layer (``softmax().0``)."""
    return "()" in slot


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter or buffer that a layer owns itself.

    Attributes:
        slot: its name within the layer.
        shape, dtype: as the framework stores it.
        role: ``parameter`` or ``buffer`` (running statistics are buffers in both frameworks here).
        layout: ``in_out`` or ``out_in`` for the matrix of a linear layer, else empty.
        trainable: whether an optimizer may change it.
        tied_to: ``layer/slot`` of the first place where the same tensor was seen, else empty.
    """

    slot: str
    shape: tuple[int, ...]
    dtype: str
    role: str = "parameter"
    layout: str = ""
    trainable: bool = True
    tied_to: str = ""


@dataclass(frozen=True, slots=True)
class Layer:
    """One node of the layer tree.

    Attributes:
        path: dotted path from the recorded model; `ROOT` for the model itself.
        type: class name.
        kind: the framework's own class that it is or derives from, lower case (``conv2d``),
            or ``type`` in lower case for a class of the user's.
        parameters: what it owns itself, in order of definition.
        settings: hyper-parameters that are plain values (``eps``, ``momentum``, ``stride``), under common names.
        aliases: further paths under which the same object is reachable (shared layers).
        children: how many direct sublayers it has.
        recorded: whether the lists let its tensors be recorded.
    """

    path: str
    type: str
    kind: str
    parameters: tuple[Parameter, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    children: int = 0
    recorded: bool = True


@dataclass(frozen=True, slots=True)
class Step:
    """What one rank recorded in one optimizer step.

    Attributes:
        number: the step, counted from 0.
        records: all of the step's records, in the order of ``Record.order``.
        rank: which process of a distributed run.
        loss_scale: factor by which the loss was scaled before backward (AMP); gradients of
            activations are divided by it when compared, `grad` records are unscaled already.
        micro_batches: how many calls of the whole model the step had.
        notes: sentences about what could not be recorded.
    """

    number: int
    records: tuple[Record, ...]
    rank: int = 0
    loss_scale: float = 1.0
    micro_batches: int = 1
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What holds for all steps of a run.

    Attributes:
        framework, framework_version: ``torch`` / ``paddle`` and its version.
        layers: the layer tree, depth first, in order of definition; the first one is the model itself.
        name: what to call the run.
        world_size: how many processes record it.
        layer_map: paths that answer, in order, to the other run's (the seeds' ``set_layer_map``).
        recording: how it was recorded, for people (schedule, lists).
    """

    framework: str
    framework_version: str
    layers: tuple[Layer, ...]
    name: str = ""
    world_size: int = 1
    layer_map: tuple[str, ...] = ()
    recording: Mapping[str, Any] = field(default_factory=dict)


class Run(Protocol):
    """What one training run left behind, in memory or in a folder."""

    @property
    def name(self) -> str: ...

    @property
    def info(self) -> RunInfo: ...

    def numbers(self) -> list[int]:
        """The recorded steps' numbers, ascending."""

    def steps(self, number: int) -> list[Step]:
        """One recorded step, as each rank saw it, in the order of the ranks."""

    def finished(self) -> bool:
        """Whether no further step will come."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two records that stand for the same quantity; one side may be missing.

    Attributes:
        step: the step's number.
        reference, candidate: the records, `None` where that side has none.
        transform: how the candidate's values are brought into the reference's layout:
            empty or ``transpose``.
        scales: what each side's values are divided by before comparing (loss scaling).
    """

    step: int
    reference: Record | None
    candidate: Record | None
    transform: str = ""
    scales: tuple[float, float] = (1.0, 1.0)

    @property
    def anchor(self) -> Record:
        """The record that names the pair: the reference's, or the candidate's where it stands alone."""
        record = self.reference if self.reference is not None else self.candidate
        assert record is not None, "a pair has at least one side"
        return record

    @property
    def stage(self) -> str:
        return self.anchor.stage

    @property
    def complete(self) -> bool:
        return self.reference is not None and self.candidate is not None


@dataclass(frozen=True, slots=True)
class Figures:
    """How far two tensors are apart, computed in float64 over positions where both are finite.

    Attributes:
        max_abs: largest ``|c - r|``.
        max_rel: largest ``|c - r| / |r|`` over ``r != 0``.
        mean_abs: mean of ``|c - r|``.
        mean_reference: mean of ``|r|``.
        l2: ``||c - r||``.
        reference_l2, candidate_l2: ``||r||`` and ``||c||``.
        bulk_l2: ``||c - r||`` without its few largest elements (`measure` says how many); `None` if not looked at.
        size: number of elements.
        index: where ``max_abs`` is.
        values: reference's and candidate's value there.
        beyond: how many elements are beyond an elementwise tolerance (0 if none was asked for).
        nonfinite: how many positions are NaN or infinite on one side only, or unequally.
    """

    max_abs: float = 0.0
    max_rel: float = 0.0
    mean_abs: float = 0.0
    mean_reference: float = 0.0
    l2: float = 0.0
    reference_l2: float = 0.0
    candidate_l2: float = 0.0
    size: int = 0
    index: tuple[int, ...] = ()
    values: tuple[float, float] = (0.0, 0.0)
    beyond: int = 0
    nonfinite: int = 0
    bulk_l2: float | None = None

    @property
    def rel_l2(self) -> float:
        """``||c - r|| / ||r||``; against a reference of zeros 0 or infinity."""
        if self.reference_l2 > 0:
            return self.l2 / self.reference_l2
        return 0.0 if self.l2 == 0 else float("inf")


@dataclass(frozen=True, slots=True)
class Diff:
    """A pair, measured and judged.

    Attributes:
        pair: what was compared.
        figures: how far apart; `None` where nothing could be measured (see ``problem``).
        passed: whether the tolerance policy accepts it.
        limit: what the judged figure was allowed to be.
        judged: which figure was judged, and its value: ``("rel_l2", 3e-7)``.
        problem: why the values could not be compared or are wrong whatever the tolerance
            (``missing on the candidate``, ``shapes differ: ...``), else empty.
        floor: rounding noise of the site, where a policy knows it.
    """

    pair: Pair
    figures: Figures | None = None
    passed: bool = True
    limit: float | None = None
    judged: tuple[str, float] = ("", 0.0)
    problem: str = ""
    floor: float | None = None

    @property
    def compared(self) -> bool:
        """Whether both sides were there."""
        return self.pair.complete

    @property
    def excess(self) -> float:
        """Judged figure as a multiple of its limit; infinite where a problem or a limit of 0 stands."""
        name, figure = self.judged
        if not name:
            return 0.0 if self.passed else float("inf")
        if not self.limit:
            return 0.0 if figure == 0 else float("inf")
        return figure / self.limit


@dataclass(frozen=True, slots=True)
class FirstDiff:
    """Where two runs part, first in causal order: step, stage, execution order of the reference."""

    step: int
    stage: str
    reference: str | None
    candidate: str | None
    slot: str
    max_abs: float
    max_rel: float
    message: str
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of each run was compared.

    Attributes:
        compared: records of the reference that were paired, of ``reference_records``.
        reference_records, candidate_records: all records of the compared steps.
        reference_layers, candidate_layers: unmatched layers that own parameters or have no sublayers, by path.
        reference_containers, candidate_containers: unmatched layers that only hold others: another nesting.
        reference_parameters, candidate_parameters: unmatched parameters and buffers, by ``layer/slot``.
        reference_sites, candidate_sites: unmatched records of matched layers, by site.
        uncalled: layers whose forward was never called, by path with the side in front.
        steps: numbers of the compared steps.
        reference_steps, candidate_steps: steps that only one run has.
        notes: further sentences (settings that differ, calls that were left out, ...).
    """

    compared: int = 0
    reference_records: int = 0
    candidate_records: int = 0
    reference_layers: tuple[str, ...] = ()
    candidate_layers: tuple[str, ...] = ()
    reference_containers: tuple[str, ...] = ()
    candidate_containers: tuple[str, ...] = ()
    reference_parameters: tuple[str, ...] = ()
    candidate_parameters: tuple[str, ...] = ()
    reference_sites: tuple[str, ...] = ()
    candidate_sites: tuple[str, ...] = ()
    uncalled: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()
    reference_steps: tuple[int, ...] = ()
    candidate_steps: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        """Paired records as a share of all records of both runs, 0 to 1."""
        total = self.reference_records + self.candidate_records
        return 2 * self.compared / total if total else 0.0

    @property
    def complete(self) -> bool:
        """Whether nothing that was recorded was left out."""
        return self.reference_records == self.candidate_records == self.compared


@dataclass(frozen=True, eq=False)
class Report:
    """All diffs of two steps or two runs, in causal order. True in a condition if nothing parted.

    Attributes:
        diffs: every diff, the ones that passed and the pairs with a missing side too.
        first_diff: the first one that did not pass, in words, or `None`.
        coverage: how much of each run was compared.
        tolerance: the tolerance policy, in words.
        reference, candidate: names of the two runs.
    """

    diffs: tuple[Diff, ...]
    coverage: Coverage
    first_diff: FirstDiff | None = None
    tolerance: str = ""
    reference: str = "reference"
    candidate: str = "candidate"

    @property
    def passed(self) -> bool:
        return self.first_diff is None

    @property
    def failed(self) -> tuple[Diff, ...]:
        """The diffs that did not pass, in causal order."""
        return tuple(diff for diff in self.diffs if not diff.passed)

    @property
    def worst(self) -> Diff | None:
        """The compared diff with the largest relative L2 error, or `None` where nothing has figures."""
        measured = [d for d in self.diffs if d.figures is not None and np.isfinite(d.figures.rel_l2)]
        return max(measured, key=lambda d: d.figures.rel_l2 if d.figures else 0.0, default=None)

    def __bool__(self) -> bool:
        return self.passed

    def __eq__(self, other: object) -> bool:
        # People write `if result == False:` after a check.
        return self.passed is other if isinstance(other, bool) else self is other

    def __hash__(self) -> int:
        return id(self)

    def __iter__(self) -> Iterator[Diff]:
        return iter(self.diffs)
