"""The page's static files, and its JavaScript modules as a single script.

The modules are plain JavaScript that a browser loads directly. A page in one file has no addresses to load modules
from, so each module becomes a function that is called once, in the order of the imports.
"""

from __future__ import annotations

import re
from importlib.resources import files

_STATIC = files("padiff_page") / "static"
_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([\w-]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?:async )?(?:function|class|const) (\w+)", re.MULTILINE)


def static_files() -> dict[str, bytes]:
    """Return the contents of all files that a browser can request, by name."""
    names = sorted(file.name for file in _STATIC.iterdir() if file.name.endswith((".js", ".css")))
    return {name: (_STATIC / name).read_bytes() for name in names}


def style() -> str:
    """Return the page's style sheet."""
    return (_STATIC / "page.css").read_text(encoding="utf-8")


def script(entry: str) -> str:
    """Return a module with all its imports as one script; the variable ``page`` holds the module's exports."""
    done: dict[str, str] = {}
    _add(entry, done)
    return '"use strict";\n' + "".join(done.values()) + f"const page = {_variable(entry)};\n"


def _add(name: str, done: dict[str, str]) -> None:
    if name in done:
        return
    text = (_STATIC / name).read_text(encoding="utf-8")
    for _, imported in _IMPORT.findall(text):
        _add(imported, done)
    exported = ", ".join(_EXPORT.findall(text))
    body = _IMPORT.sub(lambda found: f"const {{{found[1]}}} = {_variable(found[2])};\n", text)
    body = re.sub(r"^export ", "", body, flags=re.MULTILINE)
    done[name] = f"const {_variable(name)} = (() => {{\n{body}return {{ {exported} }};\n}})();\n"


def _variable(name: str) -> str:
    return f"module_{name.removesuffix('.js').replace('-', '_')}"
