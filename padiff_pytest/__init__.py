"""The pytest plugin: the fixture `padiff` and the flag ``--padiff-update``. docs/ci.md says how to use it.

pytest imports this module in every session, so it imports neither padiff nor a framework: the fixture does, when a test
asks for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from padiff_pytest.fixture import Padiff

#: The name under which a test's report carries a line about each golden run that it wrote, to the process that prints.
WRITTEN = "padiff_golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("padiff").addoption(
        "--padiff-update",
        action="store_true",
        help="write the golden runs of the selected tests anew, instead of comparing with them",
    )


@pytest.fixture
def padiff(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Padiff:
    """Compare trainings in a test: ``padiff.assert_same``, ``padiff.golden``; all else is the package's."""
    from padiff_pytest.fixture import Padiff

    update = bool(request.config.getoption("--padiff-update"))
    return Padiff(request.node, tmp_path_factory, update)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    lines = [
        str(text)
        for outcome in ("passed", "failed")
        for report in terminalreporter.stats.get(outcome, [])
        if getattr(report, "when", "") == "call"
        for name, text in report.user_properties
        if name == WRITTEN
    ]
    if lines:
        terminalreporter.section("golden runs written")
        for line in lines:
            terminalreporter.write_line(line)
