"""A fault, and what is known around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from padiff.records import Both, Difference, FirstDiff, Models
from padiff.records.diagnostic import code_lines
from padiff.system.frames import Frame
from padiff_cli.fix.source import Project


@dataclass(frozen=True)
class Fault:
    """A fault and what is known around it.

    Attributes:
        first: the fault.
        models: both layer trees, and lines of code.
        reference_run: the reference's folder, as the user wrote it.
        reference_code: the reference's own files, where they lie in the working folder as they were recorded.
        settings: the settings that the runs declare differently.
    """

    first: FirstDiff
    models: Models
    reference_run: str
    reference_code: Project
    settings: Sequence[Difference] = ()

    @property
    def kind(self) -> str:
        """Return the kind of the cause; empty if there is none."""
        return "" if self.first.cause is None else self.first.cause.kind

    @property
    def words(self) -> str:
        """Return the kind and the sentence of the cause."""
        return "" if self.first.cause is None else f"{self.kind} {self.first.cause.sentence}"

    @property
    def fix(self) -> str:
        """Return the line of code by which the cause is fixed; empty if it is not known."""
        return "" if self.first.cause is None else self.first.cause.fix

    @property
    def frameworks(self) -> tuple[str, str]:
        """Return the names of both frameworks."""
        names = [name.partition(" ")[0] for name in self.models.frameworks]
        return names[0], names[1]

    @cached_property
    def lines(self) -> Both[Frame | None]:
        """Return the lines of code of the fault on both sides."""
        return code_lines(self.first, self.models)

    def partner_of(self, layer: str) -> str:
        """Return the candidate's path of a layer of the reference; empty if it has none."""
        return next((each.candidate for each in self.models.partners if each.reference == layer), "")
