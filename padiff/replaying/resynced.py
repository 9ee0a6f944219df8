"""What came of taking one thing at a time from the reference: a table, and one sentence."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

#: What can be taken from the reference, and what a report calls it.
THINGS = {
    "weights": "the weights",
    "state": "the optimizer's state",
    "batch": "the batch",
    "rate": "the learning rate",
    "masks": "dropout's masks",
}
#: Runs are together if their updates are apart by at most so many times what they are with all of it taken from the
#: reference; or by this share of themselves. A learning rate that is off by 2 % is 2e-2. Chosen.
TIMES, TOGETHER = 10.0, 2e-3
#: Beyond this share even with all of it taken, it is none of these things.
APART = 2e-2


@dataclass(frozen=True)
class Resynced:
    """How far the runs came apart with some things taken from the reference.

    Attributes:
        taken: names of `THINGS`; none: the candidate's own run.
        updates: of each step, how far the updates of all parameters together are apart, as a share of the reference's.
        losses: of each step, how far the loss is apart, likewise; NaN where none was recorded.
        why: why it was not done; else empty.
    """

    taken: tuple[str, ...]
    updates: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    why: str = ""

    @property
    def apart(self) -> float:
        """The largest of the updates' distances; NaN where it was not done."""
        if not self.updates or any(math.isnan(update) for update in self.updates):
            return math.nan
        return max(self.updates)

    @property
    def name(self) -> str:
        """What was taken, in words."""
        if len(self.taken) > 1:
            return f"all but {THINGS['weights']}, after an equal start"
        return " and ".join(THINGS[thing] for thing in self.taken) or "nothing"


@dataclass(frozen=True)
class Resync:
    """Experiments with one thing at a time taken from the reference.

    Attributes:
        step: where they begin.
        steps: how many steps each goes on for.
        nothing: the candidate's own run.
        single: with one thing taken each.
        everything: with all taken but the weights, which go their own way after an equal start.
    """

    step: int
    steps: int
    nothing: Resynced
    single: tuple[Resynced, ...]
    everything: Resynced

    @property
    def limit(self) -> float:
        """How far apart updates of runs that are together may be."""
        return max(TIMES * self._least, TOGETHER)

    @property
    def _least(self) -> float:
        """How far apart they are with all of it taken; where that is far, with what helps most."""
        if self.everything.apart <= APART:
            return self.everything.apart
        return self._best.apart

    def together(self, one: Resynced) -> bool:
        """Whether the runs stayed together."""
        return one.apart <= self.limit

    @property
    def helping(self) -> tuple[str, ...]:
        """The things of which each by itself keeps the runs together; empty where nothing is needed, or none does."""
        if self.together(self.nothing) or not self._tells:
            return ()
        return tuple(one.taken[0] for one in self.single if self.together(one))

    @property
    def _tells(self) -> bool:
        return self._least <= APART

    @property
    def sentence(self) -> str:
        """What it comes to."""
        span = f"from step {self.step} on, over {self.steps} steps"
        own, all_taken = f"{self.nothing.apart:.2g}", f"{self.everything.apart:.2g}"
        if not self._tells:
            return (
                f"It is none of these: {span}, the updates are {all_taken} of themselves apart even with all of them "
                "taken from the reference. The model or the loss computes something else: a replay says where."
            )
        if self.together(self.nothing):
            apart = f"updates at most {own} of themselves apart"
            return f"Nothing has to be taken from the reference: {span}, the runs stay together ({apart})."
        if not self.helping:
            return (
                f"No one of these alone keeps the runs together {span} (updates {own} of themselves apart), all of "
                f"them do ({all_taken}): several differ. Mend what helps most first, and try again: "
                f"{self._best.name} ({self._best.apart:.2g})."
            )
        found = [one for one in self.single if one.taken[0] in self.helping]
        best = min(found, key=lambda one: one.apart)
        names = " or ".join(one.name for one in found)
        return (
            f"{names[0].upper()}{names[1:]} {'keeps' if len(found) == 1 else 'keep'} the runs together: taken from the "
            f"reference {span}, updates are at most {best.apart:.2g} of themselves apart, else {own}."
        )

    @property
    def _best(self) -> Resynced:
        done = [one for one in self.single if not math.isnan(one.apart)]
        return min(done, key=lambda one: one.apart, default=self.nothing)

    def plain(self) -> dict[str, Any]:
        """It as JSON values."""
        rows = [self.nothing, *self.single, self.everything]
        return {
            "step": self.step,
            "steps": self.steps,
            "sentence": self.sentence,
            "helping": list(self.helping),
            "limit": _number(self.limit),
            "experiments": [
                {
                    "taken": list(one.taken),
                    "together": self.together(one),
                    "updates": [_number(value) for value in one.updates],
                    "losses": [_number(value) for value in one.losses],
                    "why": one.why or None,
                }
                for one in rows
            ],
        }

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("taken from the reference", "updates apart: first", "last", "most", "loss, last", "")
        ]
        for one in (self.nothing, *self.single, self.everything):
            if one.why:
                rows.append((one.name, "-", "-", "-", "-", one.why))
                continue
            values = (one.updates[0], one.updates[-1], one.apart, one.losses[-1]) if one.updates else (math.nan,) * 4
            shown = ["-" if math.isnan(value) else f"{value:.2g}" for value in values]
            rows.append((one.name, *shown, "together" if self.together(one) else "apart"))
        widths = [max(len(row[k]) for row in rows) for k in range(5)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *(row[k].rjust(widths[k]) for k in range(1, 5)), row[5]]).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, "", self.sentence])


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
