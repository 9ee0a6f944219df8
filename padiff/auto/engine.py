"""The sequence of an ``auto_diff``: weights, passes with equal dropout masks, comparisons, optimizer steps, dumps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from padiff.align import Alignment, align
from padiff.auto.arguments import ModelSetup, Settings, resolve_settings
from padiff.auto.passes import (
    During,
    NoiseDriven,
    Pass,
    Printer,
    aligned_as,
    carried_over,
    compared_wholes,
    gradients_of_reference,
    hooked,
    outputs_of_reference,
    run_pass,
    seen_of,
    update,
    weights_after,
)
from padiff.compare import RunComparison
from padiff.model import equivalents
from padiff.model.tree import is_proxy
from padiff.recorder import MemoryRun
from padiff.records import Both, Coverage, Diff, FirstDiff, Layer, Report, RunInfo, Step, figures_text
from padiff.system.terminal import warn_of_older
from padiff.weights.assign import AssignError, Carried

_FOLDER = "auto_diff"


def leave_dumps(settings: Settings, compared: Both[dict[str, Step]]) -> list[str]:
    """Write both sides into ``<dump_path>/auto_diff``, and return the folders; none if a model is not a proxy."""
    folders = _folders(settings)
    maps = _layer_maps(settings) if folders else ()
    for side, folder, stages, paths in zip(settings.sides, folders, compared, maps):
        steps = list(stages.values())
        records = [replace(record, order=0) for step in steps for record in step.records]
        numbered = tuple(replace(record, order=order) for order, record in enumerate(records))
        merged = replace(steps[-1], records=numbered, trace=steps[0].trace)
        side.model.padiff_dump(folder, merged, paths)
    return [str(folder) for folder in folders]


def forget_dumps(settings: Settings) -> None:
    """Delete the dumps of an earlier call."""
    for side, folder in zip(settings.sides, _folders(settings)):
        side.model.padiff_forget(folder)


def _folders(settings: Settings) -> list[Path]:
    sides = settings.sides
    if not all(is_proxy(side.model) for side in sides):
        return []
    folders = sides.map(lambda side: Path(side.model.dump_path) / _FOLDER)
    # A second dump in the same folder would overwrite the first.
    shared = folders.reference == folders.candidate
    return [folder / side.name if shared else folder for folder, side in folders.zip(sides)]


def _layer_maps(settings: Settings) -> Both[list[str]]:
    """Return the layer paths that the user's map pairs, as one list per side in the same order."""
    infos = settings.sides.map(lambda side: side.live.info)
    pairs = align(infos.reference, infos.candidate, settings.whole_map()).pairs
    user_pairs = [pair for pair in pairs if pair.reason == "given"]
    return Both([pair.reference.path for pair in user_pairs], [pair.candidate.path for pair in user_pairs])


#: Factors that each dropout layer of the reference multiplied its input by, by layer path and index of the call.
Masks = dict[tuple[str, int], np.ndarray]


@contextmanager
def masks_drawn(reference: ModelSetup, masks: Masks) -> Iterator[None]:
    """Draw, apply and store a mask in each call of a dropout layer of the reference.

    Enter before attaching the recording hooks.
    """
    paths = _dropouts(reference)

    def replaced(path: str, call: int, args: tuple[Any, ...], output: Any) -> Any:
        if not _fits(reference, args, output):
            return output
        # A zero output can come from a zero input, and does not reveal the mask: run the layer on ones instead.
        mask = _on_ones(reference, path, args[0])
        masks.setdefault((path, call), reference.framework.tensors.copy(mask))
        return args[0] * mask

    with hooked(reference, {path: path for path in paths}, replaced):
        yield


