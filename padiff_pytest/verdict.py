"""Text of reports and errors in failed tests."""

from __future__ import annotations

from types import TracebackType

from padiff.errors import PadiffError
from padiff.records import Report
from padiff.records.report_text import headline


def failure_text(report: Report, *more: str) -> str:
    """Return a report for a failed test, beginning with the short verdict, because pytest's summary shows one line.

    Args:
        more: sentences between the short verdict and the report.
    """
    short = headline(report)
    details = str(report).removesuffix(short).rstrip()
    return "\n".join([short, *more, "", details])


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
