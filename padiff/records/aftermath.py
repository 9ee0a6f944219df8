"""What follows from the first diff, and what does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from padiff.records.compared import Diff


class Standing(Enum):
    """How a diff that did not pass stands to the first one. Its value is how a report says it."""

    FIRST = "first here"
    #: It may be made of what differs already; that is assumed wherever nothing shows otherwise.
    FOLLOWS = "follows"
    #: It does not follow, and may be the same fault at another place.
    AGAIN = "again here"
    #: It does not follow, and is another fault.
    NEW = "new here"

    def __str__(self) -> str:
        return self.value


#: Step and site of a diff.
Mark = tuple[int, str]


@dataclass(frozen=True, slots=True)
class Aftermath:
    """How the diffs of a run stand to its first one: `FOLLOWS` but for those that are named here.

    Attributes:
        marks: the others, by step and site (of every rank that has such a site).
    """

    marks: Mapping[Mark, Standing] = field(default_factory=dict)

    def of(self, diff: Diff) -> Standing | None:
        """How a diff stands to the first one; `None` if it passed."""
        return None if diff.passed else self.marks.get(mark_of(diff), Standing.FOLLOWS)


def mark_of(diff: Diff) -> Mark:
    """What tells a diff from others of its run."""
    return diff.pair.step, diff.pair.anchor.site
