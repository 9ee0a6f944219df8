"""A fault that shows by itself, whatever differs before it."""

from __future__ import annotations

from dataclasses import dataclass

from padiff.records import Cause, Diff, Recomputed


@dataclass(frozen=True)
class Fault:
    """A place at which a side departs from what the other's rule makes of its own tensors.

    Attributes:
        shown: the diff that shows it.
        cause: why; `None` where nothing explains it.
        recomputed: what each side is off by, where its own tensors were computed again.
        inside: the diff of what goes into the layer, where that is what differs.
        kind: of what it is a fault, for telling one fault at several places from several faults: the kind of layer, or
            a stage.
    """

    shown: Diff
    cause: Cause | None
    recomputed: Recomputed | None = None
    inside: Diff | None = None
    kind: str = ""

    @property
    def diff(self) -> Diff:
        """What is reported: what goes into the layer, where that differs."""
        return self.shown if self.inside is None else self.inside
