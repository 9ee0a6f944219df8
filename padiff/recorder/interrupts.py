"""Ctrl-C in a hook of backward."""

from __future__ import annotations


class Interrupts:
    """Where the framework makes another error of what a hook raises in backward, keeps Ctrl-C for later.

    Args:
        raised_as_they_are: whether the framework does not (`padiff.frameworks.hooking.Hooking`).
    """

    def __init__(self, raised_as_they_are: bool) -> None:
        self._at_once, self._kept = raised_as_they_are, False

    def keep(self) -> None:
        """To be called while a `KeyboardInterrupt` is handled."""
        if self._at_once:
            raise
        self._kept = True

    def raise_kept(self) -> None:
        """Raise a Ctrl-C that was kept."""
        if self._kept:
            self._kept = False
            raise KeyboardInterrupt
