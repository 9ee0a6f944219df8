"""The errors that padiff raises on purpose.

PadiffError
├── UsageError          a call with wrong arguments (also a ValueError)
│   ├── SelectionError  an item of a list that matches no layer
│   └── OptionError     an option that a call does not have (also a TypeError)
├── RunFolderError      a run folder that cannot be read or must not be written (also an OSError)
│   └── TensorFileError a tensor of a run folder that is missing, truncated, pickled or outside of the folder
├── WriterError         a step that the background writer could not write (disk full, for example)
├── NothingToCompareError  two runs without a common step, or steps without a common quantity
└── RunsDifferError     a diff that a live comparison found with ``on_diff="raise"``
"""

from __future__ import annotations


class PadiffError(Exception):
    """Base of every error that padiff raises on purpose."""


class UsageError(PadiffError, ValueError):
    """A call has wrong arguments; the message states the expected and the received values."""


class SelectionError(UsageError):
    """An item of a white list, a black list or a layer map names no layer of the model."""


class OptionError(UsageError, TypeError):
    """A call does not have the option; the message names the nearest ones."""


class RunFolderError(PadiffError, OSError):
    """A run folder cannot be read, or holds something that must not be overwritten."""


class TensorFileError(RunFolderError):
    """One tensor of a run folder is missing, truncated, pickled or outside of the folder."""


class SketchOnlyError(PadiffError):
    """The values of a tensor can't be read, because only a sketch of the tensor was recorded."""


class WriterError(PadiffError):
    """The background writer could not write a step; earlier steps are intact."""


class UnwritableFolderError(RunFolderError, WriterError):
    """A run folder cannot be created or written to, for example because the disk is full or read-only."""


class NothingToCompareError(PadiffError):
    """Two runs or steps have nothing in common to compare, which is an error and never a match."""


class RunsDifferError(PadiffError):
    """A step differs, in a training loop with ``on_diff="raise"``; ``report`` holds the step's report."""

    def __init__(self, message: str, report: object = None) -> None:
        super().__init__(message)
        self.report = report
