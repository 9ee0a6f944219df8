"""Runs a script as ``python SCRIPT ARGS`` does, in this process."""

from __future__ import annotations

import io
import os
import runpy
import sys
import types
from collections.abc import Sequence

# Modules whose lines of code stand above the script's in a trace.
_RUNNING = (__name__, "padiff_cli.commands.run", "runpy")


def run_script(path: str, args: Sequence[str]) -> None:
    """Run a file as the main module, which it stays: what it left running may ask for it."""
    sys.argv = [path, *args]
    _first_on_path(os.path.dirname(os.path.realpath(path)))
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=os.path.abspath(path), __builtins__=__builtins__, __cached__=None)
    with io.open_code(os.path.abspath(path)) as file:
        text = file.read()
    code = compile(text, main.__dict__["__file__"], "exec", dont_inherit=True)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def run_module(name: str, args: Sequence[str]) -> None:
    """Run a module as ``python -m NAME ARGS`` does."""
    sys.argv = [name, *args]
    _first_on_path(os.getcwd())
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def show_as_python_does(error: BaseException) -> None:
    """Print an exception that left the script, without the lines of code that ran it."""
    trace = _without_launcher(error.__traceback__)
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def hide_launcher() -> None:
    """Have Ctrl-C, which goes on to Python itself, printed without the lines of code that ran the script."""
    show = sys.excepthook

    def show_script(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        trace = _without_launcher(trace)
        show(kind, error.with_traceback(trace), trace)

    sys.excepthook = show_script


def _without_launcher(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Return a trace from the first line of the script's own on; the whole of it where there is none."""
    inner, running = trace, None
    while inner is not None:
        if inner.tb_frame.f_globals.get("__name__", "") in _RUNNING:
            running = inner
        elif running is not None:
            break
        inner = inner.tb_next
    return inner if running is not None else trace


def _first_on_path(folder: str) -> None:
    """Where Python looks first, in the place of where it found padiff's own command."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder
