"""Run as text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from padiff.records.recorded import LOOP, Layer, Run, RunInfo, Step
from padiff.records.settings import Settings, setting_text

# Maximum number of layers that a printed run lists, and of steps that a line names.
_LAYERS, _STEPS = 40, 10
# Number of items that are printed of longer lists.
_NAMED = 3


def run_line(run: Run) -> str:
    """Return one line about a run: framework, model, size, number of steps."""
    info, numbers = run.info, run.numbers()
    state = "finished" if run.finished() else "not ended"
    return f"{run.name}: {model_text(info)}, {_plural(len(numbers), 'recorded step')}, {state}"


def run_text(run: Run) -> str:
    """Return a run as text: framework, model, steps, counts of the first step's records, layers, and declared
    settings.
    """
    numbers = run.numbers()
    lines = [run_line(run)]
    if numbers:
        lines.append(steps_text(numbers))
        lines += [step_text(step) for step in run.steps(numbers[0])]
    rows = [(layer.path, layer.type, owned_text(layer), settings_text(layer)) for layer in run.info.layers[:_LAYERS]]
    widths = [max(len(row[k]) for row in rows) for k in range(3)]
    lines += ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[3]]).rstrip() for row in rows]
    more = len(run.info.layers) - _LAYERS
    lines += [f"... and {more} more layers"] if more > 0 else []
    return "\n".join([*lines, *run.info.errors, *declared_lines(run.info.settings)])


def model_text(info: RunInfo) -> str:
    """Return the framework and the model, with its numbers of layers and parameters."""
    count = sum(
        math.prod(p.shape) for layer in info.layers for p in layer.parameters if p.role == "parameter" and not p.tied_to
    )
    kind = info.layers[0].type if info.layers else "no layer"
    layers = _plural(len(info.layers), "layer")
    return f"{info.framework} {info.framework_version}, {kind}, {layers}, {count:,} parameters"


def steps_text(numbers: Sequence[int]) -> str:
    """Return the numbers of a run's steps, the first ones and the last."""
    more = f", ... {numbers[-1]}" if len(numbers) > _STEPS else ""
    return f"steps: {', '.join(map(str, numbers[:_STEPS]))}{more}"


def step_text(step: Step) -> str:
    """Return one rank's part of a step as text: number of tensors of each stage, settings, and notes."""
    counts = Counter(
        "learning rate" if record.layer == LOOP and record.stage == "update" else record.stage
        for record in step.records
    )
    text = ", ".join(f"{count} {stage}" for stage, count in counts.items())
    sketched = sum(record.sketch is not None for record in step.records)
    text += f"; {sketched} of them as sketches" if sketched else ""
    if step.trace.functions:
        functions = sum(bool(call.function) for call in step.trace.calls)
        text += f"; {_plural(functions, 'call')} of functions traced"
    lines = [f"step {step.number}, rank {step.rank}: {text}; {step.micro_batches} micro-batch(es)"]
    if step.settings:
        lines.append(f"  set otherwise than at first: {', '.join(_said(step.settings))}")
    lines += [f"  {note}" for note in step.notes]
    for each in step.evaluations:
        shapes = ", ".join(str(list(shape)) for shape in each.shapes) or "other shapes"
        lines.append(f"  evaluation: {_plural(each.calls, 'call')} of {each.layer}, {shapes}")
    return "\n".join(lines)


def declared_lines(settings: Settings) -> list[str]:
    """Return a run's declared settings, a line for each parameter group and each family of names."""
    families: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        *family, last = name.split(".")
        if family[:1] == ["optimizer"]:
            of_group = family[2:3] == ["group"]
            split = 4 if of_group else 2
            family, last = name.split(".")[:split], ".".join(name.split(".")[split:])
        families.setdefault(".".join(family), {})[last] = value
    return [f"{family or 'run'}: {', '.join(_said(values))}" for family, values in families.items()]


def _said(settings: Settings) -> Iterator[str]:
    for name, value in settings.items():
        if isinstance(value, (list, tuple)) and len(value) > _STEPS:
            yield f"{name} {', '.join(map(setting_text, value[:_NAMED]))}, ... ({len(value)})"
        elif isinstance(value, (list, tuple)):
            yield f"{name} {', '.join(map(setting_text, value)) or 'none'}"
        else:
            yield f"{name} {setting_text(value)}"


def owned_text(layer: Layer) -> str:
    """Return the slots and shapes of a layer's parameters and buffers."""
    return ", ".join(f"{p.slot} {list(p.shape)}" + (f" = {p.tied_to}" if p.tied_to else "") for p in layer.parameters)


def settings_text(layer: Layer) -> str:
    """Return a layer's hyper-parameters as text."""
    return ", ".join(f"{name}={value}" for name, value in layer.settings.items())


def bytes_text(size: float) -> str:
    """Return a number of bytes with a unit, to about three digits."""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


def _plural(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}"
