"""Log folders of comparisons: which there are, and what is new in one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LINES, REPORT = "diffs.jsonl", "report.json"
#: Bytes of lines that are given at a time: a page shows what it has while it asks for more.
PART = 4 << 20
# Folders that are looked into: a log folder that is a whole disk by mistake must not stop TensorBoard.
_FOLDERS = 20_000


def pairs(roots: Mapping[str, Path]) -> dict[str, Path]:
    """The log folders below some roots, by name."""
    found: dict[str, Path] = {}
    for prefix, root in roots.items():
        for number, (folder, below, names) in enumerate(os.walk(root)):
            if number >= _FOLDERS:
                break
            below[:] = sorted(name for name in below if not name.startswith("."))
            if LINES in names:
                inner = Path(folder).relative_to(root).as_posix()
                name = "/".join(part for part in (prefix, inner) if part not in ("", ".")) or root.name or "/"
                found[name] = Path(folder)
    return found


def outcome(folder: Path) -> str:
    """What a comparison came to so far; empty where that is not known."""
    return str((report(folder) or {}).get("outcome", ""))


def report(folder: Path) -> dict[str, Any] | None:
    """The report so far without its steps; `None` where there is none, or it can't be read."""
    try:
        found = json.loads((folder / REPORT).read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def version(folder: Path) -> str:
    """What changes when the report does."""
    try:
        return str((folder / REPORT).stat().st_mtime_ns)
    except OSError:
        return ""


def part(folder: Path, start: int, end: int | None = None) -> dict[str, Any]:
    """Whole lines from a place on.

    Returns:
        ``lines``: each with the places where it begins and ends; ``next``: where the next one will begin; ``size`` of
        the file; ``log``: what tells it from another file under its name, as a comparison that begins anew makes one.
    """
    path = folder / LINES
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        first = file.readline(1 << 16)
        log = hashlib.sha256(first + str(os.fstat(file.fileno()).st_ino).encode()).hexdigest()[:16]
        start = min(max(start, 0), size)
        file.seek(start)
        content = file.read(PART if end is None else max(min(end, size) - start, 0))
        whole = content.rfind(b"\n") + 1
        if not whole and len(content) == PART:  # one line that is longer than a part
            content += file.readline()
            whole = len(content) if content.endswith(b"\n") else 0
    lines, place = [], start
    for text in content[:whole].split(b"\n")[:-1]:
        lines.append([place, place + len(text) + 1, text.decode("utf-8", "replace")])
        place += len(text) + 1
    return {"lines": lines, "next": place, "size": size, "log": log}
