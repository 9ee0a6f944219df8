"""The pytest plugin: the fixture `padiff`, and the flags ``--padiff-update`` and ``--padiff-bless`` (docs/ci.md).

pytest imports this module in every session, so this module imports neither padiff nor a framework; the fixture imports
them when a test uses the fixture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from padiff_pytest.fixture import Padiff

#: Name of the test report's user property that carries a line about each written golden run to the main process.
WRITTEN = "padiff_golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("padiff")
    group.addoption(
        "--padiff-update",
        action="store_true",
        help="write the golden runs of the selected tests anew, instead of comparing with them",
    )
    group.addoption(
        "--padiff-bless",
        action="store_true",
        help="replace golden runs of commands where rounding explains the change, with the proof; never others",
    )


@pytest.fixture
def padiff(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Padiff:
    """Compare trainings in a test: ``padiff.assert_same``, ``padiff.golden``; other names are the package's."""
    from padiff_pytest.fixture import Padiff

    update = bool(request.config.getoption("--padiff-update"))
    return Padiff(request.node, tmp_path_factory, update, bool(request.config.getoption("--padiff-bless")))


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
