"""Text for terminals, and switches from environment variables."""

from __future__ import annotations

import contextlib
import difflib
import importlib.metadata
import io
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import IO

from padiff.errors import UsageError

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


def first_few(names: Sequence[object], most: int) -> str:
    """Return the first `most` names and the number of the others: ``a, b and 4 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 layer``, ``2 layers``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a sentence with the three known names that are most similar to a wrong name, or else the first five."""
    known = list(known)
    close = difflib.get_close_matches(name.replace("*", ""), known, n=3, cutoff=0.4) or known[:5]
    return f"Nearest: {', '.join(close)}" if close else "There are none."


_NO = ("", "0", "false", "no", "off")


def coloured(stream: IO[str]) -> bool:
    """Return True if the stream is a terminal that can show colours.

    ``NO_COLOR`` (any value) forces False, and ``FORCE_COLOR`` forces True, except for values such as 0 or ``off``.
    ``NO_COLOR`` has precedence.
    """
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR", "").lower() not in _NO:
        return True
    try:
        return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")
    except (ValueError, AttributeError):  # the stream is closed, or is no real stream
        return False


def show_anything() -> None:
    """Make standard output and error print characters outside of their encoding as codes instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def give_up_output(error: BaseException | None = None) -> None:
    """Redirect standard output to the null device, so that buffered text does not fail again at exit.

    Args:
        error: the error that ended the command. With an error, standard output is redirected only if flushing fails.
    """
    if error is not None:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            return
    with contextlib.suppress(OSError):
        place, nothing = sys.stdout.fileno(), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, place)
        os.close(nothing)


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


def warn(text: str, lines: bool = False) -> None:
    """Print a warning on standard error, behind ``padiff:``.

    Args:
        text: the warning.
        lines: True if the text has several lines.

    Not through `warnings`: the training's filters would hide it, or raise it and end the training.
    """
    say(text, alarming=True, lines=lines)


#: Name of this package's distribution, and of the distribution of an older tool whose package is also ``padiff``.
NAME, OLDER = "padiff-hooks", "padiff"


def warn_of_older() -> None:
    """Warn if the older distribution is installed, because the files of both packages mix in one folder."""
    try:
        version = importlib.metadata.version(OLDER)
    except importlib.metadata.PackageNotFoundError:
        return
    warn(
        f"the distribution {OLDER!r} {version} is installed beside {NAME!r}: both bring a package 'padiff', and "
        f"their files mix. Run: pip uninstall -y {OLDER} && pip install --force-reinstall --no-deps {NAME}"
    )


def _switch(name: str) -> bool:
    value = os.environ.get(name, "").strip().upper()
    if value not in (*_ON, *_OFF):
        raise UsageError(f"{name} is ON or OFF, got {os.environ[name]!r}")
    return value in _ON
