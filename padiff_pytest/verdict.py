"""Reports as failures of a test."""

from __future__ import annotations

from types import TracebackType

from padiff.errors import PadiffError
from padiff.records import Report
from padiff.records.report_text import headline


def failure_text(report: Report, *more: str) -> str:
    """A report for a test that failed: the verdict in short comes first, as pytest's summary shows one line only.

    Args:
        more: sentences that go between the verdict in short and the report.
    """
    short = headline(report)
    whole = str(report).removesuffix(short).rstrip()
    return "\n".join([short, *more, "", whole])


class ShortErrors:
    """Shows errors that padiff raises on purpose at the test's own line: where in padiff they come from is no help."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        __tracebackhide__ = True
        if isinstance(error, PadiffError):
            raise error.with_traceback(None) from error.__cause__
