"""``padiff.golden_command``: a training command, sorted against its golden run."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import pytest

from padiff.errors import UsageError
from padiff.golden.folder import read_golden
from padiff.golden.sorting import DRIFT, EQUAL, bless, check_run, record_golden, record_run, recover, sorted_text
from padiff_pytest.golden import Kept
from padiff_pytest.verdict import failure_text


class DriftWarning(UserWarning):
    """A training has moved from its golden run by rounding."""


def sorted_command(kept: Kept, command: Sequence[str], folders: pytest.TempPathFactory, blesses: bool) -> str:
    """Run a command and sort it, or write its golden run anew when updating.

    Returns:
        What is wrong; empty if nothing is.

    Raises:
        UsageError: there is no command, or it trains for fewer steps.
    """
    if not command:
        raise UsageError(
            "golden_command: give the program and its arguments: golden_command('net', sys.executable, ...)"
        )
    scratch = folders.mktemp(f"padiff-{kept.name}")
    if kept.update:
        golden = record_golden(command, scratch / kept.name, scratch)
        kept.write(golden.folder)
        return ""
    recover(kept.folder.parent)
    if missing := kept.missing():
        return missing
    golden = read_golden(kept.folder)
    result = check_run(golden, record_run(command, scratch / "now", len(golden.steps)), command, scratch)
    if result.sort == EQUAL:
        return ""
    lines = list(sorted_text(result))
    if result.sort == DRIFT:
        if blesses:
            kept.remark(f"{kept.folder}: blessed; the proof is {bless(result, command, scratch / 'bless')}")
        else:
            warnings.warn(f"{kept.name}: drift; {'; '.join(lines)}", DriftWarning, stacklevel=4)
        return ""
    if result.report is None or result.report.passed:
        return "\n".join([f"{result.sort}: {kept.name}", *lines])
    return failure_text(result.report, f"{result.sort}: {kept.name}", *lines)
