"""Recorded values: records, parts of distributed tensors, floors, batches, the layer tree, steps, runs."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from padiff.records.sources import TensorSource
from padiff.records.traces import LOOP, NO_TRACE, Region, Trace
from padiff.sketches.sketch import Sketch
from padiff.system.frames import Frame

#: Kinds of parts: a block or range of the tensor's elements; a copy of all elements; a term of a sum over processes.
SHARD, REPLICA, PARTIAL = KINDS = ("shard", "replica", "partial")


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a tensor that one process holds.

    Attributes:
        shape: shape of the full tensor.
        offset: start of the part along each axis of the full tensor. If the part has one axis and the full tensor has
            another number of axes, the only offset is the start of a range of its elements, row by row.
        kind: `SHARD`, `REPLICA`, or `PARTIAL`; the `PARTIAL` values of all processes have to be added.
        copy: number of the replica; the parts of one replica together make the full tensor.
        share: number of the process's share of a batch, if the full tensor is gathered for each call as in FSDP; -1:
            not known, or the processes that hold parts of one tensor see the same samples.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    kind: str
    copy: int = 0
    share: int = -1

    @property
    def size(self) -> int:
        """Return the number of elements of the full tensor."""
        return math.prod(self.shape)

    def is_range(self, shape: tuple[int, ...]) -> bool:
        """Return True if a part of this shape is a range of elements instead of a block."""
        return len(shape) == 1 and len(self.shape) != 1

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return True if a part of this shape lies inside the full tensor."""
        if self.is_range(shape):
            return len(self.offset) == 1 and self.offset[0] + shape[0] <= self.size
        return len(shape) == len(self.offset) == len(self.shape) and all(
            start + length <= limit for start, length, limit in zip(self.offset, shape, self.shape)
        )

    def to_json(self) -> dict[str, Any]:
        """Return the part as a dict for JSON."""
        return {
            "shape": list(self.shape),
            "offset": list(self.offset),
            "kind": self.kind,
            **({"copy": self.copy} if self.copy else {}),
            **({"share": self.share} if self.share >= 0 else {}),
        }

    @classmethod
    def of_json(cls, entry: Mapping[str, Any], shape: tuple[int, ...]) -> Part:
        """Return the part from the dict that `to_json` returned.

        Args:
            entry: the parsed JSON, checked as untrusted input.
            shape: shape of the part.

        Raises:
            ValueError, KeyError, TypeError: the entry is no part, or no part of this shape.
        """
        part = cls(
            _lengths(entry["shape"]),
            _lengths(entry["offset"]),
            str(entry["kind"]),
            int(entry.get("copy", 0)),
            int(entry.get("share", -1)),
        )
        if part.kind not in KINDS:
            raise ValueError(f"unknown kind of part {part.kind!r}")
        if not part.fits(shape):
            raise ValueError(f"a part {shape} at {part.offset} does not lie in a tensor {part.shape}")
        return part


def _lengths(values: Any) -> tuple[int, ...]:
    lengths = tuple(int(value) for value in values)
    if len(lengths) > 64 or any(not 0 <= value < 1 << 62 for value in lengths) or math.prod(lengths) >= 1 << 62:
        raise ValueError(f"{str(lengths)[:80]} is no shape")
    return lengths


#: Stages that have floors: everything that a step computes. Inputs and weights are what the measurement perturbs.
MEASURED_STAGES = frozenset({"forward", "loss", "backward", "grad", "update"})


@dataclass(frozen=True, slots=True)
class Floor:
    """Rounding error of one tensor.

    Attributes:
        error: largest L2 norm of the tensor's change, per perturbation of one unit in the last place.
        norm: L2 norm of the tensor.
        size: number of elements of the tensor.
    """

    error: float
    norm: float
    size: int

    @property
    def relative(self) -> float:
        """Return the error as a share of the norm; 0 if the norm is 0."""
        return self.error / self.norm if self.norm > 0 else 0.0


