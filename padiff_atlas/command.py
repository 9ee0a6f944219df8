"""``padiff atlas``: compare calls that look alike in the installed torch and paddle."""

from __future__ import annotations

import json as parsing
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from padiff.compare.diagnose.known_differences import Atlas, shipped_atlas
from padiff.errors import UsageError
from padiff_atlas.atlas import chosen, survey
from padiff_atlas.changes import changes
from padiff_atlas.changes_page import changes_markdown
from padiff_atlas.probes import GROUPS
from padiff_atlas.table import markdown, print_atlas
from padiff_hooks.outputs import write_out

AGREES, DISAGREES = 0, 1


def run(
    console: Console,
    only: Sequence[str] = (),
    json: str | None = None,
    page: str | None = None,
    old: str | None = None,
) -> int:
    """Run all probes, print the differences, and write the requested files.

    Args:
        only: names of groups; empty for all groups.
        json, page: files for the table, as JSON and as Markdown; ``-`` is standard output. With ``old`` the page is
            that of the changes.
        old: table of other versions, as JSON, to compare with; default: of the versions that padiff is tested with.

    Returns:
        0, or 1 if a call that should agree differs.

    Raises:
        UsageError: there is no such group, a framework is not installed, or a file can't be read or written.
    """
    groups = chosen(GROUPS, only)
    before = shipped_atlas() if old is None else _read(old)
    with console.status("asking torch and paddle"):
        atlas = survey(groups)
    print_atlas(atlas, console)
    changed = list(changes(before, atlas))
    for change in changed:
        console.print(
            f"Unlike torch {before.versions.reference} and paddle {before.versions.candidate}: "
            f"{change.new.name}: {change.what}"
        )
    if json:
        write_out(json, atlas.to_json())
    if page:
        write_out(page, markdown(atlas) if old is None else changes_markdown(before, atlas, changed))
    return DISAGREES if any(row.wrong for row in atlas.rows) else AGREES


def _read(path: str) -> Atlas:
    """Read a table that ``--json`` wrote.

    Raises:
        UsageError: it can't be read, or is no table.
    """
    try:
        return Atlas.from_json(parsing.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"--changes: {path} is no table that padiff atlas --json wrote: {error}") from error
