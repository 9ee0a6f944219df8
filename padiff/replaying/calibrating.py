"""``calibrate``: the floors of a run, measured with its own model, in its own framework."""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from dataclasses import replace
from pathlib import Path
from typing import Any

from padiff.dump.floors import write_floors
from padiff.dump.local import absolute, run_folder
from padiff.errors import UsageError
from padiff.model.live_model import LiveModel
from padiff.recorder.factory import recorder_of
from padiff.recorder.schedule import Schedule
from padiff.records import Step
from padiff.records.floors import Floors
from padiff.replaying.carrying import Carrying
from padiff.replaying.checks import Reference, check_model, opened
from padiff.replaying.doing import Doing
from padiff.replaying.kept import Kept
from padiff.replaying.measuring import Measuring
from padiff.replaying.moving import RUNS
from padiff.replaying.step import ReplayStep


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
    """Measure what rounding makes of each tensor of a run's packed steps, and write it into the run.

    Each packed step is done again with weights and inputs moved by units in the last place and, where memory allows, in
    float64. Comparing the run with another one judges by a multiple of that. Afterwards, also after an error, model and
    optimizer are what they were.

    Args:
        run: a run with packs, of the model's framework.
        model: the model that was recorded.
        train: trains on one packed step: forward, loss, backward, and the optimizer's step.
        optimizer: the model's optimizer, or several. Without one, nothing is measured of updates.
        steps: which of the packed steps. Default: all.
        runs: how often each is done again, moved.
        float64: whether each is done in float64, too.
        layer_map: layers that answer to each other, as `compare_runs` takes them.

    Returns:
        What was measured, step by step.

    Raises:
        RunFolderError: the run can't be read.
        UsageError: it has no packs, is of another framework or another model, or a step could not be done.
    """
    if isinstance(runs, bool) or not isinstance(runs, int) or runs < 1:
        raise UsageError(f"runs is a number of at least 1, got {runs!r}")
    reference, live = opened(run, None, steps), LiveModel.of(model)
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
    place = absolute(run_folder(run, "run"))
    doing = Doing(live, optimizers, recorder, Carrying(reference, live, optimizers, layer_map))
    doing.kept = kept = Kept(live)
    found = []
    try:
        recorder.open()
        for number in reference.numbers:
            floors = _measured(reference, number, doing, train, runs, float64)
            write_floors(place, floors)
            found.append(floors)
    finally:
        try:
            doing.discard()
            recorder.close(finished=False, raise_errors=False)
        finally:
            kept.give_back()
    return found


def _measured(
    reference: Reference, number: int, doing: Doing, train: Callable[[ReplayStep], object], runs: int, float64: bool
) -> Floors:
    pack = reference.packs[number]
    train(doing.begin(pack))
    base = doing.take()
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
    """Of a step that was done again, what the recorded one has, too.

    Raises:
        UsageError: that is nothing, or little: it is another model.
    """
    sizes = {record.site: math.prod(record.shape) for record in recorded.records}
    outputs = {record.site for record in recorded.records if record.stage == "forward"}
    same = tuple(record for record in base.records if sizes.get(record.site) == math.prod(record.shape))
    there = sum(record.stage == "forward" for record in same)
    if 2 * there <= len(outputs):
        raise UsageError(
            f"step {base.number} of {path} has {len(outputs)} outputs of layers, and this model gives {there} of them: "
            "calibrate takes the model that was recorded"
        )
    return replace(base, records=same)