@dataclass(frozen=True)
class Floors:
    """The floors of a step.

    Attributes:
        step: number of the step.
        runs: number of perturbed runs of the step.
        units: size of the perturbation of each run, in units in the last place.
        dtype: the coarsest dtype that the step computes in; the units are those of its last place.
        seed: seed of the random signs.
        sites: the floor of each tensor, by the site of its record.
        exact: the tensors of the step in float64, by the site of the record; empty: the step was not run in float64.
        rank: number of the process of a distributed run.
        notes: sentences about tensors that could not be measured.
    """

    step: int
    runs: int
    units: tuple[int, ...]
    dtype: str
    seed: int
    sites: Mapping[str, Floor]
    exact: Mapping[str, TensorSource] = field(default_factory=dict)
    rank: int = 0
    notes: tuple[str, ...] = ()


#: Stages of a step, in causal order.
STAGES = ("input", "weight", "forward", "loss", "backward", "grad", "update")

#: Stages whose tensors belong to a parameter.
PARAMETER_STAGES = frozenset({"weight", "grad", "update"})

#: The path of the recorded model itself.
ROOT = "(root)"


def inner_path(path: str, above: str) -> str:
    """Return a layer's path relative to the layer `above` it; empty for that layer itself."""
    if path == above:
        return ""
    return path if above == ROOT else path[len(above) + 1 :]


def is_below(path: str, above: str) -> bool:
    """Return True if a layer is inside the layer `above`."""
    return bool(path) and path != above and (above == ROOT or path.startswith(f"{above}."))


@dataclass(frozen=True, slots=True)
class Record:
    """One tensor recorded at a site.

    Attributes:
        layer: dotted path of the layer from the recorded model; `ROOT` for the model itself.
        stage: one of `STAGES`.
        slot: name of the tensor within the layer: ``output.0``, ``input.x``, a parameter's own name.
        call: 0 for the layer's first call within the step, 1 for its second, ...
        order: position among all records of the step, in order of creation.
        layer_type: class name of the layer, as the framework's user wrote it.
        dtype: the tensor's true dtype (``bfloat16`` also where numpy has none).
        shape: the tensor's shape as recorded.
        source: the source of the values; `value` reads it.
        recomputed: True if the layer's forward ran again inside a backward (activation checkpointing); the tensor is
            recorded once.
        part: the part of the tensor that this process holds, if the tensor is distributed; `shape` is then the part's
            shape.
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
    recomputed: bool = False
    part: Part | None = None

    @property
    def site(self) -> str:
        """Return the tensor's address, e.g. ``encoder.0.linear/forward/output.0#1``."""
        return f"{self.layer}/{self.stage}/{self.slot}" + (f"#{self.call}" if self.call else "")

    @property
    def value(self) -> np.ndarray:
        """Return the tensor's values (read at every access, not cached).

        Raises:
            SketchOnlyError: only a sketch was recorded.
        """
        return self.source.read()

    @property
    def sketch(self) -> Sketch | None:
        """Return the sketch if only a sketch was recorded, else `None`."""
        return self.source.sketch


def is_functional(slot: str) -> bool:
    """Return True if a slot belongs to a function call inside a layer (``softmax().0``)."""
    return "()" in slot


def is_loss(record: Record) -> bool:
    """Return True if a record is the loss of a micro-batch: one number."""
    return record.layer == LOOP and record.stage == "loss" and not is_functional(record.slot)


def is_of_loss(record: Record) -> bool:
    """Return True if a record is an input or output of a loss function, or the norm that clipping measured."""
    return record.layer == LOOP and is_functional(record.slot)


