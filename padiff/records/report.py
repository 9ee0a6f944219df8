"""Report of a comparison, as values and as text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from padiff.records.cards import report_card
from padiff.records.diagnostic import diagnostic_json, diagnostic_of
from padiff.records.diagnostic_text import diagnostic_text
from padiff.records.report_data import ReportData
from padiff.records.report_text import count_text, details_text
from padiff.records.tables import to_arrow, to_pandas

# Width of the text, in columns.
_WIDE = 120


@dataclass(frozen=True, eq=False, repr=False)
class Report(ReportData):
    """All diffs of two steps or two runs, in causal order. True in a condition if the runs match.

    An existing report may be false, so write ``report is None``, ``report.passed`` or ``report.first_diff``.

    Attributes: those of `ReportData`.
    """

    def __str__(self) -> str:
        return f"{self.text()}\n\n{details_text(self)}"

    def text(self, width: int = _WIDE) -> str:
        """Return the block that `padiff compare` prints: where the runs differ first, why, the lines of code, the fix.

        Args:
            width: number of available columns.
        """
        return diagnostic_text(diagnostic_of(self), width)

    def brief(self) -> dict[str, Any]:
        """Return the first fault, its cause, its fix and the lines of code, as JSON values of at most 4 kB.

        ``padiff schema`` prints the schema.
        """
        brief: dict[str, Any] = json.loads(diagnostic_json(diagnostic_of(self)))
        return brief

    def to_pandas(self) -> Any:
        """Return all pairs as a ``pandas.DataFrame``, a row for each pair, in causal order.

        Raises:
            UsageError: pandas is not installed.
        """
        return to_pandas(self)

    def to_arrow(self) -> Any:
        """Return all pairs as a ``pyarrow.Table``, a row for each pair, in causal order.

        Raises:
            UsageError: pyarrow is not installed.
        """
        return to_arrow(self)

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook displays."""
        return report_card(self)

    def __repr__(self) -> str:
        return f"<Report: {self.outcome}, {count_text(self)}, {self.reference} against {self.candidate}>"
