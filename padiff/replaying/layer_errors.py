"""Table of each layer's own error in a replayed step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from padiff.compare.judge.limits import ROUNDING
from padiff.records import is_below


@dataclass(frozen=True)
class OwnError:
    """The error of one layer in isolation.

    Attributes:
        candidate, reference: paths of the layers.
        kind: class of the candidate's layer.
        forward: relative L2 error of its outputs on the reference's inputs; `None` if unknown.
        backward: relative L2 error of its input gradients, from the reference's output gradients; `None` if unknown.
        unit: rounding error of its dtype, the unit of the table.
        limit: allowed relative error of the outputs.
        why: reason why the error is unknown.
    """

    candidate: str
    reference: str
    kind: str
    forward: float | None = None
    backward: float | None = None
    unit: float = ROUNDING["float32"]
    limit: float = math.inf
    why: str = ""

    @property
    def passed(self) -> bool:
        """Return True if rounding explains the error of the outputs, or if the error is unknown."""
        return self.forward is None or self.forward <= self.limit


@dataclass
class Isolation:
    """The own errors of a replayed step's layers, filled during the step. Its text is a table.

    Attributes:
        step: number of the step.
        layers: errors by the candidate's layer path, in the order of the first calls.
    """

    step: int
    layers: dict[str, OwnError] = field(default_factory=dict)

    @property
    def failed(self) -> tuple[OwnError, ...]:
        """Return the innermost layers whose own error exceeds rounding, in order."""
        failed = [error for error in self.layers.values() if not error.passed]
        return tuple(
            error for error in failed if not any(is_below(inner.candidate, error.candidate) for inner in failed)
        )

    def add(self, found: OwnError) -> None:
        """Add a layer's error; of several calls of a layer, the largest error counts."""
        previous = self.layers.get(found.candidate)
        if previous is not None:
            found = replace(
                previous,
                forward=_larger(previous.forward, found.forward),
                backward=_larger(previous.backward, found.backward),
                limit=min(previous.limit, found.limit),
                why=previous.why or found.why,
            )
        self.layers[found.candidate] = found

    def __str__(self) -> str:
        width = max((len(error.candidate) for error in self.layers.values()), default=5)
        lines = [
            f"own errors at step {self.step}, in multiples of rounding (each layer on the reference's inputs)",
            f"{'layer':{width}}  {'forward':>9}  {'backward':>9}",
        ]
        for error in self.layers.values():
            mark = "  <" if not error.passed else f"  {error.why}" if error.why and error.forward is None else ""
            lines.append(
                f"{error.candidate:{width}}  {_units(error.forward, error)}  {_units(error.backward, error)}{mark}"
            )
        failed = [f"{error.candidate} ({error.kind}): own error {error.forward:.2g}" for error in self.failed]
        if failed:
            lines.append(f"{'; '.join(failed)}. Nothing of it is inherited from the layers before")
        else:
            lines.append("no layer has an error of its own beyond rounding")
        return "\n".join(lines)


def _larger(first: float | None, second: float | None) -> float | None:
    return max((value for value in (first, second) if value is not None), default=None)


def _units(value: float | None, entry: OwnError) -> str:
    return f"{'-':>9}" if value is None else f"{value / entry.unit:>9.3g}"
