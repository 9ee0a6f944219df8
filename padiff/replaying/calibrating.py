"""``calibrate``: measure a run's rounding floors with its own model, in its own framework."""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from dataclasses import replace
from pathlib import Path
from typing import Any

from padiff.dump.floor_files import write_floors
from padiff.dump.local import absolute, run_folder
from padiff.errors import UsageError
from padiff.model.live_model import LiveModel
from padiff.recorder.factory import recorder_of
from padiff.recorder.schedule import Schedule
from padiff.records import Step
from padiff.records.floors import Floors
from padiff.replaying.checks import Reference, check_model, opened
from padiff.replaying.measuring import Measuring
from padiff.replaying.perturbation import RUNS
from padiff.replaying.restore_state import StateRestorer
from padiff.replaying.state_snapshot import StateSnapshot
from padiff.replaying.step import ReplayStep
from padiff.replaying.step_runner import StepRunner


def calibrate(
    run: str | Path,
    model: Any,
    train: Callable[[ReplayStep], object],
    *,
    optimizer: Any = None,
    steps: Container[int] | None = None,
    runs: int = RUNS,
    float64: bool = True,
    layer_map: Any = None,
) -> list[Floors]:
    """Measure the rounding error of each tensor of a run's packed steps, and write these floors into the run.

    Each packed step is repeated with weights and inputs perturbed by units in the last place and, if memory allows, in
    float64. Comparisons of this run then use limits that are multiples of the measured errors. Model and optimizer are
    restored at the end, also after an error.

    Args:
        run: a run with packs, recorded in the model's framework.
        model: the model that was recorded.
        train: a function that trains on one packed step: forward, loss, backward, and the optimizer's step.
        optimizer: the model's optimizer, or several. Without one, updates are not measured.
        steps: numbers of the packed steps to measure. Default: all.
        runs: number of perturbed repetitions of each step.
        float64: True to repeat each step in float64, too.
        layer_map: pairs of layers, in the form that `compare_runs` accepts.

    Returns:
        The floors of each step.

    Raises:
        RunFolderError: the run can't be read.
        UsageError: the run has no packs or belongs to another framework or model, or a step could not be repeated.
    """
    if isinstance(runs, bool) or not isinstance(runs, int) or runs < 1:
        raise UsageError(f"runs is a number of at least 1, got {runs!r}")
    reference, live = opened(run, None, steps), LiveModel.from_model(model)
    if reference.run.info.framework != live.framework.name:
        raise UsageError(
            f"{run} was recorded with {reference.run.info.framework}, and the model is of {live.framework.name}: "
            "calibrate takes the model that was recorded. Floors of this one are measured by a replay "
            "(padiff.replay(..., floors=True), padiff replay --floors)"
        )
    check_model(live)
    optimizers = [] if optimizer is None else list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    recorder = recorder_of(
        model,
        None,
        replay_of=reference.run.info.identity,
        every_n_steps=Schedule(steps=list(reference.numbers)),
        optimizer=optimizers or None,
    )
    folder = absolute(run_folder(run, "run"))
    doing = StepRunner(live, optimizers, recorder, StateRestorer(reference, live, optimizers, layer_map))
    doing.kept = snapshot = StateSnapshot(live)
    results = []
    try:
        recorder.open()
        for number in reference.numbers:
            floors = _measured(reference, number, doing, train, runs, float64)
            write_floors(folder, floors)
            results.append(floors)
    finally:
        try:
            doing.discard()
            recorder.close(finished=False, raise_errors=False)
        finally:
            snapshot.give_back()
    return results


def _measured(
    reference: Reference,
    number: int,
    doing: StepRunner,
    train: Callable[[ReplayStep], object],
    runs: int,
    float64: bool,
) -> Floors:
    pack = reference.packs[number]
    train(doing.start_step(pack))
    base = doing.end_step()
    if base is None:
        raise UsageError(f"at step {number} nothing of the model was called: train(step) has to call it")
    same = _as_recorded(base, reference.run.steps(number)[0], reference.path)
    measuring = Measuring(same, reference.run.info.environment)
    for step in measuring.steps(doing, pack, runs, float64):
        if step is None:
            continue
        try:
            train(step)
        except Exception as error:
            if not step.exact:
                raise
            measuring.give_up(f"not run in float64: {type(error).__name__}: {error}")
    return measuring.floors()


def _as_recorded(base: Step, recorded: Step, path: str) -> Step:
    """Return the repeated step with only the records that the recorded step has, too.

    Raises:
        UsageError: at most half of the recorded outputs are present, so the model is another one.
    """
    sizes = {record.site: math.prod(record.shape) for record in recorded.records}
    outputs = {record.site for record in recorded.records if record.stage == "forward"}
    same = tuple(record for record in base.records if sizes.get(record.site) == math.prod(record.shape))
    equal = sum(record.stage == "forward" for record in same)
    if 2 * equal <= len(outputs):
        raise UsageError(
            f"step {base.number} of {path} has {len(outputs)} outputs of layers, and this model gives {equal} of them: "
            "calibrate takes the model that was recorded"
        )
    return replace(base, records=same)
