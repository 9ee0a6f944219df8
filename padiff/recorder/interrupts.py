"""Handling of Ctrl-C in hooks of backward."""

from __future__ import annotations


class Interrupts:
    """Handler that defers a Ctrl-C in backward, if the framework would turn the exception into another error.

    Args:
        raised_as_they_are: True if the framework passes exceptions of hooks on unchanged
            (`padiff.frameworks.hooking.Hooking`); nothing is deferred then.
    """

    def __init__(self, raised_as_they_are: bool) -> None:
        self._at_once, self._kept = raised_as_they_are, False

    def keep(self) -> None:
        """Defer a `KeyboardInterrupt`, or raise it again at once. Call this in the ``except`` block."""
        if self._at_once:
            raise
        self._kept = True

    def raise_kept(self) -> None:
        """Raise the deferred `KeyboardInterrupt`, if any."""
        if self._kept:
            self._kept = False
            raise KeyboardInterrupt
