"""``padiff atlas``: compare calls that look alike in the installed torch and paddle."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from padiff.compare.diagnose.known_differences import shipped_atlas
from padiff_atlas.atlas import chosen, survey
from padiff_atlas.changes import changes
from padiff_atlas.probes import GROUPS
from padiff_atlas.table import markdown, print_atlas
from padiff_hooks.outputs import write_out

AGREES, DISAGREES = 0, 1


def run(console: Console, only: Sequence[str] = (), json: str | None = None, page: str | None = None) -> int:
    """Run all probes, print the differences, and write the requested files.

    Args:
        only: names of groups; empty for all groups.
        json, page: files for the table, as JSON and as Markdown; ``-`` is standard output.

    Returns:
        0, or 1 if a call that should agree differs.

    Raises:
        UsageError: there is no such group, a framework is not installed, or a file can't be written.
    """
    groups = chosen(GROUPS, only)
    with console.status("asking torch and paddle"):
        atlas = survey(groups)
    print_atlas(atlas, console)
    shipped = shipped_atlas()
    for line in changes(shipped, atlas):
        console.print(f"Unlike torch {shipped.versions.reference} and paddle {shipped.versions.candidate}: {line}")
    if json:
        write_out(json, atlas.to_json())
    if page:
        write_out(page, markdown(atlas))
    return DISAGREES if any(row.wrong for row in atlas.rows) else AGREES