def loss_role(slot: str) -> str:
    """Return the role of a tensor from its slot of a loss function: ``labels`` for an input, ``0`` for the output."""
    return slot.partition("()")[2].removeprefix(".").removeprefix("input.")


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter or buffer that a layer owns directly.

    Attributes:
        slot: name within the layer.
        shape, dtype: as the framework reports them; for a distributed parameter those of the full tensor, if the
            framework knows it. A length of 0 stands for a length that does not exist (nested tensors).
        role: ``parameter`` or ``buffer`` (running statistics are buffers in both frameworks here).
        layout: ``in_out`` or ``out_in`` for the matrix of a linear layer, else empty.
        trainable: True if an optimizer may change the parameter.
        tied_to: ``layer/slot`` of the first occurrence of the same tensor, else empty.
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
        kind: name of the framework's class that the layer is or derives from, lower case (``conv2d``), or ``type`` in
            lower case for a user's class.
        parameters: parameters and buffers that the layer owns directly, in order of definition.
        settings: hyper-parameters that are plain values (``eps``, ``momentum``, ``stride``), under common names.
        aliases: further paths under which the same object is reachable (shared layers).
        children: number of direct sublayers.
        recorded: True if the lists allow the layer's tensors to be recorded.
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
class Evaluation:
    """Calls in evaluation mode during a training step; only counts and shapes are recorded.

    Attributes:
        layer: path of the layer that the loop called.
        calls: number of calls.
        shapes: shapes of the input tensors; empty if not known.
    """

    layer: str
    calls: int
    shapes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """Records of one rank in one optimizer step.

    Attributes:
        number: the step, counted from 0.
        records: all of the step's records, in the order of ``Record.order``; some sequences create them on access.
        rank: number of the process of a distributed run.
        loss_scale: factor by which the loss was scaled before backward (AMP); gradients of activations are divided by
            it when compared, `grad` records are unscaled already.
        micro_batches: number of calls of the whole model in the step.
        notes: sentences about what could not be recorded.
        settings: changes of the declared settings in this step relative to `RunInfo.settings`: new values by name,
            `None` for a name that no longer exists (`padiff.records.declared`). Only rank 0 has them.
        trace: the calls of the step, which locate the origin of a diff.
        floors: rounding errors of the step's tensors, if they were measured.
        spread: layout of the parameters over processes, if parts were joined; equal for steps with equal layouts, empty
            if no parameter was distributed.
        evaluations: calls in evaluation mode that were counted and not recorded.
        regions: regions of compiled code that the step called, held against eager code; only some steps have them.
    """

    number: int
    records: Sequence[Record]
    rank: int = 0
    loss_scale: float = 1.0
    micro_batches: int = 1
    notes: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    trace: Trace = NO_TRACE
    floors: Floors | None = None
    spread: Hashable = ()
    evaluations: tuple[Evaluation, ...] = ()
    regions: tuple[Region, ...] = ()


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Properties that all steps of a run share.

    Attributes:
        framework, framework_version: ``torch`` / ``paddle`` and its version.
        layers: the layer tree, depth first, in order of definition; the first one is the model itself.
        name: display name of the run.
        world_size: number of processes that record the run.
        layer_map: paths of layers that correspond, in order, to those of the other run (`set_layer_map` of PaDiff's
            interface).
        recording: options of the recording, for people (schedule, lists).
        environment: properties around the training that can change its numbers
            (`padiff.records.declared`); empty: not known.
        identity: identity of the recording: new whenever a run folder is started anew, the same after a resume. Empty
            for runs in memory, and for folders of an older padiff.
        settings: settings that the run declares beside its tensors (optimizers, clipping, loss), as of its first
            recorded step (`padiff.records.declared`); empty: not known.
        lines: the line of the user's code that constructs each layer (by path) and each optimizer (``optimizer.0``), as
            far as it is known.
        files: the SHA-256 of each file of the user's code that was read for these lines, by path.
    """

    framework: str
    framework_version: str
    layers: tuple[Layer, ...]
    name: str = ""
    world_size: int = 1
    layer_map: tuple[str, ...] = ()
    recording: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    # Not compared: two recordings of equal trainings are equal.
    identity: str = field(default="", compare=False)
    lines: Mapping[str, Frame] = field(default_factory=dict, compare=False)
    files: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def errors(self) -> tuple[str, ...]:
        """Sentences on errors of padiff's own, and what each cost the recording."""
        lines = self.recording.get("errors")
        return tuple(map(str, lines)) if isinstance(lines, (list, tuple)) else ()

    @property
    def copies_left_out(self) -> tuple[str, ...]:
        """Names of copies of the model that the loop changes (EMA, target networks) and that are not recorded."""
        names = self.recording.get("copies_left_out")
        return tuple(map(str, names)) if isinstance(names, (list, tuple)) else ()


