"""Blessing: a golden run is replaced by a run that is only a drift, with the proof that it is."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from padiff import __version__
from padiff.dump import open_run
from padiff.dump.medium import write_json
from padiff.errors import UsageError
from padiff.golden.commands import record_golden
from padiff.golden.folder import PROOF_FILE, is_golden
from padiff.golden.noise import FACTOR, UNITS
from padiff.golden.sorting import DRIFT, Sorted

PROOF_VERSION = 1
# The name of a golden run while it is replaced, with the number of the process that does it.
_OLD = re.compile(r"\.(.+)\.\d+\.old")


def proof_of(result: Sorted, left_out: str) -> dict[str, Any]:
    """Return the proof that a run is a drift: both environments, and the error of each tensor beside its limit."""
    golden, now = result.golden.run.info, open_run(result.run).info
    return {
        "schema_version": PROOF_VERSION,
        "sort": result.sort,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "padiff": __version__,
        "recorded": result.golden.created,
        "marks": {"old": result.golden.mark, "new": result.mark},
        "environments": {"old": dict(golden.environment), "new": dict(now.environment)},
        "changed": list(result.environment),
        "rule": f"each error is at most {FACTOR:g} times the largest one after moves by {UNITS} units",
        "left_out": left_out,
        "not_compared": list(result.missing),
        "tensors": result.layers(),
    }


def bless(result: Sorted, command: Sequence[str], scratch: Path) -> Path:
    """Replace a golden run by the run of now, with the proof in it; until the last moment the old one stays.

    Returns:
        The path of the proof.

    Raises:
        UsageError: the run is no drift, or the training does not repeat itself any more.
    """
    if result.sort != DRIFT:
        raise UsageError(f"golden: {result.golden.name} is no drift, but {result.sort}: only a drift is blessed")
    folder = result.golden.folder
    # Beside the old one, so that a rename suffices.
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}.blessed")
    try:
        steps = len(result.golden.steps)
        new = record_golden(command, fresh, scratch, steps, base=result.run, name=folder.name)
        if new.mark != result.mark or (result.golden.repeats and not new.repeats):
            raise UsageError(f"golden: {folder.name} changed while it was blessed. Check it again")
        write_json(fresh / PROOF_FILE, proof_of(result, new.left_out))
        swap(folder, fresh)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return folder / PROOF_FILE


def swap(folder: Path, fresh: Path) -> None:
    """Put a new folder in the place of an old one; if that fails, the old one is there again."""
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    os.rename(folder, old)
    try:
        os.rename(fresh, folder)
    except BaseException:
        os.rename(old, folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def recover(folder: Path) -> None:
    """Put back golden runs whose replacement was cut off between its two renames."""
    with contextlib.suppress(OSError):
        for old in folder.glob(".*.old"):
            match = _OLD.fullmatch(old.name)
            if match is not None and is_golden(old) and not (folder / match[1]).exists():
                os.rename(old, folder / match[1])
