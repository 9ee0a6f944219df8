"""Every error that padiff raises on purpose.

PadiffError
├── UsageError          a call that cannot be meant (also a ValueError)
│   ├── SelectionError  a list's item that matches no layer
│   └── OptionError     an option that a call does not have (also a TypeError)
├── RunFolderError      a run folder that cannot be read or must not be written (also an OSError)
│   └── TensorFileError one tensor of it: missing, truncated, pickled, outside of the folder
├── WriterError         the background writer could not write (disk full, say)
├── NothingToCompareError  two runs without a common step, or steps without a common quantity
└── RunsDifferError     a live comparison found a diff and was asked to raise
"""

from __future__ import annotations


class PadiffError(Exception):
    """Base of every error that padiff raises on purpose."""


class UsageError(PadiffError, ValueError):
    """A call that cannot be meant: the message says what was expected and what was got."""


class SelectionError(UsageError):
    """An item of a white list, a black list or a layer map names no layer of the model."""


class OptionError(UsageError, TypeError):
    """A call does not have the option; the message names the nearest ones."""


class RunFolderError(PadiffError, OSError):
    """A run folder cannot be read, or holds something that must not be overwritten."""


class TensorFileError(RunFolderError):
    """One tensor of a run folder is missing, truncated, pickled or outside of the folder."""


class SketchOnlyError(PadiffError):
    """The values of a tensor are asked for of which a sketch is all that was recorded."""


class WriterError(PadiffError):
    """The background writer could not write a step; what was written before is intact."""


class UnwritableFolderError(RunFolderError, WriterError):
    """A run folder cannot be made or written to: the disk is full, it is read-only, ..."""


class NothingToCompareError(PadiffError):
    """Comparing nothing is an error, never a match."""


class RunsDifferError(PadiffError):
    """Raised in a training loop by ``on_diff="raise"``; ``report`` holds the step's report."""

    def __init__(self, message: str, report: object = None) -> None:
        super().__init__(message)
        self.report = report
