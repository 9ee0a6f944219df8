"""Messages in the user's language: English, or Chinese by the table ``zh.po``.

Code writes messages in English, with their values filled in. `translated` finds the message of the table that a text
was made from, and fills the values into its translation. So code stays readable, and a message that the table does not
have stays English.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

_TABLE = Path(__file__).with_name("zh.po")
# Variables that name the language, the first one that is set decides: padiff's own, then gettext's.
_VARIABLES = ("PADIFF_LANG", "LANGUAGE", "LC_ALL", "LC_MESSAGES", "LANG")
# Separators of clauses, and those in their place. A text may be a list of messages and values.
_BRACKET = " ("
_SEPARATORS = ((". ", "。"), ("; ", "；"), (": ", "："), (_BRACKET, "（"), (", ", "，"), (" and ", "和"))
# Largest text that is translated, in characters, number of its parts, and of the places where a list is divided: names
# come from untrusted runs. The longest text of the golden pairs has 976 characters and 1,007 parts.
_LONGEST, _PARTS, _PLACES = 1500, 2000, 12
_VALUE = re.compile(r"\{(\w+)\}")
# Values that are numbers, by their names in the table. The table's other values are names, code, or messages.
_NUMBERS = ("count", "number", "step", "limit", "factor", "ratio", "scale", "share", "norm")
_NUMBER = re.compile(r"[-+]?\d[\d.,]*(e[-+]?\d+)?%?|inf|nan")
# What no name and no code has: two words in a row, or a word of grammar. Such a text has to be in the table.
_GRAMMAR = "the|of|is|are|in|on|to|not|times|'s"
_SENTENCE = re.compile(
    rf"(?<![\w.`])([a-z]{{2,}}('s)? [a-z]{{2,}}('s)?|{_GRAMMAR})(?![\w.`/=(])|; ",
)
_IDEOGRAPH = re.compile("[\u3400-\u9fff]")


class _Message(NamedTuple):
    """A message with values: the texts around these, their names, and the translation."""

    texts: tuple[str, ...]
    names: tuple[str, ...]
    translation: str


def language(environment: Mapping[str, str] = os.environ) -> str:
    """Return ``zh`` if the user reads Chinese, else ``en``.

    Args:
        environment: environment variables: ``PADIFF_LANG``, else those of the locale.
    """
    chosen = next((environment[name] for name in _VARIABLES if environment.get(name)), "")
    return "zh" if chosen.lower().startswith("zh") else "en"


def writes_chinese(encoding: str) -> bool:
    """Return True if an encoding has Chinese characters."""
    try:
        return bool("中".encode(encoding))
    except (UnicodeError, LookupError):
        return False


def translated(text: str, context: str = "", to: str | None = None) -> str:
    """Return a message in the user's language; in English if the table has no such message.

    Args:
        text: the message in English, with its values.
        context: context of a word that has several meanings, as of gettext (``msgctxt``).
        to: language; `None` for the user's.
    """
    if (language() if to is None else to) != "zh":
        return text
    return (_table()[0].get(f"{context}\x04{text}", "") if context else _chinese(text)) or text


def messages(table: Path = _TABLE) -> Iterator[tuple[str, str, str]]:
    """Yield the context, the message and the translation of each entry of a table in gettext's ``.po`` format."""
    entry: dict[str, str] = {}
    keyword = ""
    for line in [*table.read_text("utf-8").splitlines(), ""]:
        head, _, quoted = line.partition(" ")
        if line.startswith('"'):
            entry[keyword] += ast.literal_eval(line)
        elif head in ("msgctxt", "msgid", "msgstr"):
            keyword = head
            entry[keyword] = ast.literal_eval(quoted)
        elif not line and entry:
            if entry["msgid"]:
                yield entry.get("msgctxt", ""), entry["msgid"], entry["msgstr"]
            entry = {}


@lru_cache(maxsize=1)
def _table() -> tuple[dict[str, str], list[_Message]]:
    """Return the translations of messages without values, and the messages with values, the longest first."""
    plain, filled = {}, []
    for context, message, translation in messages():
        names = _VALUE.findall(message)
        if names and not context:
            filled.append(_Message(tuple(_VALUE.split(message)[::2]), tuple(names), translation))
        else:
            plain[f"{context}\x04{message}" if context else message] = translation
    return plain, sorted(filled, key=lambda each: -sum(map(len, each.texts)))


@lru_cache(maxsize=4096)
def _chinese(text: str) -> str:
    """Return a text in Chinese; empty if the table does not have it."""
    return _Reading().read(text)[1] if len(text) <= _LONGEST else ""


