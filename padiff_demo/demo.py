"""The demo: comparison of a correct port, and of one with a realistic porting fault."""

from __future__ import annotations

import shutil
import time
import warnings
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

from rich.console import Console

from padiff import compare_runs
from padiff.errors import UsageError
from padiff.records import Both, Report
from padiff.records.diagnostic import diagnostic_of
from padiff.records.diagnostic_text import summary_line
from padiff.report_formats import to_json
from padiff_hooks.show import print_report
from padiff_page import page

#: Number of epochs over the 1,797 images, and number of optimizer steps between two recorded ones.
EPOCHS, EVERY_N_STEPS = 2, 8
#: Name of the page that shows the planted fault.
REPORT = "report.html"

_MARK = "padiff-demo.txt"


def run(folder: Path, console: Console) -> int:
    """Train and compare both pairs under ``folder``; return 0 if the results are as expected, else 1."""
    _prepare(folder)
    console.print("Two frameworks, one small CNN on 1,797 handwritten digits, equal weights and batches.\n")
    with console.status("importing torch and paddle"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of the frameworks' imports
        try:
            from padiff_demo import data, hapi_run, lightning_run
        except ImportError as error:
            with_it = "all that it needs comes with: pip install 'padiff-hooks[demo]'"
            raise UsageError(f"the demo can't run: {error}; {with_it}") from error
    weights = lightning_run.initial_weights(seed=0)
    images, labels = data.batches(EPOCHS)

    with _timed(console, f"PyTorch Lightning, {len(images)} steps, every {EVERY_N_STEPS}th recorded"):
        lightning_run.train(weights, images, labels, folder / "torch", every_n_steps=EVERY_N_STEPS)
    with _timed(console, "paddle.Model, the same network as somebody else wrote it"):
        hapi_run.train(
            weights, images, labels, folder / "paddle",
            every_n_steps=EVERY_N_STEPS, reference=folder / "torch", logdir=folder / "tensorboard" / "clean",
        )  # fmt: skip
    console.rule("1. The port is right")
    clean = compare_runs(folder / "torch", folder / "paddle")
    print_report(clean, console, runs=Both(str(folder / "torch"), str(folder / "paddle")))

    console.rule("2. The same port, but `momentum=0.1` was copied as it stands")
    console.print(
        "torch's BatchNorm momentum of 0.1 is 0.9 in paddle. The loss curves look alike: nobody would notice.\n"
    )
    with (
        _timed(console, "paddle.Model with the fault, compared live while it trains"),
        redirect_stderr(StringIO()),  # what it says is printed below, in full
    ):
        hapi_run.train(
            weights, images, labels, folder / "paddle-fault", momentum=0.1,
            every_n_steps=EVERY_N_STEPS, reference=folder / "torch", logdir=folder / "tensorboard" / "fault",
        )  # fmt: skip
    fault = compare_runs(folder / "torch", folder / "paddle-fault")
    print_report(fault, console, runs=Both(str(folder / "torch"), str(folder / "paddle-fault")))
    (folder / REPORT).write_text(page(to_json(fault)), encoding="utf-8")
    return _close(folder, clean, fault, console)


def _close(folder: Path, clean: Report, fault: Report, console: Console) -> int:
    console.rule("Verdicts")
    for name, report, right in (("clean pair:   ", clean, clean.passed), ("planted fault:", fault, not fault.passed)):
        console.print(name, summary_line(diagnostic_of(report)), style="green" if right else "red", markup=False)
    console.print(
        f"\nLook at the fault:        {folder / REPORT}  (open it in a browser)\n"
        f"Look at the live diffs:   tensorboard --logdir {folder / 'tensorboard'}\n"
        f"Compare again yourself:   padiff compare {folder / 'torch'} {folder / 'paddle-fault'}\n"
        f"What a run holds:         padiff show {folder / 'torch'}",
        markup=False,
    )
    first_diff = to_json(fault)["first_diff"]
    as_it_has_to = clean.passed and first_diff is not None and first_diff["reference"] == "net.stem.1"
    if not as_it_has_to:
        console.print("The demo did not come out as it has to: please report it.", style="bold red")
    return 0 if as_it_has_to else 1


def _prepare(folder: Path) -> None:
    """Create the folder; the folder of an earlier demo is replaced.

    Raises:
        UsageError: the folder exists, and no demo wrote it.
    """
    if folder.exists() and not (folder / _MARK).exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is there already and is no demo's folder: give another one")
    for name in ("torch", "paddle", "paddle-fault", "tensorboard"):
        shutil.rmtree(folder / name, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARK).write_text("Made by `padiff demo`; replaced by the next one.\n", encoding="utf-8")


class _timed:  # noqa: N801 - used as a function
    """Context manager that prints a task when the task starts, and its duration when it ends."""

    def __init__(self, console: Console, text: str) -> None:
        self._console, self._text = console, text

    def __enter__(self) -> None:
        self._start = time.perf_counter()
        self._console.print(f"  training: {self._text} ...", markup=False)

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._console.print(f"  done in {time.perf_counter() - self._start:.1f} s", markup=False)
