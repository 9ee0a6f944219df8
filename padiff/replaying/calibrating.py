"""``calibrate``: measure a run's rounding floors with its own model, in its own framework."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from padiff.compare.judge.limits import COARSENESS, coarse
from padiff.dump.store import absolute, run_folder
from padiff.dump.weight_files import write_floors
from padiff.errors import UsageError
from padiff.model.tree import LiveModel
from padiff.recorder.factory import recorder_of
from padiff.recorder.options import Schedule
from padiff.records import InMemory, Record, Step, TensorSource
from padiff.records.recorded import MEASURED_STAGES, Floor, Floors
from padiff.records.traces import Pack
from padiff.replaying.checks import Reference, StateRestorer, StateSnapshot, check_model, opened
from padiff.replaying.step_runner import RUNS, SEED, Perturbation, ReplayStep, StepRunner, is_floating, moves

#: Free memory that a step in float64 needs, in multiples of the recorded bytes: twice the bytes of the model, of the
#: graph and of the record. Chosen.
FREE = 8.0


def computed_in(step: Step, environment: Mapping[str, Any] | None = None) -> str:
    """Return the coarsest dtype that a recorded step computes in, the dtype of autocast included."""
    dtypes = {coarse(record.dtype) for record in step.records} | {str((environment or {}).get("autocast.dtype"))}
    return next((dtype for dtype in reversed(COARSENESS) if dtype in dtypes), "float32")


class Measuring:
    """Measurement of one step's floors, the rounding errors of its tensors.

    Args:
        step: the unperturbed recorded step.
        environment: the environment of its run.
    """

    def __init__(self, step: Step, environment: Mapping[str, Any]) -> None:
        self._base = {r.site: r for r in step.records if r.stage in MEASURED_STAGES and not r.source.sketched}
        self._number, self._dtype = step.number, computed_in(step, environment)
        self._floors: dict[str, Floor] = {}
        self._lost: set[str] = set()
        self._units: list[int] = []
        self._exact: dict[str, TensorSource] = {}
        self._notes: list[str] = []
        self._given_up = False

    def steps(self, doing: StepRunner, pack: Pack, runs: int, exact: bool) -> Iterator[ReplayStep | None]:
        """Yield the step again for each perturbation; after each, the result is measured.

        `None` is yielded before each repetition, when the previous one has ended and the next has not begun. The loop
        calls `give_up` if it can't run the repetition that it received last.
        """
        if exact and not self._has_room():
            self.note("not run in float64: there is too little memory")
            exact = False
        for move in moves(runs, self._dtype, exact):
            self._given_up = completed = False
            yield None
            try:
                yield doing.start_step(pack, move)
                completed = True
            finally:
                if not completed or self._given_up:
                    doing.discard()
            if not self._given_up:
                self.add(doing.end_step(), move)

    def give_up(self, why: str) -> None:
        """Skip the current repetition, and note the reason."""
        self._given_up = True
        self.note(why)

    def _has_room(self) -> bool:
        recorded = sum(math.prod(r.shape) * np.dtype(np.float64).itemsize for r in self._base.values())
        with suppress(AttributeError, OSError, ValueError):  # unknown on this system: try
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >= FREE / 2 * recorded
        return True

    def add(self, step: Step | None, move: Perturbation) -> None:
        """Add the records of a perturbed repetition; `None` if nothing was recorded."""
        records = {record.site: record for record in step.records} if step is not None else {}
        if move.exact:
            self._add_exact(records)
            return
        self._units.append(move.units)
        for site, base in self._base.items():
            change = _change(base, records.get(site))
            if change is None:
                self._lost.add(site)
                continue
            error, norm, size = change
            before = self._floors.get(site)
            self._floors[site] = Floor(max(error / move.units, before.error if before else 0.0), norm, size)

    def note(self, note: str) -> None:
        """Add a note on something that could not be measured."""
        self._notes.append(note)

    def _add_exact(self, records: dict[str, Record]) -> None:
        outputs = [record for record in records.values() if record.stage == "forward"]
        if not any(record.dtype == "float64" for record in outputs):
            self._notes.append("run in float64, the step computes in another dtype all the same (autocast)")
            return
        for site, base in self._base.items():
            record = records.get(site)
            if record is None or record.dtype != "float64" or record.shape != base.shape:
                continue
            values = record.value
            if np.isfinite(values).all():
                self._exact[site] = InMemory(values)

    def floors(self) -> Floors:
        """Return the floors of all tensors that every repetition has, in the same shape and with finite values."""
        return Floors(
            step=self._number,
            runs=len(self._units),
            units=tuple(self._units),
            dtype=self._dtype,
            seed=SEED,
            sites={site: floor for site, floor in self._floors.items() if site not in self._lost},
            exact=self._exact,
            notes=tuple(self._notes),
        )


def _change(base: Record, moved: Record | None) -> tuple[float, float, int] | None:
    """Return the L2 norm of the change, the L2 norm of the tensor, and its number of elements.

    `None` if the tensors are not comparable.
    """
    if moved is None or moved.shape != base.shape or moved.source.sketched:
        return None
    before, after = base.value, moved.value
    if not is_floating(before) or not is_floating(after):
        return None
    wide = before.astype(np.float64)
    error, norm = float(np.linalg.norm(after.astype(np.float64) - wide)), float(np.linalg.norm(wide))
    return (error, norm, before.size) if math.isfinite(error) and math.isfinite(norm) else None


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
