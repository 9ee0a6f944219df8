"""Runs the user's command under `padiff run`, as often as a golden run needs it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from padiff.dump import open_run
from padiff.errors import PadiffError, UsageError
from padiff.golden.folder import Golden, check_name, is_golden, read_golden, write_golden
from padiff.golden.noise import UNITS
from padiff.replaying.measuring import computed_in
from padiff.replaying.perturbation import MOVE_VARIABLE

#: Steps of a golden run: the second one shows momentum, and what else an optimizer hands on.
STEPS = 2
#: Runs with moved weights. Chosen: the largest error of 4 is seldom small by chance.
RUNS = 4
#: Variables of the runs that measure rounding, in turns: other kernels and threads add in another order.
KERNELS: tuple[Mapping[str, str], ...] = (
    {"OMP_NUM_THREADS": "2"},
    {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"},
    {"OMP_NUM_THREADS": "1"},
    {},
)
#: What stands for the name of a golden run in a command.
PLACEHOLDER = "{golden}"
# Lines of a failed command's output that a message has.
_LAST_LINES = 5


def record_run(command: Sequence[str], folder: Path, steps: int, environment: Mapping[str, str] | None = None) -> Path:
    """Run a command until it has recorded so many steps.

    Raises:
        UsageError: it recorded fewer steps.
    """
    words = [
        *(sys.executable, "-m", "padiff", "run", "--dir", str(folder.resolve()), "--stop-after", str(steps)),
        *("--existing", "overwrite", "--", *command),
    ]
    mine = {name: value for name, value in os.environ.items() if not name.startswith("PADIFF_RUN_")}
    done = subprocess.run(
        words,
        env={**mine, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    try:
        count = len(open_run(folder).numbers())
    except PadiffError:
        count = 0
    if count < steps:
        lines = " / ".join(line.strip() for line in done.stdout.strip().splitlines()[-_LAST_LINES:])
        raise UsageError(
            f"golden: the command recorded {count} of {steps} steps, and ended with exit code {done.returncode}"
            f"{f' ({lines})' if lines else ''}. Let it train for that many, or record with another --steps"
        )
    return folder


def record_golden(
    command: Sequence[str],
    target: Path,
    scratch: Path,
    steps: int = STEPS,
    runs: int = RUNS,
    base: Path | None = None,
    name: str = "",
) -> Golden:
    """Record a golden run: the training, the same once more, and with moved weights.

    Args:
        target: its folder, which must not exist.
        scratch: a folder for the runs.
        base: a run of this training that was recorded already.
        name: name of the golden run. Default: that of its folder.
    """
    if base is None:
        base = record_run(command, scratch / "base", steps)
    run = open_run(base)
    dtype = computed_in(run.steps(run.numbers()[0])[0], run.info.environment)
    again = record_run(command, scratch / "again", steps)
    moved = [
        record_run(
            command,
            scratch / f"moved-{number}",
            steps,
            {MOVE_VARIABLE: f"{number} {UNITS} {dtype}", **KERNELS[number % len(KERNELS)]},
        )
        for number in range(runs)
    ]
    fresh = target.with_name(f".{target.name}.{os.getpid()}.new")
    try:
        write_golden(fresh, name or target.name, base, again, moved)
        os.rename(fresh, target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return read_golden(target)


def command_for(command: Sequence[str], name: str) -> list[str]:
    """Return a command with the name of a golden run in the place of ``{golden}``.

    Raises:
        UsageError: the name has characters that no golden run has.
    """
    check_name(name)
    return [word.replace(PLACEHOLDER, name) for word in command]


def check_target(folder: Path, replace: bool) -> None:
    """Raise an error if a golden run can't be recorded into a folder.

    Raises:
        UsageError: there is one already, or something else.
    """
    check_name(folder.name)
    if is_golden(folder) and not replace:
        raise UsageError(
            f"{folder} holds a golden run. `padiff golden check {folder} --bless` replaces it if rounding explains "
            "the change; remove the folder to record it anew whatever has changed"
        )
    if folder.exists() and not is_golden(folder):
        raise UsageError(f"{folder} exists and is no golden run: give another folder")
