"""A fault that is independent of all earlier diffs."""

from __future__ import annotations

from dataclasses import dataclass

from padiff.records import Cause, Diff, Recomputed


@dataclass(frozen=True)
class Fault:
    """A place where one side computes something else than the other side's rule gives for the same inputs.

    Attributes:
        shown: the diff that shows the fault.
        cause: the cause; `None` if nothing explains the fault.
        recomputed: the errors of both sides compared with a computation in float64 from their own tensors.
        inside: the diff of an input of the layer, if the input is what differs.
        kind: the kind of layer, or a stage; the same fault in the code may show at several places of one kind.
    """

    shown: Diff
    cause: Cause | None
    recomputed: Recomputed | None = None
    inside: Diff | None = None
    kind: str = ""

    @property
    def diff(self) -> Diff:
        """The diff to report: of the layer's input if that differs, else of its output."""
        return self.shown if self.inside is None else self.inside
