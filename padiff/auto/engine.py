"""The run of an ``auto_diff``: weights, passes, comparisons, optimizer, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from padiff.align import Alignment
from padiff.auto.arguments import understand
from padiff.auto.diff_log import write_diff_log
from padiff.auto.dropout import Masks, masks_drawn, masks_of_base
from padiff.auto.dumps import forget_dumps, leave_dumps
from padiff.auto.noise_driven import Steered
from padiff.auto.partners import aligned_as, carried_over, seen_of, unlooked
from padiff.auto.passes import During, Pass, run_pass, update, weights_after
from padiff.auto.settings import Settings, Side
from padiff.auto.synchronised import gradients_of_base, outputs_of_base
from padiff.auto.tell import Teller
from padiff.compare import RunComparison
from padiff.model import equivalents
from padiff.recorder import MemoryRun
from padiff.records import Coverage, Diff, FirstDiff, Layer, Report, Step
from padiff.system.distribution import warn_of_older
from padiff.weights.assign import AssignError, Carried

_FORWARD = ("input", "forward", "loss")
_BACKWARD = ("backward", "grad")


@dataclass
class _Findings:
    """Diffs so far, with the steps they are of and the passes that they came from."""

    comparison: RunComparison
    diffs: list[Diff] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    passes: tuple[Pass, Pass] | None = None
    #: What was compared last, stage by stage, of the base and the raw model.
    compared: tuple[dict[str, Step], dict[str, Step]] = field(default_factory=lambda: ({}, {}))

    #: Which layers run on, or drop like, which others.
    partners: Alignment = field(default_factory=lambda: Alignment(()))

    #: Weights that an optimizer moved by noise.
    steered: Steered = field(default_factory=Steered)

    @property
    def failed(self) -> bool:
        return any(not diff.passed for diff in self.diffs)


def auto_diff(*args: Any, **kwargs: Any) -> Report:
    """Run two models on the same inputs and say whether, and where, they part.

    ``auto_diff(base_model, raw_model, inputs, loss_fns=None, optimizers=None, **options)``, or the first generation's
    ``auto_diff(layer, module, example_inp, auto_weights=True, layer_map=..., options={...}, loss_fn=..., optimizer=...,
    steps=1)`` with a paddle layer, a torch module, and torch as the base. The words of the two may be mixed; only what
    contradicts itself is refused. Whatever is given in pairs stands in the order of the two models.

    Args:
        base_model: the model to trust, of either framework, plain or from ``create_model``.
        raw_model: the model in question, likewise.
        inputs: a pair; each a dict (``model(**inputs)``), a tuple (``model(*inputs)``) or a tensor.
        loss_fns: a pair of functions of the output that give a scalar. Default: the mean of the outputs.
        optimizers: a pair; each an optimizer, or a function without arguments that steps and clears gradients.
        auto_init: copy the base's weights into the raw model first. Default True.
        atol, rtol: tolerances. Default 0 and 1e-7.
        compare_mode: ``"mean"`` (of the error; default) or ``"strict"`` (every element).
        diff_phase: ``"both"`` (default), ``"forward"``, or, with ``single_step``, ``"backward"``.
        single_step: run every raw layer on what the base computed, so that errors do not add up. Default False.
        steps: train so many steps on the same inputs; more than 1 needs optimizers. Default 1.
        same_dropout: give the raw model's dropout layers the base's masks. Default False.
        full_stacks: print whole call stacks instead of the user's own lines. Default False.
        layer_map: layers that answer to each other, as objects or paths. They are compared by what they give; where
            they do not hold the same parameters, what can't be carried over is left to you, and named.

    Returns:
        The report: true in a condition if nothing parted; it is printed, too.

    Raises:
        UsageError: an argument is wrong; the message says what was expected.
    """
    warn_of_older()
    settings = understand(args, kwargs)
    teller = Teller(settings)
    teller.begin()
    carried: Carried | None = None
    if settings.auto_init:
        try:
            carried = carried_over(settings)
        except AssignError as error:
            teller.weights_failed(error)
            forget_dumps(settings)
            return _not_assigned(settings, error)
        teller.weights_assigned(carried)
    findings = _compared_models(settings, carried)
    teller.wholes(unlooked(settings, findings.comparison.alignment))
    try:
        for number in range(settings.steps):
            teller.step(number)
            if settings.single_step:
                _single_step(settings, findings, number)
            else:
                _step(settings, findings, number)
            teller.compared(findings.diffs, number)
            if findings.failed:
                break
    finally:
        for side in (settings.base, settings.raw):
            side.framework.layers.clear_gradients(side.live.model)
    teller.dumped(leave_dumps(settings, findings.compared))
    report = findings.comparison.report(findings.diffs, findings.steps, settings=True)
    stacks = (findings.passes[0].stacks, findings.passes[1].stacks) if findings.passes is not None else ({}, {})
    if settings.first_generation:
        teller.logged(write_diff_log(report, (settings.base.name, settings.raw.name)))
    teller.verdict(report, findings.comparison.alignment, stacks)
    return report


def _compared_models(settings: Settings, carried: Carried | None) -> _Findings:
    runs = [MemoryRun(_info(side)) for side in (settings.base, settings.raw)]
    aligned = aligned_as(carried, settings)
    comparison = RunComparison(
        runs[0],
        runs[1],
        settings.whole_map(),
        settings.tolerance,
        cuts=not settings.single_step,
        aligned=aligned,
    )
    findings = _Findings(comparison)
    if settings.single_step or settings.same_dropout:
        seen = seen_of(settings, carried)
        findings.partners = aligned(runs[0].info, runs[1].info, settings.whole_map(), seen)
    return findings


def _info(side: Side) -> Any:
    layers = tuple(replace(layer, recorded=layer.path in side.chosen) for layer in side.live.info.layers)
    name = f"{side.name} ({side.framework.name})"
    # It says that all of these were asked for: a parameter that could not be recorded is missed.
    recording = {"layers": len(side.chosen)}
    return replace(side.live.info, name=name, layers=layers, layer_map=side.mapped, recording=recording)


def _step(settings: Settings, findings: _Findings, number: int) -> None:
    """Forward and backward of both models, compared; then the optimizers, and the weights that they made."""
    backward = settings.diff_phase != "forward"
    base, raw = _passes(settings, findings, number, backward)
    # Gradients before the optimizer steps, weights after it.
    _compare(findings, base.step, raw.step, (*_FORWARD, *(_BACKWARD if backward else ()), "weight"))
    if not backward or findings.failed or settings.base.optimizer is None:
        return
    for side in (settings.base, settings.raw):
        update(side)
    after = [weights_after(side, number + 1) for side in (settings.base, settings.raw)]
    findings.steered.stepped(base.step, after[0])
    _compare(findings, after[0], after[1], ("weight",))


def _single_step(settings: Settings, findings: _Findings, number: int) -> None:
    """Forward with the base's outputs put in, then, in a pass of its own, backward with the base's gradients."""
    phases = {"both": ("forward", "backward")}.get(settings.diff_phase, (settings.diff_phase,))
    for phase in phases:
        backward = phase == "backward"
        with _buffers_kept(settings):
            base, raw = _passes(
                settings, findings, number, backward, gradients_of_base if backward else outputs_of_base
            )
        # What a synchronised forward hands to the loss is the base's own output: no loss to compare.
        _compare(findings, base.step, raw.step, _BACKWARD if backward else ("input", "forward", "weight"))
        if findings.failed:
            return


def _passes(
    settings: Settings,
    findings: _Findings,
    number: int,
    backward: bool,
    put_in: Callable[[Side, Step, Alignment], AbstractContextManager[None]] | None = None,
) -> tuple[Pass, Pass]:
    """One pass of each model; ``put_in`` gives the hooks that bring the base's values into the raw model."""
    masks: Masks = {}
    alignment = findings.partners
    drawn: During = nullcontext
    given: During = nullcontext
    during: During = nullcontext
    if settings.same_dropout:
        drawn = partial(masks_drawn, settings.base, masks)
        given = partial(masks_of_base, settings.raw, masks, alignment)
    base = run_pass(settings.base, number, backward, around=drawn)
    if put_in is not None:
        during = partial(put_in, settings.raw, base.step, alignment)
    findings.passes = base, run_pass(settings.raw, number, backward, during, around=given)
    return findings.passes


