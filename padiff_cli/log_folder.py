"""Log folder of `padiff compare` and `padiff watch`, with error messages for a folder that can't be written."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from padiff.dump import open_run
from padiff.dump.format import RUN_FILE
from padiff.dump.write import explain_os_error
from padiff.errors import PadiffError, UsageError, WriterError
from padiff.records import Both, Report
from padiff_cli.arguments import names_of
from padiff_hooks.stream import DiffStream
from padiff_hooks.tags import LAYERS


def check_logdir(logdir: str | Path | None) -> None:
    """Raise an error for a log folder inside of a run folder, which may hold only recorded data.

    Raises:
        UsageError: the log folder lies in a run folder.
    """
    if logdir is None:
        return
    place = Path(logdir).resolve()
    for folder in (place, *place.parents):
        if (folder / RUN_FILE).is_file():
            raise UsageError(
                f"cannot make the log folder {logdir}: it lies in the run folder {folder}. Give one outside of it"
            )


@contextlib.contextmanager
def explained(logdir: str) -> Iterator[None]:
    """Turn an error of the operating system into one that names the log folder and explains the error.

    Raises:
        WriterError: in place of an `OSError` within the context.
    """
    try:
        yield
    except PadiffError:
        raise
    except OSError as error:
        what = explain_os_error(error, Path(logdir))[0].replace("run folder", "folder")
        raise WriterError(f"cannot write to the log folder {logdir}: {what}. Mend that, or give another one") from error


@contextlib.contextmanager
def quiet_threads() -> Iterator[None]:
    """Suppress the tracebacks that threads print for an `OSError`, within the context.

    TensorBoard's writer threads pass such errors on to the main thread, which reports them.
    """
    before = threading.excepthook

    def printed(failed: threading.ExceptHookArgs) -> None:
        if not issubclass(failed.exc_type, OSError):
            before(failed)

    threading.excepthook = printed
    try:
        yield
    finally:
        threading.excepthook = before


class Streaming:
    """Writer of the reports of steps for TensorBoard; the first report creates the log folder.

    Args:
        logdir: the log folder.
        runs: paths of the two runs.
        console: prints a message if the log folder's content is replaced.
        tags: the curves to write, as for `DiffStream`.

    Attributes:
        trouble: the error after which nothing more is written, or `None`; the comparison goes on.
    """

    def __init__(self, logdir: str, runs: Both[str], console: Console, tags: str = LAYERS) -> None:
        self._logdir, self._runs, self._console, self._tags = logdir, runs, console, tags
        self._stream: DiffStream | None = None
        self.trouble: WriterError | None = None

    def write(self, report: Report) -> None:
        if self.trouble is not None:
            return
        try:
            with explained(self._logdir):
                if self._stream is None:
                    self._stream = self._begun()
                self._stream.write(report)  # skips steps that the log folder already has
        except WriterError as error:
            self.trouble = error

    def _begun(self) -> DiffStream:
        stream = DiffStream(self._logdir, names_of(self._runs), tags=self._tags)
        stream.begin(self._runs.map(lambda path: open_run(path).info.identity))
        if stream.replaced:
            self._console.print(stream.replaced)
        return stream

    def close(self) -> None:
        if self._stream is None:
            return
        try:
            with explained(self._logdir):
                self._stream.close()
        except WriterError as error:
            self.trouble = self.trouble or error
