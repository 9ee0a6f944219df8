"""Escaping of text for terminals, as names of layers and files in a run are not trusted."""

from __future__ import annotations

import re
from collections.abc import Iterable

# Control characters (which set colours, the title and the cursor of a terminal), line separators, marks that change the
# direction of text, and surrogates, which no encoding can write.
_HARMFUL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str, lines: bool = False) -> str:
    """Return the text with codes (``\\x1b``) for characters that would control a terminal or break a line.

    Args:
        text: the text.
        lines: True to keep line ends in a text of several lines.
    """
    return _HARMFUL.sub(lambda match: match[0] if lines and match[0] == "\n" else _code(match[0]), text)


def printable_lines(lines: Iterable[str]) -> list[str]:
    """Return the lines, each passed through `printable`."""
    return [printable(line) for line in lines]


def _code(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
