"""``resync``: train from a packed step on with one thing at a time taken from the reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from padiff.compare.comparison import Distance, StepDistance
from padiff.errors import UsageError
from padiff.frameworks.hooking import Handle
from padiff.model.tree import LiveModel
from padiff.recorder import Recorder
from padiff.recorder.factory import recorder_of
from padiff.recorder.options import Schedule
from padiff.records import Both, Step
from padiff.records.traces import OptimizerState
from padiff.replaying.checks import Reference, StateRestorer, StateSnapshot, check_model, opened
from padiff.replaying.step_runner import ReplayStep, StepRunner

#: Names and descriptions of what can be taken from the reference.
THINGS = {
    "weights": "the weights",
    "state": "the optimizer's state",
    "batch": "the batch",
    "rate": "the learning rate",
    "masks": "dropout's masks",
}
#: Runs are together if the distance of their updates is at most `TIMES` the distance with everything taken from the
#: reference, or at most the share `TOGETHER` of the updates. A learning rate that is off by 2 % gives 2e-2. Chosen.
TIMES, TOGETHER = 10.0, 2e-3
#: A larger share with everything taken from the reference means that another cause separates the runs.
APART = 2e-2


@dataclass(frozen=True)
class Resynced:
    """Distances of the two runs with some things taken from the reference.

    Attributes:
        taken: names of `THINGS`; empty for the candidate's own run.
        updates: for each step, the distance of the updates of all parameters, as a share of the reference's updates.
        losses: for each step, the distance of the losses, as a share of the reference's loss; NaN without a recorded
            loss.
        why: reason why the experiment was not run; else empty.
    """

    taken: tuple[str, ...]
    updates: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    why: str = ""

    @property
    def apart(self) -> float:
        """Return the largest distance of the updates; NaN if the experiment was not run."""
        if not self.updates or any(math.isnan(update) for update in self.updates):
            return math.nan
        return max(self.updates)

    @property
    def description(self) -> str:
        """Return a description of the things taken from the reference."""
        if len(self.taken) > 1:
            return f"all but {THINGS['weights']}, after an equal start"
        return " and ".join(THINGS[thing] for thing in self.taken) or "nothing"


@dataclass(frozen=True)
class Resync:
    """Experiments that take one thing at a time from the reference.

    Attributes:
        step: first step.
        steps: number of steps of each experiment.
        nothing: the candidate's own run.
        single: the experiments with one thing taken from the reference.
        everything: the experiment with all things except the weights, which start equal and then evolve freely.
    """

    step: int
    steps: int
    nothing: Resynced
    single: tuple[Resynced, ...]
    everything: Resynced

    @property
    def limit(self) -> float:
        """Return the largest distance of the updates of runs that are together."""
        return max(TIMES * self._least, TOGETHER)

    @property
    def _least(self) -> float:
        """Return the distance with everything taken; if that is large, the distance of the best single experiment."""
        if self.everything.apart <= APART:
            return self.everything.apart
        return self._best.apart

    def together(self, one: Resynced) -> bool:
        """Return True if the runs stayed together in this experiment."""
        return one.apart <= self.limit

    @property
    def helping(self) -> tuple[str, ...]:
        """Return the things that keep the runs together when taken alone.

        Empty if the runs stay together anyway, if no single thing is enough, or if there is another cause.
        """
        if self.together(self.nothing) or not self._tells:
            return ()
        return tuple(experiment.taken[0] for experiment in self.single if self.together(experiment))

    @property
    def _tells(self) -> bool:
        return self._least <= APART

    @property
    def sentence(self) -> str:
        """Return the result as a sentence."""
        span = f"from step {self.step} on, over {self.steps} steps"
        alone, all_taken = f"{self.nothing.apart:.2g}", f"{self.everything.apart:.2g}"
        if not self._tells:
            return (
                f"It is none of these: {span}, the updates are {all_taken} of themselves apart even with all of them "
                "taken from the reference. The model or the loss computes something else: a replay says where."
            )
        if self.together(self.nothing):
            apart = f"updates at most {alone} of themselves apart"
            return f"Nothing has to be taken from the reference: {span}, the runs stay together ({apart})."
        if not self.helping:
            return (
                f"No one of these alone keeps the runs together {span} (updates {alone} of themselves apart), all of "
                f"them do ({all_taken}): several differ. Mend what helps most first, and try again: "
                f"{self._best.description} ({self._best.apart:.2g})."
            )
        fixes = [experiment for experiment in self.single if experiment.taken[0] in self.helping]
        best = min(fixes, key=lambda experiment: experiment.apart)
        names = " or ".join(experiment.description for experiment in fixes)
        return (
            f"{names[0].upper()}{names[1:]} {'keeps' if len(fixes) == 1 else 'keep'} the runs together: taken from the "
            f"reference {span}, updates are at most {best.apart:.2g} of themselves apart, else {alone}."
        )

    @property
    def _best(self) -> Resynced:
        done = [experiment for experiment in self.single if not math.isnan(experiment.apart)]
        return min(done, key=lambda experiment: experiment.apart, default=self.nothing)

    def plain(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        rows = [self.nothing, *self.single, self.everything]
        return {
            "step": self.step,
            "steps": self.steps,
            "sentence": self.sentence,
            "helping": list(self.helping),
            "limit": _number(self.limit),
            "experiments": [
                {
                    "taken": list(experiment.taken),
                    "together": self.together(experiment),
                    "updates": [_number(value) for value in experiment.updates],
                    "losses": [_number(value) for value in experiment.losses],
                    "why": experiment.why or None,
                }
                for experiment in rows
            ],
        }

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("taken from the reference", "updates apart: first", "last", "most", "loss, last", "")
        ]
        for experiment in (self.nothing, *self.single, self.everything):
            if experiment.why:
                rows.append((experiment.description, "-", "-", "-", "-", experiment.why))
                continue
            values = (
                (experiment.updates[0], experiment.updates[-1], experiment.apart, experiment.losses[-1])
                if experiment.updates
                else (math.nan,) * 4
            )
            shown = ["-" if math.isnan(value) else f"{value:.2g}" for value in values]
            rows.append((experiment.description, *shown, "together" if self.together(experiment) else "apart"))
        widths = [max(len(row[k]) for row in rows) for k in range(5)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *(row[k].rjust(widths[k]) for k in range(1, 5)), row[5]]).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, "", self.sentence])


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


#: Default number of steps of an experiment.
STEPS = 5


def resync(
    reference: str | Path,
    model: Any,
    train: Callable[[ReplayStep], object],
    *,
    optimizer: Any,
    own: str | Path | None = None,
    step: int | None = None,
    steps: int = STEPS,
    layer_map: Any = None,
) -> Resync:
    """Find the single thing that, taken from the reference, keeps two runs together.

    The candidate trains several steps from a packed step on. The first experiment takes nothing from the reference in
    later steps; others take the weights, the optimizer's state, the batches, the learning rate or the dropout masks in
    each step; another takes all except the weights. At the end, also after an error, model and optimizer are restored.

    Args:
        reference: the reference run, with a pack of each of these steps.
        model: the candidate.
        train: a function that trains on one step, like the loop of a replay: ``step.inputs``, ``step.labels``.
        optimizer: the candidate's optimizer, or several.
        own: a run that the candidate recorded, with packs of the same steps; the initial weights and state, and the
            batches, rates and masks come from this run. Default: the candidate's own part is what ``train`` does itself
            (a rate that it sets, a state or weights that it changes), and everything else comes from the reference.
        step: first step. Default: the first packed step that is followed by enough consecutive packed steps.
        steps: number of steps.
        layer_map: pairs of layers, in the form that `compare_runs` accepts.

    Returns:
        The experiments' distances; its text is a table with a sentence.

    Raises:
        RunFolderError: a run can't be read.
        UsageError: a pack is missing or does not fit this model, or an argument is wrong.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise UsageError(f"steps is a number of at least 1, got {steps!r}")
    optimizers = [] if optimizer is None else list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    if not optimizers:
        raise UsageError("resync takes the optimizer: it looks at what the training does to the weights")
    reference_run = opened(reference, None)
    own_run = None if own is None else opened(own, None)
    numbers = _numbers(reference_run, own_run, step, steps)
    live = LiveModel.from_model(model)
    check_model(live)
    experiments = _Experiments(reference_run, own_run, live, optimizers, train, numbers, layer_map)
    return experiments.run()