class _Reading:
    """The reading of a text as messages of the table, of which the one that has most of its letters is chosen."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, str]] = {}

    def read(self, text: str) -> tuple[int, str]:
        """Return the number of characters that the table has, and the text in Chinese; 0 if it has none."""
        if text not in self._known:
            self._known[text] = 0, ""
            if len(self._known) < _PARTS:
                best = max([*self._lists(text), *self._messages(text)], key=lambda each: each[0])
                self._known[text] = best if best[0] else (0, "")
        return self._known[text]

    def _value(self, text: str) -> tuple[int, str] | None:
        """Return a value in Chinese, or as it is if it is a name, code or a number; `None` if it is neither."""
        size, shown = self.read(text)
        return (size, shown) if size else None if _SENTENCE.search(text) else (0, text)

    def _messages(self, text: str) -> Iterator[tuple[int, str]]:
        """Yield the readings of a text as one message."""
        plain, filled = _table()
        yield len(text) if text in plain else 0, plain.get(text, "")
        for message in filled:
            if not text.startswith(message.texts[0]) or not text.endswith(message.texts[-1]):
                continue
            values = _values(text, message.texts)
            if values is None or any(
                name in _NUMBERS and not _NUMBER.fullmatch(value) for name, value in zip(message.names, values)
            ):
                continue
            stages = [_stages(value) if name == "stage" else "" for name, value in zip(message.names, values)]
            shown = [(0, stage) if stage else self._value(value) for stage, value in zip(stages, values)]
            if None not in shown:
                by_name = dict(zip(message.names, (each[1] for each in shown if each is not None)))
                size = sum(map(len, message.texts)) + sum(each[0] for each in shown if each is not None)
                yield size, _filled(message.translation, by_name)

    def _lists(self, text: str) -> Iterator[tuple[int, str]]:
        """Yield the readings of a text as a list of messages and values."""
        if text.endswith(".") and not text.endswith(".."):
            size, shown = self.read(text[:-1])
            yield size, f"{shown}。"
            return
        for separator, chinese in _SEPARATORS:
            for place in islice(_places(text, separator), _PLACES):
                # A message may begin with its separator.
                more = self.read(text[place:])
                end = ")" if separator == _BRACKET else ""
                if text.count("(", 0, place) != text.count(")", 0, place):
                    continue
                after = text[place + len(separator) : -len(end) or None] if text.endswith(end) else ""
                before, follows = self._value(text[:place]), self._value(after) if after else None
                if before is not None and more[0]:
                    yield before[0] + more[0], before[1] + more[1]
                if before is not None and follows is not None and before[0] + follows[0]:
                    close = "）" if end else ""
                    yield before[0] + follows[0] + 1, f"{before[1]}{chinese}{follows[1]}{close}"


def _stages(names: str) -> str:
    """Return names of stages in Chinese, as such a name may be another word elsewhere; empty if one is unknown."""
    known = [_table()[0].get(f"stage\x04{name}", "") for name in names.split(", ")]
    return "、".join(known) if all(known) else ""


def _places(text: str, separator: str) -> Iterator[int]:
    place = text.find(separator, 1)
    while place > 0:
        yield place
        place = text.find(separator, place + 1)


def _filled(translation: str, values: Mapping[str, str]) -> str:
    """Return a translation with its values, with a space between Chinese and other words."""
    text = ""
    for k, part in enumerate(_VALUE.split(translation)):
        each = values[part] if k % 2 else part
        if text and each:
            ends = [bool(_IDEOGRAPH.match(side)) for side in (text.rstrip()[-1:], each.lstrip()[:1])]
            if all(ends):
                text, each = text.rstrip(), each.lstrip()
            elif any(ends) and f"{text[-1]}{each[0]}".replace("_", "a").isalnum():
                text += " "
        text += each
    return text


def _values(text: str, texts: tuple[str, ...]) -> list[str] | None:
    """Return the values of a message in a text; `None` if the text is another message.

    Each text between values is looked for from the left on, so that no text takes more than a pass over it.
    """
    first, *middle, last = texts
    if not text.startswith(first) or not text.endswith(last) or len(text) < len(first) + len(last):
        return None
    start, end, values = len(first), len(text) - len(last), []
    for each in middle:
        place = text.find(each, start, end)
        if place < 0:
            return None
        values.append(text[start:place])
        start = place + len(each)
    return [*values, text[start:end]]