@contextmanager
def masks_of_reference(candidate: ModelSetup, masks: Masks, alignment: Alignment) -> Iterator[None]:
    """Apply the reference's masks in the candidate's dropout layers.

    Enter before attaching the recording hooks. Kept elements are scaled by the candidate layer's own factor, so that a
    different dropout rate is still detected.
    """
    drops = _dropouts(candidate)
    partners = {pair.candidate.path: pair.reference.path for pair in alignment.pairs if pair.candidate.path in drops}
    own_paths = {reference: path for path, reference in partners.items()}

    def replaced(path: str, call: int, args: tuple[Any, ...], output: Any) -> Any:
        mask = masks.get((path, call))
        if (
            mask is None
            or not _fits(candidate, args, output)
            or mask.shape != candidate.framework.tensors.shape(output)
        ):
            return output
        drawn = candidate.framework.tensors.copy(_on_ones(candidate, own_paths[path], args[0])).astype(np.float64)
        scale = drawn.max() if drawn.any() else float(mask.max())
        return args[0] * candidate.framework.tensors.like(output, np.where(mask != 0, scale, 0.0))

    with hooked(candidate, partners, replaced):
        yield


def _dropouts(side: ModelSetup) -> set[str]:
    """Return the paths of active dropout layers, without those that also shift kept elements (AlphaDropout)."""
    return {
        layer.path
        for layer in side.live.info.layers
        if "dropout" in layer.kind and "alpha" not in layer.kind and side.live.layer(layer.path).training
    }


def _fits(side: ModelSetup, args: tuple[Any, ...], output: Any) -> bool:
    framework = side.framework
    if not args or not framework.tensors.is_tensor(args[0]) or not framework.tensors.is_tensor(output):
        return False
    return bool(framework.tensors.shape(args[0]) == framework.tensors.shape(output))


def _on_ones(side: ModelSetup, path: str, like: Any) -> Any:
    ones = np.ones(side.framework.tensors.shape(like), np.float32)
    with side.framework.tensors.without_grad():
        return side.live.layer(path).forward(side.framework.tensors.like(like, ones))


FOLDER = "diff_log"
_FILES = {"weight": "weight_diff.log", "grad": "grad_diff.log"}


def write_diff_log(report: Report, names: Both[str]) -> list[Path]:
    """Write one file for the weights that differ and one for the gradients; delete the files of an earlier call.

    Args:
        names: names of the reference and the candidate.

    Returns:
        The written files; empty if no weight or gradient differs.
    """
    folder = Path(FOLDER)
    for name in _FILES.values():
        (folder / name).unlink(missing_ok=True)
    written = []
    for stage, name in _FILES.items():
        failed = [diff for diff in report.failed if diff.pair.stage == stage]
        if failed:
            folder.mkdir(exist_ok=True)
            (folder / name).write_text("\n".join(_entry(diff, names) for diff in failed), encoding="utf-8")
            written.append((folder / name).absolute())
    return written


def _entry(diff: Diff, names: Both[str]) -> str:
    sides = zip(names, (diff.pair.reference, diff.pair.candidate))
    paths = [f"    {name}: {r.layer}.{r.slot} ({r.layer_type})" for name, r in sides if r is not None]
    lines = ["=" * 25, f"Step {diff.pair.step}, {diff.pair.stage}:", *paths, f"    {figures_text(diff)}", ""]
    return "\n".join(lines)


_FORWARD = ("input", "forward", "loss")
_BACKWARD = ("backward", "grad")


@dataclass
class _State:
    """Diffs so far, with the numbers of their steps and the latest passes."""

    comparison: RunComparison
    diffs: list[Diff] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    passes: Both[Pass] | None = None
    #: The steps compared last, by stage.
    compared: Both[dict[str, Step]] = field(default_factory=lambda: Both({}, {}))
    #: Pairs of layers that share values (single step) or dropout masks.
    partners: Alignment = field(default_factory=lambda: Alignment(()))
    #: Weights that an optimizer changed because of rounding noise.
    noise_driven: NoiseDriven = field(default_factory=NoiseDriven)

    @property
    def failed(self) -> bool:
        return any(not diff.passed for diff in self.diffs)


