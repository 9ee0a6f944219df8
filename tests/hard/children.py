"""Child processes of tests: none outlives its test, and Ctrl-C reaches each, also where the tests ignore it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Child = subprocess.Popen[str]
Ended = subprocess.CompletedProcess[str]

#: Seconds after which a child ends by itself, at the latest.
LONGEST = 300
#: The name of the thread that ends a child.
WATCHES = "end-with-parent"


@contextlib.contextmanager
def started(command: Sequence[str | Path], **options: Any) -> Iterator[Child]:
    """A process as a terminal would start it. It and all that it started end with the block.

    Args:
        command: the program and its arguments.
        options: those of `subprocess.Popen`; default: text through pipes, standard input empty, and modules are found
            where this process finds them.
    """
    defaults = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    defaults["env"] = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    # A signal that is ignored stays so in the programs that one starts: `make test &` would have children that Ctrl-C
    # does not end. A handler does not outlive the start of another program.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(command, start_new_session=True, **{**defaults, **options})
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # a session of its own: its children too
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        process.wait()


def run_child(command: Sequence[str | Path], timeout: float = 120, **options: Any) -> Ended:
    """`subprocess.run` with `started`: what the process printed, once it has ended.

    Raises:
        subprocess.TimeoutExpired: it had not ended after so many seconds.
    """
    with started(command, **options) as process:
        out, err = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def run_script(folder: Path, *words: str | Path, **options: Any) -> Ended:
    """``python WORDS`` in a folder; it, and what it starts as `sys.executable`, has the frameworks already."""
    from kit.forking import python_with_frameworks  # not above: children import this module from elsewhere

    return run_child([*python_with_frameworks(children=True), *map(str, words)], cwd=folder, **options)


def run_padiff(folder: Path, *words: str | Path, **options: Any) -> Ended:
    """``padiff WORDS`` in a folder."""
    return run_script(folder, "-m", "padiff", *words, **options)


def end_with_parent(seconds: float = LONGEST) -> None:
    """In a child that could go on for ever: end when the process that started it is gone, or after so many seconds.

    Tests that are killed end no children.
    """
    parent, end = os.getppid(), time.monotonic() + seconds

    def watch() -> None:
        while os.getppid() == parent and time.monotonic() < end:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, name=WATCHES, daemon=True).start()
