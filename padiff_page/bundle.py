"""The page's own files, and its modules as one script.

The modules are plain JavaScript that a browser loads as they are. A page in one file has no addresses that modules
could be loaded from: there each becomes a function that is called once, in the order of the imports.
"""

from __future__ import annotations

import re
from importlib.resources import files

_STATIC = files("padiff_page") / "static"
_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([\w-]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?:async )?(?:function|class|const) (\w+)", re.MULTILINE)


def static_files() -> dict[str, bytes]:
    """All files that a browser may ask for, by name."""
    names = sorted(file.name for file in _STATIC.iterdir() if file.name.endswith((".js", ".css")))
    return {name: (_STATIC / name).read_bytes() for name in names}


def style() -> str:
    """The page's style."""
    return (_STATIC / "page.css").read_text(encoding="utf-8")


def script(entry: str) -> str:
    """A module with all that it imports, as one script; what the module exports is in ``page``."""
    done: dict[str, str] = {}
    _add(entry, done)
    return '"use strict";\n' + "".join(done.values()) + f"const page = {_variable(entry)};\n"


def _add(name: str, done: dict[str, str]) -> None:
    if name in done:
        return
    text = (_STATIC / name).read_text(encoding="utf-8")
    for _, other in _IMPORT.findall(text):
        _add(other, done)
    exported = ", ".join(_EXPORT.findall(text))
    body = _IMPORT.sub(lambda found: f"const {{{found[1]}}} = {_variable(found[2])};\n", text)
    body = re.sub(r"^export ", "", body, flags=re.MULTILINE)
    done[name] = f"const {_variable(name)} = (() => {{\n{body}return {{ {exported} }};\n}})();\n"


def _variable(name: str) -> str:
    return f"module_{name.removesuffix('.js').replace('-', '_')}"