def left_out_line(names: Sequence[str]) -> str:
    """Return what to know of copies of the model that are not recorded, as a sentence without a full stop."""
    models = ", ".join(f'"{name}": ...' for name in ("model", *names))
    copies = f"{', '.join(names)}, {'a copy' if len(names) == 1 else 'copies'} of the model that the loop changes"
    return f"{copies}. Record the models by name: padiff.record({{{models}}}, ...)"


class Run(Protocol):
    """A recorded training run, in memory or in a folder."""

    @property
    def name(self) -> str: ...

    @property
    def info(self) -> RunInfo: ...

    def numbers(self) -> list[int]:
        """Return the numbers of the recorded steps, ascending."""

    def steps(self, number: int) -> list[Step]:
        """Return one recorded step of each rank, in the order of the ranks."""

    def finished(self) -> bool:
        """Return True if no further step will be recorded."""


# Roles of a loss function's inputs that come from the data, not from the model.
_LABELS = frozenset({"labels", "target", "input_lengths", "label_lengths"})

_KEEP = "record with detail='full' (or full_every_n_steps=N), or keep packs with replay_every_n_steps=N"


@dataclass(frozen=True)
class RecordedBatch:
    """A micro-batch, reconstructed from a step's records.

    Attributes:
        inputs: arguments of the model's call, by the names of its forward's parameters, in the order of the call:
            tensor sources, nested in tuples and dicts. Arguments without a tensor are not recorded.
        labels: inputs of the loss functions that do not come from the model, in the order of the calls. A tensor that
            several functions received is listed once for each: records do not show if two are one tensor.
        problem: the reason why the batch is not fully known; empty if it is.
    """

    inputs: Mapping[str, Any]
    labels: tuple[TensorSource, ...]
    problem: str = ""


def recorded_batches(step: Step) -> list[RecordedBatch]:
    """Return the micro-batches of a step, in order."""
    inputs = [record for record in step.records if record.stage == "input" and record.layer != LOOP]
    layers = list(dict.fromkeys(record.layer for record in inputs))
    if not layers:
        return [RecordedBatch({}, (), f"its inputs were not recorded: {_KEEP}, without a list that leaves them out")]
    calls = sorted({record.call for record in inputs if record.layer == layers[0]})
    starts = [min(r.order for r in inputs if r.layer == layers[0] and r.call == call) for call in calls]
    batches = []
    for call, begins, ends in zip(calls, starts, [*starts[1:], float("inf")]):
        slots = [record for record in inputs if record.layer == layers[0] and record.call == call]
        labels = [r for r in step.records if begins <= r.order < ends and is_label(r)]
        batches.append(RecordedBatch(_nested(slots), tuple(r.source for r in labels), _problem(slots, labels, layers)))
    return batches


def is_label(record: Record) -> bool:
    """Return True if a record is an input of a loss function that comes from the data."""
    of_loss = record.layer == LOOP and record.stage == "loss" and is_functional(record.slot)
    return of_loss and loss_role(record.slot) in _LABELS


def _problem(inputs: Sequence[Record], labels: Sequence[Record], layers: Sequence[str]) -> str:
    if len(layers) > 1:
        return (
            f"the model was called in parts ({', '.join(layers[:4])}), so what it is called with as a whole is not "
            "known: keep packs with replay_every_n_steps=N"
        )
    sketched = [record.slot for record in (*inputs, *labels) if record.source.sketched]
    return f"of {', '.join(sketched[:4])} it keeps sketches, not values: {_KEEP}" if sketched else ""


def _nested(records: Sequence[Record]) -> dict[str, Any]:
    """Return the nested values that slots (``input.x``, ``input.images.0``) stand for."""
    tree: dict[str, Any] = {}
    for record in records:
        *above, last = record.slot.removeprefix("input.").split(".")
        inside = tree
        for name in above:
            inside = inside.setdefault(name, {})
        inside[last] = record.source
    return {name: _as_written(value) for name, value in tree.items()}


def _as_written(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    items = {name: _as_written(item) for name, item in value.items()}
    return tuple(items.values()) if all(name.isdecimal() for name in items) else items
