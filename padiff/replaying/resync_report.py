"""Results of a resync: a table, and one sentence."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

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
