"""Argument parser that suggests the nearest name for a mistyped one."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from padiff.system.terminal import nearest


class Parser(argparse.ArgumentParser):
    """Argument parser whose errors suggest the nearest command or option for a mistyped one."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.set_defaults(parser=self)  # which command's arguments these are

    def error(self, message: str) -> NoReturn:
        super().error(message + self._hint(message))

    def _hint(self, message: str) -> str:
        choice = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if choice is not None:
            names = re.findall(r"[\w-]+", choice[2])
            return f". {nearest(choice[1], names)}"
        return ""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        values, unknown = self.parse_known_args(args, namespace)
        if unknown:
            command: Parser = values.parser
            wrong = next((text for text in unknown if text.startswith("--")), unknown[0]).partition("=")[0]
            hint = f". {nearest(wrong, command.option_names())}" if wrong.startswith("--") else ""
            command.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return values

    def option_names(self) -> list[str]:
        """Return the long options of this command."""
        return [name for action in self._actions for name in action.option_strings if name.startswith("--")]


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Split the arguments of ``padiff doctor``, ``fix``, ``bisect`` and ``golden`` at ``--``: padiff's, the script's.

    The second part is `None` for other commands and without ``--``. argparse accepts arguments behind ``--`` only if
    no option of padiff stands between the script and ``--``.
    """
    words = list(arguments)
    if words[:1] not in (["doctor"], ["fix"], ["bisect"], ["golden"]) or "--" not in words:
        return words, None
    place = words.index("--")
    return words[:place], words[place + 1 :]
