"""Recorded values: records, the layer tree, steps, runs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from padiff.records.floors import Floors
from padiff.records.frozen import fast_frozen_init
from padiff.records.parts import Part
from padiff.records.regions import Region
from padiff.records.sources import TensorSource
from padiff.records.traces import NO_TRACE, Trace
from padiff.sketches.sketch import Sketch
from padiff.system.frames import Frame

#: Stages of a step, in causal order.
STAGES = ("input", "weight", "forward", "loss", "backward", "grad", "update")

#: Stages whose tensors belong to a parameter.
PARAMETER_STAGES = frozenset({"weight", "grad", "update"})

#: The path of the recorded model itself.
ROOT = "(root)"

#: The path that step-wide scalars (loss, learning rate) are recorded under.
LOOP = "(loop)"


def inner_path(path: str, above: str) -> str:
    """Return a layer's path relative to the layer `above` it; empty for that layer itself."""
    if path == above:
        return ""
    return path if above == ROOT else path[len(above) + 1 :]


def is_below(path: str, above: str) -> bool:
    """Return True if a layer is inside the layer `above`."""
    return bool(path) and path != above and (above == ROOT or path.startswith(f"{above}."))


@fast_frozen_init
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


@fast_frozen_init
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
            `None` for a name that no longer exists (`padiff.records.settings`). Only rank 0 has them.
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
            (`padiff.records.environment_differences`); empty: not known.
        identity: identity of the recording: new whenever a run folder is started anew, the same after a resume. Empty
            for runs in memory, and for folders of an older padiff.
        settings: settings that the run declares beside its tensors (optimizers, clipping, loss), as of its first
            recorded step (`padiff.records.settings`); empty: not known.
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
