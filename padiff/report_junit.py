"""Reports as JUnit XML."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from padiff.records import CANNOT_TELL, Report, Standing, figures_text, verdict
from padiff.records.diagnostic import diagnostic_of
from padiff.records.diagnostic_text import diagnostic_text


def to_junit(report: Report) -> str:
    """Return the report as JUnit XML: a test case for each pair, failed if the pair differs.

    ``tests`` and ``failures`` are the numbers of the verdict. A pair that could not be compared is a skipped case,
    which is counted in ``skipped`` only. If the outcome is ``cannot tell``, an additional case is an error.
    """
    suite = ElementTree.Element("testsuite", name="padiff")

    def case_of(classname: str, name: str, kind: str = "", message: str = "", text: str = "") -> None:
        case = ElementTree.SubElement(suite, "testcase", classname=_xml(classname), name=_xml(name))
        if kind:
            ElementTree.SubElement(case, kind, message=_xml(message)).text = _xml(text)

    tests, failures, errors = report.coverage.compared, len(report.failed), 0
    if report.first_diff is not None and report.first_diff.diff is None:
        # The runs declare different settings, and no tensor differs yet.
        tests, failures = tests + 1, failures + 1
        case_of(
            "settings",
            str(report.first_diff.reference),
            "failure",
            report.first_diff.message,
            diagnostic_text(diagnostic_of(report), to="en"),
        )
    # Further faults that no tensor shows.
    for fault in (independent for independent in report.independent if independent.diff is None):
        tests, failures = tests + 1, failures + 1
        case_of("settings", f"{fault.reference} {fault.slot}", "failure", fault.message)
    if report.outcome == CANNOT_TELL:
        tests, errors = tests + 1, 1
        case_of("coverage", "parameters without a record", "error", verdict(report))
    alone = {
        (independent.step, independent.stage, independent.reference): independent
        for independent in report.independent
        if independent.diff is not None
    }
    first, skipped = True, sum(not diff.counts for diff in report.diffs)
    for name, count in (("tests", tests), ("failures", failures), ("errors", errors), ("skipped", skipped)):
        suite.set(name, str(count))
    for diff in report.diffs:
        kind = message = text = ""
        if not diff.passed:
            # The first diff has the full message with the cause.
            pair, standing = diff.pair, report.standing(diff)
            shown = report.first_diff if first else None
            if standing is Standing.NEW and not first:
                shown = alone.get((pair.step, pair.stage, pair.anchor.layer))
            kind = "failure"
            message = shown.message if shown is not None else f"{figures_text(diff)} ({standing})"
            text = diagnostic_text(diagnostic_of(report), to="en") if first else ""
            first = False
        elif not diff.counts:
            kind, message = "skipped", str(diff.problem or "")
        case_of(f"step {diff.pair.step}.{diff.pair.stage}", diff.pair.anchor.site, kind, message, text)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)


# Characters that XML can't hold in an attribute in any notation.
_NOT_IN_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


def _xml(text: str) -> str:
    """Return a run's text for XML; characters that XML can't hold become their codes (``\\x1b``)."""
    return _NOT_IN_XML.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)
