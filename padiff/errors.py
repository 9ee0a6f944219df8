"""The errors that padiff raises on purpose.

PadiffError
├── UsageError          an invalid call (also a ValueError)
│   ├── SelectionError  an item of a list that matches no layer
│   └── OptionError     an option that a call does not have (also a TypeError)
├── RunFolderError      a run folder that cannot be read or must not be written (also an OSError)
│   └── TensorFileError one tensor of a run folder: missing, truncated, pickled, outside of the folder
├── SketchOnlyError     the values of a tensor of which only a sketch was recorded
├── WriterError         the background writer could not write (for example, the disk is full)
├── NothingToCompareError  two runs without a common step, or steps without a common quantity
└── RunsDifferError     a live comparison found a diff, and ``on_diff="raise"``

UnwritableFolderError is both a RunFolderError and a WriterError.
"""

from __future__ import annotations


class PadiffError(Exception):
    """Base of every error that padiff raises on purpose."""


class UsageError(PadiffError, ValueError):
    """An invalid call; the message gives the expected and the actual values."""


class SelectionError(UsageError):
    """An item of a white list, a black list or a layer map that matches no layer of the model."""


class OptionError(UsageError, TypeError):
    """An option that a call does not have; the message lists similar options."""


class RunFolderError(PadiffError, OSError):
    """A run folder that cannot be read, or that must not be overwritten."""


class TensorFileError(RunFolderError):
    """A tensor of a run folder that is missing, truncated, pickled or outside of the folder."""


class SketchOnlyError(PadiffError):
    """Access to the values of a tensor of which only a sketch was recorded."""


class WriterError(PadiffError):
    """A step that the background writer could not write; all steps before it are intact."""


class UnwritableFolderError(RunFolderError, WriterError):
    """A run folder that cannot be created or written to, for example because the disk is full or read-only."""


class NothingToCompareError(PadiffError):
    """Nothing to compare in two runs, which is an error and never a match."""


class RunsDifferError(PadiffError):
    """A diff in a training loop with ``on_diff="raise"``.

    Attributes:
        report: report of the step.
    """

    def __init__(self, message: str, report: object = None) -> None:
        super().__init__(message)
        self.report = report
