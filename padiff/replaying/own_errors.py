"""How far off each layer of a replayed step is by itself: a table."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from padiff.compare.judge.limits import ROUNDING
from padiff.records import is_below


@dataclass(frozen=True)
class OwnError:
    """How far off one layer is by itself.

    Attributes:
        candidate, reference: paths of the layers.
        kind: the candidate's class.
        forward: relative L2 error of its outputs, given the reference's inputs; `None`: not known.
        backward: relative L2 error of the gradients of its inputs, given the reference's gradients of its outputs.
        unit: the rounding of its dtype, which is one unit of the table.
        limit: the relative error that is allowed forward.
        why: why it is not known.
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
        """Whether its output is as near as rounding explains."""
        return self.forward is None or self.forward <= self.limit


@dataclass
class Isolation:
    """The layers of a replayed step, each by itself; filled while the step is done. Its text is a table.

    Attributes:
        step: the step's number.
        layers: in the order in which they were called first.
    """

    step: int
    layers: dict[str, OwnError] = field(default_factory=dict)

    @property
    def failed(self) -> tuple[OwnError, ...]:
        """The layers with an error of their own beyond rounding, in order; not those around them."""
        failed = [one for one in self.layers.values() if not one.passed]
        return tuple(one for one in failed if not any(is_below(other.candidate, one.candidate) for other in failed))

    def add(self, found: OwnError) -> None:
        """Of several calls of a layer the worst one counts."""
        known = self.layers.get(found.candidate)
        if known is not None:
            found = replace(
                known,
                forward=_larger(known.forward, found.forward),
                backward=_larger(known.backward, found.backward),
                limit=min(known.limit, found.limit),
                why=known.why or found.why,
            )
        self.layers[found.candidate] = found

    def __str__(self) -> str:
        width = max((len(one.candidate) for one in self.layers.values()), default=5)
        lines = [
            f"own errors at step {self.step}, in multiples of rounding (each layer on the reference's inputs)",
            f"{'layer':{width}}  {'forward':>9}  {'backward':>9}",
        ]
        for one in self.layers.values():
            mark = "  <" if not one.passed else f"  {one.why}" if one.why and one.forward is None else ""
            lines.append(f"{one.candidate:{width}}  {_units(one.forward, one)}  {_units(one.backward, one)}{mark}")
        failed = [f"{one.candidate} ({one.kind}): own error {one.forward:.2g}" for one in self.failed]
        if failed:
            lines.append(f"{'; '.join(failed)}. Nothing of it is inherited from the layers before")
        else:
            lines.append("no layer has an error of its own beyond rounding")
        return "\n".join(lines)


def _larger(one: float | None, other: float | None) -> float | None:
    return max((value for value in (one, other) if value is not None), default=None)


def _units(value: float | None, one: OwnError) -> str:
    return f"{'-':>9}" if value is None else f"{value / one.unit:>9.3g}"
