"""Log folders of comparisons: search, and reading of new lines."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LINES, REPORT = "diffs.jsonl", "report.json"
#: Largest number of bytes per response; a page shows the lines it has while it requests more.
PART = 4 << 20
# Largest number of folders to search, so that a whole disk as log folder does not stop TensorBoard.
_FOLDERS = 20_000


def pairs(roots: Mapping[str, Path]) -> dict[str, Path]:
    """Return the log folders below the roots, by name."""
    folders: dict[str, Path] = {}
    for prefix, root in roots.items():
        for number, (folder, below, names) in enumerate(os.walk(root)):
            if number >= _FOLDERS:
                break
            below[:] = sorted(name for name in below if not name.startswith("."))
            if LINES in names:
                inner = Path(folder).relative_to(root).as_posix()
                name = "/".join(part for part in (prefix, inner) if part not in ("", ".")) or root.name or "/"
                folders[name] = Path(folder)
    return folders


def outcome(folder: Path) -> str:
    """Return the outcome of a comparison so far; empty if unknown."""
    return str((report(folder) or {}).get("outcome", ""))


def report(folder: Path) -> dict[str, Any] | None:
    """Return the report so far without its steps; `None` if it does not exist or can't be read."""
    try:
        content = json.loads((folder / REPORT).read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def version(folder: Path) -> str:
    """Return a text that changes when the report does."""
    try:
        return str((folder / REPORT).stat().st_mtime_ns)
    except OSError:
        return ""


def part(folder: Path, start: int, end: int | None = None) -> dict[str, Any]:
    """Return whole lines from a byte position on.

    Returns:
        ``lines``: the lines, each with the positions of its begin and end; ``next``: position of the next line;
            ``size``: size of the file; ``log``: an identity of the file, which changes when a comparison starts anew
            under the same name.
    """
    path = folder / LINES
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        first = file.readline(1 << 16)
        log = hashlib.sha256(first + str(os.fstat(file.fileno()).st_ino).encode()).hexdigest()[:16]
        start = min(max(start, 0), size)
        file.seek(start)
        content = file.read(PART if end is None else max(min(end, size) - start, 0))
        complete = content.rfind(b"\n") + 1
        if not complete and len(content) == PART:  # a single line is longer than a part
            content += file.readline()
            complete = len(content) if content.endswith(b"\n") else 0
    lines, place = [], start
    for text in content[:complete].split(b"\n")[:-1]:
        lines.append([place, place + len(text) + 1, text.decode("utf-8", "replace")])
        place += len(text) + 1
    return {"lines": lines, "next": place, "size": size, "log": log}
