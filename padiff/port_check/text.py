"""A receipt as a table: for a terminal, and as Markdown for a pull request."""

from __future__ import annotations

from collections.abc import Iterator

from padiff.port_check.receipt import Check, Receipt, Side
from padiff.report_markdown import markdown_table, markdown_text

_HEAD = ("stage", "check", "outcome", "tensors", "to the bit", "worst / limit", "limit")
# Columns of numbers.
_RIGHT = range(3, 7)


def table_lines(receipt: Receipt) -> list[str]:
    """Return the result as lines of text: verdict, table, first fault, and what was compared otherwise."""
    rows = [_HEAD, *map(_cells, receipt.checks)]
    widths = [max(len(row[k]) for row in rows) for k in range(len(_HEAD))]
    lines = [headline(receipt), ""]
    for row in rows:
        cells = [
            cell.rjust(width) if k in _RIGHT else cell.ljust(width) for k, (cell, width) in enumerate(zip(row, widths))
        ]
        lines.append(f"  {'  '.join(cells)}".rstrip())
    lines.append("")
    lines += [f"  {label:<11}{text}" for label, text in _remarks(receipt)]
    return lines


def headline(receipt: Receipt) -> str:
    """Return the verdict, with the number of exceptions, and both frameworks."""
    count = len(receipt.exceptions)
    text = f", {count} exception{'s' if count != 1 else ''}" if count else ""
    return f"{receipt.outcome.upper()}{text}: {_named(receipt.reference)} against {_named(receipt.candidate)}"


def to_markdown(receipt: Receipt) -> str:
    """Return the result as Markdown; names of a run have no effect in it."""
    lines = [f"### padiff port-check: {markdown_text(headline(receipt))}", ""]
    lines += markdown_table(_HEAD, map(_cells, receipt.checks))
    lines += ["", *(f"- **{label}** {markdown_text(text)}" for label, text in _remarks(receipt))]
    return "\n".join(lines) + "\n"


def _remarks(receipt: Receipt) -> Iterator[tuple[str, str]]:
    if receipt.fault:
        yield "fault", receipt.fault
    for exception in receipt.exceptions:
        yield "exception", exception
    without = receipt.without_options
    if without is not None:
        yield (
            "without",
            f"options: {without.text}" if without.outcome else f"options they do not compare: {without.text}",
        )
    if receipt.moved is not None and receipt.moved.enough:  # else it is an exception
        yield "moved", receipt.moved.text
    coverage = receipt.coverage
    steps = f"{coverage.steps} step{'s' if coverage.steps != 1 else ''}"
    equal = (
        "" if coverage.equal_share is None else f"; {coverage.equal_share:.0%} of those in full are equal to the bit"
    )
    yield "compared", f"{coverage.tensors} tensors in {steps}, {coverage.share:.0%} of what was recorded{equal}"


def _named(side: Side) -> str:
    return f"{side.path} ({side.framework} {side.framework_version})"


def _cells(check: Check) -> tuple[str, ...]:
    if check.outcome == "not checked":
        return (check.stage, check.name, check.outcome, "", "", "", "")
    tensors = f"{check.differ} of {check.tensors} differ" if check.differ else str(check.tensors)
    worst = "" if check.times_limit is None else f"{check.times_limit:.2g}"
    limit = "" if check.limit is None else f"{check.limit:.1e}"
    return (check.stage, check.name, check.outcome, tensors, f"{check.equal} of {check.in_full}", worst, limit)
