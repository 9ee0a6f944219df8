"""Text of reports and errors in failed tests."""

from __future__ import annotations

from types import TracebackType

from padiff.errors import PadiffError
from padiff.records import Report
from padiff.records.diagnostic import diagnostic_of
from padiff.records.diagnostic_text import summary_line


def failure_text(report: Report, *more: str) -> str:
    """Return a report for a failed test, beginning with one line, because pytest's summary shows one line.

    Args:
        more: sentences between that line and the report.
    """
    return "\n".join([summary_line(diagnostic_of(report)), *more, "", str(report)])


class ShortErrors:
    """Context manager that shows padiff's own errors at the test's line, without the frames inside padiff."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        __tracebackhide__ = True
        if isinstance(error, PadiffError):
            raise error.with_traceback(None) from error.__cause__
