"""Report of a comparison, as values and as text."""

from __future__ import annotations

from dataclasses import dataclass

from padiff.records.cards import report_card
from padiff.records.report_data import ReportData
from padiff.records.report_text import count_text, report_text


@dataclass(frozen=True, eq=False, repr=False)
class Report(ReportData):
    """All diffs of two steps or two runs, in causal order. True in a condition if the runs match.

    An existing report may be false, so write ``report is None``, ``report.passed`` or ``report.first_diff``.

    Attributes: those of `ReportData`.
    """

    def __str__(self) -> str:
        return report_text(self)

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook displays."""
        return report_card(self)

    def __repr__(self) -> str:
        return f"<Report: {self.outcome}, {count_text(self)}, {self.reference} against {self.candidate}>"
