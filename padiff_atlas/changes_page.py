"""Page of what changed between two atlases, in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from padiff.compare.diagnose.known_differences import Atlas
from padiff_atlas.changes import Change, changed_framework
from padiff_atlas.table import cell, code, difference_text

_CHANGES = (
    "Written by `padiff atlas --changes OLD.json --markdown`: the same calls ran with both sets of versions, torch's "
    "and paddle's called alike. `was` and `is now` say how paddle's result differs from torch's. Rounding is no "
    "change: a difference has to become another kind of difference, or change by more than processors differ."
)


def changes_markdown(before: Atlas, now: Atlas, changed: Sequence[Change]) -> str:
    """Return the probes whose results changed between two atlases as a Markdown page."""
    pairs = [(name, *each) for name, each in zip(("Torch", "Paddle"), zip(before.versions, now.versions))]
    names = {row.name for row in before.rows} & {row.name for row in now.rows}
    framework = changed_framework(before, now)
    title = " and ".join(f"{name} {old} to {new}" if old != new else f"{name} {new}" for name, old, new in pairs)
    whose = (
        f"Only {framework} is of another version, so each change is {framework}'s."
        if framework
        else "Both frameworks are of another version, or none is: a row does not say whose change it is."
    )
    lines = [
        f"# What changed: {cell(title)}",
        "",
        f"{_CHANGES} {whose}",
        "",
        f"{len(changed)} of {len(names)} probes changed.",
    ]
    for group in dict.fromkeys(each.new.group for each in changed):
        lines += ["", f"## {cell(group.capitalize())}", "", "| what | torch | paddle | was | is now |"]
        lines.append("| --- | --- | --- | --- | --- |")
        for old, new, what in changed:
            if new.group != group:
                continue
            was, now_text = (cell(difference_text(row)).replace("[", "\\[") for row in (old, new))
            if was == now_text:
                now_text = cell(what)
            lines.append(f"| {cell(new.name)} | {code(new.torch)} | {code(new.paddle)} | {was} | {now_text} |")
    only = [row.name for row in now.rows if row.name not in names]
    if only:
        lines += ["", f"Not in the older table: {'; '.join(map(cell, only))}."]
    return "\n".join(lines) + "\n"
