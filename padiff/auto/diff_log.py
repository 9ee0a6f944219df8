"""The ``diff_log`` files of the first generation, which list differing weights and gradients, in the current folder."""

from __future__ import annotations

from pathlib import Path

from padiff.records import Both, Diff, Report, figures_text

FOLDER = "diff_log"
_FILES = {"weight": "weight_diff.log", "grad": "grad_diff.log"}


def write_diff_log(report: Report, names: Both[str]) -> list[Path]:
    """Write one file for the weights that differ and one for the gradients; delete the files of an earlier call.

    Args:
        names: names of the reference and the candidate.

    Returns:
        The written files; empty if no weight or gradient differs.
    """
    folder = Path(FOLDER)
    for name in _FILES.values():
        (folder / name).unlink(missing_ok=True)
    written = []
    for stage, name in _FILES.items():
        failed = [diff for diff in report.failed if diff.pair.stage == stage]
        if failed:
            folder.mkdir(exist_ok=True)
            (folder / name).write_text("\n".join(_entry(diff, names) for diff in failed), encoding="utf-8")
            written.append((folder / name).absolute())
    return written


def _entry(diff: Diff, names: Both[str]) -> str:
    sides = zip(names, (diff.pair.reference, diff.pair.candidate))
    paths = [f"    {name}: {r.layer}.{r.slot} ({r.layer_type})" for name, r in sides if r is not None]
    lines = ["=" * 25, f"Step {diff.pair.step}, {diff.pair.stage}:", *paths, f"    {figures_text(diff)}", ""]
    return "\n".join(lines)