def _compare(findings: _Findings, base: Step, raw: Step, stages: Collection[str]) -> None:
    """Compare the stages asked for; of the weights only parameters: forward itself writes into buffers."""
    comparison = findings.comparison
    steps = []
    for step, run in ((base, comparison.reference), (raw, comparison.candidate)):
        of_stages = (r for r in step.records if r.stage in stages and not _is_buffer(r, run.info.layers))
        steps.append(replace(step, records=tuple(of_stages)))
    diffs = comparison.step_diffs(steps[0], steps[1])
    findings.diffs += findings.steered.judge(diffs)
    findings.steered.see(diffs)
    for compared, step in zip(findings.compared, steps):
        for stage in stages:
            kept = tuple(record for record in step.records if record.stage == stage)
            compared[stage] = replace(step, records=kept)
    if base.number not in findings.steps:
        findings.steps.append(base.number)


def _is_buffer(record: Any, layers: Sequence[Layer]) -> bool:
    if record.stage != "weight":
        return False
    layer = next(layer for layer in layers if layer.path == record.layer)
    # A frozen normalisation keeps its weight and bias as buffers: these are what another one's parameters are.
    own = equivalents.slot(record.slot) in ("weight", "bias")
    return not own and any(p.slot == record.slot and p.role == "buffer" for p in layer.parameters)


@contextmanager
def _buffers_kept(settings: Settings) -> Iterator[None]:
    """Passes that are run besides the model's own training leave its buffers as they were."""
    kept = [
        (side.framework, tensor, side.framework.tensors.copy(tensor))
        for side in (settings.base, settings.raw)
        for node in side.live.nodes
        for _, tensor, role in side.framework.layers.parameters(node.layer)
        if role == "buffer"
    ]
    try:
        yield
    finally:
        for framework, tensor, array in kept:
            framework.tensors.write(tensor, array)


def _not_assigned(settings: Settings, error: AssignError) -> Report:
    first = FirstDiff(
        step=0,
        stage="weight",
        reference=None,
        candidate=None,
        slot="",
        max_abs=math.nan,
        max_rel=math.nan,
        message=f"The weights could not be carried over, so nothing was compared. {error}",
    )
    names = (f"{side.name} ({side.framework.name})" for side in (settings.base, settings.raw))
    reference, candidate = names
    return Report((), Coverage(), first, settings.tolerance.describe(), reference, candidate)
