"""What is recorded: records, the layer tree, steps, runs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from padiff.records.floors import Floors
from padiff.records.frozen import quickly_made
from padiff.records.parts import Part
from padiff.records.sources import TensorSource
from padiff.records.traces import NO_TRACE, Trace
from padiff.sketches.sketch import Sketch

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


def is_below(path: str, above: str) -> bool:
    """Whether a layer is inside of the layer ``above``."""
    return bool(path) and path != above and (above == ROOT or path.startswith(f"{above}."))


@quickly_made
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
        recomputed: whether the layer's forward ran again inside of a backward (activation checkpointing); it is
            recorded once.
        part: which part of the tensor this is, where processes hold parts; `shape` is the part's own then.
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
        """The tensor's address, e.g. ``encoder.0.linear/forward/output.0#1``."""
        return f"{self.layer}/{self.stage}/{self.slot}" + (f"#{self.call}" if self.call else "")

    @property
    def value(self) -> np.ndarray:
        """The tensor's values (read on every access, nothing is kept).

        Raises:
            SketchOnlyError: a sketch is all that was recorded.
        """
        return self.source.read()

    @property
    def sketch(self) -> Sketch | None:
        """The sketch, where that is all that was recorded."""
        return self.source.sketch


def is_functional(slot: str) -> bool:
    """Whether a slot is a functional call's inside of a layer (``softmax().0``)."""
    return "()" in slot


def is_loss(record: Record) -> bool:
    """Whether a record is the loss of a micro-batch: one number."""
    return record.layer == LOOP and record.stage == "loss" and not is_functional(record.slot)


def is_of_loss(record: Record) -> bool:
    """Whether a record is what went into a loss function, or came out of it; or the norm that clipping measured."""
    return record.layer == LOOP and is_functional(record.slot)


def loss_role(slot: str) -> str:
    """What a tensor is to the loss function whose slot it is: ``labels``; ``0`` for what it gave."""
    return slot.partition("()")[2].removeprefix(".").removeprefix("input.")


@quickly_made
@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter or buffer that a layer owns itself.

    Attributes:
        slot: its name within the layer.
        shape, dtype: as the framework states it, of a parameter that is spread over processes the whole one's where the
            framework knows it. A length of 0 stands for one that there is not (nested tensors).
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
class Evaluation:
    """Calls in evaluation mode between the training's own: all that a step keeps of them.

    Attributes:
        layer: path of the layer that the loop called.
        calls: how many calls.
        shapes: of the tensors that went in; empty where it is not known.
    """

    layer: str
    calls: int
    shapes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """What one rank recorded in one optimizer step.

    Attributes:
        number: the step, counted from 0.
        records: all of the step's records, in the order of ``Record.order``; some sequences make them when they are
            looked at.
        rank: which process of a distributed run.
        loss_scale: factor by which the loss was scaled before backward (AMP); gradients of
            activations are divided by it when compared, `grad` records are unscaled already.
        micro_batches: how many calls of the whole model the step had.
        notes: sentences about what could not be recorded.
        settings: how what the run declares differs in this step from `RunInfo.settings`: names with their values here,
            `None` for a name that is gone (`padiff.records.settings`). Said by rank 0.
        trace: the calls that the step was made of, which tell where a diff comes from.
        floors: what rounding makes of its tensors, where that was measured.
        spread: how parameters were spread over the step's processes, where they were put together; equal for steps
            whose parameters lay alike, empty where nothing was spread.
        evaluations: calls in evaluation mode that were counted, and not recorded.
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
        environment: what around the training can change its numbers (`padiff.records.environment`); empty: not known.
        identity: which recording this is: a new one whenever a run folder is begun anew, kept by a resume. Empty for
            runs in memory, and for folders of an older padiff.
        settings: what the run declares beside its tensors (optimizers, clipping, loss), as it was in its first recorded
            step (`padiff.records.settings`); empty: not known.
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
    # Two recordings that were made alike are alike.
    identity: str = field(default="", compare=False)

    @property
    def errors(self) -> tuple[str, ...]:
        """Sentences on errors of padiff's own, and what each cost the recording."""
        lines = self.recording.get("errors")
        return tuple(map(str, lines)) if isinstance(lines, (list, tuple)) else ()


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
