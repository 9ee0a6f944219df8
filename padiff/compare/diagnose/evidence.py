"""What a comparison knows besides a step's diffs, when it looks for the cause of the first one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from padiff.align import Alignment
from padiff.compare.diagnose.extent import Agreement
from padiff.compare.judge.policy import Policy
from padiff.records import Both, Difference, Run, Step


def _nothing(_: int) -> Sequence[Difference]:
    return ()


@dataclass(frozen=True)
class Evidence:
    """What speaks for a cause.

    Attributes:
        runs: the reference and the candidate, whose other steps may be looked at.
        alignment: which layers and parameters answer to each other.
        policy: what judged the diffs.
        steps: the first diff's step, of the rank that it is of; `None` where it is not at hand.
        declared: what the runs declare differently in a step.
        agreed: how far off each tensor was in the steps compared before.
    """

    runs: Both[Run]
    alignment: Alignment
    policy: Policy
    steps: Both[Step] | None = None
    declared: Callable[[int], Sequence[Difference]] = _nothing
    agreed: Agreement = field(default_factory=Agreement)
