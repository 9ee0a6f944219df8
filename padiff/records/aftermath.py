"""Relation of each later diff to the first diff of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from padiff.records.compared import Diff


class Standing(Enum):
    """Relation of a failed diff to the first diff of its run; the value is the wording of reports."""

    FIRST = "first difference"
    #: May be a consequence of earlier diffs; the default wherever nothing shows otherwise.
    FOLLOWS = "follows"
    #: Does not follow, and may be the same fault at another place.
    AGAIN = "again"
    #: Does not follow, and is another fault.
    NEW = "new difference"

    def __str__(self) -> str:
        return self.value


#: Step and site of a diff.
Mark = tuple[int, str]


@dataclass(frozen=True, slots=True)
class Aftermath:
    """Relation of every failed diff of a run to the first one; `FOLLOWS` for every diff without an entry in `marks`.

    Attributes:
        marks: the exceptions to `FOLLOWS`, by step and site (for every rank that has such a site).
    """

    marks: Mapping[Mark, Standing] = field(default_factory=dict)

    def standing_of(self, diff: Diff) -> Standing | None:
        """Return the relation of a diff to the first one; `None` if the diff passed."""
        return None if diff.passed else self.marks.get(mark_of(diff), Standing.FOLLOWS)


def mark_of(diff: Diff) -> Mark:
    """Return the key of a diff within its run: step and site."""
    return diff.pair.step, diff.pair.anchor.site
