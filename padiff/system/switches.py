"""Switches from environment variables, read when a recording or an ``auto_diff`` begins and never on import."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from padiff.errors import UsageError
from padiff.system.colours import coloured
from padiff.system.printable import printable

_ON, _OFF = ("ON", "TRUE", "1", "YES"), ("OFF", "FALSE", "0", "NO", "")


@dataclass(frozen=True)
class Switches:
    """Values of the switches.

    Attributes:
        api_check: ``PADIFF_API_CHECK``: also record functional calls below the layers. Default off.
        third_party: ``PADDLE_THIRDPARTY_API``: dotted names of custom paddle operators (functions, or modules of
            them), separated by commas, that count as functional calls. Default none.
        path_log: ``PADIFF_PATH_LOG``: print the path of each layer as it is called. Default off.
        skip_wrappers: ``PADIFF_SKIP_WRAP_LAYER``: skip layers without parameters that only wrap one layer. Default off.
    """

    api_check: bool = False
    third_party: tuple[str, ...] = ()
    path_log: bool = False
    skip_wrappers: bool = False

    @classmethod
    def from_environment(cls) -> Switches:
        """Return the switches with the present values of the environment variables.

        Raises:
            UsageError: a switch is neither on nor off.
        """
        names = os.environ.get("PADDLE_THIRDPARTY_API", "")
        return cls(
            api_check=_switch("PADIFF_API_CHECK"),
            third_party=tuple(name.strip() for name in names.replace(";", ",").split(",") if name.strip()),
            path_log=_switch("PADIFF_PATH_LOG"),
            # The misspelled name is in older scripts.
            skip_wrappers=_switch("PADIFF_SKIP_WRAP_LAYER") or _switch("PADIFF_SIKP_WRAP_LAYER"),
        )


def say(text: str, alarming: bool = False, lines: bool = False) -> None:
    """Print a line on standard error, unless ``PADIFF_QUIET`` is on.

    Args:
        text: the line.
        lines: True if the text has several lines.
        alarming: True for a warning, which ``PADIFF_QUIET`` does not switch off: in red if colours are possible.
    """
    if alarming or os.environ.get("PADIFF_QUIET", "").strip().upper() not in _ON:
        line = f"padiff: {printable(text, lines)}"
        print(f"\x1b[31m{line}\x1b[0m" if alarming and coloured(sys.stderr) else line, file=sys.stderr, flush=True)


def _switch(name: str) -> bool:
    value = os.environ.get(name, "").strip().upper()
    if value not in (*_ON, *_OFF):
        raise UsageError(f"{name} is ON or OFF, got {os.environ[name]!r}")
    return value in _ON