def auto_diff(*args: Any, **kwargs: Any) -> Report:
    """Run two models on the same inputs, and report whether and where they differ.

    The forms are ``auto_diff(base_model, raw_model, inputs, loss_fns=None, optimizers=None, **options)``, or the first
    generation's ``auto_diff(layer, module, example_inp, auto_weights=True, layer_map=..., options={...}, loss_fn=...,
    optimizer=..., steps=1)`` with a paddle layer, a torch module, and torch as the base. Names of the two forms can be
    mixed; only contradictions are refused. Pairs are in the order of the two models.

    Args:
        base_model: the reference model, of either framework, plain or from ``create_model``.
        raw_model: the model to check, of either framework, plain or from ``create_model``.
        inputs: a pair; each a dict (``model(**inputs)``), a tuple (``model(*inputs)``) or a tensor.
        loss_fns: a pair of functions that compute a scalar from the output. Default: the mean of the outputs.
        optimizers: a pair; each an optimizer, or a function without arguments that steps and clears gradients.
        auto_init: True to copy the base's weights into the raw model first. Default True.
        atol, rtol: tolerances. Default 0 and 1e-7.
        compare_mode: ``"mean"`` (of the error; default) or ``"strict"`` (every element).
        diff_phase: ``"both"`` (default), ``"forward"``, or, with ``single_step``, ``"backward"``.
        single_step: True to run every raw layer on the base's values, so that errors do not accumulate. Default False.
        steps: number of training steps on the same inputs; more than 1 needs optimizers. Default 1.
        same_dropout: True to apply the base's masks in the raw model's dropout layers. Default False.
        full_stacks: True to print whole call stacks instead of the user's own lines. Default False.
        layer_map: pairs of layers, as objects or paths. Mapped layers are compared by their outputs. If their
            parameters do not correspond, the parameters that can't be copied are named, and stay as the user
            initialised them.

    Returns:
        The report, which is also printed; in a condition, the report is true if nothing differs.

    Raises:
        UsageError: an argument is wrong; the message says what was expected.
    """
    warn_of_older()
    settings = resolve_settings(args, kwargs)
    printer = Printer(settings)
    printer.print_options()
    carried: Carried | None = None
    if settings.auto_init:
        try:
            carried = carried_over(settings)
        except AssignError as error:
            printer.weights_failed(error)
            forget_dumps(settings)
            return _not_assigned(settings, error)
        printer.weights_assigned(carried)
    state = _compared_models(settings, carried)
    printer.wholes(compared_wholes(settings, state.comparison.alignment))
    try:
        for number in range(settings.steps):
            printer.step(number)
            if settings.single_step:
                _single_step(settings, state, number)
            else:
                _step(settings, state, number)
            printer.compared(state.diffs, number)
            if state.failed:
                break
    finally:
        for side in settings.sides:
            side.framework.layers.clear_gradients(side.live.model)
    printer.dumped(leave_dumps(settings, state.compared))
    report = state.comparison.report(state.diffs, state.steps, settings=True)
    if settings.first_generation:
        printer.logged(write_diff_log(report, settings.sides.map(lambda side: side.name)))
    printer.verdict(report, state.passes.map(lambda one: one.stacks) if state.passes is not None else Both({}, {}))
    return report


def _compared_models(settings: Settings, carried: Carried | None) -> _State:
    reference, candidate = settings.sides.map(_info)
    aligned, layer_map, boundaries = aligned_as(carried, settings), settings.whole_map(), not settings.single_step
    runs = MemoryRun(reference), MemoryRun(candidate)
    state = _State(RunComparison(*runs, layer_map, settings.tolerance, boundaries=boundaries, aligned=aligned))
    if settings.single_step or settings.same_dropout:
        state.partners = aligned(reference, candidate, layer_map, seen_of(settings, carried))
    return state


def _info(side: ModelSetup) -> RunInfo:
    chosen = side.chosen
    layers = tuple(replace(layer, recorded=layer.path in chosen) for layer in side.live.info.layers)
    name = f"{side.name} ({side.framework.name})"
    # Declares that all of these layers were requested: a parameter that could not be recorded counts as missing.
    recording = {"layers": len(chosen)}
    return replace(side.live.info, name=name, layers=layers, layer_map=side.mapped, recording=recording)


