"""Recorded weights and optimizer state that a training can start from: a step of a run, or weight files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from padiff.align.matching.parameter_units import tie_targets
from padiff.dump import open_run
from padiff.dump.local import run_folder
from padiff.dump.remote_path import as_local
from padiff.dump.weight_files import holds_weights, open_weights
from padiff.errors import UsageError
from padiff.frameworks.conventions import FRAMEWORKS
from padiff.pair.merge_ranks import merge_ranks
from padiff.records import Layer, OptimizerState, ParameterState, Rate, Run, RunInfo, Step, TensorSource, settings_at
from padiff.records.pack import Pack
from padiff.system.naming import first_few
from padiff.weights.stored_model import StoredModel
from padiff.weights.stored_tree import tree_of

# Number of nearby steps that are searched for weights, and number of items that a message names.
_LOOKED_AT, _NAMED = 64, 6

_Weights = Mapping[tuple[str, str], TensorSource]


class Stored:
    """A recorded step, or weight files, opened for reading.

    Attributes:
        model: layer tree and weights.
        step: number of the step; `None` for files.
        label: name for messages.
        optimizers: state of each optimizer before the step; `None` if not known.
        why_not: reason why the optimizers' state is not known, and what to do about it.
        recorded: the step's records; `None` for files, and for packs without records.
        training: True if the step ran in training mode.
        pack: the step's replay pack, if there is one.
    """

    def __init__(
        self,
        model: StoredModel,
        label: str,
        optimizers: tuple[OptimizerState, ...] | None,
        why_not: str = "",
        recorded: Step | None = None,
        training: bool = True,
        pack: Pack | None = None,
    ) -> None:
        self.model, self.label, self.step = model, label, model.step
        self.optimizers, self.why_not = optimizers, why_not
        self.recorded, self.training, self.pack = recorded, training, pack

    def draws(self, layers: Iterable[Layer]) -> bool:
        """Return True if the step ran in training mode, and its layers or the given ones contain dropout."""
        return self.training and any(map(_drops, (*self.model.info.layers, *layers)))


def open_stored(
    path: Any, step: int | None = None, framework: str | None = None, beside: RunInfo | None = None
) -> Stored:
    """Open a recorded step or weight files.

    Args:
        path: a run folder, or a file or folder of safetensors.
        step: number of a recorded step. Default: the first one.
        framework: framework of weight files that do not name one.
        beside: the model to be started; its layers resolve what the names of tensors in files leave open.

    Raises:
        RunFolderError: the path can't be read.
        UsageError: the step has no weights; the message names steps that have them.
    """
    folder = run_folder(path, "start_from")
    if framework is not None and framework not in FRAMEWORKS:
        raise UsageError(f"framework is one of {', '.join(map(repr, FRAMEWORKS))}, got {framework!r}")
    local = as_local(folder)
    if local is not None and holds_weights(local):
        if step is not None:
            raise UsageError(f"{folder} holds weights, not steps: step={step} can't be meant")
        return _of_files(local.absolute(), framework, beside)
    return stored_step(open_run(folder), step, str(path))


def _drops(layer: Layer) -> bool:
    rates = [layer.settings.get("dropout"), layer.settings.get("p") if "drop" in layer.kind else None]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


# -- files ---------------------------------------------------------------------------------------------------------


def _of_files(path: Path, framework: str | None, beside: RunInfo | None) -> Stored:
    files = open_weights(path)
    name = framework or files.framework
    if not name:
        raise UsageError(
            f"{path} does not say whether its weights are of torch or of paddle, and the matrices of their linear "
            "layers lie the other way round: give framework='torch' or framework='paddle'"
        )
    layers, names = tree_of(files.tensors, name, beside.layers if beside is not None else ())
    info = RunInfo(name, "", layers, name=path.name)
    weights = {site: files.tensors[tensor] for site, tensor in names.items()}
    why_not = f"{path} holds weights alone, and no optimizer's state"
    return Stored(StoredModel(info, weights, str(path)), str(path), None, why_not)


# -- runs ----------------------------------------------------------------------------------------------------------


def stored_step(run: Any, step: int | None, label: str) -> Stored:
    """Open a recorded step of an open run, like `open_stored`.

    Raises:
        UsageError: the run lacks the step, or its weights.
    """
    numbers = sorted({*run.numbers(), *run.packs})
    if not numbers:
        raise UsageError(f"{label} holds no step yet")
    number = numbers[0] if step is None else step
    if number not in numbers:
        raise UsageError(
            f"{label} has no step {number}: recorded are {first_few(numbers, _NAMED)}; the nearest is "
            f"{min(numbers, key=lambda other: abs(other - number))}"
        )
    pack = run.packs.get(number)
    recorded: Step | None = merge_ranks(run.steps(number))[0] if number in run.numbers() else None
    weights = _weights(pack, recorded)
    info: RunInfo = run.info
    lacking = _lacking(info, weights)
    if lacking:
        raise UsageError(_without(run, numbers, number, label, info, weights, lacking))
    info = _with_kept(info, weights)
    optimizers, why_not = _optimizers(run, pack, number, label)
    settings = settings_at(run.info.settings, recorded.settings) if recorded is not None else {}
    training = bool(settings.get("training", True))
    return Stored(StoredModel(info, weights, label, number), label, optimizers, why_not, recorded, training, pack)


def _weights(pack: Pack | None, step: Step | None) -> _Weights:
    weights: dict[tuple[str, str], TensorSource] = {}
    if step is not None:
        records = (r for r in step.records if r.stage == "weight" and r.call == 0 and not r.source.sketched)
        weights = {(record.layer, record.slot): record.source for record in records}
    return weights | dict(pack.weights) if pack is not None else weights


def _lacking(info: RunInfo, weights: _Weights) -> list[str]:
    """Return the parameters whose values are not in `weights`."""
    homes = tie_targets(info.layers)
    return [
        f"{layer.path}/{p.slot}"
        for layer in info.layers
        for p in layer.parameters
        if p.role == "parameter" and homes.get((layer.path, p.slot), (layer.path, p.slot)) not in weights
    ]


def _with_kept(info: RunInfo, weights: _Weights) -> RunInfo:
    """Return the run's info without its layer map, and without buffers whose values were not recorded.

    The layer map was made for another pair of runs.
    """
    layers = tuple(
        replace(
            layer,
            parameters=tuple(
                p for p in layer.parameters if p.role == "parameter" or p.tied_to or (layer.path, p.slot) in weights
            ),
        )
        for layer in info.layers
    )
    return replace(info, layers=layers, layer_map=())


def _without(
    run: Any, numbers: list[int], number: int, label: str, info: RunInfo, weights: _Weights, lacking: list[str]
) -> str:
    """Return the error text for a step whose weights are missing or incomplete."""
    step = merge_ranks(run.steps(number))[0] if number in run.numbers() else None
    sketched = {
        f"{r.layer}/{r.slot}"
        for r in (step.records if step is not None else ())
        if r.stage == "weight" and r.source.sketched
    }
    if sketched.intersection(lacking):
        what = f"of step {number} {label} keeps sketches of the weights, not their values"
        what += "" if not weights else f" (of {first_few([name for name in lacking if name in sketched], _NAMED)})"
    else:
        what = (
            f"step {number} of {label} has no weights of {first_few(lacking, _NAMED)}: they were left out by the lists"
        )
    near = sorted((n for n in numbers if n != number), key=lambda neighbour: abs(neighbour - number))[:_LOOKED_AT]
    for neighbour in near:
        pack = run.packs.get(neighbour)
        recorded = run.steps(neighbour)[0] if neighbour in run.numbers() else None
        if not _lacking(info, _weights(pack, recorded)):
            return f"{what}. The nearest step that has them is {neighbour}: give step={neighbour}"
    return (
        f"{what}, and no step near it does. Record the run with full_every_n_steps=N (values in every Nth step), with "
        "detail='full', or with replay_every_n_steps=N (packs)"
    )


def _optimizers(run: Any, pack: Pack | None, number: int, label: str) -> tuple[tuple[OptimizerState, ...] | None, str]:
    if pack is not None and pack.optimizers:
        return pack.optimizers, ""
    if pack is None and number == 0:
        # Before its first step an optimizer has settings, and no state.
        declared = declared_optimizers(run)
        if declared:
            return declared, ""
        return None, f"{label} does not record its optimizer's settings: record it with optimizer=..."
    with_state = [n for n in run.packs if run.packs[n].optimizers]
    near = min(with_state, key=lambda other: abs(other - number), default=None)
    return None, (
        f"{label} keeps no optimizer's state of step {number}"
        + (f"; the nearest step that has it is {near}: give step={near}" if near is not None else "")
        + ("" if near is not None else ": record it with replay_every_n_steps=N and optimizer=..., or start without")
    )


def declared_optimizers(run: Run) -> tuple[OptimizerState, ...]:
    """Return the initial states of a run's optimizers: rules and learning rates as declared, no moments."""
    settings, optimizers = run.info.settings, []
    for number in range(len(settings)):
        prefix = f"optimizer.{number}"
        if f"{prefix}.rule" not in settings:
            break
        rates = []
        for group in range(len(settings)):
            group_prefix = f"{prefix}.group.{group}"
            if f"{group_prefix}.parameters" not in settings:
                break
            value, sites = settings.get(f"{group_prefix}.lr"), settings[f"{group_prefix}.parameters"]
            if isinstance(value, (int, float)) and isinstance(sites, (list, tuple)):
                factor = settings.get(f"{group_prefix}.lr_factor", 1.0)
                rates.append(Rate(float(value) * float(factor), tuple(map(str, sites))))
        nothing: dict[str, ParameterState] = {}
        optimizers.append(OptimizerState(str(settings[f"{prefix}.rule"]), nothing, tuple(rates)))
    return tuple(optimizers)
