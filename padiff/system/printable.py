"""The one way of a run's text to a terminal: names of layers and files come from others."""

from __future__ import annotations

import re
from collections.abc import Iterable

# Control characters (colours, titles and the cursor of a terminal are set with them), line separators, marks that turn
# the direction of what is read, and halves of characters, which no encoding has.
_HARMFUL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str, lines: bool = False) -> str:
    """The text with what would steer a terminal, or break a line, as codes (``\\x1b``).

    Args:
        lines: the text has lines of its own: ends of lines stay.
    """
    return _HARMFUL.sub(lambda found: found[0] if lines and found[0] == "\n" else _code(found[0]), text)


def printable_lines(lines: Iterable[str]) -> list[str]:
    """Each of some lines, `printable`."""
    return [printable(line) for line in lines]


def _code(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
