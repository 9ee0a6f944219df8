"""Inputs of the search for a cause, in addition to the diffs of a step."""

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
    """Runs, alignment, policy and settings that the search for a cause reads.

    Attributes:
        runs: the reference and the candidate run; their other steps may be read too.
        alignment: the pairs of layers and parameters.
        policy: the policy that judged the diffs.
        steps: the step of the first diff on either side, of the diff's rank; `None` if the steps are not available.
        declared: returns the settings that differ between the runs in a step, by the step's number.
        agreed: the largest error of each tensor in the steps compared before.
    """

    runs: Both[Run]
    alignment: Alignment
    policy: Policy
    steps: Both[Step] | None = None
    declared: Callable[[int], Sequence[Difference]] = _nothing
    agreed: Agreement = field(default_factory=Agreement)