def _step(settings: Settings, state: _State, number: int) -> None:
    """Run and compare forward and backward of both models; then step the optimizers and compare the new weights."""
    backward = settings.diff_phase != "forward"
    before = _passes(settings, state, number, backward)
    # Gradients are compared before the optimizers step, updated weights afterwards.
    _compare(state, before, (*_FORWARD, *(_BACKWARD if backward else ()), "weight"))
    if not backward or state.failed or settings.sides.reference.optimizer is None:
        return
    for side in settings.sides:
        update(side)
    after = settings.sides.map(lambda side: weights_after(side, number + 1))
    state.noise_driven.stepped(before.reference, after.reference)
    _compare(state, after, ("weight",))


def _single_step(settings: Settings, state: _State, number: int) -> None:
    """Compare a forward with the reference's outputs inserted, then a separate pass with its gradients inserted."""
    reference, candidate = (side.live for side in settings.sides)
    phases = {"both": ("forward", "backward")}.get(settings.diff_phase, (settings.diff_phase,))
    for phase in phases:
        backward = phase == "backward"
        put_in = gradients_of_reference if backward else outputs_of_reference
        # These passes are not training steps: the models' buffers are restored.
        with reference.buffers_kept(), candidate.buffers_kept():
            steps = _passes(settings, state, number, backward, put_in)
        # The loss receives the reference's own output in a single-step forward, so losses are not compared.
        _compare(state, steps, _BACKWARD if backward else ("input", "forward", "weight"))
        if state.failed:
            return


def _passes(
    settings: Settings,
    state: _State,
    number: int,
    backward: bool,
    put_in: Callable[[ModelSetup, Step, Alignment], AbstractContextManager[None]] | None = None,
) -> Both[Step]:
    """Run one pass of each model, and return both steps.

    Args:
        put_in: returns the hooks that insert the reference's values into the candidate.
    """
    masks: Masks = {}
    alignment = state.partners
    reference, candidate = settings.sides
    drawn: During = nullcontext
    applied: During = nullcontext
    during: During = nullcontext
    if settings.same_dropout:
        drawn = partial(masks_drawn, reference, masks)
        applied = partial(masks_of_reference, candidate, masks, alignment)
    first = run_pass(reference, number, backward, around=drawn)
    if put_in is not None:
        during = partial(put_in, candidate, first.step, alignment)
    state.passes = Both(first, run_pass(candidate, number, backward, during, around=applied))
    return state.passes.map(lambda one: one.step)


def _compare(state: _State, steps: Both[Step], stages: Collection[str]) -> None:
    """Compare the given stages; among weights only parameters, because a forward writes into buffers."""
    comparison = state.comparison
    steps = Both(*(_of_stages(step, stages, run.info.layers) for step, run in steps.zip(comparison.runs)))
    diffs = comparison.step_diffs(steps)
    state.diffs += state.noise_driven.judge(diffs)
    state.noise_driven.see(diffs)
    for compared, step in zip(state.compared, steps):
        for stage in stages:
            records = tuple(record for record in step.records if record.stage == stage)
            compared[stage] = replace(step, records=records)
    if steps.reference.number not in state.steps:
        state.steps.append(steps.reference.number)


def _of_stages(step: Step, stages: Collection[str], layers: Sequence[Layer]) -> Step:
    records = (record for record in step.records if record.stage in stages and not _is_buffer(record, layers))
    return replace(step, records=tuple(records))


def _is_buffer(record: Any, layers: Sequence[Layer]) -> bool:
    if record.stage != "weight":
        return False
    layer = next(layer for layer in layers if layer.path == record.layer)
    # A frozen normalisation stores weight and bias as buffers, which correspond to parameters of other models.
    is_affine = equivalents.slot(record.slot) in ("weight", "bias")
    return not is_affine and any(p.slot == record.slot and p.role == "buffer" for p in layer.parameters)


def _not_assigned(settings: Settings, error: AssignError) -> Report:
    what = f"The weights could not be carried over, so nothing was compared. {error}"
    first = FirstDiff(0, "weight", None, None, statement=what)
    reference, candidate = (f"{side.name} ({side.framework.name})" for side in settings.sides)
    return Report((), Coverage(), first, settings.tolerance.describe(), reference, candidate)
