"""The sequence of an ``auto_diff``: weights, passes, comparisons, optimizer steps, and verdict."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from padiff.align import Alignment
from padiff.auto.diff_log import write_diff_log
from padiff.auto.dropout import Masks, masks_drawn, masks_of_reference
from padiff.auto.dumps import forget_dumps, leave_dumps
from padiff.auto.model_alignment import aligned_as, carried_over, compared_wholes, seen_of
from padiff.auto.noise_driven import NoiseDriven
from padiff.auto.passes import During, Pass, run_pass, update, weights_after
from padiff.auto.printing import Printer
from padiff.auto.resolve import resolve_settings
from padiff.auto.settings import ModelSetup, Settings
from padiff.auto.single_step import gradients_of_reference, outputs_of_reference
from padiff.compare import RunComparison
from padiff.model import equivalents
from padiff.recorder import MemoryRun
from padiff.records import Both, Coverage, Diff, FirstDiff, Layer, Report, RunInfo, Step
from padiff.system.distribution import warn_of_older
from padiff.weights.assign import AssignError, Carried

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
