"""How arguments are read: what is mistyped gets its nearest name."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from padiff.system.spelling import nearest


class Parser(argparse.ArgumentParser):
    """Names the nearest command or option where one is mistyped."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.set_defaults(parser=self)  # which command's arguments these are

    def error(self, message: str) -> NoReturn:
        super().error(message + self._hint(message))

    def _hint(self, message: str) -> str:
        choice = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if choice is not None:
            known = re.findall(r"[\w-]+", choice[2])
            return f". {nearest(choice[1], known)}"
        return ""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            command: Parser = found.parser
            wrong = next((text for text in unknown if text.startswith("--")), unknown[0]).partition("=")[0]
            hint = f". {nearest(wrong, command.option_names())}" if wrong.startswith("--") else ""
            command.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found

    def option_names(self) -> list[str]:
        """The long options of this command."""
        return [name for action in self._actions for name in action.option_strings if name.startswith("--")]


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Our own arguments, and those of the script behind ``--``; `None` where there are none.

    By hand: argparse takes what is behind ``--`` only if no option of ours stands between it and the script.
    """
    own = list(arguments)
    if own[:1] != ["doctor"] or "--" not in own:
        return own, None
    place = own.index("--")
    return own[:place], own[place + 1 :]