def _numbers(reference: Reference, candidate: Reference | None, step: int | None, steps: int) -> list[int]:
    """Return the numbers of the steps to run.

    Raises:
        UsageError: there are not enough consecutive packed steps.
    """
    both = [number for number in reference.numbers if candidate is None or number in candidate.numbers]
    rows = ([*range(number, number + steps)] for number in (both if step is None else [step]))
    consecutive = next((row for row in rows if set(row) <= set(both)), None)
    if consecutive is not None:
        return consecutive
    begin = (step if step is not None else both[0]) if both or step is not None else 0
    lacking = next((number for number in range(begin, begin + steps) if number not in both), begin)
    which = reference.path if candidate is None or lacking not in reference.numbers else candidate.path
    raise UsageError(
        f"{which} has no pack of step {lacking}, and a resync from step {begin} on needs one of each of {steps} steps. "
        f"Record it with replay_every_n_steps=padiff.Schedule(steps=range({begin}, {begin + steps})), or ask for fewer "
        "steps"
    )


class _Experiments:
    """The experiments on one model."""

    def __init__(
        self,
        reference: Reference,
        own: Reference | None,
        model: LiveModel,
        optimizers: Sequence[Any],
        train: Callable[[ReplayStep], object],
        numbers: Sequence[int],
        layer_map: Any,
    ) -> None:
        self._reference, self._own, self._model, self._optimizers = reference, own, model, optimizers
        self._train, self._numbers, self._layer_map = train, numbers, layer_map
        self._recorder: Recorder = recorder_of(
            model.model,
            None,
            replay_of=reference.run.info.identity,
            every_n_steps=Schedule(steps=list(numbers)),
            optimizer=list(optimizers),
        )
        self._carrying = StateRestorer(reference, model, optimizers, layer_map)
        self._own_carrying = self._carrying if own is None else StateRestorer(own, model, optimizers, None)
        self._doing = StepRunner(model, optimizers, self._recorder, self._carrying)
        self._distance: Distance | None = None
        #: Things that the current experiment takes from the reference, and the callback for the optimizer's step.
        self._taken: Collection[str] = ()
        self._at_step: Callable[[], None] | None = None
        #: True if the loop has set the learning rate itself.
        self._sets_rates = False

    def run(self) -> Resync:
        """Run all experiments, and restore the user's state."""
        self._doing.kept = snapshot = StateSnapshot(self._model)
        handles: list[Handle] = []
        api = self._model.framework.optimizers
        try:
            # Errors about the model are raised first; the first undo functions restore the user's own state.
            self._carrying.carry(self._numbers[0], snapshot.undo)
            if self._own_carrying is not self._carrying:
                self._own_carrying.carry(self._numbers[0], [])
            self._recorder.open()
            for optimizer in self._optimizers:
                for stepper in api.steppers(optimizer):
                    handles += api.hook(stepper, lambda *_: self._stepping(), lambda: None)
            nothing = self._experiment(())
            # All except the weights, which start equal and then evolve freely.
            everything = self._experiment([thing for thing in THINGS if thing != "weights"], begins=True)
            single = [self._experiment([thing]) for thing in THINGS if self._has(thing)]
        finally:
            for handle in handles:
                handle.remove()
            try:
                self._doing.discard()
                self._recorder.close(finished=False, raise_errors=False)
            finally:
                snapshot.give_back()
        return Resync(self._numbers[0], len(self._numbers), nothing, tuple(single), everything)

    def _has(self, thing: str) -> bool:
        """Return True if the thing exists: masks exist only in runs with dropout."""
        sides = [side for side in (self._reference, self._own) if side is not None]
        return thing != "masks" or any(side.packs[number].masks for side in sides for number in self._numbers)

    def _experiment(self, things: Collection[str], begins: bool = False) -> Resynced:
        """Run one experiment.

        Args:
            things: names of the things to take from the reference.
            begins: True to begin with the reference's weights.
        """
        self._taken, self._sets_rates = frozenset(things), False
        updates, losses = [], []
        for place, number in enumerate(self._numbers):
            update, loss = self._step(number, first=place == 0, begins=begins)
            updates.append(update)
            losses.append(loss)
        return Resynced(tuple(thing for thing in THINGS if thing in self._taken), tuple(updates), tuple(losses))

    def _step(self, number: int, first: bool, begins: bool) -> StepDistance:
        batch = self._source("batch").packs[number]
        masks = (self._source("masks").packs[number], self._carrier("masks").partners)
        began = [self._rates()]

        def put() -> None:
            self._put(number, first, begins)
            began[0] = self._rates()

        replayed = self._doing.start_step(batch, put=put, masks=masks)
        self._at_step = lambda: self._put_again(number)
        try:
            self._train(replayed)
        finally:
            self._at_step = None
        if self._rates() != began[0]:
            self._sets_rates = True
        step = self._doing.end_step()
        if step is None:
            raise UsageError(f"at step {number} nothing of the model was called: train(step) has to call it")
        return self._apart(number, step)

    def _source(self, thing: str) -> Reference:
        return self._reference if self._own is None or thing in self._taken else self._own

    def _carrier(self, thing: str) -> StateRestorer:
        return self._carrying if self._own is None or thing in self._taken else self._own_carrying

    # -- what a step starts from -------------------------------------------------------------------------------

    def _put(self, number: int, first: bool, begins: bool) -> None:
        """Set weights, state and learning rate before the loop's code runs."""
        if first or "weights" in self._taken:
            (self._carrying if begins else self._carrier("weights")).carry(number, [], states=False)
        states: Sequence[OptimizerState] | None = None
        if first or "state" in self._taken:
            states = self._carrier("state").states(number)
        # The loop's own learning rate stays.
        rates = self._carrier("rate").states(number) if not self._sets_rates or "rate" in self._taken else None
        self._set(states, rates)

    def _stepping(self) -> None:
        if self._at_step is not None:
            self._at_step()

    def _put_again(self, number: int) -> None:
        """Set state and rate again just before the optimizer steps, because the loop may have changed them."""
        states = self._carrying.states(number) if "state" in self._taken else None
        rates = self._carrying.states(number) if "rate" in self._taken else None
        self._set(states, rates)

    def _set(self, states: Sequence[OptimizerState] | None, rates: Sequence[OptimizerState] | None) -> None:
        """Set the optimizers' states, or rates, or both; `None` leaves them unchanged."""
        if states is None and rates is None:
            return
        api, names = self._model.framework.optimizers, self._carrying.names
        for place, optimizer in enumerate(self._optimizers):
            current = api.state(optimizer, names)
            if states is None and rates is not None and _same_rates(current, rates[place]):
                continue
            state, rate = (current if source is None else source[place] for source in (states, rates))
            api.set_state(optimizer, names, replace(state, rates=rate.rates))

    def _rates(self) -> list[list[float]]:
        return [self._model.framework.optimizers.learning_rates(optimizer) for optimizer in self._optimizers]

    # -- how far apart -----------------------------------------------------------------------------------------

    def _apart(self, number: int, step: Step) -> StepDistance:
        run = self._recorder.run
        assert run is not None
        if self._distance is None:
            self._distance = Distance(Both(self._reference.run.info, run.info), self._layer_map)
        return self._distance.measure(Both(self._reference.run.steps(number)[0], step))


def _same_rates(first: OptimizerState, second: OptimizerState) -> bool:
    sites = {site for state in (first, second) for rate in state.rates for site in rate.parameters}
    return all(first.rate(site) == second.rate(site) for site in sites)
