"""``resync``: train from a packed step on with one thing at a time taken from the reference."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from padiff.compare.distance import Distance, StepDistance
from padiff.errors import UsageError
from padiff.frameworks.hooking import Handle
from padiff.model.live_model import LiveModel
from padiff.recorder import Recorder
from padiff.recorder.factory import recorder_of
from padiff.recorder.schedule import Schedule
from padiff.records import Both, Step
from padiff.records.parameter_states import OptimizerState
from padiff.replaying.checks import Reference, check_model, opened
from padiff.replaying.restore_state import StateRestorer
from padiff.replaying.resync_report import THINGS, Resync, Resynced
from padiff.replaying.state_snapshot import StateSnapshot
from padiff.replaying.step import ReplayStep
from padiff.replaying.step_runner import StepRunner

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
