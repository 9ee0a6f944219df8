"""Put code into the strings of a recorded run, consistently over all of its files."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

#: What a stranger writes: whatever of it becomes code shows in a syntax tree.
EVIL = "relu(*[__import__('os').system('touch PWNED')])#"
#: The same behind what ends a string, a comment or a line.
ESCAPES = ('"""\n' + EVIL, "x'\"\r\x0c\u2028" + EVIL, "x)\n__import__('os').system('touch PWNED')\n(")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


def replaced(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with all of its strings, keys too, changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): replaced(inner, change) for key, inner in value.items()}
    return [replaced(inner, change) for inner in value] if isinstance(value, list) else value


def _header(data: bytes) -> tuple[Any, bytes]:
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def _texts(run: Path) -> Iterator[tuple[Path, Any, bytes]]:
    """All JSON of a run: of files, and of what the heads of files of tensors say."""
    for path in sorted(run.rglob("*")):
        if path.suffix == ".json":
            yield path, json.loads(path.read_bytes()), b""
        elif path.suffix == ".safetensors":
            yield path, *_header(path.read_bytes())


def strings_of(run: Path) -> list[str]:
    """Return each string of a run once: keys, values, and the words of settings' names."""
    found: dict[str, None] = {}
    for _, content, _ in _texts(run):
        found.update(dict.fromkeys(_strings(content)))
    words = [word for text in found if "." in text or "/" in text for word in text.replace("/", ".").split(".")]
    found.update(dict.fromkeys(word for word in words if len(word) > 1 and not word.isdigit()))
    return [text for text in found if text]


def inject(source: Path, run: Path, changes: dict[str, str]) -> None:
    """Write a copy of a run in which strings are replaced, whole ones and the words of dotted ones.

    Files that are named after their content are renamed, files of tensors are linked.
    """

    def change(text: str) -> str:
        for old, new in changes.items():
            if text == old:
                return new
            if old in text and len(old) > 1:
                marks = {"", ".", "/", "(", "#"}
                before, _, after = text.partition(old)
                if before[-1:] in marks and after[:1] in marks:
                    text = before + new + after
        return text

    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(source, run, copy_function=lambda a, b: Path(b).hardlink_to(a))
    renamed: dict[str, str] = {}
    # Structures first: steps refer to them by the digests of their content.
    for path, content, rest in sorted(_texts(run), key=lambda one: one[0].parent.name != "structures"):
        other = replaced(content, lambda text: renamed.get(text, change(text)))
        if other == content:
            continue
        text = json.dumps(other).encode("utf-8", "surrogatepass")
        path.unlink()
        if path.parent.name == "structures":
            name = hashlib.sha256(text).hexdigest()[: len(path.stem)]
            renamed[path.stem] = name
            path = path.with_name(f"{name}.json")
        path.write_bytes(text if path.suffix == ".json" else len(text).to_bytes(8, "little") + text + rest)
