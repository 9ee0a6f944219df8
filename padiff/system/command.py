"""The command line of a training, as text to show."""

from __future__ import annotations

import re
from collections.abc import Sequence

# A word that a shell takes as it is; largest number of characters; and what a command does not show: absolute paths,
# and options whose value nobody else is to know.
_PLAIN, _LONGEST = re.compile(r"[A-Za-z0-9_.,=:+@%-][A-Za-z0-9_.,=:+@%/-]*"), 300
_PRIVATE = re.compile(r"[=:]/|token|secret|passw|key|credential|auth", re.IGNORECASE)


def command_text(words: Sequence[str]) -> str:
    """Return a script and its arguments as one line; empty if it is no script, or a word is not plain or is private."""
    text = " ".join(words)
    if not words or not words[0].endswith(".py") or len(text) > _LONGEST or _PRIVATE.search(text):
        return ""
    return text if all(map(_PLAIN.fullmatch, words)) else ""
